"""A fleet under ten times more demand than it has places: nobody starves, nothing is lost or counted twice."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from sandfleet.ids import Identity
from tests.unit.capacity_world import Fleet, Member

MAX_TICKS = 5000


def crowd(count: int, seed: int, *, restless: bool = False) -> list[Member]:
    """A fifth of all are threads of one user, most others of users with some thirty, the rest one each or nobody's."""
    dice = random.Random(seed)
    members = []
    for number in range(count):
        kind = number % 10
        user = "big" if kind < 2 else f"user-{number // 60}" if kind < 8 else f"single-{number}" if kind < 9 else None
        members.append(
            Member(
                Identity(f"t{number}", user),
                comes_at=0 if dice.random() < 0.8 else dice.randrange(1, 40),
                stays=dice.randrange(1, 12),
                patience=dice.randrange(1, 60) if restless and dice.random() < 0.1 else None,
                comes_again=restless and dice.random() < 0.1,
            )
        )
    dice.shuffle(members)
    return members


def run(fleet: Fleet, members: list[Member], *, check_every: int = 1) -> None:
    fleet.invite(members)
    while not fleet.is_over:
        assert fleet.now < MAX_TICKS, f"somebody waits for ever: {[m.identity for m in fleet.waiting][:5]}"
        fleet.tick()
        if fleet.now % check_every == 0:
            fleet.check()
    fleet.check()


def everybody_is_served_in_turn(fleet: Fleet, members: list[Member]) -> None:
    assert {member.state for member in members} == {"served"}
    assert all(member.answers == ["ok"] for member in members), "each waiter is answered exactly once"
    assert sorted(fleet.made) == sorted(member.identity.thread_id for member in members)
    # Every sandbox but the first ones needed the end of another, and of no more than one.
    assert fleet.done["created"] == len(members)
    assert fleet.done["removed"] == len(members) - fleet.places
    assert fleet.store.line_length() == 0


def a_user_with_one_thread_does_not_wait_for_one_with_a_thousand(fleet: Fleet, members: list[Member]) -> None:
    users = {member.identity.user_id for member in members}
    for member in members:
        if (member.identity.user_id or "").startswith("single-"):
            waited_for = member.made_by_then - member.made_before
            # Its turn is the one after the turn reached; before it come at most two of each user, and who has a place.
            assert waited_for <= 2 * len(users) + fleet.places, member


def places_were_given_in_the_order_of_turns(fleet: Fleet) -> None:
    turns = [turn for _, turn in fleet.given]
    assert len(turns) > len(fleet.members) / 2
    assert turns == sorted(turns)
    # A user's n-th waiting thread has the n-th turn, if all of its came together.
    of_user: dict[str, list[int]] = defaultdict(list)
    for user, turn in fleet.given:
        of_user[user].append(turn)
    assert all(len(set(got)) == len(got) for got in of_user.values()), "one turn, one thread of each user"


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_times_more_threads_than_places_are_all_served_in_turn(seed: int) -> None:
    fleet, members = Fleet(nodes=8, replicas=4, seed=seed), crowd(320, seed)
    run(fleet, members)
    everybody_is_served_in_turn(fleet, members)
    places_were_given_in_the_order_of_turns(fleet)
    a_user_with_one_thread_does_not_wait_for_one_with_a_thousand(fleet, members)


def test_the_same_seed_gives_the_same_course() -> None:
    courses = []
    for _ in range(2):
        fleet = Fleet(nodes=4, replicas=3, seed=7)
        run(fleet, crowd(100, 7, restless=True), check_every=10)
        courses.append((fleet.made, fleet.now, dict(fleet.done)))
    assert courses[0] == courses[1]


