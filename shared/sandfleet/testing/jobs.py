"""Jobs and live output for `MockSandboxProvider`: a prepared output comes at once, or after its ``delay_s``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from sandfleet.backends import Completion, Connection, Operation
from sandfleet.errors import JobNotFound, NotSupported
from sandfleet.store.base import OpView, Output, Route
from sandfleet.store.memory import MemoryStore

__all__ = ["MockJobs"]

_FOLLOWING = ("background", "stdin_open", "pty", "stream")
_KEPT_S = 3600.0


class MockJobs:
    """What there is of a store without a fleet: locks, and the records and output streams of commands.

    Raises:
        NotSupported: By all else that a store has.
    """

    def __init__(self) -> None:
        self._streams = MemoryStore()
        self.read_output, self.drop_reader = self._streams.read_output, self._streams.drop_reader
        self.lock, self.unlock = self._streams.lock, self._streams.unlock
        self._views: dict[str, OpView] = {}
        self._killed_by: dict[str, str] = {}

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotSupported(f"a MockSandboxProvider has no {name}; test that with a fleet (sandfleet.stack.Stack)")

    def op(self, op_id: str) -> OpView | None:
        """The record of a job."""
        return self._views.get(op_id)

    def answers(self, kind: str) -> bool:
        """Whether an operation of that kind is about jobs."""
        return kind in _KINDS

    def answer(self, connection: Connection, sandbox_id: str, op: Operation) -> Any:
        """The value of an operation about jobs."""
        return _KINDS[op.kind](self, connection, sandbox_id, op.args)

    def run(self, connection: Connection, sandbox_id: str, op: Operation) -> Completion:
        """Run a command; a job is answered at once, any other when it has ended and its output is in its stream."""
        command = replace(op, args={key: value for key, value in op.args.items() if key not in _FOLLOWING})
        if not op.args.get("background"):
            completion = connection.perform(command, timeout_s=3600.0)
            if stream := op.args.get("stream"):
                self._show(stream, completion)
            return completion
        if op.op_id not in self._views:
            self._views[op.op_id] = _view(op, sandbox_id)
            connection.start(command, lambda completion: self._ended(op.op_id, completion))
        return Completion({"job_id": op.op_id, "pid": 2})

    def _show(self, stream: str, completion: Completion) -> None:
        value = completion.value or {}
        out, err = (str(value.get(name) or "").encode("utf-8", "surrogateescape") for name in ("stdout", "stderr"))
        self._streams.push_output(stream, Output(0, 0, out, err), keep_bytes=len(out) + len(err), ttl_s=_KEPT_S)
        outcome = "ok" if completion.error is None else completion.error.code
        self._streams.finish("", Route("", "", "", 0), outcome=outcome, reply="", stream=stream)

    def _ended(self, job_id: str, completion: Completion) -> None:
        value, error = completion.value, completion.error
        if error is None and job_id in self._killed_by:
            value = {**value, "signal": self._killed_by[job_id]}
        reply = {"ok": value} if error is None else {"error": error.to_wire()}
        self._views[job_id] = replace(
            self._views[job_id],
            state="done",
            outcome="ok" if error is None else error.code,
            reply=json.dumps(reply),
            finished_at_ms=int(time.time() * 1000),
        )
        self._show(job_id, completion)

    # --- what is asked about jobs ----------------------------------------------------------------

    def _of(self, sandbox_id: str, args: Mapping[str, Any]) -> OpView:
        view = self._views.get(args["job_id"])
        if view is None or view.sandbox_id != sandbox_id:
            raise JobNotFound(f"no job {args['job_id']}", op_id=args["job_id"])
        return view

    def _kill(self, connection: Connection, sandbox_id: str, args: Mapping[str, Any]) -> Any:
        view = self._of(sandbox_id, args)
        self._killed_by[view.op_id] = args.get("signal") or "SIGTERM"
        return {"found": connection.cancel(view.op_id), "running": False}

    def _nothing(self, _connection: Connection, sandbox_id: str, args: Mapping[str, Any]) -> Any:
        self._of(sandbox_id, args)
        return {}

    def _poll(self, _connection: Connection, sandbox_id: str, args: Mapping[str, Any]) -> Any:
        return _state(self._of(sandbox_id, args))

    def _list(self, _connection: Connection, sandbox_id: str, _args: Mapping[str, Any]) -> Any:
        return {"jobs": [_state(view) for view in self._views.values() if view.sandbox_id == sandbox_id]}

    def _processes(self, _connection: Connection, sandbox_id: str, _args: Mapping[str, Any]) -> Any:
        running = [view for view in self._views.values() if view.sandbox_id == sandbox_id and view.state == "claimed"]
        return {
            "processes": [
                {"pid": pid, "ppid": 1, "user": None, "state": "S", "command": view.describe, "cpu_s": 0.0,
                 "memory_bytes": 0, "started_s": 0.0}
                for pid, view in enumerate(running, 2)
            ]
        }  # fmt: skip


def _view(op: Operation, sandbox_id: str) -> OpView:
    command, now_ms = op.args.get("command"), int(time.time() * 1000)
    return OpView(
        op_id=op.op_id,
        kind=op.kind,
        sandbox_id=sandbox_id,
        node_id="in-process",
        incarnation="in-process",
        state="claimed",
        outcome="",
        describe=command if command is not None else " ".join(op.args.get("argv") or ()),
        recorded_at_ms=now_ms,
        claimed_at_ms=now_ms,
        finished_at_ms=None,
        deadline_ms=now_ms,
        job=True,
    )


def _state(view: OpView) -> dict[str, Any]:
    value = (json.loads(view.reply).get("ok") if view.reply else None) or {}
    ended = {key: value.get(key) for key in ("exit_code", "signal", "timed_out", "cancelled", "duration_s")}
    return {"job_id": view.op_id, "command": view.describe, "running": view.state == "claimed", **ended}


_KINDS: dict[str, Callable[[MockJobs, Connection, str, Mapping[str, Any]], Any]] = {
    "kill_job": MockJobs._kill,
    "write_stdin": MockJobs._nothing,
    "resize_job": MockJobs._nothing,
    "poll_job": MockJobs._poll,
    "list_jobs": MockJobs._list,
    "list_processes": MockJobs._processes,
}
