"""What each file operation says to sandboxd, and what it makes of the answer; see `endpoint_ops` for the form."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Generator
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet.blobs import MAX_BLOB_BYTES
from sandfleet.errors import PayloadTooLarge
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, get, json_of, once, post, put

__all__ = ["FILE_STEPS", "MARGIN", "MAX_FILE_BYTES", "LostSessions", "Steps", "change", "replaced", "written"]

Steps = Generator[Request, Reply, Completion]
#: Names of sessions whose loss was told to the caller, so that the next use opens a new shell.
LostSessions = set[str]

#: Of one read or write: what may travel as one blob. A larger file is refused before its bytes are moved.
MAX_FILE_BYTES = MAX_BLOB_BYTES
#: What an answer may have beside its contents.
MARGIN = 256 * 1024
_MAX_RANGE_BYTES = 16 * MIB
_MAX_TEXT_CHARS = 16 * MIB
_WHOLE_WRITE = 4 * MIB
_CHUNK = 4 * MIB
#: A JSON string of ASCII needs up to six bytes for one of the original (``\\u0000``).
_JSON_BLOWUP = 6
_GUARD_EXTRA_S = 10.0
_FILE, _FS = "/v1/sandfleet/file", "/v1/sandfleet/fs"


# --- contents --------------------------------------------------------------------------------


def _read_file(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    if args.get("as_text"):
        return (yield from _read_text(op))
    if args.get("start_line") is not None or args.get("end_line") is not None:
        return (yield from _read_lines(op))
    most = args.get("max_bytes")
    offset = args.get("offset", 0)
    query = {"path": args["path"], "limit": str(MAX_FILE_BYTES), "offset": str(offset)}
    if most is not None and most <= MAX_FILE_BYTES:
        query["length"] = str(most)
    # One streamed answer from one open file: a file replaced meanwhile cannot give a torn mixture.
    reply = yield get(_FILE, query, cap=max(MARGIN, min(most if most is not None else MAX_FILE_BYTES, MAX_FILE_BYTES)))
    if reply.status != 200:
        json_of(reply)
        raise BadReply(f"status {reply.status} without an error")
    content, size = reply.body, reply.header("x-file-size")
    if size is None or not size.isdigit() or len(size) > 18 or (most is not None and len(content) > most):
        raise BadReply("a file answer that contradicts itself")
    truncated = most is not None and int(size) > offset + len(content)
    whole = not offset and not truncated
    lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n")) if whole else None
    return Completion({"size": int(size), "total_lines": lines, "truncated": truncated}, content)


def _read_lines(op: Operation) -> Steps:
    args = op.args
    asked: int | None = args.get("max_bytes")
    most = _MAX_RANGE_BYTES if asked is None else min(asked, _MAX_RANGE_BYTES)
    fields: dict[str, Any] = {"do": "read", "path": args["path"], "max_bytes": most}
    for name in ("start_line", "end_line"):
        if args.get(name) is not None:
            fields[name] = args[name]
    data = json_of((yield post(_FS, fields, cap=MARGIN + most * _JSON_BLOWUP, effect=False)))
    coded = check.field(data, "content_b64", str, type(None))
    content = base64.b64decode(coded, validate=True) if coded is not None else check.text(data, "content").encode()
    value = {
        "size": check.count(data, "size"),
        "total_lines": check.field(data, "total_lines", int, type(None)),
        "truncated": check.field(data, "truncated", bool),
    }
    return Completion(value, content)


def _read_text(op: Operation) -> Steps:
    args = op.args
    most = min(args.get("max_chars") or _MAX_TEXT_CHARS, _MAX_TEXT_CHARS)
    fields: dict[str, Any] = {"do": "text", "path": args["path"], "max_chars": most}
    for name in ("start_line", "end_line", "lenient"):
        if args.get(name) is not None:
            fields[name] = args[name]
    # Four bytes of UTF-8 for a character at most, and base64 around them.
    data = json_of((yield post(_FS, fields, cap=MARGIN + most * 4 * 4 // 3, effect=False)))
    try:
        content = base64.b64decode(check.text(data, "content_b64"), validate=True)
    except binascii.Error:
        raise BadReply("a text that is not base64") from None
    return Completion(check.text_read(data), content)


def change(op: Operation, route: str, fields: dict[str, Any]) -> Request:
    """A request that changes something, under its op id: after a broken connection it may be sent again."""
    request = post(route, {**fields, "op_id": op.op_id}, effect=True) if op.op_id else post(route, fields, effect=True)
    return once(request) if op.op_id else request


def _digest_rule(args: Any) -> str | None:
    wanted = args.get("if_digest")
    return None if wanted is None else wanted or "absent"


def _write_file(op: Operation, _lost: LostSessions) -> Steps:
    args, content = op.args, op.content or b""
    if len(content) > MAX_FILE_BYTES:
        raise PayloadTooLarge(f"a write has {MAX_FILE_BYTES} bytes at most", limit=MAX_FILE_BYTES)
    if len(content) > _WHOLE_WRITE:
        return (yield from _upload(op, content))
    query = {
        "path": args["path"],
        "append": "1" if args.get("append") else "0",
        "create_parents": "1" if args.get("make_parents", True) else "0",
        "digest": "1",
    }
    if (rule := _digest_rule(args)) is not None:
        query["if_digest"] = rule
    if args.get("if_size") is not None:
        query["if_size"] = str(args["if_size"])
    if args.get("mode") is not None:
        query["mode"] = f"{args['mode']:o}"
    if op.op_id:
        query["op_id"] = op.op_id
    request = put(_FILE, query, content)
    return Completion(written(json_of((yield once(request) if op.op_id else request))))


def written(data: dict[str, Any]) -> dict[str, Any]:
    """The value of a write_file from sandboxd's answer."""
    return {"size": check.count(data, "size"), "digest": check.optional_text(data, "digest", 64)}


