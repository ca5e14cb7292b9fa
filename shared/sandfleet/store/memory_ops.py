"""Operations in memory: the twin of `sandfleet.store.redis_ops`."""

from __future__ import annotations

from dataclasses import replace

from sandfleet.model import NodeState
from sandfleet.store.base import Claim, OpRecord, OpView, Push, Recorded, Route, Store, wants_errors_only
from sandfleet.store.codec import check_reply, ms_of
from sandfleet.store.memory_state import DAY_MS, Op
from sandfleet.store.memory_steps import MemorySteps

_OP_GRACE_MS = 600_000
_EFFECT_GRACE_MS = 3_600_000
_LONGEST_MS = 2 * DAY_MS
_BIG_REPLY_BYTES = 4096
_BUSY_GRACE_MS = 30_000


class MemoryOps(MemorySteps, Store):
    """The part of `MemoryStore` about operations."""

    def record(self, op: OpRecord, push: Push | None, *, max_inflight: int = 20_000) -> Recorded:
        with self._lock:
            now, route = self._now(), op.route
            known = self._ops.get(op.op_id)
            if known is not None:
                return self._again(known, op)
            refused = self._why_not(op, max_inflight)
            if refused is not None:
                return refused
            op = replace(op, deadline_ms=min(op.deadline_ms, now + _LONGEST_MS))
            grace = _EFFECT_GRACE_MS if op.effect else _OP_GRACE_MS
            ttl = max(op.deadline_ms, now) + grace - now
            self._ops.put(op.op_id, Op(op, now), ttl)
            self._inflight[route.node_id][op.op_id] = None
            if op.expect == "live":
                self._busy[route.sandbox_id][op.op_id] = op.deadline_ms + _BUSY_GRACE_MS
                self._warm[route.node_id].pop(route.sandbox_id, None)
                self._use(route.sandbox_id)
            if push is not None:
                self._push(push)
            return Recorded("recorded", now)

    def _again(self, known: Op, op: OpRecord) -> Recorded:
        now, before = self._now(), known.record
        same = (before.route.sandbox_id, before.kind, before.owner) == (op.route.sandbox_id, op.kind, op.owner)
        if not same:
            return Recorded("conflict", now)
        return Recorded("duplicate", now, before.route, known.state, self._reply(op.op_id, known))

    def _reply(self, op_id: str, op: Op) -> str | None:
        return self._answers.get(op_id) if op.reply is None and op.state == "done" else op.reply

    def _why_not(self, op: OpRecord, max_inflight: int) -> Recorded | None:
        now, route = self._now(), op.route
        if op.expect != "node":
            sandbox = self._sandboxes.get(route.sandbox_id)
            if sandbox is None or sandbox.owner != op.owner:
                return Recorded("not_found", now)
            state, current = str(sandbox.state), sandbox.route
            if state != op.expect and (state != "live" or current == route):
                return Recorded(state, now, current)
            if current != route:
                return Recorded("moved", now, current)
        node = self._nodes.get(route.node_id)
        down = self._leases.get(route.node_id) != route.incarnation
        if down or node is None or node.state == NodeState.GONE:
            return Recorded("node_down", now, route)
        if node.state == NodeState.DRAINING and op.expect != "stopping":
            return Recorded("draining", now, route)
        if node.state == NodeState.AWAY:
            return Recorded("away", now, route)
        if len(self._inflight[route.node_id]) >= max_inflight:
            return Recorded("busy", now, route)
        return None

    def claim(self, op_id: str, route: Route) -> Claim:
        with self._lock:
            now, op = self._now(), self._ops.get(op_id)
            if op is None:
                return Claim("gone", now)
            if op.state in ("done", "closed"):
                return Claim("closed", now)
            if op.record.route != route:
                return Claim("stale", now)
            if op.state == "claimed":
                return Claim("already", now)
            sandbox = self._sandboxes.get(route.sandbox_id)
            if (
                self._leases.get(route.node_id) != route.incarnation
                or sandbox is None
                or sandbox.route != route
                or str(sandbox.state) != op.record.expect
            ):
                return Claim("stale", now)
            if op.record.start_by_ms < now:
                return Claim("late", now)
            op.state, op.claimed_ms = "claimed", now
            return Claim("claimed", now)

    def finish(
        self,
        op_id: str,
        route: Route,
        *,
        outcome: str,
        reply: str,
        keep_s: float = 60.0,
        only_recorded: bool = False,
        stream: str = "",
    ) -> bool:
        check_reply(reply)
        with self._lock:
            op = self._ops.get(op_id)
            if op is None:
                self._end_output(stream, outcome, job=True)
            if op is None or op.state in ("done", "closed"):
                return False
            at = op.record.route
            same = (at.node_id, at.incarnation) == (route.node_id, route.incarnation)
            if op.state == "claimed" and (only_recorded or not same):
                return False
            self._inflight[at.node_id].pop(op_id, None)
            was_busy = self._busy[at.sandbox_id].pop(op_id, None) is not None
            op.state, op.outcome, op.finished_ms = "done", outcome, self._now()
            if op.record.effect and len(reply.encode()) > _BIG_REPLY_BYTES:
                op.reply = None
                self._answers.put(op_id, reply, ms_of(keep_s))
            else:
                op.reply = reply
            if not op.record.effect:
                self._ops.touch(op_id, ms_of(keep_s))
            if outcome != "ok" or not wants_errors_only(op.record.reply_to):
                self._send(op.record.reply_to, op_id, reply)
            self._end_output(stream, outcome, job=op.job)
            if was_busy:
                self._use(at.sandbox_id)
                self._settle(at)
            return True

    def _use(self, sandbox_id: str) -> None:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            sandbox.used_ms = self._now()

    def cancel(self, op_id: str) -> OpView | None:
        with self._lock:
            op = self._ops.get(op_id)
            if op is not None and op.state == "recorded":
                self._close_op(op_id, op, "cancelled", "the operation was cancelled before it began")
            return self.op(op_id)

    def op(self, op_id: str) -> OpView | None:
        with self._lock:
            op = self._ops.get(op_id)
            if op is None:
                return None
            record, route = op.record, op.record.route
            return OpView(
                op_id=op_id,
                kind=record.kind,
                sandbox_id=route.sandbox_id,
                node_id=route.node_id,
                incarnation=route.incarnation,
                state=op.state,
                outcome=op.outcome,
                describe=record.describe,
                recorded_at_ms=op.at_ms,
                claimed_at_ms=op.claimed_ms,
                finished_at_ms=op.finished_ms,
                deadline_ms=record.deadline_ms,
                reply=self._reply(op_id, op),
                reply_to=record.reply_to,
                job=op.job,
                owner=record.owner,
            )

    def ops(self, *, node_id: str | None = None, limit: int = 200) -> list[OpView]:
        with self._lock:
            found = []
            for name in [node_id] if node_id else sorted(self._nodes):
                inflight = self._inflight[name]
                for op_id in list(inflight):
                    if (view := self.op(op_id)) is not None:
                        found.append(view)
                    else:
                        del inflight[op_id]
        return sorted(found, key=lambda op: op.recorded_at_ms)[:limit]

    def queue_length(self, queue: str) -> int:
        return len(self.queues.get(queue, ()))
