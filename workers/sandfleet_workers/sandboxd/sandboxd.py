#!/usr/bin/env python3
"""sandboxd: the one process of sandfleet that lives inside a sandbox.

It runs commands, keeps shells and touches files on behalf of the worker, over HTTP on a unix socket
or TCP. The contract is ``docs/sandboxd-api.md``. One file, standard library only, Python >= 3.8,
because it is mounted into images we do not control.

One thread and one epoll loop do everything: starting a process and answering for it costs no thread
switch, and forking from a single-threaded process is safe, which is how slow file work (search,
digests of large files) gets a helper that can be killed at its time limit.
"""

from __future__ import annotations

import _ctypes
import _json
import binascii
import codecs
import errno
import gc
import os
import select
import stat
import sys
import time
from _heapq import heapify, heappop, heappush
from _operator import _compare_digest as compare_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    import signal
    import socket
    from collections import OrderedDict, deque
    from functools import partial
    from hashlib import sha256
    from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple, Union

    Json = Dict[str, Any]
    Fds = Dict[int, Union[int, str]]
    Handler = Callable[["Request"], None]
else:
    # What CPython makes its public modules of. Those bring `enum`, `re`, `typing` and OpenSSL along: 7 MB in
    # every sandbox and half of its start. What only some requests need is imported where they need it.
    import _signal as signal
    import _socket as socket
    from _collections import OrderedDict, deque
    from _functools import partial

    for _name in ("_sha256", "_sha2", "hashlib"):  # until Python 3.11, since 3.12, and where neither was built
        try:
            sha256 = __import__(_name).sha256
            break
        except ImportError:
            continue

VERSION = "1.1.0"
MIB = 1024 * 1024
READ_SIZE = 65536
LIMITS: Dict[str, int] = {
    "max_ops": 256,
    "max_sessions": 32,
    "max_connections": 512,
    "max_helpers": 16,
    "max_uploads": 64,
    "max_upload_bytes": 1024 * MIB,
    "max_timeout_s": 86400,
    "max_output_bytes": 64 * MIB,
    "keep_ops": 1000,
    "keep_changes": 1000,
    "keep_s": 3600,
    "keep_bytes": 16 * MIB,
    "max_json_bytes": 96 * MIB,
    "max_inflight_bytes": 256 * MIB,
}
MAX_HEADER = 65536
MAX_RAW_BODY = 8 * MIB
CHUNK = 4 * MIB
EDIT_LIMIT = 64 * MIB
INLINE_LIMIT = 4 * MIB  # Work on more bytes than this goes to a helper so that commands do not wait for it.
TEXT_LIMIT = 16 * MIB  # Characters of one decoded read; as UTF-8 that is 64 MiB at most.
SCAN_LIMIT, SCAN_S = 64 * MIB, 2.0  # Beyond what is shown, a decoded read looks at no more than this.
BINARY_PROBE = 8192
DISK_S = 5.0  # How long counting the bytes of a thread's files may take.
SCRIPT_LIMIT = 120 * 1024  # The kernel refuses a single argument of 128 KiB.
DIGEST_LIMIT = 128 * 1024
QUIET_S, DRAIN_S = 0.05, 0.2
SESSION_GRACE_S = 1.0
NOTE_LIMIT, ANSWER_LIMIT = 4096, 2048  # bytes
TRACES, REFUSALS, TRACE_S = 16384, 4096, 3600
WINDOW_LIMIT = 4 * MIB
SETTLED = 64 * 1024  # A follower with that much to read is not kept waiting for more.
PROCESSES = 1000
KILLED = 128 + signal.SIGKILL
IGNORE = (
    ".git", ".svn", ".hg", ".bzr", "node_modules", "__pycache__", ".venv", "venv", ".env", "env", ".tox",
    ".nox", ".eggs", "*.egg-info", "site-packages", "dist", "build", ".next", ".nuxt", ".output", ".turbo",
    "target", "out", ".idea", ".vscode", "*.swp", "*.swo", "*~", ".project", ".classpath", ".settings",
    ".DS_Store", "Thumbs.db", "desktop.ini", "*.lnk", "*.log", "*.tmp", "*.temp", ".upload-*.part", "*.bak",
    "*.cache", ".cache", "logs", ".coverage", "coverage", ".nyc_output", "htmlcov", ".pytest_cache",
    ".mypy_cache", ".ruff_cache",
)  # fmt: skip

ALPHANUMERIC = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
IDENT_CHARS = ALPHANUMERIC + "._:-"
SHELL_SAFE = ALPHANUMERIC + "_@%+=:,./-"
BASE64_CHARS = (ALPHANUMERIC + "+/").encode("ascii")
SIGNALS: Dict[str, int] = {n: int(v) for n, v in vars(signal).items() if n[:3] == "SIG" and n[3] != "_"}
SIGNAL_NAMES = {number: name for name, number in sorted(SIGNALS.items(), reverse=True)}  # SIGCHLD, not SIGCLD

# ---------------------------------------------------------------------------------------------- errors

STATUS_OF = {
    "invalid_argument": 400, "path_not_found": 404, "is_directory": 400, "not_directory": 400,
    "permission_denied": 403, "read_only": 403, "already_exists": 409, "no_space": 507,
    "file_too_large": 413, "not_regular_file": 400, "invalid_pattern": 400, "no_match": 409,
    "ambiguous_match": 409, "digest_mismatch": 409, "session_not_found": 404, "session_busy": 409,
    "session_lost": 410, "op_not_found": 404, "op_exists": 409, "op_refused": 409, "op_forgotten": 410,
    "too_busy": 503, "not_supported": 501,
    "search_timeout": 504, "binary_file": 415, "resource_limit": 503, "internal": 500,
}  # fmt: skip
CODE_OF_ERRNO = {
    errno.ENOENT: "path_not_found", errno.EISDIR: "is_directory", errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission_denied", errno.EPERM: "permission_denied", errno.EROFS: "read_only",
    errno.EEXIST: "already_exists", errno.ENOSPC: "no_space", errno.EDQUOT: "no_space",
    errno.EFBIG: "file_too_large", errno.ENXIO: "not_regular_file", errno.ENODEV: "not_regular_file",
    errno.ETXTBSY: "permission_denied", errno.EMFILE: "too_busy", errno.ENFILE: "too_busy",
}  # fmt: skip
LIMIT_OF_ERRNO = {
    errno.EAGAIN: ("pids", "no further process may be started in the sandbox"),
    errno.ENOMEM: ("memory", "the sandbox is out of memory"),
}
CALLERS_FAULT = (errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.E2BIG, errno.EXDEV, errno.EBUSY, errno.EILSEQ)


class ApiError(Exception):
    """A failure the caller is told about; ``status`` overrides the code's usual HTTP status."""

    def __init__(self, code: str, message: str, status: int = 0, **facts: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.facts = code, message, facts
        self.status = status or STATUS_OF[code]


def mapped(exc: BaseException, path: Optional[str] = None) -> ApiError:
    """The API's word for an exception; what is not foreseen is ``internal``."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, UnicodeEncodeError):
        return ApiError("invalid_argument", "text that cannot be encoded")
    if isinstance(exc, MemoryError):
        return ApiError("too_busy", "out of memory", limit="memory")
    if isinstance(exc, RecursionError):
        return ApiError("invalid_argument", "directories are nested too deeply")
    if isinstance(exc, OSError) and exc.errno is not None:
        name = path if path is not None else exc.filename
        facts: Json = {} if name is None else {"path": os.fsdecode(name) if not isinstance(name, int) else name}
        if exc.errno in LIMIT_OF_ERRNO:
            resource, words = LIMIT_OF_ERRNO[exc.errno]
            return ApiError("resource_limit", words, resource=resource)
        code = CODE_OF_ERRNO.get(exc.errno)
        if code is None:
            code = "invalid_argument" if exc.errno in CALLERS_FAULT else "internal"
            facts["errno"] = errno.errorcode.get(exc.errno, str(exc.errno))
        return ApiError(code, os.strerror(exc.errno), **facts)
    return ApiError("internal", "%s: %s" % (type(exc).__name__, str(exc)[:200]), type=type(exc).__name__)


def success_body(data: Any) -> bytes:
    return b'{"success": true, "message": "ok", "data": ' + to_json(data) + b"}"


def failure_body(error: ApiError) -> bytes:
    detail = {"code": error.code, "message": error.message, "facts": error.facts}
    return to_json({"success": False, "message": error.message, "data": None, "error": detail})


class Args:
    """A request's JSON object, read field by field with the type checked; null means absent."""

    def __init__(self, body: Json) -> None:
        self.body = body

    def _get(self, name: str, kinds: Tuple[type, ...], default: Any) -> Any:
        value = self.body.get(name)
        if value is None:
            if default is ...:
                raise ApiError("invalid_argument", "%s is required" % name, argument=name)
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ApiError("invalid_argument", "%s has the wrong type" % name, argument=name)
        return value

    def text(self, name: str, default: Any = ...) -> Any:
        return self._get(name, (str,), default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._get(name, (bool,), default))

    def count(self, name: str, default: Any = ..., low: int = 0, high: int = 2**53) -> Any:
        value = self._get(name, (int,), default)
        if value is not None and not low <= value <= high:
            raise ApiError("invalid_argument", "%s is out of range" % name, argument=name)
        return value

    def seconds(self, name: str, default: Optional[float] = None, high: float = 86400.0) -> Optional[float]:
        value = self._get(name, (int, float), default)
        if value is not None and not value >= 0:
            raise ApiError("invalid_argument", "%s is out of range" % name, argument=name)
        return None if value is None else float(min(value, high))

    def texts(self, name: str, default: Any = ...) -> Any:
        value = self._get(name, (list, tuple), default)
        if value is not None and not all(isinstance(item, str) for item in value):
            raise ApiError("invalid_argument", "%s must be a list of strings" % name, argument=name)
        return value

    def table(self, name: str) -> Json:
        return dict(self._get(name, (dict,), {}))

    def ident(self, name: str, default: Optional[str] = None) -> Optional[str]:
        value = self._get(name, (str,), default)
        if value is not None and (not 1 <= len(value) <= 128 or value.strip(IDENT_CHARS)):
            raise ApiError("invalid_argument", "%s is not a valid identifier" % name, argument=name)
        return None if value is None else str(value)

    def data(self, name: str) -> Optional[bytes]:
        """Bytes given as text under ``name`` or as base64 under ``name_b64``."""
        coded = self._get(name + "_b64", (str,), None)
        if coded is not None:
            return unbase64(coded, name + "_b64")
        value = self._get(name, (str,), None)
        return None if value is None else value.encode("utf-8", "surrogateescape")


def to_base64(data: Union[bytes, bytearray]) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def unbase64(coded: str, name: str) -> bytes:
    try:
        data = coded.encode("ascii")
        # What Python itself is strict about differs between its versions.
        padding = data.translate(None, BASE64_CHARS)
        if len(data) % 4 or padding not in (b"", b"=", b"==") or not data.endswith(padding):
            raise ValueError("not base64")
        return binascii.a2b_base64(data)
    except ValueError:
        raise ApiError("invalid_argument", "%s is not base64" % name, argument=name) from None


class JsonRules:
    """How JSON is read, in the form that the scanner of `json` wants it."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, float


scan_json: Any = _json.make_scanner(JsonRules)  # type: ignore[arg-type]


def json_text(text: str) -> str:
    return (_json.encode_basestring_ascii if text.isascii() else _json.encode_basestring)(text)


write_json, write_ascii_json = (
    _json.make_encoder(None, str, encode, None, ": ", ", ", False, False, True)
    for encode in (json_text, _json.encode_basestring_ascii)
)


def to_json(value: Any) -> bytes:
    """``value`` as JSON in UTF-8, which is a sixth of ASCII where most is not Latin; unknown types become text."""
    try:
        return "".join(write_json(value, 0)).encode("utf-8")
    except UnicodeEncodeError:  # the lone surrogate of a name that is not UTF-8
        return "".join(write_ascii_json(value, 0)).encode("ascii")


def from_json(data: Union[bytes, bytearray]) -> Any:
    """What ``json.loads`` makes of UTF-8.

    Raises:
        ValueError: It is no JSON.
    """
    text = data.decode("utf-8", "surrogatepass").strip(" \t\r\n")
    try:
        value, end = scan_json(text, 0)
    except (StopIteration, SystemError):  # the latter where it would name a class of `json`, which is not loaded
        value, end = None, -1
    if end != len(text):
        raise ValueError("not JSON")
    return value


def quoted(text: str) -> str:
    """``text`` as one word of a shell."""
    return text if text and not text.strip(SHELL_SAFE) else "'" + text.replace("'", "'\"'\"'") + "'"


def unquoted(text: str, errors: str = "replace") -> str:
    """A part of a URL without its percent signs."""
    head, *rest = text.encode("latin-1").split(b"%")
    parts = [head]
    for part in rest:
        try:
            parts += [binascii.unhexlify(part[:2]) if len(part) > 1 else b"%", part[2:] if len(part) > 1 else part]
        except binascii.Error:
            parts.append(b"%" + part)
    return b"".join(parts).decode("utf-8", errors)


def digester(size: int) -> Any:
    """A new sha256 for about ``size`` bytes: OpenSSL's for many, or once it is there; it costs 4 MB and is faster."""
    if size <= DIGEST_LIMIT and "hashlib" not in sys.modules:
        return sha256()
    import hashlib  # noqa: PLC0415 - see above

    return hashlib.sha256()


def digest_bytes(data: Union[bytes, bytearray]) -> str:
    digest = digester(len(data))
    digest.update(data)
    return str(digest.hexdigest())


def hmac_sha256(key: bytes, data: bytes) -> str:
    """The proof, hex, that we know ``key``."""
    key = (sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in key) for pad in (0x36, 0x5C))
    return str(sha256(outer + sha256(inner + data).digest()).hexdigest())


# ------------------------------------------------------------------------------------------- event loop


class Timer:
    __slots__ = ("fn", "seq", "when")

    def __init__(self, when: float, seq: int, fn: Optional[Callable[[], None]]) -> None:
        self.when, self.seq, self.fn = when, seq, fn

    def __lt__(self, other: Timer) -> bool:
        return (self.when, self.seq) < (other.when, other.seq)


