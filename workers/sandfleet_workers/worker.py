"""A node as a Celery worker: the app, and the bootsteps that give it a lease, its backends and an orderly end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import sys
import time
import warnings
from typing import Any

from celery import Celery, bootsteps
from celery.platforms import SecurityWarning  # type: ignore[attr-defined]  # missing in the stubs
from celery.signals import worker_shutting_down
from celery.worker.control import control_command, inspect_command

import sandfleet
from sandfleet.celery_app import celery_app, queue_of
from sandfleet.config import Settings
from sandfleet.errors import NodeIdInUse, SandfleetError, StoreUnavailable
from sandfleet.intake import CONSUMER, FollowRedis, guard_intake
from sandfleet.logs import add_context
from sandfleet.metrics import MetricsServer, new_registry
from sandfleet.model import NodeState
from sandfleet.store import open_store
from sandfleet.store.base import NodeRecord
from sandfleet.task_events import EventFlush
from sandfleet.wire import node_queue
from sandfleet_workers import tasks
from sandfleet_workers.lease import Lease
from sandfleet_workers.node import Node
from sandfleet_workers.node_identity import HeldNodeId, data_id, hold_node_id
from sandfleet_workers.retention import answer_gc
from sandfleet_workers.watching import load_of

__all__ = ["node_app", "run_node"]

log = logging.getLogger("sandfleet.node")

_DRAIN_LOOK_S = 0.05


def node_app(settings: Settings, held: HeldNodeId) -> Celery:
    """The Celery app of one node, consuming exactly its own queue with `LanePool`."""
    app = celery_app(settings, name="sandfleet-node")
    queue = queue_of(node_queue(held.node_id))
    app.conf.update(
        task_queues=[queue],
        worker_pool="sandfleet_workers.pool:LanePool",
        worker_consumer=CONSUMER,
        worker_concurrency=settings.concurrency,
        worker_enable_remote_control=True,
        worker_max_tasks_per_child=None,
    )
    tasks.register(app)
    app.sandfleet_settings, app.sandfleet_held = settings, held  # type: ignore[attr-defined]
    app.steps["worker"].add(NodeStep)
    app.steps["consumer"].add(LoopTick)
    app.steps["consumer"].add(EventFlush)
    app.steps["consumer"].add(FollowRedis)
    return app


class NodeStep(bootsteps.StartStopStep):
    """Makes the `Node` once the pool runs, and leaves the fleet when the worker stops."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.node: Node | None = None
        self.metrics: MetricsServer | None = None

    def start(self, parent: Any) -> None:
        try:
            self._join(parent)
        except SandfleetError as exc:
            # Celery would print a traceback; `run_node` says it in one line.
            parent.app.sandfleet_failure = exc
            raise SystemExit(2) from exc

    def _join(self, parent: Any) -> None:
        settings: Settings = parent.app.sandfleet_settings
        held: HeldNodeId = parent.app.sandfleet_held
        store = open_store(
            settings.redis_url,
            settings.prefix,
            allow_insecure=settings.allow_insecure_redis,
            client_bytes=settings.client_bytes,
            fleet_bytes=settings.fleet_bytes,
        )
        FollowRedis.look_at(parent.app, store)
        node = Node(settings, store, parent.pool, held.node_id)
        add_context(node_id=held.node_id, incarnation=node.incarnation)
        node.lifecycle.data_id = data_id(settings.data_root)
        node.lifecycle.load()
        node.lease = Lease(
            store,
            _record(settings, node),
            lease_s=settings.lease_s,
            on_tick=node.tick,
            on_lost=node.lost,
            on_forgotten=node.lifecycle.upkeep.forgotten,
            load=functools.partial(load_of, node),
        )
        # Before it takes anything: a node whose metrics cannot be served is told so at once.
        self.metrics = _serve_metrics(node) if settings.metrics_address else None
        _take_lease(node)
        node.lease.reconnecting = True  # the consumer is about to connect for the first time
        # Images are pulled and leftovers removed meanwhile, which may take longer than a lease.
        node.lease.start(with_upkeep=False)
        try:
            _take_over(node)
        except BaseException:
            _give_lease_back(node)
            raise
        parent.pool.attach(
            node,
            max_lane=settings.max_lane,
            max_jobs=settings.max_queue,
            max_bytes=settings.max_queue_bytes,
            lifecycle_threads=settings.start_concurrency,
        )
        parent.app.sandfleet_node = self.node = node
        node.lease.upkeep = True
        node.lifecycle.homes.tell_soon()
        log.info("node.started", extra={"node_id": held.node_id, "incarnation": node.incarnation})

    def stop(self, parent: Any) -> None:
        if self.node is not None:
            self.node.stop()
            log.info("node.stopped", extra={"node_id": self.node.node_id})
        if self.metrics is not None:
            self.metrics.stop()
        parent.app.sandfleet_held.release()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


def _serve_metrics(node: Node) -> MetricsServer:
    registry = new_registry()
    from sandfleet_workers.metrics import serve_metrics  # noqa: PLC0415  (an extra)

    return serve_metrics(node, registry)


def _record(settings: Settings, node: Node) -> NodeRecord:
    return NodeRecord(
        node_id=node.node_id,
        incarnation=node.incarnation,
        replicas=settings.replicas,
        data_id=node.lifecycle.data_id,
        backends=settings.offered,
        labels=settings.labels,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=sandfleet.__version__,
        burst_limit=settings.burst_limit,
    )


