"""What each kind of operation says to sandboxd, and what it makes of the answer.

An operation is a generator: it yields requests, gets replies and returns the completion. It does
no I/O and knows no thread, so the same few lines serve a one-request read and a chunked upload.
Every field that comes back is checked, because code in the sandbox may have written it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Protocol

from sandfleet.backends import Completion, Operation
from sandfleet.errors import (
    InvalidArgument,
    NotSupported,
    OutcomeUnknown,
    SessionLost,
    SessionNotFound,
    UnknownOperation,
)
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers import endpoint_recall as recall
from sandfleet_workers.endpoint_files import FILE_STEPS, MARGIN, MAX_FILE_BYTES, LostSessions, Steps, change
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, get, json_of, post
from sandfleet_workers.endpoint_jobs import JOB_STEPS, raw_parts

__all__ = ["MAX_FILE_BYTES", "Dialect", "SandboxdDialect", "Steps"]

_MAX_TIMEOUT_S = 86400.0
_GUARD_EXTRA_S = 10.0
_START_S = 60.0
#: Of the output of what is followed: so much of each stream is still there for a follower who is late.
_WINDOW_BYTES = 256 * 1024


class Dialect(Protocol):
    """What operations say to one sandbox, and what they make of its answers."""

    def steps(self, op: Operation) -> Steps:
        """The steps of an operation.

        Raises:
            SandfleetError: It cannot be carried out, and nothing was sent.
        """

    def kill(self, op_id: str) -> Steps:
        """Kill a running command; the value is ``killed``, ``over`` (it runs no more) or ``running`` (ask again)."""

    def recall(self, op: Operation) -> Steps:
        """The steps of `Connection.recall`. What they return was said by the sandbox; errors that they raise were not.

        Raises:
            SandfleetError: It cannot be asked for.
        """

    def remembered(self) -> Steps:
        """The steps of `Connection.remembered`."""


class SandboxdDialect:
    """What sandboxd understands."""

    def __init__(self) -> None:
        self._lost: LostSessions = set()

    def steps(self, op: Operation) -> Steps:
        build = _STEPS.get(op.kind)
        if build is None:
            raise UnknownOperation(f"unknown operation {op.kind[:60]!r}", operation=op.kind)
        return build(op, self._lost)

    def kill(self, op_id: str) -> Steps:
        fields = {"op_id": op_id, "signal": "SIGKILL"}
        data = json_of((yield post("/v1/bash/kill", fields, effect=True, guard_s=5.0)))
        if check.field(data, "signalled", bool):
            return Completion("killed")
        return Completion("running" if check.text(data, "status") == "running" else "over")

    def recall(self, op: Operation) -> Steps:
        if op.kind == "execute_command":
            return recall.recall_command(op, _final_value)
        if op.kind in recall.CHANGES:
            return recall.recall_change(op)
        return recall.forgotten(op)

    def remembered(self) -> Steps:
        return recall.remembered()


# --- commands --------------------------------------------------------------------------------


def _execute(op: Operation, lost: LostSessions) -> Steps:
    args, session = op.args, op.args.get("session")
    keep = args.get("max_output_bytes", MIB)
    fields = _command_fields(op, keep)
    # A job is answered when it runs.
    timeout_s = _START_S if args.get("background") else args.get("timeout_s") or _MAX_TIMEOUT_S
    cap = MARGIN + 2 * max(keep, 1)
    if session in lost:
        lost.discard(session)
        fields["create"] = True
    try:
        data = _result_of((yield _exec_request(fields, cap, timeout_s)))
    except SessionNotFound:
        if session is None:
            raise
        # The shell ended by `exit`; a name is free for a new one. Nothing ran, so asking again is safe.
        data = _result_of((yield _exec_request({**fields, "create": True}, cap, timeout_s)))
    except SessionLost:
        if session is not None:
            lost.add(session)
        raise
    if args.get("background"):
        return Completion({"job_id": op.op_id, "pid": check.count(data, "pid")})
    return Completion(_command_value(data, keep, as_bytes=bool(args.get("as_bytes"))))


def _final_value(op: Operation, reply: Reply) -> dict[str, Any]:
    """The value of a command that has ended, whoever started it."""
    keep = op.args.get("max_output_bytes", MIB)
    return _command_value(_result_of(reply), keep, as_bytes=bool(op.args.get("as_bytes")))


def _exec_request(fields: dict[str, Any], cap: int, timeout_s: float) -> Request:
    guard_s = timeout_s + _GUARD_EXTRA_S
    request = post("/v1/bash/exec", fields, cap=cap, effect=True, guard_s=guard_s)
    # sandboxd remembers by op_id what it started: after a broken connection the outcome can be asked for.
    wait_s = 0.0 if fields.get("async_mode") else min(guard_s, _MAX_TIMEOUT_S)
    request.find = recall.question(fields["op_id"], cap=cap, wait_s=wait_s, guard_s=guard_s)
    return request


def _command_fields(op: Operation, keep: int) -> dict[str, Any]:
    args = op.args
    if args.get("user") is not None:
        raise NotSupported("commands run as the sandbox's one user; leave user= out", argument="user")
    fields: dict[str, Any] = {
        "op_id": op.op_id,
        "max_output_length": keep or 1,
        "encoding": "raw",
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
    fields.update(_job_fields(op))
    if args.get("session") is not None and args.get("argv") is not None:
        raise InvalidArgument("a session takes a command line, not argv", argument="argv")
    if op.content:
        if args.get("session") is not None:
            raise NotSupported("a session's command has no stdin of its own", argument="stdin")
        fields["stdin_b64"] = base64.b64encode(op.content).decode()
    return fields


def _job_fields(op: Operation) -> dict[str, Any]:
    """What a command says that goes on by itself, or is followed while it runs."""
    args, fields = op.args, dict[str, Any]()
    if op.note:
        fields["note"] = op.note
    if args.get("background"):
        fields["async_mode"] = True
    if args.get("background") or args.get("stream"):
        fields["window"] = _WINDOW_BYTES
    if args.get("stdin_open"):
        fields["stdin_open"] = True
    if (size := args.get("pty")) is not None:
        fields["pty"] = {"rows": size.get("rows", 24), "cols": size.get("cols", 80)}
    if args.get("session") is not None and fields.keys() & {"async_mode", "stdin_open", "pty"}:
        raise InvalidArgument("a session's command is no job and has no stdin or terminal", argument="session")
    return fields


def _result_of(reply: Reply) -> dict[str, Any]:
    """What came back of a command: the JSON, and as ``stdout`` and ``stderr`` the bytes that follow it."""
    data, stdout, stderr = raw_parts(reply)
    data["stdout"], data["stderr"] = stdout, stderr
    return data


def _command_value(data: dict[str, Any], keep: int, *, as_bytes: bool = False) -> dict[str, Any]:
    if check.text(data, "status") == "running":
        raise OutcomeUnknown("sandboxd answered before the command ended")
    signal = check.optional_text(data, "signal", 20)
    output = _raw_output if as_bytes else _output
    stdout, stderr = output(data, "stdout", keep), output(data, "stderr", keep)
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
        # Left out by other servers of this API.
        "out_of_memory": data.get("out_of_memory") is True,
        **({"encoding": "base64"} if as_bytes else {}),
    }


def _wrote(data: dict[str, Any]) -> bool:
    return check.count(data, "stdout_bytes") + check.count(data, "stderr_bytes") > 0


def _output(data: dict[str, Any], stream: str, keep: int) -> str:
    return "".join(str(part, "utf-8", "replace") for part in _parts(data, stream)) if keep else ""


def _raw_output(data: dict[str, Any], stream: str, keep: int) -> str:
    return base64.b64encode(b"".join(_parts(data, stream))).decode() if keep else ""


def _parts(data: dict[str, Any], stream: str) -> list[memoryview | bytes]:
    """What was kept of a stream, with a note where something was dropped."""
    raw: memoryview = data[stream]
    missing = check.count(data, f"{stream}_discarded")
    if not missing:
        return [raw]
    gap = check.count(data, f"{stream}_gap_at")
    return [raw[:gap], b"\n... [%d bytes discarded] ...\n" % missing, raw[gap:]]


def _close_session(op: Operation, lost: LostSessions) -> Steps:
    session = op.args["session"]
    lost.discard(session)
    json_of((yield change(op, f"/v1/bash/sessions/{session}/close", {})))
    return Completion({})


# --- the sandbox itself -----------------------------------------------------------------------


def _health(_op: Operation, _lost: LostSessions) -> Steps:
    data = json_of((yield get("/v1/sandfleet/hello")))
    running, sessions = check.count(data, "ops_running"), check.count(data, "sessions")
    version = check.text(data, "version")[:40]
    return Completion({"status": "alive", "detail": f"sandboxd {version}, {running} running, {sessions} sessions"})


def _metrics(_op: Operation, _lost: LostSessions) -> Steps:
    data = json_of((yield get("/v1/sandfleet/stats", {"disk": "1"})))
    percent = check.number(data, "cpu_percent") if data.get("cpu_percent") is not None else None
    value = {"cpu_s": check.number(data, "cpu_s"), "cpu_percent": percent, "uptime_s": check.number(data, "uptime_s")}
    for name in ("memory_bytes", "pids", "disk_bytes"):
        value[name] = check.optional_count(data, name)
    value["network_in_bytes"] = value["network_out_bytes"] = check.optional_count(data, "network_bytes")
    return Completion(value)


def _noop(_op: Operation, _lost: LostSessions) -> Steps:
    yield from ()  # a generator that asks nothing
    return Completion({})


_STEPS: dict[str, Callable[[Operation, LostSessions], Steps]] = {
    **FILE_STEPS,
    **JOB_STEPS,
    "execute_command": _execute,
    "close_session": _close_session,
    "health": _health,
    "metrics": _metrics,
    "noop": _noop,
}
