"""Starting a container and waiting until it has proved to be the one: all or nothing is left."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandfleet.backends import SandboxPlan
from sandfleet.errors import SandfleetError, StartFailed
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.docker.deaths import how_it_ended
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.hostconfig import HOME, RUN_DIR, USER_DATA, Bind, Place, container_body
from sandfleet_workers.backends.docker.output import Output, Silence
from sandfleet_workers.backends.docker.policy import Policy
from sandfleet_workers.backends.docker.program import Program, prepared_run_dir
from sandfleet_workers.backends.docker.sandbox import Sandbox, Vital, open_pidfd
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.backends.docker.ways import Ways, address_in, problem_with
from sandfleet_workers.backends.seccomp import filter_program
from sandfleet_workers.endpoint import EndpointConnection

__all__ = ["Launch", "Starter", "ticket_of"]

log = logging.getLogger("sandfleet.node")

_CONFIG = "config"
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """One container to be started.

    Attributes:
        name: Of the container.
        labels: Whose it is.
        policy: What it may be; its image by id.
        image: The name its image has.
        program: What runs in it.
        network: The engine's name for its network.
        port: Where sandboxd listens; None: at a socket in the run directory.
        env: Of every command; may be secret.
    """

    name: str
    labels: Mapping[str, str]
    policy: Policy
    image: str
    program: Program
    network: str
    port: int | None
    env: Mapping[str, str]


class Starter:
    """Starts the containers of one node.

    Args:
        engine: Where.
        ways: Makes the connections.
        host_uid: Who sandboxes are on the host; None where that is the worker itself.
        timeout_s: How long a container may take to answer, in seconds.
        orphan_s: How long a container goes on that no node is connected to, in seconds; 0: for ever.
    """

    def __init__(
        self, engine: Engine, ways: Ways, host_uid: int | None, timeout_s: float, orphan_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._ways = ways
        self._host_uid = host_uid
        self._timeout_s = timeout_s
        self._orphan_s = orphan_s

    def start(self, plan: SandboxPlan, launch: Launch) -> Sandbox:
        """The running sandbox of a plan; it has proved to be the one.

        Raises:
            StartFailed: Nothing of it is left.
        """
        key = secrets.token_bytes(32)
        token = secrets.token_urlsafe(32) if launch.port is not None else None
        with ExitStack() as undo, ExitStack() as always:
            undo.callback(local_dirs.remove_tree, plan.run_dir)
            run_fd = prepared_run_dir(plan.run_dir, self._host_uid)
            always.callback(os.close, run_fd)
            os.close(local_dirs.open_user_data(plan.user_data, self._host_uid))
            if launch.program.python:
                config = {**_config(key, token, launch.env), "orphan_s": self._orphan_s}
                self._leave_config(run_fd, config)
            container = self._started(launch, _binds(plan, launch.program), undo)
            state = self._running(container)
            vital = Vital(self._engine, container, open_pidfd(int(state["State"].get("Pid") or 0), container))
            undo.callback(vital.close)
            ticket = ticket_of(plan, launch, state, key=key, token=token)
            way = self._ways.into(plan.sandbox_id, ticket, state, run_fd, vital)
            undo.callback(way.close)
            if isinstance(way, EndpointConnection):
                self._prove(way, launch, state)
            if self._host_uid is not None:
                # sandboxd has its socket; from here on nobody in the sandbox can put anything else in its place.
                os.fchown(run_fd, os.geteuid(), os.getegid())
                os.fchmod(run_fd, 0o755)
            undo.pop_all()
        return Sandbox(ticket, way, vital, plan.sandbox_id)

    def undo(self, sandbox: Sandbox) -> None:
        """Leave nothing of one that was started a moment ago and that nobody is to have."""
        sandbox.connection.close()
        sandbox.vital.close()
        self._discard(sandbox.ticket.container)
        local_dirs.remove_tree(Path(sandbox.ticket.run_dir))

    def probe(self, name: str, body: Mapping[str, Any], timeout_s: float) -> int | None:
        """The exit code of a container that runs once and is removed; None when it did not end in time.

        Raises:
            StartFailed: It does not start.
        """
        with ExitStack() as undo:
            with self._engine.starting():
                container = self._engine.create(name, body)
                undo.callback(self._discard, container)
                self._engine.start(container)
            return self._engine.wait(container, timeout_s)

    # --- one step after the other --------------------------------------------------------------

    def _leave_config(self, run_fd: int, config: Mapping[str, Any]) -> None:
        """What sandboxd reads and removes first. Secrets go this way: the engine tells labels, argv and environment."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(_CONFIG, flags, 0o400, dir_fd=run_fd)
            with os.fdopen(fd, "wb") as file:
                file.write(json.dumps(config).encode() + b"\n")
                if self._host_uid is not None:
                    os.fchown(fd, self._host_uid, self._host_uid)
        except OSError as exc:
            reason = "disk" if exc.errno in (28, 122) else "run_dir"
            raise StartFailed(f"the run directory cannot be written: {exc.strerror}", reason=reason) from exc

    def _started(self, launch: Launch, binds: tuple[Bind, ...], undo: ExitStack) -> str:
        place = Place(
            labels=launch.labels,
            binds=binds,
            entrypoint=launch.program.entrypoint(launch.port),
            network=launch.network,
            init=not launch.program.python,
            cgroup_v2=self._engine.facts.cgroup_v2,
        )
        body = container_body(launch.policy, place)
        with self._engine.starting():
            deadline = time.monotonic() + self._timeout_s
            container = self._engine.create(launch.name, body)
            undo.callback(self._discard, container)
            if not launch.program.python:
                self._engine.start(container)
                return container
            with closing(self._engine.attach(container)) as output:
                self._engine.start(container)
                self._wait_until_ready(container, output, deadline, launch.policy)
        return container

    def _wait_until_ready(self, container: str, output: Output, deadline: float, policy: Policy) -> None:
        try:
            line = output.line(deadline)
        except Silence:
            raise StartFailed(
                f"the sandbox did not become ready within {self._timeout_s:g} s", reason="timeout", stderr=output.told
            ) from None
        if line is not None and line.split()[:1] == ["ready"]:
            return
        output.drain(_LAST_WORDS_S)
        self._engine.wait(container, _LAST_WORDS_S)
        found = self._engine.inspect(container)
        how = how_it_ended(None if found is None else found.get("State"))
        if how == "out of memory":
            raise StartFailed(
                f"{policy.memory_bytes} bytes of memory are too few to start a sandbox", reason="out_of_memory"
            )
        raise StartFailed(
            f"the sandbox did not start, it {how}: {output.told or 'no message'}",
            reason="sandboxd_failed",
            stderr=output.told,
        )

    def _running(self, container: str) -> dict[str, Any]:
        found = self._engine.inspect(container)
        state = (found or {}).get("State") or {}
        if found is None or not state.get("Running"):
            how = how_it_ended(None if found is None else state)
            raise StartFailed(f"the sandbox ended while it started: {how}", reason="died")
        return found

    def _prove(self, way: EndpointConnection, launch: Launch, state: Mapping[str, Any]) -> None:
        """Wait for the first answer, before which nothing of the thread's can run.

        Raises:
            StartFailed: None came, or somebody else's.
        """
        problem = problem_with(way, self._timeout_s)
        if not problem:
            return
        if launch.port is not None:
            where = f"{address_in(state, launch.network)}:{launch.port}"
            hint = f"a worker in a container must be on the network {launch.network} to reach {where}"
        elif launch.policy.runtime:
            hint = f"runtime {launch.policy.runtime} must hand sockets out to the host (runsc: --host-uds=create)"
        else:
            hint = "look at the engine's log"
        raise StartFailed(f"the sandbox started and cannot be reached ({problem}); {hint}", reason="unreachable")

    def _discard(self, container: str) -> None:
        """What was not completed goes; what does not go is a leftover that the node looks for later."""
        try:
            self._engine.remove(container)
        except SandfleetError as exc:
            log.warning("container.not_removed", extra={"container": container, "error": str(exc)})


