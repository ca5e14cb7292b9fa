"""File operations in a container without Python: a script does there what must be done there, the rest is done here.

Nothing is opened on the host, and no archive is put into the container (moby CVE-2026-41567).
"""

from __future__ import annotations

import hashlib
import posixpath
import secrets
from collections.abc import Callable
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet.blobs import MAX_BLOB_BYTES
from sandfleet.errors import DigestMismatch, IsDirectory, NotSupported, PayloadTooLarge
from sandfleet_workers.backends.docker import exec_answers as answers
from sandfleet_workers.backends.docker import exec_patterns as patterns
from sandfleet_workers.backends.docker import exec_scripts as scripts
from sandfleet_workers.backends.docker import exec_texts as texts
from sandfleet_workers.backends.docker.exec_runner import Answer, Runner
from sandfleet_workers.backends.docker.hostconfig import HOME

__all__ = ["FILE_KINDS"]

_BLOCK = 64 * 1024
_MIB = 1024 * 1024
#: Of one search or listing; beyond it the result says that it is not whole.
_LISTING_BYTES = 16 * _MIB
_LARGE_FILE = 1_000_000
_QUICK_S, _LIST_S, _TREE_S = 30.0, 60.0, 600.0
#: A transfer may be this slow.
_BYTES_PER_S = 1 * _MIB
_EDITS = 3


def _path(op: Operation, name: str = "path") -> str:
    return posixpath.join(HOME, op.args[name])


def _flag(op: Operation, name: str, default: bool = False) -> str:
    return "1" if op.args.get(name, default) else "0"


def _mode(op: Operation) -> str:
    mode = op.args.get("mode")
    return "-" if mode is None else f"{mode:o}"


def _dotted(path: str) -> bool:
    """Whether the last component names no entry of a directory."""
    return posixpath.basename(path.rstrip("/")) in (".", "..")


def _check_name(path: str) -> None:
    if posixpath.basename(path) in ("", ".", ".."):
        raise IsDirectory("Is a directory", path=path)


def _temporary() -> str:
    return f".upload-{secrets.token_hex(8)}.part"


def _good(answer: Answer, path: str, *, to: str = "", pattern: str = "") -> bytes:
    """What a script said that did what it should."""
    if answer.status == 0:
        return answer.output
    raise answers.failure(answer.said, path, to=to, pattern=pattern)


# --- contents ----------------------------------------------------------------------------------


def _fetch(
    run: Runner, path: str, *, offset: int = 0, most: int | None = None, limit: int = 2**62
) -> tuple[int, bytes]:
    """(size of the file, its bytes from ``offset``, ``most`` at most).

    Raises:
        FileTooLarge: It has more than ``limit`` bytes.
    """
    skip = offset // _BLOCK
    wanted = min(MAX_BLOB_BYTES if most is None else most, limit)
    blocks = (offset % _BLOCK + wanted) // _BLOCK + 1
    room = (blocks + 1) * _BLOCK
    answer = run.script(
        scripts.FETCH, scripts.word(path), skip, blocks, limit, most=room, timeout_s=_QUICK_S + room / _BYTES_PER_S
    )
    if answer.status != 0:
        error = answers.failure(answer.said, path)
        if error.code == "file_too_large":
            error.facts["limit"] = limit
        raise error
    line, newline, data = answer.output.partition(b"\n")
    if not newline or not line.isdigit() or len(line) > 19:
        raise answers.BadAnswer("a file without its size")
    data = data[offset % _BLOCK :]
    return int(line), data if most is None else data[:most]


def _range_bytes(asked: int | None) -> int:
    return 16 * _MIB if asked is None else min(asked, 16 * _MIB)


