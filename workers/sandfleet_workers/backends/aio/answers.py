"""What an AIO server's answers mean. They are hostile input: code in the sandbox may have written them. Pure."""

from __future__ import annotations

import json
from typing import Any

from sandfleet.errors import (
    AlreadyExists,
    Busy,
    DigestMismatch,
    InternalError,
    InvalidArgument,
    IsDirectory,
    NoSpace,
    NotDirectory,
    NotRegularFile,
    PathNotFound,
    PermissionDenied,
    ReadOnly,
    SandfleetError,
    SearchTimeout,
    SessionNotFound,
)
from sandfleet_workers.backends.aio.scripts import Code
from sandfleet_workers.endpoint_http import BadReply, Reply, error_of, table_of

__all__ = ["BROKEN_SHELL", "RouteMissing", "acknowledged", "data_of", "script_error"]

#: How a server of 2025 says that two commands met in its one shell. Whether they ran, nobody knows.
BROKEN_SHELL = "'ErrorObservation' object has no attribute"

_TOLD_CHARS = 2000
#: What the C library says, and what it means here; a message ends with it.
_STRERROR: tuple[tuple[str, type[SandfleetError]], ...] = (
    ("No such file or directory", PathNotFound),
    ("Not a directory", NotDirectory),
    ("Is a directory", IsDirectory),
    ("Permission denied", PermissionDenied),
    ("Operation not permitted", PermissionDenied),
    ("File exists", AlreadyExists),
    ("Directory not empty", AlreadyExists),
    ("Read-only file system", ReadOnly),
    ("No space left on device", NoSpace),
    ("Disk quota exceeded", NoSpace),
    ("cannot overwrite non-directory", NotDirectory),
)
#: Where no type of its own fits, the path is to blame.
_BAD_PATH = (
    "File name too long",
    "Too many levels of symbolic links",
    "Invalid argument",
    "Device or resource busy",
    "to a subdirectory of itself",
)


class RouteMissing(SandfleetError):
    """The image's server does not have that route; nothing was done. Never leaves this package."""

    code = "route_missing"


def data_of(reply: Reply) -> dict[str, Any]:
    """The ``data`` object of a successful answer.

    Raises:
        BadReply: No such thing in it.
        RouteMissing: The server does not know the route.
        SandfleetError: What the server says went wrong.
    """
    data = _checked(reply).get("data")
    if not isinstance(data, dict):
        raise BadReply("a data field that is no JSON object")
    return data


def acknowledged(reply: Reply) -> object:
    """Whatever ``data`` is in a successful answer.

    Raises:
        BadReply, RouteMissing, SandfleetError: As `data_of`.
    """
    return _checked(reply).get("data")


def _checked(reply: Reply) -> dict[str, Any]:
    if reply.status in (404, 405) and b'"success"' not in reply.body:
        raise RouteMissing(f"the AIO server has no such route (status {reply.status})")
    answer = table_of(reply)
    if reply.status >= 300 or answer.get("success") is not True:
        raise _error_of(reply.status, answer)
    return answer


def _error_of(status: int, answer: dict[str, Any]) -> SandfleetError:
    if isinstance(answer.get("error"), dict):
        return error_of(answer)
    told = next((answer[name] for name in ("message", "detail") if answer.get(name)), "no reason given")
    text = (told if isinstance(told, str) else json.dumps(told))[:_TOLD_CHARS]
    if status == 404 and "session" in text.lower():
        return SessionNotFound(text)
    if (known := _by_strerror(text)) is not None:
        return known
    if status in (429, 503):
        return Busy(text, retry_after_s=1.0)
    if status in (400, 413, 422):
        return InvalidArgument(f"the AIO server refuses: {text}")
    return InternalError(f"the AIO server answers {status}: {text}", status=status)


def _by_strerror(text: str, **facts: Any) -> SandfleetError | None:
    for words, error in _STRERROR:
        if words in text:
            return error(words, **facts)
    for words in _BAD_PATH:
        if words in text:
            return InvalidArgument(words, argument="path", **facts)
    return None


def script_error(code: int, text: str, path: str) -> SandfleetError:
    """The error of a script of `scripts` that ended with ``code`` after saying ``text``."""
    errors: dict[int, SandfleetError] = {
        Code.DIRECTORY: IsDirectory("Is a directory", path=path),
        Code.NOT_DIRECTORY: NotDirectory("Not a directory", path=path),
        Code.NOT_REGULAR: NotRegularFile("not a regular file", path=path),
        Code.DENIED: PermissionDenied("Permission denied", path=path),
        Code.EXISTS: AlreadyExists("File exists", path=path),
        Code.DIGEST: DigestMismatch("the file has changed", path=path, digest=_digest(text)),
        Code.SIZE: DigestMismatch("the file has changed", path=path, size=int(text) if _is_number(text) else None),
        Code.NOT_EMPTY: InvalidArgument("the directory is not empty", argument="recursive", path=path),
        Code.INVALID: InvalidArgument("Invalid argument", argument="path", path=path),
        Code.TIMEOUT: SearchTimeout("the search took too long; narrow the path or the pattern", path=path),
    }
    if code in errors:
        return errors[code]
    # The tool names the file, which may be called anything: only the end of what it says counts.
    last = text.strip().rpartition("\n")[2]
    known = _by_strerror(last.rpartition(": ")[2], path=path) or _by_strerror(last, path=path)
    return known or InternalError(f"the sandbox's tools failed with {code}: {text[:_TOLD_CHARS]}", exit_code=code)


def _digest(text: str) -> str | None:
    return text if len(text) == 64 and all(char in "0123456789abcdef" for char in text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
