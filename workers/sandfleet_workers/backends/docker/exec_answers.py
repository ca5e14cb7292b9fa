"""Reading what a container without Python answers. It may be a lie, so shapes and sizes are checked. Pure."""

from __future__ import annotations

import posixpath
import re
import stat
from typing import Any

from sandfleet.errors import (
    AlreadyExists,
    DigestMismatch,
    FileTooLarge,
    InternalError,
    InvalidArgument,
    InvalidPattern,
    IsDirectory,
    NoSpace,
    NotDirectory,
    NotRegularFile,
    NotStarted,
    NotSupported,
    PathNotFound,
    PermissionDenied,
    ReadOnly,
    ResourceLimitExceeded,
    SandfleetError,
)

__all__ = ["BadAnswer", "entries", "entry", "failure", "lacks_processes", "matches", "names", "unread"]


class BadAnswer(ValueError):
    """The container answered what our script does not say."""


# --- errors ------------------------------------------------------------------------------------

#: Ends of what the tools say in the C locale: glibc's and musl's words, then those of dash and busybox.
_WORDS: tuple[tuple[str, type[SandfleetError]], ...] = (
    ("No such file or directory", PathNotFound),
    ("Directory nonexistent", PathNotFound),
    ("nonexistent directory", PathNotFound),
    ("No such file", PathNotFound),
    ("no such file", PathNotFound),
    ("Not a directory", NotDirectory),
    ("Is a directory", IsDirectory),
    ("Permission denied", PermissionDenied),
    ("Operation not permitted", PermissionDenied),
    ("Text file busy", PermissionDenied),
    ("Read-only file system", ReadOnly),
    ("No space left on device", NoSpace),
    ("Disk quota exceeded", NoSpace),
    ("Quota exceeded", NoSpace),
    ("File too large", FileTooLarge),
    ("File exists", AlreadyExists),
    ("No such device or address", NotRegularFile),
)
_CALLERS = {
    "File name too long": "ENAMETOOLONG",
    "Filename too long": "ENAMETOOLONG",
    "Too many levels of symbolic links": "ELOOP",
    "Symbolic link loop": "ELOOP",
    "Invalid argument": "EINVAL",
    "itself": "EINVAL",
    "Device or resource busy": "EBUSY",
    "Resource busy": "EBUSY",
    "Argument list too long": "E2BIG",
    "Invalid cross-device link": "EXDEV",
}
_SHORT = ("Cannot allocate memory", "Out of memory", "out of memory")
_NO_PIDS = ("temporarily unavailable", "Cannot fork", "can't fork", "fork: retry")
_CODES: dict[str, type[SandfleetError]] = {
    "is_directory": IsDirectory,
    "not_directory": NotDirectory,
    "not_regular_file": NotRegularFile,
    "permission_denied": PermissionDenied,
    "path_not_found": PathNotFound,
    "already_exists": AlreadyExists,
    "invalid_argument": InvalidArgument,
    "file_too_large": FileTooLarge,
}
_SAID = {
    IsDirectory: "Is a directory",
    NotDirectory: "Not a directory",
    NotRegularFile: "Not a regular file",
    PermissionDenied: "Permission denied",
    PathNotFound: "No such file or directory",
    AlreadyExists: "File exists",
    InvalidArgument: "Invalid argument",
    FileTooLarge: "the file is too large",
}