def _upload(op: Operation, content: bytes) -> Steps:
    # Hashed before the first request, on the thread that starts the operation and not on the waiter.
    args, digest = op.args, hashlib.sha256(content).hexdigest()
    if args.get("if_size") is not None:
        raise PayloadTooLarge(f"an append to a known size has {_WHOLE_WRITE} bytes at most", limit=_WHOLE_WRITE)
    begin: dict[str, Any] = {
        "path": args["path"],
        "append": bool(args.get("append")),
        "create_parents": args.get("make_parents", True),
    }
    if (rule := _digest_rule(args)) is not None:
        begin["if_digest"] = rule
    if args.get("mode") is not None:
        begin["mode"] = args["mode"]
    data = json_of((yield post("/v1/sandfleet/upload/begin", begin, effect=False)))
    upload_id, whole = check.text(data, "upload_id")[:200], memoryview(content)
    try:
        for offset in range(0, len(content), _CHUNK):
            query = {"id": upload_id, "offset": str(offset)}
            chunk = put("/v1/sandfleet/upload/chunk", query, whole[offset : offset + _CHUNK], effect=False)
            json_of((yield chunk))
    except Exception:
        yield post("/v1/sandfleet/upload/abort", {"id": upload_id}, effect=False)
        raise
    commit = {"id": upload_id, "size": len(content), "sha256": digest}
    return Completion(written(json_of((yield change(op, "/v1/sandfleet/upload/commit", commit)))))


# --- the rest of the file system -------------------------------------------------------------