class Loop:
    """epoll, timers and child reaping. Handlers must bear a spurious wake-up: fds are reused at once."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: Dict[int, Callable[[int], None]] = {}
        self.timers: List[Timer] = []
        self.seq = self.cancelled = 0
        self.children: Dict[int, Callable[[int], None]] = {}
        wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wake_r = wake_r
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.add(wake_r, select.EPOLLIN, self._child_event)

    def add(self, fd: int, mask: int, fn: Callable[[int], None]) -> None:
        self.epoll.register(fd, mask)
        self.handlers[fd] = fn

    def mask(self, fd: int, mask: int) -> None:
        if fd in self.handlers:
            self.epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def later(self, delay_s: float, fn: Callable[[], None]) -> Timer:
        self.seq += 1
        timer = Timer(time.monotonic() + delay_s, self.seq, fn)
        heappush(self.timers, timer)
        return timer

    def cancel(self, timer: Optional[Timer]) -> None:
        if timer is None or timer.fn is None:
            return
        timer.fn = None
        self.cancelled += 1
        if self.cancelled > 1000 and self.cancelled * 2 > len(self.timers):
            self.timers = [t for t in self.timers if t.fn is not None]
            heapify(self.timers)
            self.cancelled = 0

    def _child_event(self, _mask: int) -> None:
        try:
            os.read(self.wake_r, 4096)
        except BlockingIOError:
            pass
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            fn = self.children.pop(pid, None)
            if fn is not None:
                fn(status)

    def _run_timers(self) -> float:
        now = time.monotonic()
        while self.timers:
            timer = self.timers[0]
            if timer.fn is None:
                self.cancelled = max(0, self.cancelled - 1)
            elif timer.when > now:
                return timer.when - now
            heappop(self.timers)
            fn, timer.fn = timer.fn, None
            if fn is not None:
                fn()
        return -1.0

    def run(self) -> NoReturn:
        while True:
            self._guarded(self._turn)

    def _turn(self) -> None:
        for fd, mask in self.epoll.poll(self._run_timers(), 64):
            handler = self.handlers.get(fd)
            if handler is not None:
                self._guarded(handler, mask)

    @staticmethod
    def _guarded(fn: Callable[..., None], *args: int) -> None:
        try:
            fn(*args)
        except Exception as exc:  # noqa: BLE001 - nothing may end PID 1, that would end the sandbox
            log("loop", exc)


def log(where: str, exc: BaseException) -> None:
    try:
        os.write(2, ("%s %s: %r\n" % (time.strftime("%FT%T"), where, exc)).encode("utf-8", "replace"))
    except OSError:
        pass


class Writer:
    """Feeds bytes to a pipe or socket as fast as the reader takes them; never blocks, never raises."""

    def __init__(self, loop: Loop, fd: int, own: bool = True) -> None:
        self.loop, self.fd, self.own = loop, fd, own
        self.queue: deque[memoryview] = deque()
        self.pending = 0
        self.eof = self.closed = False
        os.set_blocking(fd, False)

    def send(self, data: bytes, eof: bool = False) -> None:
        self.eof = self.eof or eof
        if data and not self.closed:
            self.queue.append(memoryview(data))
            self.pending += len(data)
        self._flush(0)

    def _flush(self, _mask: int) -> None:
        if self.closed:
            return
        try:
            while self.queue:
                view = self.queue[0]
                sent = os.write(self.fd, view[:MIB])
                self.pending -= sent
                if sent < len(view):
                    self.queue[0] = view[sent:]
                else:
                    self.queue.popleft()
        except BlockingIOError:
            if self.own and self.fd not in self.loop.handlers:
                self.loop.add(self.fd, select.EPOLLOUT, self._flush)
            elif not self.own:
                self.loop.later(0.005, partial(self._flush, 0))
            return
        except OSError:
            self.close()
            return
        if self.own:
            self.loop.remove(self.fd)
        if self.eof:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed, self.pending = True, 0
            self.queue.clear()
            if self.own:
                self.loop.remove(self.fd)
                os.close(self.fd)


# --------------------------------------------------------------------------------------------- commands


class Stream:
    """What a command wrote: the first and the last half of ``cap`` bytes; the middle is dropped as it comes.

    A reader that keeps up through `since` still sees every byte, because the last half is a window, of ``window``
    bytes at least.
    """

    __slots__ = ("head", "head_cap", "tail", "tail_cap", "total", "window")

    def __init__(self, cap: int, window: int = 0) -> None:
        self.tail_cap = cap // 2
        self.head_cap = cap - self.tail_cap
        self.window = max(self.tail_cap, window)
        self.head, self.tail = bytearray(), bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_cap - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > self.window + max(self.window, READ_SIZE):
                del self.tail[: len(self.tail) - self.window]

    def _window(self) -> bytearray:
        extra = len(self.tail) - self.window
        if extra > 0:
            del self.tail[:extra]
        return self.tail

    def _tail(self) -> bytearray:
        tail = self._window()
        return tail if len(tail) <= self.tail_cap else tail[len(tail) - self.tail_cap :]

    @property
    def discarded(self) -> int:
        return self.total - len(self.head) - min(len(self.tail), self.tail_cap)

    @property
    def size(self) -> int:
        return len(self.head) + len(self.tail)

    def since(self, offset: int, limit: int) -> Tuple[bytes, int, int]:
        """Up to ``limit`` bytes from ``offset``: the bytes, where they start, how many before were lost."""
        head, tail = self.head, self._window()
        tail_at = self.total - len(tail)
        skipped = 0
        if offset < len(head):
            data = bytes(head[offset : offset + limit])
            if tail_at == len(head) and len(data) < limit:
                data += bytes(tail[: limit - len(data)])
            return data, offset, 0
        if offset < tail_at:
            skipped, offset = tail_at - offset, tail_at
        offset = min(offset, self.total)
        return bytes(tail[offset - tail_at : offset - tail_at + limit]), offset, skipped

    def kept(self) -> bytes:
        return b"".join((self.head, self._tail()))

    def shown(self, encoding: str) -> Optional[str]:
        if encoding in ("raw", "none"):
            return None
        if encoding == "base64":
            return to_base64(bytes(self.head) + self._tail())
        lost = self.discarded
        mark = "" if not lost else "\n... [%d bytes discarded] ...\n" % lost
        if not mark:
            return (self.head + self._tail()).decode("utf-8", "replace")
        return self.head.decode("utf-8", "replace") + mark + self._tail().decode("utf-8", "replace")


class Op:
    """One command, running or remembered. ``key`` tells a repeated op_id from a reused one."""

    def __init__(self, op_id: str, key: int, command: str, cap: int, session: Optional[Session], a: Args) -> None:
        self.op_id, self.key, self.command, self.session = op_id, key, command[:1000], session
        self.session_id = session.session_id if session else op_id
        window = a.count("window", 0, high=WINDOW_LIMIT)
        self.out, self.err = Stream(cap, window), Stream(cap, window)
        self.note, self.background = a.text("note", ""), a.flag("async_mode")
        if len(self.note.encode("utf-8")) > NOTE_LIMIT:
            raise ApiError("invalid_argument", "a note has %d bytes at most" % NOTE_LIMIT, argument="note")
        self.tty: Optional[int] = None
        self.status = "running"
        self.pid = 0
        self.exit_code: Optional[int] = None
        self.signal: Optional[str] = None
        self.timed_out = self.cancelled = self.session_lost = self.dropped = self.out_of_memory = False
        self.started_at, self.started, self.duration_s = time.time(), time.monotonic(), 0.0
        self.ticks = start_ticks() if session else 0
        self.exited: Optional[int] = None
        self.last_data = 0.0
        self.pipes: Dict[int, Stream] = {}
        self.stdin: Optional[Writer] = None
        self.timers: List[Timer] = []
        self.waiters: List[Callable[[], None]] = []  # answered when it ends
        self.watchers: List[Callable[[], None]] = []  # answered when anything new comes

    def result(self, encoding: str, with_output: bool = False) -> Json:
        out, err = self.out, self.err
        stdout, stderr = out.shown(encoding), err.shown(encoding)
        lost_out, lost_err = out.discarded, err.discarded
        running = self.status == "running"
        return {
            "op_id": self.op_id, "command_id": self.op_id, "session_id": self.session_id,
            "command": self.command, "status": self.status, "stdout": stdout, "stderr": stderr,
            "output": (stdout or "") + (stderr or "") if with_output and encoding != "base64" else None,
            "exit_code": self.exit_code, "signal": self.signal, "timed_out": self.timed_out,
            "cancelled": self.cancelled, "truncated": bool(lost_out or lost_err),
            "out_of_memory": self.out_of_memory,
            "stdout_bytes": out.total, "stderr_bytes": err.total,
            "stdout_discarded": lost_out, "stderr_discarded": lost_err,
            "stdout_gap_at": len(out.head) if lost_out else None,
            "stderr_gap_at": len(err.head) if lost_err else None,
            "offset": out.total, "stderr_offset": err.total, "output_dropped": self.dropped,
            "session_lost": self.session_lost, "pid": self.pid, "started_at": self.started_at,
            "duration_s": round(time.monotonic() - self.started if running else self.duration_s, 6),
        }  # fmt: skip

    def brief(self) -> Json:
        return {
            "op_id": self.op_id, "kind": "command", "running": self.status == "running", "note": self.note,
            "session_id": self.session_id, "status": self.status, "background": self.background,
            "command": self.command[:200], "pid": self.pid, "started_at": self.started_at,
            "duration_s": self.duration_s or time.monotonic() - self.started, "exit_code": self.exit_code,
            "signal": self.signal, "cancelled": self.cancelled, "timed_out": self.timed_out,
            "stdout_bytes": self.out.total, "stderr_bytes": self.err.total,
        }  # fmt: skip


class Session:
    """A long-lived shell. Its fd 0 is a socket to us: commands come in and completions go out there.

    A socket cannot be reopened through /proc by other processes, the shell closes it in what it starts,
    and each completion needs that command's token, so nothing a command prints is taken for one.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.pid = 0
        self.control: Optional[socket.socket] = None
        self.writer: Optional[Writer] = None
        self.stdin: Optional[Writer] = None
        self.inbox = bytearray()
        self.pipes: Dict[int, str] = {}
        self.op: Optional[Op] = None
        self.last_op: Optional[Op] = None
        self.token = b""
        self.last_rc = 0
        self.cwd = ""
        self.created_at = self.used_at = time.time()
        self.count = 0
        self.lost: Optional[str] = None

    def info(self) -> Json:
        return {
            "session_id": self.session_id, "status": "busy" if self.op else "ready", "working_dir": self.cwd,
            "created_at": iso(self.created_at), "last_used_at": iso(self.used_at),
            "current_command": self.op.command if self.op else None, "command_count": self.count,
            "pid": self.pid, "age_seconds": int(time.time() - self.created_at),
        }  # fmt: skip


SESSION_PRELUDE = b'__sf_st() { return $1; }\n__sf_end() { command printf \'%s %s %s\\000\' "$2" "$1" "$PWD" >&0; }\n'


def iso(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) + "Z"


def start_ticks() -> int:
    """Now, in the unit and from the origin of a process's start time in /proc/PID/stat."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")) - 1


def processes() -> Iterator[Tuple[int, str, int, int, int]]:
    """Every visible process as (pid, state, parent, session, start ticks)."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                yield int(name), fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19])
            except (OSError, IndexError, ValueError):
                continue


def send_signal(pid: int, sig: int, group: bool = False) -> bool:
    try:
        (os.killpg if group else os.kill)(pid, sig)
        return True
    except OSError:
        return False


def signal_session(sid: int, sig: int, since: int = 0, spare: int = 0) -> bool:
    """Signal all processes of a session that are at least as young as ``since``; whether there were any."""
    found = False
    for pid, state, _parent, session, started in processes():
        if session == sid and pid != spare and started >= since and state != "Z":
            found = send_signal(pid, sig) or found
    return found


SIGNALS_TO_RESET = {
    getattr(signal, name)
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGPIPE",
        "SIGXFSZ",
        "SIGCHLD",
        "SIGQUIT",
        "SIGUSR1",
        "SIGUSR2",
    )
}


def is_env_name(name: str) -> bool:
    return name.isidentifier() and name.isascii()


def overlay(base: Dict[str, str], extra: Json) -> Dict[str, str]:
    env = dict(base)
    for name, value in extra.items():
        if not is_env_name(name):
            raise ApiError("invalid_argument", "not a valid variable name: %.80r" % name, argument="env")
        if value is None:
            env.pop(name, None)
        elif not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise ApiError("invalid_argument", "%s must be text without NUL" % name, argument="env")
        else:
            env[name] = str(value)
    return env


def is_kernels(path: str) -> bool:
    """Whether an absolute path lies where the kernel shows itself."""
    return (path + "/").startswith(("/proc/", "/sys/", "/dev/")) and not (path + "/").startswith("/dev/shm/")


def enter(cwd: str) -> None:
    """Make ``cwd`` the current directory, where the next child starts: posix_spawn has no chdir."""
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as exc:
        raise mapped(exc, cwd) if isinstance(exc, OSError) else ApiError(
            "invalid_argument", "NUL in a path", argument="exec_dir") from None  # fmt: skip
    # As it is written, too: what a descriptor or another process' directory leads to is not for the caller to name.
    if any(is_kernels(where) for where in (os.path.normpath(cwd), os.getcwd())):
        raise ApiError("invalid_argument", "commands do not start under /proc, /sys or /dev", argument="exec_dir")


def find_program(name: str, env: Dict[str, str]) -> str:
    if "/" in name:
        return name
    for folder in env.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder or ".", name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "not found", name)


# What bash itself carries out or gives a meaning. `true` and `false` are missing: the programs do the same.
SHELL_WORDS = frozenset(
    ". : [ alias bg bind break builtin caller case cd command compgen complete compopt continue coproc declare dirs "
    "disown do done echo elif else enable esac eval exec exit export fc fg fi for function getopts hash help history "
    "if in jobs kill let local logout mapfile popd printf pushd pwd read readarray readonly return select set shift "
    "shopt source suspend test then time times trap type typeset ulimit umask unalias unset until wait while".split()
)


def plain_argv(command: str, env: Dict[str, str]) -> Optional[List[str]]:
    """The argv of a command line that a shell would merely split at blanks and execute; None for all others.

    Nothing in it is a quote, an expansion or an operator. Leaving the shell out saves half a millisecond and a process.
    """
    argv = command.split(" ")
    name = argv[0]
    if command.strip(SHELL_SAFE + " ") or "" in argv or "=" in name or name[0] in "@%+:,-":
        return None
    return None if name in SHELL_WORDS or "BASH_ENV" in env else argv


def spawn(program: str, argv: List[str], env: Dict[str, str], fds: Fds) -> int:
    """Start a process in its own session with exactly the descriptors ``fds`` (target -> ours).

    In place of ours there may be a terminal's path: the process opens it, and the first one becomes its controlling
    terminal.
    """
    actions: List[Tuple[Any, ...]] = []
    for target, ours in sorted(fds.items()):
        if isinstance(ours, str):
            actions.append((os.POSIX_SPAWN_OPEN, target, ours, os.O_RDWR, 0))
        else:
            actions.append((os.POSIX_SPAWN_DUP2, ours, target))
    options: Json = {"file_actions": actions, "setsigmask": (), "setsigdef": SIGNALS_TO_RESET}
    try:
        return os.posix_spawn(program, argv, env, setsid=True, **options)
    except NotImplementedError:
        return os.posix_spawn(program, argv, env, setpgroup=0, **options)


def open_terminal(rows: int, cols: int) -> Tuple[int, int, str]:
    """A new terminal: its two ends, and the path of the one that a program uses."""
    try:
        master, slave = os.openpty()
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ApiError("not_supported", "the sandbox has no terminals: " + os.strerror(exc.errno or 0)) from None
    try:
        set_size(master, rows, cols)
        return master, slave, os.ttyname(slave)
    except BaseException:
        os.close(master)
        os.close(slave)
        raise


def set_size(terminal: int, rows: int, cols: int) -> None:
    """Tell a terminal its size; the kernel tells who runs there."""
    import fcntl  # noqa: PLC0415 - few sandboxes have terminals
    import termios  # noqa: PLC0415

    sizes = b"".join(size.to_bytes(2, sys.byteorder) for size in (rows, cols, 0, 0))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, sizes)


def size_asked(a: Args) -> Tuple[int, int]:
    """Rows and columns of a terminal."""
    return a.count("rows", low=1, high=10000), a.count("cols", low=1, high=10000)


