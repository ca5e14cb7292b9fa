"""File operations on an AIO server.

Bytes travel by `/v1/file/write` and `/v1/file/download`, searches by `/v1/file/grep`. What the API cannot say (what a
path is, where a link leads, replace only what was read, rename, remove) is done by the scripts of `scripts`, and what
can be done to bytes is done here: decoding, cutting, replacing, matching.

Not as exact as with sandboxd: ``if_digest`` compares and writes in two steps, so that another writer *inside* the
sandbox may come in between; grep understands the server's dialect of expressions and counts only long lines as skipped.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Generator
from typing import Any
from urllib.parse import quote

from sandfleet.backends import Completion, Operation
from sandfleet.errors import FileTooLarge, InvalidPattern, IsDirectory, PayloadTooLarge
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.backends.aio import scripts
from sandfleet_workers.backends.aio.answers import data_of, script_error
from sandfleet_workers.backends.aio.commands import put, shortened
from sandfleet_workers.backends.aio.shells import HOME, MARGIN, Server, tool
from sandfleet_workers.backends.docker.exec_patterns import IGNORE, glob_matcher
from sandfleet_workers.backends.docker.exec_texts import EDIT_BYTES, check_range, lines_of, replaced, text_of
from sandfleet_workers.endpoint_files import MAX_FILE_BYTES, Steps
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, get, post, table_of

__all__ = ["FILE_STEPS", "health", "metrics"]

#: Up to this size contents travel inside a command line, or its answer: one argument has 128 KiB at most.
_INLINE = 64 * 1024
_INLINE_READ = MIB
_LISTING = 24 * MIB
_DIGESTED_APPEND = 4 * MIB
_LONG_LINE, _SHOWN_LINE = 2000, 200
_MOST_MATCHES = 20_000
_TYPES = {"f": "file", "d": "dir", "l": "symlink"}
_DISK = "/mnt/user-data"


def _absolute(path: str) -> str:
    return posixpath.join(HOME, path)


def _real(path: str) -> str:
    """Where a path lies inside: an image of somebody else's has no ``/workspace``."""
    path = _absolute(path)
    return _DISK + path if path == "/workspace" or path.startswith("/workspace/") else path


def _scripted(
    server: Server, script: str, path: str, *arguments: object, effect: bool, cap: int = MIB, timeout_s: float = 120.0
) -> Generator[Request, Reply, str]:
    """What a script says about a path.

    Raises:
        SandfleetError: What went wrong there.
    """
    words = (_real(path), *(str(int(word) if isinstance(word, bool) else word) for word in arguments))
    line = yield from shortened(server, scripts.script_line(script, *words))
    code, told = yield from tool(server, line, effect=effect, cap=cap, timeout_s=timeout_s)
    if code != 0:
        raise script_error(code, told, path)
    return told


def _records(coded: str, width: int) -> list[list[str]]:
    """NUL-ended fields in groups of ``width``; an unfinished last group is left out."""
    try:
        raw = base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError):
        raise BadReply("a listing that is not base64") from None
    parts = os.fsdecode(raw).split("\0")[:-1]
    return [parts[at : at + width] for at in range(0, len(parts) - width + 1, width)]


def _info(path: str, fields: list[str]) -> dict[str, Any]:
    kind, size, mode, mtime, target = fields
    return check.file_info(
        {
            "path": path,
            "name": posixpath.basename(path.rstrip("/")),
            "type": _TYPES.get(kind, "other"),
            "size": _number(size),
            "mode": int(mode, 8),
            "mtime": float(mtime),
            "target": target or None,
        }
    )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadReply("a number that is none")
    return int(text)


# --- contents --------------------------------------------------------------------------------


