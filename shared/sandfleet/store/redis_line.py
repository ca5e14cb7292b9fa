"""The line of threads that wait for a place."""

from __future__ import annotations

from sandfleet.ids import Identity
from sandfleet.store.base import Parked, Push, Store
from sandfleet.store.codec import parked_entry
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_PARK, _PARKED, _WITHDRAW = map(load, ("park", "parked", "withdraw"))
_LONGEST_PAGE = 1000


class LineMixin(Store):
    """The part of `RedisStore` about the line."""

    _link: Link
    _keys: Keys

    def park(self, identity: Identity, request: str, *, push: Push) -> int:
        args = (identity.digest, identity.user_id or "", request, push.queue, push.message)
        return int(self._link.run(_PARK, *args))

    def serve_line(self) -> bool:
        return bool(self._link.command("HDEL", self._keys.line(), "kicked"))

    def parked(self, *, after: str = "", limit: int = 200) -> list[Parked]:
        found: list[Parked] = []
        limit = min(max(1, limit), _LONGEST_PAGE)
        # A page of those whom nobody waits for any more is empty and yet not the end.
        while len(found) < limit:
            after, rows = self._link.run(_PARKED, f"({after}" if after else "-inf", limit - len(found))
            found += map(parked_entry, rows)
            if not after:
                break
        return found

    def line_length(self) -> int:
        return int(self._link.command("ZCARD", self._keys.parked()))

    def withdraw(self, identity: Identity, op_id: str) -> int:
        return int(self._link.run(_WITHDRAW, identity.digest, op_id))
