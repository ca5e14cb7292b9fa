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
from sandfleet.store.base import NodeRecord, Push, Recorded, Route, Waiter
from sandfleet.store.memory import MemoryStore
from sandfleet_scheduler.asking import AcquireRequest
from sandfleet_scheduler.results import PLAIN_CALLERS, PlainResults
from sandfleet_scheduler.service import IN_LINE, Scheduler
from sandfleet_scheduler.serving import LineServer
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

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        super().__init__(now_ms=self.clock)
        self.client = Client(Settings.load({}, backend="mock", **settings), self.store)
        self.scheduler = Scheduler(self.client)
        self.line = LineServer(self.scheduler)
        self.store.open_replies("c", ttl_s=LONG_S)

    def node(
        self,
        node_id: str = "n1",
        *,
        data_id: str = "d",
        again: bool = False,
        replicas: int = 1,
        burst_limit: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        record = NodeRecord(
            node_id, f"{node_id}-1", replicas, data_id, ("mock",), labels or {}, burst_limit=burst_limit
        )
        self.store.announce(record, lease_s=LONG_S, again=again)

    def warm(self, identity: Identity, node_id: str = "n1") -> Route:
        reserved = self.store.reserve(
            identity, SPEC, node_id=node_id, incarnation=f"{node_id}-1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        assert self.store.created(reserved.route)
        return reserved.route

    def place(self, identity: Identity, spec: SandboxSpec = SPEC, **options: Any) -> str:
        return self.scheduler.place(AcquireRequest(identity, spec, **options))

    def ask(self, identity: Identity, *, wait_s: float = LONG_S) -> str:
        """Ask as a client does; what the store says."""
        waiter = Waiter(f"op-{identity.thread_id}", "c", f"agent-{identity.thread_id}", LONG_S)
        return self.store.acquire(identity, waiter, wait_s=wait_s, push=None).status

    def want(self, identity: Identity, spec: SandboxSpec = SPEC, **options: Any) -> str:
        """Ask, and have the scheduler handle it as it handles a message."""
        self.ask(identity)
        return self.scheduler.place_or_tell(AcquireRequest(identity, spec, **options))

    def wake_ups(self) -> int:
        """How often the line was asked to be served; they are taken."""
        queue = self.memory.queues.pop("sandfleet.scheduler", [])
        return sum('"task":"scheduler.serve"' in message for message in queue)

    def end_evicted(self) -> None:
        """Do what nodes do with node.destroy."""
        for op in self.store.ops():
            if op.kind == "node.destroy":
                route = self.store.route(op.sandbox_id)
                assert route is not None
                self.store.claim(op.op_id, route)
                self.store.stopped(route)
                self.store.finish(op.op_id, route, outcome="ok", reply="{}")

    def created(self) -> list[str]:
        """Do what nodes do with node.create; the threads that have a sandbox since."""
        threads = []
        for op in self.store.ops():
            if op.kind == "node.create":
                route = self.store.route(op.sandbox_id)
                assert route is not None
                self.store.claim(op.op_id, route)
                assert self.store.created(route)
                self.store.finish(op.op_id, route, outcome="ok", reply="{}")
                info = self.store.sandbox(op.sandbox_id)
                assert info is not None
                threads.append(info.thread_id)
        return threads

    def error(self, identity: Identity) -> dict[str, Any]:
        """The last error the thread's waiter was answered with."""
        return next(
            payload["error"] for op_id, payload in reversed(self.replies("c")) if op_id == f"op-{identity.thread_id}"
        )

    def in_line(self) -> list[str]:
        return [json.loads(entry.request)["owner"][1] for entry in self.store.parked()]

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
    assert world.place(ALICE, overflow="reject") == "creating"
    route = world.store.route(ALICE.digest[:8])
    assert route is not None
    world.store.created(route)
    assert world.place(ALICE, overflow="reject") in ("live", "warm")
    world.line.serve(everybody=True)
    assert world.evicted() == []


def test_a_fresh_placement_moves_the_home_and_a_refused_one_does_not(world: World) -> None:
    world.node("n1", data_id="d")
    route = world.warm(ALICE)
    world.lapse_lease("n1")
    world.scheduler.reconcile()
    assert world.state(route) == "lost"
    with pytest.raises(NoCapacity, match="no node is alive"):
        world.place(ALICE, on_lost="fresh")
    world.node("n2", data_id="e", replicas=1)
    with pytest.raises(HomeUnavailable):
        world.place(ALICE)
    assert world.store.thread_home(ALICE) == "d"
    assert world.place(ALICE, on_lost="fresh") == "placed on n2"
    assert world.store.thread_home(ALICE) == "d"
    world.created()
    assert world.store.thread_home(ALICE) == "e"


def creation(world: World) -> dict[str, Any]:
    """The arguments of the last creation that was sent."""
    sent = [json.loads(json.loads(one)["body"])[0][0] for queue in world.memory.queues.values() for one in queue]
    return dict(next(message["args"] for message in sent if message.get("kind") == "node.create"))


def test_restoring_leaves_a_home_that_is_gone_and_nothing_else(world: World) -> None:
    world.node("n1", data_id="d")
    route = world.warm(ALICE)
    world.node("n2", data_id="e")
    world.store.set_node_state("n1", NodeState.CORDONED)
    world.store.lost(route, reason="killed")
    with pytest.raises(HomeUnavailable, match="on_lost='restore'"):
        world.place(ALICE, on_lost="restore")
    world.lapse_lease("n1")
    world.scheduler.reconcile()
    assert world.place(ALICE, on_lost="restore") == "placed on n2"
    assert creation(world)["restore"] == {"checkpoint": "latest", "required": True, "replace": True}


def test_at_home_the_newest_checkpoint_is_for_a_thread_that_has_nothing(world: World) -> None:
    world.node("n1", data_id="d")
    world.place(ALICE, on_lost="restore")
    assert creation(world)["restore"] == {"checkpoint": "latest", "required": False, "replace": False}


def test_a_fresh_start_away_from_home_is_fresh_whatever_the_nodes_settings_say(world: World) -> None:
    world.node("n1", data_id="d")
    world.place(ALICE, on_lost="fresh")
    assert "restore" not in creation(world)
    world.memory.queues.clear()
    world.created()
    world.lapse_lease("n1")
    world.scheduler.reconcile()
    world.node("n2", data_id="e")
    world.place(ALICE, on_lost="fresh")
    assert creation(world)["restore"] == {"checkpoint": None}


def test_while_the_store_recovers_an_unknown_thread_is_told_to_ask_again_soon(world: World) -> None:
    world.node(again=True)
    with pytest.raises(NotStarted) as told:
        world.place(ALICE)
    assert (told.value.retry_after_s, told.value.facts["reason"]) == (0.5, "recovering")
    assert world.store.sandboxes() == []
    world.clock.ms += int(LONG_S * 1000)
    world.node("n2")
    assert world.place(ALICE) == "placed on n2"


# --- the line --------------------------------------------------------------------------------------------


def test_a_thread_that_finds_no_place_stands_in_line_and_the_line_is_served(world: World) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    assert world.want(ALICE) == IN_LINE
    assert world.in_line() == ["alice"]
    assert world.wake_ups() == 1
    assert world.ask(ALICE) == "parked"
    assert world.line.serve() == "served 0"
    assert world.evicted() == []
    world.store.release(held.sandbox_id, BOB.digest, "bob")
    assert world.wake_ups() == 1
    assert world.line.serve() == "served 0"
    assert world.evicted() == [held.sandbox_id]
    world.end_evicted()
    assert world.wake_ups() == 1
    assert world.line.serve() == "served 1"
    assert world.created() == ["alice"]
    assert world.in_line() == []


def test_one_thread_evicts_one_sandbox_however_often_the_line_is_served(world: World) -> None:
    for number in range(4):
        world.node(f"n{number}")
        world.warm(Identity(f"old-{number}"), f"n{number}")
    world.want(ALICE)
    for _ in range(10):
        world.line.serve()
        world.want(ALICE)
        world.clock.ms += 1000
    assert len(world.evicted()) == 1


def test_each_of_those_in_line_evicts_one(world: World) -> None:
    world.node(replicas=3)
    for identity in (BOB, CAROL, Identity("erin")):
        world.warm(identity)
    for identity in (ALICE, Identity("dave")):
        world.want(identity)
        world.line.serve()
    assert len(world.evicted()) == 2


def test_a_removal_that_never_ends_does_not_stand_in_the_way_for_ever(world: World) -> None:
    world.node(replicas=2)
    world.warm(BOB)
    world.warm(CAROL)
    world.want(ALICE)
    for _ in range(2):
        world.line.serve()
        world.clock.ms += 31_000
    assert len(world.evicted()) == 2


def test_the_longest_idle_sandboxes_are_evicted_first(world: World) -> None:
    world.node("n1", replicas=2)
    world.node("n2")
    old = []
    for identity, node_id in ((BOB, "n1"), (CAROL, "n2"), (Identity("erin"), "n1")):
        old.append(world.warm(identity, node_id).sandbox_id)
        world.clock.ms += 1000
    for number, identity in enumerate((ALICE, Identity("dave"))):
        world.want(identity)
        world.line.serve()
        assert world.evicted() == sorted(old[: number + 1])


def test_an_eviction_whose_message_was_not_taken_is_told_and_not_made_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.node(replicas=2)
    routes = [world.warm(BOB), world.warm(CAROL)]
    world.want(ALICE)
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "record", lambda op, push: Recorded("busy"))
        world.line.serve()
    world.line.serve()
    assert "evict.not_taken" in caplog.text
    assert sorted(world.state(route) for route in routes) == ["stopping", "warm"]


def test_a_sandbox_that_somebody_comes_back_to_is_not_evicted_but_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node(replicas=2)
    back = world.warm(BOB)
    world.clock.ms += 1000
    idle = world.warm(CAROL)
    world.want(ALICE)
    begin_stop = world.store.begin_stop

    def too_late(sandbox_id: str, **options: Any) -> Any:
        if sandbox_id == back.sandbox_id:
            world.store.renew_agents("bob", {sandbox_id: BOB.digest}, ttl_s=LONG_S)
        return begin_stop(sandbox_id, **options)

    monkeypatch.setattr(world.store, "begin_stop", too_late)
    world.line.serve()
    assert world.evicted() == [idle.sandbox_id]
    assert world.state(back) == "live"


def test_nothing_in_use_is_evicted(world: World) -> None:
    world.node()
    route = world.warm(BOB)
    world.store.renew_agents("me", {route.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    assert world.want(ALICE) == IN_LINE
    world.line.serve(everybody=True)
    assert world.state(route) == "live"


def test_users_take_turns_and_newcomers_do_not_pass(world: World) -> None:
    world.node(replicas=1)
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    for number in range(3):
        assert world.want(Identity(f"big-{number}", "big")) == IN_LINE
    assert world.want(Identity("small-0", "small")) == IN_LINE
    assert world.in_line() == ["big-0", "small-0", "big-1", "big-2"]
    world.store.begin_stop(held.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(held)
    assert world.want(Identity("new", "new")) == IN_LINE, "a place is free, but it is somebody else's"
    world.line.serve()
    assert world.created() == ["big-0"]


def test_a_waiter_who_gave_up_gets_no_place(world: World) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(ALICE)
    world.want(CAROL)
    world.store.withdraw(ALICE, "op-alice")
    world.store.begin_stop(held.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(held)
    world.line.serve()
    assert world.created() == ["carol"]


def test_a_waiter_who_gives_up_while_the_line_is_served_gets_no_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(ALICE)
    world.want(CAROL)
    world.store.begin_stop(held.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(held)
    parked = world.store.parked

    def then_she_left(**options: Any) -> Any:
        page = parked(**options)
        world.store.withdraw(ALICE, "op-alice")
        return page

    monkeypatch.setattr(world.store, "parked", then_she_left)
    world.line.serve()
    assert world.created() == ["carol"]


def test_somebody_who_needs_another_node_is_passed_and_keeps_the_turn(world: World) -> None:
    world.node("gpu", labels={"gpu": "1"})
    held = world.warm(BOB, "gpu")
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    picky = SandboxSpec("mock", labels={"gpu": "1"})
    world.want(ALICE, picky)
    world.node("plain")
    world.want(CAROL)
    world.line.serve()
    assert world.created() == ["carol"]
    assert world.in_line() == ["alice"]


def test_those_whom_no_present_node_could_take_are_told_so(world: World) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    assert world.want(ALICE) == IN_LINE
    world.store.set_node_state("n1", NodeState.CORDONED, reason="creates of 3 threads in a row failed: no image")
    world.line.serve_if_due()
    error = world.error(ALICE)
    assert (error["code"], error["facts"]["reason"]) == ("no_capacity", "no_node")
    assert "n1 is cordoned (creates of 3 threads in a row failed: no image)" in error["message"]
    assert "sandfleet uncordon n1" in error["message"]
    assert world.in_line() == []


def test_what_nobody_can_read_stands_in_nobody_s_way(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(ALICE)
    world.store.park(ALICE, "[]", push=Push("sandfleet.scheduler", "m"))
    world.ask(CAROL)
    world.store.park(CAROL, '{"v": 99}', push=Push("sandfleet.scheduler", "m"))
    world.want(Identity("dave"))
    world.store.begin_stop(held.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(held)
    world.line.serve()
    assert world.created() == ["dave"]
    assert caplog.text.count("line.unreadable") == 2


def test_a_wake_up_that_found_the_line_being_served_is_not_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(ALICE)
    assert world.wake_ups() == 1
    parked, other = world.store.parked, LineServer(world.scheduler)

    def freed_too_late(**options: Any) -> Any:
        page = parked(**options)
        if world.state(held) == "live":
            world.store.release(held.sandbox_id, BOB.digest, "bob")
            assert world.wake_ups() == 1
            assert other.serve() == "another one serves"
        return page

    monkeypatch.setattr(world.store, "parked", freed_too_late)
    world.line.serve(everybody=True)
    assert world.evicted() == [held.sandbox_id]


def test_the_line_is_served_each_second_even_if_the_message_was_lost(world: World) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(ALICE)
    world.line.serve_if_due()
    world.store.release(held.sandbox_id, BOB.digest, "bob")
    world.wake_ups()
    world.line.serve_if_due()
    assert world.evicted() == [], "once a second is enough"
    world.clock.ms += 1001
    world.line.serve_if_due()
    assert world.evicted() == [held.sandbox_id]


def test_a_long_line_is_gone_through_page_by_page_as_far_as_there_is_something_to_give(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node(replicas=40)
    routes = [world.warm(Identity(f"old-{n}")) for n in range(40)]
    world.store.renew_agents("all", {r.sandbox_id: Identity(f"old-{n}").digest for n, r in enumerate(routes)}, ttl_s=60)
    for number in range(100):
        world.want(Identity(f"t{number}"))
    for route in routes[:30]:
        world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
        world.store.stopped(route)
    read, parked = [], world.store.parked

    def seen(**options: Any) -> Any:
        page = parked(**options)
        read.append(len(page))
        return page

    monkeypatch.setattr(world.store, "parked", seen)
    assert world.line.serve() == "served 30"
    assert sum(read) < 100
    assert sorted(world.created()) == sorted(f"t{n}" for n in range(30))
    assert world.store.line_length() == 70


# --- overflow policies and quota -------------------------------------------------------------------------


def test_reject_is_refused_at_once_with_the_numbers(world: World) -> None:
    world.node(replicas=2)
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    assert world.want(CAROL) == "placed on n1"
    assert world.want(ALICE, overflow="reject") == "no_capacity"
    error = world.error(ALICE)
    assert {key: error["facts"][key] for key in ("reason", "overflow", "active", "warm", "creating", "replicas")} == {
        "reason": "full",
        "overflow": "reject",
        "active": 1,
        "warm": 0,
        "creating": 1,
        "replicas": 2,
    }
    assert error["facts"]["retry_after_s"] == 5.0
    assert "2 places, 1 sandboxes in use" in error["message"]
    assert world.in_line() == []


def test_even_reject_has_room_made_for_it_from_a_warm_sandbox(world: World) -> None:
    world.node()
    world.warm(BOB)
    assert world.want(ALICE, overflow="reject") == IN_LINE
    world.line.serve()
    world.end_evicted()
    world.line.serve()
    assert world.created() == ["alice"]


def test_reject_does_not_pass_others_and_does_not_wait_behind_them(world: World) -> None:
    world.node()
    held = world.warm(BOB)
    world.store.renew_agents("bob", {held.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.want(CAROL)
    assert world.want(Identity("dave"), overflow="reject") == "no_capacity"
    world.store.begin_stop(held.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(held)
    assert world.want(ALICE, overflow="reject") == IN_LINE, "there is a place, but whose?"
    world.line.serve()
    assert world.created() == ["carol"]
    assert world.error(ALICE)["facts"]["reason"] == "full"
    assert world.in_line() == []


def test_reject_gets_a_place_that_those_in_line_have_no_use_for(limited: World) -> None:
    limited.node(replicas=4)
    for number in range(2):
        limited.want(of_user(number))
    limited.created()
    limited.want(of_user(2))
    assert limited.want(ALICE, overflow="reject") == IN_LINE
    assert limited.want(of_user(3), overflow="reject") == IN_LINE
    limited.line.serve()
    assert limited.created() == ["alice"]
    assert limited.error(of_user(3))["code"] == "quota_exceeded"
    assert limited.in_line() == ["u-2"]


def test_reject_whose_room_another_one_got_is_refused_when_its_turn_comes(world: World) -> None:
    world.node()
    route = world.warm(BOB)
    assert world.want(ALICE, overflow="reject") == IN_LINE
    world.store.renew_agents("bob", {route.sandbox_id: BOB.digest}, ttl_s=LONG_S)
    world.line.serve(everybody=True)
    assert world.error(ALICE)["facts"]["reason"] == "full"
    assert world.in_line() == []


def test_burst_goes_above_the_replicas_and_then_waits(world: World) -> None:
    world.node("n1", burst_limit=1)
    world.node("n2")
    for node_id, identity in (("n1", BOB), ("n2", CAROL)):
        route = world.warm(identity, node_id)
        world.store.renew_agents("me", {route.sandbox_id: identity.digest}, ttl_s=LONG_S)
    assert world.want(ALICE) == IN_LINE
    world.store.withdraw(ALICE, "op-alice")
    assert world.want(ALICE, overflow="burst") == "placed on n1, above its replicas"
    assert world.want(Identity("dave"), overflow="burst") == IN_LINE
    assert world.places("n1") == 2


def test_whoever_may_burst_gets_a_burst_place_from_the_line_too(world: World) -> None:
    world.node(burst_limit=1)
    routes = [world.warm(BOB)]
    world.store.renew_agents("me", {routes[0].sandbox_id: BOB.digest}, ttl_s=LONG_S)
    assert world.want(CAROL, overflow="burst") == "placed on n1, above its replicas"
    assert world.created() == ["carol"]
    assert world.want(Identity("patient")) == IN_LINE
    assert world.want(ALICE, overflow="burst") == IN_LINE
    burst = world.store.route(CAROL.digest[:8])
    assert burst is not None
    world.store.begin_stop(burst.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(burst)
    world.line.serve()
    assert world.created() == ["alice"]
    assert world.in_line() == ["patient"], "its policy is to wait for a place within the replicas"


@pytest.fixture
def limited() -> Iterator[World]:
    """Two places per user."""
    world = World(max_per_user=2)
    yield world
    world.client.close()


def of_user(number: int, user: str = "u") -> Identity:
    return Identity(f"{user}-{number}", user)


def test_a_user_at_the_quota_waits_and_others_do_not(limited: World) -> None:
    limited.node(replicas=10)
    for number in range(2):
        assert limited.want(of_user(number)) == "placed on n1"
    limited.created()
    assert limited.want(of_user(2)) == IN_LINE
    assert limited.want(of_user(3)) == IN_LINE
    assert limited.want(of_user(0, "v")) == IN_LINE, "somebody is in line, so everybody asks there"
    limited.line.serve()
    assert limited.created() == ["v-0"]
    assert limited.in_line() == ["u-2", "u-3"]
    assert limited.evicted() == []


def test_a_user_s_own_warm_sandbox_goes_first_at_the_quota_and_only_one(limited: World) -> None:
    limited.node(replicas=10)
    other = limited.warm(BOB)
    limited.clock.ms += 1000
    own = [limited.warm(of_user(0))]
    limited.clock.ms += 1000
    own += [limited.warm(of_user(1))]
    assert limited.want(of_user(2)) == IN_LINE
    limited.line.serve()
    limited.line.serve()
    assert limited.evicted() == [own[0].sandbox_id]
    limited.end_evicted()
    limited.line.serve()
    assert limited.created() == ["u-2"]
    assert limited.state(other) == "warm"


def test_nobody_s_sandbox_is_evicted_for_a_user_at_the_quota(limited: World) -> None:
    limited.node(replicas=3)
    other = limited.warm(BOB)
    for number in range(2):
        limited.want(of_user(number))
    limited.created()
    assert limited.want(of_user(2)) == IN_LINE
    limited.line.serve(everybody=True)
    assert limited.state(other) == "warm"
    assert limited.in_line() == ["u-2"]


def test_reject_at_the_quota_is_told_so(limited: World) -> None:
    limited.node(replicas=10)
    for number in range(2):
        limited.want(of_user(number))
    limited.created()
    assert limited.want(of_user(2), overflow="reject") == "quota_exceeded"
    error = limited.error(of_user(2))
    assert (error["facts"]["max_per_user"], error["facts"]["retry_after_s"]) == (2, 5.0)


def test_threads_without_a_user_have_no_quota(limited: World) -> None:
    limited.node(replicas=3)
    assert [limited.want(Identity(f"t{number}")) for number in range(3)] == ["placed on n1"] * 3


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
