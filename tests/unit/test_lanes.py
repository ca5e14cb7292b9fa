"""Lanes: what must not interleave runs in order, everything else beside it."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandfleet_workers.lanes import LaneFull, Lanes


def test_the_first_ticket_of_a_lane_runs_and_the_second_waits_for_it() -> None:
    lanes = Lanes(max_depth=10)
    assert lanes.enter("a", exclusive=["x"]) is True
    assert lanes.enter("b", exclusive=["x"]) is False
    assert lanes.runs("a")
    assert not lanes.runs("b")
    assert lanes.leave("a") == ["b"]
    assert lanes.runs("b")


def test_an_exclusive_lane_is_first_in_first_out() -> None:
    lanes = Lanes(max_depth=100)
    order = [f"t{n}" for n in range(20)]
    for ticket in order:
        lanes.enter(ticket, exclusive=["x"])
    ran = [order[0]]
    while (ready := lanes.leave(ran[-1])) != []:
        ran += ready
    assert ran == order


def test_tickets_of_different_lanes_run_beside_each_other() -> None:
    lanes = Lanes(max_depth=10)
    assert lanes.enter("a", exclusive=["x"])
    assert lanes.enter("b", exclusive=["y"])
    assert lanes.enter("c")


def test_shared_tickets_run_beside_each_other() -> None:
    lanes = Lanes(max_depth=10)
    assert all(lanes.enter(f"r{n}", shared=["x"]) for n in range(5))


def test_a_barrier_waits_for_everything_before_it_and_holds_up_everything_after_it() -> None:
    lanes = Lanes(max_depth=10)
    assert lanes.enter("before-1", exclusive=["s/shell"], shared=["s"])
    assert lanes.enter("before-2", shared=["s"])
    assert not lanes.enter("barrier", exclusive=["s"])
    assert not lanes.enter("after-1", shared=["s"])
    assert not lanes.enter("after-2", exclusive=["s/files"], shared=["s"])
    assert lanes.leave("before-1") == []
    assert lanes.leave("before-2") == ["barrier"]
    assert lanes.leave("barrier") == ["after-1", "after-2"]


def test_a_barrier_of_one_sandbox_does_not_touch_another() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", shared=["s1"])
    lanes.enter("barrier", exclusive=["s1"])
    assert lanes.enter("b", shared=["s2"])


def test_a_ticket_of_several_lanes_waits_for_all_of_them() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", exclusive=["x"])
    lanes.enter("b", exclusive=["y"])
    assert not lanes.enter("both", exclusive=["x", "y"])
    assert lanes.leave("a") == []
    assert lanes.leave("b") == ["both"]


def test_a_waiting_ticket_that_leaves_lets_those_behind_it_pass() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("reader-1", shared=["s"])
    lanes.enter("barrier", exclusive=["s"])
    lanes.enter("reader-2", shared=["s"])
    assert lanes.leave("barrier") == ["reader-2"]


def test_a_ticket_that_leaves_while_it_waits_gives_back_the_lanes_it_already_had() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", exclusive=["x"])
    lanes.enter("both", exclusive=["x", "y"])
    lanes.enter("c", exclusive=["y"])
    assert lanes.leave("both") == ["c"]
    assert lanes.leave("a") == []


def test_a_ticket_that_nobody_knows_leaves_without_effect() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", exclusive=["x"])
    assert lanes.leave("nobody") == []
    assert lanes.runs("a")
    assert not lanes.runs("nobody")


def test_a_ticket_cannot_enter_twice() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", exclusive=["x"])
    with pytest.raises(ValueError, match="already"):
        lanes.enter("a", exclusive=["y"])


def test_a_full_lane_refuses_and_the_ticket_entered_none_of_its_lanes() -> None:
    lanes = Lanes(max_depth=2)
    for ticket in ("runs", "waits-1", "waits-2"):
        lanes.enter(ticket, exclusive=["x"])
    with pytest.raises(LaneFull) as refused:
        lanes.enter("one too many", exclusive=["free", "x"])
    assert refused.value.lane == "x"
    assert refused.value.depth == 2
    assert "one too many" not in lanes
    assert lanes.enter("other", exclusive=["free"]), "the refused ticket left something in the lane it could have had"


def test_lanes_that_nobody_is_in_are_forgotten() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("a", exclusive=["x"], shared=["s"])
    lanes.enter("b", exclusive=["x"], shared=["s"])
    assert lanes.depth("x") == 1
    lanes.leave("b")
    lanes.leave("a")
    assert len(lanes) == 0
    assert lanes._lanes == {}
    assert lanes.depth("x") == 0


def test_waiting_tickets_are_told_in_the_order_they_came() -> None:
    lanes = Lanes(max_depth=10)
    lanes.enter("runs", exclusive=["x", "y"])
    for ticket in ("first", "second", "third"):
        lanes.enter(ticket, exclusive=["y" if ticket == "second" else "x"])
    assert lanes.waiting() == ["first", "second", "third"]


NAMES = ("s", "s/files", "s/shell", "t")


class LanesMachine(RuleBasedStateMachine):
    """Any mix of entering and leaving, judged by what the docstring promises and by nothing of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = Lanes(max_depth=1000)
        self.number = 0
        #: Every ticket that is in: its lanes, in the order in which they came.
        self.inside: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self.running: list[str] = []
        #: Per lane, the exclusive tickets in order of entry and in order of start.
        self.entered: dict[str, deque[str]] = {name: deque() for name in NAMES}

    def _started(self, tickets: list[str]) -> None:
        for ticket in tickets:
            assert ticket in self.inside
            assert ticket not in self.running, "a ticket was told to run twice"
            self.running.append(ticket)
            for name in self.inside[ticket][0]:
                assert self.entered[name].popleft() == ticket, f"{ticket} overtook another in {name}"

    @rule(
        exclusive=st.frozensets(st.sampled_from(NAMES), max_size=3),
        shared=st.frozensets(st.sampled_from(NAMES), max_size=2),
    )
    def enter(self, exclusive: frozenset[str], shared: frozenset[str]) -> None:
        self.number += 1
        ticket, shared = f"t{self.number}", shared - exclusive
        self.inside[ticket] = (exclusive, shared)
        for name in exclusive:
            self.entered[name].append(ticket)
        if self.lanes.enter(ticket, exclusive=sorted(exclusive), shared=sorted(shared)):
            self._started([ticket])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        del self.inside[ticket]
        self._started(self.lanes.leave(ticket))

    @precondition(lambda self: len(self.inside) > len(self.running))
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.inside if t not in self.running]))
        for name in self.inside.pop(ticket)[0]:
            self.entered[name].remove(ticket)
        self._started(self.lanes.leave(ticket))

    @invariant()
    def no_two_incompatible_tickets_run_together(self) -> None:
        for number, one in enumerate(self.running):
            exclusive, shared = self.inside[one]
            for other in self.running[number + 1 :]:
                other_exclusive, other_shared = self.inside[other]
                assert not exclusive & (other_exclusive | other_shared)
                assert not other_exclusive & shared

    @invariant()
    def something_runs_while_anything_waits(self) -> None:
        assert bool(self.running) == bool(self.inside), "everything waits: a deadlock"

    @invariant()
    def nothing_waits_that_could_run(self) -> None:
        """A ticket waits only behind one that is incompatible and came before it."""
        order = list(self.inside)
        for number, ticket in enumerate(order):
            if ticket in self.running:
                continue
            exclusive, shared = self.inside[ticket]
            assert any(
                exclusive & (self.inside[earlier][0] | self.inside[earlier][1]) or shared & self.inside[earlier][0]
                for earlier in order[:number]
            ), f"{ticket} waits for nothing"

    @invariant()
    def it_tells_the_truth(self) -> None:
        assert len(self.lanes) == len(self.inside)
        assert self.lanes.waiting() == [t for t in self.inside if t not in self.running]
        assert all(self.lanes.runs(ticket) == (ticket in self.running) for ticket in self.inside)

    def teardown(self) -> None:
        """Every ticket runs in the end, and then no lane is left."""
        for _ in range(len(self.inside)):
            if not self.running:
                break
            ticket = self.running.pop(0)
            del self.inside[ticket]
            self._started(self.lanes.leave(ticket))
        assert not self.inside
        assert self.lanes._lanes == {}


TestLanesKeepTheirPromises = LanesMachine.TestCase
TestLanesKeepTheirPromises.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
