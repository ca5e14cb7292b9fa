"""What is asked of a job, as generators (`sandfleet.steps`): `sandfleet.jobs` has the handles.

What a job is lies in its op record and its output stream, so any process finds it again by its id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandfleet import calls
from sandfleet.client import Answer, Call, Client, Target
from sandfleet.errors import (
    JobNotFound,
    OutcomeUnknown,
    ReplyTimeout,
    SandboxLost,
    SandboxNotFound,
    SandfleetError,
    StoreUnavailable,
    from_wire,
)
from sandfleet.ids import new_token
from sandfleet.job_values import JobState, JobStatus, OutputEnd, OutputRecord, Process
from sandfleet.model import CommandResult
from sandfleet.reading import Reading
from sandfleet.redaction import without_secrets
from sandfleet.steps import Do, Listen, Sleep, Steps
from sandfleet.store.base import OpView, Output

__all__ = ["JobSteps", "job_statuses", "processes"]

#: A silent stream is not believed for longer: the record, or the sandbox, says whether anything may still come.
_SILENCE_S = 2.0
#: So long a job that was there a moment ago is looked for again: Redis may have lost its data, and nodes bring
#: theirs back within a lease.
_PATIENCE_S = 15.0
#: So long a sandbox that Redis does not know is looked for again, before its job is said not to be there.
_SANDBOX_PATIENCE_S = 5.0
_PAUSE_S = 0.5

_LOST = frozenset(
    {OutcomeUnknown.code, SandboxLost.code, SandboxNotFound.code, JobNotFound.code, "sandbox_stopping", "lost"}
)


class JobSteps:
    """What both kinds of handle do, as generators.

    Args:
        client: Of the process (made anew after a fork, hence asked for each time by the handles).
        target: Its sandbox.
        job_id: Its id.
        seen: It is known to have been there.
    """

    def __init__(self, client: Client, target: Target, job_id: str, *, seen: bool) -> None:
        self._client = client
        self._target = target
        self._id = job_id
        self.seen = seen

    # --- how it stands -------------------------------------------------------------------------

    def status(self) -> Steps[JobStatus]:
        """From its record; if Redis lost that, from its sandbox."""
        began = time.monotonic()
        while True:
            view = yield from self._view()
            if view is not None:
                return _status_of(view)
            try:
                answer: Answer = yield from self._ask("poll_job", {"job_id": self._id})
                self.seen = True
                return _status_told(self._id, answer.value)
            except (SandboxNotFound, JobNotFound, SandboxLost) as exc:
                unseen_s = _SANDBOX_PATIENCE_S if isinstance(exc, SandboxNotFound) else 0.0
                patience_s = _PATIENCE_S if self.seen else unseen_s
                if time.monotonic() - began >= patience_s or isinstance(exc, SandboxLost):
                    if not self.seen:
                        raise JobNotFound(f"no job {self._id} in this sandbox", op_id=self._id) from exc
                    return JobStatus(self._id, JobState.LOST, code=exc.code, error=exc.message)
            yield Sleep(_PAUSE_S)

    def _view(self) -> Steps[OpView | None]:
        view: OpView | None = yield Do(lambda: self._client.store.op(self._id))
        if view is None:
            return None
        mine = self._target.identity
        stranger = mine is not None and view.owner and view.owner != mine.digest
        if stranger or view.sandbox_id != self._target.sandbox_id:
            # The same as if it did not exist: nobody learns whose it is. Nor is the sandbox asked, which may lie.
            raise JobNotFound(f"no job {self._id} in this sandbox", op_id=self._id)
        self.seen = True
        return view

    def wait(self, timeout_s: float | None) -> Steps[CommandResult]:
        """Until it is over; its result."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        reader = new_token()
        try:
            while True:
                view = yield from self._view()
                if view is not None and view.state in ("done", "closed"):
                    return _result_of(view)
                if view is None:
                    status = yield from self.status()
                    if status.state.over:
                        return _result_told(status)
                left_s = _SILENCE_S if until is None else until - time.monotonic()
                if left_s <= 0:
                    raise ReplyTimeout(
                        f"job {self._id} was not over within {timeout_s:g} s; it runs on", op_id=self._id
                    )
                yield Listen(lambda: self._read((0, 0), min(left_s, _SILENCE_S), reader, only_end=True))  # noqa: B023
        finally:
            self._client.store.drop_reader(reader)

    # --- its output ----------------------------------------------------------------------------

    def _read(self, at: tuple[int, int], block_s: float, reader: str, *, only_end: bool = False) -> list[Output]:
        return self._client.store.read_output(self._id, *at, block_s=block_s, reader=reader, only_end=only_end)

    def next_output(self, reading: Reading, reader: str, *, follow: bool) -> Steps[list[OutputRecord]]:
        """What comes next, waiting for it if ``follow``; nothing only when there is nothing (yet, or any more)."""
        outage_ends = None
        if not self.seen:
            # A stream has no owner of its own.
            yield from self.status()
        while not reading.ended:
            block_s = _SILENCE_S if follow else 0.0
            before = reading.read_from
            try:
                entries: list[Output] = yield Listen(lambda: self._read(reading.read_from, block_s, reader))  # noqa: B023
            except StoreUnavailable:
                now = time.monotonic()
                outage_ends = outage_ends or now + self._client.settings.queue_timeout_s
                if not follow or now >= outage_ends:
                    raise
                yield Sleep(_PAUSE_S)
                continue
            outage_ends = None
            if records := reading.take(entries):
                return records
            if entries or reading.read_from != before:
                continue
            if not follow:
                return []
            if ended := (yield from self._ended_silently(reading, reader)):
                return ended
        return []

    def _ended_silently(self, reading: Reading, reader: str) -> Steps[list[OutputRecord]]:
        """The end of a stream that does not tell it: its node died with it, or Redis lost it."""
        try:
            status = yield from self.status()
        except StoreUnavailable:
            return []
        if not status.state.over:
            return []
        entries: list[Output] = yield Listen(lambda: self._read(reading.read_from, 0.0, reader))
        if entries:
            return []
        reading.ended = True
        return [OutputEnd(status.code or "ok", reading.cursor)]

    # --- what is done to it ----------------------------------------------------------------------

    def kill(self, signal: str) -> Steps[bool]:
        """Send a signal; whether it was there to get it."""
        try:
            answer: Answer = yield from self._ask("kill_job", {"job_id": self._id, "signal": signal})
        except JobNotFound:
            return False
        return bool(answer.value["found"])

    def write(self, data: bytes, *, eof: bool) -> Steps[None]:
        """Write to its stdin, or close that."""
        args = {"job_id": self._id, **({"eof": True} if eof else {})}
        yield from self._client.call(self._target, Call("write_stdin", args, data or None, caller=self._id))

    def resize(self, rows: int, cols: int) -> Steps[None]:
        """Give its terminal another size."""
        yield from self._ask("resize_job", {"job_id": self._id, "rows": rows, "cols": cols})

    def _ask(self, kind: str, args: Mapping[str, Any]) -> Steps[Answer]:
        return (yield from self._client.call(self._target, Call(kind, args)))


