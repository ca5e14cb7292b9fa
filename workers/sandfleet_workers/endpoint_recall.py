"""Asking a sandbox how something ended that an earlier connection may have begun; see `endpoint_ops` for the form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandfleet.backends import Completion, Operation, Remembered
from sandfleet.errors import SandfleetError
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.endpoint_files import MARGIN, Steps, replaced, written
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, get, json_of, once, post
from sandfleet_workers.endpoint_jobs import killed, ops_of

__all__ = ["CHANGES", "forgotten", "question", "recall_change", "recall_command", "remembered"]

#: One question waits so long at most: well within the time after which the guard gives an answer up.
_SLICE_S = 25.0
_GUARD_S = 60.0
#: Of 24 hours, the longest that a command may take, and some; who answers too soon is not asked for ever.
_MAX_SLICES = 4000
_OPS_CAP = 32 * MIB

#: What the answer to a change means, by kind.
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "write_file": written,
    "str_replace": replaced,
    "kill_job": killed,
    **dict.fromkeys(("make_dir", "make_link", "remove", "move", "close_session", "write_stdin"), lambda _data: {}),
}


def question(op_id: str, *, cap: int, wait_s: float, guard_s: float) -> Request:
    """What became of an op; if it has not begun, it never will from now on."""
    fields = {
        "op_id": op_id,
        "wait": wait_s > 0,
        "wait_timeout": wait_s,
        "encoding": "raw",
        "partial": False,
        "refuse": True,
    }
    # Nothing is changed by it, but without its answer the effect it asks about is in doubt.
    return once(post("/v1/sandfleet/op", fields, cap=cap, effect=True, guard_s=guard_s))


def _ended(op: Operation, cap: int) -> Any:
    """Ask until it has ended; the reply that says so. A generator like `Steps`."""
    for _ in range(_MAX_SLICES):
        reply = yield question(op.op_id, cap=cap, wait_s=_SLICE_S, guard_s=_GUARD_S)
        if not _says_running(reply):
            return reply
    raise BadReply("an operation that does not end")


def _says_running(reply: Reply) -> bool:
    head, _, _ = reply.body.partition(b"\n")
    return reply.status == 200 and json_of(Reply(reply.status, reply.head, head)).get("status") == "running"


def recall_command(op: Operation, value: Callable[[Operation, Reply], Any]) -> Steps:
    """How a command ended; ``value`` makes of sandboxd's answer what `execute_command` gives."""
    reply = yield from _ended(op, MARGIN + 2 * max(op.args.get("max_output_bytes", MIB), 1))
    return _told(lambda: Completion(value(op, reply)))


def recall_change(op: Operation) -> Steps:
    """How a change ended."""
    reply = yield from _ended(op, MARGIN)
    return _told(lambda: Completion(CHANGES[op.kind](json_of(reply))))


def forgotten(op: Operation) -> Steps:
    """Of what cannot be told from what is remembered (a batch): only whether it has begun."""
    reply = yield question(op.op_id, cap=MARGIN, wait_s=0.0, guard_s=_GUARD_S)
    return _told(lambda: _nothing_known(op, reply))


def _nothing_known(op: Operation, reply: Reply) -> Completion:
    json_of(reply)
    raise BadReply(f"an answer to {op.kind} under an id of something else")


def _told(read: Callable[[], Completion]) -> Completion:
    """What the sandbox said, an error too: in `EndpointConnection.recall` those that are raised are the way's."""
    try:
        return read()
    except SandfleetError as exc:
        return Completion(error=exc)


def remembered() -> Steps:
    """All that the sandbox remembers, as a list of `Remembered`."""
    data = json_of((yield get("/v1/sandfleet/ops", cap=_OPS_CAP)))
    return Completion(
        [
            Remembered(
                check.text(item, "op_id")[:128], check.field(item, "running", bool), check.text(item, "note")[:4096]
            )
            for item in ops_of(data)
        ]
    )
