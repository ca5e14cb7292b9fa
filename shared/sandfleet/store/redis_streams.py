"""Output streams and background jobs."""

from __future__ import annotations

from typing import Any

from sandfleet.store.base import Output, Pushed, Route, Store
from sandfleet.store.codec import check_reply, ms_of, route_text
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.redis_replies import Readers
from sandfleet.store.scripts import load

_STARTED, _AGAIN, _PUSH = map(load, ("started", "job_again", "push_output"))
_PAGE = 16
#: Nothing but the end comes after this one.
_BEFORE_END = "9007199254740991-0"


class StreamsMixin(Store):
    """The part of `RedisStore` about commands that are followed while they run."""

    _link: Link
    _keys: Keys
    _readers: Readers

    def started(self, op_id: str, route: Route, *, reply: str, lasts_s: float) -> bool:
        check_reply(reply)
        return bool(self._link.run(_STARTED, op_id, route.node_id, route.incarnation, reply, ms_of(lasts_s)))

    def job_again(self, op_id: str, route: Route, *, reply: str, describe: str, lasts_s: float) -> bool:
        check_reply(reply)
        where = (route.sandbox_id, route.node_id, route.incarnation, route_text(route))
        return bool(self._link.run(_AGAIN, op_id, *where, describe, reply, ms_of(lasts_s)))

    def push_output(self, stream: str, output: Output, *, keep_bytes: int, ttl_s: float, anew: bool = False) -> Pushed:
        position = (output.out_at, output.err_at)
        status, at = self._link.run(
            _PUSH, stream, *position, output.out, output.err, keep_bytes, ms_of(ttl_s), int(anew)
        )
        return Pushed(status, *map(int, at.split(",")))

    def read_output(
        self, stream: str, out_at: int, err_at: int, *, block_s: float, reader: str, only_end: bool = False
    ) -> list[Output]:
        after = _BEFORE_END if only_end else f"{out_at + err_at}-1"
        found = self._readers.entries(reader, self._keys.output(stream), after, block_s, count=_PAGE, decode=False)
        return [_output(flat) for _, flat in found]

    def drop_reader(self, reader: str) -> None:
        self._readers.wake(reader)


def _output(flat: list[bytes]) -> Output:
    fields: dict[bytes, Any] = dict(zip(flat[::2], flat[1::2], strict=True))
    out_at, _, err_at = fields[b"a"].decode().partition(",")
    end = fields[b"end"].decode() if b"end" in fields else None
    return Output(int(out_at), int(err_at), fields.get(b"o", b""), fields.get(b"e", b""), end)
