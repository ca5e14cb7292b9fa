"""What only a shared server can show of the line and the quotas: races, a full Redis, what reading costs."""

from __future__ import annotations

from collections import Counter

import pytest

from sandfleet.errors import StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.store.base import Push
from tests.contract.store_fixtures import ALICE, BOB, RedisWorld, together


def test_many_schedulers_serve_one_line_and_every_thread_gets_one_place(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce(replicas=30)
    threads = [Identity(f"t{i}", f"u{i % 3}") for i in range(40)]
    for identity in threads:
        world.park(identity)

    def serve(_: int) -> Counter[str]:
        by_digest = {identity.digest: identity for identity in threads}
        line = world.store.parked()
        return Counter(world.reserve(by_digest[one.digest], from_line=True).status for one in line)

    answers = sum(together(4, serve), Counter[str]())
    assert answers["reserved"] == 30
    assert set(answers) <= {"reserved", "creating", "full", "withdrawn"}
    assert (world.places(), world.store.line_length()) == (30, 10)
    assert sum(len(world.counted_for(f"u{i}")) for i in range(3)) == 30


def test_a_thread_that_withdraws_while_it_is_served_is_either_placed_or_out_of_the_line(
    redis_world: RedisWorld,
) -> None:
    world = redis_world
    world.announce(replicas=100)
    threads = [Identity(f"t{i}") for i in range(20)]
    for identity in threads:
        world.park(identity)

    def act(i: int) -> str:
        identity = threads[i // 2]
        if i % 2:
            return world.reserve(identity, from_line=True).status
        return str(world.store.withdraw(identity, f"a-{identity.thread_id}") > 0)

    answers = together(40, act)
    assert world.store.line_length() == 0
    assert {(answers[i], answers[i + 1]) for i in range(0, 40, 2)} <= {("True", "withdrawn"), ("False", "reserved")}
    assert world.places() == answers.count("reserved")


def test_a_quota_holds_however_many_ask_at_once(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce(replicas=100)
    answers = Counter(r.status for r in together(20, lambda i: world.reserve(Identity(f"t{i}", "u"), max_per_user=7)))
    assert answers == {"reserved": 7, "quota": 13}


def test_a_full_redis_parks_nobody_and_still_has_the_line_served(full: RedisWorld) -> None:
    route = full.live(agent="")
    full.park(BOB)
    full.acquire(Identity("carol"))
    full.store.begin_stop(route.sandbox_id, owner=None, force=False, reason="test")
    full.store.serve_line()
    full.raw.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable) as refused:
        full.store.park(Identity("carol"), "{}", push=Push("scheduler", "serve"))
    assert refused.value.facts["reason"] == "full"
    assert full.line() == ["bob"]
    assert full.store.withdraw(Identity("carol"), "a1") == 0
    before = len(full.pushed("scheduler"))
    assert full.store.stopped(route)
    assert len(full.pushed("scheduler")) == before + 1, "what frees a place publishes even now"
    assert full.store.withdraw(BOB, "a-bob") == 1
    assert full.store.line_length() == 0


def test_a_message_that_cannot_be_published_undoes_nothing_and_is_tried_again(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live(agent="y")
    world.park(BOB)
    world.store.serve_line()
    world.raw.delete("scheduler")
    world.raw.set("scheduler", "not a list")
    assert world.store.release(route.sandbox_id, ALICE.digest, "y")
    assert world.state(route) == "warm"
    assert not world.store.serve_line(), "nothing was published"
    world.raw.delete("scheduler")
    assert world.store.stopped(route)
    assert world.pushed("scheduler") == ["serve"]


def test_reading_the_line_costs_little_however_long_it_is(redis_world: RedisWorld) -> None:
    world = redis_world
    for i in range(3000):
        world.park(Identity(f"t{i}", f"u{i % 7}"))
    world.raw.config_resetstat()
    page = world.store.parked(limit=100)
    assert len(page) == 100
    calls = {name: stat["calls"] for name, stat in world.raw.info("commandstats").items()}
    assert sum(n for name, n in calls.items() if name not in ("cmdstat_info", "cmdstat_config|resetstat")) <= 210


def test_a_turn_is_given_right_though_an_entry_of_the_users_turns_is_stale(redis_world: RedisWorld) -> None:
    world = redis_world
    world.raw.zadd("test:turns:u", {"f" * 64: 99})
    world.park(Identity("t", "u"))
    assert world.raw.zrange("test:turns:u", 0, -1, withscores=True) == [(Identity("t", "u").digest, 1.0)]
