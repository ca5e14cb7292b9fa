"""Three clocks, passed in wherever time decides something, so that tests can turn them by hand."""

from __future__ import annotations

import sys
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the time is. All in seconds."""

    def now(self) -> float:
        """Unix time: for records that people and other machines read. It may jump."""

    def monotonic(self) -> float:
        """For durations and timeouts. It stands still while the machine is suspended."""

    def boottime(self) -> float:
        """For leases. It goes on while the machine is suspended, so that a sleeper finds its lease lapsed."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment, never backwards."""
        return time.monotonic()

    if sys.platform == "linux":

        def boottime(self) -> float:
            """Seconds since boot, suspension included."""
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    else:

        def boottime(self) -> float:
            """Seconds since some moment; on macOS and Windows the nearest there is."""
            return time.monotonic()