def script_file(text: str) -> int:
    """A descriptor with ``text`` in it, for commands longer than the kernel's argument limit."""
    # The script closes the descriptor itself, so that what it starts does not inherit it.
    data = b"exec 9<&-; " + text.encode("utf-8", "surrogateescape")
    try:
        fd = os.memfd_create("command", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        path = "/tmp/.sandboxd-" + os.urandom(8).hex()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.unlink(path)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def oom_kills() -> int:
    """How many processes of this sandbox the kernel has ended for want of memory; 0 where it does not say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, "rb") as file:
                return sum(int(count) for name, count in (line.split() for line in file) if name == b"oom_kill")
        except (OSError, ValueError):
            continue
    return 0


class Traces:
    """Which effects there have been: nothing but that, in 12 bytes each, of the last ``most``.

    ``lost_at`` is when the latest of those ended that have left not even a trace.
    """

    ROW = 12

    def __init__(self, most: int) -> None:
        self.most, self.at, self.lost_at = most, 0, float("-inf")
        self.rows = bytearray()

    @staticmethod
    def _mark(op_id: str) -> bytes:
        return hash(op_id).to_bytes(8, "little", signed=True)

    def add(self, op_id: str, when: float) -> None:
        row = self._mark(op_id) + int(when).to_bytes(4, "little")
        if len(self.rows) < self.most * self.ROW:
            self.rows += row
            return
        self.lost_at = max(self.lost_at, int.from_bytes(self.rows[self.at + 8 : self.at + self.ROW], "little"))
        self.rows[self.at : self.at + self.ROW] = row
        self.at = (self.at + self.ROW) % len(self.rows)

    def ended(self, op_id: str, when: float) -> None:
        """Nothing else is remembered of it, or of the batch that it was a part of."""
        for name in {op_id, whole(op_id)}:
            self.add(name, when)

    def __contains__(self, op_id: str) -> bool:
        mark = self._mark(op_id)
        at = self.rows.find(mark)
        while at >= 0 and at % self.ROW:
            at = self.rows.find(mark, at + 1)
        return at >= 0


def whole(op_id: str) -> str:
    """The batch that an op id of the form ``batch.3`` is a part of; otherwise the op id itself."""
    head, _, tail = op_id.rpartition(".")
    return head if head and tail.isdigit() else op_id


class Change:
    """Whatever changes something and is no command, by its op id; with what it was answered once it is over."""

    __slots__ = ("body", "key", "op_id", "status", "waiters", "when")

    def __init__(self, op_id: str, key: int) -> None:
        self.op_id, self.key = op_id, key
        self.status, self.body, self.when = 0, b"", 0.0
        self.waiters: List[Request] = []

    def end(self, status: int, body: bytes) -> None:
        """Keep the answer, and give it to whoever repeated the request meanwhile."""
        if len(body) > ANSWER_LIMIT:
            answer = from_json(body)
            if status == 200:
                answer["data"] = {k: v for k, v in answer["data"].items() if k not in ("path", "to", "target")}
            else:
                answer["error"]["facts"] = {}
            body = to_json(answer)
        self.status, self.body, self.when = status, body, time.monotonic()
        waiters, self.waiters = self.waiters, []
        for request in waiters:
            request.raw(status, body)

    def brief(self) -> Json:
        return {"op_id": self.op_id, "kind": "change", "running": not self.status, "note": ""}


class Changes:
    """Each change under its op id, so that it is made once; and the op ids that must not begin any more."""

    def __init__(self, limits: Dict[str, int]) -> None:
        self.limits = limits
        self.known: OrderedDict[str, Change] = OrderedDict()
        self.past, self.refused = Traces(TRACES), Traces(REFUSALS)

    def check(self, op_id: str) -> None:
        """Fail if somebody was told that this has not begun."""
        if self.refused.rows and (op_id in self.refused or whole(op_id) in self.refused):
            raise ApiError("op_refused", "this operation was given up before it came", op_id=op_id)

    def repeats(self, request: Request, op_id: str) -> bool:
        """Whether this came before: then it gets the answer that the first one gets. Otherwise it is the first."""
        self.check(op_id)
        key = hash((request.path, request.query, len(request.body), bytes(request.body[:4096])))
        change = self.known.get(op_id)
        if change is None:
            self.forget(1)
            self.known[op_id] = request.change = Change(op_id, key)
            return False
        if change.key != key:
            raise ApiError("op_exists", "another operation has this op_id", op_id=op_id)
        self.answer(request, change)
        return True

    @staticmethod
    def answer(request: Request, change: Change) -> None:
        """Tell how a change ended, as soon as it has."""
        if change.status:
            request.raw(change.status, change.body)
        else:
            change.waiters.append(request)

    def forget(self, room: int = 0) -> None:
        """Drop answers over age and number. What runs stays: no more than helpers there are."""
        oldest, most = time.monotonic() - self.limits["keep_s"], self.limits["keep_changes"] - room
        for op_id, change in list(self.known.items()) if self._is_due(oldest, most) else ():
            if not change.status:
                continue
            if change.when > oldest and len(self.known) <= most:
                break
            del self.known[op_id]
            self.past.ended(op_id, change.when)

    def _is_due(self, oldest: float, most: int) -> bool:
        first = next(iter(self.known.values()), None)
        return first is not None and (len(self.known) > most or not first.status or first.when <= oldest)

    def refuse(self, op_id: str, begun: bool) -> ApiError:
        """What to say of an op id that is not remembered; unless it has ``begun`` (a part of it), it never will."""
        if op_id in self.refused or whole(op_id) in self.refused:
            pass
        elif begun or op_id in self.past or time.monotonic() - self.past.lost_at < TRACE_S:
            return ApiError("op_forgotten", "it is not known any more how this ended", op_id=op_id)
        else:
            self.refused.add(op_id, 0.0)
        return ApiError("op_refused", "this has not begun, and will not", op_id=op_id)


class Commands:
    """All running commands, the remembered ones and the shells."""

    def __init__(self, loop: Loop, env: Dict[str, str], cwd: str, limits: Dict[str, int], past: Traces) -> None:
        self.loop, self.env, self.cwd, self.limits, self.past = loop, env, cwd, limits, past
        self.oom_kills = oom_kills()
        self.ops: Dict[str, Op] = {}
        self.done: OrderedDict[str, Tuple[float, Op]] = OrderedDict()
        self.done_bytes = 0
        self.sessions: Dict[str, Session] = {}
        self.ended: OrderedDict[str, Optional[str]] = OrderedDict()
        self.orphans: List[int] = []
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.sh = "/bin/sh"
        self.bash = next((p for p in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash") if os.path.exists(p)), "")

    @property
    def running(self) -> int:
        return len(self.ops) - len(self.done)

    # -- one-shot

    def start(self, a: Args, op_id: str, key: int, combine: bool) -> Op:
        """Start a one-shot command from an exec request."""
        if self.running >= self.limits["max_ops"]:
            raise ApiError("too_busy", "too many commands are running", limit="max_ops")
        command, argv = a.text("command", None), a.texts("argv", None)
        if (command is None) == (not argv):
            raise ApiError("invalid_argument", "exactly one of command and argv", argument="command")
        if "\0" in (command or "") or any("\0" in part for part in argv or ()):
            raise ApiError("invalid_argument", "NUL in a command", argument="command")
        size = size_asked(Args(a.table("pty"))) if a.body.get("pty") is not None else None
        env = overlay({"TERM": "xterm-256color", **self.env} if size else self.env, a.table("env"))
        stdin = a.data("stdin")
        keep_stdin = a.flag("stdin_open") or size is not None
        op = Op(op_id, key, command if command is not None else joined(argv), self.cap(a), None, a)
        enter(os.path.join(self.cwd, a.text("exec_dir", self.cwd)))
        try:
            self._launch(op, command, argv, self._shell(a), env, stdin is not None or keep_stdin, combine, size)
        finally:
            os.chdir("/")
        self.ops[op_id] = op
        if op.exited is None:
            if op.stdin is not None:
                op.stdin.send(stdin or b"", eof=not keep_stdin)
            self._set_deadline(op, a)
        else:
            self._finish(op)
        return op

    def cap(self, a: Args) -> int:
        most = self.limits["max_output_bytes"]
        asked = a.count("max_output_length", MIB)
        return min(asked, most) if asked else most

    def _shell(self, a: Args) -> str:
        """The shell that was asked for; empty when none was, so that a plain command may do without."""
        wanted = a.text("shell", "")
        if not wanted:
            return ""
        path = {"sh": self.sh, "bash": self.bash or self.sh}.get(wanted, wanted)
        if not path.startswith("/"):
            raise ApiError("invalid_argument", "shell is sh, bash or an absolute path", argument="shell")
        return str(path)

    def _plumb(self, fds: Fds, ours: List[int], theirs: List[int], with_stdin: bool, combine: bool,
               size: Optional[Tuple[int, int]]) -> None:  # fmt: skip
        """Open what a command reads and writes. What is ours: the ends to read from, then the one to write to."""
        if size is not None:
            master, slave, path = open_terminal(*size)
            ours.append(master)
            theirs.append(slave)
            fds.update(dict.fromkeys((0, 1, 2), path))
            ours.append(os.dup(master))  # reading and writing are waited for apart
            return
        for target in (1,) if combine else (1, 2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            fds[target] = writer
            theirs.append(writer)
            ours.append(reader)
        fds.setdefault(2, fds[1])
        if with_stdin:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            fds[0] = reader
            theirs.append(reader)
            ours.append(writer)

    def _launch(self, op: Op, command: Optional[str], argv: List[str], shell: str, env: Dict[str, str],
                with_stdin: bool, combine: bool, size: Optional[Tuple[int, int]]) -> None:  # fmt: skip
        fds: Fds = {0: self.null}
        ours: List[int] = []
        opened: List[int] = []
        try:
            self._plumb(fds, ours, opened, with_stdin, combine, size)
            if command is None:
                self._spawn_argv(op, argv, env, fds)
            elif shell or not self._spawn_plain(op, command, env, fds):
                shell = shell or self.bash or self.sh
                argv = [os.path.basename(shell), "-c", command]
                if len(command) * 4 > SCRIPT_LIMIT and len(command.encode("utf-8", "replace")) > SCRIPT_LIMIT:
                    script = fds[9] = script_file(command)
                    opened.append(script)
                    argv = [argv[0], "/dev/fd/9"]
                op.pid = spawn(shell, argv, env, fds)
        except BaseException:
            opened += ours
            raise
        finally:
            for fd in opened:
                os.close(fd)
        if op.exited is not None:
            for fd in ours:
                os.close(fd)
            return
        if with_stdin:
            op.stdin = Writer(self.loop, ours.pop())
        op.tty = ours[0] if size is not None else None
        for fd, stream in zip(ours, (op.out, op.err)):  # noqa: B905 - Python 3.8
            os.set_blocking(fd, False)
            op.pipes[fd] = stream
            self.loop.add(fd, select.EPOLLIN, partial(self._readable, op, fd, stream))
        self.loop.children[op.pid] = partial(self._exited, op)

    @staticmethod
    def _spawn_plain(op: Op, command: str, env: Dict[str, str], fds: Fds) -> bool:
        """Start a plain command without a shell; false when it needs one, if only to tell what is wrong with it."""
        argv = plain_argv(command, env)
        if argv is None:
            return False
        try:
            op.pid = spawn(find_program(argv[0], env), argv, {**env, "PWD": os.getcwd()}, fds)
        except OSError:
            return False
        return True

    @staticmethod
    def _spawn_argv(op: Op, argv: List[str], env: Dict[str, str], fds: Fds) -> None:
        """Start a program without a shell; one that is missing ends the way a shell would report it."""
        try:
            op.pid = spawn(find_program(argv[0], env), argv, env, fds)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
                raise
            op.exited = (127 if exc.errno == errno.ENOENT else 126) << 8
            op.err.feed(("%s: %s\n" % (argv[0], os.strerror(exc.errno))).encode("utf-8", "replace"))

    def _set_deadline(self, op: Op, a: Args) -> None:
        limit = a.seconds("hard_timeout", high=float(self.limits["max_timeout_s"]))
        if limit is not None:
            op.timers.append(self.loop.later(limit, lambda: self._expire(op)))

    def _readable(self, op: Op, fd: int, stream: Stream, _mask: int) -> None:
        if not self._read(op, fd, stream):
            return
        if not op.pipes and op.exited is not None:
            self._finish(op)
        wake(op.watchers)

    def _read(self, op: Op, fd: int, stream: Stream) -> bool:
        """Take what a pipe holds now; false when there was nothing."""
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            stream.feed(data)
            op.last_data = time.monotonic()
        else:
            self.loop.remove(fd)
            os.close(fd)
            del op.pipes[fd]
        return True

    def _exited(self, op: Op, status: int) -> None:
        op.exited = status
        for fd, stream in list(op.pipes.items()):
            for _ in range(MIB // READ_SIZE):  # A background writer must not hold the answer for ever.
                if not self._read(op, fd, stream) or fd not in op.pipes:
                    break
        if not op.pipes:
            self._finish(op)
            return
        until = time.monotonic() + DRAIN_S
        op.last_data = time.monotonic()

        def check() -> None:
            left = min(op.last_data + QUIET_S, until) - time.monotonic()
            if left <= 0:
                self._finish(op)
            else:
                op.timers.append(self.loop.later(left, check))

        op.timers.append(self.loop.later(QUIET_S, check))

    def _expire(self, op: Op) -> None:
        if op.status == "running" and op.exited is None:
            op.timed_out = True
            self.signal(op, signal.SIGKILL)
            # A process in an uninterruptible wait outlives SIGKILL; the caller is answered all the same.
            op.timers.append(self.loop.later(2.0, lambda: self._finish(op)))

    def _finish(self, op: Op) -> None:
        if op.status != "running":
            return
        op.duration_s = time.monotonic() - op.started
        for timer in op.timers:
            self.loop.cancel(timer)
        for fd in op.pipes:
            self.loop.remove(fd)
            if fd == op.tty:
                os.close(fd)  # who is left there is told that the terminal is gone
            else:
                self._adopt(fd)
        op.pipes.clear()
        if op.stdin is not None and op.session is None:
            op.stdin.close()
        if op.exited is not None and os.WIFSIGNALED(op.exited):
            number = os.WTERMSIG(op.exited)
            op.exit_code, op.signal = 128 + number, signal_name(number)
        elif op.exited is not None:
            op.exit_code = os.WEXITSTATUS(op.exited)
        op.status = "killed" if op.cancelled else "completed"
        if op.timed_out:
            op.status, op.exit_code = "timed_out", None
        elif op.exit_code == KILLED and not op.cancelled:
            # Whoever is killed while the count grows is taken for the one that the kernel chose.
            kills, self.oom_kills = self.oom_kills, oom_kills()
            op.out_of_memory = self.oom_kills > kills
        self._remember(op)
        wake(op.waiters)
        wake(op.watchers)

    def _adopt(self, fd: int) -> None:
        """Keep reading for background children, slowly, so that writing does not kill them."""
        if len(self.orphans) >= 256:
            os.close(self.orphans.pop(0))
        self.orphans.append(fd)
        if len(self.orphans) == 1:
            self.loop.later(0.1, self._drain_orphans)

    def _drain_orphans(self) -> None:
        for fd in list(self.orphans):
            try:
                if not os.read(fd, MIB):
                    raise EOFError
            except BlockingIOError:
                continue
            except (OSError, EOFError):
                self.orphans.remove(fd)
                os.close(fd)
        if self.orphans:
            self.loop.later(0.1, self._drain_orphans)

    def _remember(self, op: Op) -> None:
        self.done[op.op_id] = (time.monotonic(), op)
        self.done_bytes += op.out.size + op.err.size
        # Whoever waits for this op reads its output in this turn of the loop; only then may it be evicted.
        if self.done_bytes > self.limits["keep_bytes"] or len(self.done) > self.limits["keep_ops"]:
            self.loop.later(0, self.forget)

    def forget(self) -> None:
        """Drop remembered ops over age and number; over the bytes only their output, so none runs twice."""
        oldest = time.monotonic() - self.limits["keep_s"]
        while self.done:
            op_id, (when, op) = next(iter(self.done.items()))
            if when > oldest and len(self.done) <= self.limits["keep_ops"]:
                break
            del self.done[op_id], self.ops[op_id]
            self.past.ended(op_id, when)
            self.done_bytes -= op.out.size + op.err.size
        for _when, op in list(self.done.values()):
            if self.done_bytes <= self.limits["keep_bytes"]:
                break
            size = op.out.size + op.err.size
            if size:
                op.dropped = True
                for stream in (op.out, op.err):
                    stream.head, stream.tail = bytearray(), bytearray()
                self.done_bytes -= size

    def signal(self, op: Op, sig: int) -> bool:
        if op.session is not None:
            return op.status == "running" and self._signal_in_session(op.session, op, sig)
        if op.exited is not None and any(
            other.pid == op.pid and other is not op for other in self.ops.values() if other.exited is None
        ):
            return False
        if op.tty is not None and op.exited is None and sig != signal.SIGKILL:
            return signal_session(op.pid, sig)  # a shell on a terminal puts each job into a group of its own
        found = send_signal(op.pid, sig, group=True) if op.pid else False
        if sig == signal.SIGKILL and op.pid and op.exited is None:
            found = signal_session(op.pid, sig) or found  # e.g. what `set -m` put into other groups
        return found

    def kill(self, op: Op, sig: int) -> bool:
        running = op.status == "running"
        found = self.signal(op, sig)
        if running and found:
            op.cancelled = True
        return found

    def find(self, a: Args) -> Op:
        for name in ("op_id", "command_id", "session_id"):
            value = a.text(name, None)
            if value is None:
                continue
            if value in self.ops:
                return self.ops[value]
            session = self.sessions.get(value)
            if session is not None and session.last_op is not None:
                return session.last_op
            if name == "session_id":
                raise self.gone(value)
            raise ApiError("op_not_found", "no such operation", op_id=value)
        raise ApiError("invalid_argument", "op_id, command_id or session_id is required", argument="op_id")

    # -- sessions

    def gone(self, session_id: str) -> ApiError:
        reason = self.ended.get(session_id)
        if reason is not None:
            return ApiError("session_lost", "the session was lost: " + reason, session_id=session_id, reason=reason)
        return ApiError("session_not_found", "no such session", session_id=session_id)

    def session_for(self, a: Args, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is not None:
            return session
        create = a._get("create", (bool,), None)
        if create is False or (create is None and session_id in self.ended):
            raise self.gone(session_id)
        return self.open_session(session_id, a.text("exec_dir", None), {})

    def open_session(self, session_id: str, cwd: Optional[str], env: Json) -> Session:
        if session_id in self.sessions:
            raise ApiError("already_exists", "the session exists", session_id=session_id)
        if len(self.sessions) >= self.limits["max_sessions"]:
            raise ApiError("too_busy", "too many sessions", limit="max_sessions")
        session = Session(session_id)
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        err_r, err_w = os.pipe2(os.O_CLOEXEC)
        in_r, in_w = os.pipe2(os.O_CLOEXEC)
        try:
            enter(os.path.join(self.cwd, cwd or self.cwd))
            session.cwd = os.getcwd()
            argv = ["bash", "--norc", "--noprofile", "-s"] if self.bash else ["sh", "-s"]
            fds: Fds = {0: theirs.fileno(), 1: out_w, 2: err_w, 8: in_r}
            session.pid = spawn(self.bash or self.sh, argv, overlay(self.env, env), fds)
        except BaseException:
            for fd in (out_r, err_r, in_w):
                os.close(fd)
            ours.close()
            raise
        finally:
            os.chdir("/")
            for fd in (out_w, err_w, in_r):
                os.close(fd)
            theirs.close()
        self._wire(session, ours, out_r, err_r, in_w)
        return session

    def _wire(self, session: Session, control: socket.socket, out_r: int, err_r: int, in_w: int) -> None:
        control.setblocking(False)
        session.control = control
        session.writer = Writer(self.loop, control.fileno(), own=False)
        session.stdin = Writer(self.loop, in_w)
        for fd, name in ((out_r, "out"), (err_r, "err")):
            os.set_blocking(fd, False)
            session.pipes[fd] = name
            self.loop.add(fd, select.EPOLLIN, partial(self._session_output, session, fd))
        self.loop.add(control.fileno(), select.EPOLLIN, partial(self._session_control, session))
        self.loop.children[session.pid] = partial(self._session_exited, session)
        self.sessions[session.session_id] = session
        self.ended.pop(session.session_id, None)
        session.writer.send(SESSION_PRELUDE)

    def start_in(self, session: Session, a: Args, op_id: str, key: int) -> Op:
        """Run one command in a shell."""
        for name in ("argv", "stdin", "stdin_b64", "combine", "shell", "pty"):
            if a.body.get(name):
                raise ApiError("invalid_argument", "%s does not go with session_id" % name, argument=name)
        if session.op is not None:
            raise ApiError("session_busy", "the session runs a command", session_id=session.session_id,
                           op_id=session.op.op_id)  # fmt: skip
        command = a.text("command")
        if "\0" in command:
            raise ApiError("invalid_argument", "NUL in a command", argument="command")
        op = Op(op_id, key, command, self.cap(a), session, a)
        script = self._session_script(session, a, command)
        self._discard(session)
        op.pid, op.stdin = session.pid, session.stdin if self.interactive(a) else None
        session.op = session.last_op = op
        session.count += 1
        session.used_at = time.time()
        self.ops[op_id] = op
        assert session.writer is not None
        session.writer.send(script.encode("utf-8", "surrogateescape"))
        limit = a.seconds("hard_timeout", high=float(self.limits["max_timeout_s"]))
        if limit is not None:
            op.timers.append(self.loop.later(limit, lambda: self._session_expire(session, op)))
        return op

    @staticmethod
    def interactive(a: Args) -> bool:
        return a.flag("stdin_open", a.flag("async_mode"))

    def _session_script(self, session: Session, a: Args, command: str) -> str:
        env = overlay({}, {name: value for name, value in a.table("env").items() if value is not None})
        run = "eval " + quoted(command)
        where = a.text("exec_dir", None)
        if where is not None:
            try:
                enter(os.path.join(self.cwd, where))
                where = os.path.join(self.cwd, where)
            finally:
                os.chdir("/")
            run = "eval " + quoted("if cd -- %s; then %s; else false; fi" % (quoted(where), run))
        if a.table("env"):
            gone = [name for name, value in a.table("env").items() if value is None and is_env_name(name)]
            sets = "".join("local %s=%s; export %s; " % (n, quoted(v), n) for n, v in env.items())
            sets += "".join("local %s; unset %s; " % (name, name) for name in gone)
            body = '__sf_env() { %seval "$1"; }; __sf_env %s' % (sets, quoted(run))
            run = "eval " + quoted(body)
        stdin = "<&8" if self.interactive(a) else "</dev/null"
        session.token = os.urandom(8).hex().encode()
        restore = "__sf_st %d\n" % session.last_rc if session.last_rc else ""  # what $? says
        # `command` keeps a syntax error from ending a POSIX shell. The token comes in a line of its own that
        # the shell has not read while the command runs. Short, because bash reads a socket byte by byte.
        return "%scommand %s %s 8<&-\n__sf_end $? %s\n" % (restore, run, stdin, session.token.decode())

    def _session_output(self, session: Session, fd: int, _mask: int) -> None:
        if not self._session_read(session, fd):
            return
        if session.op is not None:
            wake(session.op.watchers)
        elif fd in session.pipes:  # Between commands nobody wants it: read slowly, so that it cannot spin us.
            self.loop.mask(fd, 0)
            self.loop.later(0.1, partial(self._resume, session, fd))

    def _resume(self, session: Session, fd: int) -> None:
        if fd in session.pipes:
            self.loop.mask(fd, select.EPOLLIN)

    def _session_read(self, session: Session, fd: int) -> bool:
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.loop.remove(fd)
            os.close(fd)
            del session.pipes[fd]
            return False
        if session.op is not None:
            (session.op.out if session.pipes[fd] == "out" else session.op.err).feed(data)
        return True

    def _discard(self, session: Session) -> None:
        for fd in list(session.pipes):
            self.loop.mask(fd, select.EPOLLIN)
            for _ in range(MIB // READ_SIZE):
                if not self._session_read(session, fd):
                    break

    def _session_control(self, session: Session, _mask: int) -> None:
        assert session.control is not None
        try:
            data = session.control.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.loop.remove(session.control.fileno())
            return
        session.inbox += data
        if len(session.inbox) > MIB:
            self.lose(session, "unexpected data on the control channel")
            return
        while b"\0" in session.inbox:
            frame, _, rest = session.inbox.partition(b"\0")
            session.inbox = bytearray(rest)
            self._completed(session, bytes(frame))

    def _completed(self, session: Session, frame: bytes) -> None:
        token, _, rest = frame.partition(b" ")
        code, _, cwd = rest.partition(b" ")
        if session.op is None or not compare_digest(token, session.token) or not code.isdigit():
            return
        session.token = os.urandom(12)
        session.last_rc = int(code) & 255
        session.cwd = os.fsdecode(cwd)
        self._discard(session)
        self._end_in_session(session, session.last_rc << 8)

    def _end_in_session(self, session: Session, status: Optional[int]) -> None:
        op, session.op = session.op, None
        session.used_at = time.time()
        if op is not None:
            op.exited = status
            self._finish(op)
            if op.exit_code is not None and 128 < op.exit_code < 193 and op.signal is None and op.cancelled:
                op.signal = signal_name(op.exit_code - 128)

    def _session_exited(self, session: Session, status: int) -> None:
        """The shell is gone: by `exit`, by a signal, or because we closed it."""
        self._discard(session)
        if session.lost is None and os.WIFSIGNALED(status):
            session.lost = "the shell was ended by " + str(signal_name(os.WTERMSIG(status)))
        if session.op is not None and session.lost is not None:
            session.op.session_lost = True
        for fd in list(session.pipes):
            self.loop.remove(fd)
            self._adopt(fd)
        session.pipes.clear()
        for writer in (session.writer, session.stdin):
            if writer is not None:
                writer.close()
        if session.control is not None:
            self.loop.remove(session.control.fileno())
            session.control.close()
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]
            self.ended[session.session_id] = session.lost
            if len(self.ended) > 512:
                self.ended.popitem(last=False)
        self._end_in_session(session, status)

    def _signal_in_session(self, session: Session, op: Op, sig: int) -> bool:
        """Signal what the running command started; a shell that runs builtins for ever goes as a whole."""

        def reach() -> bool:
            return signal_session(session.pid, sig, since=op.ticks, spare=session.pid)

        def give_up_after(grace_s: float) -> None:
            op.timers.append(self.loop.later(grace_s, lambda: self.lose(session, "its command did not stop")))

        found = reach()
        if sig != signal.SIGKILL:
            return found
        if found:
            give_up_after(SESSION_GRACE_S)
        else:  # The shell may be about to start the next program of its command.
            op.timers.append(self.loop.later(QUIET_S, lambda: give_up_after(SESSION_GRACE_S if reach() else 0.0)))
        return True

    def _session_expire(self, session: Session, op: Op) -> None:
        if session.op is op:
            op.timed_out = True
            self._signal_in_session(session, op, signal.SIGKILL)
            op.timers.append(self.loop.later(3.0, lambda: self._finish(op)))

    def lose(self, session: Session, reason: str) -> None:
        session.lost = session.lost or reason
        self.close_session(session)

    def close_session(self, session: Session) -> None:
        send_signal(session.pid, signal.SIGKILL, group=True)
        signal_session(session.pid, signal.SIGKILL)


def wake(waiting: List[Callable[[], None]]) -> None:
    if waiting:
        called, waiting[:] = list(waiting), []
        for fn in called:
            fn()


def signal_name(number: int) -> str:
    return SIGNAL_NAMES.get(number) or "SIG%d" % number


def joined(argv: List[str]) -> str:
    return " ".join(quoted(part[:1000]) for part in argv[:50])


# ------------------------------------------------------------------------------------------------ files
#
# These functions know nothing of the loop: each runs either in the server or in a forked helper.


def kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def check_regular(st: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(st.st_mode):
        raise ApiError("is_directory", "Is a directory", path=path)
    if not stat.S_ISREG(st.st_mode):
        raise ApiError("not_regular_file", "Not a regular file", path=path)


def open_regular(path: str, flags: int = os.O_RDONLY) -> Tuple[int, os.stat_result]:
    """Open a regular file; a FIFO or device is refused without waiting for it or touching it."""
    check_regular(os.stat(path), path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        st = os.fstat(fd)
        check_regular(st, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, st


def write_all(fd: int, data: Union[bytes, bytearray, memoryview]) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def copy_all(source: int, target: int) -> None:
    while True:
        data = os.read(source, MIB)
        if not data:
            return
        write_all(target, data)


def digest_of(path: str) -> Optional[str]:
    """sha256 of a regular file, None when there is nothing."""
    try:
        fd, st = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        digest = digester(st.st_size)
        while True:
            data = os.read(fd, MIB)
            if not data:
                return str(digest.hexdigest())
            digest.update(data)
    finally:
        os.close(fd)


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def check_digest(path: str, wanted: Optional[str]) -> None:
    if wanted is not None:
        current = digest_of(path)
        if (current or "absent") != wanted.lower():
            raise ApiError("digest_mismatch", "the file has changed", path=path, digest=current)


def make_parents(path: str) -> None:
    """The directory ``path`` is going to be in; a link that leads nowhere is not taken for a missing one."""
    folder = os.path.dirname(path.rstrip("/")) or "/"
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ApiError("not_directory", os.strerror(errno.ENOTDIR), path=path)
    os.makedirs(folder, exist_ok=True)


class Target:
    """The place a file is going to be written at: its real path, and the file that is there now."""

    def __init__(self, path: str, create_parents: bool) -> None:
        self.path, self.real = path, os.path.realpath(path)
        self.folder = os.path.dirname(self.real)
        self.st: Optional[os.stat_result] = None
        if os.path.basename(path) in ("", ".", ".."):
            raise ApiError("is_directory", "Is a directory", path=path)
        try:
            self.st = os.stat(self.real)
        except FileNotFoundError:
            if create_parents:
                self.make_parents()
        if self.st is not None:
            # Opening for writing gives the exact reason where a rename would bypass the file's own mode.
            try:
                os.close(open_regular(self.real, os.O_WRONLY)[0])
            except OSError as exc:
                # The kernel looks at the file's mode first; what matters more is that nobody can write on this mount.
                if exc.errno in (errno.EACCES, errno.EPERM) and os.statvfs(self.folder).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path) from None
                if exc.errno != errno.ETXTBSY:
                    raise

    def make_parents(self) -> None:
        make_parents(self.path)
        os.makedirs(self.folder, exist_ok=True)  # elsewhere, when a link to a file that is yet to be written is there

    def temporary(self) -> Tuple[int, str]:
        name = os.path.join(self.folder, ".upload-" + os.urandom(8).hex() + ".part")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666), name

    def put(self, fd: int, name: str, mode: Optional[int]) -> None:
        """Give the finished temporary file its mode and its name."""
        if mode is None and self.st is not None:
            mode = self.st.st_mode & 0o777
        if mode is not None:
            os.fchmod(fd, mode)
        try:
            os.rename(name, self.real)
        except OSError as exc:
            if self.st is None or exc.errno not in (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM):
                raise
            os.lseek(fd, 0, os.SEEK_SET)  # e.g. a single mounted file: cannot be replaced, only rewritten
            self.rewrite(lambda target: copy_all(fd, target))
            os.unlink(name)

    def rewrite(self, fill: Callable[[int], None]) -> None:
        target, _st = open_regular(self.real, os.O_WRONLY)
        try:
            os.ftruncate(target, 0)
            fill(target)
        finally:
            os.close(target)

    def write(self, data: Union[bytes, bytearray], append: bool, mode: Optional[int]) -> None:
        if append:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            fd = os.open(self.real, flags, 0o666)
            try:
                check_regular(os.fstat(fd), self.path)
                write_all(fd, data)
                if mode is not None:
                    os.fchmod(fd, mode)
            finally:
                os.close(fd)
            return
        try:
            fd, name = self.temporary()
        except OSError as exc:
            if self.st is None or exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                raise
            self.rewrite(lambda target: write_all(target, data))
            return
        try:
            write_all(fd, data)
            self.put(fd, name, mode)
        except BaseException:
            remove_quietly(name)
            raise
        finally:
            os.close(fd)


def open_path(path: str) -> Optional[int]:
    """What keeps a file that is replaced; None if there is nothing to keep."""
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None


def remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def write_file(path: str, data: Union[bytes, bytearray], a: Args) -> Json:
    mode = octal(a)
    if_digest, if_size, append = a.text("if_digest", None), a.count("if_size", None), a.flag("append")
    if if_size is not None and not append:
        raise ApiError("invalid_argument", "if_size goes with append", argument="if_size")
    target = Target(path, create_parents=False)
    check_digest(target.real, if_digest)
    before = 0 if target.st is None else target.st.st_size
    if if_size is not None and before != if_size:
        raise ApiError("digest_mismatch", "the file has changed", path=path, size=before)
    if target.st is None and a.flag("create_parents", True):
        target.make_parents()
    target.write(data, append, mode)
    size = os.stat(target.real).st_size if append else len(data)
    digest = None
    # Who appends to a large file does not want it read from its beginning each time.
    if if_digest is not None or (a.flag("digest") and (not append or size <= INLINE_LIMIT)):
        digest = digest_of(target.real) if append else digest_bytes(data)
    return {"path": path, "size": size, "created": target.st is None, "digest": digest}


def octal(a: Args) -> Optional[int]:
    value = a._get("mode", (str, int), None)
    try:
        number = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        number = -1
    if number is not None and not 0 <= number <= 0o777:
        raise ApiError("invalid_argument", "mode is octal, 0 to 777", argument="mode")
    return number


def read_lines(fd: int, start: int, end: Optional[int], limit: int) -> Tuple[bytes, int, Optional[int], bool]:
    """Lines ``start`` to ``end``: the bytes, their number, all lines if the end was seen, cut short?"""
    kept: List[bytes] = []
    size, line, at_start, truncated = 0, 1, True, False
    while True:
        data = os.read(fd, MIB)
        if not data:
            text, total = b"".join(kept), line - 1 if at_start else line
            return text, text.count(b"\n") + (not text.endswith(b"\n") and bool(text)), total, truncated
        position = 0
        while line < start:  # skip to the first wanted line
            found = data.find(b"\n", position)
            if found < 0:
                position = len(data)
                break
            position, line = found + 1, line + 1
        piece = data[position:]
        if end is not None and piece:
            wanted = end - line + 1
            stop = 0
            for _ in range(min(wanted, piece.count(b"\n") + 1)):
                found = piece.find(b"\n", stop)
                stop = found + 1 if found >= 0 else len(piece)
                if found < 0:
                    break
            last = piece.count(b"\n", 0, stop) >= wanted
            line += piece.count(b"\n", 0, stop)
            piece = piece[:stop]
        else:
            last = False
            line += piece.count(b"\n")
        at_start = data.endswith(b"\n")
        kept.append(piece[: limit - size])
        truncated = truncated or len(piece) > limit - size
        size = min(limit, size + len(piece))
        if last or truncated:
            text = b"".join(kept)
            ended = last and not truncated and position + len(piece) == len(data) and not os.read(fd, 1)
            lines = text.count(b"\n") + (not text.endswith(b"\n") and bool(text))
            return text, lines, (line - 1 if at_start else line) if ended else None, truncated


def line_range(a: Args) -> Tuple[Optional[int], Optional[int]]:
    start, end = a.count("start_line", None), a.count("end_line", None)
    for name, value in (("start_line", start), ("end_line", end)):
        if value is not None and value < 1:
            raise ApiError("invalid_argument", "%s must be >= 1" % name, argument=name)
    if start is not None and end is not None and start > end:
        raise ApiError("invalid_argument", "start_line > end_line", argument="start_line")
    return start, end


def read_text(path: str, a: Args) -> Json:
    start, end = line_range(a)
    limit = min(a.count("max_bytes", CHUNK), 16 * MIB)
    fd, st = open_regular(path)
    try:
        data, lines, total, truncated = read_lines(fd, start or 1, end, limit)
    finally:
        os.close(fd)
    content: Optional[str] = None
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        content = decoder.decode(data, final=not truncated)
    except UnicodeDecodeError:
        pass
    coded = None if content is not None else to_base64(data)
    digest = digest_of(path) if a.flag("digest") else None
    return {
        "path": path,
        "content": content,
        "content_b64": coded,
        "size": st.st_size,
        "start_line": start or 1,
        "lines": lines,
        "total_lines": total,
        "truncated": truncated,
        "digest": digest,
    }


# What bytes that do not decode become while a file is looked through: a lone surrogate, which no strict decoding
# gives, so that it can be told from a U+FFFD that stands in the file.
UNDECODED = "\udcff"
codecs.register_error("sandfleet.mark", lambda exc: (UNDECODED, exc.end))  # type: ignore[attr-defined]
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip


def encoding_of(head: bytes) -> Tuple[str, bytes]:
    """The encoding and byte order mark of a text that begins so; UTF-8 where there is no mark."""
    for mark, name in MARKS:  # UTF-32's little-endian mark begins with UTF-16's, so it is looked for first
        if head.startswith(mark):
            return name, mark
    return "utf-8", b""


def text_decoder(encoding: str) -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8" if encoding == "utf-8-sig" else encoding)("sandfleet.mark")


def check_text(text: str, path: str, size: int) -> None:
    if "\0" in text or UNDECODED in text:
        raise ApiError("binary_file", "the file is not text", path=path, size=size)


def after_newlines(text: str, number: int) -> int:
    """Where the text goes on after its ``number``-th newline."""
    position = 0
    for _ in range(number):
        position = text.index("\n", position) + 1
    return position


class TextScan:
    """Lines ``start`` to ``end`` of a text that comes in pieces: the first ``most`` characters, and counts."""

    def __init__(self, start: int, end: Optional[int], most: int) -> None:
        self.start, self.end, self.most = start, end, most
        self.kept: List[str] = []
        self.line, self.at_start = 1, True  # where the next character stands
        self.chars = 0  # of the range

    @property
    def over(self) -> bool:
        """Whether the range is behind us."""
        return self.end is not None and self.line > self.end

    @property
    def full(self) -> bool:
        return self.over or self.chars > self.most

    def feed(self, text: str) -> None:
        if not text:
            return
        newlines, piece = text.count("\n"), ""
        if not self.over and self.line + newlines >= self.start:
            begin = after_newlines(text, max(0, self.start - self.line))
            stop = len(text)
            if self.end is not None and self.line + newlines > self.end:
                stop = after_newlines(text, self.end - self.line + 1)
            piece = text[begin:stop]
        if self.chars <= self.most:
            self.kept.append(piece[: self.most + 1 - self.chars])
        self.chars += len(piece)
        self.line, self.at_start = self.line + newlines, text.endswith("\n")

    @property
    def total_lines(self) -> int:
        return self.line - 1 if self.at_start else self.line

    def shown(self) -> Tuple[str, bool]:
        """The text in whole lines, and whether even its first line had to be cut."""
        text = "".join(self.kept)
        if self.chars <= self.most:
            return text, False
        end = text.rfind("\n", 0, self.most) + 1
        return text[: end or self.most], not end


def read_decoded(path: str, a: Args, check: Callable[[int], None]) -> Json:
    """A range of lines as text; ``check`` is told how many bytes were read so far.

    What is shown is read however far away it lies. Beyond it the file is only counted and digested, and only as far as
    `SCAN_LIMIT` and `SCAN_S` allow.
    """
    start, end = line_range(a)
    lenient = a.flag("lenient")
    scan = TextScan(start or 1, end, a.count("max_chars", TEXT_LIMIT, low=1, high=TEXT_LIMIT))
    fd, st = open_regular(path)
    try:
        head = read_exactly(fd, BINARY_PROBE)
        encoding, mark = encoding_of(head)
        if not lenient:
            beginning = text_decoder(encoding).decode(head[len(mark) :], final=len(head) < BINARY_PROBE)
            check_text(beginning, path, st.st_size)
        decoder = text_decoder(encoding)
        thorough, until = not lenient and st.st_size <= SCAN_LIMIT, time.monotonic() + SCAN_S
        digest = digester(st.st_size) if thorough else None
        data, size, ended = head, 0, False
        while not (scan.full and (not thorough or size > SCAN_LIMIT or time.monotonic() > until)):
            size += len(data)
            check(size)
            if digest is not None:
                digest.update(data)
                if size > SCAN_LIMIT or time.monotonic() > until:
                    digest = None
            scan.feed(decoder.decode(data[len(mark) :] if size == len(data) else data, final=not data))
            if not data:
                ended = True
                break
            data = os.read(fd, MIB)
    finally:
        os.close(fd)
    text, cut = scan.shown()
    truncated = scan.chars > scan.most
    counted = ended and (thorough or not scan.full)  # otherwise it depends on where the pieces happened to end
    if lenient:
        text = text.replace(UNDECODED, "\ufffd")
    else:
        check_text(text, path, st.st_size)
    lines = text.count("\n") + (text[-1:] not in ("", "\n"))
    return {
        "path": path,
        "content_b64": to_base64(text.encode("utf-8")),
        "start_line": scan.start,
        "end_line": scan.start + lines - 1,
        "total_lines": scan.total_lines if counted else None,
        "total_chars": scan.chars if counted or (scan.over and (thorough or not truncated)) else None,
        "truncated": truncated,
        "cut_line": cut,
        "encoding": encoding,
        "size": size if ended else st.st_size,
        "digest": digest.hexdigest() if ended and digest is not None else None,
    }


def edited(data: bytes, old: bytes, new: bytes, path: str) -> Tuple[bytes, bytes, bytes, str]:
    """What to look for and what to put there, in the file's own encoding and line ends; and that encoding.

    UTF-16 and UTF-32 with a byte order mark are edited as text: (text as UTF-8, old, new, encoding). Where every line
    ends with CR LF, a bare line feed of the caller means such an end.
    """
    encoding, mark = encoding_of(data)
    if encoding in ("utf-8", "utf-8-sig"):
        if b"\0" in data[:BINARY_PROBE]:
            raise ApiError("binary_file", "the file is not text", path=path, size=len(data))
        encoding = "utf-8"
    else:
        try:
            data = data[len(mark) :].decode(encoding).encode("utf-8")
        except UnicodeDecodeError:
            raise ApiError("binary_file", "the file is not text", path=path, size=len(data)) from None
        for name, value in (("old", old), ("new", new)):
            if value.decode("utf-8", "replace").encode("utf-8") != value:
                raise ApiError("invalid_argument", "%s is not UTF-8" % name, argument=name)
    newlines = data.count(b"\n") if b"\n" in old + new else 0
    if newlines and data.count(b"\r\n") == newlines:
        old, new = (text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for text in (old, new))
    return data, old, new, encoding


def str_replace(path: str, a: Args) -> Json:
    old, new = a.data("old"), a.data("new") or b""
    if not old:
        raise ApiError("invalid_argument", "old must not be empty", argument="old")
    target = Target(path, create_parents=False)
    if target.st is None:
        raise ApiError("path_not_found", os.strerror(errno.ENOENT), path=path)
    fd, st = open_regular(target.real)
    try:
        if st.st_size > EDIT_LIMIT:
            raise ApiError("file_too_large", "too large to edit", path=path, size=st.st_size, limit=EDIT_LIMIT)
        data = read_exactly(fd, EDIT_LIMIT)
    finally:
        os.close(fd)
    wanted = a.text("if_digest", None)
    if wanted is not None:
        # Of the bytes that are going to be edited: the file may change between two looks at it.
        current = digest_bytes(data)
        if current != wanted.lower():
            raise ApiError("digest_mismatch", "the file has changed", path=path, digest=current)
    data, old, new, encoding = edited(data, old, new, path)
    count = data.count(old)
    if count == 0:
        raise ApiError("no_match", "the text was not found", path=path)
    if count > 1 and not a.flag("replace_all"):
        lines, position, line = [], -1, 1
        for _ in range(min(count, 20)):
            found = data.find(old, 0 if position < 0 else position + len(old))
            line += data.count(b"\n", max(position, 0), found)
            position = found
            lines.append(line)
        raise ApiError("ambiguous_match", "the text was found several times", path=path, count=count, lines=lines)
    if len(data) + count * (len(new) - len(old)) > EDIT_LIMIT * 2:
        raise ApiError("file_too_large", "the result would be too large", path=path, limit=EDIT_LIMIT * 2)
    data = data.replace(old, new)
    if encoding != "utf-8":
        data = {name: mark for mark, name in MARKS}[encoding] + data.decode("utf-8").encode(encoding)
    target.write(data, False, None)
    return {"path": path, "count": count, "size": len(data), "digest": digest_bytes(data)}


def read_exactly(fd: int, limit: int) -> bytes:
    parts, size = [], 0
    while size < limit:
        data = os.read(fd, min(MIB, limit - size))
        if not data:
            break
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def describe(path: str, a: Args) -> Json:
    st = os.stat(path) if a.flag("follow", True) else os.lstat(path)
    target = os.readlink(path) if os.path.islink(path) else None
    digest = digest_of(path) if a.flag("digest") and stat.S_ISREG(st.st_mode) else None
    return {"path": path, "name": os.path.basename(path.rstrip("/")) or "/", "type": kind(st.st_mode),
            "size": st.st_size, "mtime": st.st_mtime, "mode": stat.S_IMODE(st.st_mode), "uid": st.st_uid,
            "gid": st.st_gid, "target": target, "digest": digest}  # fmt: skip


def exists(path: str, _a: Args) -> Json:
    try:
        found: Optional[str] = kind(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    return {"path": path, "exists": found is not None, "type": found}


def make_link(path: str, a: Args) -> Json:
    """A symbolic link at ``path``; one that is there already is replaced with ``overwrite``, nothing else is."""
    target = a.text("target")
    if not target or "\0" in target:
        raise ApiError("invalid_argument", "target is empty or has a NUL", argument="target")
    if path.endswith("/"):
        raise ApiError("is_directory", "Is a directory", path=path)
    if a.flag("create_parents", True):
        make_parents(path)
    if a.flag("overwrite") and os.path.islink(path):
        name = os.path.join(os.path.dirname(path), ".upload-" + os.urandom(8).hex() + ".part")
        os.symlink(target, name)
        try:
            os.rename(name, path)
        except BaseException:
            remove_quietly(name)
            raise
    else:
        os.symlink(target, path)
    return {"path": path, "target": target}


def disk_usage(path: str) -> int:
    """Bytes that a tree occupies on its file system; a file with several names counts once."""
    total, seen = os.lstat(path).st_blocks * 512, set()
    for _relative, entry, _depth in Walk(path, []):
        try:
            st = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode):
            if (st.st_dev, st.st_ino) in seen:
                continue
            seen.add((st.st_dev, st.st_ino))
        total += st.st_blocks * 512
    return total


def usage() -> Json:
    """What this process and everything below it uses. Processor time includes what has ended and was waited for."""
    rows: Dict[int, List[bytes]] = {}
    below: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            rows[int(name)] = fields
            below.setdefault(int(fields[1]), []).append(int(name))
    tree, found = [os.getpid()], 0
    while found < len(tree):
        tree.extend(below.get(tree[found], ()))
        found += 1
    ticks = sum(int(part) for pid in tree if pid in rows for part in rows[pid][11:15])
    pages = sum(int(rows[pid][21]) for pid in tree if pid in rows)
    return {
        "cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "pids": len(tree),
        "network_bytes": None if interfaces() else 0,
    }


def process_table(top: int, without: Any) -> List[Json]:
    """What runs below process ``top``, itself first, oldest first, without some; the first `PROCESSES` of it."""
    rows: Dict[int, Tuple[str, List[bytes]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    head, _, rest = file.read().rpartition(b")")
            except OSError:
                continue
            rows[int(name)] = head.partition(b"(")[2].decode("utf-8", "replace"), rest.split()
    below: Dict[int, List[int]] = {}
    for pid, (_name, fields) in rows.items():
        below.setdefault(int(fields[1]), []).append(pid)
    inside = [top]
    for pid in inside:
        inside.extend(below.get(pid, ()))
    now, ticks, page = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    table: List[Json] = []
    for pid in sorted(set(inside) & set(rows) - set(without), key=lambda pid: (int(rows[pid][1][19]), pid))[:PROCESSES]:
        name, fields = rows[pid]
        table.append({
            "pid": pid, "ppid": int(fields[1]), "state": fields[0].decode(), "command": command_of(pid, name),
            "cpu_s": (int(fields[11]) + int(fields[12])) / ticks, "memory_bytes": int(fields[21]) * page,
            "started_s": round(max(0.0, now - int(fields[19]) / ticks), 2), "uid": owner_of(pid),
        })  # fmt: skip
    return table


def command_of(pid: int, name: str) -> str:
    """A process' command line, or its name in brackets when it has none; 200 characters at most."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        words = ""
    return (words or "[%s]" % name)[:200]


def owner_of(pid: int) -> Optional[int]:
    try:
        return os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None


def interfaces() -> List[str]:
    """Network interfaces other than loopback: without any there is no traffic to count."""
    with open("/proc/self/net/dev", encoding="ascii", errors="replace") as file:
        names = [line.partition(":")[0].strip() for line in file if ":" in line]
    return [name for name in names if name != "lo"]


def move(path: str, a: Args, to: str) -> Json:
    if not a.flag("overwrite", True) and os.path.lexists(to):
        raise ApiError("already_exists", "the target exists", path=to)
    if os.path.isdir(to) and not os.path.isdir(path):
        raise ApiError("is_directory", "the target is a directory", path=to)
    os.lstat(path)
    if a.flag("create_parents", True):
        make_parents(to)
    if a.flag("follow") and a.flag("overwrite", True) and os.path.islink(to):
        to = os.path.realpath(to)
    try:
        os.rename(path, to)
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ApiError("already_exists", "the target is not empty", path=to) from None
        if exc.errno != errno.EXDEV:
            raise
        fd, st = open_regular(path)
        try:
            target = Target(to, create_parents=False)
            temp, name = target.temporary()
            try:
                copy_all(fd, temp)
                target.put(temp, name, st.st_mode & 0o777)
            except BaseException:
                remove_quietly(name)
                raise
            finally:
                os.close(temp)
        finally:
            os.close(fd)
        os.unlink(path)
    return {"path": path, "to": to}


def remove(path: str, a: Args) -> Json:
    try:
        st = os.lstat(path)
        if os.path.basename(path.rstrip("/")) in (".", ".."):
            # The kernel refuses these names too, but only when everything below is gone.
            raise ApiError("invalid_argument", os.strerror(errno.EINVAL), path=path)
        if not stat.S_ISDIR(st.st_mode):
            os.unlink(path)
        elif a.flag("recursive"):
            import shutil  # noqa: PLC0415 - only a helper needs it

            shutil.rmtree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        if a.flag("missing_ok"):
            return {"path": path, "removed": False}
        raise
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ApiError("invalid_argument", "the directory is not empty", argument="recursive", path=path) from None
        raise
    return {"path": path, "removed": True}


def make_dir(path: str, a: Args) -> Json:
    mode = octal(a)
    try:
        (os.makedirs if a.flag("parents", True) else os.mkdir)(path)
    except FileExistsError:
        if not a.flag("exist_ok", True) or not os.path.isdir(path):
            raise
        return {"path": path, "created": False}
    if mode is not None:
        os.chmod(path, mode)
    return {"path": path, "created": True}


# ----------------------------------------------------------------------------------------------- search


class TooSlow(Exception):
    """A listing begun in the server is long enough to deserve a helper."""


def no_check() -> None:
    return None


TESTS: Dict[Tuple[str, ...], Callable[[str], bool]] = {}


def one_of(patterns: Tuple[str, ...]) -> Callable[[str], bool]:
    """A test whether a name matches any of the fnmatch patterns; those made last are kept."""
    test = TESTS.get(patterns)
    if test is None:
        if len(TESTS) >= 16:
            TESTS.clear()
        test = TESTS[patterns] = test_of(patterns)
    return test


def test_of(patterns: Tuple[str, ...]) -> Callable[[str], bool]:
    names = frozenset(p for p in patterns if not any(char in p for char in "*?["))
    if len(names) == len(set(patterns)):
        return names.__contains__
    import fnmatch  # noqa: PLC0415 - who never searches does without
    import re  # noqa: PLC0415

    match = re.compile("|".join(fnmatch.translate(p) for p in patterns if p not in names)).match
    return lambda name: name in names or match(name) is not None


def scan(folder: str, check: Callable[[], None]) -> List[os.DirEntry[str]]:
    entries: List[os.DirEntry[str]] = []
    with os.scandir(folder) as found:
        for entry in found:
            entries.append(entry)
            if not len(entries) & 255:
                check()
    entries.sort(key=lambda entry: os.fsencode(entry.name))
    return entries


def is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


class Walk:
    """Everything below a directory, depth first, sorted, not through symlinks; counts what was unreadable."""

    def __init__(
        self, root: str, ignore: Sequence[str], depth: int = 10**6, check: Callable[[], None] = no_check
    ) -> None:
        self.root, self.depth, self.check, self.errors = root, depth, check, 0
        self.ignored = one_of(tuple(ignore))

    def __iter__(self) -> Iterator[Tuple[str, os.DirEntry[str], int]]:
        stack = [(iter(scan(self.root, self.check)), "", 1)]
        while stack:
            entries, prefix, depth = stack[-1]
            for entry in entries:
                if self.ignored(entry.name):
                    continue
                relative = prefix + entry.name
                yield relative, entry, depth
                if depth < self.depth and is_dir(entry):
                    try:
                        stack.append((iter(scan(entry.path, self.check)), relative + "/", depth + 1))
                    except OSError:
                        self.errors += 1
                        continue
                    break
            else:
                stack.pop()
            self.check()


def glob_matcher(pattern: str) -> Callable[[str], bool]:
    """A test of a relative path: without a slash by its last component, else with a true ``**``."""
    import re  # noqa: PLC0415 - who never searches does without

    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not parts or pattern.startswith("/") or ".." in parts or "\0" in pattern:
        raise ApiError("invalid_pattern", "a glob is relative, without '..'", pattern=pattern, reason="relative")
    if "/" not in pattern and parts != ["**"]:
        parts = ["**", *parts]
    # Repeated "**" mean the same as one, but would make the expression explode.
    parts = [part for i, part in enumerate(parts) if part != "**" or i == 0 or parts[i - 1] != "**"]
    text = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            text += r"[^/]+(?:/[^/]+)*" if last else r"(?:[^/]+/)*"
        else:
            text += glob_part(re.sub(r"\*+", "*", part)) + ("" if last else "/")
    try:
        match = re.compile(text + r"\Z", re.DOTALL).match
    except re.error as exc:
        raise ApiError("invalid_pattern", "not a valid glob", pattern=pattern, reason=str(exc)) from None
    return lambda path: match(path) is not None


def glob_part(part: str) -> str:
    import re  # noqa: PLC0415 - who never searches does without

    text, i = "", 0
    while i < len(part):
        char = part[i]
        i += 1
        if char == "*":
            text += "[^/]*"
        elif char == "?":
            text += "[^/]"
        elif char == "[":
            end = part.find("]", i + 1 if part[i : i + 1] not in ("!", "^") else i + 2)
            if end < 0:
                text += r"\["
                continue
            inner = re.sub(r"([\\\[&|~])", r"\\\1", part[i:end])
            text += "(?!/)[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
            i = end + 1
        else:
            text += re.escape(char)
    return text


def list_dir(path: str, a: Args, check: Callable[[], None] = no_check) -> Json:
    most = a.count("max_entries", 5000, high=200000)
    walk = Walk(path, a.texts("ignore", []), a.count("max_depth", 2, low=1), check)
    entries: List[Json] = []
    truncated = False
    for relative, entry, depth in walk:
        if len(entries) >= most:
            truncated = True
            break
        try:
            st = entry.stat(follow_symlinks=False)
            target = os.readlink(entry.path) if stat.S_ISLNK(st.st_mode) else None
        except OSError:
            continue  # removed meanwhile
        entries.append({"path": os.path.join(path, relative), "name": entry.name, "type": kind(st.st_mode),
                        "size": st.st_size, "mtime": st.st_mtime, "mode": stat.S_IMODE(st.st_mode),
                        "depth": depth, "target": target})  # fmt: skip
    return {"path": path, "entries": entries, "truncated": truncated, "errors": walk.errors}


def glob_files(path: str, a: Args) -> Json:
    matches_glob = glob_matcher(a.text("pattern"))
    most, dirs = a.count("max_results", 200, low=1), a.flag("include_dirs")
    walk = Walk(path, a.texts("ignore", IGNORE))
    found: List[str] = []
    for relative, entry, _depth in walk:
        if matches_glob(relative) and (dirs or not is_dir(entry)):
            if len(found) >= most:
                return {"path": path, "matches": found, "truncated": True, "errors": walk.errors}
            found.append(os.path.join(path, relative))
    return {"path": path, "matches": found, "truncated": False, "errors": walk.errors}


def grep_expression(pattern: str, literal: bool, case_sensitive: bool) -> Tuple[re.Pattern[str], bool]:
    """The compiled pattern, and whether it is plain text that a whole file may be tested for at once."""
    import re  # noqa: PLC0415 - who never searches does without

    if literal or re.escape(pattern) == pattern:
        return re.compile(re.escape(pattern), 0 if case_sensitive else re.IGNORECASE), True
    try:
        return re.compile(pattern, 0 if case_sensitive else re.IGNORECASE), False
    except (re.error, RecursionError, OverflowError) as exc:
        raise ApiError("invalid_pattern", "not a valid expression: %s" % exc, pattern=pattern,
                       reason=str(exc)) from None  # fmt: skip


class Grep:
    def __init__(self, a: Args) -> None:
        expression, self.plain = grep_expression(a.text("pattern"), a.flag("literal"), a.flag("case_sensitive"))
        self.search = expression.search
        wanted = a.text("glob", None)
        self.wanted = glob_matcher(wanted) if wanted else None
        self.most, self.large = a.count("max_results", 100, low=1), a.count("max_file_size", 1000000)
        self.matches: List[Json] = []
        self.skipped = {"large": 0, "binary": 0, "long_lines": 0, "errors": 0}
        self.searched = 0
        self.truncated = False

    def file(self, path: str) -> bool:
        """Search one file; true when there are more matches than wanted."""
        try:
            fd, st = open_regular(path)
        except (OSError, ApiError):
            self.skipped["errors"] += 1
            return False
        try:
            data = b"" if st.st_size > self.large else read_exactly(fd, self.large + 1)
        except OSError:
            self.skipped["errors"] += 1
            return False
        finally:
            os.close(fd)
        if max(st.st_size, len(data)) > self.large:
            self.skipped["large"] += 1
            return False
        if b"\0" in data[:8192]:
            self.skipped["binary"] += 1
            return False
        self.searched += 1
        return self.text(path, data.decode("utf-8", "replace"))

    def text(self, path: str, text: str) -> bool:
        if self.plain and not self.search(text):
            if len(text) > 2000:
                self.skipped["long_lines"] += sum(len(line) > 2000 for line in text.split("\n"))
            return False
        search = self.search
        lines = text.split("\n")
        if lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines, 1):
            if len(line) > 2000:
                self.skipped["long_lines"] += 1
            elif search(line.rstrip("\r")):
                if len(self.matches) >= self.most:
                    self.truncated = True
                    return True
                shown = line.rstrip("\r")
                shown = shown if len(shown) <= 200 else shown[:200] + "..."
                self.matches.append({"path": path, "line_number": number, "line": shown})
        return False


