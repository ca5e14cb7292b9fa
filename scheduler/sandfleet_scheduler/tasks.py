"""The scheduler as a Celery worker: ``scheduler.acquire``, and the gateway for plain callers on ``sandfleet.ops``."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, bootsteps
from celery.platforms import SecurityWarning  # type: ignore[attr-defined]  # missing in the stubs

from sandfleet.celery_app import celery_app, queue_of
from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import OperationFailed, SandfleetError
from sandfleet.intake import guard_intake
from sandfleet.ops import OPS, task_name
from sandfleet.wire import OPS_QUEUE, SCHEDULER_QUEUE
from sandfleet_scheduler.gateway import Gateway
from sandfleet_scheduler.results import PlainResults
from sandfleet_scheduler.service import Scheduler

__all__ = ["run_scheduler", "scheduler_app"]

if TYPE_CHECKING:
    _Task = Task[Any, Any]  # generic in the stubs only
else:
    _Task = Task

log = logging.getLogger("sandfleet.scheduler")


def scheduler_app(settings: Settings) -> Celery:
    """The Celery app of a scheduler.

    It fetches one message per thread ahead and no more. What a killed scheduler had fetched is lost: an SDK client
    asks again after two seconds by itself, a plain caller's ``get()`` ends with its own timeout.
    """
    app = celery_app(settings, name="sandfleet-scheduler")
    app.conf.update(
        task_queues=[queue_of(SCHEDULER_QUEUE), queue_of(OPS_QUEUE)],
        worker_pool="threads",
        worker_concurrency=max(2, settings.concurrency),
        # Only as many messages as threads leave Redis before their turn: that is all a killed scheduler loses.
        worker_prefetch_multiplier=1,
    )
    client = Client(settings)
    client.now_ms()  # a Redis that does not answer is told in one line, before Celery begins to retry
    scheduler = Scheduler(client)
    gateway = Gateway(settings, scheduler)

    class Acquire(_Task):
        name = "scheduler.acquire"
        ignore_result = True
        throws = (OperationFailed,)

        def run(self, request: Any) -> str:
            try:
                return scheduler.acquire(request if isinstance(request, dict) else {})
            except SandfleetError as exc:
                raise OperationFailed(json.dumps(exc.to_wire())) from exc

    app.register_task(Acquire())
    for kind in OPS:
        app.register_task(_gateway_task(gateway, kind))
    app.steps["worker"].add(_reconciler_step(settings, scheduler, PlainResults(app, client.store)))
    return app


def _gateway_task(gateway: Gateway, kind: str) -> _Task:
    def run(self: _Task, *args: Any, **kwargs: Any) -> Any:
        try:
            signature = gateway.forward(self, kind, args, kwargs)
        except SandfleetError as exc:
            raise OperationFailed(json.dumps(exc.to_wire())) from exc
        return self.replace(signature)

    attributes = {
        "name": task_name(kind),
        "run": run,
        "throws": (OperationFailed,),
        "__module__": __name__,
        "typing": False,
        "max_retries": None,  # going round is bounded by the call's own queue timeout
    }
    gateway_task: _Task = type(f"gateway_{kind}", (_Task,), attributes)()
    return gateway_task


def _reconciler_step(settings: Settings, scheduler: Scheduler, results: PlainResults) -> type[bootsteps.StartStopStep]:
    class Reconciler(bootsteps.StartStopStep):
        """Looks for dead nodes from a thread of its own, a few times per lease."""

        requires = ("celery.worker.components:Pool",)

        def start(self, worker: Any) -> None:
            self.stopped = threading.Event()
            self.thread = threading.Thread(target=self.loop, name="sandfleet-reconciler", daemon=True)
            self.thread.start()
            results.start()

        def loop(self) -> None:
            # While Redis is away no node can renew: after an outage (and at our own start, which may follow one)
            # every live node gets a full lease to show itself before silence means death.
            patient_until = time.monotonic() + settings.lease_s
            while not self.stopped.wait(min(1.0, settings.lease_s / 4)):
                try:
                    if time.monotonic() > patient_until:
                        scheduler.reconcile()
                    else:
                        scheduler.store.now_ms()
                except SandfleetError as exc:
                    patient_until = time.monotonic() + settings.lease_s
                    log.warning("reconcile.failed", extra={"error": str(exc)})
                except Exception:
                    # Dead nodes must be closed out for as long as this process lives.
                    log.exception("reconcile.error")

        def stop(self, worker: Any) -> None:
            self.stopped.set()
            self.thread.join(timeout=2.0)
            results.stop()
            scheduler.client.close()

        def terminate(self, worker: Any) -> None:
            self.stop(worker)

    return Reconciler


def run_scheduler(settings: Settings, *, loglevel: str = "INFO") -> int:
    """Run a scheduler in this process until it is told to stop; the exit code."""
    guard_intake()
    # It runs nothing of anybody's; and on a machine of one's own, root is who one is.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = scheduler_app(settings)
    worker = app.Worker(
        hostname=f"scheduler-{os.getpid()}@{socket.gethostname()}",
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=not settings.task_events,
        task_events=settings.task_events,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