def _fetch(
    server: Server, path: str, offset: int = 0, length: int | None = None, most: int = MAX_FILE_BYTES
) -> Generator[Request, Reply, tuple[int, bytes]]:
    """(size of the file, its bytes from ``offset`` on); without ``length`` more than ``most`` are refused."""
    wanted = "" if length is None or length > most else length
    inline = _INLINE_READ if length is None else max(_INLINE_READ, min(length, most))
    cap = MARGIN + inline * 4 // 3
    told = yield from _scripted(server, scripts.READ, path, offset, wanted, inline, effect=False, cap=cap)
    size_text, colon, coded = told.partition(":")
    size = _number(size_text.strip())
    if colon:
        try:
            return size, base64.b64decode(coded, validate=True)[:length]
        except (binascii.Error, ValueError):
            raise BadReply("contents that are not base64") from None
    if size - offset > most:
        raise FileTooLarge("the file is too large", path=path, size=size, limit=most)
    # The bytes as they are, from one open file; the server quotes nothing and needs no temporary memory.
    target = "/v1/file/download?path=" + quote(_real(path), safe="/", errors="surrogateescape")
    reply = yield get(target, cap=most + MARGIN)
    if reply.status != 200:
        data_of(reply)
        raise BadReply(f"status {reply.status} without an error")
    return len(reply.body), reply.body[offset:]


def _read_file(server: Server, op: Operation) -> Steps:
    args, path = op.args, op.args["path"]
    start, end, most = args.get("start_line"), args.get("end_line"), args.get("max_bytes")
    if args.get("as_text") or start is not None or end is not None:
        check_range(start, end)
        _, data = yield from _fetch(server, path)
        if not args.get("as_text"):
            return Completion(*lines_of(data, start, end, most))
        lenient = bool(args.get("lenient"))
        return Completion(*text_of(data, path, start, end, args.get("max_chars"), lenient=lenient))
    offset = args.get("offset", 0)
    size, content = yield from _fetch(server, path, offset, most)
    whole = not offset and len(content) == size
    total = content.count(b"\n") + (content[-1:] not in (b"", b"\n")) if whole else None
    return Completion({"size": size, "total_lines": total, "truncated": size > offset + len(content)}, content)


def _write_file(server: Server, op: Operation) -> Steps:
    args, content = op.args, op.content or b""
    if len(content) > MAX_FILE_BYTES:
        raise PayloadTooLarge(f"a write has {MAX_FILE_BYTES} bytes at most", limit=MAX_FILE_BYTES)
    rule = args.get("if_digest")
    mode, size = args.get("mode"), args.get("if_size")
    return Completion(
        (
            yield from _write(
                server,
                args["path"],
                content,
                append=bool(args.get("append")),
                if_digest=None if rule is None else rule.lower() or "absent",
                if_size="-" if size is None else str(size),
                mode="-" if mode is None else f"{mode:o}",
                parents=bool(args.get("make_parents", True)),
            )
        )
    )


def _write(
    server: Server,
    path: str,
    content: bytes,
    *,
    append: bool = False,
    if_digest: str | None = None,
    if_size: str = "-",
    mode: str = "-",
    parents: bool = False,
) -> Generator[Request, Reply, dict[str, Any]]:
    inline, file = base64.b64encode(content).decode(), ""
    if len(content) > _INLINE:
        inline, file = "", (yield from put(content))
    rules = (append, if_digest or "-", if_size, mode, parents)
    told = yield from _scripted(server, scripts.WRITE, path, *rules, file, inline, _DIGESTED_APPEND, effect=True)
    size, _, digest = told.strip().partition(" ")
    if digest and (len(digest) != 64 or not digest.isalnum()):
        raise BadReply("a digest that is none")
    return {"size": _number(size), "digest": digest or None}


def _str_replace(server: Server, op: Operation) -> Steps:
    args, path = op.args, op.args["path"]
    if posixpath.basename(path) in ("", ".", ".."):
        raise IsDirectory("Is a directory", path=path)
    _, before = yield from _fetch(server, path, most=EDIT_BYTES)
    every, rule = bool(args.get("replace_all")), args.get("if_digest")
    count, after = replaced(before, args["old"], args["new"], path, every=every, if_digest=rule)
    # What was read is what is replaced, or nothing is.
    written = yield from _write(server, path, after, if_digest=hashlib.sha256(before).hexdigest())
    return Completion({"count": count, "digest": written["digest"]})


