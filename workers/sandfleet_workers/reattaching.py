"""Operations that outlived the run of the node that began them: their callers still wait for the real answer."""

from __future__ import annotations

import functools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sandfleet.errors import SandfleetError
from sandfleet.store.base import OpView, Route
from sandfleet_workers.holdings import Held
from sandfleet_workers.notes import message_of

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["is_recallable", "reattach"]

log = logging.getLogger("sandfleet.node")

_AT_ONCE = 8
_MOST_OPS = 100_000
#: What no sandbox knows of.
_NODE_S_OWN = frozenset({"node.create", "node.destroy", "cancel", "checkpoint"})


def is_recallable(kind: str) -> bool:
    """Whether a sandbox can tell later how an operation of that kind ended. Of a batch it can tell only whether it
    began: the rest was never sent."""
    return kind not in _NODE_S_OWN and kind != "batch"


def reattach(node: Node) -> int:
    """Answer for what earlier runs of the node began in the sandboxes that it holds again, as it ends; how much it is.
    What is not taken over is left to `Store.close_incarnation`.

    Raises:
        StoreUnavailable: Nothing more can be taken over now.
    """
    views = [view for view in node.store.ops(node_id=node.node_id, limit=_MOST_OPS) if _is_of_earlier_run(node, view)]
    wanted = {sid: held for sid in {view.sandbox_id for view in views} if (held := node.held.get(sid)) is not None}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sandfleet-reattaching") as askers:
        notes = dict(zip(wanted, askers.map(_notes, wanted.values()), strict=True))
    taken = 0
    for view in views:
        held = node.held.get(view.sandbox_id)
        if held is not None and not held.stopping and view.sandbox_id in notes:
            taken += _take_over(node, view, held, notes[view.sandbox_id].get(view.op_id, ""))
    if views:
        log.info("node.reattached", extra={"node_id": node.node_id, "operations": taken, "of": len(views)})
    return taken


def _is_of_earlier_run(node: Node, view: OpView) -> bool:
    return view.state == "claimed" and view.incarnation != node.incarnation and view.kind not in _NODE_S_OWN


def _notes(held: Held) -> dict[str, str]:
    """What the sandbox keeps with its operations; one that does not say is asked for each of them all the same."""
    try:
        return {each.op_id: each.note for each in held.connection.remembered()}
    except SandfleetError as exc:
        log.warning("op.notes_unknown", extra={"sandbox_id": held.route.sandbox_id, "error": str(exc)})
        return {}


def _take_over(node: Node, view: OpView, held: Held, note: str) -> bool:
    old = Route(view.sandbox_id, node.node_id, view.incarnation, held.route.epoch)
    if not node.store.reattach(view.op_id, old, held.route):
        return False
    message = message_of(view, held.route, held.identity, note)
    log.info("op.reattached", extra={"op_id": view.op_id, "sandbox_id": view.sandbox_id, "kind": view.kind})
    if view.job:
        node.runs.track(message, held, job=True)
        node.runs.describe(view.op_id, _begun(view), view.describe, view.deadline_ms)
    elif message.args.get("background") is True:
        # It runs, and its caller has not been told.
        lasts_s = max(1.0, (view.deadline_ms - node.lease.now_ms()) / 1000)
        node.runs.begun(message, held, _begun(view), lasts_s, view.describe)
    else:
        node.pool.occupy(view.op_id, message.lanes, (view.sandbox_id,))
        node.runs.track(message, held, job=False, over=functools.partial(node.pool.vacate, view.op_id))
    return True


def _begun(view: OpView) -> str:
    """What the caller of a background job is told when it runs."""
    return json.dumps({"ok": {"job_id": view.op_id, "pid": None}, "t": (0, 0, 0)})
