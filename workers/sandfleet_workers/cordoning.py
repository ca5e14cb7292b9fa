"""When a node is to take nothing new because what it creates fails. Pure."""

from __future__ import annotations

__all__ = ["FailureRow"]


class FailureRow:
    """Counts threads whose creations failed in a row.

    Threads, not failures: one whose sandbox can never start is tried again and again, and says nothing about the node.
    Not thread-safe.

    Args:
        limit: How many make a node unfit; 0: none ever do.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._threads: set[str] = set()

    def failed(self, thread: str) -> int:
        """A creation failed; how many threads are in the row if that makes the node unfit, else 0. The row begins
        anew then: an operator who opens the node again trusts it."""
        self._threads.add(thread)
        count = len(self._threads)
        if not self._limit or count < self._limit:
            return 0
        self._threads.clear()
        return count

    def succeeded(self) -> int:
        """A creation succeeded: the row is over. 0, as of `failed`."""
        self._threads.clear()
        return 0
