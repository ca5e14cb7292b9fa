"""A Docker engine that can be taken away: a socket of our own in front of the real one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path

__all__ = ["EngineProxy"]


class EngineProxy:
    """Passes bytes between whoever connects to ``path`` and the engine, until it is told not to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = f"unix://{path}"
        self._engine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        #: The next answer to a request that begins so is thrown away, with its connection.
        self.lose_answer_to: bytes | None = None
        self.come_back()

    def come_back(self) -> None:
        """Answer again."""
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._begin(self._accept, self._listener)

    def go_away(self) -> None:
        """Refuse new connections and break the old ones."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._threads.clear()

    def _begin(self, work: object, *args: socket.socket) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._engine)
                with self._lock:
                    self._sockets += [client, engine]
                self._begin(self._pass_on, client, engine)

    def _pass_on(self, client: socket.socket, engine: socket.socket) -> None:
        losing = False
        with client, engine, contextlib.suppress(OSError):
            while True:
                for ready in select.select([client, engine], [], [])[0]:
                    data = ready.recv(65536)
                    if not data or (ready is engine and losing):
                        return
                    if ready is client and self.lose_answer_to and data.startswith(self.lose_answer_to):
                        self.lose_answer_to, losing = None, True
                    (engine if ready is client else client).sendall(data)
