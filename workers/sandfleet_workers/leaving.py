"""How a node leaves: for good, or so that its next run finds its sandboxes at work.

Leaving for good answers for everything and ends it. A node that is expected back says that it is *away*, lets go of the
sandboxes that can do without it, and tells nobody anything about what runs there: its next run knows better. A fenced
node lets go as well, and has no say in the registry any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sandfleet.errors import NotStarted, StoreUnavailable
from sandfleet.model import NodeState
from sandfleet.store.base import Route
from sandfleet_workers.creating import outlives
from sandfleet_workers.holdings import Carry, Held
from sandfleet_workers.reattaching import is_recallable

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["leave"]

log = logging.getLogger("sandfleet.node")

_LOOK_S = 0.05


def leave(node: Node) -> None:
    """End this run of the node; see the module. Returns when nothing of it is left but what shall be."""
    orderly = node.settings.detach_s > 0 and not node.leaves_for_good
    comes_back = orderly and node.lifecycle.may_outlive
    if node.fenced:
        node.pool.refuse_new()
        _let_go(node, comes_back=comes_back)
        node.store.close()
        return
    try:
        state = NodeState.AWAY if comes_back else NodeState.DRAINING
        node.store.set_node_state(node.node_id, state, incarnation=node.incarnation)
        node.drain()
        _give_back_creations(node)
    except StoreUnavailable as exc:
        log.warning("node.drain_failed", extra={"node_id": node.node_id, "error": str(exc)})
    node.lease.only_renew()
    if orderly:
        _wait_for_the_rest(node)  # what is being created ends as live
    ended = list(node.held.values())
    if comes_back and _surviving(node):
        # An engine that hangs may hold up what follows, until somebody kills this process: it is expected back even so.
        node.lease.only_renew(lease_s=node.settings.detach_s)
        _be_away(node)
    left = _let_go(node, comes_back=comes_back)
    node.outbox.flush()
    node.lease.stop()
    try:
        if left:
            _be_away(node)
            facts = {"sandboxes": len(left), "back_within_s": node.settings.detach_s}
            log.info("node.away", extra={"node_id": node.node_id, **facts})
        else:
            told = _saved(node, ended)
            node.store.set_node_state(node.node_id, NodeState.GONE, incarnation=node.incarnation, reason=told)
            while node.store.close_incarnation(node.node_id, None, reason="the node left").more:
                pass
    except StoreUnavailable as exc:
        log.warning("node.leave_failed", extra={"node_id": node.node_id, "error": str(exc)})
    node.store.close()


def _be_away(node: Node) -> None:
    """Away from now on, for `detach_s` at most."""
    lease_s = node.settings.detach_s
    try:
        node.store.set_node_state(node.node_id, NodeState.AWAY, incarnation=node.incarnation, lease_s=lease_s)
    except StoreUnavailable as exc:
        log.warning("node.leave_failed", extra={"node_id": node.node_id, "error": str(exc)})


def _saved(node: Node, ended: Sequence[Held]) -> str:
    """What an operator has to know of the data of the sandboxes that have ended; nothing without checkpoints."""
    if not ended or node.lifecycle.checkpoints.storage is None:
        return ""
    saved = sum(held.saved_effects == held.effects for held in ended)
    return f"saved the data of {saved} of {len(ended)} sandboxes"


def _surviving(node: Node) -> frozenset[str]:
    """The sandboxes whose next run finds them again."""
    return frozenset(
        sandbox_id
        for sandbox_id, held in list(node.held.items())
        if held.entry is not None and not held.stopping and outlives(held.backend)
    )


def _let_go(node: Node, *, comes_back: bool) -> frozenset[str]:
    """End what ends with this run; the sandboxes that run on."""
    if comes_back:
        # From here on a connection that breaks means nothing.
        node.left_running = _surviving(node)
    node.runs.close()
    node.lifecycle.close(leave=node.left_running)
    return node.left_running


def _give_back_creations(node: Node) -> None:
    """Those who wait for a sandbox whose creation has not begun need not wait until this node is back or closed out."""
    begun = {carry.message.route.sandbox_id for carry in node.pool.carries() if carry is not None}
    error = NotStarted(f"node {node.node_id} is leaving", reason="leaving", retry_after_s=0.2)
    for info in node.store.sandboxes(node_id=node.node_id):
        if info.state == "creating" and info.incarnation == node.incarnation and info.sandbox_id not in begun:
            route = Route(info.sandbox_id, info.node_id, info.incarnation, info.epoch)
            node.store.create_failed(route, error.to_wire())


def _wait_for_the_rest(node: Node) -> None:
    """What no sandbox can tell later is waited for: commands in those that end, batches, creations."""
    until, staying = time.monotonic() + node.settings.drain_timeout_s, _surviving(node)

    def waits(carry: Carry | None) -> bool:
        return carry is not None and not (
            is_recallable(carry.message.kind) and carry.message.route.sandbox_id in staying
        )

    while (running := sum(map(waits, node.pool.carries()))) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if running:
        log.warning("node.drain_cut_short", extra={"node_id": node.node_id, "running": running})
