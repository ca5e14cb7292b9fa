"""What both stores promise about blank sandboxes: whose places they take, who gets them, when they end."""

from __future__ import annotations

import pytest

from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView
from tests.contract.store_fixtures import ALICE, BOB, ERROR, LONG_S, World

CAROL = Identity("carol")


def node(world: World, node_id: str = "n1") -> NodeView:
    return next(view for view in world.store.nodes() if view.node_id == node_id)


def ready(world: World, slot: str, incarnation: str = "i1", *, digest: str = "d1", again: bool = False) -> bool:
    return world.store.blank_ready("n1", incarnation, slot, spec_digest=digest, again=again)


# --- places ----------------------------------------------------------------------------------


def test_a_blank_takes_a_place_from_its_beginning_and_is_room_once_it_is_ready(world: World) -> None:
    world.announce(replicas=3)
    assert world.begin_blank("s1")
    view = node(world)
    assert (view.places, view.creating, view.starting, view.blanks, view.free) == (1, 0, 1, {}, 2)
    assert world.store.blanks("n1") == {}
    assert ready(world, "s1")
    view = node(world)
    assert (view.places, view.creating, view.starting, view.blanks, view.free) == (1, 0, 0, {"d1": 1}, 3)
    assert world.store.blanks("n1") == {"s1": "d1"}
    assert ready(world, "s1"), "a second time is harmless"
    assert world.places() == 1
    assert world.store.blank_gone("n1", "i1", "s1")
    assert not world.store.blank_gone("n1", "i1", "s1")
    assert (world.places(), world.store.blanks("n1")) == (0, {})


def test_so_many_places_are_left_free_by_those_who_are_started_ahead(world: World) -> None:
    world.announce(replicas=4)
    world.reserved(ALICE)
    assert world.begin_blank("s1", reserve_free=1)
    assert world.begin_blank("s2", reserve_free=1)
    assert not world.begin_blank("s3", reserve_free=1)
    assert world.begin_blank("s3", reserve_free=0)
    assert not world.begin_blank("s4", reserve_free=0)
    assert node(world).places == 4


def test_a_node_without_a_place_to_spare_starts_none(world: World) -> None:
    world.announce(replicas=1, burst_limit=5)
    world.reserved(ALICE)
    assert not world.begin_blank("s1")


def test_a_slot_is_taken_once(world: World) -> None:
    world.announce()
    assert world.begin_blank("s1")
    assert not world.begin_blank("s1")
    world.expire_place("~s1")
    assert not world.begin_blank("s1")
    assert world.begin_blank("s2")
    assert ready(world, "s2")
    assert not world.begin_blank("s2")
    assert (node(world).starting, node(world).blanks) == (0, {"d1": 1}), "it is still ready"


@pytest.mark.parametrize("state", [NodeState.CORDONED, NodeState.DRAINING, NodeState.GONE])
def test_a_node_that_takes_nothing_new_starts_none(world: World, state: NodeState) -> None:
    world.announce()
    world.store.set_node_state("n1", state)
    assert not world.begin_blank("s1")


def test_a_node_that_is_not_known_to_live_starts_none(world: World) -> None:
    assert not world.begin_blank("s1")
    world.announce()
    assert not world.begin_blank("s1", incarnation="i0")
    world.lapse_lease()
    assert not world.begin_blank("s1")


def test_none_is_started_while_somebody_stands_in_line(world: World) -> None:
    world.announce()
    world.park(ALICE)
    assert not world.begin_blank("s1")
    world.store.withdraw(ALICE, "a-alice")
    assert world.begin_blank("s1")


def test_one_that_takes_too_long_to_start_loses_its_place(world: World) -> None:
    world.announce(replicas=1)
    assert world.begin_blank("s1")
    world.park(ALICE)
    world.expire_place("~s1")
    view = node(world)
    assert (view.places, view.starting) == (0, 0)
    assert not ready(world, "s1"), "it must be removed"
    world.store.serve_line()
    before = len(world.pushed("scheduler"))
    assert world.store.sweep("n1", "i1") == []
    assert world.counted_on("n1") == set()
    assert len(world.pushed("scheduler")) == before + 1
    assert not world.store.blank_gone("n1", "i1", "s1")


def test_the_upkeep_of_a_node_leaves_its_blanks_alone(world: World) -> None:
    world.announce()
    world.blank("s1")
    assert world.begin_blank("s2")
    assert world.store.sweep("n1", "i1") == []
    assert world.counted_on("n1") == {"~s1", "~s2"}
    assert world.store.sandboxes(node_id="n1") == world.store.sandboxes() == []


# --- who gets them ---------------------------------------------------------------------------


