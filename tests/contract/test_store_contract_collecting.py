"""What both stores promise about collecting: leftovers go, and nothing that is in use ever does."""

from __future__ import annotations

import pytest

from sandfleet.model import NodeState
from sandfleet.store.collecting import Leftover
from tests.contract.store_fixtures import ALICE, RedisWorld, World

NODE = Leftover("node", "n1")


def gone(world: World) -> None:
    world.announce()
    world.store.set_node_state("n1", NodeState.GONE)


def test_a_node_that_is_gone_is_found_and_dropped(world: World) -> None:
    gone(world)
    assert world.store.collect([NODE], remove=False, older_than_s=0) == [NODE]
    assert [node.node_id for node in world.store.nodes()] == ["n1"], "looking removes nothing"
    assert world.store.collect([NODE], remove=True, older_than_s=0) == [NODE]
    assert world.store.nodes() == []
    assert not [key for key in world.store.keys() if key.endswith(":n1") and "story:" not in key]  # noqa: SIM118


def test_a_node_that_went_a_moment_ago_is_kept(world: World) -> None:
    gone(world)
    assert world.store.collect([NODE], remove=True) == []
    assert [node.node_id for node in world.store.nodes()] == ["n1"]


def test_a_node_that_lives_or_came_back_is_kept(world: World) -> None:
    world.announce()
    assert world.store.collect([NODE], remove=True, older_than_s=0) == []
    world.store.set_node_state("n1", NodeState.GONE)
    world.announce(incarnation="i2")
    assert world.store.collect([NODE], remove=True, older_than_s=0) == []
    assert world.store.nodes()[0].alive


def test_a_dead_node_that_nobody_answered_for_is_kept(world: World) -> None:
    world.announce()
    world.live(ALICE)
    world.lapse_lease()
    assert world.store.collect([NODE], remove=True, older_than_s=0) == []
    assert world.store.nodes()[0].places == 1


def test_the_record_of_a_lost_sandbox_is_dropped_and_that_of_a_living_one_is_not(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    lost = Leftover("lost", route.sandbox_id)
    assert world.store.collect([lost], remove=True) == []
    assert world.store.sandbox(route.sandbox_id) is not None
    world.store.lost(route, reason="killed")
    assert world.store.collect([lost], remove=False) == [lost]
    assert world.store.collect([lost], remove=True) == [lost]
    assert world.store.sandbox(route.sandbox_id) is None
    assert world.store.sandboxes() == []
    again = world.live(ALICE)
    assert again.sandbox_id == route.sandbox_id
    assert again.epoch > route.epoch, "the thread's epoch is kept"


def test_marks_of_a_living_sandbox_and_chunks_of_a_whole_blob_are_kept(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    world.store.blob_begin("b1", client="c", size=3, ttl_s=60)
    world.store.blob_put("b1", 0, b"abc")
    asked = [Leftover("marks", route.sandbox_id), Leftover("chunk", "b1:0")]
    assert world.store.collect(asked, remove=True) == []
    assert world.store.blob_get("b1", 0) == b"abc"


@pytest.mark.parametrize("kind", ["lost", "node", "marks", "chunk", "nonsense"])
def test_what_does_not_exist_is_no_harm(world: World, kind: str) -> None:
    world.announce("n2")
    world.store.collect([Leftover(kind, "no-such:1")], remove=True, older_than_s=0)
    assert [node.node_id for node in world.store.nodes()] == ["n2"]


def test_marks_and_chunks_without_their_heads_are_dropped(redis_world: RedisWorld) -> None:
    store = redis_world.store
    redis_world.announce()
    route = redis_world.live(ALICE)
    store.blob_begin("b1", client="c", size=6, ttl_s=60)
    store.blob_put("b1", 0, b"abc")
    redis_world.raw.delete(f"{redis_world.prefix}blob:b1", f"{redis_world.prefix}sandbox:{route.sandbox_id}")
    asked = [Leftover("marks", route.sandbox_id), Leftover("chunk", "b1:0")]
    assert store.collect(asked, remove=False) == asked
    assert store.blob_get("b1", 0) == b"abc"
    assert store.collect(asked, remove=True) == asked
    assert store.blob_get("b1", 0) is None
    names = [key.removeprefix(redis_world.prefix) for key in store.keys()]  # noqa: SIM118
    assert not {f"agents:{route.sandbox_id}", f"busy:{route.sandbox_id}", "blob:b1:0"} & set(names)
