"""The node: what one machine's worker holds and how it carries out operations on it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import signal
import time
from typing import Any

from sandfleet import blobs
from sandfleet.backends import Completion
from sandfleet.config import Settings
from sandfleet.errors import (
    Cancelled,
    InternalError,
    InvalidArgument,
    LeaseLost,
    NotStarted,
    OperationFailed,
    OutcomeUnknown,
    QueueTimeout,
    SandboxNotFound,
    SandboxStopping,
    SandfleetError,
    StoreUnavailable,
)
from sandfleet.ids import new_token
from sandfleet.ops import OPS, parse_args
from sandfleet.store.base import Claim, Route, Store
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import Outbox, celery_result, encode_reply, shown_result, spent_ms
from sandfleet_workers.holdings import Carry, Held
from sandfleet_workers.jobs import Job, Plan
from sandfleet_workers.leaving import leave
from sandfleet_workers.pool import LanePool
from sandfleet_workers.runs import Runs
from sandfleet_workers.starting import Starter, was_cancelled
from sandfleet_workers.watching import Watch

__all__ = ["Held", "Node"]

log = logging.getLogger("sandfleet.node")

LIFECYCLE = frozenset({"node.create", "node.destroy"})
#: What a node tells of the threads' saved data, whether they have a sandbox or not.
CHECKPOINTS = "node.checkpoints"


class Node:
    """Carries out operations for the sandboxes it holds; the pool's `Engine`.

    Everything here is called from pool threads except `plan` (Celery's main loop, no I/O) and completions
    (the waiter's thread).
    """

    def __init__(self, settings: Settings, store: Store, pool: LanePool, node_id: str) -> None:
        from sandfleet_workers.lifecycle import Lifecycle  # noqa: PLC0415  (it needs Held from here)

        self.settings = settings
        self.store = store
        self.pool = pool
        self.node_id = node_id
        self.incarnation = new_token()
        self.held: dict[str, Held] = {}
        self.lifecycle = Lifecycle(self)
        #: Set by the bootstep once the lease is taken.
        self.lease: Any = None
        self.draining = False
        #: Another incarnation owns the node id: nothing in the store is ours any more.
        self.fenced = False
        #: It was drained: it is not expected back, so nothing is left running for its next run.
        self.leaves_for_good = False
        #: Sandboxes that this run has let go of: how it goes on in them is for the next run to tell.
        self.left_running: frozenset[str] = frozenset()
        self.outbox = Outbox(store)
        self.runs = Runs(self)
        self.starter = Starter(self)
        self.watch = Watch()

    # --- Engine: deciding lanes --------------------------------------------------------------

    def plan(self, job: Job) -> Plan:
        """Lanes of the job from its message; malformed ones raise and are answered."""
        args = job.request.args
        if len(args) != 1 or job.request.kwargs:
            raise InvalidArgument(
                f"{job.request.name} on a node's queue takes one operation message; "
                "send plain calls to the queue sandfleet.ops"
            )
        message = OpMessage.from_wire(args[0])
        if message.op_id != job.op_id or message.kind not in (
            job.request.name,
            job.request.name.partition(".")[2],
        ):
            raise InvalidArgument("the message does not belong to this task id and name")
        job.carry = Carry(message, message.route)
        if message.kind in LIFECYCLE:
            return Plan(exclusive=(f"{message.route.sandbox_id}/life",), lifecycle=not self.lifecycle.is_quick(message))
        if message.kind in ("cancel", CHECKPOINTS):
            return Plan()
        if message.kind == "checkpoint":
            return Plan(exclusive=(message.route.sandbox_id,))
        return Plan(message.lanes, (message.route.sandbox_id,), job.size)

    # --- Engine: starting --------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Check, claim and start one operation; its completion answers it."""
        carry: Carry = job.carry
        message = carry.message
        try:
            if job.cancelled:
                raise was_cancelled(job)
            if job.expired:
                raise self._late(job)
            if message.kind in LIFECYCLE:
                if self._claim(job, carry):
                    self.pool.accepted(job)
                    self.watch.started(message)
                    self.lifecycle.run(job, carry.message)
                return
            if message.kind == CHECKPOINTS:
                self.pool.accepted(job)
                self.lifecycle.checkpoints.answer(message, functools.partial(self.finish, job))
                return
            held = self._held_for(message)
            args, content = self._payload(message)
            if message.kind in OPS and OPS[message.kind].effect:
                if not self._claim(job, carry):
                    return
            elif self.lease.now_ms() > message.start_by_ms:
                raise self._late(job)
            self.pool.accepted(job)
            self.watch.started(message)
            self.starter.start(job, held, message, args, content)
        except StoreUnavailable as exc:
            # Everything that needs Redis comes before the effect, so nothing has begun.
            error = NotStarted(
                f"Redis was away when operation {job.op_id} was due: {exc}", reason="store", retry_after_s=0.5
            )
            self.finish(job, Completion(error=error))
        except SandfleetError as exc:
            self.finish(job, Completion(error=exc))
        except Exception as exc:
            log.exception("op.begin_failed", extra={"op_id": job.op_id})
            text = f"{type(exc).__name__}: {exc}"
            self.finish(job, Completion(error=OutcomeUnknown(text) if carry.claimed else InternalError(text)))

    def _held_for(self, message: OpMessage) -> Held:
        held = self.held.get(message.route.sandbox_id)
        if held is None or held.route != message.route:
            raise NotStarted(
                f"node {self.node_id} does not hold sandbox {message.route.sandbox_id} of epoch {message.route.epoch}",
                reason="stale_route",
                sandbox_id=message.route.sandbox_id,
            )
        if held.identity != message.identity:
            # The same answer as for an id that does not exist: nobody learns whose it is.
            raise SandboxNotFound(
                f"no sandbox {message.route.sandbox_id} of yours", sandbox_id=message.route.sandbox_id
            )
        if held.stopping:
            raise SandboxStopping(
                f"sandbox {message.route.sandbox_id} is being destroyed", sandbox_id=message.route.sandbox_id
            )
        if not self.lease.holds():
            raise NotStarted(f"node {self.node_id} lost touch with Redis", reason="lease", retry_after_s=1.0)
        return held

    def _payload(self, message: OpMessage) -> tuple[dict[str, Any], bytes | None]:
        """Validated arguments and the content; both may have waited in Redis."""
        try:
            raw = blobs.unpack_json(self.store, message.args)
            content = blobs.unpack_bytes(self.store, message.content)
        except OutcomeUnknown as exc:
            raise NotStarted(f"the arguments expired before the operation was due: {exc}", reason="expired") from exc
        args: dict[str, Any] = parse_args(message.kind, raw).model_dump(exclude_unset=True)
        return args, content

    def _claim(self, job: Job, carry: Carry) -> bool:
        """Take the right to start; False if somebody answered already."""
        if not self.lease.holds():
            raise NotStarted(f"node {self.node_id} lost touch with Redis", reason="lease", retry_after_s=1.0)
        claim, asked = self._ask_to_claim(job.op_id, carry.message.route)
        match claim.status:
            case "claimed":
                carry.claimed = True
                return True
            case "already" if asked > 1:
                # The pool lets one delivery through, so the claim is our own, whose answer got lost.
                carry.claimed = True
                return True
            case "late":
                raise self._late(job)
            case "stale":
                raise NotStarted(
                    f"operation {job.op_id} belongs to an earlier owner of its sandbox", reason="stale_route"
                )
        # already, closed, gone: this delivery is a second one, or its answer went out (a tombstone).
        log.info("op.dropped", extra={"op_id": job.op_id, "why": claim.status})
        self.pool.drop(job)
        return False

    def _ask_to_claim(self, op_id: str, route: Route) -> tuple[Claim, int]:
        """The store's word and how often it was asked: a connection that broke must not cost the op its turn."""
        for asked in itertools.count(1):
            try:
                return self.store.claim(op_id, route), asked
            except StoreUnavailable:
                if not self.lease.holds():
                    raise
                time.sleep(0.1)
        raise AssertionError("unreachable")

    def _late(self, job: Job) -> QueueTimeout:
        waited = time.monotonic() - job.taken_at
        return QueueTimeout(
            f"operation {job.op_id} waited {waited:.1f} s for its lane, past its start_by; it did not run",
            op_id=job.op_id,
        )

    def cancel(self, job: Job) -> None:
        """End a running operation: its process group is killed, the completion tells what it was."""
        self.starter.cancel(job)

    # --- answering ---------------------------------------------------------------------------

    def refuse(self, job: Job, error: SandfleetError) -> None:
        """Answer a job that was not begun."""
        if job.carry is None:
            # Malformed or foreign: there may be no record to close, only Celery to tell.
            self.watch.refused(job.op_id, error)
            job.failure = OperationFailed(json.dumps(error.to_wire()))
            self._answer_record(job.op_id, error)
            self.pool.complete(job)
            return
        self.finish(job, Completion(error=error))

    def _answer_record(self, op_id: str, error: SandfleetError) -> None:
        """Answer a message that could not be read, if somebody recorded it for this node and so waits."""
        try:
            view = self.store.op(op_id)
            if view is not None and view.state == "recorded" and view.incarnation == self.incarnation:
                route = Route(view.sandbox_id, self.node_id, self.incarnation, 0)
                reply = json.dumps({"error": error.to_wire()})
                self.store.finish(op_id, route, outcome=error.code, reply=reply, only_recorded=True)
        except StoreUnavailable as exc:
            log.warning("op.refusal_not_sent", extra={"op_id": op_id, "error": str(exc)})

    def revoked(self, op_id: str) -> None:
        """Celery dropped a revoked task before the pool saw it: tell its caller, or the SDK would send it again."""
        self._answer_record(op_id, Cancelled(f"operation {op_id} was revoked", started=False, op_id=op_id))

    def finish(self, job: Job, completion: Completion) -> None:
        """Send the reply, then let the pool move on. Exactly once per job, whatever goes wrong on the way."""
        carry: Carry = job.carry
        if carry.finished:
            return
        carry.finished = True
        if isinstance(completion.error, OutcomeUnknown) and carry.message.route.sandbox_id in self.left_running:
            # We let go of it, and it goes on: the node's next run answers.
            self.pool.drop(job)
            return
        try:
            self._answer(job, carry, completion)
        except Exception as exc:
            # A lane that never moves on is worse than any answer.
            log.exception("op.answer_failed", extra={"op_id": job.op_id})
            self._answer(job, carry, Completion(error=self._untold(job, carry, exc)))
        finally:
            self.pool.complete(job)

    def _answer(self, job: Job, carry: Carry, completion: Completion) -> None:
        message, error, value = carry.message, completion.error, completion.value
        self.lifecycle.checkpoints.touched(message)  # before its caller hears of it, and may end the sandbox
        spent = spent_ms(job, message, self.lease.now_ms())
        if error is None and job.cancelled and isinstance(value, dict) and "cancelled" in value:
            value["cancelled"] = True
        try:
            if error is None:
                job.result = celery_result(completion, shown_only=job.request.ignore_result)
                job.shown = shown_result(completion)
            payload = encode_reply(self.store, completion, message, spent_ms=spent)
        except SandfleetError as exc:
            error = self._untold(job, carry, exc)
            failed = Completion(error=error)
            payload = encode_reply(self.store, failed, message, spent_ms=spent)
        if error is not None:
            job.failure = OperationFailed(json.dumps(error.to_wire()))
            if message.kind == "node.create":
                self.lifecycle.give_back(message.route, error)
        outcome = error.code if error is not None else "ok"
        # What is going to be sent again goes on in the same stream.
        stream = carry.stream if error is None or not error.retryable else ""
        self.outbox.send(job.op_id, message.route, outcome, payload, stream=stream)
        self.watch.answered(message, error, spent, len(payload))
        blobs.drop(self.store, message.content)

    @staticmethod
    def _untold(job: Job, carry: Carry, exc: Exception) -> SandfleetError:
        """The effect happened but its answer cannot be sent: say so. Not with the error itself, which may tell
        the caller to repeat."""
        if not carry.claimed:
            return exc if isinstance(exc, SandfleetError) else InternalError(f"{type(exc).__name__}: {str(exc)[:200]}")
        why = f"{carry.message.kind} ran, but its answer could not be sent: {type(exc).__name__}: {str(exc)[:200]}"
        return OutcomeUnknown(why, reason=getattr(exc, "code", "internal"), op_id=job.op_id)

    # --- upkeep, from the lease's thread -----------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Send replies that Redis did not take, answer lost messages, end idle sandboxes."""
        self.outbox.flush()
        self.pool.tell_again()
        self.pool.expire(lambda job: job.carry is not None and job.carry.message.start_by_ms < now_ms)
        self.lifecycle.tick(now_ms)

    def lost(self, exc: LeaseLost) -> None:
        """Another incarnation owns this node id: stop at once, clean nothing up that may be its."""
        self.fenced = True
        log.critical("node.fenced", extra={"node_id": self.node_id, "error": str(exc)})
        os.kill(os.getpid(), signal.SIGTERM)

    # --- leaving -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Take nothing more; answer everything that has not started with NotStarted, in the order it came."""
        if self.draining:
            return
        self.draining = True
        waiting = self.pool.refuse_new()
        while self.store.drain_inflight(self.node_id, self.incarnation).more:
            pass
        for job in waiting:
            # Its answer went out by the script above; Celery still holds the request.
            self.pool.drop(job)

    def stop(self) -> None:
        """Leave the fleet: see `sandfleet_workers.leaving`."""
        leave(self)
