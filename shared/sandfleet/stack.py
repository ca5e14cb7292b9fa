"""A whole fleet on this machine, as real processes: Redis, a scheduler and N nodes.

What ``sandfleet up``, the demo, the integration tests and the bench start::

    with Stack(nodes=2, lease_s=3.0) as stack:
        with SandboxProvider(stack.settings) as provider:
            ...
        stack.kill_node("node-1")

Children are configured by ``SANDFLEET_…`` environment variables alone, as on any other machine. They end when the
stack is stopped, when its process dies (the kernel sees to it), and when starting fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sandfleet import control, flower
from sandfleet.children import Child, Spawner, child_environ, end_all
from sandfleet.config import Settings
from sandfleet.embedded_redis import find_redis_server, redis_config
from sandfleet.errors import ConfigError, SandfleetError, StoreUnavailable, Unavailable
from sandfleet.ids import check_node_id
from sandfleet.left_behind import end_left_behind
from sandfleet.metrics import nth_address
from sandfleet.store import Store, open_store
from sandfleet.trees import remove_tree

__all__ = ["Stack", "child_environ"]

_GRACE_S = 10.0
_REDIS_TRIES = 5
_NO_NODES = _SCHEDULER, _REDIS, _FLOWER = "scheduler", "redis", "flower"


class Stack:
    """Redis, one scheduler and some nodes, as child processes.

    Args:
        nodes: How many (they are called ``node-1``, ``node-2``…), or their ids.
        redis_url: A Redis that runs already; None starts a private one with a password on a loopback port.
        durable: The private Redis writes every change to disk and finds it again after `start_redis`.
        state_dir: Where logs, sockets and the private Redis lie (a short path); kept. None is a temporary
            directory, removed by `stop`.
        env: Further environment of every child.
        node_env: Further environment of single nodes, by id: ``{"node-2": {"SANDFLEET_REPLICAS": "1"}}``.
        loglevel: Of scheduler and nodes.
        flower_port: Run Flower too, on this loopback port; 0 takes a free one. Task events are on then, and
            ``settings`` have its password: the one configured, else a new one.
        **settings: Fields of `Settings` on top of this process' environment: ``backend``, ``replicas``, ``lease_s``…
            Unless given, ``data_root`` and ``run_root`` lie in the state directory, and ``detach_s`` is 0.

    Attributes:
        nodes: id → process of every node that was started, ended ones too.
        redis, scheduler: Their processes; ``redis`` is None when it is not ours.
        flower_port: Where Flower listens; None without one.
        log_dir: One log per process: ``redis.log``, ``scheduler.log``, ``flower.log``, ``<node id>.log``.

    Not thread-safe: start and stop processes from one thread.
    """

    def __init__(
        self,
        nodes: int | Sequence[str] = 1,
        *,
        redis_url: str | None = None,
        durable: bool = False,
        state_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        node_env: Mapping[str, Mapping[str, str]] | None = None,
        loglevel: str = "INFO",
        flower_port: int | None = None,
        **settings: Any,
    ) -> None:
        ids = [f"node-{n + 1}" for n in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self.node_ids = tuple(check_node_id(node_id) for node_id in ids)
        self.loglevel = loglevel
        self.flower_port, self._flower_password = flower_port, flower.new_password()
        self._turns: dict[str, int] = {}
        self._redis_url, self._durable = redis_url, durable
        self._wanted_dir = state_dir
        self._env = dict(env or {})
        self._node_env = {node_id: dict(extra) for node_id, extra in (node_env or {}).items()}
        self._given = settings
        self._pid = os.getpid()
        self._children: dict[str, Child] = {}
        self._asked: set[str] = set()
        self._spawner: Spawner | None = None
        self._settings: Settings | None = None
        self._store: Store | None = None
        self.state_dir = self.log_dir = Path()

    # --- the whole -----------------------------------------------------------------------------

    def start(self, *, wait_s: float | None = 30.0) -> Stack:
        """Start everything; with ``wait_s``, return when the fleet takes work.

        Raises:
            ConfigError: A setting is wrong, or there is no Redis server to start.
            Unavailable: A process ended or did not get ready; the message has the end of its log.
        """
        try:
            self._prepare()
            if self._redis_url is None:
                self.start_redis()
            self._wait_for_redis(wait_s or 30.0)
            self.start_scheduler()
            for node_id in self.node_ids:
                self._start_node(node_id)
            if self.flower_port is not None:
                self.start_flower()
            if wait_s is not None:
                self.wait_ready(wait_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End nodes and scheduler, then Redis; remove the temporary directory. Safe to repeat.

        A second interrupt meanwhile kills what is left and is raised again.
        """
        if os.getpid() != self._pid:
            return  # a forked child: these processes are its parent's
        if self._store is not None:
            self._store.close()
            self._store = None
        self._asked.update(self._children)
        leaving = [child for name, child in self._children.items() if name != _REDIS]
        try:
            try:
                # Nodes and scheduler need Redis to leave in order, but not each other.
                end_all(leaving, grace_s=_GRACE_S)
            finally:
                # A second interrupt kills; and what was left running for a next run has none to wait for.
                left = self._settings is not None and self._settings.detach_s > 0
                if dead := [name for name, node in self.nodes.items() if node.returncode or left]:
                    end_left_behind(self.settings, dead)
            end_all([child for name, child in self._children.items() if name == _REDIS], grace_s=_GRACE_S)
        finally:
            for child in self._children.values():
                if child.running:
                    child.kill()
            if self._spawner is not None:
                self._spawner.close()
                self._spawner = None
            if self._wanted_dir is None and self._settings is not None:
                remove_tree(self.state_dir, ignore_errors=True)

    def wait_ready(self, deadline_s: float = 30.0) -> None:
        """Return when Redis answers, every node holds its lease and the scheduler's main loop answers.

        Raises:
            Unavailable: A process ended, or the deadline passed; the message has the end of the log at fault.
        """
        until = time.monotonic() + deadline_s
        self._wait_for_redis(deadline_s)
        for node_id in self.node_ids:
            child = self._children[node_id]
            self._until(lambda child=child: self._is_alive(child), until, child)  # type: ignore[misc]
        name = f"scheduler-{self.scheduler.pid}@{socket.gethostname()}"
        scheduler = self._children[_SCHEDULER]
        self._until(lambda: control.ping(self.settings, [name], timeout_s=0.3) == [name], until, scheduler)
        if port := self.flower_port:
            heard = [name, *(f"{node_id}@" for node_id in self.node_ids)]
            self._until(lambda: flower.hears(port, heard), until, self._children[_FLOWER])

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # --- what there is -------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings that reach this fleet: give them to `SandboxProvider`."""
        if self._settings is None:
            raise RuntimeError("the stack was not started")
        return self._settings

    @property
    def store(self) -> Store:
        """A connection to the fleet's state, opened on first use and closed by `stop`."""
        if self._store is None:
            self._store = open_store(
                self.settings.redis_url,
                self.settings.prefix,
                allow_insecure=self.settings.allow_insecure_redis,
            )
        return self._store

    @property
    def nodes(self) -> dict[str, subprocess.Popen[bytes]]:
        """id → process of every node that was started, ended ones too."""
        return {name: child.process for name, child in self._children.items() if name not in _NO_NODES}

    @property
    def scheduler(self) -> subprocess.Popen[bytes]:
        """The scheduler's process."""
        return self._children[_SCHEDULER].process

    @property
    def redis(self) -> subprocess.Popen[bytes] | None:
        """The private Redis' process."""
        return self._children[_REDIS].process if _REDIS in self._children else None

    def log(self, name: str) -> Path:
        """Where a process (``redis``, ``scheduler``, ``flower`` or a node id) writes."""
        return self.log_dir / f"{name}.log"

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines a process wrote."""
        return self._children[name].tail(lines)

    def crashed(self) -> dict[str, str]:
        """name → how it ended, for every process that ended without being asked to."""
        return {
            name: child.how_it_ended()
            for name, child in self._children.items()
            if name not in self._asked and not child.running
        }

    # --- single processes ----------------------------------------------------------------------

    def start_node(self, node_id: str, *, wait_s: float | None = 30.0) -> subprocess.Popen[bytes]:
        """Start a node (again); it takes over what its earlier run left running.

        Raises:
            Unavailable: It did not get ready within ``wait_s``; the message has the end of its log.
        """
        check_node_id(node_id)
        earlier = self._children.get(node_id)
        if earlier is not None and earlier.running:
            raise ConfigError(f"{node_id} is running already, as pid {earlier.pid}")
        child = self._start_node(node_id)
        if wait_s is not None:
            self._until(lambda: self._is_alive(child), time.monotonic() + wait_s, child)
        return child.process

    def kill_node(self, node_id: str) -> None:
        """End a node as a crash would (SIGKILL): nobody is told, its lease lapses."""
        self._kill(node_id)

    def stop_node(self, node_id: str, *, grace_s: float = _GRACE_S) -> None:
        """End a node as an operator would (SIGTERM): it answers what has not started and leaves. Its sandboxes
        end, or with ``detach_s`` run on for `start_node`."""
        self._asked.add(node_id)
        end_all([self._children[node_id]], grace_s=grace_s)

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """Start the scheduler (again)."""
        argv = [sys.executable, "-m", "sandfleet_scheduler", "--loglevel", self.loglevel]
        return self._spawn(_SCHEDULER, argv, child_environ(self._role_settings(_SCHEDULER), self._env)).process

    def start_flower(self) -> subprocess.Popen[bytes]:
        """Start Flower (again), on the port it had.

        Raises:
            ConfigError: It is not installed, or its port is taken.
        """
        flower.check_flower()
        self.flower_port = flower.free_port(self.flower_port or 0)
        argv = [sys.executable, "-m", "sandfleet.flower", "--port", str(self.flower_port)]
        return self._spawn(_FLOWER, argv, child_environ(self.settings, self._env)).process

    def kill_scheduler(self) -> None:
        """End the scheduler as a crash would."""
        self._kill(_SCHEDULER)

    def kill_redis(self) -> None:
        """End the private Redis as a crash would."""
        self._kill(_REDIS)

    def start_redis(self) -> None:
        """Start the private Redis (again, on the port it had).

        Raises:
            ConfigError: There is no server to start.
            Unavailable: It did not answer; the message has the end of its log.
        """
        binary = find_redis_server()
        for attempt in range(_REDIS_TRIES):
            config = self._redis_config()
            child = self._spawn(_REDIS, [binary, str(config)], os.environ)
            try:
                self._wait_for_redis(15.0)
                return
            except Unavailable:
                taken = not child.running and "in use" in child.tail()
                if not taken or attempt == _REDIS_TRIES - 1 or self._redis_url is not None:
                    raise
                # Somebody took the port between our look and the server's bind.
                config.unlink()
        raise AssertionError("unreachable")

    # --- within --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._spawner = Spawner()
        if self._wanted_dir is None:
            base = tempfile.gettempdir()
            self.state_dir = Path(tempfile.mkdtemp(prefix="sandfleet-", dir=base if len(base) < 32 else "/tmp"))
        else:
            self.state_dir = self._wanted_dir
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
        # Sandboxes of a root worker have uids of their own and may have to pass through, but not to look around.
        self.state_dir.chmod(0o711)
        remove_tree(self.state_dir / "tmp", ignore_errors=True)
        (self.state_dir / "tmp").mkdir(mode=0o711)
        self.log_dir = self.state_dir / "logs"
        self.log_dir.mkdir(exist_ok=True, mode=0o700)
        for earlier in self.log_dir.glob("*.log"):
            earlier.unlink()
        self._settings = self._settings_at(self._redis_url or "redis://127.0.0.1/0")
        self._settings.data_root.mkdir(parents=True, exist_ok=True, mode=0o711)

    def _settings_at(self, redis_url: str) -> Settings:
        own = {"data_root": self.state_dir / "data", "run_root": self.state_dir / "run", "detach_s": 0.0}
        loaded = Settings.load(**{**own, **self._given, "redis_url": redis_url})
        if self.flower_port is None:
            return loaded
        told = {"task_events": True, "flower_password": loaded.flower_password or self._flower_password}
        return loaded.model_copy(update=told)

    def _role_settings(self, name: str) -> Settings:
        """What a scheduler or node is told: nothing of Flower's password, and a metrics port of its own."""
        address = nth_address(self.settings.metrics_address, self._turns.setdefault(name, len(self._turns)))
        return self.settings.model_copy(update={"flower_password": "", "metrics_address": address})

    def _redis_config(self) -> Path:
        config, url = redis_config(self.state_dir / "redis", durable=self._durable)
        if url != self.settings.redis_url:
            self._settings = self._settings_at(url)
            if self._store is not None:
                self._store.close()
                self._store = None
        return config

    def _start_node(self, node_id: str) -> Child:
        argv = [sys.executable, "-m", "sandfleet_workers", "--node-id", node_id, "--loglevel", self.loglevel]
        # What a killed node leaves in its temporary directory goes with ours.
        extra = {"TMPDIR": str(self.state_dir / "tmp"), **self._env, **self._node_env.get(node_id, {})}
        return self._spawn(node_id, argv, child_environ(self._role_settings(node_id), extra))

    def _spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        if self._spawner is None:
            raise RuntimeError("the stack was not started")
        child = self._children[name] = self._spawner.start(name, argv, env=env, log=self.log(name))
        self._asked.discard(name)
        return child

    def _kill(self, name: str) -> None:
        self._asked.add(name)
        self._children[name].kill()

    def _wait_for_redis(self, within_s: float) -> None:
        last: list[SandfleetError] = []

        def answers() -> bool:
            try:
                return self.store.now_ms() > 0
            except StoreUnavailable as exc:
                last[:] = [exc]
                return False

        try:
            self._until(answers, time.monotonic() + within_s, self._children.get(_REDIS))
        except Unavailable:
            if last and _REDIS not in self._children:
                raise last[0] from None
            raise

    def _is_alive(self, child: Child) -> bool:
        return any(node.node_id == child.name and node.alive and node.pid == child.pid for node in self.store.nodes())

    def _until(self, fact: Callable[[], bool], until: float, child: Child | None) -> None:
        """Wait for a fact that ``child`` is to bring about."""
        while not fact():
            if child is not None and not child.running:
                raise child.failure(f"ended with {child.how_it_ended()} before it was ready")
            if time.monotonic() >= until:
                if child is None:
                    raise Unavailable("Redis did not answer in time")
                raise child.failure("did not get ready in time")
            time.sleep(0.02)