def grep_files(path: str, a: Args) -> Json:
    grep = Grep(a)
    if stat.S_ISDIR(os.stat(path).st_mode):
        walk = Walk(path, a.texts("ignore", IGNORE))
        for relative, entry, _depth in walk:
            try:
                regular = entry.is_file(follow_symlinks=False)
            except OSError:
                regular = False
            if regular and (grep.wanted is None or grep.wanted(relative)) and grep.file(os.path.join(path, relative)):
                break
        grep.skipped["errors"] += walk.errors
    else:
        os.close(open_regular(path)[0])
        if grep.wanted is None or grep.wanted(os.path.basename(path)):
            grep.file(path)
    return {
        "path": path,
        "matches": grep.matches,
        "truncated": grep.truncated,
        "files_searched": grep.searched,
        "skipped": grep.skipped,
    }


# ------------------------------------------------------------------------------------------------- HTTP


class Request:
    """One request and the single answer it gets, now or later."""

    __slots__ = ("body", "change", "conn", "done", "headers", "method", "path", "query", "reserved", "tail")

    def __init__(self, conn: Conn, method: str, path: str, query: str, headers: Dict[bytes, bytes]) -> None:
        self.conn, self.method, self.path, self.headers = conn, method, path, headers
        self.query = query
        self.body: Union[bytes, bytearray] = b""
        self.tail = ""
        self.done = False
        self.reserved = 0
        self.change: Optional[Change] = None  # what keeps the answer

    def args(self) -> Args:
        if not self.body:
            return Args({})
        try:
            value = from_json(self.body)
        except (ValueError, RecursionError):
            raise ApiError("invalid_argument", "the body is not JSON", argument="body") from None
        if not isinstance(value, dict):
            raise ApiError("invalid_argument", "the body is not a JSON object", argument="body")
        return Args(value)

    def params(self) -> Args:
        """The query string as arguments: numbers and flags become what they say."""
        values: Json = {}
        for pair in filter(None, self.query.replace("+", " ").split("&")):
            name, value = (unquoted(part, "surrogateescape") for part in pair.partition("=")[::2])
            if name in ("offset", "length", "limit", "if_size"):
                if not (value.isascii() and value.isdigit()) or len(value) > 18:
                    raise ApiError("invalid_argument", "%s is not a number" % name, argument=name)
                values[name] = int(value)
            elif name in ("append", "create_parents", "digest", "disk"):
                values[name] = value.lower() in ("1", "true", "yes")
            else:
                values[name] = value
        return Args(values)

    def ok(self, data: Any, parts: Sequence[bytes] = ()) -> None:
        """Answer with ``data``, followed by a line feed and the bytes of ``parts`` if there are any."""
        if self.done:
            return
        body = success_body(data)
        if any(parts):
            self.done = True
            self.conn.answer(self, 200, b"Content-Type: application/octet-stream\r\n", body + b"\n", None, parts)
        else:
            self.raw(200, body)

    def fail(self, error: ApiError) -> None:
        self.raw(error.status, failure_body(error))

    def raw(self, status: int, body: bytes) -> None:
        if not self.done:
            self.done = True
            if self.change is not None:
                self.change.end(status, body)
            self.conn.answer(self, status, b"Content-Type: application/json\r\n", body, None)

    def send_file(self, fd: int, offset: int, length: int, headers: bytes) -> None:
        self.done = True
        self.conn.answer(self, 200, b"Content-Type: application/octet-stream\r\n" + headers, b"", (fd, offset, length))


