"""Sandboxes on the node itself: bubblewrap namespaces with sandboxd inside.

They share the host's kernel, so they are weaker than a container with a VM-like runtime and are
labelled so wherever they are shown. They die with their node. What each sees is told in
`sandfleet_workers.backends.bwrap`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from sandfleet.backends import Capability, Liveness, Operation, SandboxBackend, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.ids import new_op_id
from sandfleet_workers.backends import bwrap, local_dirs, local_host, local_process
from sandfleet_workers.backends.local_launch import Launcher, Limits
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import UnixEndpoint
from sandfleet_workers.waiter import READ, Waiter, shared_waiter

__all__ = ["LocalBackend", "LocalSettings", "LocalSettingsLike"]

log = logging.getLogger(__name__)

_PROBE_S = 2.0
#: How long "nobody listens" may take to turn into "it is dead": the kernel ends a namespace process by process.
_DYING_S = 0.2
_BURIED_WITHIN_S = 20.0


class LocalSettingsLike(Protocol):
    """The part of a node's settings that this backend reads."""

    @property
    def data_root(self) -> Path: ...
    @property
    def uid_base(self) -> int: ...
    @property
    def uid_count(self) -> int: ...
    @property
    def max_nproc(self) -> int: ...
    @property
    def nofile(self) -> int: ...
    @property
    def start_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of local sandboxes.

    Attributes:
        data_root: Where the node keeps its files.
        uid_base: First of the uids that sandboxes get when the worker is root. The default range lies
            above those of users, containers and systemd.
        uid_count: How many there are; an identity always gets the same one.
        max_nproc: Processes and threads a sandbox's user may have; enforced only when the worker is root.
        nofile: Open files per process.
        max_file_bytes: Largest single file; None sets no limit.
        tmp_bytes: Size of ``/tmp``; ``/run`` and ``/dev/shm`` get a quarter each.
        start_timeout_s: How long a start may take, in seconds.
    """

    data_root: Path = Path("/var/lib/sandfleet")
    uid_base: int = 1_900_000_000
    uid_count: int = 100_000_000
    max_nproc: int = 512
    nofile: int = 4096
    max_file_bytes: int | None = None
    tmp_bytes: int = 256 * 1024 * 1024
    start_timeout_s: float = 15.0

    @classmethod
    def of(cls, settings: Any) -> LocalSettings:
        """The settings another object has, by name; the defaults for what it lacks."""
        if isinstance(settings, cls):
            return settings
        found = {f.name: getattr(settings, f.name) for f in fields(cls) if getattr(settings, f.name, None) is not None}
        return cls(**found)


@dataclass(slots=True, eq=False)
class _Sandbox:
    process: local_process.SandboxProcess
    connection: EndpointConnection
    run_dir: Path
    buried: threading.Event = field(default_factory=threading.Event)


class LocalBackend(SandboxBackend):
    """Sandboxes in bubblewrap namespaces. A root worker runs each under a uid of its identity's own.

    A worker that is not root maps its own uid, and then cannot keep the sandbox from renaming its
    three directories (they have one owner), nor bound its processes.
    """

    name: ClassVar[str] = "local"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.SURVIVES_NODE,
        Capability.BLANKS,
    }
    isolation: ClassVar[str] = "namespaces (shares the host kernel)"

    def __init__(self, settings: Any, on_death: Callable[[str, str], None], waiter: Waiter | None = None) -> None:
        super().__init__(settings, on_death)
        self._local = LocalSettings.of(settings)
        self._waiter = waiter or shared_waiter()
        self._spawner = local_process.Spawner()
        self._launcher = Launcher()
        self._undertaker = ThreadPoolExecutor(2, thread_name_prefix="sandfleet-undertaker")
        self._sandboxes: dict[str, _Sandbox] = {}
        #: Ended, but something of them is left.
        self._dying: dict[str, _Sandbox] = {}
        self._lock = threading.Lock()

    @classmethod
    def check(cls) -> list[str]:
        return list(local_host.check_host())

    # --- the contract --------------------------------------------------------------------------

    def create(self, plan: SandboxPlan) -> EndpointConnection:
        if plan.identity is None:
            raise StartFailed("local sandboxes are not started ahead of their thread", reason="no_identity")
        self.destroy(plan.sandbox_id)
        uid = None
        if os.geteuid() == 0:
            uid = local_dirs.sandbox_uid(plan.identity.digest, self._local.uid_base, self._local.uid_count)
        key = secrets.token_bytes(32)
        with ExitStack() as undo:
            run_fd = self._prepare_run_dir(plan.run_dir, uid)
            undo.callback(local_dirs.remove_tree, plan.run_dir)
            undo.callback(os.close, run_fd)
            process = self._start(plan, uid, key, run_fd)
            undo.pop_all()
        who = os.geteuid() if uid is None else uid
        connection = self._connect(plan, UnixEndpoint(run_fd, bwrap.SOCKET, key, uid=who, pid=process.pid), process)
        sandbox = _Sandbox(process, connection, plan.run_dir)
        with self._lock:
            self._sandboxes[plan.sandbox_id] = sandbox
        self._waiter.register(process.pidfd, lambda _: self._ended(plan.sandbox_id, sandbox), READ)
        return connection

    def destroy(self, sandbox_id: str) -> None:
        with self._lock:
            sandbox = self._sandboxes.pop(sandbox_id, None)
            dying = self._dying.get(sandbox_id)
            if sandbox is not None:
                self._dying[sandbox_id] = sandbox
        if dying is not None:
            dying.buried.wait(_BURIED_WITHIN_S)
        if sandbox is not None:
            self._waiter.unregister(sandbox.process.pidfd)
            self._bury(sandbox_id, sandbox)

    def probe(self, sandbox_id: str) -> Liveness:
        with self._lock:
            sandbox = self._sandboxes.get(sandbox_id)
        # They die with their node, so one that this node does not hold cannot live.
        if sandbox is None or sandbox.process.is_dead():
            return Liveness.DEAD
        try:
            answer = sandbox.connection.perform(Operation(new_op_id(), "health", {}), _PROBE_S)
        except TimeoutError:
            return Liveness.UNKNOWN
        if answer.error is None:
            return Liveness.ALIVE
        return Liveness.DEAD if sandbox.process.is_dead() else Liveness.UNKNOWN

    def running(self) -> list[str]:
        with self._lock:
            return list(self._sandboxes)

    def pid_of(self, sandbox_id: str) -> int:
        """The host's pid of a sandbox's process 1.

        Raises:
            KeyError: No such sandbox runs.
        """
        with self._lock:
            return self._sandboxes[sandbox_id].process.pid

    def close(self) -> None:
        for sandbox_id in self.running():
            self.destroy(sandbox_id)
        self._undertaker.shutdown()
        self._spawner.close()
        self._launcher.close()

    # --- starting ------------------------------------------------------------------------------

    def _prepare_run_dir(self, run_dir: Path, uid: int | None) -> int:
        try:
            return local_dirs.prepare_run_dir(run_dir, uid)
        except OSError as exc:
            reason = "disk" if exc.errno in (28, 122) else "run_dir"
            raise StartFailed(f"the directory {run_dir} cannot be made: {exc.strerror}", reason=reason) from exc

    def _start(self, plan: SandboxPlan, uid: int | None, key: bytes, run_fd: int) -> local_process.SandboxProcess:
        local = self._local
        limits = Limits(
            nofile=local.nofile,
            nproc=local.max_nproc if uid is not None else None,
            file_bytes=local.max_file_bytes,
            tmp_bytes=local.tmp_bytes,
        )
        config = {"key": key.hex(), "env": dict(plan.spec.env), "cwd": bwrap.HOME}
        with self._launcher.prepared(plan, uid=uid, run_fd=run_fd, limits=limits) as launch:
            return local_process.start(
                self._spawner, launch, config=json.dumps(config).encode() + b"\n", timeout_s=local.start_timeout_s
            )

    def _connect(
        self, plan: SandboxPlan, endpoint: UnixEndpoint, process: local_process.SandboxProcess
    ) -> EndpointConnection:
        return EndpointConnection(
            endpoint,
            sandbox_id=plan.sandbox_id,
            liveness=lambda: self._liveness(process),
            waiter=self._waiter,
        )

    @staticmethod
    def _liveness(process: local_process.SandboxProcess) -> Liveness:
        return Liveness.DEAD if process.is_dead(_DYING_S) else Liveness.ALIVE

    # --- ending --------------------------------------------------------------------------------

    def _ended(self, sandbox_id: str, sandbox: _Sandbox) -> None:
        """Process 1 is gone (on the waiter's thread, which must not wait for anything)."""
        self._waiter.unregister(sandbox.process.pidfd)
        with self._lock:
            if self._sandboxes.get(sandbox_id) is not sandbox:
                return
            del self._sandboxes[sandbox_id]
            self._dying[sandbox_id] = sandbox
        self._undertaker.submit(self._report, sandbox_id, sandbox)

    def _report(self, sandbox_id: str, sandbox: _Sandbox) -> None:
        try:
            self._bury(sandbox_id, sandbox)
        finally:
            reason = sandbox.process.how_it_ended()
            log.warning("sandbox.died", extra={"sandbox_id": sandbox_id, "reason": reason})
            with self._lock:
                superseded = sandbox_id in self._sandboxes
            if not superseded:  # the death of an earlier one is no news about the one that runs now
                self.on_death(sandbox_id, reason)

    def _bury(self, sandbox_id: str, sandbox: _Sandbox) -> None:
        try:
            gone = sandbox.process.end()
            sandbox.connection.close()
            local_dirs.remove_tree(sandbox.run_dir)
            if not gone:
                log.error("sandbox.not_gone", extra={"sandbox_id": sandbox_id, "pid": sandbox.process.pid})
        finally:
            with self._lock:
                if self._dying.get(sandbox_id) is sandbox:
                    del self._dying[sandbox_id]
            sandbox.buried.set()
