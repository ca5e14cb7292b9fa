"""Which sandboxes a node ends by itself, and when it trusts itself no more."""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet.store.values import Swept
from sandfleet_workers.cordoning import FailureRow
from sandfleet_workers.reaping import Ending, reaper_plan

NOW = 10_000_000


def sandbox(
    *, age_s: float = 100, unused_s: float = 0, warm_s: float | None = None, busy: bool = False, name: str = "s"
) -> Swept:
    warm_since_ms = None if warm_s is None else NOW - int(warm_s * 1000)
    return Swept(name, NOW - int(age_s * 1000), NOW - int(unused_s * 1000), warm_since_ms, busy)


def plan(*swept: Swept, **timeouts: Any) -> list[Ending]:
    none = {"idle_timeout_s": 0.0, "active_idle_timeout_s": 0.0, "max_age_s": 0.0}
    return reaper_plan(swept, now_ms=NOW, **{**none, **timeouts})


def test_a_sandbox_that_was_warm_for_too_long_ends_if_it_still_is() -> None:
    old, young = sandbox(warm_s=61, name="old"), sandbox(warm_s=60, name="young")
    assert plan(old, young, idle_timeout_s=60) == [Ending("old", "idle", if_warm_before_ms=NOW - 60_000)]


def test_a_held_sandbox_that_nobody_used_for_too_long_ends_if_it_is_not_used_by_then() -> None:
    old, young = sandbox(unused_s=61, name="old"), sandbox(unused_s=60, name="young")
    [ending] = plan(old, young, active_idle_timeout_s=60)
    assert ending == Ending("old", "held but not used", if_idle_before_ms=NOW - 60_000)


def test_a_warm_sandbox_has_its_own_timeout() -> None:
    assert plan(sandbox(warm_s=70, unused_s=70), active_idle_timeout_s=60) == []
    assert plan(sandbox(unused_s=70), idle_timeout_s=60) == []


def test_a_sandbox_that_is_too_old_ends_held_or_warm_but_not_under_an_operation() -> None:
    held, warm, busy = (
        sandbox(age_s=61, name="held"),
        sandbox(age_s=61, warm_s=0, name="warm"),
        sandbox(age_s=61, busy=True, name="busy"),
    )
    assert [ending.sandbox_id for ending in plan(held, warm, busy, max_age_s=60)] == ["held", "warm"]
    assert plan(held, max_age_s=60)[0].if_idle_before_ms == NOW
    assert plan(held, max_age_s=62) == []


def test_an_operation_that_runs_for_long_is_use() -> None:
    assert plan(sandbox(unused_s=9999, busy=True), active_idle_timeout_s=60, max_age_s=60) == []


def test_each_is_ended_once_and_for_one_reason() -> None:
    everything = {"idle_timeout_s": 1.0, "active_idle_timeout_s": 1.0, "max_age_s": 1.0}
    endings = plan(sandbox(warm_s=50, unused_s=50), sandbox(unused_s=50, name="t"), **everything)
    assert [(one.sandbox_id, one.reason) for one in endings] == [("s", "idle"), ("t", "older than its maximum age")]
    assert all((one.if_warm_before_ms is None) != (one.if_idle_before_ms is None) for one in endings)


@pytest.mark.parametrize("swept", [sandbox(age_s=1e6, unused_s=1e6), sandbox(age_s=1e6, warm_s=1e6)])
def test_a_timeout_of_zero_ends_nothing(swept: Swept) -> None:
    assert plan(swept) == []


# --- a node whose creations fail -------------------------------------------------------------------------


def test_as_many_threads_in_a_row_make_a_node_unfit() -> None:
    row = FailureRow(3)
    assert [row.failed(thread) for thread in ("a", "b", "c")] == [0, 0, 3]


def test_one_thread_that_can_never_start_says_nothing_about_the_node() -> None:
    row = FailureRow(3)
    assert [row.failed("a") for _ in range(20)] == [0] * 20
    assert [row.failed("b"), row.failed("a")] == [0, 0]


def test_a_success_ends_the_row() -> None:
    row = FailureRow(2)
    assert row.failed("a") == 0
    row.succeeded()
    assert row.failed("b") == 0
    assert row.failed("c") == 2


def test_the_row_begins_anew_when_it_was_told() -> None:
    row = FailureRow(2)
    assert [row.failed(thread) for thread in "abcd"] == [0, 2, 0, 2]


def test_a_limit_of_zero_is_never_reached() -> None:
    row = FailureRow(0)
    assert {row.failed(str(number)) for number in range(100)} == {0}
