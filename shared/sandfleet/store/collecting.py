"""The contract of collecting what nobody will remove sooner; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Collecting", "Leftover"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in the store that may be nobody's. ``kind`` is one of

    lost: the record of a lost sandbox · node: the record of a node that is gone, and what is kept by its id ·
    marks: who is in a sandbox that has no record · chunk: a piece of a blob that has no head, as ``blob:index``.
    """

    kind: str
    id: str


class Collecting(ABC):
    """The part of `Store` for ``sandfleet gc``. Everything it removes would expire by itself, later."""

    @abstractmethod
    def collect(self, candidates: Sequence[Leftover], *, remove: bool, older_than_s: float = 3600.0) -> list[Leftover]:
        """Those of the candidates (at most 1000) that are leftovers indeed; with ``remove`` each is dropped in the
        same step as it is found to be one, so that nothing in use is ever touched.

        Args:
            older_than_s: A node counts only that long after it renewed its lease for the last time: one that was
                paused comes back under its record.
        """
