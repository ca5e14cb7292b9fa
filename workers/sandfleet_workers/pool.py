"""`LanePool`: Celery's pool for a node. Keyed first-in-first-out lanes, dedupe, cancel, and two phases.

The stock threads pool cannot time out, cancel or keep an order, and an operation that waits would hold one of
its threads. Here a delivery becomes a `Job`. While it waits for its lanes, and while its command runs in the
sandbox, it holds no thread. Phase one (a pool thread): the node claims and starts it. Phase two (whoever
sees the end): the reply goes out, the lanes move on, and Celery's own tracer runs with the outcome and the true
runtime, so that results, `group`, `chord`, events and signals are Celery's.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from celery.concurrency.base import BasePool, apply_target
from celery.signals import task_revoked
from celery.worker.state import requests as celery_requests
from celery.worker.state import revoked as celery_revoked
from celery.worker.state import task_ready

from sandfleet.errors import Busy, InternalError, NotStarted, SandfleetError
from sandfleet_workers.jobs import Engine, Job
from sandfleet_workers.lanes import LaneFull, Lanes

__all__ = ["JobHandle", "LanePool", "outcome_of"]

log = logging.getLogger("sandfleet.node")

_FINISHED_KEPT = 5_000


class JobHandle:
    """What Celery keeps (weakly) as the apply result; `revoke(terminate=True)` ends up here."""

    __slots__ = ("__weakref__", "job", "pool")

    def __init__(self, pool: LanePool, job: Job) -> None:
        self.pool = pool
        self.job = job

    def terminate(self, _signal: Any = None) -> None:
        self.pool.cancel(self.job.op_id)


class LanePool(BasePool):
    """See the module. ``limit`` is the number of threads that *start* operations."""

    body_can_be_buffer = True
    signal_safe = False
    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._handles: dict[str, JobHandle] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._closed = False
        #: Results of plain callers that Redis did not take; the oldest give way.
        self._untold: deque[Job] = deque(maxlen=1000)
        self._lanes = Lanes(max_depth=10_000)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._slow: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.max_jobs = 20_000
        self.max_bytes = 512 * 1024 * 1024
        self.engine: Engine | None = None
        self.started = 0

    # --- Celery's side -----------------------------------------------------------------------

    def on_start(self) -> None:
        for number in range(self.limit or 8):
            self._spawn(f"sandfleet-op-{number}", self._work)

    def attach(self, engine: Engine, *, max_lane: int, max_jobs: int, max_bytes: int, lifecycle_threads: int) -> None:
        """Give the pool its node; before this, operations are refused."""
        self._lanes.max_depth = max_lane
        self.max_jobs, self.max_bytes = max_jobs, max_bytes
        for number in range(lifecycle_threads):
            self._spawn(f"sandfleet-lifecycle-{number}", self._slow)
        self.engine = engine
        task_revoked.connect(self._revoked)

    def _revoked(self, request: Any = None, **_: Any) -> None:
        """Celery dropped a revoked task at the door; a job of ours is told by its handle."""
        engine, op_id = self.engine, getattr(request, "id", "")
        if engine is not None and not self.holds(op_id):
            self._work.put(functools.partial(engine.revoked, op_id))

    def _spawn(self, name: str, work: SimpleQueue[Callable[[], None] | None]) -> None:
        thread = threading.Thread(target=_serve, args=(work,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def on_apply(  # type: ignore[override]  # the stubs know only *args
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> JobHandle | None:
        request = getattr(accept_callback, "__self__", None)
        if request is None or not getattr(request.task, "is_operation", False):
            self._work.put(lambda: apply_target(target, args, kwargs, callback, accept_callback))
            return None
        name, task_id, request_dict, *_rest = args
        # The payload is decoded already; the tracer need not do it again.
        payload = request._payload

        def trace() -> Any:
            return target(name, task_id, request_dict, payload, None, None)

        job = Job(request, trace)
        return self._take(job)

    def _take(self, job: Job) -> JobHandle | None:
        engine = self.engine
        with self._lock:
            known = self._jobs.get(job.op_id)
            if known is not None or job.op_id in self._finished:
                self._second_delivery(job, known)
                return None
            handle = self._handles[job.op_id] = JobHandle(self, job)
            self._jobs[job.op_id] = job
        try:
            if engine is None or self._closed:
                raise NotStarted("this node takes no operations now", reason="leaving", retry_after_s=0.2)
            job.plan = engine.plan(job)
            self._enter(job)
        except LaneFull as exc:
            self._refuse(job, Busy(f"{exc}; wait for earlier operations", retry_after_s=0.5))
        except SandfleetError as exc:
            self._refuse(job, exc)
        except Exception as exc:
            # This is Celery's main loop: whatever somebody's message did, the worker goes on.
            log.exception("op.plan_failed", extra={"op_id": job.op_id})
            self._refuse(job, InternalError(f"{type(exc).__name__}: {str(exc)[:200]}"))
        return handle

    def _second_delivery(self, job: Job, known: Job | None) -> None:
        log.warning("op.second_delivery", extra={"op_id": job.op_id})
        # Acknowledged, or kombu would restore it with every broken connection.
        job.request.acknowledge()
        task_ready(job.request)
        if known is not None:
            # Celery keeps one request per id, and the first delivery is the one that can still be revoked.
            celery_requests[job.op_id] = known.request

    def _enter(self, job: Job) -> None:
        with self._lock:
            if len(self._jobs) > self.max_jobs or self._bytes + job.plan.size > self.max_bytes:
                job.plan.size = 0
                raise Busy(
                    f"this node holds {len(self._jobs)} operations and {self._bytes} bytes, as many as it may",
                    retry_after_s=0.5,
                )
            self._bytes += job.plan.size
            may_run = self._lanes.enter(job.op_id, exclusive=job.plan.exclusive, shared=job.plan.shared)
        if may_run:
            self._put(job)

    def _put(self, job: Job) -> None:
        (self._slow if job.plan.lifecycle else self._work).put(lambda: self._begin(job))

    def _refuse(self, job: Job, error: SandfleetError) -> None:
        engine = self.engine
        if engine is None:
            job.failure = error
            self.complete(job)
        else:
            self._work.put(lambda: engine.refuse(job, error))

    # --- phase one ---------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        with self._lock:
            if job.op_id not in self._jobs or job.begun:
                return
            job.begun = True
            self.started += 1
        if job.op_id in celery_revoked and not job.cancelled:
            job.cancelled = True
        assert self.engine is not None
        self.engine.begin(job)

    def accepted(self, job: Job) -> None:
        """The effect is about to start: Celery's `task-started`."""
        job.started_at = time.monotonic()
        job.request.on_accepted(threading.get_native_id(), job.started_at)

    # --- phase two ---------------------------------------------------------------------------

    def complete(self, job: Job) -> None:
        """The answer is out: let the lanes move on, then run Celery's tracer on the outcome."""
        job.finished_at = time.monotonic()
        with self._lock:
            if self._jobs.pop(job.op_id, None) is None:
                return
            self._handles.pop(job.op_id, None)
            self._finished[job.op_id] = None
            if len(self._finished) > _FINISHED_KEPT:
                self._finished.popitem(last=False)
            self._bytes -= job.plan.size
        self._move_on(job.op_id)
        if job.request.ignore_result and not (job.request._payload[2] or {}).get("callbacks"):
            self._trace(job)
        else:
            # Storing a result or sending a callback blocks on Redis: not on the waiter's thread.
            self._work.put(lambda: self._trace(job))

    def drop(self, job: Job) -> None:
        """Somebody else has answered: end the job without an answer of ours."""
        job.dropped = True
        self.complete(job)

    def _trace(self, job: Job) -> None:
        request = job.request
        try:
            if job.started_at is None:
                request.on_accepted(threading.get_native_id(), time.monotonic())
            failed, value, runtime = self._run_tracer(job)
            if failed and job.failure is None and not job.dropped and not request.ignore_result:
                # The operation went well and its result could not be stored: a plain caller waits for it.
                log.warning("op.result_kept", extra={"op_id": job.op_id})
                self._untold.append(job)
                return
            if not failed:
                if job.started_at is not None and job.finished_at is not None:
                    runtime = job.finished_at - job.started_at
                # Celery's repr of a plain caller's result is a dump of all output.
                value = job.shown or value
            request.on_success((failed, value, runtime))
        except Exception:
            log.exception("op.trace_failed", extra={"op_id": job.op_id})
            task_ready(request)

    @staticmethod
    def _run_tracer(job: Job) -> Any:
        _OUTCOMES[job.op_id] = job
        try:
            return job._trace()
        finally:
            _OUTCOMES.pop(job.op_id, None)

    def tell_again(self) -> None:
        """Store the results that could not be stored; those that still cannot wait for the next call."""
        for _ in range(len(self._untold)):
            self._work.put(functools.partial(self._trace, self._untold.popleft()))

    # --- cancel, drain, stop -----------------------------------------------------------------

    def cancel(self, op_id: str) -> bool:
        """End a job: one that waits is answered at once, a running one by the node. False if it is not here."""
        with self._lock:
            job = self._jobs.get(op_id)
            if job is None:
                return False
            job.cancelled = True
            waits = not job.begun
        if self.engine is not None:
            if waits:
                self._work.put(lambda: self._begin(job))
            else:
                self._work.put(functools.partial(self.engine.cancel, job))
        return True

    def occupy(self, op_id: str, lanes: tuple[str, ...], shared: tuple[str, ...]) -> None:
        """Keep lanes for an operation that runs without a job, because an earlier run of the node began it.

        Repeating it is harmless. What it finds in its lanes goes on beside it.
        """
        with self._lock:
            if op_id not in self._lanes:
                self._lanes.enter(op_id, exclusive=lanes, shared=shared)

    def vacate(self, op_id: str) -> None:
        """That operation has ended: its lanes move on. An unknown one is fine."""
        self._move_on(op_id)

    def _move_on(self, op_id: str) -> None:
        with self._lock:
            ready = [self._jobs[other] for other in self._lanes.leave(op_id) if other in self._jobs]
        for job in ready:
            self._put(job)

    def run(self, work: Callable[[], None]) -> None:
        """Run something short on a pool thread."""
        self._work.put(work)

    def run_slow(self, work: Callable[[], None]) -> None:
        """Run something that starts or ends sandboxes on a lifecycle thread."""
        self._slow.put(work)

    def carry_of(self, op_id: str) -> Any:
        """The node's state of a job held here, or None."""
        job = self._jobs.get(op_id)
        return job.carry if job is not None else None

    def carries(self) -> list[Any]:
        """The node's state of every job that has begun and is not answered."""
        with self._lock:
            return [job.carry for job in self._jobs.values() if job.begun]

    def expire(self, is_late: Callable[[Job], bool]) -> None:
        """Answer the waiting jobs that ``is_late`` names, without waiting for their lanes."""
        with self._lock:
            late = [job for job in self._jobs.values() if not job.begun and not job.cancelled and is_late(job)]
            for job in late:
                job.expired = True
        for job in late:
            self._work.put(functools.partial(self._begin, job))

    def holds(self, op_id: str) -> bool:
        """Whether a delivery of this op is waiting or running here."""
        return op_id in self._jobs

    def counts(self) -> tuple[int, int]:
        """(jobs held, of these waiting for a lane)."""
        with self._lock:
            return len(self._jobs), sum(1 for job in self._jobs.values() if not job.begun)

    def lane_count(self) -> int:
        """Lanes with an operation in them."""
        return self._lanes.lane_count()

    def held_bytes(self) -> int:
        """Bytes of the messages of the jobs held."""
        return self._bytes

    def refuse_new(self) -> list[Job]:
        """Take nothing from now on; the jobs that have not begun are forgotten here and given back in lane order."""
        with self._lock:
            self._closed = True
            waiting = [job for job in self._jobs.values() if not job.begun]
            for job in waiting:
                job.begun = True  # so that a granted lane does not start it any more
        return waiting

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Celery calls this beside `JobHandle.terminate`, which does the work."""

    def on_stop(self) -> None:
        for thread in self._threads:
            (self._slow if "lifecycle" in thread.name else self._work).put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    on_terminate = on_stop

    def _get_info(self) -> dict[str, Any]:
        held, waiting = self.counts()
        info: dict[str, Any] = super()._get_info()  # type: ignore[misc]  # missing in the stubs
        info.update({"operations": held, "waiting": waiting, "bytes": self._bytes, "threads": len(self._threads)})
        return info


#: Jobs whose tracer runs right now; the task body takes its outcome from here.
_OUTCOMES: dict[str, Job] = {}


def outcome_of(op_id: str) -> Any:
    """For task bodies: what the job's operation returned; raises what it raised."""
    return _OUTCOMES[op_id].outcome()


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        item = work.get()
        if item is None:
            return
        try:
            item()
        except Exception:
            log.exception("pool.work_failed")
