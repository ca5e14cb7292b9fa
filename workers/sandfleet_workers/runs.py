"""Commands that no job of the pool stands for: background jobs, and commands that an earlier run of the node began."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Capability, Completion, Operation
from sandfleet.config import INLINE_BYTES
from sandfleet.errors import (
    OutcomeUnknown,
    SandboxLost,
    SandboxNotFound,
    SandboxStopping,
    SandfleetError,
    StoreUnavailable,
)
from sandfleet.ids import resend_id
from sandfleet.ops import MAX_OUTPUT_BYTES, MAX_TIMEOUT_S, parse_args
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import encode_reply
from sandfleet_workers.following import Follower, Timeline
from sandfleet_workers.holdings import Held

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["JOB_KEPT_S", "Runs"]

log = logging.getLogger("sandfleet.node")

#: How long the outcome of a job is kept for whoever asks.
JOB_KEPT_S = 24 * 3600.0
#: What is kept of a job's output with its outcome at most; the sandbox has the rest as long as it lives.
_KEPT_CHARS = 96 * 1024
_TRIES = 6
_KILL_S = 10.0
_MOST_ID = 80
_STREAM_KEPT_S = 3600.0
_CALL_STREAM_KEPT_S = 60.0
_GONE = (SandboxLost, SandboxNotFound, SandboxStopping)


@dataclass(slots=True)
class _Run:
    message: OpMessage
    held: Held
    job: bool
    over: Callable[[], None]
    follower: Follower | None = None
    tries: int = 0
    #: What `Store.job_again` is told of a job: its reply, what it is called, and when it has to be over (store time).
    told: tuple[str, str, int] | None = None
    #: Its output could not be read to its end.
    unread: bool = False


class Runs:
    """Follows commands to their end and answers for them. Thread-safe.

    Whatever waits for Redis or for a sandbox here waits on one thread of its own.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runs: dict[str, _Run] = {}
        self.line = Timeline("sandfleet-output")

    def track(
        self,
        message: OpMessage,
        held: Held,
        *,
        job: bool,
        resume: bool = True,
        begin: bool = True,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer for a command that runs in a sandbox this node holds, when it ends.

        Its record must be claimed by this incarnation on ``held.route``. ``message`` is that of the command or of its
        note: ``args`` need only hold what shapes the answer, and what of it makes no sense is not believed.

        Args:
            job: It is a background job, whose caller has been told that it runs.
            resume: Its output stream may have been begun by an earlier incarnation.
            begin: Begin at once.
            over: Called when it is answered.
        """
        if message.op_id in self._runs:
            return
        message = _sound(message)
        run = self._runs[message.op_id] = _Run(message, held, job, over)
        if stream_of(message) and held.can(Capability.JOBS):
            run.follower = self.follower(held, message, lambda error: self._followed(run, error))
        if begin:
            self._begin(run, resume=resume)

    def _begin(self, run: _Run, *, resume: bool) -> None:
        if run.follower is not None:
            run.follower.begin(resume=resume)
        else:
            self.line.soon(lambda: self._recall(run))

    def follower(self, held: Held, message: OpMessage, over: Callable[[SandfleetError | None], None]) -> Follower:
        """One that follows a command's output; not begun yet."""
        op_id, stream = message.op_id, stream_of(message)
        if stream == op_id and message.args.get("background"):
            ttl_s = MAX_TIMEOUT_S + _STREAM_KEPT_S
        else:
            # Should nobody end it: its caller waits no longer than this.
            ttl_s = max(0.0, (message.deadline_ms - self._node.lease.now_ms()) / 1000) + _CALL_STREAM_KEPT_S
        return Follower(
            self.line,
            self._node.store,
            held.connection,
            op_id,
            stream,
            keep_bytes=self._node.settings.output_bytes,
            ttl_s=ttl_s,
            is_gone=lambda: self._is_gone(held),
            over=over,
        )

    def begun(self, message: OpMessage, held: Held, reply: str, lasts_s: float, describe: str = "") -> None:
        """Tell the caller of a background job that it runs, and answer for it from then on."""
        self.track(message, held, job=True, begin=False)
        self.describe(message.op_id, reply, describe, self._node.lease.now_ms() + int(lasts_s * 1000))
        self.line.soon(lambda: self._tell_begun(message, held, reply, lasts_s))

    def describe(self, op_id: str, reply: str, describe: str, deadline_ms: int) -> None:
        """What is told of a job should Redis lose its record: the reply of its beginning, what it is called, and when
        it has to be over."""
        if (run := self._runs.get(op_id)) is not None:
            run.told = (reply, describe, deadline_ms)

    def tell_again(self) -> None:
        """Redis lost its data: tell it of the jobs that run, which keep their sandboxes from being reaped."""
        self.line.soon(self._tell_again)

    def _tell_again(self) -> None:
        for op_id, run in list(self._runs.items()):
            if run.told is None:
                continue
            reply, describe, deadline_ms = run.told
            lasts_s = (deadline_ms - self._node.lease.now_ms()) / 1000
            try:
                if lasts_s > 0:
                    self._node.store.job_again(
                        op_id, run.held.route, reply=reply, describe=describe, lasts_s=min(lasts_s, MAX_TIMEOUT_S)
                    )
            except StoreUnavailable:
                self.line.later(0.5, self._tell_again)
                return

    def cancel(self, sandbox_id: str, op_id: str) -> bool:
        """Kill a command that is followed here; False if there is none of that id in the sandbox. Blocks."""
        run = self._runs.get(op_id)
        if run is None or run.held.route.sandbox_id != sandbox_id:
            return False
        if run.held.connection.cancel(op_id):
            return True
        kill = Operation(f"{op_id}.kill", "kill_job", {"job_id": op_id, "signal": "SIGKILL"})
        try:
            completion = run.held.connection.perform(kill, timeout_s=_KILL_S)
        except TimeoutError:
            return False
        return completion.error is None and bool(completion.value["found"])

    def count(self) -> int:
        """How many commands are followed here."""
        return len(self._runs)

    def close(self) -> None:
        """Follow nothing more and answer for nothing: the commands run on, or their sandboxes are about to end."""
        for run in list(self._runs.values()):
            if run.follower is not None:
                run.follower.stop()
        self._runs.clear()
        self.line.close()

    # --- on the line -------------------------------------------------------------------------

    def _tell_begun(self, message: OpMessage, held: Held, reply: str, lasts_s: float) -> None:
        try:
            told = self._node.store.started(message.op_id, held.route, reply=reply, lasts_s=lasts_s)
        except StoreUnavailable:
            self.line.later(0.5, lambda: self._tell_begun(message, held, reply, lasts_s))
            return
        if not told:
            # Redis lost its record: its caller is told that nobody knows.
            log.info("job.not_recorded", extra={"op_id": message.op_id})
        # Not before: who is told the end of what it does not know to run takes it for the answer to its call.
        if (run := self._runs.get(message.op_id)) is not None:
            self._begin(run, resume=False)

    def _followed(self, run: _Run, error: SandfleetError | None) -> None:
        run.unread = error is not None
        self._recall(run)

    def _recall(self, run: _Run) -> None:
        message = run.message
        if self._runs.get(message.op_id) is not run:
            return
        if self._is_gone(run.held):
            self._answer(run, Completion(error=_gone(message)))
            return
        op = Operation(message.op_id, message.kind, message.args)
        run.held.connection.recall(op, lambda completion: self.line.soon(lambda: self._recalled(run, completion)))

    def _recalled(self, run: _Run, completion: Completion) -> None:
        if self._runs.get(run.message.op_id) is not run:
            return
        if (error := completion.error) is not None:
            if self._is_gone(run.held) or isinstance(error, _GONE):
                completion = Completion(error=_gone(run.message))
            elif run.tries < _TRIES and _may_pass(error):
                run.tries += 1
                self.line.later(min(0.1 * 2**run.tries, 2.0), lambda: self._recall(run))
                return
        elif run.unread:
            # The sandbox did not tell what it wrote, and tells now how it ended: once more.
            run.unread = False
            run.follower = self.follower(run.held, run.message, lambda _error: self._answer(run, completion))
            run.follower.begin(resume=True)
            run.follower.hurry()
            return
        self._answer(run, completion)

    def _is_gone(self, held: Held) -> bool:
        return held.stopping or self._node.held.get(held.route.sandbox_id) is not held

    def _answer(self, run: _Run, completion: Completion) -> None:
        message, error = run.message, completion.error
        self._node.lifecycle.checkpoints.touched(message)
        try:
            payload = self._encode(run, completion)
        except StoreUnavailable:
            self.line.later(0.5, lambda: self._answer(run, completion))
            return
        except SandfleetError as exc:
            why = f"{message.kind} ran, but its answer could not be sent: {exc}"
            error = OutcomeUnknown(why, reason=exc.code, op_id=message.op_id)
            payload = self._encode(run, Completion(error=error))
        outcome = "ok" if error is None else error.code
        try:
            self._node.store.finish(
                message.op_id,
                run.held.route,
                outcome=outcome,
                reply=payload,
                keep_s=JOB_KEPT_S if run.job else 60.0,
                stream=stream_of(message),
            )
        except StoreUnavailable:
            self.line.later(0.5, lambda: self._answer(run, completion))
            return
        # A fail-over may lose it.
        self._node.outbox.remember(message.op_id, run.held.route, outcome, payload)
        self._runs.pop(message.op_id, None)
        self._node.watch.answered(message, error, (0.0, 0.0, _run_ms(completion)), len(payload))
        run.over()

    def _encode(self, run: _Run, completion: Completion) -> str:
        message, value = run.message, completion.value
        if run.job:
            # Kept for whoever asks, long after a blob would be gone.
            message, value = replace(message, reply_to="", beside=False), cut(value)
        spent = (0.0, 0.0, _run_ms(completion))
        completion = Completion(value, completion.content, completion.error)
        return encode_reply(self._node.store, completion, message, spent_ms=spent)


def _may_pass(error: SandfleetError) -> bool:
    """Whether asking again may bring more than this."""
    passing = error.code == "not_started" and error.facts.get("reason") in ("unreachable", "no_answer")
    return passing or error.code == "busy"


def _sound(message: OpMessage) -> OpMessage:
    """The message, without arguments that no client could have sent: a sandbox may have made them up."""
    if message.kind != "execute_command":
        return message
    try:
        parse_args(message.kind, {"command": "", **message.args})
    except SandfleetError:
        return replace(message, args={"max_output_bytes": MAX_OUTPUT_BYTES})
    return message


def _gone(message: OpMessage) -> OutcomeUnknown:
    """It began, so it is not told like a sandbox that was gone before: callers repeat that."""
    sandbox_id = message.route.sandbox_id
    why = f"sandbox {sandbox_id} ended while {message.kind} ran"
    return OutcomeUnknown(why, reason="sandbox_lost", op_id=message.op_id, sandbox_id=sandbox_id)


def _run_ms(completion: Completion) -> float:
    value = completion.value
    seconds = value.get("duration_s") if isinstance(value, dict) else None
    return round(float(seconds) * 1000, 2) if isinstance(seconds, int | float) else 0.0


def stream_of(message: OpMessage) -> str:
    """The name of a command's output stream: its own id if it is a job, else the one that its caller asked for.

    That is the id under which the command was sent first. Nobody writes to another's stream.
    """
    if message.args.get("background"):
        return message.op_id
    stream = message.args.get("stream")
    if not isinstance(stream, str) or len(stream) > _MOST_ID:
        return ""
    again = resend_id(stream, 0)[:-1]
    sent_again = message.op_id.startswith(again) and message.op_id.removeprefix(again).isdigit()
    return stream if message.op_id == stream or sent_again else ""


def cut(value: Any) -> Any:
    """A command's value that fits into its record: of long streams the end, and ``cut`` set."""
    if not isinstance(value, dict):
        return value
    kept, limit = value, _KEPT_CHARS
    while len(json.dumps(kept)) > INLINE_BYTES:
        # A multiple of four from the end: of base64 too it is whole bytes.
        streams = {name: text[-limit:] for name in ("stdout", "stderr") if isinstance(text := value.get(name), str)}
        kept, limit = {**value, **streams, "truncated": True, "cut": True}, limit // 2
        if not limit:
            break
    return kept