def test_a_thread_takes_the_place_of_a_blank_of_its_spec(world: World) -> None:
    world.announce()
    for slot, digest in (("s3", "d1"), ("s1", "other"), ("s2", "d1")):
        world.blank(slot, digest)
    told = world.reserve(ALICE, spec_digest="d1")
    assert (told.status, told.blank) == ("reserved", "s2")
    view = node(world)
    assert (view.places, view.creating, view.blanks) == (3, 1, {"d1": 1, "other": 1})
    assert world.store.blanks("n1") == {"s3": "d1", "s1": "other"}
    assert not world.store.blank_gone("n1", "i1", "s2"), "it is the thread's"
    assert not ready(world, "s2")
    assert world.reserve(BOB, spec_digest="d1").blank == "s3"
    assert world.places() == 3
    told = world.reserve(CAROL, spec_digest="d1")
    assert (told.status, told.blank) == ("reserved", ""), "a free place comes before a blank of another spec"
    assert (world.places(), world.store.blanks("n1")) == (4, {"s1": "other"})


def test_one_that_is_not_ready_is_given_to_nobody(world: World) -> None:
    world.announce(replicas=1)
    assert world.begin_blank("s1")
    assert world.reserve(ALICE, spec_digest="d1").status == "full"
    assert ready(world, "s1")
    assert world.reserve(ALICE, spec_digest="d1").blank == "s1"


def test_a_blank_of_another_spec_gives_its_place_when_no_other_is_free(world: World) -> None:
    world.announce(replicas=2)
    world.blank("s2", "other")
    world.blank("s1", "another")
    told = world.reserve(ALICE, spec_digest="d1")
    assert (told.status, told.blank, world.places()) == ("reserved", "s1", 2)
    told = world.reserve(BOB)
    assert (told.status, told.blank, world.places()) == ("reserved", "s2", 2)
    assert world.reserve(CAROL, spec_digest="d1").status == "full"


def test_a_creation_that_fails_frees_the_place_that_was_a_blanks(world: World) -> None:
    world.announce(replicas=1)
    world.blank("s1")
    told = world.reserve(ALICE, spec_digest="d1")
    assert told.route is not None
    assert world.store.create_failed(told.route, ERROR)
    assert (world.places(), world.store.blanks("n1")) == (0, {})


def test_a_burst_takes_a_blank_before_it_goes_above_the_replicas(world: World) -> None:
    world.announce(replicas=1, burst_limit=1)
    world.blank("s1", "other")
    told = world.reserve(ALICE, burst=True, spec_digest="d1")
    assert (told.blank, world.places()) == ("s1", 1)
    told = world.reserve(BOB, burst=True, spec_digest="d1")
    assert (told.status, told.blank, world.places()) == ("reserved", "", 2)


def test_on_a_node_above_its_replicas_a_blank_is_room_all_the_same(world: World) -> None:
    world.announce(replicas=1, burst_limit=1)
    assert world.begin_blank("s1")
    assert world.reserve(ALICE, burst=True).status == "reserved"
    assert ready(world, "s1")
    view = node(world)
    assert (view.places, view.free) == (2, 1)
    told = world.reserve(BOB)
    assert (told.status, told.blank, world.places()) == ("reserved", "s1", 2)
    assert world.reserve(CAROL).status == "full"


def test_blanks_belong_to_the_line_as_free_places_do(world: World) -> None:
    world.announce(replicas=1, burst_limit=1)
    world.blank("s1")
    world.park(ALICE)
    assert world.reserve(BOB, spec_digest="d1").status == "queued"
    assert world.reserve(BOB, spec_digest="d1", burst=True).status == "queued"
    assert world.reserve(ALICE, spec_digest="d1", from_line=True).blank == "s1"


def test_the_line_hears_of_a_blank_that_is_ready_and_of_one_that_is_gone(world: World) -> None:
    world.announce(replicas=2)
    assert world.begin_blank("s1")
    assert world.begin_blank("s2")
    world.park(ALICE)
    heard = len(world.pushed("scheduler"))
    for act in (lambda: ready(world, "s1"), lambda: world.store.blank_gone("n1", "i1", "s2")):
        world.store.serve_line()
        assert act()
        heard += 1
        assert len(world.pushed("scheduler")) == heard


def test_a_quota_counts_no_blanks_and_refuses_before_one_is_taken(world: World) -> None:
    world.announce()
    world.blank("s1")
    one, two = Identity("t1", "u"), Identity("t2", "u")
    assert world.reserve(one, spec_digest="other", max_per_user=1).status == "reserved"
    assert world.reserve(two, spec_digest="d1", max_per_user=1).status == "quota"
    assert world.store.blanks("n1") == {"s1": "d1"}
    assert len(world.counted_for("u")) == 1


