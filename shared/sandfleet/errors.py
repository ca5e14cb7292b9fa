"""Every error sandfleet raises, named by what the catcher should do.

::

    SandfleetError
    ├── ConfigError (ValueError)             mend the configuration; code config_invalid
    │   └── InsecureRedis
    ├── RequestRejected (ValueError)         mend the call
    │   ├── InvalidArgument, UnknownOperation, PayloadTooLarge, VersionMismatch
    │   ├── NotSupported (NotImplementedError), HostBashDisabled
    │   ├── OpConflict, DigestMismatch
    │   └── NoMatch, AmbiguousMatch, InvalidPattern      text and pattern edits
    ├── CapacityError                        wait ``retry_after_s``, then try again
    │   ├── NoCapacity, QuotaExceeded, Busy, ByteBudgetExceeded
    ├── SandboxError                         acquire again
    │   ├── SandboxNotFound (LookupError), SandboxLost, SandboxStopping, StartFailed
    │   └── HomeUnavailable
    ├── FileError (OSError)                  look at the path
    │   ├── PathNotFound (FileNotFoundError), IsDirectory (IsADirectoryError)
    │   ├── NotDirectory (NotADirectoryError), PermissionDenied (PermissionError)
    │   ├── AlreadyExists (FileExistsError), ReadOnly, NoSpace, FileTooLarge, NotRegularFile
    │   ├── BinaryFile
    ├── CommandError                         look at the command
    │   ├── CommandFailed, CommandTimeout (TimeoutError), ResourceLimitExceeded, Cancelled
    │   ├── SessionNotFound (LookupError), SessionBusy, SessionLost, SearchTimeout (TimeoutError)
    │   └── JobNotFound (LookupError)
    ├── CheckpointError                      look at the storage of checkpoints
    │   └── CheckpointFailed, CheckpointCorrupt, NoCheckpoint (LookupError)
    ├── Unavailable                          the fleet, not the call, is in trouble
    │   ├── NotStarted                       nothing happened; safe to repeat
    │   ├── OutcomeUnknown                   it may have happened; look before you repeat
    │   ├── QueueTimeout (TimeoutError)      waited longer than ``start_by``; nothing happened
    │   ├── ReplyTimeout (TimeoutError)      the caller's own wait ended; the op goes on
    │   ├── StoreUnavailable (ConnectionError), NodeIdInUse, LeaseLost
    │   └── InternalError
    └── OperationFailed                      what a *plain Celery* caller gets; carries the wire error

An error crosses the wire as ``{"code", "message", "facts"}`` and is rebuilt from a closed table of
codes, never from a class path (CVE-2021-23727).
"""

from __future__ import annotations

import errno as _errno
import json
from typing import Any, ClassVar

__all__ = [
    "AlreadyExists",
    "AmbiguousMatch",
    "BinaryFile",
    "Busy",
    "ByteBudgetExceeded",
    "Cancelled",
    "CapacityError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointFailed",
    "CommandError",
    "CommandFailed",
    "CommandTimeout",
    "ConfigError",
    "DigestMismatch",
    "FileError",
    "FileTooLarge",
    "HomeUnavailable",
    "HostBashDisabled",
    "InsecureRedis",
    "InternalError",
    "InvalidArgument",
    "InvalidPattern",
    "IsDirectory",
    "JobNotFound",
    "LeaseLost",
    "NoCapacity",
    "NoCheckpoint",
    "NoMatch",
    "NoSpace",
    "NodeIdInUse",
    "NotDirectory",
    "NotRegularFile",
    "NotStarted",
    "NotSupported",
    "OpConflict",
    "OperationFailed",
    "OutcomeUnknown",
    "PathNotFound",
    "PayloadTooLarge",
    "PermissionDenied",
    "QueueTimeout",
    "QuotaExceeded",
    "ReadOnly",
    "ReplyTimeout",
    "RequestRejected",
    "ResourceLimitExceeded",
    "SandboxError",
    "SandboxLost",
    "SandboxNotFound",
    "SandboxStopping",
    "SandfleetError",
    "SearchTimeout",
    "SessionBusy",
    "SessionLost",
    "SessionNotFound",
    "StartFailed",
    "StoreUnavailable",
    "Unavailable",
    "UnknownOperation",
    "VersionMismatch",
    "error_codes",
    "from_wire",
]

