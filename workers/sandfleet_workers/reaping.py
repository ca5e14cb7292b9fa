"""Which of its sandboxes a node ends by itself, and when. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sandfleet.store.values import Swept

__all__ = ["Ending", "reaper_plan"]


@dataclass(frozen=True, slots=True)
class Ending:
    """A sandbox that is to be ended, on a condition that `Store.begin_stop` checks once more, atomically: somebody may
    have come since it was looked at. Exactly one of the two is set."""

    sandbox_id: str
    reason: str
    if_warm_before_ms: int | None = None
    if_idle_before_ms: int | None = None


def reaper_plan(
    swept: Iterable[Swept], *, now_ms: int, idle_timeout_s: float, active_idle_timeout_s: float, max_age_s: float
) -> list[Ending]:
    """What to end now, in the order given; a timeout of 0 ends nothing.

    Args:
        swept: The node's live sandboxes.
        now_ms: Store time.
        idle_timeout_s: Warm ones end when nobody was in them for longer than this.
        active_idle_timeout_s: Held ones end when they were not used for longer than this: a client that lives may have
            forgotten them.
        max_age_s: Those that exist for longer end as soon as no operation is in them, held or not.
    """
    plan = []
    for one in swept:
        if idle_timeout_s and one.warm_since_ms is not None:
            before_ms = now_ms - int(idle_timeout_s * 1000)
            if one.warm_since_ms < before_ms:
                plan.append(Ending(one.sandbox_id, "idle", if_warm_before_ms=before_ms))
                continue
        if one.busy:
            continue
        if max_age_s and one.created_ms < now_ms - int(max_age_s * 1000):
            plan.append(Ending(one.sandbox_id, "older than its maximum age", if_idle_before_ms=now_ms))
        elif active_idle_timeout_s and one.warm_since_ms is None:
            before_ms = now_ms - int(active_idle_timeout_s * 1000)
            if one.used_ms < before_ms:
                plan.append(Ending(one.sandbox_id, "held but not used", if_idle_before_ms=before_ms))
    return plan
