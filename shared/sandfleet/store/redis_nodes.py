"""Nodes, leases and the closing of what a dead incarnation left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandfleet.errors import LeaseLost, NodeIdInUse
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import Closed, NodeRecord, Renewal, Store
from sandfleet.store.codec import ms_of, node_view
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_ANNOUNCE, _RENEW, _NODES = load("announce"), load("renew"), load("nodes")
_SET_STATE, _CLOSE, _DRAIN = load("set_node_state"), load("close_incarnation"), load("drain_inflight")


class NodesMixin(Store):
    """The part of `RedisStore` about nodes."""

    _link: Link

    def now_ms(self) -> int:
        seconds, micros = self._link.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def announce(self, node: NodeRecord, *, lease_s: float, again: bool = False, take_over: bool = False) -> int:
        ended = node.data_id if take_over else ""
        now, status, *rest = self._link.run(
            _ANNOUNCE, node.node_id, node.incarnation, ms_of(lease_s), int(again), ended, *_node_fields(node)
        )
        if status == "in_use":
            raise NodeIdInUse(
                f"node {node.node_id} is held by another live process (incarnation {rest[0]}); "
                "wait for its lease to lapse or choose another --node-id",
                node_id=node.node_id,
            )
        if status == "retired":
            raise _lease_lost(node.node_id, node.incarnation)
        return int(now)

    def renew(
        self, node_id: str, incarnation: str, *, lease_s: float, load: Mapping[str, Any] | None = None
    ) -> Renewal:
        text = "" if load is None else json.dumps(load, separators=(",", ":"))
        now, status, *rest = self._link.run(_RENEW, node_id, incarnation, ms_of(lease_s), text)
        if status == "lost":
            raise _lease_lost(node_id, incarnation)
        if status == "unknown":
            return Renewal(int(now), NodeState.GONE, known=False)
        return Renewal(int(now), NodeState(rest[0]), known=True)

    def set_node_state(
        self,
        node_id: str,
        state: NodeState,
        *,
        incarnation: str | None = None,
        reason: str = "",
        lease_s: float | None = None,
    ) -> bool:
        lasts_ms = 0 if lease_s is None else ms_of(lease_s)
        return bool(self._link.run(_SET_STATE, node_id, str(state), incarnation or "", reason, lasts_ms))

    def nodes(self) -> list[NodeView]:
        return sorted((node_view(row) for row in self._link.run(_NODES)), key=lambda n: n.node_id)

    def close_incarnation(self, node_id: str, incarnation: str | None, *, reason: str, limit: int = 200) -> Closed:
        return _closed(self._link.run(_CLOSE, node_id, incarnation or "", reason, max(1, limit)))

    def drain_inflight(self, node_id: str, incarnation: str, *, limit: int = 200) -> Closed:
        return _closed(self._link.run(_DRAIN, node_id, incarnation, max(1, limit)))


def _node_fields(node: NodeRecord) -> list[str]:
    fields = {
        "replicas": str(node.replicas),
        "data_id": node.data_id,
        "backends": json.dumps(list(node.backends)),
        "labels": json.dumps(dict(node.labels)),
        "host": node.host,
        "pid": str(node.pid),
        "version": node.version,
        "burst_limit": str(node.burst_limit),
    }
    return [part for pair in fields.items() for part in pair]


def _lease_lost(node_id: str, incarnation: str) -> LeaseLost:
    return LeaseLost(
        f"incarnation {incarnation} of node {node_id} was closed or followed by another; it must stop",
        node_id=node_id,
        incarnation=incarnation,
    )


def _closed(answer: list[Any]) -> Closed:
    not_started, unknown, more, sandboxes = answer
    return Closed(not_started, unknown, tuple(sandboxes), bool(more))
