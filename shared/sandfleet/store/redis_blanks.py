"""The places of blank sandboxes."""

from __future__ import annotations

from sandfleet.store.base import Store
from sandfleet.store.codec import ms_of
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_BEGIN, _READY, _GONE = map(load, ("begin_blank", "blank_ready", "blank_gone"))


class BlanksMixin(Store):
    """The part of `RedisStore` about blank sandboxes."""

    _link: Link
    _keys: Keys

    def begin_blank(self, node_id: str, incarnation: str, slot: str, *, expires_s: float, reserve_free: int) -> bool:
        return bool(self._link.run(_BEGIN, node_id, incarnation, slot, ms_of(expires_s), reserve_free))

    def blank_ready(self, node_id: str, incarnation: str, slot: str, *, spec_digest: str, again: bool = False) -> bool:
        return bool(self._link.run(_READY, node_id, incarnation, slot, spec_digest, int(again)))

    def blank_gone(self, node_id: str, incarnation: str, slot: str) -> bool:
        return bool(self._link.run(_GONE, node_id, incarnation, slot))

    def blanks(self, node_id: str) -> dict[str, str]:
        flat = self._link.command("HGETALL", self._keys.blanks(node_id))
        return flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
