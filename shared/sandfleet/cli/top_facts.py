"""What ``sandfleet top`` knows: one cheap reading of the store, and what two readings say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandfleet.fleet_facts import ops_per_s, place_counts, shown_state, staying
from sandfleet.model import NodeView
from sandfleet.store import Store
from sandfleet.store.base import OpView
from sandfleet.wire import node_queue, queue_names

__all__ = ["SORTS", "Fleet", "Rates", "read_fleet", "snapshot"]

Node = dict[str, Any]

#: What nodes may be sorted by.
SORTS: Mapping[str, Callable[[Node], Any]] = {
    "node": lambda node: node["node_id"],
    "places": lambda node: (-node["used"] / max(1, node["replicas"]), node["node_id"]),
    "ops": lambda node: (-node["running"] - node["waiting"], node["node_id"]),
    "rate": lambda node: (-(node["ops_per_s"] or 0.0), node["node_id"]),
    "load": lambda node: (-(node["load_1m"] or 0.0) / node["cpus"], node["node_id"]),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """One reading of the store."""

    at_ms: int
    nodes: Sequence[NodeView]
    ops: Sequence[OpView]
    queues: Mapping[str, int]
    line_length: int


def read_fleet(store: Store, limit: int) -> Fleet:
    """One reading: a handful of calls, and one more per node.

    Args:
        limit: Operations wanted; the oldest are read.

    Raises:
        StoreUnavailable: Redis does not answer.
    """
    nodes = store.nodes()
    queues = {name: store.queue_length(name) for name in queue_names(node.node_id for node in staying(nodes))}
    return Fleet(store.now_ms(), nodes, store.ops(limit=limit), queues, store.line_length())


class Rates:
    """Operations per second of each node, from the loads it tells. Pure.

    A node tells its load about once a second; whoever looks more often keeps what was told last.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._rates: dict[tuple[str, str], float | None] = {}

    def learn(self, nodes: Sequence[NodeView]) -> dict[str, float | None]:
        """node id → rate now; None while a node's rate cannot be told."""
        found: dict[str, float | None] = {}
        for node in nodes:
            key = (node.node_id, node.incarnation)
            before = self._loads.get(key)
            if before is None or before.get("at_ms") != node.load.get("at_ms"):
                self._rates[key] = None if before is None else ops_per_s(before, node.load)
                self._loads[key] = node.load
            found[node.node_id] = self._rates[key] if node.alive else None
        return found


def snapshot(now: Fleet, rates: Mapping[str, float | None], *, sort: str = "node") -> dict[str, Any]:
    """What is shown, as a document. Pure.

    Operations come longest first: those that run, then those that wait. One without effect (a read) is told as waiting
    while it runs: it is not claimed.
    """
    nodes = [_node(node, now.queues, rates.get(node.node_id)) for node in staying(now.nodes)]
    known = [node["ops_per_s"] for node in nodes if node["ops_per_s"] is not None]
    alive = [node for node in nodes if node["state"] != "dead"]
    return {
        "at_ms": now.at_ms,
        "line_length": now.line_length,
        "queues": dict(now.queues),
        "totals": {
            "nodes": len(nodes),
            "alive": len(alive),
            "used": sum(node["used"] for node in alive),
            "replicas": sum(node["replicas"] for node in alive),
            "ops_per_s": round(sum(known), 2) if known else None,
        },
        "nodes": sorted(nodes, key=SORTS[sort]),
        "ops": sorted((_op(op, now.at_ms) for op in now.ops), key=lambda op: (op["state"] != "running", -op["age_s"])),
    }


def _node(node: NodeView, queues: Mapping[str, int], rate: float | None) -> Node:
    load = node.load if node.alive else {}
    return {
        "node_id": node.node_id,
        "state": shown_state(node),
        "reason": node.reason,
        "backends": list(node.backends),
        "used": node.places,
        "replicas": node.replicas,
        **place_counts(node),
        "inflight": node.inflight,
        "running": _number(load.get("running")) or 0,
        "waiting": _number(load.get("waiting")) or 0,
        "queue": queues.get(node_queue(node.node_id), 0),
        "ops_per_s": None if rate is None else round(rate, 2),
        "load_1m": _number(load.get("load_1m")),
        "cpus": max(1, int(_number(load.get("cpus")) or 1)),
        "metrics": str(load["metrics"]) if load.get("metrics") else None,
    }


def _number(value: object) -> float | int | None:
    """What a node said, if it is a number; anybody with the node's credentials may have said anything."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _op(op: OpView, now_ms: int) -> dict[str, Any]:
    running = op.claimed_at_ms is not None
    since_ms = op.claimed_at_ms if op.claimed_at_ms is not None else op.recorded_at_ms
    return {
        "op_id": op.op_id,
        "kind": op.kind,
        "sandbox_id": op.sandbox_id,
        "node_id": op.node_id,
        "state": "running" if running else "waiting",
        "age_s": max(0.0, round((now_ms - since_ms) / 1000, 3)),
        "describe": op.describe,
    }
