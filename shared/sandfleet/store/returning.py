"""The contract of operations that outlive their node; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sandfleet.store.values import Route

__all__ = ["Returning"]


class Returning(ABC):
    """The part of `Store` for a node that is back and holds sandboxes of its earlier incarnation again."""

    @abstractmethod
    def reattach(self, op_id: str, old: Route, new: Route) -> bool:
        """A claimed operation is the new incarnation's, which answers it from now on as if it had claimed it itself.

        Its sandbox must have been adopted before (`Store.adopt`), so that ``new`` is its route. The record, its busy
        mark and its place among the operations in flight stay; it stands behind all of earlier incarnations there, so
        that `Store.close_incarnation` goes past it. False (nothing done): it is not claimed on the route ``old``, the
        routes differ in more than the incarnation, or ``new`` is not that of a live sandbox whose node has its lease.
        """

    @abstractmethod
    def tell_homes(self, data_id: str, threads: Sequence[tuple[str, int]]) -> int:
        """Say whose data lies on a data root: it becomes the home of those threads that have none here, or one that was
        told as well and had an older owner. A store that lost its data, or forgot a thread that came back after a
        month, would let its next sandbox begin empty elsewhere. Gives how many homes that made.

        Args:
            threads: Digests of identities, with the epoch of the last owner there (0: unknown); at most 1000.
        """
