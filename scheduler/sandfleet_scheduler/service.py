"""The scheduler: answers acquires that found nothing living, and answers for nodes that died.

Stateless; any number may run. Everything it decides goes through one atomic `reserve`, so two schedulers that
handle the same acquire make one sandbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from sandfleet.acquiring import lifecycle_message
from sandfleet.client import Client
from sandfleet.errors import (
    HomeUnavailable,
    InvalidArgument,
    NoCapacity,
    NotStarted,
    SandfleetError,
    VersionMismatch,
)
from sandfleet.ids import Identity, new_op_id
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Reserved, Route
from sandfleet.wire import VERSION
from sandfleet_scheduler.placement import Decision, PlacementRequest, choose_node

__all__ = ["Scheduler"]

log = logging.getLogger("sandfleet.scheduler")

_CREATE_WITHIN_S = 60.0
_WHY = {
    "no_node": "no node is alive and ready; start one with `sandfleet worker`",
    "no_backend": "no node offers the backend {backend!r}; see `sandfleet nodes`",
    "no_label": "no node carries the labels {labels}; see `sandfleet nodes`",
    "full": "every fitting node is full and nothing on it is warm; release sandboxes or add nodes",
}


class Scheduler:
    """Places threads. Thread-safe.

    Args:
        client: Its connection to the fleet (store, and a reply stream for what it asks nodes itself).
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.store = client.store

    def acquire(self, request: Mapping[str, Any]) -> str:
        """Handle one ``scheduler.acquire``: place the thread, or answer its waiters why not.

        The waiters are answered by the node's `created`, not from here. Gives one word for Flower.
        """
        if request.get("v") not in (VERSION, VERSION - 1):
            raise VersionMismatch(f"acquire message of version {request.get('v')!r}; this scheduler speaks {VERSION}")
        owner = request.get("owner")
        if not isinstance(owner, list) or len(owner) != 2:
            raise InvalidArgument("field owner must be [user_id, thread_id]")
        identity = Identity(owner[1], owner[0])
        spec = SandboxSpec.from_wire(request.get("spec") or {})
        try:
            return self.place(identity, spec, on_lost=str(request.get("on_lost", "wait_for_home")))
        except SandfleetError as exc:
            self.store.answer_waiters(identity, exc.to_wire())
            log.info("acquire.refused", extra={"thread_id": identity.thread_id, "code": exc.code})
            return exc.code

    def place(self, identity: Identity, spec: SandboxSpec, *, on_lost: str = "wait_for_home") -> str:
        """Reserve a place for the thread and tell its node to create the sandbox.

        Raises:
            NoCapacity: No node fits now.
            HomeUnavailable: The thread's data lies on a node that is away.
            NotStarted: Nodes changed under our hands; asking again is right.
        """
        home = self.store.thread_home(identity)
        fresh = on_lost == "fresh"
        wanted = PlacementRequest(identity.digest, spec.backend, spec.labels, home, fresh)
        decision = choose_node(wanted, self.store.nodes())
        for node in decision.place:
            if fresh and home is not None and node.data_id != home:
                self.store.forget_home(identity)
            reserved: Reserved = self.store.reserve(
                identity,
                spec,
                node_id=node.node_id,
                incarnation=node.incarnation,
                data_id=node.data_id,
                expires_s=_CREATE_WITHIN_S,
            )
            if reserved.status == "reserved" and reserved.route is not None:
                self._create(identity, spec, reserved.route)
                return f"placed on {node.node_id}"
            if reserved.status in ("live", "creating"):
                return reserved.status
        if decision.evict and self._make_room(decision):
            raise NoCapacity("room is being made from a warm sandbox", retry_after_s=0.1)
        if decision.reason == "home_away":
            raise HomeUnavailable(
                f"the data of thread {identity.thread_id} lies on a data root whose nodes are away; wait for them, "
                "or acquire with on_lost='fresh' to start with empty data",
                retry_after_s=1.0,
                thread_id=identity.thread_id,
            )
        why = _WHY.get(decision.reason or "full", "").format(backend=spec.backend, labels=dict(spec.labels))
        raise NoCapacity(why, retry_after_s=0.5, reason=decision.reason or "full")

    def _create(self, identity: Identity, spec: SandboxSpec, route: Route) -> None:
        try:
            recorded = self._send("node.create", identity, route, {"spec": spec.to_wire()}, "creating")
        except SandfleetError as exc:
            self.store.create_failed(route, exc.to_wire())
            raise
        if recorded != "recorded":
            error = NotStarted(f"node {route.node_id} did not take the creation: {recorded}", retry_after_s=0.2)
            self.store.create_failed(route, error.to_wire())

    def _send(self, kind: str, identity: Identity, route: Route, args: Mapping[str, Any], expect: str) -> str:
        """Record and publish a lifecycle operation that nobody waits for by op id."""
        record, push = lifecycle_message(
            new_op_id(),
            kind,
            identity,
            route,
            args,
            expect=expect,
            now_ms=self.client.now_ms(),
            within_s=_CREATE_WITHIN_S,
        )
        return self.store.record(record, push).status

    def _make_room(self, decision: Decision) -> bool:
        """End the least recently used warm sandbox of the best full node; True if one is on its way out."""
        for node in decision.evict:
            warm = [info for info in self.store.sandboxes(node_id=node.node_id) if info.state == "warm"]
            for info in sorted(warm, key=lambda info: info.used_at):
                stop = self.store.begin_stop(info.sandbox_id, owner=None, force=False, reason="evicted to make room")
                if stop.status == "recorded" and stop.route is not None:
                    identity = Identity(info.thread_id, info.user_id)
                    self._send("node.destroy", identity, stop.route, {"delete_data": False}, "stopping")
                    return True
        return False

    # --- dead nodes --------------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """Close out every node whose lease lapsed; their ids. Under a lock, so that one scheduler does it."""
        if not self.store.lock("reconcile", self.client.id, ttl_s=5.0):
            return []
        closed = []
        for node in self.store.nodes():
            if node.alive or node.state.value == "gone":
                continue
            started = time.monotonic()
            answered = 0
            while True:
                step = self.store.close_incarnation(node.node_id, None, reason=f"node {node.node_id} died")
                answered += step.not_started + step.unknown
                if not step.more:
                    break
            took_s = round(time.monotonic() - started, 3)
            log.warning("node.closed", extra={"node_id": node.node_id, "answered": answered, "took_s": took_s})
            closed.append(node.node_id)
        return closed