REASONS = {200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
           405: b"Method Not Allowed", 409: b"Conflict", 410: b"Gone", 411: b"Length Required",
           413: b"Payload Too Large", 431: b"Headers Too Large", 500: b"Internal Error",
           503: b"Unavailable", 504: b"Timeout", 507: b"Insufficient Storage"}  # fmt: skip


class Conn:
    """One client connection. Requests are parsed by hand and answered in order, one at a time."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server, self.sock, self.fd = server, sock, sock.fileno()
        self.buf = bytearray()
        self.out: deque[Any] = deque()
        self.request: Optional[Request] = None  # head parsed, body still coming
        self.need = 0
        self.busy = self.closing = self.draining = self.eof = self.closed = self.pumping = False
        self.since = self.last = time.monotonic()
        self.events = select.EPOLLIN
        server.loop.add(self.fd, self.events, self.on_event)

    def watch(self, events: int) -> None:
        if events != self.events and not self.closed:
            self.events = events
            self.server.loop.mask(self.fd, events)

    def on_event(self, mask: int) -> None:
        if mask & (select.EPOLLHUP | select.EPOLLERR) and not mask & select.EPOLLIN:
            self.close()
            return
        if mask & select.EPOLLOUT:
            self.flush()
        if mask & select.EPOLLIN and not self.closed:
            self.receive()

    def receive(self) -> None:
        try:
            data = self.sock.recv(READ_SIZE if self.request is None else MIB)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self.last = time.monotonic()
        if data and self.draining:
            return
        if not data:
            self.eof = True
            if self.busy or self.out:
                self.watch(self.events & ~select.EPOLLIN)
            else:
                self.close()
            return
        if not self.buf and self.request is None:
            self.since = self.last
        self.buf += data
        if self.busy:
            if len(self.buf) > MAX_HEADER:
                self.watch(self.events & ~select.EPOLLIN)
        else:
            self.pump()

    def pump(self) -> None:
        """Handle as many buffered requests as can be answered at once."""
        if self.pumping:
            return
        self.pumping = True
        try:
            while not (self.busy or self.closed or self.closing or self.out):
                if self.request is None and not self.parse_head():
                    break
                request = self.request
                if request is None or len(self.buf) < self.need:
                    break
                if len(self.buf) == self.need:
                    request.body, self.buf = self.buf, bytearray()
                else:
                    request.body = bytes(self.buf[: self.need])
                    del self.buf[: self.need]
                self.request, self.busy = None, True
                self.server.handle(request)
        except ApiError as error:
            self.refuse(error)
        finally:
            self.pumping = False
        if not (self.busy or self.closed or self.eof):
            self.watch(self.events | select.EPOLLIN)
        elif self.eof and not (self.busy or self.out):
            self.close()

    def parse_head(self) -> bool:
        while self.buf[:2] == b"\r\n":
            del self.buf[:2]
        end = self.buf.find(b"\r\n\r\n")
        if end < 0 and len(self.buf) <= MAX_HEADER:
            return False
        if end < 0 or end > MAX_HEADER:
            raise ApiError("invalid_argument", "the header is too large", status=431)
        lines = bytes(self.buf[:end]).split(b"\r\n")
        del self.buf[: end + 4]
        headers: Dict[bytes, bytes] = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        words = lines[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            raise ApiError("invalid_argument", "not an HTTP/1.1 request")
        path, _, query = words[1].decode("latin-1").partition("?")
        request = Request(self, words[0].decode("latin-1"), path, query, headers)
        self.need = self.server.admit(request)
        self.request = request
        if headers.get(b"expect", b"").lower() == b"100-continue" and len(self.buf) < self.need:
            self.out.append(memoryview(b"HTTP/1.1 100 Continue\r\n\r\n"))
            self.flush(resume=False)
        return True

    def refuse(self, error: ApiError) -> None:
        """Answer a request that cannot be read on; where it ends is unknown, so the connection ends too."""
        self.closing = self.draining = True
        self.answer(None, error.status, b"Content-Type: application/json\r\n", failure_body(error), None)

    def answer(self, request: Optional[Request], status: int, headers: bytes, body: bytes,
               file: Optional[Tuple[int, int, int]], parts: Sequence[bytes] = ()) -> None:  # fmt: skip
        if request is not None:
            self.server.inflight -= request.reserved
            request.reserved, request.body = 0, b""
            if request.headers.get(b"connection", b"").lower() == b"close":
                self.closing = True
        if self.closed:
            if file is not None:
                os.close(file[0])
            return
        length = file[2] if file is not None else len(body) + sum(map(len, parts))
        head = b"HTTP/1.1 %d %s\r\n%sContent-Length: %d\r\n%s\r\n" % (
            status,
            REASONS.get(status, b"Status"),
            headers,
            length,
            b"Connection: close\r\n" if self.closing else b"",
        )
        self.busy = False
        self.since = self.last = time.monotonic()
        if length < READ_SIZE:
            self.out.append(memoryview(b"".join((head, body, *parts))))
        else:
            self.out.extend(memoryview(part) for part in (head, body, *parts) if part)
        if file is not None:
            self.out.append(file)
        self.flush()

    def flush(self, resume: bool = True) -> None:
        try:
            while self.out:
                self.send_first()
        except BlockingIOError:
            self.watch(self.events | select.EPOLLOUT)
            return
        except OSError:
            self.close()
            return
        self.watch(self.events & ~select.EPOLLOUT)
        if self.draining:
            # Closing on unread input would reset the connection and take the answer with it.
            self.sock.shutdown(socket.SHUT_WR)
            self.buf.clear()
            self.server.loop.later(2.0, self.close)
        elif self.closing and not self.busy:
            self.close()
        elif resume:
            self.pump()

    def send_first(self) -> None:
        first = self.out[0]
        if isinstance(first, memoryview):
            sent = self.sock.send(first)
            if sent < len(first):
                self.out[0] = first[sent:]
            else:
                self.out.popleft()
        else:
            fd, offset, left = first
            sent = os.sendfile(self.fd, fd, offset, min(left, MIB)) if left else 0
            if left and not sent:
                raise ConnectionAbortedError("the file shrank")
            if sent < left:
                self.out[0] = (fd, offset + sent, left - sent)
            else:
                os.close(fd)
                self.out.popleft()
        self.last = time.monotonic()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for item in self.out:
            if not isinstance(item, memoryview):
                os.close(item[0])
        self.out.clear()
        if self.request is not None:
            self.server.inflight -= self.request.reserved
        self.server.loop.remove(self.fd)
        self.server.conns.pop(self.fd, None)
        try:  # A helper forked meanwhile may still hold the socket: the client must see the end now.
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()

    def stalled(self, now: float) -> bool:
        if self.out:
            return now - self.last > 300
        if self.request is not None:
            return now - self.last > 60
        return bool(self.buf) and not self.busy and now - self.since > 30


# ----------------------------------------------------------------------------------------------- server


class Upload:
    """A file that arrives in chunks, in a temporary file beside its target."""

    def __init__(self, path: str, a: Args) -> None:
        self.path, self.append, self.mode = path, a.flag("append"), octal(a)
        self.if_digest = a.text("if_digest", None)
        target = Target(path, a.flag("create_parents", True))
        self.created = target.st is None
        try:
            self.fd, self.name = target.temporary()
        except PermissionError:
            if target.st is None:
                raise
            target.folder = "/tmp"  # the file may be written, its directory not
            self.fd, self.name = target.temporary()
        self.received = 0
        self.digest = digester(MAX_RAW_BODY)
        self.touched = time.monotonic()

    def chunk(self, offset: int, data: Union[bytes, bytearray], limit: int) -> None:
        self.touched = time.monotonic()
        if self.received + len(data) > limit:
            raise ApiError(
                "file_too_large",
                "the upload is too large",
                path=self.path,
                size=self.received + len(data),
                limit=limit,
            )
        if offset + len(data) <= self.received and os.pread(self.fd, len(data), offset) == data:
            return
        if offset != self.received:
            raise ApiError("invalid_argument", "chunks come in order", argument="offset", received=self.received)
        os.lseek(self.fd, offset, os.SEEK_SET)
        write_all(self.fd, data)
        self.digest.update(data)
        self.received += len(data)

    def commit(self, a: Args) -> Json:
        size, wanted, digest = a.count("size", None), a.text("sha256", None), self.digest.hexdigest()
        if (size is not None and size != self.received) or (wanted is not None and wanted.lower() != digest):
            raise ApiError(
                "digest_mismatch",
                "the upload is not what was sent",
                path=self.path,
                digest=digest,
                size=self.received,
            )
        target = Target(self.path, create_parents=False)
        check_digest(target.real, self.if_digest)
        if self.append:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(target.real, flags, 0o666)
            try:
                check_regular(os.fstat(fd), self.path)
                os.lseek(self.fd, 0, os.SEEK_SET)
                copy_all(self.fd, fd)
            finally:
                os.close(fd)
        else:
            target.put(self.fd, self.name, self.mode)
        return {
            "path": self.path,
            "size": size_of(target.real),
            "created": target.st is None,
            "digest": None if self.append else digest,  # of what was appended it would say nothing about the file
        }

    def drop(self) -> None:
        os.close(self.fd)
        remove_quietly(self.name)


class Server:
    """Routes requests, runs helpers, and sweeps what nobody came back for."""

    def __init__(self, config: Json, listener: socket.socket) -> None:
        self.limits = {
            **LIMITS,
            **{k: v for k, v in (config.get("limits") or {}).items() if k in LIMITS and v},
        }
        self.key = bytes.fromhex(config["key"])
        self.token = config.get("token")
        self.bearer = b"Bearer " + self.token.encode() if self.token else b""
        self.cwd = config.get("cwd") or "/mnt/user-data/workspace"
        self.loop = Loop()
        env = overlay({"PATH": os.defpath, **os.environ}, config.get("env") or {})
        self.changes = Changes(self.limits)
        self.commands = Commands(self.loop, env, self.cwd, self.limits, self.changes.past)
        self.listener = listener
        self.conns: Dict[int, Conn] = {}
        self.uploads: Dict[str, Upload] = {}
        self.helpers: Dict[int, Timer] = {}
        self.inflight = 0
        self.started = self.heard = time.monotonic()
        self.orphan_s = config.get("orphan_s") or 0.0
        self.measured = self.started, 0.0
        self.routes = self._routes()
        self.loop.add(listener.fileno(), select.EPOLLIN, self._accept)
        self.loop.later(5.0, self._sweep)

    # -- connections

    def _accept(self, _mask: int) -> None:
        for _ in range(16):
            try:
                fd, _addr = self.listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError:  # Out of descriptors: one idle client makes room.
                if not self._close_idlest():
                    time.sleep(0.01)
                return
            sock = socket.socket(fileno=fd)
            if len(self.conns) >= self.limits["max_connections"] and not self._close_idlest():
                sock.close()
                continue
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conn = Conn(self, sock)
            self.conns[conn.fd] = conn

    def _close_idlest(self) -> bool:
        idle = [conn for conn in self.conns.values() if not conn.busy and not conn.out]
        if idle:
            min(idle, key=lambda conn: conn.last).close()
        return bool(idle)

    def _sweep(self) -> None:
        now = time.monotonic()
        if self.conns:
            self.heard = now
        elif 0 < self.orphan_s < now - self.heard:
            self._end()  # nobody has come back for this sandbox
        for conn in list(self.conns.values()):
            if conn.stalled(now):
                conn.close()
        for upload_id, upload in list(self.uploads.items()):
            if now - upload.touched > 600:
                self.uploads.pop(upload_id).drop()
        self.commands.forget()
        self.changes.forget()
        self.loop.reap()
        self.loop.later(5.0, self._sweep)

    def admit(self, request: Request) -> int:
        """Check what the head of a request says before its body is read; the length of the body."""
        if self.bearer and not compare_digest(request.headers.get(b"authorization", b""), self.bearer):
            raise ApiError("permission_denied", "a bearer token is required", status=401)
        if b"transfer-encoding" in request.headers:
            raise ApiError("invalid_argument", "Content-Length is required", status=411)
        text = request.headers.get(b"content-length", b"0")
        if not text.isdigit() or len(text) > 15:
            raise ApiError("invalid_argument", "not a Content-Length")
        raw = request.method == "PUT"
        length, limit = int(text), MAX_RAW_BODY if raw else self.limits["max_json_bytes"]
        if length > limit:
            raise ApiError("invalid_argument", "the body is too large", status=413, limit=limit)
        if length > MIB:
            if self.inflight + length > self.limits["max_inflight_bytes"]:
                raise ApiError("too_busy", "too many bytes in flight", limit="max_inflight_bytes")
            self.inflight += length
            request.reserved = length
        return length

    def handle(self, request: Request) -> None:
        try:
            self._find_route(request)(request)
        except Exception as exc:  # noqa: BLE001 - the caller is answered, whatever it was
            error = mapped(exc)
            if error.code == "internal":
                log(request.path, exc)
            request.fail(error)

    def _find_route(self, request: Request) -> Handler:
        handler = self.routes.get((request.method, request.path))
        if handler is not None:
            return handler
        head, _, tail = request.path.rpartition("/sessions/")
        if head in ("/v1/bash", "/v1/shell") and tail:
            close = tail.endswith("/close") and request.method == "POST" and head == "/v1/bash"
            request.tail = unquoted(tail[: -len("/close")] if close else tail)
            if close or request.method == "DELETE":
                return self.close_session
        if any(path == request.path for _method, path in self.routes):
            raise ApiError("invalid_argument", "method not allowed", status=405)
        raise ApiError("invalid_argument", "no such route", status=404)

    # -- helpers

    def fork_helper(
        self, work: Callable[[], Any], timeout_s: Optional[float], then: Callable[[int, bytes], None]
    ) -> None:
        """Hand ``then`` the answer of ``work``, done in a forked process that is killed at its time limit."""
        if len(self.helpers) >= self.limits["max_helpers"]:
            raise ApiError("too_busy", "too many searches are running", limit="max_helpers")
        limit = 20.0 if timeout_s is None else timeout_s
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            helper_main(writer, work)
        os.close(writer)
        os.set_blocking(reader, False)
        parts: List[bytes] = []

        def end() -> None:
            self.loop.remove(reader)
            os.close(reader)
            self.loop.cancel(self.helpers.pop(pid))
            if pid in self.loop.children:  # not reaped yet, so the pid is still its own
                send_signal(pid, signal.SIGKILL)

        def readable(_mask: int) -> None:
            try:
                data = os.read(reader, MIB)
            except BlockingIOError:
                return
            if data:
                parts.append(data)
                return
            end()
            status, _, body = b"".join(parts).partition(b"\n")
            if status.isdigit() and body:
                then(int(status), body)
            else:
                then(500, failure_body(ApiError("internal", "the helper died", type="helper")))

        def expire() -> None:
            end()
            then(
                504,
                failure_body(ApiError("search_timeout", "took longer than %g s" % limit, timeout_s=limit)),
            )

        self.loop.children[pid] = lambda _status: None
        self.helpers[pid] = self.loop.later(limit, expire)
        self.loop.add(reader, select.EPOLLIN, readable)

    def work(self, request: Request, path: str, heavy: bool, fn: Callable[[], Any], timeout_s: Optional[float]) -> None:
        """Run file work here, or in a helper when it is ``heavy``; its errors name ``path``."""

        def named() -> Any:
            try:
                return fn()
            except OSError as exc:
                raise mapped(exc, path) from exc

        if heavy:
            one_of(IGNORE)  # here once, with what searching imports, and not in each helper
            self.fork_helper(named, timeout_s, request.raw)
        else:
            request.ok(named())

    def path(self, value: str, name: str = "path") -> str:
        if not value or "\0" in value:
            raise ApiError("invalid_argument", "%s is empty or has a NUL" % name, argument=name)
        return os.path.join(self.cwd, value)

    # -- service

    def _routes(self) -> Dict[Tuple[str, str], Handler]:
        post: Dict[str, Handler] = {
            "bash/exec": self.bash_exec, "bash/output": self.bash_output, "bash/write": self.bash_write,
            "bash/kill": self.bash_kill, "bash/sessions/create": self.create_session,
            "shell/exec": self.shell_exec, "shell/view": self.shell_view, "shell/wait": self.shell_wait,
            "shell/write": self.shell_write, "shell/kill": self.shell_kill,
            "shell/sessions/create": self.create_session,
            "file/read": self.aio_read, "file/write": self.aio_write, "file/replace": self.aio_replace,
            "file/search": self.aio_search, "file/find": self.aio_find, "file/glob": self.aio_glob,
            "file/grep": self.aio_grep, "file/list": self.aio_list, "file/upload": self.aio_upload,
            "sandfleet/fs": self.fs, "sandfleet/op": self.op, "sandfleet/shutdown": self.shutdown,
            "sandfleet/resize": self.resize,
            "sandfleet/upload/begin": self.upload_begin, "sandfleet/upload/commit": self.upload_commit,
            "sandfleet/upload/abort": self.upload_abort,
        }  # fmt: skip
        routes = {("POST", "/v1/" + name): handler for name, handler in post.items()}
        routes.update(
            {
                ("GET", "/v1/sandbox"): self.sandbox,
                ("GET", "/v1/sandfleet/hello"): self.hello,
                ("GET", "/v1/sandfleet/stats"): self.stats,
                ("GET", "/v1/sandfleet/ops"): self.list_ops,
                ("GET", "/v1/sandfleet/processes"): self.list_processes,
                ("GET", "/v1/bash/sessions"): self.bash_sessions,
                ("GET", "/v1/shell/sessions"): self.shell_sessions,
                ("DELETE", "/v1/shell/sessions"): self.close_sessions,
                ("GET", "/v1/shell/sessions/stats"): self.session_stats,
                ("GET", "/v1/sandfleet/file"): self.download,
                ("GET", "/v1/file/download"): self.download,
                ("PUT", "/v1/sandfleet/file"): self.put_file,
                ("PUT", "/v1/sandfleet/upload/chunk"): self.upload_chunk,
            }
        )
        return routes

    def sandbox(self, request: Request) -> None:
        home, kernel = self.commands.env.get("HOME", "/"), os.uname()
        system: Json = {
            "os": kernel.sysname,
            "os_version": kernel.release,
            "arch": kernel.machine,
            "user": self.commands.env.get("USER") or str(os.getuid()),
            "home_dir": home,
            "workspace": self.cwd,
            "timezone": time.tzname[0],
            "occupied_ports": [],
        }
        detail = {"system": system, "runtime": {"python": [], "nodejs": []}, "utils": []}
        answer = {"success": True, "message": "ok", "data": None, "home_dir": home, "workspace": self.cwd,
                  "version": "sandboxd-" + VERSION, "detail": detail}  # fmt: skip
        request.raw(200, to_json(answer))

    def hello(self, request: Request) -> None:
        challenge = request.params().text("challenge", None)
        proof = None
        if challenge is not None:
            try:
                asked = bytes.fromhex(challenge)
            except ValueError:
                asked = b""
            if not 1 <= len(asked) <= 64:
                raise ApiError("invalid_argument", "challenge is 1 to 64 bytes in hex", argument="challenge")
            proof = hmac_sha256(self.key, asked)
        request.ok(
            {
                "proof": proof,
                "version": VERSION,
                "pid": os.getpid(),
                "uid": os.getuid(),
                "python": sys.version.split()[0],
                "uptime_s": round(time.monotonic() - self.started, 3),
                "ops_running": self.commands.running,
                "sessions": len(self.commands.sessions),
            }
        )

    def stats(self, request: Request) -> None:
        me = os.getpid()
        with open("/proc/self/statm", "rb") as file:
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        commands = self.commands
        used = usage()
        last_at, last_cpu_s = self.measured
        self.measured = time.monotonic(), used["cpu_s"]
        passed_s = self.measured[0] - last_at
        used["cpu_percent"] = round(100 * max(0.0, used["cpu_s"] - last_cpu_s) / passed_s, 1) if passed_s > 0 else None
        told: Json = {
            **used,
            "fds": len(os.listdir("/proc/self/fd")) - 1,
            "connections": len(self.conns),
            "ops_running": commands.running,
            "ops_kept": len(commands.done),
            "ops_kept_bytes": commands.done_bytes,
            "changes_kept": len(self.changes.known),
            "sessions": len(commands.sessions),
            "uploads": len(self.uploads),
            "helpers": len(self.helpers),
            "orphan_pipes": len(commands.orphans),
            "rss_bytes": rss,
            "zombies": sum(state == "Z" and parent == me for _pid, state, parent, _sid, _start in processes()),
            "uptime_s": round(time.monotonic() - self.started, 3),
            "disk_bytes": None,
        }
        if not request.params().flag("disk"):
            request.ok(told)
            return
        home = os.path.dirname(self.cwd.rstrip("/")) or "/"

        def then(status: int, body: bytes) -> None:
            # A tree too large to be counted in time is not known; the rest is.
            told["disk_bytes"] = from_json(body)["data"] if status == 200 else None
            request.ok(told)

        self.fork_helper(lambda: disk_usage(home), DISK_S, then)

    def list_ops(self, request: Request) -> None:
        known: List[Any] = [*self.commands.ops.values(), *self.changes.known.values()]
        request.ok({"ops": [each.brief() for each in known]})

    def list_processes(self, request: Request) -> None:
        me, helpers = os.getpid(), set(self.helpers)
        # Reading what a process is called may wait for it as long as it likes, so a helper does it.
        self.fork_helper(lambda: {"processes": process_table(me, helpers | {os.getpid()})}, 5.0, request.raw)

    def shutdown(self, request: Request) -> None:
        if not self.token:
            raise ApiError("permission_denied", "shutdown needs a configured token")
        self._end(lambda: request.ok({}))

    def _end(self, last: Callable[[], None] = lambda: None) -> NoReturn:
        """Kill all that was started here, and exit."""
        for op in list(self.commands.ops.values()):
            if op.session is None and op.status == "running":
                self.commands.signal(op, signal.SIGKILL)
        for session in list(self.commands.sessions.values()):
            self.commands.close_session(session)
        for upload in self.uploads.values():
            upload.drop()
        me = os.getpid()
        for pid, _state, parent, _sid, _start in list(processes()):
            if parent == me:
                send_signal(pid, signal.SIGKILL)
        last()
        os._exit(0)

    # -- commands

    def bash_exec(self, request: Request) -> None:
        a = request.args()
        code = encoding(a, "raw")
        self.run_command(request, a, "session_id", lambda op: self.tell(request, op, code))

    @staticmethod
    def tell(request: Request, op: Op, code: str, partial: bool = True) -> None:
        """Answer with a command's result; raw output follows it as it is, of one that runs only if ``partial``."""
        if code == "raw":
            parts = (op.out.kept(), op.err.kept()) if partial or op.status != "running" else (b"", b"")
            request.ok({**op.result(code), "raw": [len(part) for part in parts]}, parts)
        else:
            request.ok(op.result(code))

    def run_command(self, request: Request, a: Args, session_field: str, tell: Callable[[Op], None]) -> None:
        """Start a command, or join the one that has this op_id already, and ``tell`` the caller of it."""
        commands = self.commands
        session_id = a.ident(session_field)
        op_id = a.ident("op_id") or os.urandom(12).hex()
        key = hash((a.text("command", None), tuple(a.texts("argv", ())), session_id))
        op = commands.ops.get(op_id)
        if (op is not None and op.key != key) or op_id in self.changes.known:
            raise ApiError("op_exists", "another command has this op_id", op_id=op_id)
        if op is None:
            self.changes.check(op_id)
        if op is None and session_id is not None:
            op = commands.start_in(commands.session_for(a, session_id), a, op_id, key)
        elif op is None:
            op = commands.start(a, op_id, key, a.flag("combine", session_field == "id"))
        wait_s = 0.0 if a.flag("async_mode") else a.seconds("timeout")
        self.when_done(request, op, wait_s, lambda: tell(op))

    def when_done(self, request: Request, op: Op, wait_s: Optional[float], tell: Callable[[], None]) -> None:
        """Tell of the command when it ends, or after ``wait_s`` how far it is."""
        if op.status != "running" or wait_s == 0:
            tell()
            return
        timer: Optional[Timer] = None

        def fire() -> None:
            self.loop.cancel(timer)
            if fire in op.waiters:
                op.waiters.remove(fire)
            try:
                tell()
            except Exception as exc:  # noqa: BLE001 - the caller is answered, whatever it was
                request.fail(mapped(exc))

        if wait_s is not None:
            timer = self.loop.later(wait_s, fire)
        op.waiters.append(fire)

    def op(self, request: Request) -> None:
        a = request.args()
        op_id, code, partial = str(a.ident("op_id", "")), encoding(a, "raw", "none"), a.flag("partial", True)
        wait_s = a.seconds("wait_timeout", 30.0) if a.flag("wait") else 0.0
        op, change = self.commands.ops.get(op_id), self.changes.known.get(op_id)
        if op is not None:
            found = op
            self.when_done(request, found, wait_s, lambda: self.tell(request, found, code, partial))
        elif change is not None:
            self.changes.answer(request, change)
            if not change.status:
                self.loop.later(wait_s or 0.0, lambda: request.ok({"op_id": op_id, "status": "running"}))
        elif a.flag("refuse"):
            parts = any(whole(known) == op_id for known in (*self.commands.ops, *self.changes.known))
            raise self.changes.refuse(op_id, parts)
        else:
            self.changes.check(op_id)
            raise ApiError("op_not_found", "no such operation", op_id=op_id)

    def repeats(self, request: Request, a: Args, name: str = "op_id") -> bool:
        """Whether a change was asked for before under its id, if it has one; who repeats it is answered then."""
        op_id = a.ident(name)
        if op_id is not None and op_id in self.commands.ops:
            raise ApiError("op_exists", "another operation has this op_id", op_id=op_id)
        return op_id is not None and self.changes.repeats(request, op_id)

    def bash_output(self, request: Request) -> None:
        a = request.args()
        op = self.commands.find(a)
        code, limit = encoding(a, "raw"), a.count("max_bytes", MIB, low=1, high=16 * MIB)
        offsets = a.count("offset", 0), a.count("stderr_offset", 0)
        settle_s = a.seconds("settle", 0.0, 1.0) or 0.0

        def fresh() -> int:
            return int(max(op.out.total - offsets[0], op.err.total - offsets[1]))

        def answer() -> None:
            data, parts = output_shape(op, offsets, limit, code)
            request.ok(data, parts)

        def shown() -> bool:
            """Whether there is anything: half a character is nothing."""
            data, _parts = output_shape(op, offsets, limit, code) if code != "raw" else ({}, ())
            return bool(data["stdout"] or data["stderr"]) if data else fresh() > 0

        def fire() -> None:
            if op.status == "running" and timer.fn is not None:
                if not shown():
                    op.watchers.append(fire)  # half a character, or the other stream's end
                    return
                if settle_s and fresh() < min(limit, SETTLED):
                    self.loop.cancel(timer)
                    self.loop.later(settle_s, answer)
                    return
            self.loop.cancel(timer)
            if fire in op.watchers:
                op.watchers.remove(fire)
            answer()

        wait_s = a.seconds("wait_timeout", 30.0)
        if not a.flag("wait") or op.status != "running" or not wait_s or (shown() and not settle_s):
            answer()
            return
        timer = self.loop.later(wait_s, fire)
        fire()

    def resize(self, request: Request) -> None:
        a = request.args()
        op, size = self.commands.find(a), size_asked(a)
        if op.tty is None:
            raise ApiError("invalid_argument", "the command has no terminal", argument="op_id")
        if op.tty in op.pipes:
            set_size(op.tty, *size)
        request.ok({"op_id": op.op_id, "status": op.status})

    def bash_write(self, request: Request) -> None:
        a = request.args()
        if self.repeats(request, a, "change_id"):
            return
        op, data = self.commands.find(a), a.data("input") or b""
        if op.stdin is None or op.stdin.closed or op.stdin.eof or op.status != "running":
            raise ApiError("invalid_argument", "the command's stdin is not open", argument="op_id")
        if op.stdin.pending + len(data) > 64 * MIB:
            raise ApiError("too_busy", "the command does not read its stdin", limit="stdin")
        if a.flag("eof") and op.tty is not None:
            op.stdin.send(data + b"\4")  # what a terminal takes for the end
        else:
            op.stdin.send(data, eof=a.flag("eof") and op.session is None)
        request.ok({"accepted_bytes": len(data)})

    def bash_kill(self, request: Request) -> None:
        a = request.args()
        if self.repeats(request, a, "change_id"):
            return
        op = self.commands.find(a)
        found = self.commands.kill(op, signal_number(a))
        request.ok({"op_id": op.op_id, "status": op.status, "signalled": found})

    def create_session(self, request: Request) -> None:
        a = request.args()
        session_id = a.ident("session_id") or a.ident("id") or os.urandom(8).hex()
        request.ok(self.commands.open_session(session_id, a.text("exec_dir", None), a.table("env")).info())

    def bash_sessions(self, request: Request) -> None:
        request.ok([session.info() for session in self.commands.sessions.values()])

    def shell_sessions(self, request: Request) -> None:
        request.ok({"sessions": {s.session_id: s.info() for s in self.commands.sessions.values()}})

    def session_stats(self, request: Request) -> None:
        total, most = len(self.commands.sessions), self.limits["max_sessions"]
        active = sum(session.op is not None for session in self.commands.sessions.values())
        request.ok({"total_sessions": total, "active_sessions": active, "idle_sessions": total - active,
                    "max_sessions": most, "session_timeout": 0, "usage_ratio": total / most})  # fmt: skip

    def close_session(self, request: Request) -> None:
        if self.repeats(request, request.args()):
            return
        if request.tail not in self.commands.sessions:
            raise self.commands.gone(request.tail)
        self._close_session(request.tail)
        request.ok({"session_id": request.tail})

    def close_sessions(self, request: Request) -> None:
        for session_id in list(self.commands.sessions):
            self._close_session(session_id)
        request.ok({})

    def _close_session(self, session_id: str) -> None:
        # The name is free at once, although the shell's death is still to be noticed.
        session = self.commands.sessions.pop(session_id)
        self.commands.ended[session_id] = None
        if session.op is not None:
            session.op.cancelled = True
        self.commands.close_session(session)

    # -- AIO shell

    def shell_exec(self, request: Request) -> None:
        a = request.args()
        code = encoding(a)
        self.run_command(request, a, "id", lambda op: request.ok(shell_shape(op, code)))

    def shell_op(self, a: Args) -> Op:
        return self.commands.find(Args({"session_id": a.text("id")}))

    def shell_view(self, request: Request) -> None:
        request.ok(shell_shape(self.shell_op(request.args()), "utf-8"))

    def shell_wait(self, request: Request) -> None:
        a = request.args()
        op = self.shell_op(a)
        wait_s = a.seconds("max_wait_seconds", a.seconds("seconds", 60.0))
        self.when_done(request, op, wait_s, lambda: request.ok({"status": shell_status(op), "exit_code": op.exit_code}))

    def shell_write(self, request: Request) -> None:
        a = request.args()
        op, text = self.shell_op(a), a.text("input") + ("\n" if a.flag("press_enter") else "")
        if op.stdin is None or op.status != "running":
            raise ApiError("invalid_argument", "the command's stdin is not open", argument="id")
        op.stdin.send(text.encode("utf-8", "surrogateescape"))
        request.ok({"status": shell_status(op)})

    def shell_kill(self, request: Request) -> None:
        op = self.shell_op(request.args())
        code = op.exit_code
        self.commands.kill(op, signal.SIGKILL)
        request.ok({"status": "terminated", "exit_code": code, "returncode": code})

    # -- files

    def download(self, request: Request) -> None:
        a = request.params()
        path = self.path(a.text("path"))
        offset, length, limit = a.count("offset", 0), a.count("length", None), a.count("limit", 1024 * MIB)
        if a.flag("digest") and size_of(path) > INLINE_LIMIT:
            self._digest_first(request, path, lambda digest: self._send(request, path, offset, length, limit, digest))
            return
        digest = digest_of(path) if a.flag("digest") else None
        self._send(request, path, offset, length, limit, digest)

    def _digest_first(self, request: Request, path: str, send: Callable[[Optional[str]], None]) -> None:
        """Have a helper digest a large file, then go on here with what it answered."""

        def then(status: int, body: bytes) -> None:
            if status != 200:
                request.raw(status, body)
                return
            try:
                send(from_json(body)["data"])
            except Exception as exc:  # noqa: BLE001 - the caller is answered, whatever it was
                request.fail(mapped(exc, path))

        self.fork_helper(lambda: digest_of(path), 60.0, then)

    def _send(self, request: Request, path: str, offset: int, length: Optional[int], limit: int,
              digest: Optional[str]) -> None:  # fmt: skip
        fd, st = open_regular(path)
        left = max(0, st.st_size - offset)
        if length is None and left > limit:
            os.close(fd)
            raise ApiError("file_too_large", "the file is too large", path=path, size=st.st_size, limit=limit)
        headers = "X-File-Size: %d\r\nX-File-Mode: %o\r\nX-File-Mtime: %.6f\r\n" % (
            st.st_size, stat.S_IMODE(st.st_mode), st.st_mtime)  # fmt: skip
        if digest is not None:
            headers += "X-File-Digest: %s\r\n" % digest
        request.send_file(fd, offset, left if length is None else min(length, left), headers.encode("ascii"))

    def put_file(self, request: Request) -> None:
        a = request.params()
        if self.repeats(request, a):
            return
        path, data = self.path(a.text("path")), request.body
        heavy = a.text("if_digest", None) is not None or (a.flag("digest") and a.flag("append"))
        before = open_path(path) if len(data) > READ_SIZE else None
        try:
            self.work(request, path, heavy and size_of(path) > INLINE_LIMIT, lambda: write_file(path, data, a), None)
        finally:
            if before is not None:
                os.close(before)  # after the answer: the end of a replaced file may wait for the disk

    def upload_begin(self, request: Request) -> None:
        a = request.args()
        if len(self.uploads) >= self.limits["max_uploads"]:
            raise ApiError("too_busy", "too many uploads", limit="max_uploads")
        upload_id = os.urandom(12).hex()
        path = self.path(a.text("path"))

        def begin() -> Json:
            self.uploads[upload_id] = Upload(path, a)
            return {"upload_id": upload_id, "chunk_bytes": CHUNK, "received": 0}

        self.work(request, path, False, begin, None)

    def upload_of(self, a: Args) -> Upload:
        upload = self.uploads.get(a.text("id"))
        if upload is None:
            raise ApiError("invalid_argument", "no such upload", argument="id")
        return upload

    def upload_chunk(self, request: Request) -> None:
        a = request.params()
        upload, data = self.upload_of(a), request.body
        offset = a.count("offset")

        def chunk() -> Json:
            upload.chunk(offset, data, self.limits["max_upload_bytes"])
            return {"received": upload.received}

        self.work(request, upload.path, False, chunk, None)

    def upload_commit(self, request: Request) -> None:
        a = request.args()
        if self.repeats(request, a):
            return
        upload = self.upload_of(a)
        del self.uploads[a.text("id")]
        try:
            self.work(request, upload.path, False, lambda: upload.commit(a), None)
        finally:
            upload.drop()

    def upload_abort(self, request: Request) -> None:
        a = request.args()
        self.upload_of(a).drop()
        del self.uploads[a.text("id")]
        request.ok({})

    def fs(self, request: Request) -> None:
        a = request.args()
        do = a.text("do")
        if do in FS_CHANGES and self.repeats(request, a):
            return
        path, work = self.path(a.text("path")), FS_WORK.get(do)
        timeout_s = a.seconds("timeout", 20.0, 600.0)
        if do == "move":
            to = self.path(a.text("to"), "to")
            heavy = os.path.isfile(path) and size_of(path) > INLINE_LIMIT and not same_device(path, to)
            self.work(request, path, heavy, lambda: move(path, a, to), timeout_s)
        elif do == "text":
            self.answer_text(request, path, a, timeout_s)
        elif do == "list":
            self.answer_listing(request, path, a, lambda check: list_dir(path, a, check), timeout_s)
        elif work is None:
            raise ApiError("invalid_argument", "unknown do: %.40r" % do, argument="do")
        else:
            self.work(request, path, is_heavy(do, path, a), lambda: work(path, a), timeout_s)

    def answer_listing(
        self,
        request: Request,
        path: str,
        a: Args,
        listing: Callable[[Callable[[], None]], Json],
        timeout_s: Optional[float],
    ) -> None:
        """Begin a listing here, where it is quickest; a long one is begun anew in a helper."""
        until = time.monotonic() + 0.01

        def check() -> None:
            if time.monotonic() > until:
                raise TooSlow

        try:
            self.work(request, path, False, lambda: listing(check), timeout_s)
        except TooSlow:
            self.work(request, path, True, lambda: listing(no_check), timeout_s)

    def answer_text(self, request: Request, path: str, a: Args, timeout_s: Optional[float]) -> None:
        """Read a small file here, where it is quickest; what turns out to be large is begun anew in a helper."""

        def check(size: int) -> None:
            if size > MIB:
                raise TooSlow

        try:
            self.work(request, path, False, lambda: read_decoded(path, a, check), timeout_s)
        except TooSlow:
            self.work(request, path, True, lambda: read_decoded(path, a, lambda _size: None), timeout_s)

    # -- AIO files

    def aio_read(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("file"), "file")
        start, end = a.count("start_line", 0), a.count("end_line", None)

        def read() -> Json:
            if end is not None and end <= start:
                return {"content": "", "file": path}
            data = read_text(path, Args({"start_line": start + 1, "end_line": end, "max_bytes": 16 * MIB}))
            content = data["content"]
            if content is None:
                content = unbase64(data["content_b64"], "content").decode("utf-8", "replace")
            return {"content": content, "file": path}

        self.work(request, path, size_of(path) > INLINE_LIMIT, read, 20.0)

    def aio_write(self, request: Request) -> None:
        a = request.args()
        path, content = self.path(a.text("file"), "file"), a.text("content")
        if a.text("encoding", "utf-8") == "base64":
            data = unbase64(content, "content")
        else:
            text = "\n" * a.flag("leading_newline") + content + "\n" * a.flag("trailing_newline")
            data = text.encode("utf-8", "surrogateescape")
        options = Args({"append": a.flag("append")})

        def write() -> Json:
            write_file(path, data, options)
            return {"file": path, "bytes_written": len(data)}

        self.work(request, path, False, write, None)

    def aio_replace(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("file"), "file")
        options = Args({"old": a.text("old_str"), "new": a.text("new_str"), "replace_all": True})

        def replace() -> Json:
            try:
                count = str_replace(path, options)["count"]
            except ApiError as error:
                if error.code != "no_match":
                    raise
                count = 0
            return {"file": path, "replaced_count": count}

        self.work(request, path, size_of(path) > INLINE_LIMIT, replace, 20.0)

    def aio_search(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("file"), "file")
        options = Args({"pattern": a.text("regex"), "case_sensitive": True, "max_results": 10000,
                        "max_file_size": EDIT_LIMIT})  # fmt: skip

        def search() -> Json:
            matches = grep_files(path, options)["matches"]
            return {"file": path, "matches": [m["line"] for m in matches],
                    "line_numbers": [m["line_number"] for m in matches]}  # fmt: skip

        self.work(request, path, True, search, None)

    def aio_find(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("path"))
        options = Args({"pattern": a.text("glob"), "max_results": 10000, "include_dirs": True, "ignore": []})
        self.work(request, path, True, lambda: {"path": path, "files": glob_files(path, options)["matches"]}, None)

    def aio_glob(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("path"))
        ignore = list(a.texts("exclude", [])) + ([] if a.flag("include_hidden") else [".*"])
        options = Args(
            {
                "pattern": a.text("pattern"),
                "ignore": ignore,
                "max_results": a.count("max_results", 1000),
                "include_dirs": not a.flag("files_only", True),
            }
        )

        def glob() -> Json:
            found = glob_files(path, options)
            files = [file_info(name) for name in found["matches"]]
            return {"path": path, "pattern": a.text("pattern"), "files": files, "total_count": len(files),
                    "truncated": found["truncated"]}  # fmt: skip

        self.work(request, path, True, glob, None)

    def aio_grep(self, request: Request) -> None:
        a = request.args()
        path, include = self.path(a.text("path")), a.texts("include", None)
        options = Args(
            {
                "pattern": a.text("pattern"),
                "literal": a.flag("fixed_strings"),
                "case_sensitive": not a.flag("case_insensitive"),
                "max_results": a.count("max_results", 1000),
                "ignore": a.texts("exclude", []),
                "max_file_size": byte_count(a.text("max_file_size", "1M")),
                "glob": include[0] if include and len(include) == 1 else None,
            }
        )

        def grep() -> Json:
            wanted = one_of(tuple(include or ()))
            data = grep_files(path, options)
            found = [m for m in data["matches"] if not include or len(include) == 1
                     or wanted(os.path.basename(m["path"]))]  # fmt: skip
            matches = [{"file": m["path"], "line_number": m["line_number"], "line_content": m["line"]} for m in found]
            return {
                "path": path,
                "pattern": a.text("pattern"),
                "matches": matches,
                "match_count": len(matches),
                "files_searched": data["files_searched"],
                "files_matched": len({m["file"] for m in matches}),
                "truncated": data["truncated"],
            }

        self.work(request, path, True, grep, None)

    def aio_list(self, request: Request) -> None:
        a = request.args()
        path = self.path(a.text("path"))
        options = Args(
            {
                "max_depth": a.count("max_depth", 100, low=1) if a.flag("recursive") else 1,
                "ignore": [] if a.flag("show_hidden") else [".*"],
                "max_entries": 100000,
            }
        )

        def listing(check: Callable[[], None]) -> Json:
            files = [file_info(e["path"]) for e in list_dir(path, options, check)["entries"]]
            folders = sum(item["is_directory"] for item in files)
            return {"path": path, "files": files, "total_count": len(files), "directory_count": folders,
                    "file_count": len(files) - folders}  # fmt: skip

        self.answer_listing(request, path, a, listing, 20.0)

    def aio_upload(self, request: Request) -> None:
        path, data = multipart(request.headers.get(b"content-type", b""), request.body)
        target = self.path(path)

        def write() -> Json:
            write_file(target, data, Args({}))
            return {"file_path": target, "file_size": len(data), "success": True}

        self.work(request, target, False, write, None)


