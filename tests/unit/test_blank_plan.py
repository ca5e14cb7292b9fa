"""Which blank sandboxes a node keeps: the shares of what is wanted, and no start or end too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandfleet_workers.blank_plan import BlankPlan, Demand, blank_plan, blank_targets

KINDS = st.sampled_from(["own", "a", "b", "c", "d"])
DEMAND = st.dictionaries(KINDS, st.builds(Demand, st.integers(1, 50), st.floats(0, 1000)))


def test_without_demand_all_are_of_the_nodes_own_kind() -> None:
    assert blank_targets({}, default="own", size=3) == {"own": 3}
    assert blank_targets({}, default="own", size=0) == {}


def test_what_is_wanted_more_gets_more() -> None:
    demand = {"a": Demand(8, 10.0), "b": Demand(1, 20.0)}
    assert blank_targets(demand, default="own", size=10) == {"a": 8, "b": 1, "own": 1}
    assert blank_targets(demand, default="own", size=2) == {"a": 2}
    assert blank_targets({"a": Demand(1, 10.0)}, default="own", size=1) == {"a": 1}, "the later one wins a tie"


@given(DEMAND, st.integers(0, 20))
def test_targets_always_add_up(demand: dict[str, Demand], size: int) -> None:
    targets = blank_targets(demand, default="own", size=size)
    assert sum(targets.values()) == size
    assert all(count > 0 for count in targets.values())


def test_what_is_being_started_counts() -> None:
    plan = blank_plan({"a": 2, "b": 1}, ready={"1": "a"}, starting={"a": 1}, outdated=frozenset())
    assert plan == BlankPlan(start=("b",))


def test_an_unwanted_kind_makes_room_only_when_room_is_needed() -> None:
    assert blank_plan({"a": 2}, ready={"1": "a", "2": "b"}, starting={}, outdated=frozenset()) == BlankPlan(
        ("a",), ("2",)
    )
    assert blank_plan({"a": 1}, ready={"1": "a", "2": "a"}, starting={}, outdated=frozenset()) == BlankPlan((), ("2",))
    assert (
        blank_plan({"a": 2, "b": 1}, ready={"1": "b", "2": "a"}, starting={"a": 1}, outdated=frozenset()) == BlankPlan()
    )


def test_the_outdated_are_replaced() -> None:
    plan = blank_plan({"a": 2}, ready={"1": "a", "2": "a"}, starting={}, outdated=frozenset("1"))
    assert plan == BlankPlan(("a",), ("1",))


@given(
    DEMAND,
    st.integers(0, 8),
    st.dictionaries(st.integers(0, 20).map(str), KINDS),
    st.dictionaries(KINDS, st.integers(0, 3)),
)
def test_carrying_a_plan_out_leads_to_its_targets_and_stays_there(
    demand: dict[str, Demand], size: int, ready: dict[str, str], starting: dict[str, int]
) -> None:
    targets = blank_targets(demand, default="own", size=size)
    number = 100
    for _ in range(3):
        plan = blank_plan(targets, ready=ready, starting=starting, outdated=frozenset())
        assert set(plan.end) <= set(ready)
        assert len(set(plan.end)) == len(plan.end)
        ready = {slot: kind for slot, kind in ready.items() if slot not in plan.end}
        for kind in [*plan.start, *(kind for kind, count in starting.items() for _ in range(count))]:
            number += 1
            ready[str(number)] = kind
        starting = {}
    counts = {kind: list(ready.values()).count(kind) for kind in set(ready.values())}
    assert counts == targets
    assert blank_plan(targets, ready=ready, starting={}, outdated=frozenset()) == BlankPlan()
