"""What both stores promise about a sandbox in use, its end, and its node's upkeep."""

from __future__ import annotations

from sandfleet.ids import Identity
from sandfleet.store.base import Route
from tests.contract.store_fixtures import ALICE, BOB, SPEC, World


def stop(world: World, route: Route, *, force: bool = False, owner: str | None = None) -> str:
    return world.store.begin_stop(route.sandbox_id, owner=owner, force=force, reason="test").status


def warm_since(world: World, route: Route) -> int:
    (swept,) = world.store.sweep("n1", "i1")
    assert swept.sandbox_id == route.sandbox_id
    assert swept.warm_since_ms is not None
    assert not swept.busy
    return swept.warm_since_ms


def test_a_sandbox_is_warm_when_its_last_agent_left(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    world.acquire(agent="two")
    assert world.store.release(route.sandbox_id, ALICE.digest, "one")
    assert world.state(route) == "live"
    assert world.store.release(route.sandbox_id, ALICE.digest, "two")
    assert world.state(route) == "warm"
    assert world.store.nodes()[0].warm == 1


def test_a_running_operation_keeps_a_released_sandbox_from_being_warm(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    world.record(route)
    world.store.release(route.sandbox_id, ALICE.digest, "one")
    assert world.state(route) == "live"
    assert world.store.finish("o1", route, outcome="ok", reply="{}")
    assert world.state(route) == "warm"


def test_an_operation_takes_a_warm_sandbox_out_of_the_pool(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.record(route)
    assert world.state(route) == "live"
    assert stop(world, route) == "busy"


def test_only_the_owner_releases(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    assert not world.store.release(route.sandbox_id, BOB.digest, "one")
    assert not world.store.release("0" * 8, ALICE.digest, "one")
    assert world.state(route) == "live"
    assert world.store.release(route.sandbox_id, ALICE.digest, "never was in it")
    assert world.state(route) == "live"


def test_an_agent_learns_which_of_its_holds_are_gone(world: World) -> None:
    world.announce()
    held = world.live(ALICE, agent="me")
    other = world.live(BOB, agent="someone")
    holds = {held.sandbox_id: ALICE.digest, other.sandbox_id: ALICE.digest, "0" * 8: ALICE.digest}
    assert world.store.renew_agents("me", holds, ttl_s=60) == [other.sandbox_id, "0" * 8]
    assert world.store.renew_agents("me", {}, ttl_s=60) == []
    world.store.lost(held, reason="killed")
    assert world.store.renew_agents("me", {held.sandbox_id: ALICE.digest}, ttl_s=60) == [held.sandbox_id]
    world.store.begin_stop(other.sandbox_id, owner=None, force=True, reason="test")
    assert world.store.renew_agents("someone", {other.sandbox_id: BOB.digest}, ttl_s=60) == [other.sandbox_id]


def test_a_hold_that_lapsed_is_taken_again_and_the_sandbox_is_not_warm(world: World) -> None:
    world.announce()
    route = world.live(agent="me")
    world.expire_agent(route.sandbox_id, "me")
    world.store.sweep("n1", "i1")
    assert world.state(route) == "warm"
    assert world.store.renew_agents("me", {route.sandbox_id: ALICE.digest}, ttl_s=60) == []
    assert world.state(route) == "live"
    assert stop(world, route) == "busy"
    assert world.store.release(route.sandbox_id, ALICE.digest, "me")
    assert world.state(route) == "warm"


def test_a_hold_that_the_store_lost_is_taken_again_once_its_sandbox_is_adopted(world: World) -> None:
    world.announce()
    route = world.live(agent="me")
    world.flush()
    world.announce()
    assert world.store.renew_agents("me", {route.sandbox_id: ALICE.digest}, ttl_s=60) == [route.sandbox_id]
    assert world.store.adopt(ALICE, SPEC, route, data_id="data-1")
    assert world.store.renew_agents("me", {route.sandbox_id: ALICE.digest}, ttl_s=60) == []
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert (info.state, info.agents) == ("live", 1)


def test_many_holds_are_renewed_in_one_call(world: World) -> None:
    world.announce(replicas=1000)
    routes = [world.live(Identity(f"t{i}"), agent="me") for i in range(450)]
    holds = {route.sandbox_id: Identity(f"t{i}").digest for i, route in enumerate(routes)}
    world.store.lost(routes[420], reason="killed")
    assert world.store.renew_agents("me", holds, ttl_s=60) == [routes[420].sandbox_id]


def test_nothing_in_use_is_stopped_unless_forced(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    assert stop(world, route) == "busy"
    assert world.state(route) == "live"
    assert stop(world, route, force=True) == "recorded"
    assert world.state(route) == "stopping"


def test_an_expired_agent_does_not_keep_a_sandbox(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    world.expire_agent(route.sandbox_id, "one")
    assert stop(world, route) == "recorded"


def test_a_stop_says_what_it_found(world: World) -> None:
    world.announce()
    assert stop(world, Route("0" * 8, "n1", "i1", 1)) == "not_found"
    route = world.reserved()
    assert stop(world, route) == "creating"
    world.store.created(route)
    assert stop(world, route, owner=BOB.digest) == "not_found"
    recorded = world.store.begin_stop(route.sandbox_id, owner=ALICE.digest, force=False, reason="test")
    assert (recorded.status, recorded.route) == ("recorded", route)
    again = world.store.begin_stop(route.sandbox_id, owner=ALICE.digest, force=True, reason="test")
    assert (again.status, again.route) == ("stopping", route)


def test_stopping_a_lost_sandbox_forgets_it(world: World) -> None:
    world.announce()
    route = world.live()
    world.store.lost(route, reason="killed")
    assert stop(world, route) == "lost"
    assert stop(world, route) == "not_found"
    assert world.store.sandboxes() == []


def test_the_reaper_takes_only_what_was_warm_long_enough(world: World) -> None:
    world.announce()
    route = world.live(agent="one")
    now = world.store.now_ms()

    def reap(before_ms: int) -> str:
        stopped = world.store.begin_stop(
            route.sandbox_id, owner=None, force=False, reason="idle", if_warm_before_ms=before_ms
        )
        return stopped.status

    assert reap(now + 60_000) == "busy"
    world.store.release(route.sandbox_id, ALICE.digest, "one")
    assert reap(now - 60_000) == "busy"
    since = warm_since(world, route)
    assert reap(since - 1) == "busy"
    assert reap(since) == "recorded"


def test_a_stopping_sandbox_keeps_its_place_until_its_removal_is_confirmed(world: World) -> None:
    world.announce(replicas=1)
    route = world.live(agent="")
    stop(world, route)
    assert world.places() == 1
    assert world.reserve(BOB).status == "full"
    assert not world.store.stopped(Route(route.sandbox_id, "n1", "i1", route.epoch + 1))
    assert world.store.stopped(route)
    assert not world.store.stopped(route)
    assert world.places() == 0
    assert world.store.sandbox(route.sandbox_id) is None
    assert world.store.thread_home(ALICE) == "data-1"
    assert world.reserve(BOB).status == "reserved"


def test_an_acquire_during_a_stop_is_requested_when_the_old_one_is_gone(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    stop(world, route)
    assert world.acquire().status == "creating"
    assert world.reserve().status == "creating"
    assert world.pushed("scheduler") == []
    world.store.stopped(route)
    assert world.pushed("scheduler") == ["acquire alice"]
    assert world.reserve().status == "reserved"


def test_a_dead_sandbox_is_lost_and_its_place_free_at_once(world: World) -> None:
    world.announce(replicas=1)
    route = world.live()
    world.record(route)
    world.store.claim("o1", route)
    assert not world.store.lost(Route(route.sandbox_id, "n1", "i1", 1), reason="killed")
    assert world.store.lost(route, reason="killed")
    assert not world.store.lost(route, reason="killed")
    assert world.places() == 0
    assert world.state(route) == "lost"
    assert not world.store.stopped(route)
    assert world.store.finish("o1", route, outcome="sandbox_lost", reply="{}"), "its node still answers"


def test_a_stopping_sandbox_is_not_lost(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    stop(world, route)
    assert not world.store.lost(route, reason="killed")
    assert world.places() == 1


def test_losing_a_creation_tells_those_who_wait(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire()
    world.store.lost(world.reserved(), reason="killed")
    assert world.replies()[0][1]["error"]["code"] == "not_started"


def test_a_sweep_makes_warm_what_everybody_left_without_a_word(world: World) -> None:
    world.announce()
    route = world.live(agent="crashed")
    world.record(route)
    world.expire_agent(route.sandbox_id, "crashed")
    (held,) = world.store.sweep("n1", "i1")
    assert (held.warm_since_ms, held.busy) == (None, True)
    world.expire_busy(route.sandbox_id, "o1")
    since = warm_since(world, route)
    assert abs(since - world.store.now_ms()) < 5000
    assert world.state(route) == "warm"
    assert warm_since(world, route) == since, "warm since then, not since the last sweep"


def test_a_sweep_removes_a_creation_that_took_too_long_and_tells_those_who_wait(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire()
    route = world.reserved()
    world.expire_place(route.sandbox_id)
    world.store.sweep("n1", "i1")
    assert world.store.sandbox(route.sandbox_id) is None
    assert world.places() == 0
    assert world.replies()[0][1]["error"]["code"] == "not_started"


def test_a_sweep_drops_operations_whose_record_expired(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    world.expire_op("o1")
    assert world.store.nodes()[0].inflight == 1
    world.store.sweep("n1", "i1")
    assert world.store.nodes()[0].inflight == 0


def test_another_incarnation_sweeps_nothing(world: World) -> None:
    world.announce()
    route = world.reserved()
    world.expire_place(route.sandbox_id)
    assert world.store.sweep("n1", "i0") == []
    assert world.state(route) == "creating"


def test_a_sweep_tells_how_every_living_sandbox_is_used_the_longest_unused_first(world: World) -> None:
    world.announce(replicas=5)
    routes = [world.live(ALICE, agent=""), world.live(BOB, agent=""), world.live(Identity("carol"))]
    world.reserved(Identity("created"))
    world.record(routes[2], identity=Identity("carol"))
    stopping = world.live(Identity("ends"), agent="")
    stop(world, stopping)
    swept = world.store.sweep("n1", "i1")
    assert {one.sandbox_id for one in swept} == {route.sandbox_id for route in routes}
    unused = [one.used_ms if one.warm_since_ms is None else one.warm_since_ms for one in swept]
    assert unused == sorted(unused)
    told = {one.sandbox_id: (one.warm_since_ms is None, one.busy) for one in swept}
    assert [told[route.sandbox_id] for route in routes] == [(False, False), (False, False), (True, True)]
    now = world.store.now_ms()
    assert all(now - 60_000 < one.created_ms <= one.used_ms <= now for one in swept)


def test_a_sandbox_tells_its_story(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    stop(world, route)
    world.store.stopped(route)
    story = world.store.story(route.sandbox_id)
    assert [entry["event"] for entry in story] == ["reserved", "live", "stopping", "stopped"]
    assert {entry["epoch"] for entry in story} == {route.epoch}
    assert all(abs(entry["at_ms"] - world.store.now_ms()) < 60_000 for entry in story)
    assert world.store.story("nobody") == []


def test_a_story_keeps_its_last_hundred_chapters(world: World) -> None:
    world.announce()
    route = world.live(agent="x")
    for _ in range(60):
        world.store.release(route.sandbox_id, ALICE.digest, "x")
        world.acquire(agent="x")
    for _ in range(60):
        world.store.release(route.sandbox_id, ALICE.digest, "x")
        world.acquire(agent="x")
    story = world.store.story(route.sandbox_id)
    assert len(story) == 100
    assert story[-1]["event"] == "warm"