FS_WORK: Dict[str, Callable[[str, Args], Json]] = {
    "stat": describe, "exists": exists, "read": read_text, "glob": glob_files, "grep": grep_files,
    "str_replace": str_replace, "remove": remove, "make_dir": make_dir, "make_link": make_link,
}  # fmt: skip
FS_CHANGES = frozenset(("move", "str_replace", "remove", "make_dir", "make_link"))


def is_heavy(do: str, path: str, a: Args) -> bool:
    """Whether file work may take so long that it must not run in the server."""
    if do in ("glob", "grep"):
        return True
    if do == "remove":
        return a.flag("recursive") and os.path.isdir(path) and not os.path.islink(path)
    if do == "read":
        ranged = a.count("start_line", 1) > 1 or a.count("max_bytes", CHUNK) > CHUNK or a.flag("digest")
        return ranged and size_of(path) > INLINE_LIMIT
    return (do == "str_replace" or (do == "stat" and a.flag("digest"))) and size_of(path) > INLINE_LIMIT


def same_device(path: str, to: str) -> bool:
    try:
        return os.stat(path).st_dev == os.stat(os.path.dirname(to)).st_dev
    except OSError:
        return True


def encoding(a: Args, *more: str) -> str:
    code, known = a.text("encoding", "utf-8"), ("utf-8", "base64", *more)
    if code not in known:
        raise ApiError("invalid_argument", "encoding is one of " + ", ".join(known), argument="encoding")
    return str(code)


