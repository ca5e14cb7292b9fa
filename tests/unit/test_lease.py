"""The node's lease, with clocks turned by hand and its thread's loop run on ours."""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet.errors import LeaseLost, NodeIdInUse, StoreUnavailable
from sandfleet.model import NodeState
from sandfleet.store.base import NodeRecord, Renewal
from sandfleet.store.memory import MemoryStore
from sandfleet.testing import ManualClock
from sandfleet_workers import lease as lease_module
from sandfleet_workers.lease import Lease

LEASE_S = 10.0


class Rounds:
    """Stands in for the stop event: lets the renewal loop go round ``count`` times."""

    def __init__(self, count: int, between: Any = None) -> None:
        self.left = count
        self.between = between

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout <= LEASE_S / 3, "three renewals must fit into a lease"
        self.left -= 1
        if self.left >= 0 and self.between is not None:
            self.between()
        return self.left < 0

    def is_set(self) -> bool:
        return False


class World:
    """A node's lease over a store, and what the lease told its node."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.store = MemoryStore(now_ms=lambda: int(clock.now() * 1000))
        self.told: list[str] = []
        self.lost: list[LeaseLost] = []
        self.lease = self.another("inc-1")

    def another(self, incarnation: str) -> Lease:
        record = NodeRecord("node-1", incarnation, 4, "data-1", ("mock",))
        return Lease(
            self.store,
            record,
            lease_s=LEASE_S,
            on_tick=lambda now_ms: self.told.append("tick"),
            on_lost=self.lost.append,
            on_forgotten=lambda: self.told.append("forgotten"),
            load=lambda: {"answers": len(self.told)},
        )

    def rounds(self, count: int = 1, between: Any = None) -> None:
        self.lease._stop = Rounds(count, between)  # type: ignore[assignment]
        self.lease._run()

    @property
    def looks_alive(self) -> bool:
        return [node.alive for node in self.store.nodes()] == [True]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    clock = ManualClock()
    monkeypatch.setattr(lease_module, "boot_s", clock.boottime)
    world = World(clock)
    world.lease.announce()
    return world


def test_a_node_that_announced_itself_holds_its_lease_for_one_lease(world: World) -> None:
    assert world.lease.holds()
    assert world.looks_alive
    world.clock.advance(LEASE_S - 0.1)
    assert world.lease.holds()
    world.clock.advance(0.2)
    assert not world.lease.holds()


def test_each_renewal_tells_the_load_and_how_long_ago_it_was(world: World) -> None:
    world.rounds(1)
    assert [dict(node.load) for node in world.store.nodes()] == [{"answers": 0}]
    world.rounds(1)
    assert [dict(node.load) for node in world.store.nodes()] == [{"answers": 1}]
    assert world.lease.age_s() == 0
    world.clock.advance(4.0)
    assert world.lease.age_s() == pytest.approx(4.0)


def test_before_it_announces_itself_a_node_holds_nothing(world: World) -> None:
    assert not world.another("inc-2").holds()


def test_a_second_live_holder_of_the_id_is_refused(world: World) -> None:
    with pytest.raises(NodeIdInUse):
        world.another("inc-2").announce()
    assert world.lease.holds()


def test_a_paused_node_does_not_hold_its_lease_when_it_wakes(world: World) -> None:
    world.clock.suspend(LEASE_S + 1)
    assert not world.lease.holds()


def test_a_node_whose_main_loop_turns_renews_for_ever(world: World) -> None:
    def second() -> None:
        world.clock.advance(1)
        world.lease.loop_ticked()

    world.rounds(60, between=second)
    assert world.lease.holds()
    assert world.looks_alive
    assert world.told == ["tick"] * 60


def test_a_node_whose_main_loop_hangs_stops_looking_alive(world: World) -> None:
    world.rounds(30, between=lambda: world.clock.advance(1))
    assert not world.lease.holds()
    assert not world.looks_alive


def test_a_node_whose_consumer_reconnects_is_not_taken_for_one_that_hangs(world: World) -> None:
    world.lease.reconnecting = True
    world.rounds(30, between=lambda: world.clock.advance(1))
    assert world.lease.holds()
    assert world.looks_alive
    world.lease.reconnecting = False
    world.rounds(30, between=lambda: world.clock.advance(1))
    assert not world.lease.holds()


def test_a_node_without_a_lease_does_no_upkeep(world: World) -> None:
    world.clock.suspend(LEASE_S + 1)
    world.rounds(3)
    assert world.told == []


def test_a_node_that_was_paused_renews_once_its_main_loop_turns_again(world: World) -> None:
    world.clock.suspend(LEASE_S + 1)
    world.rounds(1)
    assert not world.lease.holds()
    world.lease.loop_ticked()
    world.rounds(1)
    assert world.lease.holds()
    assert world.looks_alive


def test_a_renewal_counts_from_when_it_was_asked_not_from_when_it_was_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = world.store.renew

    def slow(*args: Any, **kwargs: Any) -> Renewal:
        answer = renew(*args, **kwargs)
        world.clock.suspend(LEASE_S - 1)
        return answer

    monkeypatch.setattr(world.store, "renew", slow)
    world.rounds(1)
    assert world.lease.holds()
    world.clock.advance(1.5)
    assert not world.lease.holds(), "the store let the lease lapse a moment ago"


def test_a_store_that_lost_its_data_is_told_again_and_then_of_the_sandboxes(world: World) -> None:
    world.store.forget_everything()
    world.rounds(1)
    assert world.looks_alive
    assert world.lease.holds()
    assert world.told == ["forgotten", "tick"]
    world.rounds(1)
    assert world.told == ["forgotten", "tick", "tick"], "told again without need"


def test_a_store_that_forgot_the_node_hears_that_it_had_announced_itself_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce, said = world.store.announce, []

    def hear(record: NodeRecord, *, again: bool = False, **given: Any) -> int:
        said.append(again)
        return announce(record, again=again, **given)

    monkeypatch.setattr(world.store, "announce", hear)
    world.rounds(1)
    world.store.forget_everything()
    world.rounds(2)
    assert said == [True]
    assert world.lease.renewals == 2, "one before and one after"


def test_the_node_is_told_of_the_loss_even_if_the_store_goes_away_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: Any, **_kwargs: Any) -> int:
        raise StoreUnavailable("gone")

    world.store.forget_everything()
    monkeypatch.setattr(world.store, "announce", away)
    world.rounds(1)
    assert world.told[0] == "forgotten"


def test_a_node_whose_id_another_incarnation_took_stops_at_once(world: World) -> None:
    world.clock.suspend(LEASE_S + 1)
    world.another("inc-2").announce()
    world.lease.loop_ticked()
    world.rounds(5)
    assert len(world.lost) == 1
    assert not world.lease.holds()
    assert world.told == []


def test_a_store_that_is_away_lets_the_lease_lapse_and_comes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: Any, **_kwargs: Any) -> Renewal:
        raise StoreUnavailable("gone")

    def second() -> None:
        world.clock.advance(1)
        world.lease.loop_ticked()

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "renew", away)
        world.rounds(9, between=second)
        assert world.lease.holds()
        world.rounds(3, between=second)
        assert not world.lease.holds()
    world.rounds(1, between=second)
    assert world.lease.holds()
    assert world.lost == []


def test_upkeep_that_fails_does_not_end_the_renewals(world: World) -> None:
    def second() -> None:
        world.clock.advance(1)
        world.lease.loop_ticked()

    def broken(_now_ms: int) -> None:
        raise RuntimeError("a bug in the upkeep")

    world.lease._on_tick = broken
    world.rounds(30, between=second)
    assert world.lease.holds()
    assert world.looks_alive


def test_a_cordon_set_in_the_store_is_learned_with_the_next_renewal(world: World) -> None:
    world.store.set_node_state("node-1", NodeState.CORDONED)
    world.rounds(1)
    assert world.lease.state is NodeState.CORDONED


def test_the_store_s_time_is_known_without_asking(world: World) -> None:
    assert abs(world.lease.now_ms() - world.store.now_ms()) < 1000
    world.clock.jump(-3600)
    world.lease.loop_ticked()
    world.rounds(1)
    assert abs(world.lease.now_ms() - world.store.now_ms()) < 1000


def test_stop_ends_the_thread_and_leaves_the_lease_to_lapse(world: World) -> None:
    world.lease.start()
    world.lease.stop()
    assert not world.lease._thread.is_alive()
    assert world.looks_alive
