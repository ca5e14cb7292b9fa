"""A scheduler's metrics, for Prometheus: what the store says of the fleet, and what this scheduler decided.

Imported only while they are on: it needs the extra ``metrics``. Every scheduler tells the same of the fleet, so a query
takes ``max`` over them; what one decided adds up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sandfleet.errors import SandfleetError
from sandfleet.fleet_facts import place_counts, shown_state, staying
from sandfleet.metrics import MetricsServer, Tally
from sandfleet.model import NodeView
from sandfleet.store import Store
from sandfleet.wire import queue_names

__all__ = ["FleetCollector", "fleet_metrics", "scheduler_metrics"]

_FRESH_S = 1.0
_STATES = ("ready", "cordoned", "draining", "away", "gone", "dead")
_DECIDED = {
    "acquires": ("sandfleet_acquire_requests", "Requests for a sandbox handled by this scheduler.", "outcome"),
    "placements": ("sandfleet_placements", "Attempts of this scheduler to take a place on a node.", "outcome"),
    "evictions": ("sandfleet_evictions", "Warm sandboxes this scheduler ended to make room.", ""),
    "serve_passes": ("sandfleet_serve_passes", "Walks of this scheduler along the line of those who wait.", ""),
}


@dataclass(frozen=True, slots=True)
class _Reading:
    nodes: Sequence[NodeView]
    depths: Mapping[str, int]
    line: int


class FleetCollector:
    """Reads the store when Prometheus asks, at most once a second however many ask. Thread-safe.

    Raises (`collect`):
        StoreUnavailable: Redis does not answer; the scrape fails.
    """

    def __init__(self, store: Store, tally: Tally) -> None:
        self._store = store
        self._tally = tally
        self._lock = threading.Lock()
        self._kept: _Reading | SandfleetError | None = None
        self._read_at = 0.0

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering it must not ask the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        with self._lock:
            if self._kept is None or time.monotonic() - self._read_at > _FRESH_S:
                try:
                    self._kept = self._read()
                except SandfleetError as exc:
                    # Kept as well: those who waited behind this one must not each wait for Redis again.
                    self._kept = exc
                self._read_at = time.monotonic()
            found = self._kept
        if isinstance(found, SandfleetError):
            raise found
        yield from fleet_metrics(found.nodes, found.depths, found.line)
        for name, (metric, told, label) in _DECIDED.items():
            counts = self._tally.of(name)
            family = CounterMetricFamily(metric, told, labels=[label] if label else None)
            for value, count in sorted(counts.items()) or [("", 0)]:
                if label and not value:
                    continue
                family.add_metric([value] if label else [], count)
            yield family

    def _read(self) -> _Reading:
        nodes = self._store.nodes()
        ids = [node.node_id for node in staying(nodes)]
        depths = {queue: self._store.queue_length(queue) for queue in queue_names(ids)}
        return _Reading(nodes, depths, self._store.line_length())


def fleet_metrics(nodes: Sequence[NodeView], depths: Mapping[str, int], line: int) -> Iterator[Metric]:
    """What the store says of the fleet, as families. Pure."""
    queues = GaugeMetricFamily("sandfleet_queue_depth", "Messages that wait in a queue.", labels=["queue"])
    for queue, depth in depths.items():
        queues.add_metric([queue], depth)
    yield queues
    yield GaugeMetricFamily("sandfleet_line_length", "Threads that wait in line for a place.", value=line)
    states = Counter(shown_state(node) for node in nodes)
    by_state = GaugeMetricFamily("sandfleet_nodes", "Nodes, by state.", labels=["state"])
    for state in _STATES:
        by_state.add_metric([state], states[state])
    yield by_state
    places = GaugeMetricFamily(
        "sandfleet_places",
        "Places of a node by what is in them; burst counts those above its replicas once more.",
        labels=["node", "state"],
    )
    replicas = GaugeMetricFamily("sandfleet_node_replicas", "Sandboxes a node may hold.", labels=["node"])
    blanks = GaugeMetricFamily(
        "sandfleet_blank_sandboxes", "Blank sandboxes of a node that are ready for a thread.", labels=["node"]
    )
    inflight = GaugeMetricFamily("sandfleet_ops_inflight", "Operations recorded for a node.", labels=["node"])
    for node in staying(nodes):
        for state, count in place_counts(node).items():
            places.add_metric([node.node_id, state], count)
        replicas.add_metric([node.node_id], node.replicas)
        blanks.add_metric([node.node_id], sum(node.blanks.values()))
        inflight.add_metric([node.node_id], node.inflight)
    yield from (places, replicas, blanks, inflight)


def scheduler_metrics(address: str, registry: CollectorRegistry, store: Store, tally: Tally) -> MetricsServer:
    """The server of a scheduler's metrics, listening and not answering yet.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    registry.register(FleetCollector(store, tally))

    def unwell() -> str:
        try:
            store.now_ms()
        except SandfleetError as exc:
            return f"Redis does not answer ({exc.code})"
        return ""

    return MetricsServer(address, registry, unwell)
