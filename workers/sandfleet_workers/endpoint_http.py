"""HTTP/1.1 as sandboxd speaks it, from the worker's side: build a request, parse a response piece by piece.

What comes back is hostile input: code in the sandbox may hold the other end. So a response has a
header block of bounded size, a ``Content-Length`` within the request's own cap, and nothing else
is understood.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sandfleet.errors import InternalError, SandfleetError, from_wire

__all__ = [
    "BadReply",
    "Reply",
    "Request",
    "ResponseParser",
    "error_of",
    "get",
    "json_of",
    "once",
    "post",
    "put",
    "table_of",
]

KIB = 1024
MIB = 1024 * KIB
_MAX_HEADER = 16 * KIB
#: Bodies up to this size are joined to the header, so that they leave in one system call.
_JOIN_LIMIT = 64 * KIB
_SMALL_REPLY = 1 * MIB
_MAX_CHUNK_LINE = 1024
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")


class BadReply(Exception):
    """The other end does not speak the contract; the connection is worth nothing any more."""


@dataclass(slots=True, eq=False)
class Request:
    """One request of an operation.

    Attributes:
        head: Request line and headers, with a small body already joined.
        body: A larger body, sent from where it lies.
        cap: The largest response body accepted, in bytes.
        effect: Whether it may have changed something once sent.
        guard_s: The longest wait for the complete response, in seconds.
        find: What to send instead on a fresh connection when the connection broke after this request
            went out: the request itself for reads, a question for the outcome, or None.
    """

    head: bytes
    body: memoryview | None = None
    cap: int = _SMALL_REPLY
    effect: bool = False
    guard_s: float = 60.0
    find: Request | None = None


@dataclass(slots=True, eq=False)
class Reply:
    """A complete response: status, lower-case headers (only when asked for) and body."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str | None:
        """A header's value, or None."""
        wanted = name.lower().encode()
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == wanted:
                return value.strip().decode("latin-1")
        return None


# --- requests --------------------------------------------------------------------------------


def _target(route: str, query: Mapping[str, str] | None) -> str:
    if not query:
        return route
    # Names that are not UTF-8 come as lone surrogates and go back as the bytes they stand for.
    pairs = (f"{key}={quote(value, safe='/', errors='surrogateescape')}" for key, value in query.items())
    return route + "?" + "&".join(pairs)


def get(route: str, query: Mapping[str, str] | None = None, *, cap: int = _SMALL_REPLY) -> Request:
    """A GET, which may be repeated."""
    request = Request(f"GET {_target(route, query)} HTTP/1.1\r\nHost: s\r\n".encode(), cap=cap)
    request.find = request
    return request


def post(
    route: str, fields: Mapping[str, Any], *, cap: int = _SMALL_REPLY, effect: bool, guard_s: float = 60.0
) -> Request:
    """A POST of JSON; without ``effect`` it may be repeated."""
    body = json.dumps(fields).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n".encode()
    request = _with_body(head, body, cap, effect)
    request.guard_s = guard_s
    return request


def put(route: str, query: Mapping[str, str], content: bytes | memoryview, *, effect: bool = True) -> Request:
    """A PUT of raw bytes, sent from where they lie."""
    head = f"PUT {_target(route, query)} HTTP/1.1\r\nHost: s\r\n".encode()
    return _with_body(head, content, _SMALL_REPLY, effect)


def once(request: Request) -> Request:
    """The request, which may be sent again: it names its op id, and sandboxd carries that out once."""
    request.find = request
    return request


def _with_body(head: bytes, body: bytes | memoryview, cap: int, effect: bool) -> Request:
    head += b"Content-Length: %d\r\n" % len(body)
    if len(body) <= _JOIN_LIMIT:
        request = Request(head + b"\r\n" + bytes(body), cap=cap, effect=effect)
    else:
        request = Request(head + b"\r\n", memoryview(body), cap=cap, effect=effect)
    if not effect:
        request.find = request
    return request


def complete(head: bytes, token_line: bytes) -> bytes:
    """The head as it goes out: with the token's header line, and closed where there is no body."""
    end = head.find(b"\r\n\r\n")
    if end < 0:
        return head + token_line + b"\r\n"
    return head[: end + 2] + token_line + head[end + 2 :] if token_line else head