def signal_number(a: Args) -> int:
    value = a._get("signal", (str, int), "SIGTERM")
    name = value.upper() if isinstance(value, str) else SIGNAL_NAMES.get(value, "")
    number = SIGNALS.get(name if name.startswith("SIG") else "SIG" + name)
    if number is None:
        raise ApiError("invalid_argument", "unknown signal", argument="signal")
    return number


def output_shape(op: Op, offsets: Tuple[int, int], limit: int, code: str) -> Tuple[Json, Sequence[bytes]]:
    """What a follower of a command gets: the JSON, and the bytes behind it if they are to be ``raw``."""
    running = op.status == "running"
    out, out_at, out_lost = piece(op.out, offsets[0], limit, code, running)
    err, err_at, err_lost = piece(op.err, offsets[1], limit, code, running)
    data: Json = {
        "session_id": op.session_id, "op_id": op.op_id, "stdout": out, "stderr": err,
        "offset": out_at, "stderr_offset": err_at, "skipped": out_lost, "stderr_skipped": err_lost,
        "status": op.status, "exit_code": op.exit_code,
        "command": {"command_id": op.op_id, "command": op.command, "status": op.status, "exit_code": op.exit_code},
    }  # fmt: skip
    if code != "raw":
        return data, ()
    return {**data, "stdout": None, "stderr": None, "raw": [len(out), len(err)]}, (out, err)


