"""Operations that outlive their node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sandfleet.store.base import Route, Store
from sandfleet.store.codec import route_text
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_REATTACH, _TELL_HOMES = load("reattach"), load("tell_homes")
_MOST = 1000


class ReturningMixin(Store):
    """The part of `RedisStore` for a node that is back."""

    _link: Link

    def reattach(self, op_id: str, old: Route, new: Route) -> bool:
        if replace(old, incarnation=new.incarnation) != new:
            return False
        args = (op_id, route_text(old), new.sandbox_id, new.node_id, new.incarnation, route_text(new))
        return bool(self._link.run(_REATTACH, *args))

    def tell_homes(self, data_id: str, threads: Sequence[tuple[str, int]]) -> int:
        pairs = [part for digest, epoch in threads[:_MOST] for part in (digest, epoch)]
        return int(self._link.run(_TELL_HOMES, data_id, *pairs))
