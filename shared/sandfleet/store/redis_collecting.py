"""Collecting what nobody will remove sooner."""

from __future__ import annotations

from collections.abc import Sequence

from sandfleet.store.base import Store
from sandfleet.store.collecting import Leftover
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

__all__ = ["CollectingMixin"]

_COLLECT = load("collect")
_MOST = 1000


class CollectingMixin(Store):
    """The part of `RedisStore` for ``sandfleet gc``."""

    _link: Link

    def collect(self, candidates: Sequence[Leftover], *, remove: bool, older_than_s: float = 3600.0) -> list[Leftover]:
        pairs = [text for candidate in candidates[:_MOST] for text in (candidate.kind, candidate.id)]
        flat = self._link.run(_COLLECT, int(remove), round(older_than_s * 1000), *pairs)
        return [Leftover(kind, found) for kind, found in zip(flat[::2], flat[1::2], strict=True)]