_MESSAGE_LIMIT = 4000
_RETRY_AFTER_LIMIT_S = 86_400.0


class SandfleetError(Exception):
    """The root of every error sandfleet raises.

    Attributes:
        code: A stable lower-case word for programs; the wire form.
        retryable: Whether the very same call may be repeated without harm and with hope.
        retry_after_s: How long to wait before that, in seconds; None when it does not matter.
        facts: What a program may want to know (sandbox_id, path, limit…); JSON values only.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, *, retry_after_s: float | None = None, **facts: Any) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.facts: dict[str, Any] = facts

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return from_wire, (self.to_wire(),)

    def to_wire(self) -> dict[str, Any]:
        """The error as it crosses processes: ``{"code", "message", "facts"}``, message bounded."""
        facts = dict(self.facts)
        if self.retry_after_s is not None:
            facts["retry_after_s"] = self.retry_after_s
        return {"code": self.code, "message": self.message[:_MESSAGE_LIMIT], "facts": facts}


# --- the configuration is wrong --------------------------------------------------------------


class ConfigError(SandfleetError, ValueError):
    """A configuration value cannot be used; the message names the key and a valid value."""

    code = "config_invalid"


class InsecureRedis(ConfigError):
    """The Redis URL is neither loopback nor protected by a password (whoever reaches it owns the fleet)."""

    code = "insecure_redis"


# --- the call is wrong -----------------------------------------------------------------------


class RequestRejected(SandfleetError, ValueError):
    """The call itself is wrong; repeating it unchanged gives the same answer."""

    code = "request_rejected"


class InvalidArgument(RequestRejected):
    """An argument has the wrong form; the message names it and what is allowed."""

    code = "invalid_argument"


class UnknownOperation(RequestRejected):
    """No operation of that name exists in this version."""

    code = "unknown_operation"


class PayloadTooLarge(RequestRejected):
    """Arguments or content exceed a fixed limit (named in the message)."""

    code = "payload_too_large"


class VersionMismatch(RequestRejected):
    """The message's version is neither this node's nor the one before it."""

    code = "version_mismatch"


class NotSupported(RequestRejected, NotImplementedError):
    """This backend (or this version) lacks the capability."""

    code = "not_supported"


class HostBashDisabled(RequestRejected):
    """A command for a sandbox in host mode, which is no security boundary, without ``allow_host_bash: true``."""

    code = "host_bash_disabled"


class OpConflict(RequestRejected):
    """The op_id is already used by another operation."""

    code = "op_conflict"


class DigestMismatch(RequestRejected):
    """``if_digest`` names another content than the file has now (somebody else wrote it)."""

    code = "digest_mismatch"


class NoMatch(RequestRejected):
    """The text to replace does not occur in the file."""

    code = "no_match"


class AmbiguousMatch(RequestRejected):
    """The text to replace occurs several times; ``facts["lines"]`` names them."""

    code = "ambiguous_match"


class InvalidPattern(RequestRejected):
    """A regular expression or glob that does not parse."""

    code = "invalid_pattern"


# --- there is no room ------------------------------------------------------------------------


class CapacityError(SandfleetError):
    """No room now; ``retry_after_s`` says when to ask again."""

    code = "capacity"
    retryable = True


class NoCapacity(CapacityError):
    """Every fitting node is full and nothing on it may be evicted."""

    code = "no_capacity"


class QuotaExceeded(CapacityError):
    """The user's sandboxes take as many places as one user may have, and none of them may be evicted."""

    code = "quota_exceeded"


class Busy(CapacityError):
    """A lane or node already holds as many operations as it may."""

    code = "busy"


class ByteBudgetExceeded(CapacityError):
    """Blobs in flight reached the byte budget of this client or of the fleet, or Redis is nearly full."""

    code = "byte_budget_exceeded"


# --- the sandbox is gone or not there --------------------------------------------------------


class SandboxError(SandfleetError):
    """The sandbox cannot serve; acquire again."""

    code = "sandbox_error"


class SandboxNotFound(SandboxError, LookupError):
    """No such sandbox, or it belongs to somebody else (the answer does not tell which)."""

    code = "sandbox_not_found"