def _read_file(run: Runner, op: Operation) -> Completion:
    args, path = op.args, _path(op)
    start, end = args.get("start_line"), args.get("end_line")
    texts.check_range(start, end)
    if args.get("as_text"):
        _size, data = _fetch(run, path, limit=texts.EDIT_BYTES)
        lenient = bool(args.get("lenient"))
        return Completion(*texts.text_of(data, path, start, end, args.get("max_chars"), lenient=lenient))
    if start is not None or end is not None:
        _size, data = _fetch(run, path, limit=texts.EDIT_BYTES)
        return Completion(*texts.lines_of(data, start, end, _range_bytes(args.get("max_bytes"))))
    offset, most = args.get("offset", 0), args.get("max_bytes")
    if most is not None and most <= MAX_BLOB_BYTES:
        size, content = _fetch(run, path, offset=offset, most=most)
    else:
        size, content = _fetch(run, path, offset=offset, limit=offset + MAX_BLOB_BYTES)
    truncated = most is not None and size > offset + len(content)
    whole = not offset and not truncated
    lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n")) if whole else None
    return Completion({"size": len(content) if whole else size, "total_lines": lines, "truncated": truncated}, content)


def _write(
    run: Runner,
    path: str,
    content: bytes,
    *,
    append: str = "0",
    mode: str = "-",
    parents: str = "1",
    if_digest: str | None = None,
    if_size: int | None = None,
) -> dict[str, Any]:
    """The value of write_file."""
    wanted = "-" if if_digest is None else if_digest.lower() or "absent"
    answer = run.script(
        scripts.WRITE,
        scripts.word(path),
        append,
        mode,
        parents,
        wanted,
        "-" if if_size is None else if_size,
        len(content),
        _temporary(),
        content=content,
        timeout_s=_QUICK_S + len(content) / _BYTES_PER_S,
        effect=True,
    )
    size, _, digest = _good(answer, path).decode("ascii", "replace").strip().partition(" ")
    if not size.isdigit() or len(size) > 19:
        raise answers.BadAnswer("a write without its size")
    if append == "0":
        return {"size": len(content), "digest": hashlib.sha256(content).hexdigest()}
    return {"size": int(size), "digest": digest[:64] if digest != "-" else None}


def _write_file(run: Runner, op: Operation) -> Completion:
    args, content, path = op.args, op.content or b"", _path(op)
    if len(content) > MAX_BLOB_BYTES:
        raise PayloadTooLarge(f"a write has {MAX_BLOB_BYTES} bytes at most", limit=MAX_BLOB_BYTES)
    _check_name(path)
    value = _write(
        run,
        path,
        content,
        append=_flag(op, "append"),
        mode=_mode(op),
        parents=_flag(op, "make_parents", True),
        if_digest=args.get("if_digest"),
        if_size=args.get("if_size"),
    )
    return Completion(value)


def _str_replace(run: Runner, op: Operation) -> Completion:
    args, path = op.args, _path(op)
    _check_name(path)
    for left in reversed(range(_EDITS)):
        _size, data = _fetch(run, path, limit=texts.EDIT_BYTES)
        every, if_digest = bool(args.get("replace_all")), args.get("if_digest")
        count, edited = texts.replaced(data, args["old"], args["new"], path, every=every, if_digest=if_digest)
        try:
            value = _write(run, path, edited, parents="0", if_digest=hashlib.sha256(data).hexdigest())
            return Completion({"count": count, "digest": value["digest"]})
        except DigestMismatch:  # somebody wrote between the two; what was read is not there any more
            if not left or if_digest is not None:
                raise
    raise AssertionError("unreachable")


# --- the tree ----------------------------------------------------------------------------------


def _list_dir(run: Runner, op: Operation) -> Completion:
    path, most = _path(op), op.args.get("max_entries", 10_000)
    depth = op.args.get("max_depth", 2)
    listing = run.script(
        scripts.LIST,
        scripts.word(path),
        depth,
        _LISTING_BYTES,
        scripts.LIST_EACH,
        most=_LISTING_BYTES,
        timeout_s=_LIST_S,
        search=True,
    )
    found, truncated = answers.entries(_good(listing, path), path, most)
    return Completion({"entries": found, "truncated": truncated, **_errors(listing)})


def _errors(answer: Answer) -> dict[str, int]:
    """How many directories could not be read, where there were any: a part must not look like the whole."""
    errors = answers.unread(answer.said)
    return {"errors": errors} if errors else {}


def _ignored() -> list[str]:
    return [word for name in patterns.IGNORE for word in ("-o", "-name", name)][1:]


