"""What both stores promise about saved data: what a sandbox began with, where a thread's home is, asking a node."""

from __future__ import annotations

from dataclasses import replace

from sandfleet.checkpoints import Restoration
from sandfleet.store.base import OpRecord, Push, Route
from tests.contract.store_fixtures import ALICE, World


def test_a_creation_that_fails_elsewhere_leaves_the_home_of_the_data_where_it_is(world: World) -> None:
    world.announce()
    world.store.lost(world.live(), reason="killed")
    world.announce("n2", "j1")
    reserved = world.reserve(node_id="n2", incarnation="j1", data_id="data-2")
    assert reserved.route is not None
    assert world.store.thread_home(ALICE) == "data-1"
    assert world.store.create_failed(reserved.route, {"code": "no_checkpoint", "message": "none", "facts": {}})
    assert world.store.thread_home(ALICE) == "data-1"
    again = world.reserve(node_id="n2", incarnation="j1", data_id="data-2")
    assert again.route is not None
    assert world.store.created(again.route)
    assert world.store.thread_home(ALICE) == "data-2"


def test_what_a_sandbox_began_with_is_told_as_long_as_it_lives(world: World) -> None:
    world.announce()
    began = Restoration(
        "0123456789abcdef", 12.5, 3, 1000, passed_over=("f" * 16,), consistent=False, skipped=("a: a pipe",)
    )
    route = world.reserved()
    assert world.store.created(route, restored=began)
    found = world.store.sandbox(route.sandbox_id)
    assert found is not None
    assert found.restored == began
    assert [info.restored for info in world.store.sandboxes(node_id="n1")] == [began]
    world.store.lost(route, reason="killed")
    again = world.reserved()
    assert world.store.created(again)
    found = world.store.sandbox(again.sandbox_id)
    assert found is not None
    assert found.restored is None


def test_an_operation_of_a_node_itself_asks_for_no_sandbox(world: World) -> None:
    world.announce()
    route = Route(ALICE.digest, "n1", "i1", 0)
    op = OpRecord("list-1", "node.checkpoints", route, ALICE.digest, 2**50, 2**50, expect="node", effect=False)
    assert world.store.record(op, Push("queue", "message")).status == "recorded"
    assert world.store.sandboxes() == []
    assert world.store.finish("list-1", route, outcome="ok", reply="{}")
    dead = replace(op, op_id="list-2", route=replace(route, incarnation="i0"))
    assert world.store.record(dead, None).status == "node_down"