def ticket_of(plan: SandboxPlan, launch: Launch, state: Mapping[str, Any], *, key: bytes, token: str | None) -> Ticket:
    """What is kept of a container that was just started; ``state`` is what the engine tells of it."""
    by_exec = not launch.program.python
    return Ticket(
        name=launch.name,
        container=str(state["Id"]),
        started_at=str(state["State"].get("StartedAt") or ""),
        pid=int(state["State"].get("Pid") or 0),
        image=launch.image,
        image_id=launch.policy.image,
        transport="exec" if by_exec else "unix" if launch.port is None else "tcp",
        run_dir=str(plan.run_dir.absolute()),
        user_data=str(plan.user_data.absolute()),
        network=launch.network,
        port=launch.port,
        user=launch.policy.user,
        key=key.hex(),
        token=token,
        env=dict(launch.env) if by_exec else {},
    )


def _config(key: bytes, token: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """What sandboxd is told. The filter is beside the engine's own, and is the same that local sandboxes have."""
    seccomp = filter_program()
    told = {"key": key.hex(), "token": token, "env": dict(env), "cwd": HOME}
    return told if seccomp is None else {**told, "seccomp": seccomp.hex()}


def _binds(plan: SandboxPlan, program: Program) -> tuple[Bind, ...]:
    return (
        Bind(str(plan.user_data), USER_DATA, read_only=False),
        *(Bind(str(host), target, read_only) for host, target, read_only in plan.mounts),
        Bind(str(plan.run_dir), RUN_DIR, read_only=False),
        *program.binds,
    )
