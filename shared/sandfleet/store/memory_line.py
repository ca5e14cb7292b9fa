"""The line of threads that wait for a place, in memory: the twin of `sandfleet.store.redis_line`."""

from __future__ import annotations

import bisect

from sandfleet.ids import Identity
from sandfleet.store.base import Parked, Push, Store
from sandfleet.store.memory_state import InLine
from sandfleet.store.memory_steps import MemorySteps

_LONGEST_PAGE = 1000


class MemoryLine(MemorySteps, Store):
    """The part of `MemoryStore` about the line."""

    def park(self, identity: Identity, request: str, *, push: Push) -> int:
        with self._lock:
            digest, user = identity.digest, identity.user_id or ""
            if not self._awaited(digest) or self._thread_state(digest)[0] is not None:
                return 0
            self._serve = push
            known = self._in_line.get(digest)
            if known is not None:
                known.request = request
            else:
                turn = max(self._reached, max(self._turns[user].values(), default=0)) + 1
                at = bisect.bisect_left(self._order, ((turn + 1, 0), ""))
                last = self._order[at - 1][0] if at else (0, 0)
                stands = (turn, last[1] + 1 if last[0] == turn else 0)
                self._order.insert(at, (stands, digest))
                self._turns[user][digest] = turn
                self._in_line[digest] = InLine(user, stands, request, self._now())
            self._kick()
            return len(self._order)

    def serve_line(self) -> bool:
        with self._lock:
            kicked, self._kicked_ms = self._kicked_ms is not None, None
            return kicked

    def parked(self, *, after: str = "", limit: int = 200) -> list[Parked]:
        with self._lock:
            found: list[Parked] = []
            limit, start = min(max(1, limit), _LONGEST_PAGE), 0
            if after:
                turn, _, number = after.partition(".")
                start = bisect.bisect_left(self._order, ((int(turn), int(number) + 1), ""))
            while len(found) < limit and start < len(self._order):
                digest = self._order[start][1]
                if not self._awaited(digest):
                    self._leave_line(digest)
                    continue
                one = self._in_line[digest]
                cursor = f"{one.stands[0]}.{one.stands[1]}"
                found.append(Parked(digest, one.user or None, one.request, cursor, one.since_ms))
                start += 1
            return found

    def line_length(self) -> int:
        with self._lock:
            return len(self._order)

    def withdraw(self, identity: Identity, op_id: str) -> int:
        with self._lock:
            digest, now = identity.digest, self._now()
            one, waiting = self._in_line.get(digest), self._waiting.get(digest)
            position = bisect.bisect_left(self._order, (one.stands, digest)) + 1 if one else 0
            if waiting is not None:
                waiting.parked.pop(op_id, None)
                waiting.until_ms = max((until for _, until in waiting.parked.values() if until > now), default=0)
            if waiting is None or not waiting.until_ms:
                self._waiting.pop(digest, None)
                self._leave_line(digest)
            return position
