"""What both stores promise about adoption, and about the time after the store lost its data."""

from __future__ import annotations

import pytest

from sandfleet.errors import LeaseLost
from sandfleet.ids import Identity
from sandfleet.model import SandboxState
from sandfleet.store.base import Route
from tests.contract.store_fixtures import ALICE, BOB, LONG_S, SPEC, World
from tests.services import wait_until


def test_a_node_adopts_what_it_held_after_the_store_lost_its_data(world: World) -> None:
    world.announce()
    route = world.live()
    world.flush()
    world.announce()
    world.listen()
    world.acquire(agent="x")
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    assert world.state(route) == "live"
    assert world.replies()[0][1]["ok"]["epoch"] == route.epoch
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    assert world.places() == 1
    assert world.store.thread_home(ALICE) == "data-1"
    assert world.acquire().route == route


def test_an_adopted_sandbox_with_nobody_in_it_is_warm(world: World) -> None:
    world.announce()
    assert world.store.adopt(ALICE, SPEC, Route("a" * 8, "n1", "i1", 7), data_id="d")
    assert [info.state for info in world.store.sandboxes()] == [SandboxState.WARM]


def test_a_restarted_node_adopts_under_its_new_incarnation(world: World) -> None:
    world.announce()
    route = world.live()
    world.lapse_lease()
    world.announce("n1", "i2")
    world.store.close_incarnation("n1", "i2", reason="restarted")
    adopted = Route(route.sandbox_id, "n1", "i2", route.epoch)
    assert world.store.adopt(ALICE, SPEC, adopted, data_id="data-1")
    assert world.store.route(route.sandbox_id) == adopted
    assert world.places() == 1


def test_a_newer_owner_wins_over_an_adoption(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    route = world.live()
    assert not world.store.adopt(ALICE, SPEC, Route(route.sandbox_id, "n2", "j1", route.epoch - 1), data_id="d")
    assert not world.store.adopt(ALICE, SPEC, Route(route.sandbox_id, "n2", "j1", route.epoch), data_id="d")
    assert world.store.route(route.sandbox_id) == route


def test_the_larger_epoch_wins_between_two_holders_after_a_loss(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    assert world.store.adopt(ALICE, SPEC, Route("a" * 8, "n1", "i1", 7), data_id="d")
    assert world.store.adopt(ALICE, SPEC, Route("a" * 8, "n2", "j1", 8), data_id="d")
    assert world.store.route("a" * 8) == Route("a" * 8, "n2", "j1", 8)
    assert (world.places("n1"), world.places("n2")) == (0, 1)


def test_what_runs_is_adopted_even_into_a_full_node(world: World) -> None:
    world.announce(replicas=1)
    world.live(ALICE, agent="")
    assert world.store.adopt(BOB, SPEC, Route(BOB.digest[:8], "n1", "i1", 7), data_id="d")
    assert world.places() == 2
    assert world.store.nodes()[0].free == 0
    assert world.reserve(Identity("third")).status == "full"
    world.store.begin_stop(ALICE.digest[:8], owner=None, force=False, reason="idle")
    route = world.store.route(ALICE.digest[:8])
    assert route is not None
    assert world.store.stopped(route)
    assert world.reserve(Identity("third")).status == "full"


def test_nothing_is_adopted_under_anothers_id_or_while_stopping(world: World) -> None:
    world.announce()
    route = world.live(ALICE, agent="")
    assert not world.store.adopt(BOB, SPEC, Route(route.sandbox_id, "n1", "i1", 7), data_id="d")
    world.store.begin_stop(route.sandbox_id, owner=None, force=False, reason="idle")
    assert not world.store.adopt(ALICE, SPEC, route, data_id="d")


def test_a_node_without_its_lease_is_not_told_to_destroy_what_it_holds(world: World) -> None:
    with pytest.raises(LeaseLost):
        world.store.adopt(ALICE, SPEC, Route("a" * 8, "n1", "i1", 7), data_id="d")
    world.announce()
    world.lapse_lease()
    with pytest.raises(LeaseLost):
        world.store.adopt(ALICE, SPEC, Route("a" * 8, "n1", "i1", 7), data_id="d")


def test_after_a_loss_a_thread_waits_for_the_node_that_may_hold_its_sandbox(world: World) -> None:
    world.announce("n1", "i1")
    world.announce("n2", "j1")
    route = world.live(ALICE)
    world.flush()
    world.announce("n2", "j1", again=True)
    assert world.reserve(ALICE, "n2", "j1", data_id="elsewhere").status == "recovering"
    assert world.store.thread_home(ALICE) is None
    assert world.store.sandboxes() == []
    world.announce("n1", "i1", again=True)
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    assert world.reserve(ALICE, "n2", "j1").route == route
    assert world.reserve(BOB).status == "recovering"
    world.end_recovery()
    assert world.reserve(BOB).status == "reserved"


def test_an_adopted_sandbox_keeps_its_age(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    world.flush()
    world.announce(again=True)
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1", age_s=3600.0)
    [swept] = world.store.sweep("n1", "i1")
    assert 3_600_000 <= world.store.now_ms() - swept.created_ms < 3_600_000 + 60_000
    # A store that knows better does not take a node's word for it.
    world.announce("n1", "i1")
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1", age_s=0.0)
    assert world.store.sweep("n1", "i1")[0].created_ms == swept.created_ms


def test_a_thread_that_the_store_knows_does_not_wait_for_the_recovery(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    world.flush()
    world.announce(again=True)
    world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    world.store.lost(route, reason="killed")
    assert world.reserve(ALICE).status == "reserved"


def test_the_recovery_lasts_as_long_as_the_longest_lease(world: World) -> None:
    world.announce("slow", "s1", lease_s=LONG_S, again=True)
    world.announce("n1", "i1", lease_s=0.001, again=True)
    assert world.reserve(ALICE, "slow", "s1").status == "recovering"
    world.flush()
    world.announce("n2", "j1", lease_s=LONG_S)
    world.announce("n1", "i1", lease_s=0.05, again=True)
    assert world.reserve(ALICE, "n2", "j1").status == "recovering"


def test_a_recovery_of_a_short_lease_ends_by_itself(world: World) -> None:
    world.announce("n1", "i1", lease_s=0.2, again=True)
    assert world.reserve().status == "recovering"
    wait_until(lambda: world.reserve().status == "node_down", 5.0)


def test_a_brand_new_fleet_waits_for_nothing(world: World) -> None:
    world.announce("n1", "i1")
    world.announce("n2", "j1")
    assert world.reserve(ALICE).status == "reserved"


def test_announcing_again_where_nothing_was_lost_makes_nobody_wait(world: World) -> None:
    world.announce("n1", "i1")
    world.announce("n1", "i1", again=True)
    assert world.reserve(ALICE).status == "reserved"


def test_what_is_adopted_after_a_loss_is_in_use_until_its_holders_had_time_to_say_so(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    world.flush()
    world.announce(again=True)
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    evicted = world.store.begin_stop(route.sandbox_id, owner=None, force=False, reason="room")
    assert (evicted.status, world.state(route)) == ("busy", "live")
    assert world.store.renew_agents("agent-1", {route.sandbox_id: ALICE.digest}, ttl_s=60) == []
    world.expire_agent(route.sandbox_id, "recovering")
    world.store.sweep("n1", "i1")
    assert world.state(route) == "live"
    world.store.release(route.sandbox_id, ALICE.digest, "agent-1")
    assert world.state(route) == "warm"
