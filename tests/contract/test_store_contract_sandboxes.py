"""What both stores promise about threads and their sandboxes: acquire, reserve, created, adopt, release."""

from __future__ import annotations

import pytest

from sandfleet.errors import Busy
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import Route, Waiter
from tests.contract.store_fixtures import ALICE, BOB, ERROR, World


def test_the_first_use_of_a_thread_is_requested_from_the_scheduler(world: World) -> None:
    acquired = world.acquire()
    assert (acquired.status, acquired.route) == ("requested", None)
    assert world.pushed("scheduler") == ["acquire alice"]


def test_five_first_uses_of_one_thread_request_one_sandbox(world: World) -> None:
    assert {world.acquire(op_id=f"a{i}").status for i in range(5)} == {"requested"}
    assert world.pushed("scheduler") == ["acquire alice"]


def test_the_same_acquire_repeated_is_requested_again_but_answered_once(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire()
    world.acquire()
    assert len(world.pushed("scheduler")) == 2
    world.store.created(world.reserved())
    assert len(world.replies()) == 1


def test_an_acquire_without_a_message_only_waits(world: World) -> None:
    assert world.store.acquire(ALICE, world.waiter(), wait_s=5, push=None).status == "requested"
    assert world.pushed("scheduler") == []


def test_everyone_who_waited_holds_the_new_sandbox_and_knows_where_it_is(world: World) -> None:
    world.announce()
    world.listen("c1")
    world.listen("c2")
    world.acquire(op_id="a1", client="c1", agent="x")
    route = world.reserved()
    assert world.acquire(op_id="a2", client="c2", agent="y").status == "creating"
    assert world.store.created(route)
    told = {
        "sandbox_id": route.sandbox_id,
        "node_id": "n1",
        "incarnation": "i1",
        "epoch": route.epoch,
        "new": True,
    }
    assert world.replies("c1") == [("a1", {"ok": told})]
    assert world.replies("c2") == [("a2", {"ok": told})]
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert (info.state, info.agents, info.ops) == (SandboxState.LIVE, 2, 0)


def test_a_sandbox_whose_waiters_are_gone_is_warm_at_once(world: World) -> None:
    world.announce()
    world.acquire()  # nobody opened the stream of c1
    route = world.reserved()
    world.store.created(route)
    assert world.state(route) == "warm"


def test_a_waiter_that_gave_up_is_neither_answered_nor_made_a_holder(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire()
    world.expire_waiters(ALICE)
    route = world.reserved()
    world.store.created(route)
    assert world.replies() == []
    assert world.state(route) == "warm"


def test_a_live_sandbox_is_acquired_in_one_call(world: World) -> None:
    world.announce()
    route = world.live()
    acquired = world.acquire(agent="second")
    assert (acquired.status, acquired.route, acquired.was_warm) == ("live", route, False)
    assert world.pushed("scheduler") == []


def test_a_warm_sandbox_is_acquired_and_told_so(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    acquired = world.acquire()
    assert (acquired.status, acquired.route, acquired.was_warm) == ("live", route, True)
    assert world.state(route) == "live"
    assert world.store.nodes()[0].warm == 0


@pytest.mark.parametrize(("state", "status"), [("cordoned", "live"), ("draining", "requested"), ("gone", "requested")])
def test_a_cordoned_node_still_serves_its_own_and_a_leaving_one_does_not(world: World, state: str, status: str) -> None:
    world.announce()
    world.live()
    world.store.set_node_state("n1", NodeState(state))
    assert world.acquire().status == status


def test_a_sandbox_on_a_node_without_lease_does_not_count(world: World) -> None:
    world.announce()
    old = world.live()
    world.lapse_lease()
    assert world.acquire().status == "requested"
    world.announce("n2", "j1")
    new = world.reserved(node_id="n2", incarnation="j1")
    assert new.epoch > old.epoch
    assert world.places("n1") == 0
    assert not world.store.stopped(old)


def test_an_expired_reservation_counts_as_nothing(world: World) -> None:
    world.announce()
    first = world.reserved()
    world.expire_place(first.sandbox_id)
    assert world.acquire().status == "requested"
    assert not world.store.created(first)
    second = world.reserved()
    assert second.epoch > first.epoch
    assert world.places() == 1
    assert world.store.created(second)


def test_a_lost_sandbox_is_requested_anew(world: World) -> None:
    world.announce()
    route = world.live()
    world.store.lost(route, reason="killed")
    assert world.acquire().status == "requested"


def test_acquires_of_one_thread_are_bounded(world: World) -> None:
    for i in range(1000):
        world.store.acquire(ALICE, Waiter(f"a{i}", "c1", "x", 60), wait_s=30, push=None)
    with pytest.raises(Busy):
        world.store.acquire(ALICE, Waiter("one more", "c1", "x", 60), wait_s=30, push=None)
    world.expire_waiters(ALICE)
    world.store.acquire(ALICE, Waiter("one more", "c1", "x", 60), wait_s=30, push=None)


def test_a_reservation_takes_a_place_and_names_the_home(world: World) -> None:
    world.announce()
    assert world.store.thread_home(ALICE) is None
    route = world.reserved()
    assert route == Route(ALICE.digest[:8], "n1", "i1", route.epoch)
    assert world.state(route) == "creating"
    assert world.places() == 1
    assert world.store.thread_home(ALICE) == "data-1"


def test_a_thread_has_one_sandbox(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    route = world.reserved()
    again = world.reserve(node_id="n2", incarnation="j1")
    assert (again.status, again.route) == ("creating", route)
    world.store.created(route)
    world.listen()
    world.expire_place("nothing")
    again = world.reserve(node_id="n2", incarnation="j1")
    assert (again.status, again.route) == ("live", route)
    assert (world.places("n1"), world.places("n2")) == (1, 0) or world.places("n2") == 0


def test_reserving_for_a_live_thread_answers_those_who_wait(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.listen()
    world.lapse_lease()
    world.acquire(op_id="late", agent="x")
    world.announce()
    assert world.reserve().status == "live"
    ((op_id, payload),) = world.replies()
    assert (op_id, payload["ok"]["epoch"], payload["ok"]["new"]) == ("late", route.epoch, False)
    assert world.state(route) == "live"


def test_places_never_exceed_the_replicas(world: World) -> None:
    world.announce(replicas=2)
    world.reserved(ALICE)
    world.live(BOB)
    carol = Identity("carol")
    assert world.reserve(carol).status == "full"
    assert world.store.thread_home(carol) is None
    assert world.places() == 2


@pytest.mark.parametrize("state", ["cordoned", "draining"])
def test_a_node_that_is_not_ready_gets_nothing_new(world: World, state: str) -> None:
    world.announce()
    world.store.set_node_state("n1", NodeState(state))
    assert world.reserve().status == "node_down"


def test_neither_a_dead_nor_an_unknown_nor_another_incarnation_gets_anything(world: World) -> None:
    assert world.reserve(node_id="nobody").status == "node_down"
    world.announce()
    assert world.reserve(incarnation="i0").status == "node_down"
    world.lapse_lease()
    assert world.reserve().status == "node_down"


def test_a_sandbox_id_that_belongs_to_another_is_extended(world: World) -> None:
    world.announce()
    world.forge_id(ALICE.digest[:8], "f" * 64)
    world.forge_id(ALICE.digest[:12], "f" * 64)
    assert world.reserved().sandbox_id == ALICE.digest[:16]


def test_an_epoch_never_goes_back_and_an_identity_keeps_its_id(world: World) -> None:
    world.announce()
    last = 0
    for _ in range(3):
        route = world.reserved()
        assert route.epoch > last
        assert route.sandbox_id == ALICE.digest[:8]
        last = route.epoch
        assert world.store.create_failed(route, ERROR)
    assert abs(last / 1000 - world.store.now_ms()) < 60_000


def test_a_creation_is_confirmed_once_and_only_by_its_own_route(world: World) -> None:
    world.announce()
    route = world.reserved()
    assert not world.store.created(Route(route.sandbox_id, "n1", "i1", route.epoch - 1))
    assert world.store.created(route)
    assert not world.store.created(route)


def test_a_failed_creation_frees_the_place_and_tells_those_who_wait(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire()
    route = world.reserved()
    assert not world.store.create_failed(Route(route.sandbox_id, "n1", "i1", 1), ERROR)
    assert world.store.create_failed(route, ERROR)
    assert world.replies() == [("a1", {"error": ERROR})]
    assert world.places() == 0
    assert world.store.sandbox(route.sandbox_id) is None
    assert not world.store.create_failed(route, ERROR)


def test_those_who_wait_can_be_told_that_there_is_no_room(world: World) -> None:
    world.listen()
    for i in range(3):
        world.acquire(op_id=f"a{i}")
    assert world.store.answer_waiters(ALICE, ERROR) == 3
    assert world.store.answer_waiters(ALICE, ERROR) == 0
    assert world.replies() == [(f"a{i}", {"error": ERROR}) for i in range(3)]


def test_users_with_one_thread_id_have_different_sandboxes(world: World) -> None:
    world.announce()
    one = world.live(Identity("t", "u1"), agent="")
    two = world.live(Identity("t", "u2"), agent="")
    assert one.sandbox_id != two.sandbox_id
    assert [i.user_id for i in world.store.sandboxes(thread_id="t", user_id="u2")] == ["u2"]
    assert len(world.store.sandboxes(thread_id="t")) == 2
    assert world.store.sandboxes(thread_id="other") == []
    assert len(world.store.sandboxes(node_id="n1")) == 2
    assert world.store.sandboxes(node_id="n2") == []
    ids = [info.sandbox_id for info in world.store.sandboxes()]
    assert ids == sorted(ids)


def test_an_unknown_sandbox_is_nowhere(world: World) -> None:
    assert world.store.sandbox("0" * 8) is None
    assert world.store.route("0" * 8) is None
