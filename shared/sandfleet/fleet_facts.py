"""What is counted of a fleet, from what its store says: for the scheduler's metrics and ``sandfleet top``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandfleet.model import NodeView

__all__ = ["ops_per_s", "place_counts", "shown_state", "staying"]


def shown_state(node: NodeView) -> str:
    """The state a person asks for: a node without a lease is dead, whatever it said last."""
    return str(node.state) if node.alive or node.state.value == "gone" else "dead"


def place_counts(node: NodeView) -> dict[str, int]:
    """A node's places by what is in them.

    ``creating + live + warm + blank + stopping`` is what is taken, ``free`` is what is left of ``replicas``. ``burst``
    tells how many of those taken are above ``replicas``. ``blank`` counts blank sandboxes that are ready or being
    started. ``stopping`` counts removals younger than 30 seconds; longer ones show as live.
    """
    blank = sum(node.blanks.values()) + node.starting
    live = max(0, node.places - node.creating - node.warm - blank - node.stopping)
    return {
        "free": max(0, node.replicas - node.places) if node.alive else 0,
        "creating": node.creating,
        "live": live,
        "warm": node.warm,
        "blank": blank,
        "stopping": node.stopping,
        "burst": max(0, node.places - node.replicas),
    }


def staying(nodes: Sequence[NodeView]) -> list[NodeView]:
    """The nodes that have not left: alive, or dead and not answered for yet."""
    return [node for node in nodes if shown_state(node) != "gone"]


def ops_per_s(before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Operations a node answered per second between two of its loads.

    None when that cannot be told: it said nothing new in between, or started anew.
    """
    try:
        took_s = (now["at_ms"] - before["at_ms"]) / 1000
        answered = now["answers"] - before["answers"]
    except (KeyError, TypeError):
        return None
    if took_s <= 0 or answered < 0:
        return None
    return float(answered / took_s)
