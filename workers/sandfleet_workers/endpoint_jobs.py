"""What is said to sandboxd about commands that go on by themselves: their output, stdin, terminal and end."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.endpoint_files import MARGIN, LostSessions, Steps
from sandfleet_workers.endpoint_http import KIB, MIB, BadReply, Reply, get, json_of, once, post

__all__ = ["JOB_STEPS", "ops_of", "raw_parts"]

#: How many commands and changes sandboxd tells of at most, and how much text that may be.
_MAX_OPS = 4096
_OPS_CAP = 32 * MIB
_MAX_PROCESSES = 1000
_MAX_OUTPUT = 4 * MIB
_GUARD_EXTRA_S = 10.0
_OUTPUT, _OPS = "/v1/bash/output", "/v1/sandfleet/ops"


def raw_parts(reply: Reply) -> tuple[dict[str, Any], memoryview, memoryview]:
    """An answer that ends with two streams as they are: the JSON, and their bytes."""
    end = reply.body.find(b"\n")
    if end < 0:
        end = len(reply.body)
    data = json_of(Reply(reply.status, reply.head, reply.body[:end]))
    lengths, follow = check.items(data, "raw", 2), memoryview(reply.body)[end + 1 :]
    if [type(length) for length in lengths] != [int, int] or min(lengths) < 0 or sum(lengths) != len(follow):
        raise BadReply("output that is not as long as told")
    return data, follow[: lengths[0]], follow[lengths[0] :]


def _job_output(op: Operation, _lost: LostSessions) -> Steps:
    args, wait_s = op.args, float(op.args.get("wait_s", 0.0))
    most = min(int(args.get("max_bytes", 256 * KIB)), _MAX_OUTPUT)
    asked = args.get("offset", 0), args.get("stderr_offset", 0)
    fields = {
        "op_id": args["op_id"],
        "offset": asked[0],
        "stderr_offset": asked[1],
        "max_bytes": most,
        "encoding": "raw",
        "wait": wait_s > 0,
        "wait_timeout": wait_s,
        "settle": args.get("settle_s", 0.0),
    }
    guard_s = wait_s + _GUARD_EXTRA_S
    data, out, err = raw_parts((yield post(_OUTPUT, fields, cap=MARGIN + 2 * most, effect=False, guard_s=guard_s)))
    value: dict[str, Any] = {"running": check.text(data, "status") == "running"}
    for name, start, part in (("", asked[0], out), ("stderr_", asked[1], err)):
        offset, skipped = check.count(data, f"{name}offset"), check.count(data, f"{name}skipped")
        # Who asks beyond the end is told where that is.
        if len(part) > most or (offset != start + skipped + len(part) and (part or skipped or offset > start)):
            raise BadReply("output that is not where it was asked for")
        value[f"{name}offset"], value[f"{name}skipped"] = offset, skipped
    value["stdout_bytes"], value["stderr_bytes"] = len(out), len(err)
    return Completion(value, b"".join((out, err)))


def _kill_job(op: Operation, _lost: LostSessions) -> Steps:
    fields = {"op_id": op.args["job_id"], "signal": op.args.get("signal") or "SIGTERM", "change_id": op.op_id}
    data = json_of((yield once(post("/v1/bash/kill", fields, effect=True))))
    return Completion(killed(data))


def killed(data: dict[str, Any]) -> dict[str, Any]:
    """The value of a kill_job from sandboxd's answer."""
    return {"found": check.field(data, "signalled", bool), "running": check.text(data, "status") == "running"}


def _write_stdin(op: Operation, _lost: LostSessions) -> Steps:
    fields: dict[str, Any] = {"op_id": op.args["job_id"], "eof": bool(op.args.get("eof")), "change_id": op.op_id}
    if op.content:
        fields["input_b64"] = base64.b64encode(op.content).decode()
    json_of((yield once(post("/v1/bash/write", fields, effect=True))))
    return Completion({})


def _resize_job(op: Operation, _lost: LostSessions) -> Steps:
    fields = {"op_id": op.args["job_id"], "rows": op.args["rows"], "cols": op.args["cols"]}
    json_of((yield post("/v1/sandfleet/resize", fields, effect=False)))
    return Completion({})


def _poll_job(op: Operation, _lost: LostSessions) -> Steps:
    fields = {"op_id": op.args["job_id"], "encoding": "none"}
    data = json_of((yield post("/v1/sandfleet/op", fields, effect=False)))
    told = _state(data)
    told["out_of_memory"] = data.get("out_of_memory") is True
    return Completion(told)


def _state(data: dict[str, Any]) -> dict[str, Any]:
    code = check.optional_count(data, "exit_code")
    signal = check.optional_text(data, "signal", 20)
    if code is not None and code > 255:
        raise BadReply("an exit code out of range")
    return {
        "running": check.text(data, "status") == "running",
        "exit_code": None if signal is not None else code,
        "signal": signal,
        "timed_out": check.field(data, "timed_out", bool),
        "cancelled": check.field(data, "cancelled", bool),
        "pid": check.count(data, "pid"),
        "duration_s": check.number(data, "duration_s"),
        "stdout_bytes": check.count(data, "stdout_bytes"),
        "stderr_bytes": check.count(data, "stderr_bytes"),
    }


def ops_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What sandboxd remembers, each entry a table of its own fields, which are still to be checked."""
    return [check.table(item) for item in check.items(data, "ops", _MAX_OPS)]


def _list_jobs(_op: Operation, _lost: LostSessions) -> Steps:
    data = json_of((yield get(_OPS, cap=_OPS_CAP)))
    jobs = [
        {
            "job_id": check.text(item, "op_id")[:128],
            "command": check.text(item, "command")[:200],
            "started_at": check.number(item, "started_at"),
            **_state(item),
        }
        for item in ops_of(data)
        if item.get("kind") == "command" and item.get("background") is True
    ]
    return Completion({"jobs": jobs})


def _list_processes(_op: Operation, _lost: LostSessions) -> Steps:
    data = json_of((yield get("/v1/sandfleet/processes", cap=4 * MIB)))
    processes = [_process(check.table(item)) for item in check.items(data, "processes", _MAX_PROCESSES)]
    return Completion({"processes": processes})


def _process(item: dict[str, Any]) -> dict[str, Any]:
    uid = check.optional_count(item, "uid")
    return {
        "pid": check.count(item, "pid"),
        "ppid": check.count(item, "ppid"),
        "user": None if uid is None else str(uid),
        "state": check.text(item, "state")[:1],
        "command": check.text(item, "command")[:200],
        "cpu_s": check.number(item, "cpu_s"),
        "memory_bytes": check.count(item, "memory_bytes"),
        "started_s": check.number(item, "started_s"),
    }


JOB_STEPS: dict[str, Callable[[Operation, LostSessions], Steps]] = {
    "job_output": _job_output,
    "kill_job": _kill_job,
    "write_stdin": _write_stdin,
    "resize_job": _resize_job,
    "poll_job": _poll_job,
    "list_jobs": _list_jobs,
    "list_processes": _list_processes,
}
