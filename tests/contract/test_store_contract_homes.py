"""What both stores promise about homes that nodes tell: what is known stands, and no thread begins empty elsewhere."""

from __future__ import annotations

from sandfleet.model import SandboxSpec
from tests.contract.store_fixtures import ALICE, World

BOB = "b" * 64


def test_a_thread_without_a_home_gets_the_one_that_is_told(world: World) -> None:
    assert world.store.thread_home(ALICE) is None
    assert world.store.tell_homes("d1", [(ALICE.digest, 0), (BOB, 5)]) == 2
    assert world.store.thread_home(ALICE) == "d1"
    assert world.store.tell_homes("d1", [(ALICE.digest, 0), (BOB, 5)]) == 0


def test_of_two_data_roots_the_one_with_the_later_owner_is_the_home(world: World) -> None:
    assert world.store.tell_homes("old", [(ALICE.digest, 7)]) == 1
    assert world.store.tell_homes("new", [(ALICE.digest, 8)]) == 1
    assert world.store.tell_homes("old", [(ALICE.digest, 7)]) == 0
    assert world.store.thread_home(ALICE) == "new"


def test_what_the_registry_knows_of_a_thread_stands(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    assert world.store.tell_homes("elsewhere", [(ALICE.digest, route.epoch + 9)]) == 0
    assert world.store.thread_home(ALICE) == "data-1"
    assert world.store.route(route.sandbox_id) == route


def test_a_told_home_does_not_hide_that_the_sandbox_may_be_on_its_way_back(world: World) -> None:
    world.announce(lease_s=5.0)
    world.flush()
    world.announce(lease_s=5.0, again=True)
    assert world.store.tell_homes("data-1", [(ALICE.digest, 5)]) == 1
    assert world.reserve(ALICE).status == "recovering"
    world.end_recovery()
    assert world.reserve(ALICE).status == "reserved"
    assert world.store.thread_home(ALICE) == "data-1"


def test_a_sandbox_that_is_adopted_after_its_home_was_told_is_the_threads(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    world.flush()
    world.announce(again=True)
    assert world.store.tell_homes("data-1", [(ALICE.digest, route.epoch)]) == 1
    assert world.store.adopt(ALICE, SandboxSpec(backend="mock"), route, data_id="data-1", age_s=1.0)
    assert world.store.route(route.sandbox_id) == route