def _glob(run: Runner, op: Operation) -> Completion:
    args, path = op.args, _path(op)
    fits, most, dirs = patterns.glob_matcher(args["pattern"]), args.get("max_results", 200), args.get("include_dirs")
    listing = run.script(
        scripts.GLOB,
        scripts.word(path),
        _LISTING_BYTES,
        *_ignored(),
        most=_LISTING_BYTES,
        timeout_s=args.get("timeout_s", 20.0),
        search=True,
    )
    output = _good(listing, path)
    names = answers.names(output)
    found = [posixpath.join(path, name) for name, is_dir in names if (dirs or not is_dir) and fits(name)]
    truncated = len(found) > most or len(output) >= _LISTING_BYTES
    return Completion({"paths": found[:most], "truncated": truncated, **_errors(listing)})


def _grep(run: Runner, op: Operation) -> Completion:
    args, path = op.args, _path(op)
    pattern, literal, most = args["pattern"], bool(args.get("literal")), args.get("max_results", 100)
    fits = patterns.glob_matcher(args["glob"]) if args.get("glob") else None
    if not literal:
        patterns.check_expression(pattern)
    if "\n" in pattern or "\0" in pattern:
        raise NotSupported("a pattern for a single line has no line feed and no NUL", argument="pattern")
    listing = run.script(
        scripts.GREP,
        scripts.word(path),
        _LISTING_BYTES,
        _LARGE_FILE,
        scripts.GREP_EACH,
        "" if args.get("case_sensitive") else "-i",
        "literal" if literal else "expression",
        scripts.word(pattern if literal else patterns.perl_expression(pattern)),
        "" if literal else scripts.word(patterns.basic_expression(pattern)),
        most + 1,
        patterns.prefilter(args.get("glob")),
        *_ignored(),
        most=_LISTING_BYTES,
        timeout_s=args.get("timeout_s", 20.0),
        search=True,
    )
    output = _good(listing, path, pattern=pattern)
    found, skipped = answers.matches(output, path, fits)
    skipped["errors"] = answers.unread(listing.said)
    truncated = len(found) > most or len(output) >= _LISTING_BYTES
    return Completion({"matches": found[:most], "truncated": truncated, "skipped": skipped})


def _stat(run: Runner, op: Operation) -> Completion:
    path = _path(op)
    answer = run.script(scripts.STAT, scripts.word(path), _flag(op, "follow", True))
    return Completion(answers.entry(_good(answer, path), path))


# --- changes -----------------------------------------------------------------------------------


def _make_dir(run: Runner, op: Operation) -> Completion:
    path = _path(op).rstrip("/") or "/"
    flags = (_flag(op, "parents", True), _flag(op, "exist_ok", True), _mode(op))
    _good(run.script(scripts.MAKE_DIR, scripts.word(path), *flags, effect=True), path)
    return Completion({})


def _make_link(run: Runner, op: Operation) -> Completion:
    path = _path(op)
    _check_name(path)
    target = scripts.word(op.args["target"])
    answer = run.script(
        scripts.MAKE_LINK, scripts.word(path), target, _flag(op, "overwrite"), _temporary(), effect=True
    )
    _good(answer, path)
    return Completion({})


def _remove(run: Runner, op: Operation) -> Completion:
    path = _path(op)
    flags = (_flag(op, "recursive"), _flag(op, "missing_ok"), "1" if _dotted(path) else "0")
    _good(run.script(scripts.REMOVE, scripts.word(path), *flags, timeout_s=_TREE_S, effect=True), path)
    return Completion({})


def _move(run: Runner, op: Operation) -> Completion:
    path, to = _path(op), _path(op, "new_path")
    dotted = "1" if _dotted(path) or _dotted(to) else "0"
    flags = (_flag(op, "overwrite"), _flag(op, "follow"), dotted)
    answer = run.script(scripts.MOVE, scripts.word(path), scripts.word(to), *flags, timeout_s=_TREE_S, effect=True)
    _good(answer, path, to=to)
    return Completion({})


#: What carries out each kind; it may raise any SandfleetError, and BadAnswer.
FILE_KINDS: dict[str, Callable[[Runner, Operation], Completion]] = {
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
