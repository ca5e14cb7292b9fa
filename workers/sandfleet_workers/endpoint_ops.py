"""What each kind of operation says to sandboxd, and what it makes of the answer.

An operation is a generator: it yields requests, gets replies and returns the completion. It does
no I/O and knows no thread, so the same few lines serve a one-request read and a chunked upload.
Every field that comes back is checked, because code in the sandbox may have written it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Generator
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet.blobs import MAX_BLOB_BYTES
from sandfleet.errors import (
    InternalError,
    InvalidArgument,
    NotStarted,
    NotSupported,
    OutcomeUnknown,
    PayloadTooLarge,
    SessionLost,
    SessionNotFound,
    UnknownOperation,
)
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, get, json_of, post, put

__all__ = ["MAX_FILE_BYTES", "LostSessions", "Steps", "kill_steps", "steps_of"]

Steps = Generator[Request, Reply, Completion]
#: Names of sessions whose loss was told to the caller, so that the next use opens a new shell.
LostSessions = set[str]

#: Of one read or write: what may travel as one blob. A larger file is refused before its bytes are moved.
MAX_FILE_BYTES = MAX_BLOB_BYTES
_MAX_RANGE_BYTES = 16 * MIB
_WHOLE_WRITE = 4 * MIB
_CHUNK = 4 * MIB
_TEXT_OUTPUT_LIMIT = 4 * MIB
_MARGIN = 256 * 1024
#: A JSON string of ASCII needs up to six bytes for one of the original (``\\u0000``).
_JSON_BLOWUP = 6
_MAX_TIMEOUT_S = 86400.0
_GUARD_EXTRA_S = 10.0
_FILE, _FS = "/v1/sandfleet/file", "/v1/sandfleet/fs"


def steps_of(op: Operation, lost: LostSessions) -> Steps:
    """The steps of an operation.

    Raises:
        UnknownOperation: No such kind here.
    """
    build = _STEPS.get(op.kind)
    if build is None:
        raise UnknownOperation(f"unknown operation {op.kind[:60]!r}", operation=op.kind)
    return build(op, lost)


# --- commands --------------------------------------------------------------------------------


def _execute(op: Operation, lost: LostSessions) -> Steps:
    args, session = op.args, op.args.get("session")
    keep = args.get("max_output_bytes", MIB)
    fields = _command_fields(op, keep)
    timeout_s = args.get("timeout_s") or _MAX_TIMEOUT_S
    cap = _MARGIN + 2 * (keep * _JSON_BLOWUP if keep <= _TEXT_OUTPUT_LIMIT else keep * 4 // 3 + 4)
    if session in lost:
        lost.discard(session)
        fields["create"] = True
    try:
        data = json_of((yield _exec_request(fields, cap, timeout_s)))
    except SessionNotFound:
        if session is None:
            raise
        # The shell ended by `exit`; a name is free for a new one. Nothing ran, so asking again is safe.
        data = json_of((yield _exec_request({**fields, "create": True}, cap, timeout_s)))
    except SessionLost:
        if session is not None:
            lost.add(session)
        raise
    except InternalError as exc:
        if exc.facts.get("unknown_code") == "op_not_found":
            raise NotStarted("the request was lost with its connection before the command began") from None
        raise
    return Completion(_command_value(data, keep))


def _exec_request(fields: dict[str, Any], cap: int, timeout_s: float) -> Request:
    guard_s = timeout_s + _GUARD_EXTRA_S
    request = post("/v1/bash/exec", fields, cap=cap, effect=True, guard_s=guard_s)
    question = {
        "op_id": fields["op_id"],
        "wait": True,
        "wait_timeout": min(guard_s, _MAX_TIMEOUT_S),
        "encoding": fields["encoding"],
    }
    # sandboxd remembers by op_id what it started: after a broken connection the outcome can be asked for.
    request.find = post("/v1/sandfleet/op", question, cap=cap, effect=True, guard_s=guard_s)
    return request


def _command_fields(op: Operation, keep: int) -> dict[str, Any]:
    args = op.args
    if args.get("user") is not None:
        raise NotSupported("commands run as the sandbox's one user; leave user= out", argument="user")
    fields: dict[str, Any] = {
        "op_id": op.op_id,
        "max_output_length": keep or 1,
        "encoding": "utf-8" if keep <= _TEXT_OUTPUT_LIMIT else "base64",
    }
    for ours, theirs in (
        ("command", "command"),
        ("argv", "argv"),
        ("cwd", "exec_dir"),
        ("timeout_s", "hard_timeout"),
        ("session", "session_id"),
    ):
        if (value := args.get(ours)) is not None:
            fields[theirs] = value
    if args.get("env"):
        fields["env"] = dict(args["env"])
    if args.get("session") is not None and args.get("argv") is not None:
        raise InvalidArgument("a session takes a command line, not argv", argument="argv")
    if op.content:
        if args.get("session") is not None:
            raise NotSupported("a session's command has no stdin of its own", argument="stdin")
        fields["stdin_b64"] = base64.b64encode(op.content).decode()
    return fields


def _command_value(data: dict[str, Any], keep: int) -> dict[str, Any]:
    if check.text(data, "status") == "running":
        raise OutcomeUnknown("sandboxd answered before the command ended")
    signal = check.optional_text(data, "signal", 20)
    stdout, stderr = _output(data, "stdout", keep), _output(data, "stderr", keep)
    code: int | None = check.field(data, "exit_code", int, type(None))
    duration_s = check.number(data, "duration_s")
    if code is not None and not 0 <= code <= 255:
        raise BadReply("an exit code out of range")
    return {
        "stdout": stdout,
        "stderr": stderr,
        "exit_code": None if signal is not None else code,
        "signal": signal,
        "duration_s": duration_s,
        "timed_out": check.field(data, "timed_out", bool),
        "truncated": check.field(data, "truncated", bool) or (keep == 0 and _wrote(data)),
        "cancelled": check.field(data, "cancelled", bool),
    }


def _wrote(data: dict[str, Any]) -> bool:
    return check.count(data, "stdout_bytes") + check.count(data, "stderr_bytes") > 0


def _output(data: dict[str, Any], stream: str, keep: int) -> str:
    text = check.text(data, stream)
    if keep == 0:
        return ""
    if keep <= _TEXT_OUTPUT_LIMIT:
        return text
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadReply(f"{stream} is not base64") from None
    missing = check.count(data, f"{stream}_discarded")
    if not missing:
        return raw.decode("utf-8", "replace")
    gap = check.count(data, f"{stream}_gap_at")
    note = f"\n... [{missing} bytes discarded] ...\n"
    return raw[:gap].decode("utf-8", "replace") + note + raw[gap:].decode("utf-8", "replace")


def _close_session(op: Operation, lost: LostSessions) -> Steps:
    session = op.args["session"]
    lost.discard(session)
    json_of((yield post(f"/v1/bash/sessions/{session}/close", {}, effect=True)))
    return Completion({})


def kill_steps(op_id: str) -> Steps:
    """Kill a running command; the value is ``killed``, ``over`` (it runs no more) or ``running`` (ask again)."""
    data = json_of((yield post("/v1/bash/kill", {"op_id": op_id, "signal": "SIGKILL"}, effect=True, guard_s=5.0)))
    if check.field(data, "signalled", bool):
        return Completion("killed")
    return Completion("running" if check.text(data, "status") == "running" else "over")


# --- contents --------------------------------------------------------------------------------


def _read_file(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    if args.get("start_line") is not None or args.get("end_line") is not None:
        return (yield from _read_lines(op))
    most = args.get("max_bytes")
    query = {"path": args["path"], "limit": str(MAX_FILE_BYTES)}
    if most is not None and most <= MAX_FILE_BYTES:
        query["length"] = str(most)
    # One streamed answer from one open file: a file replaced meanwhile cannot give a torn mixture.
    reply = yield get(_FILE, query, cap=max(_MARGIN, min(most if most is not None else MAX_FILE_BYTES, MAX_FILE_BYTES)))
    if reply.status != 200:
        json_of(reply)
        raise BadReply(f"status {reply.status} without an error")
    content, size = reply.body, reply.header("x-file-size")
    if size is None or not size.isdigit() or len(size) > 18 or (most is not None and len(content) > most):
        raise BadReply("a file answer that contradicts itself")
    truncated = most is not None and int(size) > len(content)
    lines = None if truncated else content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    return Completion({"size": int(size), "total_lines": lines, "truncated": truncated}, content)


def _read_lines(op: Operation) -> Steps:
    args = op.args
    asked: int | None = args.get("max_bytes")
    most = _MAX_RANGE_BYTES if asked is None else min(asked, _MAX_RANGE_BYTES)
    fields: dict[str, Any] = {"do": "read", "path": args["path"], "max_bytes": most}
    for name in ("start_line", "end_line"):
        if args.get(name) is not None:
            fields[name] = args[name]
    data = json_of((yield post(_FS, fields, cap=_MARGIN + most * _JSON_BLOWUP, effect=False)))
    coded = check.field(data, "content_b64", str, type(None))
    content = base64.b64decode(coded, validate=True) if coded is not None else check.text(data, "content").encode()
    value = {
        "size": check.count(data, "size"),
        "total_lines": check.field(data, "total_lines", int, type(None)),
        "truncated": check.field(data, "truncated", bool),
    }
    return Completion(value, content)


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
    return _written(json_of((yield put(_FILE, query, content))))


def _written(data: dict[str, Any]) -> Completion:
    return Completion({"size": check.count(data, "size"), "digest": check.optional_text(data, "digest", 64)})


def _upload(op: Operation, content: bytes) -> Steps:
    # Hashed before the first request, on the thread that starts the operation and not on the waiter.
    args, digest = op.args, hashlib.sha256(content).hexdigest()
    begin = {
        "path": args["path"],
        "append": bool(args.get("append")),
        "create_parents": args.get("make_parents", True),
    }
    if (rule := _digest_rule(args)) is not None:
        begin["if_digest"] = rule
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
    return _written(json_of((yield post("/v1/sandfleet/upload/commit", commit, effect=True))))


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
    data = json_of((yield post(_FS, fields, effect=True)))
    return Completion({"count": check.count(data, "count"), "digest": check.optional_text(data, "digest", 64)})


def _list_dir(op: Operation, _lost: LostSessions) -> Steps:
    args = op.args
    most = args.get("max_entries", 10_000)
    fields = {"do": "list", "path": args["path"], "max_depth": args.get("max_depth", 2), "max_entries": most}
    data = json_of((yield post(_FS, fields, cap=64 * MIB, effect=False)))
    entries = [check.file_info(item) for item in check.items(data, "entries", most)]
    return Completion({"entries": entries, "truncated": check.field(data, "truncated", bool)})


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
    return Completion({"paths": paths, "truncated": check.field(data, "truncated", bool)})


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
    data = json_of((yield post(_FS, {"do": "stat", "path": op.args["path"]}, effect=False)))
    return Completion(check.file_info(data))


def _change(do: str, *names: tuple[str, str, Any]) -> Callable[[Operation, LostSessions], Steps]:
    """A mutation without an answer worth keeping; names are (ours, theirs, default)."""

    def steps(op: Operation, _lost: LostSessions) -> Steps:
        fields = {theirs: op.args.get(ours, default) for ours, theirs, default in names}
        json_of((yield post(_FS, {"do": do, "path": op.args["path"], **fields}, effect=True)))
        return Completion({})

    return steps


def _health(_op: Operation, _lost: LostSessions) -> Steps:
    data = json_of((yield get("/v1/sandfleet/hello")))
    running, sessions = check.count(data, "ops_running"), check.count(data, "sessions")
    version = check.text(data, "version")[:40]
    return Completion({"status": "alive", "detail": f"sandboxd {version}, {running} running, {sessions} sessions"})


def _noop(_op: Operation, _lost: LostSessions) -> Steps:
    yield from ()  # a generator that asks nothing
    return Completion({})


_STEPS: dict[str, Callable[[Operation, LostSessions], Steps]] = {
    "execute_command": _execute,
    "close_session": _close_session,
    "read_file": _read_file,
    "write_file": _write_file,
    "str_replace": _str_replace,
    "list_dir": _list_dir,
    "glob": _glob,
    "grep": _grep,
    "stat": _stat,
    "make_dir": _change("make_dir", ("parents", "parents", True), ("exist_ok", "exist_ok", True)),
    "remove": _change("remove", ("recursive", "recursive", False), ("missing_ok", "missing_ok", False)),
    "move": _change("move", ("new_path", "to", None), ("overwrite", "overwrite", False)),
    "health": _health,
    "noop": _noop,
}