# --- the tree --------------------------------------------------------------------------------


def _stat(server: Server, op: Operation) -> Steps:
    path = op.args["path"]
    told = yield from _scripted(server, scripts.STAT, path, bool(op.args.get("follow", True)), effect=False)
    records = _records(told, 5)
    if len(records) != 1:
        raise BadReply("not one answer about one path")
    return Completion(_info(_absolute(path), records[0]))


def _in_order(relative: str) -> list[bytes]:
    return [os.fsencode(part) for part in relative.split("/")]


def _list_dir(server: Server, op: Operation) -> Steps:
    args, top = op.args, _absolute(op.args["path"])
    depth, most = args.get("max_depth", 2), args.get("max_entries", 10_000)
    told = yield from _scripted(
        server, scripts.LIST, args["path"], depth, _LISTING, effect=False, cap=_LISTING * 4 // 3 + MARGIN
    )
    coded, _, errors = told.partition(":")
    records = sorted(_records(coded, 6), key=lambda record: _in_order(record[0]))
    entries = [_info(posixpath.join(top, relative), fields) for relative, *fields in records[:most]]
    truncated = len(records) > most or len(coded) * 3 // 4 >= _LISTING - 2
    return Completion({"entries": entries, "truncated": truncated, **_unread(errors)})


def _unread(errors: str) -> dict[str, int]:
    count = _number(errors.strip() or "0")
    return {"errors": count} if count else {}


def _glob(server: Server, op: Operation) -> Steps:
    args, top = op.args, _absolute(op.args["path"])
    matches, most = glob_matcher(args["pattern"]), args.get("max_results", 200)
    timeout_s = args.get("timeout_s", 20.0)
    told = yield from _scripted(
        server, scripts.GLOB, args["path"], timeout_s, _LISTING, effect=False, cap=_LISTING * 4 // 3 + MARGIN,
        timeout_s=timeout_s + 10,
    )  # fmt: skip
    coded, _, errors = told.partition(":")
    dirs = bool(args.get("include_dirs"))
    found = [name for name, kind in _records(coded, 2) if (dirs or kind != "d") and matches(name)]
    found.sort(key=_in_order)
    truncated = len(found) > most or len(coded) * 3 // 4 >= _LISTING - 2
    paths = [posixpath.join(top, name) for name in found[:most]]
    return Completion({"paths": paths, "truncated": truncated, **_unread(errors)})


def _grep(server: Server, op: Operation) -> Steps:
    args, top, inside = op.args, _absolute(op.args["path"]), _real(op.args["path"])
    literal, case_sensitive = bool(args.get("literal")), bool(args.get("case_sensitive"))
    _check_expression(args["pattern"], literal=literal)
    wanted, most = glob_matcher(args["glob"]) if args.get("glob") else None, args.get("max_results", 100)
    told = yield from _scripted(server, scripts.STAT, args["path"], True, effect=False)
    fields: dict[str, Any] = {
        "path": inside,
        "pattern": args["pattern"],
        "exclude": list(IGNORE),
        "case_insensitive": not case_sensitive,
        "fixed_strings": literal,
        "max_file_size": "1M",
        # What is filtered here leaves room for what is wanted.
        "max_results": min(max(4 * most, most + 50), _MOST_MATCHES),
    }
    data = data_of((yield post("/v1/file/grep", fields, cap=64 * MIB, effect=False)))
    lines = _matches(data, inside, single=_records(told, 5)[0][0] != "d", wanted=wanted)
    lines.sort(key=lambda each: (_in_order(each[0]), each[1]))
    kept = [each for each in lines if len(each[2]) <= _LONG_LINE]
    matches = [
        [
            posixpath.join(top, where) if where else top,
            number,
            line if len(line) <= _SHOWN_LINE else line[:_SHOWN_LINE] + "...",
        ]
        for where, number, line in kept[:most]
    ]
    skipped = {"large": 0, "binary": 0, "long_lines": len(lines) - len(kept), "errors": 0}
    truncated = len(kept) > most or data.get("truncated") is True
    return Completion({"matches": matches, "truncated": truncated, "skipped": skipped})


