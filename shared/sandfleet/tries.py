"""How often a call is sent again that is known not to have begun. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sandfleet.errors import Busy, NotStarted
from sandfleet.ids import resend_id
from sandfleet.refusals import is_passing

__all__ = ["Tries"]

_RESENDS = 4
_LONGEST_PAUSE_S = 0.5


@dataclass(slots=True)
class Tries:
    """The tries of one call. While its node is on its way back nothing but the caller's patience limits them.

    Attributes:
        recorded: The last one was recorded, so its op id is used up.
    """

    recorded: bool = False
    _ids: int = 0
    _resends: int = 0
    _passes: int = 0

    def pause_s(self, error: NotStarted | Busy) -> float | None:
        """How long to wait before the next one, in seconds; None when there is to be none."""
        told_s = error.retry_after_s or 0.0
        if is_passing(error):
            self._passes += 1
            return max(told_s, _growing_s(self._passes))
        if self._resends == _RESENDS:
            return None
        self._resends += 1
        return told_s or _growing_s(self._resends - 1)

    def next_id(self, op_id: str) -> str:
        """The next op id of the call that began with ``op_id``."""
        self._ids += 1
        return resend_id(op_id, self._ids)


def _growing_s(number: int) -> float:
    return min(0.05 * (1 << min(number, 10)), _LONGEST_PAUSE_S)