# --- responses -------------------------------------------------------------------------------


class ResponseParser:
    """One response after the other from the pieces a socket gives. Pipelining is an error: we never ask for it.

    Args:
        chunked: Whether bodies may come in chunks; sandboxd's never do.
    """

    __slots__ = ("_buffer", "_cap", "_chunked", "_chunks", "_head", "_sink", "_status", "_wanted")

    def __init__(self, *, chunked: bool = False) -> None:
        self._chunked = chunked
        self.expect(0)

    def expect(self, cap: int) -> None:
        """Get ready for the next response, with a body of ``cap`` bytes at most."""
        self._cap = cap
        self._buffer = b""
        self._head = b""
        self._status = 0
        self._wanted = -1
        self._sink: io.BytesIO | None = None
        self._chunks: _Chunks | None = None

    def feed(self, data: bytes) -> Reply | None:
        """The response once it is complete, else None.

        Raises:
            BadReply: It is not what sandboxd sends, or larger than expected.
        """
        if self._sink is not None:
            return self._collect(data)
        if self._chunks is not None:
            return self._gather(self._chunks, data)
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(b"\r\n\r\n", 0, _MAX_HEADER)
        if end < 0:
            if len(self._buffer) >= _MAX_HEADER:
                raise BadReply("a header block without end")
            return None
        self._head, body = self._buffer[:end], self._buffer[end + 4 :]
        self._buffer = b""
        self._status, self._wanted = _parse_head(self._head, self._cap, chunked=self._chunked)
        if self._wanted < 0:
            self._chunks = _Chunks(self._cap)
            return self._gather(self._chunks, body)
        if len(body) == self._wanted:
            return Reply(self._status, self._head, body)
        self._sink = io.BytesIO()
        return self._collect(body)

    def _collect(self, data: bytes) -> Reply | None:
        assert self._sink is not None
        self._sink.write(data)
        size = self._sink.tell()
        if size > self._wanted:
            raise BadReply("more bytes than announced")
        if size < self._wanted:
            return None
        # getvalue hands out the buffer itself as long as nobody else looks at it: no second copy.
        return Reply(self._status, self._head, self._sink.getvalue())

    def _gather(self, chunks: _Chunks, data: bytes) -> Reply | None:
        return Reply(self._status, self._head, chunks.body.getvalue()) if chunks.feed(data) else None


class _Chunks:
    """A body in chunks, put together. Trailers are not understood."""

    __slots__ = ("_cap", "_last", "_left", "_rest", "body")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._rest = b""
        #: Bytes of the chunk that are still to come.
        self._left = 0
        self._last = False
        self.body = io.BytesIO()

    def feed(self, data: bytes) -> bool:
        """Whether the body is complete now.

        Raises:
            BadReply: No chunks, or more than expected.
        """
        data, at = self._rest + data, 0
        while True:
            if self._left:
                at += (written := self.body.write(data[at : at + self._left]))
                self._left -= written
                if self._left:
                    self._rest = b""
                    return False
            end = data.find(b"\r\n", at, at + _MAX_CHUNK_LINE)
            if end < 0:
                if len(data) - at >= _MAX_CHUNK_LINE:
                    raise BadReply("a line between chunks without end")
                self._rest = data[at:]
                return False
            line, at = data[at:end], end + 2
            if self._last:
                if line or at < len(data):
                    raise BadReply("more bytes than announced")
                return True
            if line:
                self._begin(line.partition(b";")[0].strip())

    def _begin(self, size: bytes) -> None:
        if not _CHUNK_SIZE.fullmatch(size):
            raise BadReply("a chunk size that is none")
        self._left = int(size, 16)
        self._last = self._left == 0
        if self.body.tell() + self._left > self._cap:
            raise BadReply(f"a response of more than {self._cap} bytes")


