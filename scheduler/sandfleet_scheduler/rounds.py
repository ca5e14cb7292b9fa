"""The pause of plain calls that go round: their thread stands in line, and no thread of ours waits with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sandfleet.replies import Pending, ReplyReader

__all__ = ["Rounds"]

#: A call that was answered comes round again within seconds; one that does not has gone to another scheduler.
_FRESH_S = 5.0
_KEPT = 10_000


class Rounds:
    """Lets those who go round rest, but not while one of them was answered: it is somewhere behind the others in the
    queue, and holds a sandbox meanwhile. Thread-safe.

    Args:
        reader: Gives the reader of the stream that the answers come to.
        pause_s: How long each rests on a round.
    """

    def __init__(self, reader: Callable[[], ReplyReader], *, pause_s: float) -> None:
        self._reader = reader
        self._pause_s = pause_s
        self._watched: dict[str, Pending] = {}
        self._answered: dict[str, float] = {}
        self._changed = threading.Condition()

    def rest(self, waiter_id: str) -> None:
        """Rest for a moment on behalf of a waiter; less, when somebody is answered."""
        with self._changed:
            known = waiter_id in self._watched
        if not known:
            self._watch(waiter_id)
        with self._changed:
            oldest = time.monotonic() - _FRESH_S
            self._answered = {one: at for one, at in self._answered.items() if at > oldest}
            if not self._answered:
                self._changed.wait(self._pause_s)

    def over(self, waiter_id: str) -> None:
        """The waiter waits no more, whatever it came to."""
        with self._changed:
            self._answered.pop(waiter_id, None)
            pending = self._watched.pop(waiter_id, None)
        if pending is not None:
            self._reader().forget(waiter_id, pending)

    def _watch(self, waiter_id: str) -> None:
        pending = self._reader().expect(waiter_id, recorded=False)
        with self._changed:
            self._watched[waiter_id] = pending
            stale = next(iter(self._watched)) if len(self._watched) > _KEPT else None
        pending.forward(lambda _payload: self._answer(waiter_id))
        if stale is not None:
            self.over(stale)

    def _answer(self, waiter_id: str) -> None:
        with self._changed:
            self._watched.pop(waiter_id, None)
            self._answered[waiter_id] = time.monotonic()
            self._changed.notify_all()
