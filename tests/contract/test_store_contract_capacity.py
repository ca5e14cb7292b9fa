"""What both stores promise about places: who may have how many, how long creations that fail pause, what idles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import Push, Route
from tests.contract.store_fixtures import ALICE, BOB, ERROR, SPEC, World

FAILED = {"code": "start_failed", "message": "no such image", "facts": {"reason": "image"}}
ONE, TWO, THREE = (Identity(f"t{i}", "u") for i in range(3))


def node(world: World, node_id: str = "n1") -> NodeView:
    return next(view for view in world.store.nodes() if view.node_id == node_id)


def stop(world: World, route: Route, **conditions: Any) -> str:
    conditions.setdefault("force", False)
    return world.store.begin_stop(route.sandbox_id, owner=None, reason="test", **conditions).status


# --- the line and the places -----------------------------------------------------------------


def test_nobody_overtakes_those_who_stand_in_line(world: World) -> None:
    world.announce()
    world.park(ALICE)
    assert world.reserve(BOB).status == "queued"
    assert world.reserve(ALICE).status == "queued", "it has to be asked for from the line"
    assert world.places() == 0
    assert world.reserve(ALICE, from_line=True).status == "reserved"
    assert world.reserve(BOB).status == "reserved"


def test_the_line_gets_no_more_places_than_there_are(world: World) -> None:
    world.announce(replicas=1)
    world.park(ALICE)
    world.park(BOB)
    assert world.reserve(ALICE, from_line=True).status == "reserved"
    assert world.reserve(BOB, from_line=True).status == "full"
    assert world.line() == ["bob"]
    assert world.reserve(BOB, "n2", "j1", from_line=True).status == "node_down"
    assert world.line() == ["bob"]


def test_a_burst_goes_above_the_replicas_up_to_its_limit(world: World) -> None:
    world.announce(replicas=1, burst_limit=1)
    world.reserved(ALICE)
    assert world.reserve(BOB).status == "full"
    assert world.reserve(BOB, burst=True).status == "reserved"
    assert world.reserve(Identity("carol"), burst=True).status == "full"
    view = node(world)
    assert (view.places, view.replicas, view.burst_limit, view.free) == (2, 1, 1, 0)


def test_a_burst_takes_no_place_that_the_line_waits_for(world: World) -> None:
    world.announce(replicas=1, burst_limit=1)
    world.park(ALICE)
    assert world.reserve(BOB, burst=True).status == "queued", "the free place is the line's"
    assert world.reserve(ALICE, from_line=True).status == "reserved"
    world.park(Identity("carol"))
    assert world.reserve(BOB, burst=True).status == "reserved", "nobody in line waits for one above the replicas"
    assert world.line() == ["carol"]


def test_a_node_without_burst_bursts_nothing(world: World) -> None:
    world.announce(replicas=1)
    world.reserved(ALICE)
    assert world.reserve(BOB, burst=True).status == "full"


# --- quotas ----------------------------------------------------------------------------------


def test_a_user_has_at_most_so_many_places_whatever_their_state(world: World) -> None:
    world.announce(replicas=10)
    world.reserved(ONE)
    stopping = world.live(TWO, agent="")
    stop(world, stopping)
    refused = world.reserve(THREE, max_per_user=2)
    assert (refused.status, refused.route, refused.evict) == ("quota", None, "")
    assert world.places() == 2
    assert world.reserve(Identity("t2", "other"), max_per_user=2).status == "reserved"
    assert world.reserve(Identity("t2"), max_per_user=1).status == "reserved"
    assert world.reserve(Identity("t3"), max_per_user=1).status == "reserved", "without a user nothing is counted"
    assert world.reserve(THREE, max_per_user=3).status == "reserved"
    assert world.reserve(Identity("t4", "u"), max_per_user=0).status == "reserved"


def test_a_quota_holds_over_all_nodes_and_is_told_rather_than_full(world: World) -> None:
    world.announce(replicas=1)
    world.announce("n2", "j1", replicas=5)
    world.reserved(ONE)
    assert world.reserve(TWO, "n2", "j1", max_per_user=1).status == "quota"
    assert world.reserve(TWO, max_per_user=1).status == "quota"
    assert world.reserve(TWO, max_per_user=2).status == "full"


def test_a_quota_names_the_users_longest_idle_sandbox(world: World) -> None:
    world.announce(replicas=10)
    held = world.live(ONE, agent="y")
    first, second = world.live(TWO, agent="y"), world.live(THREE, agent="")
    world.live(Identity("stranger", "other"), agent="")
    new = Identity("t9", "u")
    assert world.reserve(new, max_per_user=3).evict == second.sandbox_id
    since = {one.sandbox_id: one.warm_since_ms for one in world.store.sweep("n1", "i1")}[second.sandbox_id]
    assert since is not None
    while world.store.now_ms() <= since:
        pass
    world.store.release(first.sandbox_id, TWO.digest, "y")
    assert world.reserve(new, max_per_user=3).evict == second.sandbox_id
    world.acquire(THREE, agent="z")
    assert world.reserve(new, max_per_user=3).evict == first.sandbox_id
    assert stop(world, first) == "recorded"
    world.store.release(second.sandbox_id, THREE.digest, "z")
    assert world.reserve(new, max_per_user=3).evict == "", "the one that is being removed makes the room"
    world.age_stop(first.sandbox_id)
    assert world.reserve(new, max_per_user=3).evict == second.sandbox_id, "it has taken too long"
    world.store.stopped(first)
    assert world.state(held) == "live"
    assert world.reserve(new, max_per_user=3).status == "reserved"


def test_a_warm_sandbox_on_a_dead_node_is_not_named(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    world.live(ONE, agent="")
    world.lapse_lease()
    refused = world.reserve(TWO, "n2", "j1", max_per_user=1)
    assert (refused.status, refused.evict) == ("quota", "")


def test_a_threads_own_old_sandbox_does_not_count_against_it(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    old = world.live(ONE)
    world.store.set_node_state("n1", NodeState.DRAINING)
    assert world.reserve(TWO, "n2", "j1", max_per_user=1).status == "quota"
    assert world.reserve(ONE, "n2", "j1", max_per_user=1).status == "reserved"
    assert world.counted_for("u") == {old.sandbox_id}


def test_an_expired_reservation_does_not_count(world: World) -> None:
    world.announce()
    world.expire_place(world.reserved(ONE).sandbox_id)
    assert world.reserve(TWO, max_per_user=1).status == "reserved"
    assert world.reserve(THREE, max_per_user=1).status == "quota"


def test_a_user_is_counted_for_exactly_the_places_that_are_taken(world: World) -> None:
    world.announce(replicas=10)

    def counted() -> int:
        assert world.counted_for("u") == world.counted_on("n1")
        return len(world.counted_for("u"))

    world.store.create_failed(world.reserved(ONE), ERROR)
    assert counted() == 0
    route = world.reserved(ONE)
    assert counted() == 1
    world.store.created(route)
    assert counted() == 1
    world.expire_place(world.reserved(TWO).sandbox_id)
    assert counted() == 2
    world.store.sweep("n1", "i1")
    assert counted() == 1
    stop(world, route)
    assert counted() == 1
    world.store.stopped(route)
    assert counted() == 0
    route = world.live(THREE)
    world.store.lost(route, reason="killed")
    assert counted() == 0
    route = world.live(ONE)
    world.flush()
    world.announce(replicas=10)
    assert counted() == 0
    assert world.store.adopt(ONE, SPEC, route, data_id="data-1")
    assert counted() == 1
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert counted() == 0
    assert not [key for key in world.key_names() if "user:" in key]


# --- creations that fail ---------------------------------------------------------------------


def fail(world: World, identity: Identity = ALICE, error: dict[str, Any] = FAILED) -> None:
    assert world.store.create_failed(world.reserved(identity), error)


def test_a_thread_may_be_tried_again_at_once_after_its_first_failure(world: World) -> None:
    world.announce()
    fail(world)
    assert world.acquire().status == "requested"


def test_a_thread_whose_creations_keep_failing_backs_off_ever_longer(world: World) -> None:
    world.announce()
    fail(world)
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        fail(world)
        before = world.pushed("scheduler")
        found = world.acquire()
        assert (found.status, found.route) == ("backing_off", None)
        assert pause_s - 0.9 < found.retry_after_s <= pause_s
        assert json.loads(found.error) == FAILED
        assert world.pushed("scheduler") == before
        assert world.waiting(ALICE) == 0
        assert world.store.park(ALICE, "{}", push=Push("scheduler", "serve")) == 0
        world.end_pause(ALICE)
        assert world.acquire().status == "requested"
        world.store.withdraw(ALICE, "a1")
    assert world.acquire(BOB).status == "requested", "others are not held up"


def test_a_creation_that_succeeds_ends_the_backing_off(world: World) -> None:
    world.announce()
    fail(world)
    fail(world)
    route = world.reserved()
    assert world.acquire().status == "creating"
    world.store.created(route)
    assert world.acquire().status == "live"
    world.store.lost(route, reason="killed")
    assert world.acquire().status == "requested"
    fail(world)
    assert world.acquire().status == "requested", "it counts from one again"


def test_failures_are_forgotten_after_a_while(world: World) -> None:
    world.announce()
    fail(world)
    fail(world)
    world.forget_failures(ALICE)
    assert world.acquire().status == "requested"
    fail(world)
    assert world.acquire().status == "requested"


@pytest.mark.parametrize("code", ["not_started", "no_capacity", "node_lost"])
def test_only_a_start_that_failed_counts_as_a_failure(world: World, code: str) -> None:
    world.announce()
    for _ in range(3):
        fail(world, error={**FAILED, "code": code})
    assert world.acquire().status == "requested"


@pytest.mark.parametrize("text", ["x", '"', "\u20ac", "\U0001f600", "\x00"])
def test_of_a_long_error_what_fits_is_kept(world: World, text: str) -> None:
    world.announce()
    error = {"code": "start_failed", "message": text * 9000, "facts": {"log": text * 9000}}
    fail(world, error=error)
    fail(world, error=error)
    kept = world.acquire().error
    assert len(kept) <= 4000
    told = json.loads(kept)
    assert told["code"] == "start_failed"
    assert len(told["message"]) > 200
    assert error["message"].startswith(told["message"])
