"""The contract of what travels back to clients, and of small shared things; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sandfleet.store.values import Reply, Waiter

__all__ = ["Exchange"]


class Exchange(ABC):
    """Replies, blobs, locks and stories: the part of `Store` about what is handed over."""

    # --- replies -----------------------------------------------------------------------------

    @abstractmethod
    def open_replies(self, client: str, *, ttl_s: float) -> bool:
        """Make sure the client's reply stream exists and lives ``ttl_s`` more; True if it had to be made (again)."""

    @abstractmethod
    def close_replies(self, client: str) -> None:
        """Drop the stream: nobody will read it."""

    @abstractmethod
    def read_replies(self, client: str, cursor: str, *, block_s: float) -> list[Reply]:
        """Entries after ``cursor`` ("0" = from the start), up to 500, waiting up to ``block_s`` for the first. Uses a
        connection of its own: one reader thread per client calls this."""

    @abstractmethod
    def trim_replies(self, client: str, cursor: str) -> None:
        """Drop the entries up to and including ``cursor``: they are handled, by this reader or another."""

    @abstractmethod
    def reply(self, waiter: Waiter, payload: str) -> bool:
        """Append one reply for an acquire outside a transition (errors of the scheduler).

        False if the client is gone.
        """

    # --- blobs: bytes above the inline limit -------------------------------------------------

    @abstractmethod
    def blob_begin(self, blob_id: str, *, client: str, size: int, ttl_s: float) -> None:
        """Reserve ``size`` bytes of the budgets of this client and of the fleet.

        Raises:
            ByteBudgetExceeded: Over a budget, or Redis above 75 % of its ``maxmemory``; carries retry_after_s.
        """

    @abstractmethod
    def blob_put(self, blob_id: str, index: int, chunk: bytes | memoryview) -> None:
        """Store chunk ``index`` with the expiry given at begin (which must have been called)."""

    @abstractmethod
    def blob_get(self, blob_id: str, index: int) -> bytes | None:
        """A chunk, or None if it expired."""

    @abstractmethod
    def blob_drop(self, blob_id: str) -> None:
        """Remove all chunks and give the budget back. Unknown ids are fine."""

    # --- locks and stories -------------------------------------------------------------------

    @abstractmethod
    def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
        """Take or extend a lock that saves work (correctness comes from epochs)."""

    @abstractmethod
    def unlock(self, name: str, token: str) -> None:
        """Give it back if it is still ours."""

    @abstractmethod
    def story(self, key: str) -> list[dict[str, Any]]:
        """The recent transitions of one sandbox or node, oldest first: ``{"at_ms", "event", …}``.

        At most 100, kept a day.
        """
