"""One thread for every delay of every mock sandbox."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

__all__ = ["Delayed", "later"]


class Delayed:
    """A call that is to come; `cancel` it, or `take` it to be the only one who makes it."""

    __slots__ = ("_call", "_lock")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for exactly one caller, who now decides what happens; the timer will not call any more."""
        with self._lock:
            taken, self._call = self._call is not None, None
            return taken

    def run(self) -> None:
        """Make the call unless somebody took it."""
        call = self._call
        if self.take() and call is not None:
            call()


class _Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Delayed]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, delay_s: float, call: Callable[[], None]) -> Delayed:
        delayed = Delayed(call)
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._order), delayed))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sandfleet-mock", daemon=True)
                self._thread.start()
            self._changed.notify()
        return delayed

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap or self._heap[0][0] > time.monotonic():
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                delayed = heapq.heappop(self._heap)[2]
            delayed.run()


_timers = _Timers()


def later(delay_s: float, call: Callable[[], None]) -> Delayed:
    """Make ``call()`` after ``delay_s`` seconds on the shared thread."""
    return _timers.add(delay_s, call)
