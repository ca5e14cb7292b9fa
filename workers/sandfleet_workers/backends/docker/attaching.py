"""Holding a container again that an earlier run of this node started, once it has proved to be that very one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.sandbox import Sandbox, Vital, open_pidfd
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.backends.docker.ways import Ways, problem_with

__all__ = ["Attacher"]

#: How long a sandbox may take to prove itself. One that somebody paused takes longer.
_PROVED_WITHIN_S = 10.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Attacher:
    """Finds the containers of one node again. What it is told comes from the node's journal, and is believed only as
    far as the engine and the container itself confirm it.

    Args:
        engine: Where they run.
        ways: Makes connections.
        labels: That all containers of this node carry.
        run_root: Below which run directories lie.
    """

    def __init__(self, engine: Engine, ways: Ways, labels: Mapping[str, str], run_root: Path) -> None:
        self._engine = engine
        self._ways = ways
        self._labels = labels
        self._run_root = run_root

    def attach(self, sandbox_id: str, ticket: Ticket) -> Sandbox:
        """The running sandbox of a ticket.

        Raises:
            StartFailed: ``reason`` gone or unreachable, as of `SandboxBackend.attach`. Nothing was changed.
        """
        state = self._running(ticket)
        with ExitStack() as undo, ExitStack() as always:
            run_fd = self._run_dir(Path(ticket.run_dir))
            always.callback(os.close, run_fd)
            vital = Vital(self._engine, ticket.container, open_pidfd(ticket.pid, ticket.container))
            undo.callback(vital.release)
            try:
                way = self._ways.into(sandbox_id, ticket, state, run_fd, vital)
            except StartFailed as exc:
                raise _unreachable(ticket, exc.message) from exc
            undo.callback(way.close)
            if problem := problem_with(way, _PROVED_WITHIN_S):
                if vital.ended():
                    raise _gone(ticket)
                raise _unreachable(ticket, problem)
            undo.pop_all()
        return Sandbox(ticket, way, vital, sandbox_id)

    def _running(self, ticket: Ticket) -> dict[str, Any]:
        """What the engine tells of it."""
        try:
            found = self._engine.inspect(ticket.container)
        except StartFailed as exc:
            raise _unreachable(ticket, exc.message) from exc
        if found is None:
            raise _gone(ticket)
        labels = (found.get("Config") or {}).get("Labels") or {}
        if found.get("Id") != ticket.container or not self._labels.items() <= labels.items():
            raise _unreachable(ticket, "its labels are not this node's")
        state = found.get("State") or {}
        if not state.get("Running") or state.get("StartedAt") != ticket.started_at or state.get("Pid") != ticket.pid:
            raise _gone(ticket)
        return found

    def _run_dir(self, path: Path) -> int:
        """The directory with its socket, opened from the node's own downwards: no name in it is followed if it is a
        link, and nobody else could have put another directory there."""
        try:
            below = path.relative_to(self._run_root.absolute()).parts
            if not below or ".." in below:
                raise StartFailed(f"{path} is no run directory of this node", reason="unreachable")
            fd = os.open(self._run_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in below:
                above = fd
                try:
                    fd = os.open(name, _DIRECTORY, dir_fd=above)
                finally:
                    os.close(above)
        except (OSError, ValueError) as exc:
            raise StartFailed(f"the run directory {path} cannot be opened: {exc}", reason="unreachable") from exc
        if os.fstat(fd).st_uid != os.geteuid():
            os.close(fd)
            raise StartFailed(f"the run directory {path} belongs to somebody else", reason="unreachable")
        return fd


def _gone(ticket: Ticket) -> StartFailed:
    return StartFailed(f"the container {ticket.name} does not run any more", reason="gone")


def _unreachable(ticket: Ticket, why: str) -> StartFailed:
    return StartFailed(f"the container {ticket.name} cannot be taken back: {why}", reason="unreachable")
