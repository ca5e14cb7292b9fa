"""What a node does about once a second, on the lease's thread, for the sandboxes it holds."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sandfleet.errors import LeaseLost, NotStarted, SandfleetError
from sandfleet.model import NodeState, SandboxInfo
from sandfleet.store.base import OpView, Route
from sandfleet.wire import node_queue
from sandfleet_workers.clock_steps import ClockSteps
from sandfleet_workers.holdings import Held
from sandfleet_workers.lease import boot_s
from sandfleet_workers.reaping import Ending, reaper_plan

if TYPE_CHECKING:
    from sandfleet_workers.lifecycle import Lifecycle
    from sandfleet_workers.node import Node

__all__ = ["Upkeep"]

log = logging.getLogger("sandfleet.node")

#: A recorded operation that is in no queue and in no pool for this long was lost on its way (a broker
#: connection that died between BRPOP and its answer).
_LOST_AFTER_MS = 3000
#: A node that was paused finds its last message in the socket, where no queue and no pool shows it. One look is
#: not enough to call it lost: the main loop gets this long to take it.
_LOOK_EVERY_S = 1.0
_COMPARE_EVERY_S = 5.0
#: A node that its full disk closed opens again with so much more, so that it does not open and close in turns.
_SPACE_AGAIN_BYTES = 16 * 1024 * 1024


def monotonic() -> float:
    """The clock of the pauses between looks."""
    return time.monotonic()


class Upkeep:
    """Keeps a node and the registry of one mind: ends the idle, answers for the lost, tells what was forgotten.

    Attributes:
        to_readopt: The store lost its data and does not know yet what this node holds.
    """

    def __init__(self, node: Node, lifecycle: Lifecycle) -> None:
        self._node = node
        self._lifecycle = lifecycle
        self._looked_at = self._disk_at = 0.0
        self._compared_at = monotonic()
        #: Operations that the last look missed.
        self._missing: frozenset[str] = frozenset()
        #: What the last comparison found the registry not to know, and how many renewals there had been by then.
        self._disowned: dict[str, tuple[Route, int]] = {}
        self._clock = ClockSteps()
        self._homes_due = False
        self.to_readopt = False
        #: Why this node cordoned itself, if it did so because its disk is nearly full.
        self._no_space = ""

    def forgotten(self) -> None:
        """The store lost its data: with the next tick it is told what this node holds."""
        self.to_readopt = self._lifecycle.blanks.to_tell_again = self._homes_due = True
        self._disowned = {}

    def tick(self, now_ms: int) -> None:
        """Expire holds, end what nobody uses, answer lost messages, compare with the registry."""
        if self.to_readopt and not self._readopt():
            return  # a registry that does not know what is here says nothing about it
        self._end_unused(now_ms)
        now = monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._answer_lost(now_ms)
        if now - self._compared_at >= _COMPARE_EVERY_S:
            self._compared_at = now
            self._compare(now_ms)
        if now - self._disk_at >= _COMPARE_EVERY_S:
            self._disk_at = now
            self.watch_disk()

    # --- what nobody uses --------------------------------------------------------------------

    def _end_unused(self, now_ms: int) -> None:
        node, settings = self._node, self._node.settings
        jumped_ms = self._clock.look(now_ms, int(boot_s() * 1000))
        if jumped_ms:
            log.warning("node.store_clock_set", extra={"node_id": node.node_id, "ahead_s": jumped_ms / 1000})
        # By a clock that was set ahead everything would have been idle for long.
        swept = [self._clock.of_now(one) for one in node.store.sweep(node.node_id, node.incarnation)]
        self._lifecycle.checkpoints.look(swept)
        plan = reaper_plan(
            swept,
            now_ms=now_ms,
            idle_timeout_s=settings.idle_timeout_s,
            active_idle_timeout_s=settings.active_idle_timeout_s,
            max_age_s=settings.max_age_s,
        )
        for ending in plan:
            held = node.held.get(ending.sandbox_id)
            if held is not None and not held.stopping:
                self.retire(held, ending)

    def retire(self, held: Held, ending: Ending) -> None:
        """End a sandbox, if what the plan found still holds."""
        stop = self._node.store.begin_stop(
            held.route.sandbox_id,
            owner=None,
            force=False,
            reason=ending.reason,
            if_warm_before_ms=ending.if_warm_before_ms,
            if_idle_before_ms=ending.if_idle_before_ms,
        )
        if stop.route == held.route and stop.status in ("recorded", "stopping"):
            held.stopping = True
            log.info("sandbox.retired", extra={"sandbox_id": held.route.sandbox_id, "reason": ending.reason})
            self._node.pool.run_slow(functools.partial(self._lifecycle.end_and_tell, held.route))

    # --- the disk ----------------------------------------------------------------------------

    def watch_disk(self) -> None:
        """Take nothing new while the data root's file system is nearly full; open again what this closed."""
        node, floor = self._node, self._node.settings.min_free_bytes
        try:
            free = shutil.disk_usage(node.settings.data_root).free
        except OSError as exc:
            log.warning("node.disk_unknown", extra={"node_id": node.node_id, "error": str(exc)})
            return
        if free < floor and not self._no_space and node.lease.state is NodeState.READY:
            reason = f"{free >> 20} MiB are free at its data root, less than min_free_bytes ({floor >> 20} MiB)"
            log.error("node.cordoned_itself", extra={"node_id": node.node_id, "reason": reason})
            if node.store.set_node_state(node.node_id, NodeState.CORDONED, incarnation=node.incarnation, reason=reason):
                self._no_space = reason
        elif self._no_space and (node.lease.state is not NodeState.CORDONED or free >= floor + _SPACE_AGAIN_BYTES):
            why = next((view.reason for view in node.store.nodes() if view.node_id == node.node_id), "")
            # Not if somebody else has closed it meanwhile, for a reason of their own.
            if node.lease.state is NodeState.CORDONED and why == self._no_space:
                log.warning("node.opened_itself", extra={"node_id": node.node_id, "free_bytes": free})
                node.store.set_node_state(node.node_id, NodeState.READY, incarnation=node.incarnation)
            self._no_space = ""

    # --- operations whose message got lost ---------------------------------------------------

    def _answer_lost(self, now_ms: int) -> None:
        """Answer what two looks in a row found recorded for this node and nowhere on its way."""
        node, views = self._node, list[OpView]()
        if not node.store.queue_length(node_queue(node.node_id)):
            views = node.store.ops(node_id=node.node_id, limit=500)
        missing = [view for view in views if self._is_missing(view, now_ms)]
        before, self._missing = self._missing, frozenset(view.op_id for view in missing)
        for view in missing:
            if view.op_id in before:
                self._tell_lost(view, views)

    def _is_missing(self, view: OpView, now_ms: int) -> bool:
        mine = view.incarnation == self._node.incarnation and view.state in ("recorded", "claimed")
        return mine and view.recorded_at_ms < now_ms - _LOST_AFTER_MS and not self._node.pool.holds(view.op_id)

    def _tell_lost(self, view: OpView, views: Sequence[OpView]) -> None:
        store = self._node.store
        # Redis may have forgotten that it was answered. What is claimed otherwise is about to be answered, or a job.
        if self._node.outbox.tell_again(view.op_id) or view.state == "claimed":
            return
        current = store.route(view.sandbox_id)
        ours = current is not None and (current.node_id, current.incarnation) == (view.node_id, view.incarnation)
        route = current if current is not None and ours else Route(view.sandbox_id, view.node_id, view.incarnation, 0)
        error = NotStarted(f"the message of operation {view.op_id} was lost on its way", reason="message_lost")
        reply = json.dumps({"error": error.to_wire()})
        # Whoever claims it at this moment wins: what has begun is not told to be repeatable.
        if not store.finish(view.op_id, route, outcome=error.code, reply=reply, only_recorded=True):
            return
        log.warning("op.message_lost", extra={"op_id": view.op_id})
        if view.kind == "node.create" and ours and not _has_successor(view, views):
            store.create_failed(route, error.to_wire())  # whoever waits for it asks again

    # --- what the registry forgot ------------------------------------------------------------

    def _readopt(self) -> bool:
        """Tell the store what this node holds; False if that has to be tried again."""
        node = self._node
        for sandbox_id, held in list(node.held.items()):
            if held.stopping:
                continue
            try:
                adopted = self._adopted(held)
            except LeaseLost:
                # It lost its data once more. The next renewal finds that out and announces the node again, or learns
                # that somebody else is this node by now.
                return False
            if not adopted:
                log.warning("sandbox.superseded", extra={"sandbox_id": sandbox_id})
                self._end_soon(held)
        self.to_readopt = False
        node.runs.tell_again()
        if self._homes_due:
            self._homes_due = False
            self._lifecycle.homes.tell_soon()  # after those that run, which know better
        return True

    def _end_soon(self, held: Held) -> None:
        held.stopping = True
        self._node.pool.run_slow(functools.partial(self._lifecycle.end, held.route))

    def _end_again(self, held: Held) -> None:
        """What could not be ended, once more: the engine was away."""
        try:
            self._lifecycle.end_and_tell(held.route)
        except SandfleetError as exc:
            log.warning("sandbox.end_failed", extra={"sandbox_id": held.route.sandbox_id, "error": str(exc)})

    # --- comparing ---------------------------------------------------------------------------

    def _compare(self, now_ms: int) -> None:
        """Make what this node runs and what the registry says of it agree again."""
        node, before = self._node, dict(self._node.held)
        for held in before.values():
            if held.stuck:
                held.stuck = False
                node.pool.run_slow(functools.partial(self._end_again, held))
        infos = node.store.sandboxes(node_id=node.node_id)
        self._end_disowned(before, infos)
        long_ago = now_ms / 1000 - 2 * _LOST_AFTER_MS / 1000
        suspects = [
            info
            for info in infos
            if info.incarnation == node.incarnation
            and info.used_at < long_ago
            and info.state != "lost"
            and (info.state in ("creating", "stopping") or info.sandbox_id not in before)
        ]
        if suspects:
            coming = {op.sandbox_id for op in node.store.ops(node_id=node.node_id, limit=100_000)}
            for info in suspects:
                if info.sandbox_id not in coming:
                    self._settle(info)

    def _end_disowned(self, before: Mapping[str, Held], infos: Sequence[SandboxInfo]) -> None:
        """Tell the registry of what this node runs and it does not know, and end what it has another owner for: nobody
        could ever reach or release that.

        A registry that was emptied a moment ago knows nothing either. So two looks have to agree, and between
        them a renewal that found this node in it.
        """
        known = {info.sandbox_id: (info.incarnation, info.epoch) for info in infos}
        earlier, self._disowned = self._disowned, {}
        renewals = self._node.lease.renewals
        for sandbox_id, held in before.items():
            route = held.route
            if held.stopping or known.get(sandbox_id) == (route.incarnation, route.epoch):
                continue
            seen, at = earlier.get(sandbox_id, (None, renewals))
            if seen != route or renewals <= at:
                self._disowned[sandbox_id] = (route, renewals)
            else:
                self._tell_or_end(held)

    def _tell_or_end(self, held: Held) -> None:
        facts = {"sandbox_id": held.route.sandbox_id, "epoch": held.route.epoch}
        try:
            if self._adopted(held):
                # A failover loses what was written a moment before it.
                log.warning("sandbox.readopted", extra=facts)
                return
        except LeaseLost:
            return  # the next renewal finds that out
        log.warning("sandbox.disowned", extra=facts)
        self._end_soon(held)

    def _adopted(self, held: Held) -> bool:
        """Tell the registry of a sandbox it does not know; False when its thread has another one by now."""
        age_s = time.monotonic() - held.made_at
        data_id = self._lifecycle.data_id
        return self._node.store.adopt(held.identity, held.spec, held.route, data_id=data_id, age_s=age_s)

    def _settle(self, info: SandboxInfo) -> None:
        """Finish what was decided and never came: the message got lost, or whoever was to send it died."""
        store, held = self._node.store, self._node.held.get(info.sandbox_id)
        route = Route(info.sandbox_id, info.node_id, info.incarnation, info.epoch)
        if self._lifecycle.is_ending(info.sandbox_id):
            return  # whoever ends it tells
        log.warning("sandbox.settled", extra={"sandbox_id": info.sandbox_id, "state": str(info.state)})
        if info.state == "creating":
            lost = NotStarted(f"the creation of sandbox {info.sandbox_id} was lost on its way", reason="message_lost")
            store.create_failed(route, lost.to_wire())
        elif info.state != "stopping":
            store.lost(route, reason="its node does not run it")
        elif held is None or held.route != route:
            store.stopped(route)
        elif not held.stopping:
            held.stopping = True
            self._node.pool.run_slow(functools.partial(self._lifecycle.end_and_tell, route))


def _has_successor(view: OpView, views: Sequence[OpView]) -> bool:
    """Whether a later creation of the same sandbox is under way: the reservation is its own then."""
    return any(
        (other.kind, other.sandbox_id) == (view.kind, view.sandbox_id) and other.recorded_at_ms > view.recorded_at_ms
        for other in views
    )