class SandboxLost(SandboxError):
    """The sandbox was killed, or died with its node; processes are gone. Acquire again for a new one."""

    code = "sandbox_lost"


class SandboxStopping(SandboxError):
    """The sandbox is being destroyed."""

    code = "sandbox_stopping"


class StartFailed(SandboxError):
    """The node could not start the sandbox; ``facts["reason"]`` is a stable word."""

    code = "start_failed"
    retryable = True


class HomeUnavailable(SandboxError):
    """The thread's data lies on a node that is away; wait, or acquire with ``on_lost="fresh"``."""

    code = "home_unavailable"
    retryable = True


# --- files -----------------------------------------------------------------------------------


class FileError(SandfleetError, OSError):
    """A file operation failed inside the sandbox; ``errno`` and ``filename`` are set as usual."""

    code = "file_error"
    _errno: ClassVar[int] = _errno.EIO

    def __init__(self, message: str, /, *, retry_after_s: float | None = None, **facts: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **facts)
        self.errno = self._errno
        self.strerror = message
        self.filename = facts.get("path")


class PathNotFound(FileError, FileNotFoundError):
    """Nothing exists at the path."""

    code = "path_not_found"
    _errno = _errno.ENOENT


class IsDirectory(FileError, IsADirectoryError):
    """The path is a directory where a file is wanted."""

    code = "is_directory"
    _errno = _errno.EISDIR


class NotDirectory(FileError, NotADirectoryError):
    """The path (or one of its parents) is a file where a directory is wanted."""

    code = "not_directory"
    _errno = _errno.ENOTDIR


class PermissionDenied(FileError, PermissionError):
    """The sandbox user may not touch the path."""

    code = "permission_denied"
    _errno = _errno.EACCES


class AlreadyExists(FileError, FileExistsError):
    """Something exists at the target path."""

    code = "already_exists"
    _errno = _errno.EEXIST


class ReadOnly(FileError):
    """The path lies on a read-only mount."""

    code = "read_only"
    _errno = _errno.EROFS


class NoSpace(FileError):
    """The disk or the quota is full."""

    code = "no_space"
    _errno = _errno.ENOSPC


class FileTooLarge(FileError):
    """The file exceeds the operation's limit (named in the message)."""

    code = "file_too_large"
    _errno = _errno.EFBIG


class NotRegularFile(FileError):
    """The path is a FIFO, a socket or a device; only regular files are read and written."""

    code = "not_regular_file"
    _errno = _errno.EINVAL


class BinaryFile(FileError):
    """The file is not text: neither UTF-8 nor UTF-16/32 with a byte order mark. Read its bytes, or use a tool on it."""

    code = "binary_file"
    _errno = _errno.EILSEQ


# --- commands --------------------------------------------------------------------------------


class CommandError(SandfleetError):
    """The command, not the fleet, is the reason."""

    code = "command_error"


class CommandFailed(CommandError):
    """``result.check()`` of a non-zero exit; ``result`` is the whole `CommandResult`, in the process that checked."""

    code = "command_failed"
    result: Any = None


class CommandTimeout(CommandError, TimeoutError):
    """``result.check()`` of a command that its deadline ended; ``result`` holds the partial output."""

    code = "command_timeout"
    result: Any = None


class ResourceLimitExceeded(CommandError):
    """A limit of the sandbox was hit; ``facts["resource"]`` is memory, pids, disk or output.

    Of a command's ``result.check()``: ``result`` holds what it wrote until then.
    """

    code = "resource_limit"
    result: Any = None


class Cancelled(CommandError):
    """Somebody cancelled the operation; ``facts["started"]`` tells whether it had begun."""

    code = "cancelled"


class SessionNotFound(CommandError, LookupError):
    """No shell session of that name is open."""

    code = "session_not_found"


class SessionBusy(CommandError):
    """The session runs another command (only possible for callers outside the lanes)."""

    code = "session_busy"
    retryable = True


class SessionLost(CommandError):
    """The shell of the session died; the next use opens a new one, state is gone."""

    code = "session_lost"


class JobNotFound(CommandError, LookupError):
    """The sandbox knows no job of that id: never started there, or over for so long that it is forgotten."""

    code = "job_not_found"


class SearchTimeout(CommandError, TimeoutError):
    """A glob or grep took longer than its time limit; narrow the path or the pattern."""

    code = "search_timeout"


