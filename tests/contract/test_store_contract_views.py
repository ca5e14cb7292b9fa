"""What both stores promise about what a node and its upkeep see: places, reasons, use."""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import Route
from tests.contract.store_fixtures import ALICE, LONG_S, World


def node(world: World, node_id: str = "n1") -> NodeView:
    return next(view for view in world.store.nodes() if view.node_id == node_id)


def stop(world: World, route: Route, **conditions: Any) -> str:
    conditions.setdefault("force", False)
    return world.store.begin_stop(route.sandbox_id, owner=None, reason="test", **conditions).status


def test_a_node_shows_what_its_places_are_taken_by(world: World) -> None:
    world.announce(replicas=10)
    world.reserved(Identity("c1"))
    world.expire_place(world.reserved(Identity("c2")).sandbox_id)
    ending, gone, dead = (world.live(Identity(name), agent="") for name in ("s1", "s2", "s3"))
    for route in (ending, gone, dead):
        stop(world, route)
    warm = world.live(Identity("w1"), agent="")
    world.live(Identity("l1"))
    view = node(world)
    assert (view.places, view.creating, view.stopping, view.warm) == (6, 1, 3, 1)
    assert [sandbox_id for sandbox_id, _ in view.idlest] == [warm.sandbox_id]
    assert world.store.stopped(gone)
    world.age_stop(dead.sandbox_id)
    assert node(world).stopping == 1, "what has taken too long to stop is not counted on"
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    view = node(world)
    assert (view.places, view.creating, view.stopping, view.warm, view.idlest) == (0, 0, 0, 0, ())


def test_a_node_names_its_longest_idle_first_and_not_all(world: World) -> None:
    world.announce(replicas=100)
    for i in range(40):
        world.live(Identity(f"t{i}"), agent="")
    idlest = node(world).idlest
    since = {one.sandbox_id: one.warm_since_ms for one in world.store.sweep("n1", "i1")}
    assert len(idlest) == 32
    assert [ms for _, ms in idlest] == sorted(ms for ms in since.values() if ms is not None)[:32]
    assert all(since[sandbox_id] == ms for sandbox_id, ms in idlest)


def test_a_reason_is_shown_until_the_node_is_ready_again(world: World) -> None:
    world.announce()
    assert node(world).reason == ""
    assert world.store.set_node_state("n1", NodeState.CORDONED, incarnation="i1", reason="3 creates failed")
    assert node(world).reason == "3 creates failed"
    assert world.store.story("n1")[-1]["reason"] == "3 creates failed"
    world.store.set_node_state("n1", NodeState.CORDONED)
    assert node(world).reason == "3 creates failed", "cordoned for the same reason still"
    world.announce()
    assert node(world).reason == "3 creates failed"
    world.store.set_node_state("n1", NodeState.CORDONED, reason="maintenance")
    assert node(world).reason == "maintenance"
    world.store.set_node_state("n1", NodeState.READY, reason="never kept")
    assert node(world).reason == ""


def test_a_reason_ends_with_the_state_or_the_incarnation_it_was_told_of(world: World) -> None:
    world.announce()
    world.store.set_node_state("n1", NodeState.CORDONED, reason="failing")
    world.store.set_node_state("n1", NodeState.DRAINING)
    assert node(world).reason == ""
    world.store.set_node_state("n1", NodeState.CORDONED, reason="failing")
    assert not world.store.set_node_state("n1", NodeState.CORDONED, incarnation="i0", reason="not its own")
    assert node(world).reason == "failing"
    world.lapse_lease()
    world.announce(incarnation="i2")
    view = node(world)
    assert (view.state, view.reason) == (NodeState.READY, "")


def test_a_node_may_change_its_places_and_its_burst(world: World) -> None:
    world.announce(replicas=1, burst_limit=3)
    assert node(world).burst_limit == 3
    world.announce(replicas=2, burst_limit=0)
    view = node(world)
    assert (view.replicas, view.burst_limit) == (2, 0)


