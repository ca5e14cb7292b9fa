"""The scheduler over the memory store: whom it places where, evicts and closes out, whose failures it stores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import HomeUnavailable, NoCapacity, NotStarted
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.store.base import NodeRecord, Recorded, Route
from sandfleet.store.memory import MemoryStore
from sandfleet_scheduler.results import PLAIN_CALLERS, PlainResults
from sandfleet_scheduler.service import Scheduler
from tests.contract.store_fixtures import MemoryWorld

ALICE, BOB, CAROL = Identity("alice"), Identity("bob"), Identity("carol")
SPEC = SandboxSpec("mock")
LONG_S = 3600.0


class Clock:
    """Starts at the time of day, and goes on when told."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.ms


class World(MemoryWorld):
    """A scheduler, and nodes with one place each."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(now_ms=self.clock)
        self.client = Client(Settings.load({}, backend="mock"), self.store)
        self.scheduler = Scheduler(self.client)

    def node(self, node_id: str = "n1", *, data_id: str = "d", again: bool = False, replicas: int = 1) -> None:
        record = NodeRecord(node_id, f"{node_id}-1", replicas, data_id, ("mock",))
        self.store.announce(record, lease_s=LONG_S, again=again)

    def warm(self, identity: Identity, node_id: str = "n1") -> Route:
        reserved = self.store.reserve(
            identity, SPEC, node_id=node_id, incarnation=f"{node_id}-1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        assert self.store.created(reserved.route)
        return reserved.route

    def place(self, identity: Identity, **options: Any) -> str:
        return self.scheduler.place(identity, SPEC, **options)

    def evicted(self) -> list[str]:
        return sorted(op.sandbox_id for op in self.store.ops() if op.kind == "node.destroy")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.client.close()


# --- placing ---------------------------------------------------------------------------------------------


def test_a_placed_thread_s_node_is_told_to_create(world: World) -> None:
    world.node()
    assert world.place(ALICE) == "placed on n1"
    [op] = world.store.ops()
    assert (op.kind, op.sandbox_id) == ("node.create", ALICE.digest[:8])


def test_a_second_request_for_a_thread_that_took_the_last_place_evicts_nobody(world: World) -> None:
    world.node(replicas=2)
    world.warm(BOB)
    assert world.place(ALICE) == "placed on n1"
    assert world.place(ALICE) == "creating"
    route = world.store.route(ALICE.digest[:8])
    assert route is not None
    world.store.created(route)
    assert world.place(ALICE) == "warm"
    with pytest.raises(NoCapacity, match="room is being made"):
        world.place(Identity("alice", "another-user"))
    assert len(world.evicted()) == 1


def test_a_fresh_placement_moves_the_home_and_a_refused_one_does_not(world: World) -> None:
    world.node("n1", data_id="d")
    route = world.warm(ALICE)
    world.lapse_lease("n1")
    world.scheduler.reconcile()
    assert world.state(route) == "lost"
    with pytest.raises(NoCapacity):
        world.place(ALICE, on_lost="fresh")
    world.node("n2", data_id="e", replicas=1)
    with pytest.raises(HomeUnavailable):
        world.place(ALICE)
    assert world.store.thread_home(ALICE) == "d"
    assert world.place(ALICE, on_lost="fresh") == "placed on n2"
    assert world.store.thread_home(ALICE) == "e"


def test_while_the_store_recovers_an_unknown_thread_is_told_to_ask_again_soon(world: World) -> None:
    world.node(again=True)
    with pytest.raises(NotStarted) as told:
        world.place(ALICE)
    assert (told.value.retry_after_s, told.value.facts["reason"]) == (0.5, "recovering")
    assert world.store.sandboxes() == []
    world.clock.ms += int(LONG_S * 1000)
    world.node("n2")
    assert world.place(ALICE) == "placed on n2"


# --- making room -----------------------------------------------------------------------------------------


def test_one_acquire_evicts_one_sandbox_however_often_it_asks(world: World) -> None:
    for number in range(4):
        world.node(f"n{number}")
        world.warm(Identity(f"old-{number}"), f"n{number}")
    for _ in range(10):
        with pytest.raises(NoCapacity, match="room is being made"):
            world.place(ALICE)
        world.clock.ms += 100
    assert len(world.evicted()) == 1


def test_nothing_more_is_evicted_where_a_removal_is_under_way(world: World) -> None:
    world.node(replicas=2)
    world.warm(BOB)
    world.warm(CAROL)
    for identity in (ALICE, Identity("dave")):
        with pytest.raises(NoCapacity, match="room is being made"):
            world.place(identity)
    assert len(world.evicted()) == 1


def test_a_removal_that_never_ends_does_not_stand_in_the_way_for_ever(world: World) -> None:
    world.node(replicas=2)
    world.warm(BOB)
    world.warm(CAROL)
    for _ in range(2):
        with pytest.raises(NoCapacity):
            world.place(ALICE)
        world.clock.ms += 31_000
    assert len(world.evicted()) == 2


def test_the_longest_unused_sandbox_is_evicted(world: World) -> None:
    world.node(replicas=2)
    old = world.warm(BOB)
    world.clock.ms += 1000
    world.warm(CAROL)
    with pytest.raises(NoCapacity):
        world.place(ALICE)
    assert world.evicted() == [old.sandbox_id]


def test_an_eviction_that_the_node_did_not_take_is_not_counted_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.node()
    world.warm(BOB)
    monkeypatch.setattr(world.store, "record", lambda op, push: Recorded("busy"))
    with pytest.raises(NoCapacity, match="every fitting node is full"):
        world.place(ALICE)
    assert "evict.not_taken" in caplog.text


def test_nothing_in_use_is_evicted(world: World) -> None:
    world.node()
    route = world.warm(BOB)
    world.store.renew_agents("me", {route.sandbox_id: BOB.digest}, ttl_s=60)
    with pytest.raises(NoCapacity, match="nothing on it is warm"):
        world.place(ALICE)
    assert world.state(route) == "live"


# --- dead nodes ------------------------------------------------------------------------------------------


def test_a_close_out_that_a_dying_scheduler_left_in_the_middle_is_gone_on_with(world: World) -> None:
    world.node(replicas=9)
    routes = [world.warm(Identity(f"t{n}")) for n in range(5)]
    for n, route in enumerate(routes):
        assert world.record(route, f"op-{n}", Identity(f"t{n}")).status == "recorded"
    world.lapse_lease()
    assert world.store.close_incarnation("n1", None, reason="dead", limit=2).more
    assert world.scheduler.reconcile() == ["n1"]
    [node] = world.store.nodes()
    assert (node.state, node.inflight, node.places) == (NodeState.GONE, 0, 0)
    assert [world.store.op(f"op-{n}").outcome for n in range(5)] == ["not_started"] * 5  # type: ignore[union-attr]
    assert {world.state(route) for route in routes} == {"lost"}
    assert world.scheduler.reconcile() == []


def test_what_a_leaving_node_left_is_closed(world: World) -> None:
    world.node()
    route = world.warm(BOB)
    world.store.set_node_state("n1", NodeState.GONE, incarnation="n1-1")
    assert world.scheduler.reconcile() == ["n1"]
    assert world.state(route) == "lost"
    assert world.scheduler.reconcile() == []


def test_a_living_node_and_one_that_left_nothing_are_left_alone(world: World) -> None:
    world.node("n1")
    world.node("n2")
    world.store.set_node_state("n2", NodeState.GONE)
    assert world.scheduler.reconcile() == []


# --- results of plain callers ----------------------------------------------------------------------------


class Backend:
    """A result backend that may fail, in a stand-in for an app."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.broken: set[str] = set()
        self.backend = self

    def AsyncResult(self, op_id: str) -> Any:  # noqa: N802 - Celery's name
        return SimpleNamespace(ready=lambda: op_id in self.failed)

    def get(self, key: str) -> None:
        return None

    def mark_as_failure(self, op_id: str, failure: Any, request: Any) -> None:
        if op_id in self.broken:
            raise OSError("the result backend is away")
        self.failed.append(op_id)


