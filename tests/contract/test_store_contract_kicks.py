"""What both stores promise about when the line is served: at whatever may make room, and not time and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sandfleet.ids import Identity
from sandfleet.model import NodeState
from tests.contract.store_fixtures import ALICE, BOB, ERROR, LONG_S, World


def test_parking_has_the_line_served_once_until_somebody_begins(world: World) -> None:
    for name in ("a", "b", "c"):
        world.park(Identity(name))
    assert world.pushed("scheduler") == ["serve"]
    assert world.store.serve_line()
    assert not world.store.serve_line()
    world.park(Identity("d"))
    assert world.pushed("scheduler") == ["serve"] * 2
    assert world.store.serve_line()


def test_a_message_that_nobody_took_is_published_again_after_a_second(world: World) -> None:
    world.park(ALICE)
    world.age_kick()
    world.park(BOB)
    assert world.pushed("scheduler") == ["serve"] * 2
    world.park(Identity("c"))
    assert world.pushed("scheduler") == ["serve"] * 2
    assert world.store.serve_line()


X = Identity("x")


def removed(world: World) -> Iterator[None]:
    route = world.live(X, agent="")
    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    yield
    world.store.stopped(route)


def creation_failed(world: World) -> Iterator[None]:
    route = world.reserved(X)
    yield
    world.store.create_failed(route, ERROR)


def sandbox_died(world: World) -> Iterator[None]:
    route = world.live(X, agent="y")
    yield
    world.store.lost(route, reason="killed")


def reservation_expired(world: World) -> Iterator[None]:
    world.expire_place(world.reserved(X).sandbox_id)
    yield
    world.store.sweep("n1", "i1")


def node_died(world: World) -> Iterator[None]:
    world.live(X, agent="y")
    world.lapse_lease()
    yield
    world.store.close_incarnation("n1", None, reason="dead")


def created_for_nobody(world: World) -> Iterator[None]:
    route = world.reserved(X)
    yield
    world.store.created(route)


def released(world: World) -> Iterator[None]:
    route = world.live(X, agent="y")
    yield
    world.store.release(route.sandbox_id, X.digest, "y")


def operation_finished(world: World) -> Iterator[None]:
    route = world.live(X, agent="")
    world.record(route, identity=X)
    yield
    world.store.finish("o1", route, outcome="ok", reply="{}")


def operation_cancelled(world: World) -> Iterator[None]:
    world.record(world.live(X, agent=""), identity=X)
    yield
    world.store.cancel("o1")


def abandoned(world: World) -> Iterator[None]:
    route = world.live(X, agent="y")
    world.expire_agent(route.sandbox_id, "y")
    yield
    world.store.sweep("n1", "i1")


def node_announced(world: World) -> Iterator[None]:
    yield
    world.announce("n2", "j1")


def node_grown(world: World) -> Iterator[None]:
    yield
    world.announce(replicas=9)


def node_opened(world: World) -> Iterator[None]:
    world.store.set_node_state("n1", NodeState.CORDONED)
    yield
    world.store.set_node_state("n1", NodeState.READY)


def node_returned(world: World) -> Iterator[None]:
    world.lapse_lease()
    yield
    world.store.renew("n1", "i1", lease_s=LONG_S)


OCCASIONS = [removed, creation_failed, sandbox_died, reservation_expired, node_died, created_for_nobody, released]
OCCASIONS += [operation_finished, operation_cancelled, abandoned, node_announced, node_grown, node_opened]
OCCASIONS += [node_returned]
Occasion = Callable[[World], Iterator[None]]


@pytest.mark.parametrize("occasion", OCCASIONS, ids=lambda occasion: occasion.__name__)
def test_the_line_hears_of_whatever_may_make_room(world: World, occasion: Occasion) -> None:
    world.announce()
    life = occasion(world)
    next(life)
    world.park(ALICE)
    world.store.serve_line()
    before = world.pushed("scheduler")
    assert next(life, "over") == "over"
    assert world.pushed("scheduler") == [*before, "serve"]
    assert world.store.serve_line()
    assert world.line() == ["alice"]


@pytest.mark.parametrize("occasion", OCCASIONS, ids=lambda occasion: occasion.__name__)
def test_nothing_is_published_while_nobody_stands_in_line(world: World, occasion: Occasion) -> None:
    world.announce()
    life = occasion(world)
    next(life)
    world.park(ALICE)
    world.store.withdraw(ALICE, "a-alice")
    world.store.serve_line()
    before = world.pushed("scheduler")
    assert next(life, "over") == "over"
    assert world.pushed("scheduler") == before
    assert not world.store.serve_line()


def test_the_line_does_not_hear_of_what_makes_no_room(world: World) -> None:
    world.announce()
    route = world.live(X, agent="y")
    world.acquire(X, agent="z")
    world.park(ALICE)
    world.store.serve_line()
    world.record(route, identity=X)
    world.store.claim("o1", route)
    world.store.release(route.sandbox_id, X.digest, "y")
    world.store.finish("o1", route, outcome="ok", reply="{}")
    world.store.renew("n1", "i1", lease_s=LONG_S)
    world.store.sweep("n1", "i1")
    world.store.set_node_state("n1", NodeState.CORDONED)
    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="its place is not free before it is gone")
    assert not world.store.serve_line()
    assert world.pushed("scheduler") == ["serve"]