def _parse_head(head: bytes, cap: int, *, chunked: bool) -> tuple[int, int]:
    """(status, length of the body; -1 where it comes in chunks)."""
    lines = head.split(b"\r\n")
    if not (lines[0].startswith(b"HTTP/1.1 ") and lines[0][9:12].isdigit()):
        raise BadReply("not an HTTP/1.1 status line")
    status = int(lines[0][9:12])
    if not 200 <= status <= 599:
        raise BadReply(f"status {status}")
    length = None
    for line in lines[1:]:
        key, colon, value = line.partition(b":")
        name = key.strip().lower()
        if not colon or not name:
            raise BadReply("a header line without a name")
        if name == b"transfer-encoding" and chunked and value.strip().lower() == b"chunked" and length is None:
            length = -1
        elif name == b"transfer-encoding":
            raise BadReply("a response with Transfer-Encoding")
        if name == b"content-length":
            text = value.strip()
            if length is not None or not text.isdigit() or len(text) > 12:
                raise BadReply("a Content-Length that is no length")
            length = int(text)
    if length is None:
        raise BadReply("a response without Content-Length")
    if length > cap:
        raise BadReply(f"a response of {length} bytes where {cap} are the most")
    return status, length


def table_of(reply: Reply) -> dict[str, Any]:
    """The response as a JSON object.

    Raises:
        BadReply: It is none.
    """
    try:
        answer = json.loads(reply.body)
    except (ValueError, RecursionError):
        raise BadReply("a body that is not JSON") from None
    if not isinstance(answer, dict):
        raise BadReply("a body that is no JSON object")
    return answer


def json_of(reply: Reply) -> dict[str, Any]:
    """The ``data`` object of a successful response.

    Raises:
        BadReply: No such thing in it.
        SandfleetError: The typed error of a failure response.
    """
    answer = table_of(reply)
    if reply.status >= 300 or answer.get("success") is not True:
        raise error_of(answer)
    data = answer.get("data")
    if not isinstance(data, dict):
        raise BadReply("a data field that is no JSON object")
    return data


# --- errors ----------------------------------------------------------------------------------

#: sandboxd's codes and ours. No other code is believed: what claims to be ``lease_lost`` or
#: ``config_invalid`` would be code in a sandbox that wants the node to do something about it.
_CODES = {
    **{
        code: code
        for code in [
            "invalid_argument",
            "path_not_found",
            "is_directory",
            "not_directory",
            "not_regular_file",
            "permission_denied",
            "read_only",
            "already_exists",
            "no_space",
            "file_too_large",
            "invalid_pattern",
            "no_match",
            "ambiguous_match",
            "digest_mismatch",
            "session_not_found",
            "session_busy",
            "session_lost",
            "search_timeout",
            "binary_file",
            "resource_limit",
            "internal",
        ]
    },
    "op_exists": "op_conflict",
    "op_not_found": "job_not_found",
    # These two would be lies about its own sandbox only.
    "op_refused": "not_started",
    "op_forgotten": "outcome_unknown",
    "not_supported": "not_supported",
    "too_busy": "busy",
}
_BUSY_RETRY_S = 0.5


def error_of(answer: Mapping[str, Any]) -> SandfleetError:
    """The typed error of a failure answer; one of an unknown code is `InternalError`."""
    raw = answer.get("error")
    if not isinstance(raw, dict) or not isinstance(raw.get("code"), str):
        return InternalError("sandboxd answered a failure without a code")
    known, message = _CODES.get(raw["code"]), raw.get("message")
    text = message[:2000] if isinstance(message, str) else ""
    facts = _plain_facts(raw.get("facts"))
    if known is None:
        return InternalError(f"sandboxd: {raw['code'][:60]}: {text}", unknown_code=raw["code"][:60])
    if known == "busy":
        facts["retry_after_s"] = _BUSY_RETRY_S
    return from_wire({"code": known, "message": text, "facts": facts})


def _plain_facts(raw: object) -> dict[str, Any]:
    """The small plain values among what claims to be facts."""
    if not isinstance(raw, dict):
        return {}
    facts: dict[str, Any] = {}
    for key, value in list(raw.items())[:16]:
        if not key.isidentifier() or len(key) > 40 or key in {"self", "message", "retry_after_s"}:
            continue
        if isinstance(value, list):
            facts[key] = [item for item in value[:20] if isinstance(item, int)]
        elif isinstance(value, str):
            facts[key] = value[:4096]
        elif value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            facts[key] = value
    return facts
