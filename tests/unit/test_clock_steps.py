"""Ages of sandboxes by a store whose clock is set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandfleet.store.values import Swept
from sandfleet_workers.clock_steps import ClockSteps


def swept(created: int, used: int, warm: int | None = None) -> Swept:
    return Swept("s", created, used, warm, busy=False)


def test_what_was_noted_before_a_jump_ahead_has_the_age_it_had() -> None:
    steps = ClockSteps()
    assert steps.look(1_000_000, 0) == 0
    assert steps.look(1_001_000, 1000) == 0
    assert steps.look(1_002_000 + 7_200_000, 2000) == 7_200_000
    moved = steps.of_now(swept(900_000, 1_001_500, 1_001_600))
    assert (moved.created_ms, moved.used_ms, moved.warm_since_ms) == (8_100_000, 8_201_500, 8_201_600)
    later = swept(8_203_000, 8_204_000)
    assert steps.of_now(later) == later


def test_a_clock_that_only_drifts_and_a_node_that_was_paused_change_nothing() -> None:
    steps = ClockSteps()
    for n in range(100):
        assert steps.look(n * 1100, n * 1000) == 0
    assert steps.look(10_000_000, 10_000_000 - 10_890) == 0
    assert steps.of_now(swept(5, 6, 7)) == swept(5, 6, 7)


@given(st.lists(st.integers(-10_000_000, 10_000_000), max_size=8), st.integers(1000, 10_000_000))
def test_nothing_is_ever_taken_for_older_than_it_is(jumps: list[int], age_ms: int) -> None:
    steps, clock, own = ClockSteps(), 100_000_000, 0
    steps.look(clock, own)
    noted = swept(clock, clock)
    for jump in jumps:
        own += 1000
        clock += 1000 + jump
        steps.look(clock, own)
    clock, own = clock + age_ms, own + age_ms
    slack_ms = 5000 * (len(jumps) + 1)  # smaller jumps are not seen
    assert clock - steps.of_now(noted).used_ms <= own + slack_ms