@pytest.fixture
def backend(world: World) -> Backend:
    world.store.open_replies(PLAIN_CALLERS, ttl_s=600)
    return Backend()


def told(world: World, op_id: str, error: Mapping[str, Any] | None) -> None:
    payload = {"error": error} if error else {"ok": 1}
    world.store.reply(world.waiter(op_id, client=PLAIN_CALLERS), json.dumps(payload))


CLOSED = {"code": "not_started", "message": "died", "facts": {}}


def results(world: World, backend: Backend) -> PlainResults:
    return PlainResults(backend, world.store)  # type: ignore[arg-type]


def test_a_failure_is_stored_once_and_leaves_the_stream(world: World, backend: Backend) -> None:
    told(world, "a", CLOSED)
    told(world, "b", {**CLOSED, "code": "path_not_found"})
    told(world, "c", CLOSED)
    results(world, backend).read(block_s=0)
    assert backend.failed == ["a", "c"]
    backend.failed.clear()  # as if the results had expired meanwhile
    results(world, backend).read(block_s=0)
    assert backend.failed == []
    assert world.replies(PLAIN_CALLERS) == []


def test_a_failure_that_cannot_be_stored_now_is_stored_later(world: World, backend: Backend) -> None:
    reader = results(world, backend)
    for op_id in "abc":
        told(world, op_id, CLOSED)
    backend.broken = {"b"}
    with pytest.raises(OSError, match="away"):
        reader.read(block_s=0)
    assert backend.failed == ["a"]
    backend.broken = set()
    reader.read(block_s=0)
    assert backend.failed == ["a", "b", "c"]
    assert world.replies(PLAIN_CALLERS) == []


def test_one_that_can_never_be_stored_does_not_stop_the_others(world: World, backend: Backend) -> None:
    reader = results(world, backend)
    world.store.reply(world.waiter("odd", client=PLAIN_CALLERS), "no json")
    told(world, "a", CLOSED)
    for _ in range(4):
        with pytest.raises(ValueError, match="Expecting value"):
            reader.read(block_s=0)
    reader.read(block_s=0)
    assert backend.failed == ["a"]


def test_a_store_that_lost_the_stream_is_read_from_its_start(world: World, backend: Backend) -> None:
    reader = results(world, backend)
    told(world, "a", CLOSED)
    reader.read(block_s=0)
    world.flush()
    reader.read(block_s=0)
    told(world, "b", CLOSED)
    reader.read(block_s=0)
    assert backend.failed == ["a", "b"]
    assert isinstance(world.store, MemoryStore)
