"""A clock that goes only when a test says so."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """All three clocks of `sandfleet.clock.Clock`, turned by hand. Thread-safe.

    Args:
        now: Where unix time begins, in seconds.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 1000.0
        self._boottime = 1000.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Unix time in seconds."""
        return self._now

    def monotonic(self) -> float:
        """Seconds of `advance` so far."""
        return self._monotonic

    def boottime(self) -> float:
        """Seconds of `advance` and `suspend` so far."""
        return self._boottime

    def advance(self, seconds: float) -> None:
        """Let all clocks go on.

        Raises:
            ValueError: Backwards; only unix time can jump (see `jump`).
        """
        if seconds < 0:
            raise ValueError("time does not go back; use jump() for unix time")
        with self._lock:
            self._now += seconds
            self._monotonic += seconds
            self._boottime += seconds

    def suspend(self, seconds: float) -> None:
        """The machine slept: unix time and boot time went on, the monotonic clock did not."""
        with self._lock:
            self._now += seconds
            self._boottime += seconds

    def jump(self, seconds: float) -> None:
        """Somebody set the wall clock, forwards or (negative) backwards."""
        with self._lock:
            self._now += seconds