def test_what_takes_a_place_on_a_node_is_listed_without_reading_the_fleet(world: World) -> None:
    world.announce(replicas=500)
    world.announce("n2", "j1")
    world.live(Identity("elsewhere"), node_id="n2")
    routes = [world.live(Identity(f"t{i}"), agent="") for i in range(210)]
    creating, lost = world.reserved(Identity("c")), world.live(Identity("l"))
    stop(world, routes[0])
    world.store.lost(lost, reason="killed")
    here = world.store.sandboxes(node_id="n1")
    assert [info.sandbox_id for info in here] == sorted(r.sandbox_id for r in [*routes, creating])
    assert {info.state for info in here} == {"creating", "warm", "stopping"}
    assert lost.sandbox_id in {info.sandbox_id for info in world.store.sandboxes()}
    assert [info.thread_id for info in world.store.sandboxes(node_id="n1", thread_id="t7")] == ["t7"]
    assert world.store.sandboxes(node_id="nowhere") == []


def used_at(world: World, route: Route) -> int:
    (one,) = [one for one in world.store.sweep("n1", "i1") if one.sandbox_id == route.sandbox_id]
    return one.used_ms


def pass_a_moment(world: World) -> None:
    before = world.store.now_ms()
    while world.store.now_ms() <= before:
        pass


def test_whatever_is_done_in_a_sandbox_shows_that_it_is_used(world: World) -> None:
    world.announce()
    route = world.live()
    seen = [used_at(world, route)]
    for step in (
        lambda: world.record(route),
        lambda: world.store.finish("o1", route, outcome="ok", reply="{}"),
        lambda: world.acquire(agent="second"),
        lambda: world.store.release(route.sandbox_id, ALICE.digest, "second"),
    ):
        pass_a_moment(world)
        step()
        seen.append(used_at(world, route))
    assert seen == sorted(set(seen)), "each is later than the one before"
    pass_a_moment(world)
    world.store.renew_agents("agent-1", {route.sandbox_id: ALICE.digest}, ttl_s=LONG_S)
    world.store.claim("o1", route)
    assert used_at(world, route) == seen[-1], "to hold it is not to use it"


def test_an_operation_of_the_fleet_is_no_use(world: World) -> None:
    world.announce()
    route = world.live()
    stop(world, route, force=True)
    before = world.store.sandbox(route.sandbox_id)
    pass_a_moment(world)
    world.record(route, kind="node.destroy", expect="stopping")
    world.store.finish("o1", route, outcome="ok", reply="{}")
    after = world.store.sandbox(route.sandbox_id)
    assert before is not None
    assert after is not None
    assert after.used_at == before.used_at


def test_an_operation_that_ends_after_its_sandbox_revives_nothing(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    world.store.claim("o1", route)
    stop(world, route, force=True)
    world.store.stopped(route)
    assert world.store.finish("o1", route, outcome="sandbox_gone", reply="{}")
    assert world.store.sandbox(route.sandbox_id) is None
    assert not [key for key in world.key_names() if f"sandbox:{route.sandbox_id}" in key]


def test_what_is_held_but_idle_is_stopped_under_its_holders(world: World) -> None:
    world.announce()
    route = world.live(agent="holder")
    used = used_at(world, route)
    assert stop(world, route, if_idle_before_ms=used) == "busy", "it was used at that time"
    assert stop(world, route, if_idle_before_ms=used - 1) == "busy"
    assert world.state(route) == "live"
    assert stop(world, route, if_idle_before_ms=used + 1) == "recorded"
    assert world.state(route) == "stopping"


@pytest.mark.parametrize("force", [False, True])
def test_a_running_operation_keeps_a_sandbox_from_ending_for_idleness(world: World, force: bool) -> None:
    world.announce()
    route = world.live(agent="holder")
    world.record(route)
    later = world.store.now_ms() + 60_000
    assert stop(world, route, if_idle_before_ms=later, force=force) == "busy"
    world.expire_busy(route.sandbox_id, "o1")
    assert stop(world, route, if_idle_before_ms=later, force=force) == "recorded"


def test_both_conditions_of_a_stop_must_hold(world: World) -> None:
    world.announce()
    route = world.live(agent="holder")
    later = world.store.now_ms() + 60_000
    assert stop(world, route, if_idle_before_ms=later, if_warm_before_ms=later) == "busy"
    world.store.release(route.sandbox_id, ALICE.digest, "holder")
    assert stop(world, route, if_idle_before_ms=1, if_warm_before_ms=later) == "busy"
    assert stop(world, route, if_idle_before_ms=later, if_warm_before_ms=later) == "recorded"
