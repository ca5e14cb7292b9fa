"""Where a new sandbox goes. Pure: a request and a list of nodes in, a decision out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sandfleet.model import NodeState, NodeView

__all__ = ["Decision", "PlacementRequest", "choose_node"]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        digest: The thread's identity digest; ties are broken by it, so equal nodes share threads evenly.
        backend: A node must offer it.
        labels: A node must carry all of these.
        home: data_id on which the thread's data lies; None for a new thread.
        fresh: The caller accepts empty data elsewhere when the home is away.
    """

    digest: str
    backend: str
    labels: Mapping[str, str] = field(default_factory=dict)
    home: str | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The nodes to try in this order; when there is none, why.

    ``evict`` nodes are full, but hold warm sandboxes that could make room. ``reason`` is no_node,
    no_backend, no_label, home_away or full.
    """

    place: tuple[NodeView, ...] = ()
    evict: tuple[NodeView, ...] = ()
    reason: str = ""


def choose_node(request: PlacementRequest, nodes: Iterable[NodeView]) -> Decision:
    """The nodes that can take the sandbox, best first: at its home if it has one, then where most is free."""
    ready = [node for node in nodes if node.alive and node.state is NodeState.READY]
    if not ready:
        return Decision(reason="no_node")
    offering = [node for node in ready if request.backend in node.backends]
    if not offering:
        return Decision(reason="no_backend")
    labelled = [node for node in offering if all(node.labels.get(k) == v for k, v in request.labels.items())]
    if not labelled:
        return Decision(reason="no_label")
    at_home = [node for node in labelled if request.home is None or node.data_id == request.home]
    if not at_home and not request.fresh:
        return Decision(reason="home_away")
    fitting = at_home or labelled
    ranked = sorted(fitting, key=lambda node: (-_share_free(node), node.inflight, _tie(request.digest, node.node_id)))
    place = tuple(node for node in ranked if node.free > 0)
    evict = tuple(node for node in ranked if node.free <= 0 and node.warm > 0)
    return Decision(place, evict, "" if place or evict else "full")


def _share_free(node: NodeView) -> float:
    return node.free / node.replicas


def _tie(digest: str, node_id: str) -> str:
    """Rendezvous hashing: each thread prefers another of several equal nodes."""
    return hashlib.sha256(f"{digest}/{node_id}".encode()).hexdigest()
