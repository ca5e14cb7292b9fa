"""Lanes: what must not interleave runs in order, everything else beside it. Pure.

A ticket enters all its lanes at once, each *exclusive* or *shared*. It may run when in every lane all
tickets ahead of it are compatible (shared beside shared). Exclusive lanes are first in, first out. A barrier is
an exclusive ticket in the sandbox's own lane, in which ordinary operations are shared: it waits for
everything before it and holds up everything after it.

Entering several lanes is one step, so two tickets have the same order in all lanes they share and
no deadlock can arise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["LaneFull", "Lanes"]


class LaneFull(Exception):
    """The lane named in ``lane`` holds as many waiting tickets as it may."""

    def __init__(self, lane: str, depth: int) -> None:
        super().__init__(f"lane {lane} already holds {depth} waiting operations")
        self.lane = lane
        self.depth = depth


@dataclass(slots=True)
class _Lane:
    exclusive: bool = False
    shared: int = 0
    waiting: deque[tuple[str, bool]] = field(default_factory=deque)

    def admits(self, exclusive: bool) -> bool:
        return not self.exclusive and not (exclusive and self.shared)

    def take(self, exclusive: bool) -> None:
        if exclusive:
            self.exclusive = True
        else:
            self.shared += 1


@dataclass(slots=True)
class _Ticket:
    lanes: tuple[tuple[str, bool], ...]
    blocked: int = 0


class Lanes:
    """All lanes of a node. Not thread-safe: the pool holds a lock around it.

    Args:
        max_depth: Tickets that may wait in one lane.
    """

    def __init__(self, *, max_depth: int) -> None:
        self.max_depth = max_depth
        self._lanes: dict[str, _Lane] = {}
        self._tickets: dict[str, _Ticket] = {}

    def enter(self, ticket: str, *, exclusive: Iterable[str] = (), shared: Iterable[str] = ()) -> bool:
        """Queue ``ticket``; True if it may run now.

        Raises:
            LaneFull: A lane has too many waiting; the ticket entered none.
            ValueError: The ticket is already in.
        """
        if ticket in self._tickets:
            raise ValueError(f"ticket {ticket} is already in its lanes")
        wanted = tuple([(lane, True) for lane in exclusive] + [(lane, False) for lane in shared])
        for name, _ in wanted:
            lane = self._lanes.get(name)
            if lane is not None and len(lane.waiting) >= self.max_depth:
                raise LaneFull(name, len(lane.waiting))
        entry = self._tickets[ticket] = _Ticket(wanted)
        for name, is_exclusive in wanted:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = _Lane()
            if not lane.waiting and lane.admits(is_exclusive):
                lane.take(is_exclusive)
            else:
                lane.waiting.append((ticket, is_exclusive))
                entry.blocked += 1
        return entry.blocked == 0

    def leave(self, ticket: str) -> list[str]:
        """Take ``ticket`` out, whether it ran or waited; the tickets that may run now, in their order."""
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            return []
        ready: list[str] = []
        for name, is_exclusive in entry.lanes:
            lane = self._lanes[name]
            if entry.blocked and (ticket, is_exclusive) in lane.waiting:
                lane.waiting.remove((ticket, is_exclusive))
            elif is_exclusive:
                lane.exclusive = False
            else:
                lane.shared -= 1
            self._grant(lane, ready)
            if not lane.waiting and not lane.exclusive and not lane.shared:
                del self._lanes[name]
        return ready

    def _grant(self, lane: _Lane, ready: list[str]) -> None:
        while lane.waiting and lane.admits(lane.waiting[0][1]):
            ticket, is_exclusive = lane.waiting.popleft()
            lane.take(is_exclusive)
            entry = self._tickets[ticket]
            entry.blocked -= 1
            if entry.blocked == 0:
                ready.append(ticket)

    def runs(self, ticket: str) -> bool:
        """Whether the ticket is in and may run."""
        entry = self._tickets.get(ticket)
        return entry is not None and entry.blocked == 0

    def waiting(self) -> list[str]:
        """The tickets that may not run yet, in the order they came."""
        return [ticket for ticket, entry in self._tickets.items() if entry.blocked]

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def lane_count(self) -> int:
        """How many lanes have a ticket in them."""
        return len(self._lanes)

    def depth(self, lane: str) -> int:
        """How many tickets wait in the lane."""
        found = self._lanes.get(lane)
        return len(found.waiting) if found else 0
