"""The scheduler: answers acquires that found nothing living, and answers for nodes that died.

Stateless; any number may run. Everything it decides goes through one atomic `reserve`, so two schedulers that
handle the same acquire make one sandbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
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
from sandfleet.ids import Identity, new_op_id, sandbox_id_candidates
from sandfleet.model import NodeState, NodeView, SandboxSpec
from sandfleet.store.base import Reserved, Route
from sandfleet.wire import VERSION
from sandfleet_scheduler.placement import Decision, PlacementRequest, choose_node

__all__ = ["Scheduler"]

log = logging.getLogger("sandfleet.scheduler")

_CREATE_WITHIN_S = 60.0
_ROOM_S = 2.0
_REMOVED_WITHIN_S = 30.0
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
        wanted = PlacementRequest(identity.digest, spec.backend, spec.labels, home, on_lost == "fresh")
        nodes = self.store.nodes()
        decision = choose_node(wanted, nodes)
        for node in decision.place:
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
            if reserved.status == "recovering":
                raise NotStarted(
                    f"Redis lost its data; thread {identity.thread_id} waits until every node has told what it holds",
                    retry_after_s=0.5,
                    reason="recovering",
                )
        if (under_way := self._under_way(identity, nodes)) is not None:
            return under_way
        if decision.evict and self._make_room(identity, decision):
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

    def _under_way(self, identity: Identity, nodes: Sequence[NodeView]) -> str | None:
        """What an earlier request for the same thread has come to, if that is why no place is left for this one."""
        serving = {node.node_id for node in nodes if node.alive and node.state in (NodeState.READY, NodeState.CORDONED)}
        for sandbox_id in sandbox_id_candidates(identity.digest)[:2]:
            info = self.store.sandbox(sandbox_id)
            if info is None or (info.thread_id, info.user_id) != (identity.thread_id, identity.user_id):
                continue
            if info.node_id in serving and info.state in ("creating", "live", "warm"):
                return str(info.state)
        return None

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

    def _make_room(self, identity: Identity, decision: Decision) -> bool:
        """End the least recently used warm sandbox of the best full node; True if one is on its way out.

        One at a time: the thread asks again many times until the place is free, and each time other nodes may look
        better. So it evicts at most once in two seconds, and not where a removal is under way.
        """
        lock, token = f"room:{identity.digest}", new_op_id()
        if not self.store.lock(lock, token, ttl_s=_ROOM_S):
            return True
        if any(self._make_room_on(node.node_id) for node in decision.evict):
            return True
        self.store.unlock(lock, token)
        return False

    def _make_room_on(self, node_id: str) -> bool:
        infos = self.store.sandboxes(node_id=node_id)
        recently = self.store.now_ms() / 1000 - _REMOVED_WITHIN_S
        if any(info.state == "stopping" and info.used_at > recently for info in infos):
            return True
        for info in sorted((info for info in infos if info.state == "warm"), key=lambda info: info.used_at):
            stop = self.store.begin_stop(info.sandbox_id, owner=None, force=False, reason="evicted to make room")
            if stop.status != "recorded" or stop.route is None:
                continue
            evicted = Identity(info.thread_id, info.user_id)
            status = self._send("node.destroy", evicted, stop.route, {"delete_data": False}, "stopping")
            if status == "recorded":
                return True
            # Its node ends it all the same when it compares what it holds with the registry, but not now.
            log.warning("evict.not_taken", extra={"sandbox_id": info.sandbox_id, "node_id": node_id, "status": status})
            return False
        return False

    # --- dead nodes --------------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """Close out every node whose lease lapsed; their ids. Under a lock, so that one scheduler does it.

        A node that is gone already is closed too while it has anything left: whoever closed it (another scheduler, or
        the leaving node itself) may have died in the middle.
        """
        if not self.store.lock("reconcile", self.client.id, ttl_s=5.0):
            return []
        closed = []
        for node in self.store.nodes():
            if node.alive or (node.state is NodeState.GONE and not node.inflight and not node.places):
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
