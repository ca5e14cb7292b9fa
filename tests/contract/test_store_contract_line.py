"""What both stores promise about the line of threads that wait for a place."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sandfleet.ids import Identity
from sandfleet.store.base import Push
from tests.contract.store_fixtures import ALICE, BOB, ERROR, SPEC, World
from tests.services import wait_until


def full(world: World) -> None:
    """A node whose only place is taken."""
    world.announce(replicas=1)
    world.live(Identity("holder"))


def of(user: str, *names: str) -> list[Identity]:
    return [Identity(name, user) for name in names]


# --- turns -----------------------------------------------------------------------------------


def test_a_parked_thread_stands_in_line_with_what_was_asked_for_it(world: World) -> None:
    before = world.store.now_ms()
    thread = Identity("t", "u")
    assert world.park(thread, request='{"want": 1}') == 1
    assert world.park(ALICE) == 2
    (first, second) = world.store.parked()
    assert (first.digest, first.user_id, first.request) == (thread.digest, "u", '{"want": 1}')
    assert (second.digest, second.user_id) == (ALICE.digest, None)
    assert before <= first.waiting_since_ms <= second.waiting_since_ms <= world.store.now_ms()
    assert world.store.line_length() == 2


def test_a_users_second_thread_stands_behind_everybodys_first(world: World) -> None:
    for identity in [*of("u", "u1", "u2", "u3"), *of("v", "v1"), Identity("n1"), Identity("n2"), *of("v", "v2")]:
        world.park(identity)
    assert world.line() == ["u1", "v1", "n1", "u2", "n2", "v2", "u3"]


def test_the_order_is_that_of_turns_and_then_of_arrival_whoever_comes(world: World) -> None:
    dice, seen, expected = random.Random(3), Counter[str](), []
    for arrival in range(120):
        user = dice.choice(["", "u", "u", "u", "v", "w"])
        seen[user] += 1
        world.park(Identity(f"t{arrival}", user or None))
        expected.append((seen[user], arrival))
    assert world.line() == [f"t{arrival}" for _, arrival in sorted(expected)]


def test_a_newcomer_stands_behind_the_turn_that_was_reached(world: World) -> None:
    full(world)
    for identity in of("u", "u1", "u2", "u3"):
        world.park(identity)
    world.announce("n2", "j1")
    assert world.reserve(Identity("u1", "u"), "n2", "j1", from_line=True).status == "reserved"
    world.park(Identity("new", "v"))
    assert world.line() == ["u2", "new", "u3"]
    assert world.reserve(Identity("u3", "u"), "n2", "j1", from_line=True).status == "reserved"
    assert world.reserve(Identity("u2", "u"), "n2", "j1", from_line=True).status == "reserved"
    world.park(Identity("late", "w"))
    world.park(Identity("u4", "u"))
    assert world.line() == ["new", "late", "u4"]


def test_whose_first_thread_was_passed_over_does_not_overtake_with_the_second(world: World) -> None:
    world.announce(replicas=10)
    world.park(Identity("u1", "u"))
    for identity in of("v", "v1", "v2", "v3", "v4"):
        world.park(identity)
    for identity in of("v", "v1", "v2", "v3"):
        assert world.reserve(identity, from_line=True).status == "reserved"
    world.park(Identity("u2", "u"))
    assert world.line() == ["u1", "v4", "u2"]


def test_parking_again_keeps_the_turn_and_takes_the_new_request(world: World) -> None:
    world.park(ALICE)
    (before,) = world.store.parked()
    world.park(Identity("t", "u"))
    assert world.park(ALICE, request="another") == 2
    after = world.store.parked()[0]
    assert (after.digest, after.request) == (ALICE.digest, "another")
    assert (after.cursor, after.waiting_since_ms) == (before.cursor, before.waiting_since_ms)


def test_whoever_gave_up_does_not_hold_their_users_next_thread_back(world: World) -> None:
    for identity in of("u", "u1", "u2", "u3"):
        world.park(identity)
    for identity in of("u", "u2", "u3"):
        world.store.withdraw(identity, f"a-{identity.thread_id}")
    world.park(Identity("u4", "u"))
    world.park(Identity("v1", "v"))
    world.park(Identity("v2", "v"))
    assert world.line() == ["u1", "v1", "u4", "v2"]


# --- who may stand there, and until when -----------------------------------------------------


def test_a_thread_that_nobody_waits_for_is_not_parked(world: World) -> None:
    assert world.store.park(ALICE, "{}", push=Push("scheduler", "serve")) == 0
    world.acquire()
    world.expire_waiters(ALICE)
    assert world.store.park(ALICE, "{}", push=Push("scheduler", "serve")) == 0
    assert world.store.parked() == []
    assert world.pushed("scheduler") == ["acquire alice"]


@pytest.mark.parametrize("state", ["creating", "live", "stopping"])
def test_a_thread_that_has_something_is_not_parked(world: World, state: str) -> None:
    world.announce()
    world.acquire()
    route = world.reserved()
    if state != "creating":
        world.store.created(route)
        world.lapse_lease()
        world.acquire()
        world.announce()
    if state == "stopping":
        world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    assert world.waiting(ALICE) == 1
    assert world.store.park(ALICE, "{}", push=Push("scheduler", "serve")) == 0
    assert world.store.line_length() == 0


def test_an_acquire_of_a_parked_thread_waits_in_line_and_publishes_nothing(world: World) -> None:
    world.park()
    before = world.pushed("scheduler")
    acquired = world.acquire(op_id="second")
    assert (acquired.status, acquired.route) == ("parked", None)
    assert world.pushed("scheduler") == before
    assert world.waiting(ALICE) == 2
    assert world.line() == ["alice"]


def test_a_place_ends_the_wait(world: World) -> None:
    world.announce()
    world.listen()
    world.park()
    reserved = world.reserve(from_line=True)
    assert reserved.status == "reserved"
    assert world.store.parked() == []
    assert world.store.line_length() == 0
    assert world.acquire(op_id="later").status == "creating"
    assert reserved.route is not None
    world.store.created(reserved.route)
    assert sorted(op_id for op_id, _ in world.replies()) == ["a-alice", "later"]


def test_an_adopted_sandbox_ends_the_wait(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.listen()
    world.flush()
    world.announce()
    world.listen()
    world.park()
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    assert world.store.line_length() == 0
    assert [op_id for op_id, _ in world.replies()] == ["a-alice"]


def test_a_sandbox_whose_node_came_back_ends_the_wait_when_the_line_is_served(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.listen()
    world.lapse_lease()
    world.park()
    world.announce()
    reserved = world.reserve(from_line=True)
    assert (reserved.status, reserved.route) == ("live", route)
    assert world.store.line_length() == 0
    assert [op_id for op_id, _ in world.replies()] == ["a-alice"]


def test_an_error_ends_the_wait(world: World) -> None:
    world.listen()
    world.park()
    assert world.store.answer_waiters(ALICE, ERROR) == 1
    assert world.store.line_length() == 0
    assert world.replies() == [("a-alice", {"error": ERROR})]


def test_the_last_who_withdraws_takes_the_thread_out_of_the_line(world: World) -> None:
    world.park(BOB)
    world.park(ALICE)
    world.park(ALICE, op_id="second")
    assert world.store.withdraw(ALICE, "a-alice") == 2
    assert world.line() == ["bob", "alice"]
    assert world.store.withdraw(ALICE, "second") == 2
    assert world.line() == ["bob"]
    assert world.store.withdraw(ALICE, "second") == 0
    assert world.store.withdraw(BOB, "a-bob") == 1
    assert world.waiting(BOB) == 0


def test_a_withdrawn_waiter_is_not_answered_and_gets_no_place(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire(op_id="stays")
    world.acquire(op_id="leaves")
    assert world.store.withdraw(ALICE, "leaves") == 0
    assert world.store.withdraw(ALICE, "never came") == 0
    assert world.store.withdraw(BOB, "leaves") == 0
    world.store.created(world.reserved())
    assert [op_id for op_id, _ in world.replies()] == ["stays"]


def test_no_place_goes_to_a_thread_that_gave_up_while_the_line_was_served(world: World) -> None:
    world.announce()
    world.park(ALICE)
    world.park(BOB)
    assert len(world.store.parked()) == 2
    world.store.withdraw(ALICE, "a-alice")
    world.expire_waiters(BOB)
    assert world.reserve(ALICE, from_line=True).status == "withdrawn"
    assert world.reserve(BOB, from_line=True).status == "withdrawn"
    assert world.reserve(Identity("never-parked"), from_line=True).status == "withdrawn"
    assert world.places() == 0
    assert world.store.line_length() == 0


def test_reading_the_line_drops_those_whose_waiters_expired(world: World) -> None:
    for name in ("a", "b", "c"):
        world.park(Identity(name))
    world.expire_waiters(Identity("b"))
    assert world.store.line_length() == 3
    assert world.line() == ["a", "c"]
    assert world.store.line_length() == 2


def test_a_thread_is_waited_for_until_its_most_patient_waiter_expires(world: World) -> None:
    world.store.acquire(ALICE, world.waiter("brief"), wait_s=0.01, push=None)
    world.park(ALICE, op_id="patient")
    world.store.acquire(ALICE, world.waiter("hasty"), wait_s=0.01, push=None)
    wait_until(lambda: world.waiting(ALICE) == 1, 5)
    assert world.line() == ["alice"]
    world.store.acquire(BOB, world.waiter("asks again"), wait_s=0.05, push=None)
    assert world.park(BOB, op_id="asks again") == 2
    assert world.line() == ["alice", "bob"]
    world.store.withdraw(ALICE, "patient")
    assert world.line() == ["bob"], "the brief ones are gone"


def test_an_empty_line_leaves_nothing_of_those_who_stood_there(world: World) -> None:
    world.park(Identity("t", "u"))
    world.park(ALICE)
    world.store.withdraw(ALICE, "a-alice")
    world.expire_waiters(Identity("t", "u"))
    assert world.store.parked() == []
    left = [key for key in world.key_names() if any(name in key for name in ("parked", "turns"))]
    assert left == []


def test_a_line_that_was_lost_is_formed_again_by_those_who_ask_again(world: World) -> None:
    world.park(ALICE)
    world.flush()
    assert world.store.parked() == []
    assert world.acquire().status == "requested"
    assert world.park(ALICE) == 1


# --- reading ---------------------------------------------------------------------------------


def test_the_line_is_read_in_pages(world: World) -> None:
    names = [f"t{i:03}" for i in range(25)]
    for name in names:
        world.park(Identity(name))
    read, cursor = [], ""
    while page := world.store.parked(after=cursor, limit=10):
        assert len(page) <= 10
        read += [parked.request.removeprefix("request ") for parked in page]
        cursor = page[-1].cursor
    assert read == names
    assert len(world.store.parked(limit=0)) == 1


def test_a_page_has_at_most_a_thousand(world: World) -> None:
    for i in range(1010):
        world.park(Identity(f"t{i}"))
    first = world.store.parked(limit=5000)
    assert len(first) == 1000
    assert len(world.store.parked(after=first[-1].cursor)) == 10


def test_a_page_of_the_departed_is_not_the_end_of_the_line(world: World) -> None:
    for i in range(30):
        world.park(Identity(f"t{i:02}"))
    for i in range(25):
        world.expire_waiters(Identity(f"t{i:02}"))
    page = world.store.parked(limit=3)
    assert [parked.request for parked in page] == ["request t25", "request t26", "request t27"]
    assert len(world.store.parked(after=page[-1].cursor, limit=3)) == 2


def test_a_cursor_holds_while_the_line_changes(world: World) -> None:
    world.announce(replicas=10)
    for name in ("a", "b", "c", "d", "e"):
        world.park(Identity(name))
    page = world.store.parked(limit=2)
    world.store.withdraw(Identity("a"), "a-a")
    assert world.reserve(Identity("b"), from_line=True).status == "reserved"
    world.store.withdraw(Identity("c"), "a-c")
    world.park(Identity("f"))
    rest = world.store.parked(after=page[-1].cursor)
    assert [parked.request for parked in rest] == ["request d", "request e", "request f"]