def _take_lease(node: Node) -> None:
    """Announce. A predecessor on this data root has ended, for we have the lock of its id: its lease is taken over. One
    on another may have been killed a moment ago, so that is waited for once."""
    until = time.monotonic() + node.settings.lease_s + 1.0
    # A registry that does not know a node with sandboxes has lost its data: nobody else is to get their threads now.
    again = bool(node.lifecycle.dirs.entries())
    while True:
        try:
            node.lease.announce(again=again, take_over=True)
            return
        except NodeIdInUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _take_over(node: Node) -> None:
    """What only the lease's holder may do: remove what an earlier run left, here and in the store."""
    node.lifecycle.upkeep.watch_disk()  # at once, not with the first renewal: schedulers may place here already
    node.lifecycle.open()
    while node.store.close_incarnation(node.node_id, node.incarnation, reason="its node came back").more:
        pass


def _give_lease_back(node: Node) -> None:
    node.lease.stop()
    try:
        node.store.set_node_state(node.node_id, NodeState.GONE, incarnation=node.incarnation)
    except SandfleetError as exc:
        log.warning("node.leave_failed", extra={"node_id": node.node_id, "error": str(exc)})


class LoopTick(bootsteps.StartStopStep):
    """Tells the lease that Celery's main loop turns, or that it stands still because the broker is away.

    Restarts with every connection.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.timer: Any = None

    def start(self, parent: Any) -> None:
        lease = parent.app.sandfleet_node.lease
        lease.loop_ticked()
        lease.reconnecting = False
        self.timer = parent.timer.call_repeatedly(0.5, lease.loop_ticked)

    def stop(self, parent: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        # A consumer that stops is on its way to the next connection, unless the worker itself ends.
        running: int = bootsteps.RUN  # type: ignore[attr-defined]  # missing in the stubs
        parent.app.sandfleet_node.lease.reconnecting = parent.blueprint.state == running

    shutdown = stop


@control_command(args=[("timeout_s", float)])
def drain(state: Any, timeout_s: float | None = None) -> dict[str, Any]:
    """Remote control: answer what waits, take nothing new, let what runs finish for ``timeout_s``; then end."""
    node = state.app.sandfleet_node
    if node.draining:
        return {"ok": f"node {node.node_id} drains already"}
    node.pool.run_slow(lambda: _drain_and_stop(node, timeout_s))
    return {"ok": f"node {node.node_id} drains"}


def _drain_and_stop(node: Node, timeout_s: float | None = None) -> None:
    node.leaves_for_good = True
    try:
        node.store.set_node_state(node.node_id, NodeState.DRAINING, incarnation=node.incarnation)
        node.drain()
    except StoreUnavailable as exc:
        log.warning("node.drain_failed", extra={"node_id": node.node_id, "error": str(exc)})
    if timeout_s is not None:
        # Saving data has that long, too.
        node.settings = node.settings.model_copy(update={"drain_timeout_s": timeout_s})
    until = time.monotonic() + node.settings.drain_timeout_s
    # Background jobs are none of the pool's.
    while (running := node.pool.counts()[0] + node.runs.count()) and time.monotonic() < until:
        time.sleep(_DRAIN_LOOK_S)
    if running:
        log.warning("node.drain_cut_short", extra={"node_id": node.node_id, "running": running})
    os.kill(os.getpid(), signal.SIGTERM)


@control_command()
def gc(state: Any, reply_to: str = "", request: str = "", **asked: Any) -> dict[str, Any]:
    """Remote control: find what nobody will use again on this node's data root; the answer comes by the stream."""
    node = state.app.sandfleet_node
    answer_gc(node, asked, reply_to=reply_to, request=request)
    return {"ok": f"node {node.node_id} looks"}


@inspect_command()
def sandboxes(state: Any) -> list[dict[str, Any]]:
    """Remote control: the sandboxes this node holds."""
    node = state.app.sandfleet_node
    return [
        {
            "sandbox_id": sid,
            "thread_id": h.identity.thread_id,
            "epoch": h.route.epoch,
            "backend": h.spec.backend,
        }
        for sid, h in list(node.held.items())
    ]


def _note_signal(asked: list[str], sig: str = "", **_: Any) -> None:
    asked.append(sig)


def run_node(settings: Settings, *, loglevel: str = "INFO") -> int:
    """Run a node in this process until it is told to stop; the exit code.

    Raises:
        NodeIdInUse, ConfigError, StoreUnavailable: Before it took anything.
    """
    guard_intake()
    held = hold_node_id(settings.data_root, settings.node_id)
    # Only a root worker can give each local sandbox a uid of its own: here root is the safer choice.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = node_app(settings, held)
    worker = app.Worker(
        hostname=f"{held.node_id}@{socket.gethostname()}",
        queues=[node_queue(held.node_id)],
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=not settings.task_events,
        task_events=settings.task_events,
        quiet=True,
    )
    asked: list[str] = []
    worker_shutting_down.connect(asked_to_end := functools.partial(_note_signal, asked), weak=False)
    try:
        worker.start()
    finally:
        worker_shutting_down.disconnect(asked_to_end)
    failure: SandfleetError | None = getattr(app, "sandfleet_failure", None)
    if failure is not None:
        raise failure
    node = getattr(app, "sandfleet_node", None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # nobody but the worker that has ended would hear of it
    if node is not None and node.fenced and len(asked) < 2:
        # It was paused past its lease, closed out and told itself to end. Nothing of the old incarnation is left: start
        # anew, unless somebody else told it to end, too.
        log.warning("node.restarts", extra={"node_id": held.node_id})
        arguments = ["-m", "sandfleet_workers", "--node-id", held.node_id, "--loglevel", loglevel]
        os.execv(sys.executable, [sys.executable, *arguments])
    return int(worker.exitcode or 0)
