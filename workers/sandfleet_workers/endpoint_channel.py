"""One socket to a sandboxd: proves the other end, sends one request at a time, parses the answers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from sandfleet.errors import SandboxLost, SandfleetError
from sandfleet_workers.endpoint_http import BadReply, Reply, Request, ResponseParser, complete, json_of
from sandfleet_workers.endpoint_socket import Endpoint, new_challenge
from sandfleet_workers.waiter import READ, WRITE, Waiter

if TYPE_CHECKING:
    from sandfleet_workers.endpoint import Call

__all__ = ["Channel", "Owner"]

_RECV = 256 * 1024
#: Less than half of a socket's send buffer, or the kernel cuts a piece into two and sleeps between them.
_SEND = 128 * 1024
_HELLO_CAP = 16 * 1024


class Owner(Protocol):
    """Who hears how requests end. Called without the channel's lock."""

    def on_reply(self, channel: Channel, call: Any, reply: Reply, *, reusable: bool) -> None: ...

    def on_broken(self, channel: Channel, why: str, error: SandfleetError | None = None) -> None: ...

    def on_nonsense(self, channel: Channel, exc: BadReply) -> None: ...


class Channel:
    """A connection of its own to sandboxd. `launch` and `kill` from any thread, the rest on the waiter's.

    Raises:
        Unreachable, SandboxLost: From the endpoint.
    """

    __slots__ = (
        "_challenge",
        "_dead",
        "_hello",
        "_hello_s",
        "_lock",
        "_out",
        "_owner",
        "_parser",
        "_proves",
        "_registered",
        "_request",
        "_sock",
        "_token_line",
        "_verified",
        "_waiter",
        "_writing",
        "call",
        "overdue_at",
    )

    def __init__(self, owner: Owner, endpoint: Endpoint, waiter: Waiter, hello_s: float) -> None:
        self._sock = endpoint.connect()
        self._owner = owner
        self._waiter = waiter
        self._proves = endpoint.proves
        self._token_line = f"Authorization: Bearer {endpoint.token}\r\n".encode() if endpoint.token else b""
        self._challenge = new_challenge()
        self._hello = endpoint.hello(self._challenge)
        self._hello_s = hello_s
        self._parser = ResponseParser(chunked=endpoint.chunked)
        self._lock = threading.Lock()
        self._out: list[memoryview] = []
        self._request: Request | None = None
        self._verified = self._registered = self._writing = self._dead = False
        self.call: Call | None = None
        self.overdue_at = 0.0

    def launch(self, call: Call, request: Request) -> bool:
        """Send the request, after the proof on a new socket. False if the socket is dead and nothing went out."""
        with self._lock:
            if self._dead:
                return False
            self.call, self._request = call, request
            if self._verified:
                if self._begin(request):
                    return True
                self.call = None
                return False
            self.overdue_at = time.monotonic() + self._hello_s
            self._parser.expect(_HELLO_CAP)
            self._out = self._pieces(self._hello)
            self._try_flush()
            self._writing = bool(self._out)
            self._waiter.register(self._sock.fileno(), self._ready, READ | WRITE if self._writing else READ)
            self._registered = True
            return True

    def kill(self) -> Call | None:
        """Close the socket; returns the call that was out, which is the caller's from now on."""
        with self._lock:
            if not self._dead:
                self._dead = True
                if self._registered:
                    self._waiter.unregister(self._sock.fileno())
                self._sock.close()
            call, self.call = self.call, None
            self._out = []
            return call

    def _pieces(self, request: Request) -> list[memoryview]:
        pieces = [memoryview(complete(request.head, self._token_line))]
        if request.body is not None:
            pieces.append(request.body)
        return pieces

    def _begin(self, request: Request) -> bool:
        """Send what the socket takes now and leave the rest to the waiter. False: dead, nothing went out."""
        self.overdue_at = time.monotonic() + request.guard_s
        self._parser.expect(request.cap)
        self._out = self._pieces(request)
        first = self._out[0]
        if not self._try_flush() and self._out[0] is first:
            return False
        self._arm()
        return True

    def _try_flush(self) -> bool:
        """Send while the socket takes it. False if the socket is dead; the waiter will hear of that as well."""
        try:
            while self._out:
                piece = self._out[0]
                sent = self._sock.send(piece[:_SEND] if len(piece) > _SEND else piece)
                if sent == len(piece):
                    self._out.pop(0)
                else:
                    self._out[0] = piece[sent:]
        except BlockingIOError:
            return True
        except OSError:
            return False
        if self._verified and self.call is not None:
            # Only a complete request can have begun: sandboxd waits for all of its body.
            self.call.sent = True
        return True

    def _arm(self) -> None:
        wanted = bool(self._out)
        if wanted is not self._writing:
            self._writing = wanted
            self._waiter.modify(self._sock.fileno(), READ | WRITE if wanted else READ)

    # --- on the waiter's thread ----------------------------------------------------------------

    def _ready(self, events: int) -> None:
        with self._lock:
            data = self._transfer(events)
            if data is None:
                return
            call, reply, problem, asked_all = self.call, None, None, not self._out
            if data and call is not None:
                try:
                    reply = self._parser.feed(data)
                except BadReply as exc:
                    problem = exc
                if reply is None and problem is None:
                    return
                if reply is not None and self._verified:
                    self.call = None
        if not data or call is None:
            self._owner.on_broken(self, "sandboxd closed the connection")
        elif not self._verified:
            self._check(reply)
        elif reply is not None:
            reusable = asked_all and b"onnection: close" not in reply.head
            self._owner.on_reply(self, call, reply, reusable=reusable)
        elif problem is not None:
            self._owner.on_nonsense(self, problem)

    def _transfer(self, events: int) -> bytes | None:
        """Send and receive what is due: the bytes that came, b"" at the end, None when there is nothing to do."""
        if self._dead:
            return None
        if events & WRITE and self._out:
            if not self._try_flush():
                self._out = []  # an answer that refuses the request may still be there to read
            self._arm()
        if not events & ~WRITE:
            return None
        try:
            return self._sock.recv(_RECV)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _check(self, reply: Reply | None) -> None:
        """Whether the other end is this sandbox; if so, the request that waits goes out."""
        try:
            proved = reply is not None and self._proves(self._challenge, json_of(reply))
        except (BadReply, SandfleetError):
            proved = False
        if not proved:
            error = SandboxLost("what listens at the socket is not this sandbox", reason="endpoint_replaced")
            self._owner.on_broken(self, "no proof", error)
            return
        with self._lock:
            if self._dead or self._request is None:
                return
            self._verified = True
            began = self._begin(self._request)
        if not began:
            self._owner.on_broken(self, "sandboxd closed the connection")
