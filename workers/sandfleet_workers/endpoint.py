"""The worker's way into a sandbox that runs sandboxd: HTTP over a pool of kept-alive sockets.

Starting an operation takes an idle socket, sends the request and returns; the waiter's thread
reads the answer and completes the operation. A socket is used only after the other end has proved
to be this sandbox (see `sandfleet_workers.endpoint_socket`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sandfleet.backends import Completion, Connection, Done, Liveness, Operation, Remembered
from sandfleet.errors import (
    Busy,
    InternalError,
    NotStarted,
    OutcomeUnknown,
    SandboxLost,
    SandfleetError,
)
from sandfleet_workers.batch import Batches
from sandfleet_workers.endpoint_channel import Channel
from sandfleet_workers.endpoint_http import BadReply, Reply, Request
from sandfleet_workers.endpoint_ops import Dialect, SandboxdDialect, Steps
from sandfleet_workers.endpoint_socket import Endpoint, Unreachable
from sandfleet_workers.waiter import Waiter, shared_waiter

__all__ = ["EndpointConnection"]

log = logging.getLogger("sandfleet.node")

_MAX_CHANNELS = 256
_MAX_IDLE = 32
_HEAVY_BYTES = 256 * 1024
_CANCEL_WAIT_S = 1.0
_CANCEL_RETRY_S = 0.02
_REMEMBERED_WAIT_S = 20.0
_RECALL_TRIES = 5
_RECALL_RETRY_S = 1.0
#: A sandbox that nobody is connected to for much longer may take itself for an orphan and end.
_TOUCH_S = 600.0

_heavy_lock = threading.Lock()
_heavy_pool: ThreadPoolExecutor | None = None


def _heavy(work: Callable[[], None]) -> None:
    """Do what would keep the waiter from other sandboxes (large answers, asking for liveness) elsewhere."""
    global _heavy_pool
    with _heavy_lock:
        if _heavy_pool is None:
            _heavy_pool = ThreadPoolExecutor(2, thread_name_prefix="sandfleet-heavy")
    _heavy_pool.submit(work)


class Call:
    """One operation on its way: its steps, and what is known about the request that is out."""

    __slots__ = ("done", "op", "request", "retried", "sent", "steps")

    def __init__(self, op: Operation, steps: Steps, done: Done) -> None:
        self.op = op
        self.steps = steps
        self.done = done
        self.request: Request | None = None
        self.sent = False
        self.retried = False

    @property
    def in_doubt(self) -> bool:
        """Whether an effect may have begun whose outcome has not come back."""
        return self.sent and self.request is not None and self.request.effect


class EndpointConnection(Connection):
    """Carries out operations in one sandbox over its endpoint.

    Args:
        endpoint: Where sandboxd listens; closed with the connection.
        sandbox_id: For errors.
        liveness: Asked when nobody listens any more; may block for a moment.
        waiter: The node's waiter.
        guard_tick_s: How often overdue answers are looked for while operations run, in seconds.
        hello_s: How long the other end may take to prove who it is, in seconds.
        dialect: What operations say to the other end, of this connection alone; None: sandboxd's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        sandbox_id: str,
        liveness: Callable[[], Liveness],
        waiter: Waiter | None = None,
        guard_tick_s: float = 2.0,
        hello_s: float = 5.0,
        dialect: Dialect | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._sandbox_id = sandbox_id
        self._liveness = liveness
        self._waiter = waiter or shared_waiter()
        self._guard_tick_s = guard_tick_s
        self._hello_s = hello_s
        self._dialect = dialect or SandboxdDialect()
        self._idle: list[Channel] = []
        self._channels: set[Channel] = set()
        self._commands: set[str] = set()
        self._batches = Batches(self)
        self._lock = threading.Lock()
        self._guarding = False
        self._closed = False
        self._touching = self._waiter.call_later(_TOUCH_S, self._touch)

    # --- the contract --------------------------------------------------------------------------

    def start(self, op: Operation, done: Done) -> None:
        if op.kind == "batch":
            self._batches.start(op, done)
            return
        try:
            call = Call(op, self._dialect.steps(op), done)
        except SandfleetError as exc:
            done(Completion(error=exc))
            return
        if op.kind == "execute_command":
            self._commands.add(op.op_id)
        self._advance(call, None)

    def cancel(self, op_id: str) -> bool:
        if (told := self._batches.cancel(op_id)) is not None:
            return told
        deadline = time.monotonic() + _CANCEL_WAIT_S
        # The command's request and this one travel on two sockets and may arrive in either order.
        while op_id in self._commands and time.monotonic() < deadline:
            found = self._kill(op_id, deadline)
            if found in ("killed", "over"):
                return found == "killed"
            time.sleep(_CANCEL_RETRY_S)
        return False

    def remembered(self) -> list[Remembered]:
        told = self._ask("remembered", self._dialect.remembered(), _REMEMBERED_WAIT_S)
        if told is None:
            raise NotStarted("the sandbox does not say what it remembers", reason="no_answer")
        if told.error is not None:
            raise told.error
        found: list[Remembered] = told.value
        return found

    def recall(self, op: Operation, done: Done) -> None:
        self._recall(op, done, _RECALL_TRIES)

    def _recall(self, op: Operation, done: Done, tries: int) -> None:
        try:
            asked = self._dialect.recall(op)
        except SandfleetError as exc:
            done(Completion(error=exc))
            return
        said: list[Completion] = []

        def steps() -> Steps:
            said.append((yield from asked))
            return said[0]

        def ended(completion: Completion) -> None:
            error = completion.error
            if said or error is None:
                done(completion)
            elif (
                self._closed or tries <= 1 or isinstance(error, SandboxLost) or error.facts.get("reason") == "bad_reply"
            ):
                # Whatever is wrong with the way there says nothing about the operation.
                text = f"nobody can say how {op.kind} ended: {error}"
                done(Completion(error=OutcomeUnknown(text, op_id=op.op_id, sandbox_id=self._sandbox_id)))
            else:
                self._waiter.call_later(_RECALL_RETRY_S, lambda: self._recall(op, done, tries - 1))

        if op.kind == "execute_command":
            self._commands.add(op.op_id)
        self._advance(Call(op, steps(), ended), None)

    def rename(self, sandbox_id: str) -> None:
        """Errors name the sandbox so from now on: a thread has claimed it."""
        self._sandbox_id = sandbox_id

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        self._touching.cancel()
        for channel in channels:
            self._broken(channel, "the connection was closed")
        self._endpoint.close()

    def _kill(self, op_id: str, deadline: float) -> object:
        told = self._ask("kill", self._dialect.kill(op_id), deadline - time.monotonic())
        return told.value if told is not None else None

    def _ask(self, what: str, steps: Steps, wait_s: float) -> Completion | None:
        """Carry out what is no operation of anybody and wait for it; None if that took too long."""
        answered, box = threading.Event(), list[Completion]()

        def keep(completion: Completion) -> None:
            box.append(completion)
            answered.set()

        self._advance(Call(Operation("", what, {}), steps, keep), None)
        return box[0] if answered.wait(max(0.0, wait_s)) else None

    # --- one step after the other --------------------------------------------------------------

    def _advance(self, call: Call, reply: Reply | None) -> None:
        """Give the operation its reply, and send what it asks next."""
        call.sent = False
        try:
            request = next(call.steps) if reply is None else call.steps.send(reply)
        except StopIteration as stop:
            self._finish(call, stop.value)
        except SandfleetError as exc:
            self._finish(call, Completion(error=exc))
        except Exception as exc:  # noqa: BLE001  (whatever a hostile answer makes the parsing do, the operation ends)
            self._finish(call, Completion(error=self._nonsense(call, exc, replied=reply is not None)))
        else:
            call.retried = False
            self._send(call, request)

    def _nonsense(self, call: Call, exc: Exception, *, replied: bool) -> SandfleetError:
        text = f"sandboxd's answer to {call.op.kind} makes no sense: {type(exc).__name__}: {str(exc)[:200]}"
        if replied and call.request is not None and call.request.effect:
            return OutcomeUnknown(text, reason="bad_reply", op_id=call.op.op_id)
        return InternalError(text, reason="bad_reply")

    def _finish(self, call: Call, completion: Completion) -> None:
        if call.op.kind == "execute_command":
            self._commands.discard(call.op.op_id)
        call.steps.close()
        call.done(completion)

    def _send(self, call: Call, request: Request, *, fresh: bool = False) -> None:
        call.request = request
        channel: Channel | None = None
        try:
            while True:
                channel = None if fresh else self._take()
                if channel is None:
                    channel = self._open()
                if channel.launch(call, request):
                    self._guard()
                    return
                self._drop(channel)
        except Unreachable as exc:
            self._lost_before(call, str(exc), gone=exc.gone)
        except SandfleetError as exc:
            self._finish(call, Completion(error=self._unsent(call, exc)))
        except Exception as exc:  # whatever it is, somebody waits for the end of the operation
            log.exception("endpoint.send_failed", extra={"sandbox_id": self._sandbox_id, "op_id": call.op.op_id})
            if channel is None or self._drop(channel) is call:
                error = NotStarted(f"the request could not be sent: {type(exc).__name__}: {exc}", reason="internal")
                self._finish(call, Completion(error=self._unsent(call, error)))

    def _unsent(self, call: Call, error: SandfleetError) -> SandfleetError:
        """What an operation ends with whose next request could not go out."""
        if call.in_doubt:
            return OutcomeUnknown(
                f"the connection broke while {call.op.kind} ran: {error}",
                op_id=call.op.op_id,
                sandbox_id=self._sandbox_id,
            )
        error.facts.setdefault("sandbox_id", self._sandbox_id)
        return error

    def _lost_before(self, call: Call, why: str, *, gone: bool) -> None:
        """Nobody answers and nothing is out but perhaps an earlier request of this call."""

        def ask() -> None:
            error: SandfleetError = NotStarted(f"the sandbox could not be reached: {why}", reason="unreachable")
            try:
                if gone and not call.in_doubt and self._liveness() is Liveness.DEAD:
                    error = SandboxLost("the sandbox is dead", reason="dead")
            except Exception:  # a liveness that cannot be told is unknown
                log.exception("endpoint.liveness_failed", extra={"sandbox_id": self._sandbox_id})
            self._finish(call, Completion(error=self._unsent(call, error)))

        _heavy(ask)

    # --- channels ------------------------------------------------------------------------------

    def _take(self) -> Channel | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open(self) -> Channel:
        if len(self._channels) >= _MAX_CHANNELS:
            raise Busy(f"{_MAX_CHANNELS} operations run in this sandbox already", retry_after_s=0.5)
        channel = Channel(self, self._endpoint, self._waiter, self._hello_s)
        with self._lock:
            if not self._closed:
                self._channels.add(channel)
                return channel
        channel.kill()
        raise NotStarted("the connection is closed", reason="closed")

    def _drop(self, channel: Channel) -> Call | None:
        with self._lock:
            self._channels.discard(channel)
        try:
            self._idle.remove(channel)
        except ValueError:
            pass
        return channel.kill()

    def on_reply(self, channel: Channel, call: Call, reply: Reply, *, reusable: bool) -> None:
        """A channel's answer is complete (on the waiter's thread)."""
        if reusable and not self._closed and len(self._idle) < _MAX_IDLE:
            self._idle.append(channel)
        else:
            self._drop(channel)
        if len(reply.body) > _HEAVY_BYTES:
            _heavy(lambda: self._advance(call, reply))
        else:
            self._advance(call, reply)

    def on_broken(self, channel: Channel, why: str, error: SandfleetError | None = None) -> None:
        """A channel ended, or the other end is not who it should be (``error``)."""
        self._broken(channel, why, error)

    def on_nonsense(self, channel: Channel, exc: BadReply) -> None:
        """What came is not HTTP as agreed."""
        call = self._drop(channel)
        if call is not None:
            self._finish(call, Completion(error=self._nonsense(call, exc, replied=call.sent)))

    def _broken(self, channel: Channel, why: str, error: SandfleetError | None = None) -> None:
        call = self._drop(channel)
        if call is None:
            return
        if error is not None:
            self._finish(call, Completion(error=self._unsent(call, error)))
        elif self._closed:
            self._finish(call, Completion(error=self._unsent(call, NotStarted(why, reason="closed"))))
        elif not call.sent or call.request is None or call.request.find is None or call.retried:
            self._lost_before(call, why, gone=True)
        else:
            call.retried = True
            find = call.request.find
            _heavy(lambda: self._send(call, find, fresh=True))

    # --- the guard -----------------------------------------------------------------------------

    def _guard(self) -> None:
        """Look at overdue answers from time to time, as long as any is out."""
        if not self._guarding:
            self._guarding = True
            self._waiter.call_later(self._guard_tick_s, self._look)

    def _look(self) -> None:
        self._guarding = False
        now = time.monotonic()
        with self._lock:
            busy = [channel for channel in self._channels if channel.call is not None]
        for channel in busy:
            if channel.call is not None and channel.overdue_at <= now:
                self._overdue(channel)
        if busy and not self._closed:
            self._guard()

    def _touch(self) -> None:
        """Be connected: an idle channel stays open, so one request is enough."""
        if self._closed:
            return
        self._touching = self._waiter.call_later(_TOUCH_S, self._touch)
        if not self._channels:
            _heavy(lambda: self.start(Operation("", "health", {}), lambda _completion: None))

    def _overdue(self, channel: Channel) -> None:
        call = self._drop(channel)
        if call is not None:
            late = NotStarted("sandboxd does not answer; nothing is known to have begun", reason="no_answer")
            self._finish(call, Completion(error=self._unsent(call, late)))
