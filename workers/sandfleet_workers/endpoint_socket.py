"""Getting a socket to exactly one sandbox and to nobody else.

The directory that holds the socket is writable from inside the sandbox. Whatever lies at its name
may have been put there by an enemy: a symlink to a neighbour's socket, a regular file, a FIFO, a
server of his own. ▲ (a planted symlink led a worker into another tenant's sandbox)
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from sandfleet.errors import SandboxLost, SandfleetError
from sandfleet_workers.endpoint_http import Request, get

__all__ = ["Endpoint", "TcpEndpoint", "UnixEndpoint", "Unreachable", "new_challenge"]

#: As far as the kernel allows. A write of 1 MiB through a buffer of the usual size takes twice as long.
_SEND_BUFFER = 1024 * 1024
_PEERCRED = struct.Struct("3i")
_NOBODY_LISTENS = {errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTDIR, errno.ESTALE}


class Unreachable(Exception):
    """Nobody answers at the endpoint; whether the sandbox lives has to be asked elsewhere.

    ``gone`` is False when somebody is there but has no room (a full backlog, no descriptors left).
    """

    def __init__(self, reason: str, *, gone: bool) -> None:
        super().__init__(reason)
        self.gone = gone


class Endpoint(Protocol):
    """Where a sandboxd listens and how it proves that it is the one."""

    @property
    def token(self) -> str | None:
        """The bearer token every request carries, if any."""

    @property
    def chunked(self) -> bool:
        """Whether its answers may come in chunks."""

    def connect(self) -> socket.socket:
        """A new non-blocking socket, perhaps still connecting.

        Raises:
            Unreachable: Nobody listens there.
            SandboxLost: Something else has taken its place (``reason`` endpoint_replaced).
        """

    def hello(self, challenge: str) -> Request:
        """What a new connection is asked before anything else."""

    def proves(self, challenge: str, answer: Mapping[str, Any]) -> bool:
        """Whether ``answer`` is what this sandbox, and no other, says to `hello`."""

    def close(self) -> None:
        """Release what `connect` needs."""


def new_challenge() -> str:
    """A challenge no one has seen."""
    return secrets.token_hex(16)


def _replaced(what: str) -> SandfleetError:
    return SandboxLost(f"the sandbox's socket was replaced: {what}", reason="endpoint_replaced")


class _Keyed:
    key: bytes
    chunked: ClassVar[bool] = False

    def hello(self, challenge: str) -> Request:
        return get("/v1/sandfleet/hello", {"challenge": challenge})

    def proves(self, challenge: str, answer: Mapping[str, Any]) -> bool:
        proof = answer.get("proof")
        expected = hmac.new(self.key, bytes.fromhex(challenge), "sha256").hexdigest()
        return isinstance(proof, str) and hmac.compare_digest(expected.encode(), proof.encode("utf-8", "replace"))


@dataclass(slots=True)
class UnixEndpoint(_Keyed):
    """A unix socket in a directory the sandbox can write.

    Args:
        dir_fd: The directory, pinned when the sandbox was made; this object closes it.
        name: The socket's name in it.
        key: What sandboxd proves to know.
        uid: Whom the kernel must name as the other end; None where it cannot be known.
        pid: Its process, as this host numbers it, which counts where this process can see it; None takes any that
            proves the key.
        token: For a sandboxd that asks for one.
    """

    dir_fd: int
    name: str
    key: bytes = field(repr=False)
    uid: int | None = None
    pid: int | None = None
    token: str | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def connect(self) -> socket.socket:
        try:
            with self._lock:  # `close` may not give the directory's number away in between
                if self.dir_fd < 0:
                    raise Unreachable("the endpoint is closed", gone=False)
                target = os.open(self.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.dir_fd)
        except OSError as exc:
            raise Unreachable(f"socket: {exc.strerror}", gone=exc.errno in _NOBODY_LISTENS) from exc
        try:
            if not stat.S_ISSOCK(os.fstat(target).st_mode):
                raise _replaced("what lies there is no socket")
            return self._connect_to(target)
        finally:
            os.close(target)

    def _connect_to(self, target: int) -> socket.socket:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as exc:  # no descriptors left
            raise Unreachable(f"socket: {exc.strerror}", gone=False) from exc
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            # Through the descriptor: no second look at the name, and no limit of 108 bytes on its length.
            sock.connect(f"/proc/self/fd/{target}")
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            pid, uid, _gid = _PEERCRED.unpack(peer)
            if self.uid is not None and uid != self.uid:
                raise _replaced("another user's process listens there")
            # The kernel says 0 for a process of another pid namespace: this worker runs in a container itself.
            if self.pid is not None and pid not in (self.pid, 0):
                raise _replaced("another process listens there")
        except OSError as exc:
            sock.close()
            raise Unreachable(f"connect: {exc.strerror}", gone=exc.errno in _NOBODY_LISTENS) from exc
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        with self._lock:
            if self.dir_fd >= 0:
                os.close(self.dir_fd)
                self.dir_fd = -1


@dataclass(slots=True)
class TcpEndpoint(_Keyed):
    """A TCP port with a bearer token.

    Args:
        host: An address or name; a name is looked up on every connect.
        port: The port.
        key: What sandboxd proves to know.
        token: What it asks of us.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    token: str | None = field(repr=False)

    def connect(self) -> socket.socket:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
        except OSError as exc:
            raise Unreachable(f"{self.host}: {exc.strerror}", gone=False) from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise Unreachable(f"connect: {os.strerror(code)}", gone=code in _NOBODY_LISTENS)
        return sock

    def close(self) -> None:
        pass