@pytest.mark.parametrize("seed", [3, 4])
def test_threads_that_give_up_or_come_back_and_schedulers_that_die_cost_nobody_a_place(seed: int) -> None:
    fleet, members = Fleet(nodes=6, replicas=4, seed=seed, lossy=True), crowd(240, seed, restless=True)
    run(fleet, members)
    assert {member.state for member in members} == {"served", "gave up"}
    assert all(member.patience is not None for member in members if member.state == "gave up")
    # Somebody may give up after room was made; otherwise no sandbox is ended but for one that is made.
    given_up = sum(member.state == "gave up" for member in members)
    assert fleet.done["removed"] <= fleet.done["created"] - fleet.places + given_up


def test_a_user_at_its_quota_keeps_nobody_else_waiting() -> None:
    fleet, members = Fleet(nodes=4, replicas=5, seed=5, max_per_user=3), crowd(150, 5)
    fleet.invite(members)
    while not fleet.is_over:
        assert fleet.now < MAX_TICKS
        fleet.tick()
        fleet.check()
        assert all(len(held) <= 3 for held in fleet.store._users.values())
    assert {member.state for member in members} == {"served"}


def visitors(count: int, seed: int, *, every: int) -> list[Member]:
    """One comes each so many ticks; every fourth wants another kind of sandbox."""
    dice = random.Random(seed)
    return [
        Member(Identity(f"v{number}"), 20 + every * number, stays=dice.randrange(1, 20), kind="aaab"[number % 4])
        for number in range(count)
    ]


def test_while_there_is_room_every_new_thread_finds_a_blank_sandbox_of_its_kind() -> None:
    fleet, members = Fleet(nodes=3, replicas=40, seed=1, kinds=("a", "a", "b")), visitors(90, 1, every=3)
    run(fleet, members)
    assert {member.state for member in members} == {"served"}
    assert fleet.done["claimed"] == len(members) == fleet.done["created"]
    assert fleet.done["removed"] == fleet.done["cold"] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_blank_sandboxes_of_any_kind_are_given_up_before_anybody_waits_or_is_evicted(seed: int) -> None:
    fleet, members = Fleet(nodes=4, replicas=6, seed=seed, kinds=("a", "a", "b", "c", "d")), crowd(240, seed)
    for member in members:
        member.comes_at += 60  # the nodes have filled their pools by then
    for number, member in enumerate(members):
        member.kind = "ab"[number % 2]
    run(fleet, members)
    assert {member.state for member in members} == {"served"}
    assert all(member.answers == ["ok"] for member in members)
    assert fleet.done["created"] == len(members)
    assert len(fleet.blanks_given) == fleet.done["claimed"] + fleet.done["given_up"]
    assert min(fleet.done["claimed"], fleet.done["given_up"]) > 0
    # What becomes ready is told to the line at once, and given away in the next tick.
    assert fleet.longest_kept <= 1
    places_were_given_in_the_order_of_turns(fleet)
    a_user_with_one_thread_does_not_wait_for_one_with_a_thousand(fleet, members)


@pytest.mark.parametrize("seed", [3, 4])
def test_blank_sandboxes_come_back_between_rushes_whoever_gives_up_or_dies(seed: int) -> None:
    fleet = Fleet(nodes=5, replicas=5, seed=seed, lossy=True, kinds=("a", "b"), idle_s=3)
    members = crowd(150, seed, restless=True)
    for number, member in enumerate(members):
        member.kind = "abc"[number % 3]
        member.comes_at += 400 * (number % 3)
    run(fleet, members)
    assert {member.state for member in members} == {"served", "gave up"}
    assert all(member.patience is not None for member in members if member.state == "gave up")
    assert fleet.done["claimed"] > 0
    assert fleet.longest_kept <= 11, "somebody looks at the line every ten ticks, whoever dies"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_five_thousand_threads_on_fifty_nodes() -> None:
    fleet, members = Fleet(nodes=50, replicas=10, seed=11), crowd(5000, 11)
    run(fleet, members, check_every=5)
    everybody_is_served_in_turn(fleet, members)
    places_were_given_in_the_order_of_turns(fleet)
    a_user_with_one_thread_does_not_wait_for_one_with_a_thousand(fleet, members)