def test_a_threads_old_sandbox_on_the_same_node_makes_room_before_a_blank_does(world: World) -> None:
    world.announce(replicas=2)
    old = world.live(ALICE)
    world.blank("s1", "other")
    world.store.set_node_state("n1", NodeState.DRAINING)
    world.lapse_lease()
    world.announce(incarnation="i2", replicas=2)
    assert world.begin_blank("s2", incarnation="i2")
    assert ready(world, "s2", "i2", digest="other")
    told = world.reserve(ALICE, incarnation="i2", spec_digest="d1")
    assert (told.status, told.blank, world.places()) == ("reserved", "", 2)
    assert told.route is not None
    assert told.route.epoch > old.epoch


def test_a_thread_that_has_a_sandbox_takes_no_blank(world: World) -> None:
    world.announce()
    world.live(ALICE)
    world.blank("s1")
    assert world.reserve(ALICE, spec_digest="d1").status == "live"
    assert world.reserve(BOB, incarnation="i0", spec_digest="d1").status == "node_down"
    assert world.store.blanks("n1") == {"s1": "d1"}


def test_a_story_tells_which_blank_it_was(world: World) -> None:
    world.announce()
    world.blank("s1")
    route = world.reserve(ALICE, spec_digest="d1").route
    assert route is not None
    assert world.store.story(route.sandbox_id)[-1]["blank"] == "s1"


# --- whose they are --------------------------------------------------------------------------


def test_blanks_end_with_the_incarnation_that_began_them(world: World) -> None:
    world.announce()
    world.blank("s1")
    assert world.begin_blank("s2")
    world.lapse_lease()
    assert not ready(world, "s3", again=False)
    world.announce(incarnation="i2")
    assert (world.counted_on("n1"), world.store.blanks("n1")) == (set(), {})
    assert not ready(world, "s2")
    assert not world.store.blank_gone("n1", "i1", "s1")
    assert not ready(world, "s1", again=True)


def test_a_node_that_announces_again_or_closes_what_it_left_keeps_its_own(world: World) -> None:
    world.announce()
    world.blank("s1")
    assert world.begin_blank("s2")
    world.announce(again=True)
    for _ in range(2):
        assert not world.store.close_incarnation("n1", "i1", reason="came back").more
    world.store.close_incarnation("n1", "i0", reason="nobody")
    world.store.close_incarnation("n1", None, reason="not dead")
    assert world.counted_on("n1") == {"~s1", "~s2"}
    assert world.store.blanks("n1") == {"s1": "d1"}
    assert ready(world, "s2")


def test_only_the_incarnation_that_began_a_blank_ends_it(world: World) -> None:
    world.announce()
    world.blank("s1")
    assert not world.store.blank_gone("n1", "i0", "s1")
    assert not world.store.blank_gone("n2", "i1", "s1")
    assert world.store.blanks("n1") == {"s1": "d1"}
    assert world.places() == 1


def test_a_lease_that_lapsed_and_was_taken_again_costs_no_blank(world: World) -> None:
    world.announce()
    world.blank("s1")
    world.lapse_lease()
    assert world.reserve(ALICE, spec_digest="d1").status == "node_down"
    world.store.renew("n1", "i1", lease_s=LONG_S)
    assert world.reserve(ALICE, spec_digest="d1").blank == "s1"


def test_a_dead_node_has_no_blanks(world: World) -> None:
    world.announce()
    world.live(BOB)
    world.blank("s1")
    assert world.begin_blank("s2")
    world.lapse_lease()
    assert len(world.store.close_incarnation("n1", None, reason="dead", limit=1).sandboxes) == 1
    assert (world.counted_on("n1"), world.store.blanks("n1")) == (set(), {})
    assert not ready(world, "s2")
    assert not ready(world, "s1", again=True)
    assert not [key for key in world.key_names() if ":blanks:" in key or ":places:" in key]


def test_a_node_that_leaves_takes_its_blanks_along(world: World) -> None:
    world.announce()
    world.blank("s1")
    assert world.store.set_node_state("n1", NodeState.GONE)
    assert (world.counted_on("n1"), world.store.blanks("n1")) == (set(), {})
    assert not ready(world, "s1", again=True)


def test_after_a_loss_a_node_tells_what_it_holds_whatever_the_room(world: World) -> None:
    world.announce(replicas=1)
    world.blank("s1")
    world.flush()
    assert not ready(world, "s1", again=True), "it has to announce itself first"
    world.announce(replicas=1, again=True)
    assert not ready(world, "s1")
    for slot in ("s1", "s2"):
        assert ready(world, slot, again=True)
    view = node(world)
    assert (view.places, view.blanks, view.free) == (2, {"d1": 2}, 2)
    world.store.sweep("n1", "i1")
    assert world.store.blanks("n1") == {"s1": "d1", "s2": "d1"}