def piece(stream: Stream, offset: int, limit: int, code: str, running: bool) -> Tuple[Any, int, int]:
    """A part of a stream for a follower: its text, the next offset, the bytes lost before it."""
    data, at, lost = stream.since(offset, limit)
    if code == "raw":
        return data, at + len(data), lost
    if code == "base64":
        return to_base64(data), at + len(data), lost
    whole = data
    if running or at + len(data) < stream.total:
        whole = data[: len(data) - unfinished(data)]
    return whole.decode("utf-8", "replace"), at + len(whole), lost


def unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def shell_status(op: Op) -> str:
    return {"timed_out": "hard_timeout", "killed": "terminated"}.get(op.status, op.status)


def shell_shape(op: Op, code: str) -> Json:
    data = op.result(code, with_output=True)
    console = [{"ps1": "$", "command": op.command, "output": data["output"]}]
    return {**data, "status": shell_status(op), "console": console}


def file_info(path: str) -> Json:
    st = os.lstat(path)
    name = os.path.basename(path)
    return {"path": path, "name": name, "is_directory": stat.S_ISDIR(st.st_mode), "size": st.st_size,
            "modified_time": iso(st.st_mtime), "permissions": stat.filemode(st.st_mode),
            "extension": os.path.splitext(name)[1] or None}  # fmt: skip


def byte_count(text: str) -> int:
    text = text.upper()
    number = text[:-1] if text.endswith("B") else text
    unit = {"K": 1024, "M": MIB, "G": 1024 * MIB}.get(number[-1:], 0)
    number = number[:-1] if unit else number
    if not (number.isascii() and number.isdigit()) or len(number) > 12:
        raise ApiError("invalid_argument", "not a size", argument="max_file_size")
    return min(int(number) * (unit or 1), EDIT_LIMIT)


def multipart(content_type: bytes, body: Union[bytes, bytearray]) -> Tuple[str, bytes]:
    """The fields ``path`` and ``file`` of a form; without a path the file's own name counts."""
    import re  # noqa: PLC0415 - only few callers send forms

    found = re.search(rb'boundary="?([^";]+)"?', content_type)
    if found is None:
        raise ApiError("invalid_argument", "not a multipart form", argument="body")
    path: Optional[str] = None
    name, data = "", None
    for part in (b"\r\n" + body).split(b"\r\n--" + found.group(1))[1:]:
        head, gap, content = bytes(part).partition(b"\r\n\r\n")
        field = re.search(rb'[; ]name="([^"]*)"', head)
        if not gap or field is None:
            continue
        if field.group(1) == b"path":
            path = content.decode("utf-8", "surrogateescape")
        elif field.group(1) == b"file":
            given = re.search(rb'filename="([^"]*)"', head)
            name = os.path.basename(given.group(1).decode("utf-8", "surrogateescape")) if given else ""
            data = content
    if data is None:
        raise ApiError("invalid_argument", "file is required", argument="file")
    return path or name, data


# ------------------------------------------------------------------------------------------------- main

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
MADV_DONTNEED = 4


class Address(_ctypes._SimpleCData):  # type: ignore[type-arg]
    """An address for a function of the C library."""

    _type_ = "P"


def libc(name: str, *args: Union[int, bytes, Address]) -> int:
    """Call a function of the C library; -1 if it has none of that name."""
    try:
        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]
    except OSError:
        return -1
    return int(_ctypes.call_function(address, args))


def restrict(program: bytes) -> None:
    """Give up system calls for good, this process and all it starts: ``program`` is a compiled seccomp filter."""
    import array  # noqa: PLC0415 - not every backend asks for it
    import struct  # noqa: PLC0415

    lines = array.array("B", program)
    described = struct.pack("@HP", len(program) // 8, lines.buffer_info()[0])
    libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0) != 0:
        raise OSError("the kernel does not take the seccomp filter")


def drop_start_code() -> None:
    """Let go of the half MB of machine code that only the start needed; what runs again comes from the page cache."""
    if sys.maxsize < 2**32:
        return  # only there may a loader have written into code, and that would be lost
    try:
        with open("/proc/self/maps", "rb") as file:
            for line in file:
                where, mode, _offset, _device, inode = line.split()[:5]
                if mode == b"r-xp" and inode != b"0":
                    begin, end = (int(part, 16) for part in where.split(b"-"))
                    libc("madvise", Address(begin), end - begin, MADV_DONTNEED)
    except OSError:
        pass


def helper_main(writer: int, work: Callable[[], Any]) -> NoReturn:
    """What a forked helper does: the work, its answer down the pipe, and nothing of the server's."""
    try:
        signal.set_wakeup_fd(-1)
        for sig in SIGNALS_TO_RESET:
            signal.signal(sig, signal.SIG_DFL)
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(writer, 3)
        os.closerange(4, 4096)
        try:
            status, body = 200, success_body(work())
        except Exception as exc:  # noqa: BLE001 - the caller is answered, whatever it was
            error = mapped(exc)
            status, body = error.status, failure_body(error)
        write_all(3, b"%d\n" % status + body)
    finally:
        os._exit(0)


def read_config(path: Optional[str]) -> Json:
    """The line of JSON on stdin, or in a file, which is gone before anything else runs: it holds secrets."""
    source, data = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else 0, b""
    while b"\n" not in data and len(data) < MIB:
        more = os.read(source, 65536)
        if not more:
            break
        data += more
    if path:
        os.close(source)
        os.unlink(path)
    config = from_json(data.split(b"\n")[0])
    bytes.fromhex(config["key"])
    return dict(config)


def listen_unix(path: str) -> socket.socket:
    folder, name = os.path.split(os.path.abspath(path))
    os.chdir(folder)  # a socket's address may have 108 bytes only, so it is named from its directory
    try:
        if not stat.S_ISSOCK(os.lstat(name).st_mode):
            raise OSError(errno.EEXIST, "in the way and no socket", path)
        os.unlink(name)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    listener.bind(name)
    os.umask(mask)
    os.chdir("/")
    return listener


def listen_tcp(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(port)))
    return listener


def start(options: Dict[str, str]) -> Server:
    config = read_config(options.get("--config"))
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(sig, signal.SIG_IGN)
    libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if config.get("seccomp"):
        restrict(bytes.fromhex(config["seccomp"]))
    if "--tcp" in options:
        if not config.get("token"):
            raise ValueError("--tcp needs a token")
        listener = listen_tcp(options["--tcp"])
    else:
        listener = listen_unix(options["--socket"])
    listener.listen(1024)
    listener.setblocking(False)
    server = Server(config, listener)
    null = sink = server.commands.null
    if "--log" in options:
        sink = os.open(options["--log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ready = "ready\n" if "--socket" in options else "ready %d\n" % listener.getsockname()[1]
    os.write(1, ready.encode("ascii"))
    for target, fd in ((0, null), (1, null), (2, sink)):
        os.dup2(fd, target)
    # Compiling this file took 10 MB that every sandbox would keep and every helper's fork would copy.
    gc.collect()
    gc.freeze()
    libc("malloc_trim", 0)
    drop_start_code()
    return server


def main(argv: List[str]) -> NoReturn:
    options = dict(zip(argv[::2], argv[1::2]))  # noqa: B905 - Python 3.8
    if (
        len(argv) % 2
        or not set(options) <= {"--socket", "--tcp", "--log", "--config"}
        or ("--tcp" in options) == ("--socket" in options)
    ):
        sys.stderr.write("usage: sandboxd.py (--socket PATH | --tcp HOST:PORT) [--log FILE] [--config FILE]\n")
        sys.exit(2)
    # A descriptor inherited by mistake (a host directory, say) would be a way out through "..".
    os.closerange(3, 65536)
    try:
        server = start(options)
    except Exception as exc:  # noqa: BLE001 - the caller is answered, whatever it was
        sys.stderr.write("sandboxd: cannot start: %r\n" % exc)
        sys.exit(2)
    server.loop.run()


if __name__ == "__main__":
    main(sys.argv[1:])