def _matches(
    data: dict[str, Any], top: str, *, single: bool, wanted: Callable[[str], bool] | None
) -> list[tuple[str, int, str]]:
    """(path below ``top``, or empty for a file itself, line number, line) of what counts."""
    found = []
    for item in check.items({"matches": data.get("matches") or []}, "matches", 2 * _MOST_MATCHES):
        match = check.table(item)
        where = "" if single else posixpath.relpath(posixpath.join(top, check.text(match, "file")), top)
        ignored = any(map(_is_ignored, where.split("/")))
        if not ignored and (wanted is None or wanted(where or posixpath.basename(top))):
            line = check.text(match, "line_content").rstrip("\r\n")
            found.append((where, check.count(match, "line_number"), line))
    return found


def _check_expression(pattern: str, *, literal: bool) -> None:
    try:
        re.compile("" if literal else pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        raise InvalidPattern(f"not a valid expression: {exc}", pattern=pattern) from None


def _is_ignored(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORE)


def _make_dir(server: Server, op: Operation) -> Steps:
    args, mode = op.args, op.args.get("mode")
    flags = (bool(args.get("parents", True)), bool(args.get("exist_ok", True)), "-" if mode is None else f"{mode:o}")
    yield from _scripted(server, scripts.MAKE_DIR, args["path"], *flags, effect=True)
    return Completion({})


def _make_link(server: Server, op: Operation) -> Steps:
    args = op.args
    yield from _scripted(
        server, scripts.MAKE_LINK, args["path"], args["target"], bool(args.get("overwrite")), effect=True
    )
    return Completion({})


def _remove(server: Server, op: Operation) -> Steps:
    flags = (bool(op.args.get("recursive")), bool(op.args.get("missing_ok")))
    yield from _scripted(server, scripts.REMOVE, op.args["path"], *flags, effect=True)
    return Completion({})


def _move(server: Server, op: Operation) -> Steps:
    args = op.args
    flags = (_real(args["new_path"]), bool(args.get("overwrite")), bool(args.get("follow")))
    yield from _scripted(server, scripts.MOVE, args["path"], *flags, effect=True)
    return Completion({})


# --- the sandbox itself ----------------------------------------------------------------------


def health(_server: Server, _op: Operation) -> Steps:
    """Carry out health: the documented question whether the server is ready."""
    reply = yield get("/v1/sandbox")
    answer = table_of(reply)
    if reply.status != 200 or not isinstance(answer.get("version"), str):
        raise BadReply(f"status {reply.status} and no version of an AIO sandbox")
    return Completion({"status": "alive", "detail": f"AIO server {answer['version'][:40]}"})


def metrics(server: Server, _op: Operation) -> Steps:
    """Carry out metrics, as far as the sandbox's control group and its tools tell."""
    told = yield from _scripted(server, scripts.METRICS, _DISK, effect=False)
    seen = {words[0]: int(words[1]) for words in map(str.split, told.splitlines()[:20])
            if len(words) >= 2 and words[1].isascii() and words[1].isdigit() and len(words[1]) < 19}  # fmt: skip
    names = ("memory_bytes", "pids", "disk_bytes", "network_in_bytes", "network_out_bytes")
    value: dict[str, Any] = {name: seen.get(name) for name in names}
    used_s = [seen[name] / unit for name, unit in (("cpu_usec", 1e6), ("cpu_nsec", 1e9)) if name in seen]
    value.update(cpu_s=used_s[0] if used_s else None, cpu_percent=None, uptime_s=None)
    return Completion(value)


FILE_STEPS = {
    "read_file": _read_file,
    "write_file": _write_file,
    "str_replace": _str_replace,
    "list_dir": _list_dir,
    "glob": _glob,
    "grep": _grep,
    "stat": _stat,
    "make_dir": _make_dir,
    "make_link": _make_link,
    "remove": _remove,
    "move": _move,
}