# --- saved data ------------------------------------------------------------------------------


class CheckpointError(SandfleetError):
    """Saved data of a thread cannot be written or read; its sandbox is as it was."""

    code = "checkpoint_error"


class CheckpointFailed(CheckpointError):
    """The storage of checkpoints does not answer or refuses, or the data cannot be saved; ``facts["reason"]`` tells."""

    code = "checkpoint_failed"
    retryable = True


class NoCheckpoint(CheckpointError, LookupError):
    """Nothing was saved of the thread, or not that: wait for its home, or acquire with ``on_lost="fresh"``."""

    code = "no_checkpoint"


class CheckpointCorrupt(CheckpointError):
    """What the storage gave back is not what was saved; nothing of it was used. Restore another checkpoint."""

    code = "checkpoint_corrupt"


# --- the fleet is in trouble -----------------------------------------------------------------


class Unavailable(SandfleetError):
    """The fleet could not carry the operation through."""

    code = "unavailable"
    retryable = True


class NotStarted(Unavailable):
    """The operation never began; repeating it is safe."""

    code = "not_started"


class OutcomeUnknown(Unavailable):
    """The operation had begun and nobody can tell how it ended; look before you repeat it."""

    code = "outcome_unknown"
    retryable = False


class QueueTimeout(Unavailable, TimeoutError):
    """The operation waited in its lane past ``start_by`` and never began."""

    code = "queue_timeout"


class ReplyTimeout(Unavailable, TimeoutError):
    """The caller stopped waiting; the operation goes on and ``facts["op_id"]`` finds it."""

    code = "reply_timeout"
    retryable = False


class StoreUnavailable(Unavailable, ConnectionError):
    """Redis does not answer, is loading, full, or refuses the password (the message tells which)."""

    code = "store_unavailable"


class NodeIdInUse(Unavailable):
    """Another live process holds this node id."""

    code = "node_id_in_use"
    retryable = False


class LeaseLost(Unavailable):
    """The node's lease lapsed or a newer incarnation holds it; it must stop without cleaning up."""

    code = "lease_lost"
    retryable = False


class InternalError(Unavailable):
    """A bug in sandfleet; the message carries the original error's type and text."""

    code = "internal"
    retryable = False


class OperationFailed(Exception):
    """What ``AsyncResult.get()`` raises for a plain Celery caller.

    Celery rebuilds exceptions from a class path and string arguments, so exactly one class of
    ours crosses that way, with the wire error as JSON text. ``error`` is the typed error.
    """

    def __init__(self, wire: str) -> None:
        super().__init__(wire)
        self.error = from_wire(json.loads(wire))

    def __str__(self) -> str:
        return f"{self.error.code}: {self.error}"

    def __repr__(self) -> str:
        # What Flower shows of a failed task: for people, not JSON.
        return str(self)


def _walk(cls: type[SandfleetError]) -> list[type[SandfleetError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _walk(child))]


_BY_CODE: dict[str, type[SandfleetError]] = {cls.code: cls for cls in _walk(SandfleetError)}


def error_codes() -> dict[str, type[SandfleetError]]:
    """Every wire code and the class it becomes."""
    return dict(_BY_CODE)


def from_wire(error: Any) -> SandfleetError:
    """The typed error of a wire dict; an unknown code becomes `InternalError` that names it.

    The input is untrusted: any shape gives an error object, never an exception.
    """
    if not isinstance(error, dict):
        return InternalError(f"not an error: {str(error)[:200]}")
    code = str(error.get("code", ""))
    message = str(error.get("message", ""))[:_MESSAGE_LIMIT]
    raw = error.get("facts")
    facts = {str(k): v for k, v in raw.items()} if isinstance(raw, dict) else {}
    retry_after = facts.pop("retry_after_s", None)
    for reserved in ("self", "message"):
        facts.pop(reserved, None)
    cls = _BY_CODE.get(code)
    if cls is None:
        return InternalError(f"{code or 'no code'}: {message}", unknown_code=code)
    # Out of bounds includes NaN, and integers that no float holds.
    usable = isinstance(retry_after, int | float) and 0 <= retry_after <= _RETRY_AFTER_LIMIT_S
    return cls(message, retry_after_s=float(retry_after) if usable else None, **facts)
