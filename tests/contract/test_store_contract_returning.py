"""What both stores promise a node that goes away and comes back, and the operations that ran on meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandfleet.errors import LeaseLost, NodeIdInUse
from sandfleet.model import NodeState
from sandfleet.store.base import NodeRecord, Route
from tests.contract.store_fixtures import ALICE, BOB, LONG_S, SPEC, World

SECOND = NodeRecord("n1", "i2", 4, "data-1", ("mock",))


def back(world: World, route: Route) -> Route:
    """The node is back as another incarnation, and has the sandbox again."""
    world.store.announce(SECOND, lease_s=LONG_S, take_over=True)
    new = replace(route, incarnation="i2")
    assert world.store.adopt(ALICE, SPEC, new, data_id="data-1")
    return new


def test_a_lease_is_taken_over_from_an_incarnation_of_the_same_data_root(world: World) -> None:
    world.announce("n1", "i1")
    world.store.announce(SECOND, lease_s=LONG_S, take_over=True)
    (node,) = world.store.nodes()
    assert (node.incarnation, node.state, node.alive) == ("i2", NodeState.READY, True)
    with pytest.raises(LeaseLost):
        world.store.renew("n1", "i1", lease_s=60)


def test_a_lease_of_another_data_root_is_not_taken_over(world: World) -> None:
    world.announce("n1", "i1")
    with pytest.raises(NodeIdInUse):
        world.store.announce(replace(SECOND, data_id="data-2"), lease_s=LONG_S, take_over=True)
    assert world.store.renew("n1", "i1", lease_s=60).known


def test_an_away_node_gets_nothing_new_and_its_sandboxes_are_live(world: World) -> None:
    world.announce()
    world.listen()
    route = world.live()
    world.blank("b1")
    assert world.store.set_node_state("n1", NodeState.AWAY, incarnation="i1", lease_s=LONG_S)
    assert world.acquire(op_id="a2").route == route
    assert world.reserve(BOB).status == "node_down"
    recorded = world.record(route)
    assert (recorded.status, recorded.route) == ("away", route)
    assert world.record(route, "o2", expect="live").status == "away"
    assert world.store.op("o1") is None
    assert world.store.blanks("n1") == {}
    assert world.places() == 1


def test_a_sandbox_that_is_being_removed_waits_for_its_away_node(world: World) -> None:
    world.announce()
    route = world.live()
    world.store.set_node_state("n1", NodeState.AWAY)
    assert world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test").status == "recorded"
    assert world.record(route, expect="stopping").status == "away"


def test_only_its_return_or_its_end_follows_upon_away(world: World) -> None:
    world.announce()
    assert world.store.set_node_state("n1", NodeState.AWAY)
    for state in (NodeState.READY, NodeState.CORDONED, NodeState.DRAINING):
        assert not world.store.set_node_state("n1", state)
    assert world.store.nodes()[0].state == NodeState.AWAY
    assert world.store.set_node_state("n1", NodeState.GONE)


def test_the_lease_of_an_away_node_lasts_as_long_as_it_said_and_no_longer(world: World) -> None:
    world.announce(lease_s=LONG_S)
    route = world.live()
    assert world.store.set_node_state("n1", NodeState.AWAY, incarnation="i1", lease_s=0.001)
    while world.store.nodes()[0].alive:
        pass
    assert world.acquire(op_id="a2").status == "requested"
    assert world.store.close_incarnation("n1", None, reason="it did not come back").sandboxes == (route.sandbox_id,)


def test_a_lapsed_lease_is_not_made_longer_by_going_away(world: World) -> None:
    world.announce()
    world.lapse_lease()
    assert world.store.set_node_state("n1", NodeState.AWAY, incarnation="i1", lease_s=LONG_S)
    assert not world.store.nodes()[0].alive


def test_a_claimed_operation_is_answered_by_the_incarnation_that_reattached_it(world: World) -> None:
    world.announce()
    world.listen()
    old = world.live()
    world.record(old)
    assert world.store.claim("o1", old).status == "claimed"
    new = back(world, old)
    assert world.store.reattach("o1", old, new)
    assert not world.store.reattach("o1", old, new), "once"
    world.store.close_incarnation("n1", "i2", reason="its node came back")
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.incarnation) == ("claimed", "i2")
    assert not world.store.finish("o1", old, outcome="ok", reply='{"ok":"old"}')
    assert world.store.sweep("n1", "i2")[0].busy
    assert world.store.finish("o1", new, outcome="ok", reply='{"ok":1}')
    assert world.replies()[-1] == ("o1", {"ok": 1})
    assert not world.store.sweep("n1", "i2")[0].busy


def test_closing_goes_past_what_was_reattached(world: World) -> None:
    world.announce()
    world.listen()
    old = world.live()
    for op_id in ("o1", "o2", "o3"):
        world.record(old, op_id)
    world.store.claim("o1", old)
    world.store.claim("o3", old)
    new = back(world, old)
    assert world.store.reattach("o1", old, new)
    closed = world.store.close_incarnation("n1", "i2", reason="its node came back")
    assert (closed.not_started, closed.unknown, closed.sandboxes) == (1, 1, ())
    assert [view.op_id for view in world.store.ops(node_id="n1")] == ["o1"]


@pytest.mark.parametrize("what", ["unclaimed", "not adopted", "another epoch", "another node", "lapsed", "finished"])
def test_nothing_else_is_reattached(world: World, what: str) -> None:
    world.announce()
    world.announce("n2", "j1")
    old = world.live()
    world.record(old)
    if what != "unclaimed":
        world.store.claim("o1", old)
    if what == "finished":
        world.store.finish("o1", old, outcome="ok", reply='{"ok":1}')
    if what == "not adopted":
        world.store.announce(SECOND, lease_s=LONG_S, take_over=True)
        new = replace(old, incarnation="i2")
    else:
        new = back(world, old)
    if what == "another epoch":
        new = replace(new, epoch=new.epoch + 1)
    if what == "another node":
        new = replace(new, node_id="n2", incarnation="j1")
    if what == "lapsed":
        world.lapse_lease()
    assert not world.store.reattach("o1", old, new)
    view = world.store.op("o1")
    assert view is not None
    assert view.incarnation == "i1"


def test_a_returning_node_s_sandboxes_are_live_until_it_has_closed_its_earlier_run(world: World) -> None:
    world.announce()
    world.listen()
    kept, gone = world.live(), world.live(BOB)
    world.store.announce(SECOND, lease_s=LONG_S, take_over=True)
    assert world.acquire(op_id="a2").route == kept
    assert world.reserve(BOB, incarnation="i2").route == gone
    assert world.record(kept).status == "node_down"
    new = replace(kept, incarnation="i2")
    assert world.store.adopt(ALICE, SPEC, new, data_id="data-1")
    assert world.store.close_incarnation("n1", "i2", reason="back").sandboxes == (gone.sandbox_id,)
    assert world.acquire(op_id="a3").route == new
    assert world.acquire(BOB, op_id="a4").status == "requested"


def test_a_node_that_dies_while_it_comes_back_has_nothing_live(world: World) -> None:
    world.announce()
    world.live()
    world.store.announce(SECOND, lease_s=LONG_S, take_over=True)
    world.lapse_lease()
    assert world.acquire(op_id="a2").status == "requested"


def test_a_node_that_is_back_on_another_data_root_has_nothing_live(world: World) -> None:
    world.announce()
    world.live()
    world.lapse_lease()
    world.store.announce(replace(SECOND, data_id="data-2"), lease_s=LONG_S, take_over=True)
    assert world.acquire(op_id="a2").status == "requested"