def _str_replace(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    fields = {
        "do": "str_replace",
        "path": args["path"],
        "old": args["old"],
        "new": args["new"],
        "replace_all": bool(args.get("replace_all")),
    }
    if (rule := _digest_rule(args)) is not None:
        fields["if_digest"] = rule
    return Completion(replaced(json_of((yield change(op, _FS, fields)))))


def replaced(data: dict[str, Any]) -> dict[str, Any]:
    """The value of a str_replace from sandboxd's answer."""
    return {"count": check.count(data, "count"), "digest": check.optional_text(data, "digest", 64)}


def _list_dir(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    most = args.get("max_entries", 10_000)
    fields = {"do": "list", "path": args["path"], "max_depth": args.get("max_depth", 2), "max_entries": most}
    data = json_of((yield post(_FS, fields, cap=64 * MIB, effect=False)))
    entries = [check.file_info(item) for item in check.items(data, "entries", most)]
    return Completion({"entries": entries, "truncated": check.field(data, "truncated", bool), **_unread(data)})


def _unread(data: dict[str, Any]) -> dict[str, int]:
    """How many directories could not be read, where there were any: a part must not look like the whole."""
    errors = check.count(data, "errors")
    return {"errors": errors} if errors else {}


def _search_request(fields: dict[str, Any], timeout_s: float) -> Request:
    return post(_FS, {**fields, "timeout": timeout_s}, cap=64 * MIB, effect=False, guard_s=timeout_s + _GUARD_EXTRA_S)


def _glob(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    most = args.get("max_results", 200)
    fields = {
        "do": "glob",
        "path": args["path"],
        "pattern": args["pattern"],
        "include_dirs": bool(args.get("include_dirs")),
        "max_results": most,
    }
    data = json_of((yield _search_request(fields, args.get("timeout_s", 20.0))))
    paths = check.items(data, "matches", most)
    if not all(isinstance(path, str) for path in paths):
        raise BadReply("a path that is no text")
    return Completion({"paths": paths, "truncated": check.field(data, "truncated", bool), **_unread(data)})


def _grep(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    most = args.get("max_results", 100)
    fields = {
        "do": "grep",
        "path": args["path"],
        "pattern": args["pattern"],
        "glob": args.get("glob"),
        "literal": bool(args.get("literal")),
        "case_sensitive": bool(args.get("case_sensitive")),
        "max_results": most,
    }
    data = json_of((yield _search_request(fields, args.get("timeout_s", 20.0))))
    matches = [
        [check.text(item, "path"), check.count(item, "line_number"), check.text(item, "line")[:1000]]
        for item in map(check.table, check.items(data, "matches", most))
    ]
    skipped = check.table(data.get("skipped"))
    counts = {name: check.count(skipped, name) for name in ("large", "binary", "long_lines", "errors")}
    return Completion({"matches": matches, "truncated": check.field(data, "truncated", bool), "skipped": counts})


def _stat(op: Operation, _lost: LostSessions) -> Steps:
    fields = {"do": "stat", "path": op.args["path"], "follow": op.args.get("follow", True)}
    data = json_of((yield post(_FS, fields, effect=False)))
    return Completion(check.file_info(data))


def _change(do: str, *names: tuple[str, str, Any]) -> Callable[[Operation, LostSessions], Steps]:
    """A mutation without an answer worth keeping; names are (ours, theirs, default)."""

    def steps(op: Operation, _lost: LostSessions) -> Steps:
        fields = {theirs: op.args.get(ours, default) for ours, theirs, default in names}
        json_of((yield change(op, _FS, {"do": do, "path": op.args["path"], **fields})))
        return Completion({})

    return steps


FILE_STEPS: dict[str, Callable[[Operation, LostSessions], Steps]] = {
    "read_file": _read_file,
    "write_file": _write_file,
    "str_replace": _str_replace,
    "list_dir": _list_dir,
    "glob": _glob,
    "grep": _grep,
    "stat": _stat,
    "make_dir": _change(
        "make_dir", ("parents", "parents", True), ("exist_ok", "exist_ok", True), ("mode", "mode", None)
    ),
    "make_link": _change("make_link", ("target", "target", None), ("overwrite", "overwrite", False)),
    "remove": _change("remove", ("recursive", "recursive", False), ("missing_ok", "missing_ok", False)),
    "move": _change("move", ("new_path", "to", None), ("overwrite", "overwrite", False), ("follow", "follow", False)),
}
