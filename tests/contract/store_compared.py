"""What must be equal in two stores that lived the same life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandfleet.ids import Identity
from sandfleet.store.base import Route
from tests.contract.store_fixtures import World


def difference(first: Any, second: Any) -> Any:
    """What to print of two answers that should be equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: (first[key], second.get(key)) for key in first if first[key] != second.get(key)}
    return first, second


def renamed(route: Route, incarnation: str) -> Route:
    return Route(route.sandbox_id, route.node_id, incarnation, route.epoch)


def fleet(world: World, nodes: Sequence[str], threads: Sequence[Identity]) -> Any:
    """All that a reader sees, but for what is each store's own (cursors, the order of replies)."""
    store = world.store
    return {
        "nodes": store.nodes(),
        "slots": [store.blanks(name) for name in nodes],
        "line": [(parked.digest, parked.user_id, parked.request) for parked in store.parked()],
        "by_node": [store.sandboxes(node_id=name) for name in nodes],
        "waiting": [world.waiting(identity) for identity in threads],
        "sandboxes": store.sandboxes(),
        "ops": sorted(store.ops(), key=lambda op: op.op_id),
        "homes": [store.thread_home(identity) for identity in threads],
        "replies": sorted((op_id, "ok" if "ok" in p else p["error"]["code"]) for op_id, p in world.replies()),
    }
