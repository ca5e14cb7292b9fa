"""``gc`` on the nodes: one node of each data root is asked, and answers when it has looked, or removed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandfleet import control
from sandfleet.config import Settings
from sandfleet.errors import SandfleetError, Unavailable, from_wire
from sandfleet.ids import new_token
from sandfleet.model import NodeView
from sandfleet.store import Store

__all__ = ["NodeReport", "ask_nodes", "one_of_each_data_root"]

_STREAM_S = 120.0
_BLOCK_S = 0.5


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node found on its data root, or the error instead."""

    node_id: str
    document: Mapping[str, Any] = field(default_factory=dict)
    error: SandfleetError | None = None

    @property
    def found(self) -> list[dict[str, Any]]:
        """Its rows, each with the node's id."""
        return [{**row, "node": self.node_id} for row in self.document.get("found", ())]


def one_of_each_data_root(nodes: Iterable[NodeView]) -> list[NodeView]:
    """Nodes that share a data root see the same files, so the first of them is asked."""
    chosen: dict[str, NodeView] = {}
    for node in sorted(nodes, key=lambda node: node.node_id):
        if node.alive:
            chosen.setdefault(node.data_id, node)
    return sorted(chosen.values(), key=lambda node: node.node_id)


def ask_nodes(settings: Settings, store: Store, rules: Mapping[str, Any], *, timeout_s: float) -> Iterator[NodeReport]:
    """The report of one node of each data root, as they come; a node that dies or says nothing is told as an error.

    Args:
        rules: As `sandfleet_workers.retention_plan.Rules` takes them.
        timeout_s: How long to wait for all of them together.

    Raises:
        StoreUnavailable: Redis does not answer.
    """
    client = f"gc-{new_token()}"
    store.open_replies(client, ttl_s=_STREAM_S)
    waiting: dict[str, NodeView] = {}
    try:
        for number, node in enumerate(one_of_each_data_root(store.nodes())):
            request, name = new_token(), control.worker_name(node.node_id, node.host)
            if number:
                rules = {**rules, "checkpoints": False}  # all nodes have the same storage
            if control.tell_to_collect(settings, name, rules, reply_to=client, request=request):
                waiting[request] = node
            else:
                yield NodeReport(node.node_id, error=_silent(node, "does not answer, or is of a version without gc"))
        yield from _answers(store, client, waiting, time.monotonic() + timeout_s)
    finally:
        store.close_replies(client)


def _answers(store: Store, client: str, waiting: dict[str, NodeView], until: float) -> Iterator[NodeReport]:
    cursor = "0"
    while waiting:
        for reply in store.read_replies(client, cursor, block_s=_BLOCK_S):
            cursor = reply.cursor
            node = waiting.pop(reply.op_id, None)
            if node is not None:
                yield _report(node, reply.payload)
        store.open_replies(client, ttl_s=_STREAM_S)
        alive = {(view.node_id, view.incarnation) for view in store.nodes() if view.alive}
        late = time.monotonic() > until
        for request, node in list(waiting.items()):
            if late or (node.node_id, node.incarnation) not in alive:
                del waiting[request]
                yield NodeReport(node.node_id, error=_silent(node, "gave no report in time" if late else "died"))


def _report(node: NodeView, payload: str) -> NodeReport:
    told = json.loads(payload)
    if "error" in told:
        return NodeReport(node.node_id, error=from_wire(told["error"]))
    return NodeReport(node.node_id, told["ok"])


def _silent(node: NodeView, why: str) -> SandfleetError:
    return Unavailable(f"node {node.node_id} {why}; what is on its data root is not told", node_id=node.node_id)
