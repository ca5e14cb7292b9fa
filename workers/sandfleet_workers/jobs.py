"""What passes between `LanePool` and the node: a job, its plan, and the engine that carries it out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from celery.exceptions import Ignore

from sandfleet.errors import SandfleetError

__all__ = ["Engine", "Job", "Plan"]


class Plan:
    """What a job needs: its lanes, its weight in bytes, and whether it is slow lifecycle work."""

    __slots__ = ("exclusive", "lifecycle", "shared", "size")

    def __init__(
        self,
        exclusive: tuple[str, ...] = (),
        shared: tuple[str, ...] = (),
        size: int = 0,
        lifecycle: bool = False,
    ) -> None:
        self.exclusive = exclusive
        self.shared = shared
        self.size = size
        self.lifecycle = lifecycle


class Job:
    """One delivery of an operation, from the queue to Celery's tracer."""

    __slots__ = (
        "__weakref__",
        "_trace",
        "begun",
        "cancelled",
        "carry",
        "dropped",
        "expired",
        "failure",
        "finished_at",
        "op_id",
        "plan",
        "request",
        "result",
        "shown",
        "size",
        "started_at",
        "taken_at",
    )

    def __init__(self, request: Any, trace: Callable[[], Any]) -> None:
        self.request = request
        self.op_id: str = request.id
        self.plan = Plan()
        #: The node's own state for this job.
        self.carry: Any = None
        #: Bytes of the message, which the node holds in memory while the job waits.
        self.size = len(getattr(getattr(request, "message", None), "body", None) or "")
        self.taken_at = time.monotonic()
        self.started_at: float | None = None
        #: When its answer was out, which may be long before Celery's tracer runs.
        self.finished_at: float | None = None
        self.begun = False
        self.cancelled = False
        #: It waited past its start_by and must be answered so, whatever its lane does.
        self.expired = False
        #: Finish without an answer of ours: another delivery or a script has given it.
        self.dropped = False
        self.result: Any = None
        #: The result in the few words that events carry (Flower's result column).
        self.shown: str | None = None
        self.failure: BaseException | None = None
        self._trace = trace

    def outcome(self) -> Any:
        """What the task body returns or raises."""
        if self.dropped or self.request._already_revoked:
            raise Ignore
        if self.failure is not None:
            raise self.failure
        return self.result


class Engine(Protocol):
    """What the pool asks of the node."""

    def plan(self, job: Job) -> Plan:
        """Lanes and weight, decided without I/O on Celery's main loop. An error it raises answers the job."""

    def begin(self, job: Job) -> None:
        """Start the job on a pool thread; sooner or later `LanePool.complete` or `LanePool.drop` follows."""

    def refuse(self, job: Job, error: SandfleetError) -> None:
        """Answer a job that will not be begun, then `LanePool.complete` it."""

    def cancel(self, job: Job) -> None:
        """End a running job; called from any thread, returns soon."""

    def revoked(self, op_id: str) -> None:
        """Celery dropped a revoked task before the pool saw it."""
