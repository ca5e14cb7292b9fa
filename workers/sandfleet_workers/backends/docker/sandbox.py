"""One running container as the node holds it."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandfleet.backends import Liveness
from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.exec_connection import ExecConnection
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.endpoint import EndpointConnection

__all__ = ["Sandbox", "Vital", "open_pidfd"]


def open_pidfd(pid: int, container: str) -> int:
    """A descriptor of the container's process 1 that tells of its end at once; -1 where this process cannot see it.

    In another pid namespace than the engine's (a worker in a container) the same number is somebody else, or nobody.
    """
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    with suppress(OSError):
        if container in Path(f"/proc/{pid}/cgroup").read_text():
            return pidfd
    os.close(pidfd)
    return -1


class Vital:
    """Whether a container lives: by its process where that can be seen, else by asking the engine."""

    def __init__(self, engine: Engine, container: str, pidfd: int) -> None:
        self._engine = engine
        self._container = container
        self.pidfd = pidfd
        self._lock = threading.Lock()
        self._over = False

    def ended(self, wait_s: float = 0.0) -> bool | None:
        """Whether process 1 has ended; None where that cannot be seen from here."""
        with self._lock:
            if self._over:
                return True
            if self.pidfd < 0:
                return None
            # Of its own: `close` may come while we wait, and the number may be given away.
            pidfd = os.dup(self.pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(int(wait_s * 1000)))
        finally:
            os.close(pidfd)

    def look(self, wait_s: float = 0.0) -> Liveness:
        """Whether the container runs, waiting up to ``wait_s`` for one that is about to end."""
        ended = self.ended(wait_s)
        if ended is not None:
            return Liveness.DEAD if ended else Liveness.ALIVE
        try:
            found = self._engine.inspect(self._container, quickly=True)
        except StartFailed:
            return Liveness.UNKNOWN
        running = found is not None and bool(found.get("State", {}).get("Running"))
        return Liveness.ALIVE if running else Liveness.DEAD

    def close(self) -> None:
        """It has ended, for good."""
        with self._lock:
            self._over = True
        self.release()

    def release(self) -> None:
        """Look at it no more, whether it lives or not."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1


@dataclass(slots=True, eq=False)
class Sandbox:
    """What is held of a container that runs.

    Attributes:
        ticket: What its node knows of it.
        connection: The way in.
        vital: Whether it lives.
        sandbox_id: What the node calls it now.
        buried: Set once nothing of it is left.
    """

    ticket: Ticket
    connection: EndpointConnection | ExecConnection
    vital: Vital
    sandbox_id: str
    buried: threading.Event = field(default_factory=threading.Event)