# --- what records and sandboxes say --------------------------------------------------------------------


def _status_of(view: OpView) -> JobStatus:
    if view.state in ("recorded", "claimed"):
        state = JobState.RUNNING if view.job else JobState.STARTING
        return JobStatus(view.op_id, state, command=view.describe)
    if view.outcome != "ok":
        error = _error_of(view)
        state = _state_by(error.code)
        return JobStatus(view.op_id, state, command=view.describe, code=error.code, error=error.message)
    value = _value_of(view)
    if not isinstance(value, dict):
        return JobStatus(view.op_id, JobState.EXITED, command=view.describe)
    return _ended(view.op_id, value, view.describe)


def _ended(job_id: str, value: Mapping[str, Any], command: str) -> JobStatus:
    limited = bool(value.get("timed_out") or value.get("out_of_memory"))
    return JobStatus(
        job_id,
        JobState.FAILED if limited else JobState.EXITED,
        exit_code=value.get("exit_code"),
        signal=value.get("signal"),
        timed_out=bool(value.get("timed_out")),
        out_of_memory=bool(value.get("out_of_memory")),
        duration_s=value.get("duration_s"),
        command=command,
    )


def _status_told(job_id: str, value: Mapping[str, Any]) -> JobStatus:
    command = without_secrets(str(value.get("command") or ""))
    if value["running"]:
        return JobStatus(job_id, JobState.RUNNING, duration_s=value.get("duration_s"), command=command)
    return _ended(job_id, value, command)


def _state_by(code: str) -> JobState:
    return JobState.LOST if code in _LOST else JobState.FAILED


def _error_of(view: OpView) -> SandfleetError:
    try:
        return from_wire(json.loads(view.reply or "")["error"])
    except (ValueError, KeyError, TypeError):
        return OutcomeUnknown(f"{view.op_id} ended with {view.outcome}; its answer is not kept any more")


def _value_of(view: OpView) -> Any:
    return json.loads(view.reply).get("ok") if view.reply else None


def _result_of(view: OpView) -> CommandResult:
    if view.outcome != "ok":
        raise _error_of(view)
    value = _value_of(view)
    if not isinstance(value, dict) or "exit_code" not in value:
        raise OutcomeUnknown(f"{view.op_id} has ended; how is not kept any more", op_id=view.op_id)
    result = calls.command_result(Answer(view.op_id, value, None))
    # Big output of a command with a caller went to that caller.
    return replace(result, truncated=True) if "beside" in json.loads(view.reply or "{}") else result


def _result_told(status: JobStatus) -> CommandResult:
    """What a sandbox remembers of a job whose record is gone."""
    if status.state is JobState.LOST:
        raise OutcomeUnknown(f"nobody knows how job {status.job_id} ended: {status.error}", op_id=status.job_id)
    return CommandResult(
        stdout="",
        stderr="",
        exit_code=status.exit_code,
        duration_s=status.duration_s or 0.0,
        timed_out=status.timed_out,
        truncated=True,
        signal=status.signal,
        out_of_memory=status.out_of_memory,
        op_id=status.job_id,
    )


def job_statuses(answer: Answer) -> list[JobStatus]:
    """The answer of a list_jobs."""
    return [_status_told(job["job_id"], job) for job in answer.value["jobs"]]


def processes(answer: Answer) -> list[Process]:
    """The answer of a list_processes."""
    return [
        Process(
            pid=one["pid"],
            ppid=one["ppid"],
            user=one.get("user"),
            state=one["state"],
            command=one["command"],
            cpu_s=one["cpu_s"],
            memory_bytes=one["memory_bytes"],
            started_s=one["started_s"],
        )
        for one in answer.value["processes"]
    ]