def failure(said: bytes, path: str, *, to: str = "", pattern: str = "") -> SandfleetError:
    """The error of a script that failed.

    Args:
        said: Its stderr.
        path: What it was about.
        to: The other path of a move.
        pattern: Of a search.
    """
    lines = [line for line in said[-65536:].decode("utf-8", "replace").splitlines() if line.strip()]
    coded = next((line[1:].split(" ") for line in reversed(lines) if line.startswith("!")), None)
    if coded is not None:
        return _coded(coded[0], coded[1:], path, to, pattern)
    line = lines[-1].strip() if lines else ""
    for words, cls in _WORDS:
        if line.endswith(words):
            return cls(_SAID.get(cls, words), path=path)
    for words, name in _CALLERS.items():
        if words in line:
            if "Directory not empty" in line:
                break
            return InvalidArgument(words, path=path, errno=name)
    if line.endswith("Directory not empty"):
        return InvalidArgument("the directory is not empty", argument="recursive", path=path)
    if lacks_processes(line):
        return ResourceLimitExceeded("no further process may be started in the sandbox", resource="pids")
    if line.endswith(_SHORT):
        return ResourceLimitExceeded("the sandbox is out of memory", resource="memory")
    if line.endswith("not found"):
        return NotSupported(f"the sandbox's image lacks a tool that this needs: {line[:200]}")
    return InternalError(f"a tool of the sandbox failed: {line[:200] or 'it said nothing'}", path=path)


def lacks_processes(text: str) -> bool:
    """Whether a shell or the engine says so that no process could be started."""
    return any(words in text for words in _NO_PIDS)


def _coded(code: str, rest: list[str], path: str, to: str, pattern: str) -> SandfleetError:
    if code == "digest_mismatch":
        if rest[:1] == ["size"]:
            return DigestMismatch("the file has changed", path=path, size=_count(rest[-1].encode()))
        told = rest[0] if rest and re.fullmatch(r"[0-9a-f]{64}", rest[0]) else None
        return DigestMismatch("the file has changed", path=path, digest=told)
    if code == "invalid_pattern":
        return InvalidPattern("not a valid expression for the sandbox's grep", pattern=pattern)
    if code == "no_perl":
        return NotSupported(
            "the sandbox's grep knows extended regular expressions only: leave out lookarounds, back references, named "
            "groups and flags, or use an image with Python or GNU grep",
            argument="pattern",
        )
    if code == "cut_short":
        return NotStarted("the content did not arrive; nothing was changed", reason="cut_short")
    cls = _CODES.get(code)
    if cls is None:
        raise BadAnswer(f"an error without meaning: {code[:80]!r}")
    facts: dict[str, Any] = {"size": _count(rest[0].encode())} if code == "file_too_large" and rest else {}
    return cls(_SAID[cls], path=to if rest[:1] == ["to"] else path, **facts)


def unread(said: bytes) -> int:
    """How many directories or files a search says it could not read."""
    return said.count(b": Permission denied\n")


# --- values ------------------------------------------------------------------------------------


def _count(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 19:
        raise BadAnswer(f"not a number: {raw[:40]!r}")
    return int(raw)


def _facts(line: bytes) -> tuple[dict[str, Any], bytes]:
    """Mode (hexadecimal), size and time, and what comes after them."""
    found = re.match(rb"([0-9a-f]{1,8}) (\d{1,19}) (-?\d{1,12})(?: |\Z)", line)
    if found is None:
        raise BadAnswer(f"not what stat says: {line[:80]!r}")
    mode = int(found[1], 16)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}
    facts = {
        "type": kinds.get(stat.S_IFMT(mode), "other"),
        "size": int(found[2]),
        "mode": stat.S_IMODE(mode),
        "modified_at": float(found[3]),
    }
    return facts, line[found.end() :]


def _info(path: str, facts: dict[str, Any], target: bytes | None) -> dict[str, Any]:
    name = posixpath.basename(path.rstrip("/")) or "/"
    return {"path": path, "name": name, **facts, "target": None if target is None else _name(target)}


def _name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def entry(answer: bytes, path: str) -> dict[str, Any]:
    """A FileInfo dict of what STAT says."""
    line, newline, link = answer.partition(b"\n")
    if not newline or (link and not link.endswith(b"\n.")):
        raise BadAnswer("an answer that ends in the middle")
    return _info(path, _facts(line)[0], link[:-2] if link else None)


