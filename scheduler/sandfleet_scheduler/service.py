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
from sandfleet.errors import NotStarted, SandfleetError
from sandfleet.ids import Identity, new_op_id, sandbox_id_candidates
from sandfleet.metrics import Tally
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import Push, Reserved, Route
from sandfleet.wire import SCHEDULER_QUEUE, VERSION, celery_message
from sandfleet_scheduler.asking import AcquireRequest
from sandfleet_scheduler.line import Room, Verdict
from sandfleet_scheduler.patience import Patience
from sandfleet_scheduler.placement import Decision, choose_node
from sandfleet_scheduler.refusing import no_place, quota_reached

__all__ = ["IN_LINE", "Scheduler"]

log = logging.getLogger("sandfleet.scheduler")

#: What `Scheduler.place` says of a thread that waits for a place.
IN_LINE = "in line"
_CREATE_WITHIN_S = 60.0
#: Data may have to come over the network first.
_RESTORE_WITHIN_S = 900.0


class Scheduler:
    """Places threads. Thread-safe.

    Args:
        client: Its connection to the fleet (store, and a reply stream for what it asks nodes itself).
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.store = client.store
        self.max_per_user = client.settings.max_per_user
        #: What it decided, for its metrics.
        self.tally = Tally()

    def acquire(self, message: Mapping[str, Any]) -> str:
        """Handle one ``scheduler.acquire``: place the thread, put it in line, or answer its waiters why not.

        The waiters are answered by the node's `created`, not from here. Gives a few words for Flower.

        Raises:
            VersionMismatch, InvalidArgument: The message is none; nobody can be told.
        """
        return self.place_or_tell(AcquireRequest.from_wire(message))

    def place_or_tell(self, request: AcquireRequest) -> str:
        """`place`, with errors told to the thread's waiters; a few words for Flower."""
        try:
            told = self.place(request)
            self.tally.add("acquires", "in_line" if told == IN_LINE else told.partition(" ")[0])
            return told
        except SandfleetError as exc:
            self.tally.add("acquires", exc.code)
            self.store.answer_waiters(request.identity, exc.to_wire())
            log.info("acquire.refused", extra={"thread_id": request.identity.thread_id, "code": exc.code})
            return exc.code

    def place(self, request: AcquireRequest) -> str:
        """Reserve a place for the thread and tell its node to create the sandbox; with none free, do what the request's
        overflow policy says.

        Raises:
            NoCapacity: No node fits now, or all that do are full and the policy is ``reject``.
            QuotaExceeded: The user has as many sandboxes as one may, and the policy is ``reject``.
            HomeUnavailable: The thread's data lies on a node that is away.
            NotStarted: Nodes changed under our hands; asking again is right.
        """
        home = self.store.thread_home(request.identity)
        nodes = self.store.nodes()
        decision = choose_node(request.wanted(home), nodes)
        told = Reserved("full")
        for node in decision.place:
            told = self.reserve(request, node)
            if told.status == "reserved":
                return f"placed on {node.node_id}"
            if told.status in ("live", "creating"):
                return told.status
            if told.status in ("queued", "quota"):
                break
        if decision.reason not in ("", "full"):
            if (under_way := self._under_way(request.identity, nodes)) is not None:
                return under_way
            raise no_place(decision.reason, request, nodes)
        return self._overflow(request, home, nodes, decision, told)

    def reserve(
        self, request: AcquireRequest, node: NodeView, *, burst: bool = False, from_line: bool = False
    ) -> Reserved:
        """Take a place on the node and have the sandbox created there, or say why not: see `Reserved`.

        Raises:
            NotStarted: The store lost its data a moment ago, or the node took the place but not the creation.
        """
        home = self.store.thread_home(request.identity) if request.on_lost != "wait_for_home" else None
        restore = request.begins_with(away=home is not None and home != node.data_id)
        long = restore is not None or self.client.settings.container.restore_on_start
        within_s = _RESTORE_WITHIN_S if long else _CREATE_WITHIN_S
        told = self.store.reserve(
            request.identity,
            request.spec,
            node_id=node.node_id,
            incarnation=node.incarnation,
            data_id=node.data_id,
            expires_s=within_s,
            burst=burst,
            max_per_user=self.max_per_user,
            from_line=from_line,
            spec_digest=request.spec.digest,
        )
        self.tally.add("placements", told.status)
        if told.status == "reserved" and told.route is not None:
            args: dict[str, Any] = {"spec": request.spec.to_wire(), "asked_at_ms": request.asked_at_ms}
            if told.blank:
                args["blank"] = told.blank
            if restore is not None:
                args["restore"] = restore
            self._create(request, told.route, args, within_s)
        elif told.status == "recovering":
            raise NotStarted(
                f"Redis lost its data; thread {request.identity.thread_id} waits until every node has told what it "
                "holds",
                retry_after_s=0.5,
                reason="recovering",
            )
        return told

    def _overflow(
        self, request: AcquireRequest, home: str | None, nodes: Sequence[NodeView], decision: Decision, told: Reserved
    ) -> str:
        """No place is free. Room that an eviction makes comes before any policy; whoever serves the line makes it."""
        if told.status == "quota":
            hopeless = not told.evict
        else:
            # Others in line may wait for something else; whoever serves it finds out what is left for this one.
            room = Room(nodes)
            turn = room.turn(request.wanted(home), burst=request.overflow == "burst")
            while turn.verdict is Verdict.BURST and turn.node is not None:
                told = self.reserve(request, turn.node, burst=True)
                if told.status == "reserved":
                    return f"placed on {turn.node.node_id}, above its replicas"
                if told.status in ("live", "creating"):
                    return told.status
                if told.status in ("queued", "quota"):
                    break
                room.gone(turn.node)
                turn = room.turn(request.wanted(home), burst=True)
            hopeless = turn.verdict is Verdict.WAIT
        if hopeless and request.overflow == "reject":
            if (under_way := self._under_way(request.identity, nodes)) is not None:
                return under_way
            if told.status == "quota":
                raise quota_reached(request, self.max_per_user)
            raise no_place("full", request, nodes, decision.fitting)
        return self._park(request, home, nodes)

    def _park(self, request: AcquireRequest, home: str | None, nodes: Sequence[NodeView]) -> str:
        argument = {"v": VERSION}
        describe = "serve the line"
        message = celery_message("scheduler.serve", new_op_id(), argument, queue=SCHEDULER_QUEUE, describe=describe)
        length = self.store.park(request.identity, request.for_line(home), push=Push(SCHEDULER_QUEUE, message))
        return IN_LINE if length else self._under_way(request.identity, nodes) or "nobody waits for it"

    def _under_way(self, identity: Identity, nodes: Sequence[NodeView]) -> str | None:
        """What an earlier request for the same thread has come to, if that is why no place is left for this one."""
        states = (NodeState.READY, NodeState.CORDONED, NodeState.AWAY)
        serving = {node.node_id for node in nodes if node.alive and node.state in states}
        for sandbox_id in sandbox_id_candidates(identity.digest)[:2]:
            info = self.store.sandbox(sandbox_id)
            if info is None or (info.thread_id, info.user_id) != (identity.thread_id, identity.user_id):
                continue
            if info.node_id in serving and info.state in ("creating", "live", "warm"):
                return str(info.state)
        return None

    def _create(self, request: AcquireRequest, route: Route, args: Mapping[str, Any], within_s: float) -> None:
        try:
            recorded = self.send("node.create", request.identity, route, args, "creating", within_s)
        except SandfleetError as exc:
            self.store.create_failed(route, exc.to_wire())
            raise
        if recorded != "recorded":
            error = NotStarted(f"node {route.node_id} did not take the creation: {recorded}", retry_after_s=0.2)
            self.store.create_failed(route, error.to_wire())

    def send(
        self,
        kind: str,
        identity: Identity,
        route: Route,
        args: Mapping[str, Any],
        expect: str,
        within_s: float = _CREATE_WITHIN_S,
    ) -> str:
        """Record and publish a lifecycle operation that nobody waits for by op id; what `Store.record` said."""
        record, push = lifecycle_message(
            new_op_id(),
            kind,
            identity,
            route,
            args,
            expect=expect,
            now_ms=self.client.now_ms(),
            within_s=within_s,
        )
        return self.store.record(record, push).status

    # --- dead nodes --------------------------------------------------------------------------

    def reconcile(self, patience: Patience | None = None) -> list[str]:
        """Close out every node whose lease lapsed, unless there is reason for ``patience``; their ids. Under a lock, so
        that one scheduler does it.

        A node that is gone already is closed too while it has anything left: whoever closed it (another scheduler, or
        the leaving node itself) may have died in the middle.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        asked_at = time.monotonic()
        nodes = self.store.nodes()
        if patience is not None:
            # After the list was made: what disturbed Redis before that has made leases lapse in it.
            patience.look(asked_at=asked_at, now_ms=self.store.now_ms(), moves=self.store.moves)
            if not patience.over:
                return []
        silent = [n for n in nodes if not n.alive and (n.state is not NodeState.GONE or n.inflight or n.places)]
        if not silent or not self.store.lock("reconcile", self.client.id, ttl_s=5.0):
            return []
        closed = []
        for node in silent:
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
