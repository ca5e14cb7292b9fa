"""Where a new sandbox goes. Pure: a request and a list of nodes in, a decision out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sandfleet.model import NodeState, NodeView

__all__ = ["Decision", "PlacementRequest", "choose_node", "fitting_nodes", "rank"]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        digest: The thread's identity digest; ties are broken by it, so equal nodes share threads evenly.
        backend: A node must offer it.
        labels: A node must carry all of these.
        home: data_id on which the thread's data lies; None for a new thread.
        fresh: The caller accepts empty data elsewhere when the home is away.
        spec_digest: Of the whole spec; nodes with a blank sandbox of it come first.
        if_gone: The caller accepts another home when no node of this one is alive, whatever its state.
    """

    digest: str
    backend: str
    labels: Mapping[str, str] = field(default_factory=dict)
    home: str | None = None
    fresh: bool = False
    spec_digest: str = ""
    if_gone: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The nodes with a free place, to be tried in this order; when there is none, why.

    ``fitting`` are the nodes that could take it if they had room. ``reason`` is no_node, no_backend, no_label,
    home_away or full.
    """

    place: tuple[NodeView, ...] = ()
    fitting: tuple[NodeView, ...] = ()
    reason: str = ""


def choose_node(request: PlacementRequest, nodes: Iterable[NodeView]) -> Decision:
    """The nodes that can take the sandbox, best first: at its home if it has one, then where a blank one of its spec is
    ready, then where most is free."""
    fitting, reason = fitting_nodes(request, nodes)
    ranked = tuple(sorted(fitting, key=lambda node: rank(request, node, node.replicas - node.places, node.blanks)))
    place = tuple(node for node in ranked if node.free > 0)
    return Decision(place, ranked, reason or ("" if place else "full"))


def fitting_nodes(request: PlacementRequest, nodes: Iterable[NodeView]) -> tuple[tuple[NodeView, ...], str]:
    """The nodes that may take the sandbox, full or not; when there is none, the first thing that is missing."""
    alive = [node for node in nodes if node.alive]
    ready = [node for node in alive if node.state is NodeState.READY]
    if not ready:
        return (), "no_node"
    offering = [node for node in ready if request.backend in node.backends]
    if not offering:
        return (), "no_backend"
    labelled = [node for node in offering if all(node.labels.get(k) == v for k, v in request.labels.items())]
    if not labelled:
        return (), "no_label"
    at_home = [node for node in labelled if request.home is None or node.data_id == request.home]
    gone = all(node.data_id != request.home for node in alive)
    if not at_home and not request.fresh and not (request.if_gone and gone):
        return (), "home_away"
    return tuple(at_home or labelled), ""


def rank(
    request: PlacementRequest, node: NodeView, room: int, blanks: Mapping[str, int]
) -> tuple[bool, float, int, str]:
    """The smaller, the better: whether one of its blank sandboxes has the spec; with ``room`` places left beside those
    of blank ones, by the share that can be had at once, so that neither big nodes nor quick refills take everything;
    then by what is under way; then by the thread."""
    alike = blanks.get(request.spec_digest, 0)
    return not alike, -(room + alike) / node.replicas, node.inflight, _tie(request.digest, node.node_id)


def _tie(digest: str, node_id: str) -> str:
    """Rendezvous hashing: each thread prefers another of several equal nodes."""
    return hashlib.sha256(f"{digest}/{node_id}".encode()).hexdigest()
