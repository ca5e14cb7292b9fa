"""The steps that the transitions of `MemoryStore` share: the twins of ``scripts/lib``."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from typing import Any

from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import Output, Route, Waiter
from sandfleet.store.memory_state import KEEP_MS, MemoryState, Op, Sandbox

__all__ = ["STOPPING_MS", "MemorySteps", "blank_place", "is_blank", "where"]

LOST_MS = 600_000
STOPPING_MS = 30_000
KICK_MS = 1000
OUTPUT_KEPT_MS, CALL_OUTPUT_KEPT_MS = 3_600_000, 60_000
#: States of a node in which the sandboxes it has count as live.
SERVING = (NodeState.READY, NodeState.CORDONED, NodeState.AWAY)


class MemorySteps(MemoryState):
    """Small steps; the lock is held by whoever takes them."""

    def _count(self, holders: dict[str, int]) -> int:
        now = self._now()
        return sum(1 for expiry in holders.values() if expiry > now)

    def _has_ops(self, sandbox_id: str) -> bool:
        return self._count(self._busy[sandbox_id]) > 0

    def _in_use(self, sandbox_id: str) -> bool:
        return self._count(self._agents[sandbox_id]) > 0 or self._has_ops(sandbox_id)

    def _settle(self, route: Route) -> bool:
        """A live sandbox with nobody in it is warm; True if it became so now."""
        sandbox = self._sandboxes.get(route.sandbox_id)
        if sandbox is None or sandbox.state != SandboxState.LIVE or sandbox.route != route:
            return False
        warm = self._warm[route.node_id]
        if self._in_use(route.sandbox_id) or route.sandbox_id in warm:
            return False
        warm[route.sandbox_id] = self._now()
        self._kick()
        return True

    def _taken(self, node_id: str) -> int:
        now = self._now()
        return sum(1 for expiry in self._places[node_id].values() if expiry > now)

    def _take_place(self, sandbox_id: str, node_id: str, user_id: str | None, until: float) -> None:
        self._places[node_id][sandbox_id] = until
        if user_id is not None:
            self._users[user_id][sandbox_id] = until

    def _place_until(self, node_id: str, sandbox_id: str) -> float:
        return self._places[node_id].get(sandbox_id, 0)

    def _thread_state(self, digest: str) -> tuple[str | None, Sandbox | None]:
        """live, creating, stopping, or None (nothing that serves); with the old record, if there is one."""
        thread = self._threads.get(digest)
        sandbox = self._sandboxes.get(thread.sandbox_id) if thread else None
        if sandbox is None or sandbox.owner != digest:
            return None, None
        route, state = sandbox.route, sandbox.state
        node, holder = self._nodes.get(route.node_id), self._leases.get(route.node_id)
        back = state == SandboxState.LIVE and node is not None and node.returning
        expected = node.record.incarnation if back and node is not None else route.incarnation
        if state == SandboxState.LOST or holder not in (route.incarnation, expected):
            return None, sandbox
        if state == SandboxState.LIVE and (node is None or node.state not in SERVING):
            return None, sandbox
        expired = self._place_until(route.node_id, route.sandbox_id) <= self._now()
        if state == SandboxState.CREATING and expired:
            return None, sandbox
        return str(state), sandbox

    def _ours(self, route: Route, *states: SandboxState) -> Sandbox | None:
        sandbox = self._sandboxes.get(route.sandbox_id)
        return sandbox if sandbox and sandbox.route == route and sandbox.state in states else None

    def _keep_alive(self, digest: str, sandbox: Sandbox) -> None:
        self._sandboxes.touch(sandbox.route.sandbox_id, KEEP_MS)
        self._threads.touch(digest, KEEP_MS)
        self._ids.touch(sandbox.route.sandbox_id, KEEP_MS)

    def _forget(self, route: Route) -> None:
        sandbox_id = route.sandbox_id
        self._leave_node(route)
        self._sandboxes.drop(sandbox_id)
        self._kick()

    def _leave_node(self, route: Route) -> None:
        self._places[route.node_id].pop(route.sandbox_id, None)
        self._warm[route.node_id].pop(route.sandbox_id, None)
        self._stopping[route.node_id].pop(route.sandbox_id, None)
        sandbox = self._sandboxes.get(route.sandbox_id)
        if sandbox is not None and sandbox.user_id is not None:
            self._users[sandbox.user_id].pop(route.sandbox_id, None)
        self._agents.pop(route.sandbox_id, None)
        self._busy.pop(route.sandbox_id, None)

    def _make_lost(self, sandbox: Sandbox, reason: str) -> None:
        self._leave_node(sandbox.route)
        sandbox.state, sandbox.used_ms = SandboxState.LOST, self._now()
        self._sandboxes.touch(sandbox.route.sandbox_id, LOST_MS)
        self._tell(sandbox.route.sandbox_id, "lost", reason=reason, **where(sandbox.route))
        self._kick()

    # --- blank sandboxes -----------------------------------------------------------------------

    def _drop_blank(self, node_id: str, slot: str) -> bool:
        """The place and all else of one blank; whether it had a place."""
        self._blanks[node_id].pop(slot, None)
        return self._places[node_id].pop(blank_place(slot), None) is not None

    def _drop_blanks(self, node_id: str) -> None:
        """The incarnation that they belong to has ended."""
        places = self._places[node_id]
        for member in [member for member in places if is_blank(member)]:
            del places[member]
        self._blanks.pop(node_id, None)

    def _choose_blank(self, node_id: str, digest: str, *, any_kind: bool) -> str:
        """The ready blank that a thread gets: one of its spec, else any if it needs the place; the first by name."""
        ready = self._blanks[node_id]
        same = [slot for slot, its_digest in ready.items() if its_digest == digest]
        return min(same or (ready if any_kind else ()), default="")

    # --- the line ------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Something that the line waits for has changed: publish the kept message, but not time and again."""
        now, kicked = self._now(), self._kicked_ms
        if self._in_line and self._serve is not None and (kicked is None or kicked <= now - KICK_MS):
            self._push(self._serve)
            self._kicked_ms = now

    def _awaited(self, digest: str) -> bool:
        """Whether anybody waits for this thread's sandbox."""
        waiting = self._waiting.get(digest)
        return waiting is not None and waiting.until_ms > self._now()

    def _leave_line(self, digest: str) -> int | None:
        """Take a thread out of the line; its turn, or None if it did not stand there."""
        left = self._in_line.pop(digest, None)
        if left is None:
            return None
        del self._order[bisect.bisect_left(self._order, (left.stands, digest))]
        turns = self._turns[left.user]
        turns.pop(digest, None)
        if not turns:
            del self._turns[left.user]
        return left.stands[0]

    # --- waiters -------------------------------------------------------------------------------

    def _waiters(self, digest: str) -> list[Waiter]:
        now = self._now()
        waiting = self._waiting.get(digest)
        return [w for w, until in waiting.parked.values() if until > now] if waiting else []

    def _grant_waiters(self, digest: str, route: Route, *, new: bool) -> int:
        """Every waiter whose client still listens becomes an agent and gets the route."""
        payload = json.dumps({"ok": {**where(route), "sandbox_id": route.sandbox_id, "new": new}})
        granted = 0
        for waiter in self._waiters(digest):
            if self._send(waiter.reply_to, waiter.op_id, payload):
                expiry = self._now() + max(1, round(waiter.agent_ttl_s * 1000))
                self._agents[route.sandbox_id][waiter.agent] = expiry
                granted += 1
        self._waiting.pop(digest, None)
        self._leave_line(digest)
        if granted:
            self._warm[route.node_id].pop(route.sandbox_id, None)
        return granted

    def _fail_waiters(self, digest: str, error: Mapping[str, Any]) -> int:
        waiters = self._waiters(digest)
        for waiter in waiters:
            self._send(waiter.reply_to, waiter.op_id, json.dumps({"error": dict(error)}))
        self._waiting.pop(digest, None)
        self._leave_line(digest)
        return len(waiters)

    def _request_again(self, digest: str) -> None:
        waiting = self._waiting.get(digest)
        if waiting is not None and waiting.push is not None and self._waiters(digest):
            waiting.requested_ms = self._now()
            self._push(waiting.push)

    # --- operations ----------------------------------------------------------------------------

    def _close_op(self, op_id: str, op: Op, code: str, message: str, **facts: Any) -> None:
        """Answer an operation that no node will answer: closed, a tombstone for late messages."""
        route = op.record.route
        facts = {"op_id": op_id, "sandbox_id": route.sandbox_id, **facts}
        payload = json.dumps({"error": {"code": code, "message": message, "facts": facts}})
        self._inflight[route.node_id].pop(op_id, None)
        self._busy[route.sandbox_id].pop(op_id, None)
        op.state, op.outcome, op.finished_ms, op.reply = "closed", code, self._now(), payload
        self._send(op.record.reply_to, op_id, payload)
        if op.job:
            self._end_output(op_id, code, job=True)
        self._settle(route)

    def _end_output(self, stream: str, outcome: str, *, job: bool) -> None:
        """The last entry of an output stream; one that has ended stays as it is."""
        if not stream:
            return
        entries = self._outputs.get(stream) or []
        if entries and entries[-1].end is not None:
            return
        last = entries[-1] if entries else Output(0, 0)
        end = Output(last.out_at + len(last.out), last.err_at + len(last.err), end=outcome)
        self._outputs.put(stream, [*entries, end], OUTPUT_KEPT_MS if job else CALL_OUTPUT_KEPT_MS)
        self._arrived.notify_all()

    def _close_not_started(self, op_id: str, op: Op, reason: str) -> None:
        self._close_op(op_id, op, "not_started", f"the operation never began: {reason}", reason=reason)


def where(route: Route) -> dict[str, Any]:
    """What a story tells of a route."""
    return {"node_id": route.node_id, "incarnation": route.incarnation, "epoch": route.epoch}


def blank_place(slot: str) -> str:
    """What stands for a blank sandbox among the places of its node."""
    return f"~{slot}"


def is_blank(member: str) -> bool:
    """Whether this member of a node's places is a blank sandbox."""
    return member.startswith("~")
