"""Ages by a clock that is set: the store's, which may jump ahead and make everything look old. Pure."""

from __future__ import annotations

from dataclasses import replace

from sandfleet.store.values import Swept

__all__ = ["ClockSteps"]

#: A pause of a node looks like nothing here, for its own clock counts it too; less is drift, or a slow answer.
_LEAST_MS = 5000
_KEPT = 20


class ClockSteps:
    """Notes when the store's clock jumped ahead, and tells times of before as if it always had been where it is now.

    What jumps back only makes things look younger than they are, until the clock has caught up.
    """

    def __init__(self) -> None:
        self._offset_ms: int | None = None
        #: Where each jump went to, and how far it was.
        self._steps: list[tuple[int, int]] = []

    def look(self, now_ms: int, own_ms: int) -> int:
        """Compare the store's time with this machine's own; how far it jumped ahead since the last look, 0 if not.

        Args:
            own_ms: Of a clock that nobody sets and that counts pauses.
        """
        offset_ms = now_ms - own_ms
        before, self._offset_ms = self._offset_ms, offset_ms
        if before is None or offset_ms - before < _LEAST_MS:
            return 0
        self._steps = [*self._steps, (now_ms, offset_ms - before)][-_KEPT:]
        return offset_ms - before

    def of_now(self, swept: Swept) -> Swept:
        """A sandbox as if all that was noted of it had been noted by the clock of now."""
        if not self._steps:
            return swept
        warm = swept.warm_since_ms
        return replace(
            swept,
            created_ms=self._moved(swept.created_ms),
            used_ms=self._moved(swept.used_ms),
            warm_since_ms=None if warm is None else self._moved(warm),
        )

    def _moved(self, noted_ms: int) -> int:
        for to_ms, by_ms in self._steps:
            # Between two looks a second passes, so what was noted just after the jump may be moved too: it only looks
            # younger.
            if noted_ms < to_ms - _LEAST_MS / 2:
                noted_ms += by_ms
        return noted_ms
