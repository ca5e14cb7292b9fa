"""The scheduler as a Celery worker: ``scheduler.acquire``, and the gateway for plain callers on ``sandfleet.ops``."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, bootsteps
from celery.platforms import SecurityWarning  # type: ignore[attr-defined]  # missing in the stubs

from sandfleet.celery_app import celery_app, queue_of
from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import OperationFailed, SandfleetError
from sandfleet.intake import CONSUMER, FollowRedis, guard_intake
from sandfleet.logs import add_context
from sandfleet.metrics import new_registry
from sandfleet.ops import OPS, task_name
from sandfleet.task_events import EventFlush
from sandfleet.wire import OPS_QUEUE, SCHEDULER_QUEUE, WAITING_QUEUE
from sandfleet_scheduler.gateway import Gateway
from sandfleet_scheduler.patience import Patience
from sandfleet_scheduler.results import PlainResults
from sandfleet_scheduler.service import Scheduler
from sandfleet_scheduler.serving import LineServer

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
        task_queues=[queue_of(name) for name in (SCHEDULER_QUEUE, OPS_QUEUE, WAITING_QUEUE)],
        worker_pool="threads",
        worker_consumer=CONSUMER,
        worker_concurrency=max(2, settings.concurrency),
        # Only as many messages as threads leave Redis before their turn: that is all a killed scheduler loses.
        worker_prefetch_multiplier=1,
    )
    client = Client(settings)
    client.now_ms()  # a Redis that does not answer is told in one line, before Celery begins to retry
    scheduler = Scheduler(client)
    line = LineServer(scheduler)
    gateway = Gateway(settings, scheduler)
    app.register_task(_own_task("scheduler.acquire", scheduler.acquire))
    app.register_task(_own_task("scheduler.serve", lambda _message: line.serve()))
    for kind in OPS:
        app.register_task(_gateway_task(gateway, kind))
    app.steps["consumer"].add(EventFlush)
    app.steps["consumer"].add(FollowRedis)
    FollowRedis.look_at(app, client.store)
    if settings.metrics_address:
        app.steps["worker"].add(_metrics_step(settings, scheduler))
    app.steps["worker"].add(_reconciler_step(settings, scheduler, line, PlainResults(app, client.store)))
    return app


def _own_task(name: str, carry_out: Callable[[Mapping[str, Any]], str]) -> _Task:
    """A task whose message is one JSON object and whose result is a few words for Flower."""

    def run(self: _Task, message: Any) -> str:
        try:
            return carry_out(message if isinstance(message, dict) else {})
        except SandfleetError as exc:
            raise OperationFailed(json.dumps(exc.to_wire())) from exc

    attributes = {
        "name": name,
        "run": run,
        "Request": "sandfleet.task_request:FleetRequest",
        "ignore_result": True,
        "throws": (OperationFailed,),
        "__module__": __name__,
        "typing": False,
    }
    own_task: _Task = type(name.replace(".", "_"), (_Task,), attributes)()
    return own_task


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
        "Request": "sandfleet.task_request:PlainRequest",
        "max_retries": None,  # going round is bounded by the call's own queue timeout
    }
    gateway_task: _Task = type(f"gateway_{kind}", (_Task,), attributes)()
    return gateway_task


def _reconciler_step(
    settings: Settings, scheduler: Scheduler, line: LineServer, results: PlainResults
) -> type[bootsteps.StartStopStep]:
    class Reconciler(bootsteps.StartStopStep):
        """Looks for dead nodes and for a line that nobody serves, from a thread of its own."""

        requires = ("celery.worker.components:Pool",)

        def start(self, worker: Any) -> None:
            self.stopped = threading.Event()
            self.thread = threading.Thread(target=self.loop, name="sandfleet-reconciler", daemon=True)
            self.thread.start()
            results.start()

        def loop(self) -> None:
            patience = Patience(settings.lease_s, time.monotonic)
            while not self.stopped.wait(min(1.0, settings.lease_s / 4)):
                try:
                    scheduler.reconcile(patience)
                    # Whoever had the message to serve it may have died with it.
                    line.serve_if_due(refuse=patience.over)
                except SandfleetError as exc:
                    patience.begin("Redis was away")
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


def _metrics_step(settings: Settings, scheduler: Scheduler) -> type[bootsteps.StartStopStep]:
    registry = new_registry()
    from sandfleet_scheduler.metrics import scheduler_metrics  # noqa: PLC0415  (an extra)

    # It listens from here on, so that an address that cannot be had is told before Celery begins.
    server = scheduler_metrics(settings.metrics_address, registry, scheduler.store, scheduler.tally)

    class Metrics(bootsteps.StartStopStep):
        """Answers Prometheus for as long as the worker runs."""

        requires = ("celery.worker.components:Pool",)

        def start(self, worker: Any) -> None:
            server.start()

        def stop(self, worker: Any) -> None:
            server.stop()

        def terminate(self, worker: Any) -> None:
            server.stop()

    return Metrics


def run_scheduler(settings: Settings, *, loglevel: str = "INFO") -> int:
    """Run a scheduler in this process until it is told to stop; the exit code."""
    guard_intake()
    name = f"scheduler-{os.getpid()}@{socket.gethostname()}"
    add_context(scheduler=name)
    # It runs nothing of anybody's; and on a machine of one's own, root is who one is.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = scheduler_app(settings)
    worker = app.Worker(
        hostname=name,
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=not settings.task_events,
        task_events=settings.task_events,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
