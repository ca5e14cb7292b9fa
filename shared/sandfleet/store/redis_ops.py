"""Operations: record, claim, finish, cancel."""

from __future__ import annotations

from sandfleet.store.base import Claim, OpRecord, OpView, Push, Recorded, Route, Store
from sandfleet.store.codec import check_reply, ms_of, op_view, parse_route, route_text
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_RECORD, _CLAIM, _FINISH, _CANCEL, _OPS = map(load, ("record", "claim", "finish", "cancel", "ops"))


class OpsMixin(Store):
    """The part of `RedisStore` about operations; the first three methods are every operation's way."""

    _link: Link
    _keys: Keys

    def record(self, op: OpRecord, push: Push | None, *, max_inflight: int = 20_000) -> Recorded:
        route = op.route
        answer = self._link.run(
            _RECORD,
            op.op_id,
            op.kind,
            route.sandbox_id,
            route.node_id,
            route.incarnation,
            route.epoch,
            op.owner,
            op.start_by_ms,
            op.deadline_ms,
            op.reply_to,
            op.describe,
            op.expect,
            1 if op.effect else 0,
            max_inflight,
            push.queue if push else "",
            push.message if push else "",
        )
        status, now = answer[0], answer[1]
        if len(answer) == 2:
            return Recorded(status, now)
        current = parse_route(answer[2]) if answer[2] else None
        if status != "duplicate":
            return Recorded(status, now, current)
        return Recorded(status, now, current, answer[3], answer[4] if len(answer) > 4 else None)

    def claim(self, op_id: str, route: Route) -> Claim:
        status, now = self._link.run(
            _CLAIM, op_id, route.sandbox_id, route.node_id, route.incarnation, route_text(route)
        )
        return Claim(status, now)

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
        node, incarnation = route.node_id, route.incarnation
        args = (op_id, node, incarnation, outcome, reply, ms_of(keep_s), int(only_recorded), stream)
        return bool(self._link.run(_FINISH, *args))

    def cancel(self, op_id: str) -> OpView | None:
        flat = self._link.run(_CANCEL, op_id)
        return self._whole(op_id, dict(zip(flat[::2], flat[1::2], strict=True)))

    def op(self, op_id: str) -> OpView | None:
        return self._whole(op_id, self._link.command("HGETALL", self._keys.op(op_id)))

    def _whole(self, op_id: str, fields: dict[str, str]) -> OpView | None:
        """The view of a record, with its reply, which lies apart if it is big."""
        if not fields:
            return None
        if fields["state"] == "done" and "reply" not in fields:
            fields["reply"] = self._link.command("GET", self._keys.answer(op_id))
        return op_view(op_id, fields)

    def ops(self, *, node_id: str | None = None, limit: int = 200) -> list[OpView]:
        rows = self._link.run(_OPS, node_id or "", max(1, limit))
        views = [view for row in rows if (view := _view(row[0], row[1:])) is not None]
        # Stable: entries of one node arrive in recorded order, which a shared millisecond must not undo.
        return sorted(views, key=lambda op: op.recorded_at_ms)[:limit]

    def queue_length(self, queue: str) -> int:
        return int(self._link.command("LLEN", queue))


def _view(op_id: str, flat: list[str]) -> OpView | None:
    if not flat:
        return None
    return op_view(op_id, dict(zip(flat[::2], flat[1::2], strict=True)))
