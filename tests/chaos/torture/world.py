"""The fleet under torture: its processes, who starts them again, and what is known of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import redis

from sandfleet.errors import SandfleetError
from sandfleet.store import Store, open_store
from tests.chaos.dying import importable
from tests.chaos.fleet import Process
from tests.services import SESSION_VARIABLE, RedisServer, wait_until

__all__ = ["LEASE_S", "Options", "World"]

LEASE_S = 6.0
"""Long enough for a node that is started at once to take back what its killed run held, on a busy machine, too."""
READY_S = 60.0
MACHINES = ("a", "b")


@dataclass(frozen=True)
class Options:
    """What the torture was told."""

    seconds: float
    backend: str = "docker"
    nodes: int = 3
    clients: int = 3
    threads: int = 3
    replicas: int = 3
    conversations: int = 8
    #: How many of them ask for ``restore`` when their machine is gone.
    roaming: int = 2
    think_s: float = 0.3
    seed: int = 0
    sabotage: bool = False
    #: Names of faults (methods of `Faults`), each as likely as the others; empty: all, by weight.
    faults: tuple[str, ...] = ()


@dataclass
class Role:
    """A process that is to run, whichever it is now."""

    name: str
    argv: list[str]
    env: dict[str, str]
    process: Process | None = None
    turns: int = 0
    #: When it is to be started again; it is down on purpose until then.
    again_at: float = 0.0
    stopped: bool = False
    #: Open file descriptors when it was ready, by pid.
    fds: dict[int, int] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.running


class World:
    """Redis, schedulers, nodes and clients; everything is started from the thread that made this."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.rng = random.Random(options.seed)
        self.session = uuid.uuid4().hex
        self.redis = RedisServer(directory / "redis", durable=True)
        self.redis_down = False
        self.flushes = 0
        self.killed_runs: list[str] = []
        self.runs: list[str] = []
        self.unexpected: list[str] = []
        names = [f"{MACHINES[number % 2]}{number // 2 + 1}" for number in range(options.nodes)]
        self.nodes = {name: self._node(name) for name in sorted(names)}
        self.schedulers = {name: Role(name, ["-m", "sandfleet_scheduler"], self._env("a")) for name in ("s1", "s2")}
        self.clients = {f"c{number + 1}": self._client(f"c{number + 1}") for number in range(options.clients)}
        self._flushed_at_start: dict[str, int] = {}
        self._store: Store | None = None

    # --- what there is -------------------------------------------------------------------------

    def data_root(self, machine: str) -> Path:
        return self.directory / machine / "data"

    @property
    def data_roots(self) -> list[Path]:
        return [self.data_root(machine) for machine in MACHINES if self.data_root(machine).exists()]

    @property
    def deployments(self) -> list[str]:
        """The data ids, which containers carry as a label."""
        return [(root / "data-id").read_text().strip() for root in self.data_roots if (root / "data-id").exists()]

    @property
    def conversations(self) -> list[str]:
        return [f"talk-{number}" for number in range(self.options.conversations)]

    @property
    def roaming(self) -> list[str]:
        return self.conversations[: self.options.roaming]

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_store(self.redis.url, "sandfleet:")
        return self._store

    def broker(self) -> redis.Redis:
        """A raw connection, for what only an operator or a network does."""
        return redis.Redis.from_url(self.redis.url, client_name="torture", socket_timeout=5)

    def containers(self, *, running: bool = False) -> list[str]:
        """Names of the fleet's containers."""
        found = []
        for deployment in self.deployments if self.options.backend == "docker" else ():
            argv = ["docker", "ps", "--format", "{{.Names}}", "--filter", f"label=sandfleet.deployment={deployment}"]
            done = subprocess.run(
                argv if running else [*argv, "-a"], check=True, capture_output=True, text=True, timeout=30
            )
            found += done.stdout.split()
        return sorted(found)

    # --- roles ---------------------------------------------------------------------------------

    def _env(self, machine: str, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SANDFLEET_")}
        kept.pop("REDIS_URL", None)
        return {
            **kept,
            SESSION_VARIABLE: self.session,
            **importable(),
            "PYTHONUNBUFFERED": "1",
            "SANDFLEET_CONFIG": os.devnull,
            "SANDFLEET_REDIS_URL": self.redis.url,
            "SANDFLEET_DATA_ROOT": str(self.data_root(machine)),
            "SANDFLEET_RUN_ROOT": str(self.directory / machine / "run"),
            "SANDFLEET_BACKEND": self.options.backend,
            "SANDFLEET_LEASE_S": str(LEASE_S),
            **more,
        }

    def _node(self, name: str) -> Role:
        limits = {
            "SANDFLEET_REPLICAS": str(self.options.replicas),
            "SANDFLEET_BLANK_POOL": "1",
            "SANDFLEET_IDLE_TIMEOUT_S": "15",
            "SANDFLEET_DETACH_S": "20",
            "SANDFLEET_DRAIN_TIMEOUT_S": "2",
            "SANDFLEET_MIN_FREE_BYTES": "0",
            "SANDFLEET_CHECKPOINT_URL": f"file://{self.directory}/checkpoints",
            "SANDFLEET_CHECKPOINT_EVERY_S": "5",
        }
        return Role(name, ["-m", "sandfleet_workers", "--node-id", name], self._env(name[0], **limits))

    def _client(self, name: str) -> Role:
        return Role(name, ["-m", "tests.chaos.torture.client"], self._env("a"))

    def _argv(self, role: Role) -> list[str]:
        if role.name not in self.clients:
            return role.argv
        run = f"{role.name}.{role.turns}"
        options = self.options
        argv = [*role.argv, run, "--directory", str(self.directory), "--seed", str(options.seed)]
        argv += ["--threads", str(options.threads), "--think-s", str(options.think_s)]
        argv += ["--conversations", ",".join(self.conversations), "--roaming", ",".join(self.roaming)]
        earlier = self.directory / "intents" / f"{role.name}.{role.turns - 1}.jsonl"
        if earlier.exists() and self._flushed_at_start.get(role.name) == self.flushes:
            argv += ["--repeat", str(earlier)]
        self._flushed_at_start[role.name] = self.flushes
        self.runs.append(run)
        return argv

    def start(self, role: Role) -> None:
        """Start it (again)."""
        role.turns += 1
        log = self.directory / "logs" / f"{role.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        role.process = Process(role.name, self._argv(role), role.env, log)
        role.again_at, role.stopped = 0.0, False

    def run_of(self, role: Role) -> str:
        return f"{role.name}.{role.turns}"

    @property
    def roles(self) -> list[Role]:
        return [*self.nodes.values(), *self.schedulers.values(), *self.clients.values()]

    # --- the whole -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everything; return when every node holds its lease."""
        for machine in MACHINES:
            (self.directory / machine).mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o711)
        self.redis.start()
        for role in [*self.schedulers.values(), *self.nodes.values()]:
            self.start(role)
        self.wait_for_nodes()
        for role in self.clients.values():
            self.start(role)

    def alive(self) -> set[str]:
        """Ids of the nodes that hold their lease and run as the processes we started."""
        pids = {role.process.pid for role in self.nodes.values() if role.process is not None and role.running}
        return {view.node_id for view in self.store.nodes() if view.alive and view.pid in pids}

    def wait_for_nodes(self) -> None:
        def all_alive() -> bool:
            self.supervise()
            assert not any(role.again_at for role in self.roles), "somebody is about to end, or to begin"
            assert self.alive() == set(self.nodes)
            return True

        wait_until(all_alive, READY_S, story=self.story)

    def supervise(self) -> None:
        """Start what is due; what ended without being asked to is started again, as systemd would."""
        now = time.monotonic()
        for role in self.roles:
            if role.running or role.process is None:
                continue
            if role.again_at == 0.0:
                self.unexpected.append(f"{role.name} ended with {role.process.popen.returncode}")
                if role.name in self.clients:
                    self.unexpected.append(role.process.tail())
                role.again_at = now + 1.0
            elif now >= role.again_at:
                self.start(role)

    def heal(self) -> None:
        """Let everything run again: wake up who sleeps, start who is down."""
        if self.redis_down:
            self.redis.start()
            self.redis_down = False
        for role in self.roles:
            if role.stopped and role.process is not None and role.running:
                role.process.send(signal.SIGCONT)
                role.stopped = False
            if not role.running:
                role.again_at = time.monotonic()
        self.wait_for_nodes()

    def end_clients(self, deadline_s: float) -> None:
        """Tell the clients to finish; those that do not within the deadline are killed, and judged."""
        running = [role.process for role in self.clients.values() if role.process is not None and role.running]
        for process in running:
            process.send(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(process.running for process in running), deadline_s)
        for process in running:
            if process.running:
                self.unexpected.append(f"{process.name} did not end")
                process.kill()

    def end_nodes(self, deadline_s: float = 40.0) -> None:
        """Tell all nodes to end and wait for it."""
        processes = [role.process for role in self.nodes.values() if role.process is not None]
        for process in processes:
            if process.running:
                process.send(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(process.running for process in processes), deadline_s)
        for process in processes:
            if process.running:
                self.unexpected.append(f"{process.name} did not end")
                process.kill()

    def close(self) -> None:
        """End whatever still runs, hard."""
        if self._store is not None:
            self._store.close()
            self._store = None
        for role in self.roles:
            if role.process is not None:
                role.process.kill()
        self.redis.kill()
        if left := self.containers():
            subprocess.run(["docker", "rm", "-f", *left], check=False, capture_output=True)

    def story(self) -> str:
        """Who is there, and everybody's last words."""
        lines = []
        with contextlib.suppress(SandfleetError, AssertionError):
            for node in self.store.nodes():
                lines.append(f"node {node.node_id} {node.state} alive={node.alive} places={node.places}")
            lines += [f"sandbox {info.sandbox_id} {info.state} {info.node_id}" for info in self.store.sandboxes()]
        lines += [role.process.tail(12) for role in self.roles if role.process is not None]
        return "\n".join(lines)
