"""Whether a node's silence may be taken for its death: not when Redis was away, hung, moved or had its clock set."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Patience"]

log = logging.getLogger("sandfleet.scheduler")


class Patience:
    """Gives every node a full lease to show itself after anything that may have kept it from renewing. Not thread-safe.

    Leases lapse by Redis' clock, so a Redis that hung for a while, or whose clock was set, finds all of them lapsed.

    Args:
        lease_s: How long a node may be silent.
        monotonic: This process' clock; it begins to be patient now, for its own start may follow an outage.
    """

    def __init__(self, lease_s: float, monotonic: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._until = monotonic() + lease_s
        self._offset_s: float | None = None
        self._moves = 0

    @property
    def over(self) -> bool:
        """Whether silence means death now."""
        return self._monotonic() > self._until

    def begin(self, why: str) -> None:
        """Something happened that nodes may have suffered from."""
        if self.over:
            log.warning("reconcile.patient", extra={"why": why, "for_s": self._lease_s})
        self._until = self._monotonic() + self._lease_s

    def look(self, *, asked_at: float, now_ms: int, moves: int = 0) -> None:
        """Judge what the store said a moment ago.

        Args:
            asked_at: When it was asked, by this process' clock.
            now_ms: Its time, told last.
            moves: How often it was found on another server so far.
        """
        told = self._monotonic()
        before, self._offset_s = self._offset_s, now_ms / 1000 - told
        was, self._moves = self._moves, moves
        if told - asked_at > self._lease_s / 4:
            self.begin("Redis hung")
        elif moves != was:
            self.begin("Redis is another server")
        elif before is not None and abs(self._offset_s - before) > self._lease_s / 4:
            self.begin("the clock of Redis was set")
