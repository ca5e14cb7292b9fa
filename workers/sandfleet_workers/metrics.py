"""A node's metrics, for Prometheus. Imported only while they are on: it needs the extra ``metrics``."""

from __future__ import annotations

from collections import Counter as Tallied
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sandfleet import blobs
from sandfleet.metrics import SECONDS, MetricsServer
from sandfleet.ops import OPS
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import Spent

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["NodeMeter", "serve_metrics"]

_KINDS = frozenset(OPS) | {"node.create", "node.destroy", "node.checkpoints"}


class NodeMeter:
    """Counters and histograms of one node. Thread-safe; one operation costs a few microseconds and no I/O.

    Args:
        now_ms: The store's time, without asking it.
    """

    def __init__(self, registry: CollectorRegistry, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

        def histogram(name: str, told: str, *labels: str) -> Histogram:
            return Histogram(f"sandfleet_{name}", told, labels, registry=registry, buckets=SECONDS)

        self._ops = Counter(
            "sandfleet_ops", "Operations answered, by kind and outcome (ok or an error code).", ("kind", "outcome"),
            registry=registry,
        )  # fmt: skip
        self._queue = histogram("op_queue_wait_seconds", "From the client's publish until the node had the message.")
        self._lane = histogram("op_lane_wait_seconds", "From then until the operation's lanes and a thread were free.")
        self._run = histogram("op_run_seconds", "From its start until its answer.", "kind")
        self._creates = Counter(
            "sandfleet_creates", "Sandboxes this node was told to create, by outcome.", ("outcome",), registry=registry
        )
        self._create = histogram("create_seconds", "How long the creation of a sandbox took on this node.")
        self._acquire = histogram(
            "acquire_seconds", "From a client's asking for a sandbox that did not live until it lived here."
        )
        self._reply = Counter("sandfleet_reply_bytes", "Bytes of replies, blobs not counted.", registry=registry)
        self._by_outcome: dict[tuple[str, str], Counter] = {}
        self._by_kind: dict[str, Histogram] = {}

    def answered(self, message: OpMessage, outcome: str, spent: Spent, reply_bytes: int) -> None:
        """One operation was answered; ``outcome`` is ``ok`` or an error code."""
        kind = message.kind if message.kind in _KINDS else "other"
        self._count(kind, outcome)
        self._queue.observe(spent[0] / 1000)
        self._lane.observe(spent[1] / 1000)
        run = self._by_kind.get(kind)
        if run is None:
            run = self._by_kind[kind] = self._run.labels(kind)
        run.observe(spent[2] / 1000)
        self._reply.inc(reply_bytes)
        if kind == "node.create":
            self._created(message, outcome, spent)

    def refused(self, outcome: str) -> None:
        """A message that was none of ours was refused."""
        self._count("other", outcome)

    def _count(self, kind: str, outcome: str) -> None:
        counter = self._by_outcome.get((kind, outcome))
        if counter is None:
            counter = self._by_outcome[kind, outcome] = self._ops.labels(kind, outcome)
        counter.inc()

    def _created(self, message: OpMessage, outcome: str, spent: Spent) -> None:
        self._creates.labels(outcome).inc()
        if outcome != "ok":
            return
        self._create.observe(spent[2] / 1000)
        asked_at_ms = message.args.get("asked_at_ms")
        if isinstance(asked_at_ms, int) and asked_at_ms > 0:
            self._acquire.observe(max(0, self._now_ms() - asked_at_ms) / 1000)


class _NodeGauges:
    """What is read from the node at the moment it is asked."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Metric]:
        """Nothing in advance: the families are told with their values."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        node = self._node
        held, waiting = node.pool.counts()
        ops = GaugeMetricFamily("sandfleet_ops_held", "Operations on this node.", labels=["state"])
        ops.add_metric(["running"], held - waiting + node.runs.count())
        ops.add_metric(["waiting"], waiting)
        yield ops
        yield GaugeMetricFamily("sandfleet_lanes", "Lanes with an operation in them.", value=node.pool.lane_count())
        yield GaugeMetricFamily(
            "sandfleet_held_bytes", "Bytes of the messages of these operations.", value=node.pool.held_bytes()
        )
        boxes = GaugeMetricFamily("sandfleet_sandboxes", "Sandboxes this node runs, by backend.", labels=["backend"])
        running = Tallied(box.spec.backend for box in list(node.held.values()))
        for backend in sorted({*node.settings.offered, *running}):
            boxes.add_metric([backend], running[backend])
        yield boxes
        yield from _blanks(node)
        saved = CounterMetricFamily(
            "sandfleet_checkpoints", "Checkpoints of threads' data, by what became of them.", labels=["outcome"]
        )
        for outcome in ("made", "unchanged", "failed", "restored"):
            saved.add_metric([outcome], node.lifecycle.checkpoints.tally[outcome])
        yield saved
        yield GaugeMetricFamily("sandfleet_replicas", "Sandboxes this node may run.", value=node.settings.replicas)
        yield GaugeMetricFamily(
            "sandfleet_lease_age_seconds", "Since the lease was last renewed.", value=node.lease.age_s()
        )
        moved = CounterMetricFamily(
            "sandfleet_blob_bytes", "Bytes above the inline limit, moved through Redis.", labels=["direction"]
        )
        for direction in ("in", "out"):
            moved.add_metric([direction], blobs.MOVED.of("bytes").get(direction, 0))
        yield moved
        yield GaugeMetricFamily("sandfleet_lease_seconds", "How long a lease holds.", value=node.settings.lease_s)


def _blanks(node: Node) -> Iterator[Metric]:
    ready, starting = node.lifecycle.blanks.counts()
    pool = GaugeMetricFamily("sandfleet_blank_pool", "Sandboxes started ahead, for new threads.", labels=["state"])
    pool.add_metric(["ready"], ready)
    pool.add_metric(["starting"], starting)
    yield pool
    served = CounterMetricFamily(
        "sandfleet_blank_creations", "Creations while the pool is on, by whether one was ready.", labels=["found"]
    )
    served.add_metric(["yes"], node.lifecycle.blanks.used)
    served.add_metric(["no"], node.lifecycle.blanks.missed)
    yield served


def serve_metrics(node: Node, registry: CollectorRegistry) -> MetricsServer:
    """Measure a node from now on, and serve it at ``settings.metrics_address``.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    server = MetricsServer(node.settings.metrics_address, registry, lambda: _unwell(node))
    node.watch.meter = NodeMeter(registry, node.lease.now_ms)
    registry.register(_NodeGauges(node))
    node.watch.address = server.address
    server.start()
    return server


def _unwell(node: Node) -> str:
    if node.fenced:
        return "another incarnation has this node's id"
    if node.draining:
        return "draining"
    return "" if node.lease.holds() else "the lease is not held: Redis is away, or the main loop hangs"