def entries(answer: bytes, top: str, most: int) -> tuple[list[dict[str, Any]], bool]:
    """FileInfo dicts of what LIST says, sorted, depth first, and whether some are missing.

    Raises:
        BadAnswer: It is not what LIST says. The last, incomplete record is left away without a word.
    """
    found: dict[bytes, dict[str, Any]] = {}
    links: dict[bytes, bytes] = {}
    position, complete = 0, True
    while position < len(answer):
        if answer[position : position + 1] == b"L":
            middle = answer.find(b"\0", position)
            end = answer.find(b"\0", middle + 1) if middle >= 0 else -1
            if end < 0:
                complete = False
                break
            links[_relative(answer[position + 1 : middle])] = answer[middle + 1 : end]
            position = end + 1
            continue
        end = answer.find(b"//\n", position)
        if end < 0:
            complete = False
            break
        facts, name = _facts(answer[position:end])
        found[_relative(name)] = facts
        position = end + 3
    listed = sorted(found, key=_order)
    shown = [_info(posixpath.join(top, _name(name)), found[name], links.get(name)) for name in listed[:most]]
    return shown, not complete or len(listed) > most


def _relative(name: bytes) -> bytes:
    if not name.startswith(b"./") or len(name) < 3:
        raise BadAnswer(f"not a name below: {name[:80]!r}")
    return name[2:]


def _order(name: bytes) -> list[bytes]:
    return name.split(b"/")


def names(answer: bytes) -> list[tuple[str, bool]]:
    """(relative name, is a directory) of what GLOB says, sorted, depth first."""
    *whole, _incomplete = answer.split(b"\0")
    found: dict[bytes, bool] = {}
    for record in whole:
        if record[:1] not in (b"d", b"f"):
            raise BadAnswer(f"not a kind of name: {record[:80]!r}")
        found[_relative(record[1:])] = record[:1] == b"d"
    return [(_name(name), found[name]) for name in sorted(found, key=_order)]


_LONG_LINE, _SHOWN_LINE = 2000, 200


def matches(answer: bytes, top: str, wanted: Any) -> tuple[list[list[Any]], dict[str, int]]:
    """Matches ([path, line number, line]) and what was skipped, of what GREP says.

    Args:
        answer: What it says.
        top: Where it searched, a directory or a file.
        wanted: A test of relative names; None for all.
    """
    skipped = {"large": 0, "binary": 0, "long_lines": 0, "errors": 0}
    found: list[tuple[list[bytes], int, str, str]] = []
    records = answer.split(b"\0")
    position = 0
    while position + 1 < len(records):
        kind, raw = records[position][:1], records[position][1:]
        position += 1
        relative = _name(_relative(raw)) if raw.startswith(b"./") else posixpath.basename(top)
        path = posixpath.join(top, relative) if raw.startswith(b"./") else top
        counted = wanted is None or wanted(relative)
        if kind in (b"S", b"B"):
            skipped["large" if kind == b"S" else "binary"] += counted
            continue
        if kind != b"F":
            raise BadAnswer(f"not a kind of match: {records[position - 1][:80]!r}")
        if position < len(records) and counted:
            for number, line in _numbered(records[position]):
                if len(line) > _LONG_LINE:
                    skipped["long_lines"] += 1
                    continue
                line = line if len(line) <= _SHOWN_LINE else line[:_SHOWN_LINE] + "..."
                found.append((_order(raw), number, path, line))
        position += 1
    found.sort(key=lambda match: match[:2])
    return [[path, number, line] for _order_, number, path, line in found], skipped


def _numbered(text: bytes) -> list[tuple[int, str]]:
    lines = []
    for line in text.split(b"\n")[:-1]:
        number, colon, rest = line.partition(b":")
        if not colon:
            raise BadAnswer(f"a line without its number: {line[:80]!r}")
        lines.append((_count(number), rest.decode("utf-8", "replace").rstrip("\r")))
    return lines
