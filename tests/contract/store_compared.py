"""What must be equal in two stores that lived the same life."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sandfleet.ids import Identity
from sandfleet.store.base import Reserved, Route, Swept
from tests.contract.store_fixtures import World


class Ticking:
    """A clock on which no two readings are equal, so that memory's epochs have Redis' resolution."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> int:
        self.last = max(self.last + 1, int(time.time() * 1000))
        return self.last


def told(answer: Any) -> Any:
    """What of an answer must be equal: epochs and times are each store's own."""
    if isinstance(answer, Reserved):
        return answer.status, place(answer.route), bool(answer.evict), answer.blank
    return answer


def swept(one: Swept) -> Any:
    return one.sandbox_id, one.warm_since_ms is None, one.busy


def place(route: Route | None) -> Any:
    return route and (route.sandbox_id, route.node_id, route.incarnation)


def renamed(route: Route, incarnation: str) -> Route:
    return Route(route.sandbox_id, route.node_id, incarnation, route.epoch)


def fleet(world: World, nodes: Sequence[str], threads: Sequence[Identity]) -> Any:
    """All that a reader sees, but for what is each store's own."""
    store = world.store
    return {
        "nodes": [(n.node_id, n.incarnation, n.state, n.alive, n.places, n.warm, n.inflight) for n in store.nodes()],
        "places": [(n.creating, n.stopping, {sid for sid, _ in n.idlest}) for n in store.nodes()],
        "blanks": [(n.starting, n.blanks, n.free) for n in store.nodes()],
        "slots": [store.blanks(name) for name in nodes],
        "line": [(parked.digest, parked.user_id, parked.request) for parked in store.parked()],
        "by_node": [[(i.sandbox_id, i.state) for i in store.sandboxes(node_id=name)] for name in nodes],
        "waiting": [world.waiting(identity) for identity in threads],
        "sandboxes": [(i.sandbox_id, i.state, i.node_id, i.incarnation, i.agents, i.ops) for i in store.sandboxes()],
        "ops": sorted((op.op_id, op.state) for op in store.ops()),
        "homes": [store.thread_home(identity) for identity in threads],
        "replies": sorted((op_id, "ok" if "ok" in p else p["error"]["code"]) for op_id, p in world.replies()),
    }
