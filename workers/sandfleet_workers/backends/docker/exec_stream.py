"""One process that the engine started in a container, and its three streams over one connection.

The engine answers ``POST /exec/<id>/start`` by turning the HTTP connection into a raw one: what is written to it is the
process's stdin (its end is told by closing our half), what comes is cut into frames of eight bytes of header (stream,
three zeros, length) and their data.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import docker.errors
import requests.exceptions
import urllib3.exceptions

__all__ = ["STDERR", "STDOUT", "End", "ExecFailed", "ExecGone", "ExecProcess", "ExecRefused"]

STDOUT, STDERR = 1, 2
_READ_BYTES = 256 * 1024
_SEND_BYTES = 256 * 1024
#: Reads of what a process says that has nothing to say.
_MOST_LITTER = 64
#: How often a deadline that somebody else may have moved is looked at.
_TICK_S = 1.0
_UNREACHABLE = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError)

#: Takes what came on a stream; true when nothing more is wanted.
Feed = Callable[[int, bytes], bool]


class ExecFailed(Exception):
    """The engine lost track of a start: the process may or may not have begun."""


class ExecRefused(ExecFailed):
    """The engine started nothing."""


class ExecGone(ExecRefused):
    """The engine started nothing, because the container is not there or does not run."""


class End(Enum):
    """Why `ExecProcess.pump` came back."""

    ENOUGH = "enough"
    CLOSED = "closed"
    LATE = "late"


class ExecProcess:
    """A process in a container. `pump` and `close` belong to one thread, `abort` may be called from any.

    Args:
        api: A ``docker.APIClient``.
        container_id: Where it runs.
        argv: Program and arguments; must be encodable as UTF-8, because they travel as JSON.
        user: As for ``docker exec --user``.
        env: On top of the container's own.
        content: Its stdin; None for none at all.

    Raises:
        ExecRefused, ExecGone: Nothing was started.
        ExecFailed: It may have been started.
    """

    def __init__(
        self,
        api: Any,
        container_id: str,
        argv: list[str],
        *,
        user: str,
        env: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> None:
        self._api = api
        try:
            # Never its WorkingDir, by which one once escaped (CVE-2024-21626): commands change their directory inside.
            options = {"stdin": content is not None, "user": user, "environment": dict(env or {})}
            self.id = str(api.exec_create(container_id, argv, **options)["Id"])
        except docker.errors.APIError as exc:
            kind = ExecGone if exc.status_code in (404, 409) else ExecRefused
            raise kind(_told(exc)) from exc
        except (docker.errors.DockerException, *_UNREACHABLE) as exc:
            raise ExecRefused(_told(exc)) from exc
        try:
            opened = api.exec_start(self.id, socket=True)
        except docker.errors.APIError as exc:
            raise (ExecGone if exc.status_code in (404, 409) else ExecRefused)(_told(exc)) from exc
        except (docker.errors.DockerException, *_UNREACHABLE) as exc:
            raise ExecFailed(_told(exc)) from exc
        self._opened = opened
        self._response = getattr(opened, "_response", None)
        self._socket: socket.socket = getattr(opened, "_sock", opened)
        self._socket.settimeout(0)
        self._frames = _Frames(self._read_ahead())
        self._unsent = memoryview(content or b"")
        self._half_open = content is not None
        self._lock = threading.Lock()
        self._closed = False

    def _read_ahead(self) -> bytes:
        """What the HTTP client has read beyond the header of the answer."""
        buffered = getattr(getattr(getattr(self._response, "raw", None), "_fp", None), "fp", None)
        if buffered is None:
            return b""
        try:
            waiting = len(buffered.peek(1) or b"")  # asks the socket too if there is nothing, which does not block
        except ssl.SSLWantReadError:
            return b""
        return bytes(buffered.read(waiting)) if waiting else b""

    def pump(self, feed: Feed, until: Callable[[], float]) -> End:
        """Move bytes both ways until ``feed`` has enough, the other end closes or the time has come.

        Args:
            feed: Takes what comes.
            until: The deadline on `time.monotonic`; asked again from time to time.
        """
        if self._frames.deliver(b"", feed):
            return End.ENOUGH
        poller = select.poll()
        while True:
            left_s = until() - time.monotonic()
            if left_s <= 0:
                return End.LATE
            sending = select.POLLOUT if self._half_open else 0
            poller.register(self._socket, select.POLLIN | sending)
            ready = poller.poll(min(left_s, _TICK_S) * 1000)
            if not ready:
                continue
            if ready[0][1] & select.POLLOUT:
                self._send()
            if ready[0][1] & ~select.POLLOUT and (end := self._receive(feed)) is not None:
                return end

    def _receive(self, feed: Feed) -> End | None:
        """Take what is there, which for TLS may be more than the descriptor tells of."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None
            except (OSError, ValueError):
                return End.CLOSED
            if not data:
                return End.CLOSED
            if self._frames.deliver(data, feed):
                return End.ENOUGH
            # No further than that: who writes faster than this reads must not keep us from the deadline.
            if not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                return None

    def _send(self) -> None:
        try:
            if self._unsent:
                sent = self._socket.send(self._unsent[:_SEND_BYTES])
                self._unsent = self._unsent[sent:]
            if not self._unsent:
                self._half_open = False
                if not isinstance(self._socket, ssl.SSLSocket):  # TLS knows no half of a connection: see `tells_end`
                    self._socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:  # nobody reads any more; how the process ends is still to be heard
            self._half_open = False

    @staticmethod
    def tells_end(api: Any) -> bool:
        """Whether a process that this client starts is told of the end of its stdin."""
        return not str(api.base_url).startswith("https:")

    def exit_code(self) -> int | None:
        """What the engine says it ended with; None when it does not know (yet)."""
        try:
            code = self._api.exec_inspect(self.id).get("ExitCode")
        except (docker.errors.DockerException, *_UNREACHABLE):
            return None
        return code if isinstance(code, int) else None

    def write(self, data: bytes) -> bool:
        """Hand a few bytes to a process that is never pumped; false when it has ended."""
        with self._lock:
            try:
                for _ in range(_MOST_LITTER):
                    if not self._socket.recv(_READ_BYTES):
                        break
                return False  # it has ended, or somebody else writes in its name
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            except (OSError, ValueError):
                return False
            try:
                return self._socket.send(data) == len(data)
            except OSError:
                return False

    def abort(self) -> None:
        """Let `pump` see the end of the connection."""
        with self._lock:
            if not self._closed:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        """Give the connection back; what runs in the container runs on."""
        with self._lock:
            self._closed = True
            if self._response is not None:
                self._response.close()
            self._opened.close()
            self._socket.close()


class _Frames:
    """Takes the engine's frames apart, however the bytes come."""

    def __init__(self, first: bytes) -> None:
        self._header = bytearray()
        self._stream = self._left = 0
        self._first = first

    def deliver(self, data: bytes, feed: Feed) -> bool:
        """Hand on what came; true when ``feed`` has enough.

        Raises:
            ExecFailed: These are no frames.
        """
        view = memoryview(self._first + data)
        self._first = b""
        while view:
            if not self._left:
                missing = 8 - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < 8:
                    break
                self._stream, self._left = struct.unpack(">BxxxI", self._header)
                self._header.clear()
                if self._stream > STDERR:
                    raise ExecFailed(f"the engine sent a frame of stream {self._stream}")
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if feed(self._stream, bytes(piece)):
                return True
        return False


def _told(exc: BaseException) -> str:
    text = exc.explanation if isinstance(exc, docker.errors.APIError) and exc.explanation else str(exc)
    return str(text)[:500]
