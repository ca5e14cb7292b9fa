"""The gateway for plain Celery callers, over the memory store: what a call becomes, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore

from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import (
    Busy,
    InvalidArgument,
    NoCapacity,
    NotStarted,
    OpConflict,
    SandboxNotFound,
    SandfleetError,
)
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec, SandboxState
from sandfleet.store.base import NodeRecord, Route, wants_errors_only
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OpMessage, decode_content
from sandfleet_scheduler.gateway import Gateway
from sandfleet_scheduler.results import PLAIN_CALLERS
from sandfleet_scheduler.rounds import Rounds
from sandfleet_scheduler.service import Scheduler
from sandfleet_scheduler.serving import LineServer
from tests.services import wait_until

ALICE = Identity("alice", "u")
WHOSE = {"thread_id": "alice", "user_id": "u"}


class WentRound(Exception):
    """What the stand-in for a task gives for a retry, with the headers."""


class World:
    """A gateway, a node, and alice's warm sandbox on it."""

    def __init__(self) -> None:
        settings = Settings.load({}, backend="mock", acquire_timeout_s=1.0, concurrency=2)
        self.store = MemoryStore()
        self.client = Client(settings, self.store)
        self.scheduler = Scheduler(self.client)
        self.gateway = Gateway(settings, self.scheduler)
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
        reserved = self.store.reserve(
            ALICE, SandboxSpec("mock"), node_id="n1", incarnation="i1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        self.route: Route = reserved.route
        assert self.store.created(self.route)

    def forward(self, kind: str, *args: Any, task_id: str = "task-1", headers: Any = None, **kwargs: Any) -> Any:
        request = SimpleNamespace(id=task_id, group=None, chord=None, errbacks=None, headers=headers)
        task: Any = SimpleNamespace(
            request=request,
            app=None,
            signature=lambda **options: SimpleNamespace(**options),
            retry=lambda countdown, throw, headers, queue: WentRound(headers),
        )
        return self.gateway.forward(task, kind, args, kwargs)

    def route_of(self, thread_id: str) -> Route:
        route = self.store.route(Identity(thread_id).digest[:8])
        assert route is not None
        return route

    def state(self) -> tuple[SandboxState, int, int]:
        info = self.store.sandbox(self.route.sandbox_id)
        assert info is not None
        return info.state, info.agents, info.ops


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    read = world.store.read_replies
    # Never blocks long, so that the client's reader ends at once.
    monkeypatch.setattr(world.store, "read_replies", lambda client, cursor, block_s: read(client, cursor, block_s=0.02))
    yield world
    world.client.close()


def test_a_plain_call_becomes_a_recorded_operation_on_its_node_s_queue(world: World) -> None:
    sent = world.forward("execute_command", **WHOSE, command="ls -la", timeout_s=5.0)
    message = OpMessage.from_wire(sent.args[0])
    assert sent.queue.name == "sandfleet.node.n1"
    assert sent.kwargs == {}
    assert sent.argsrepr == f"bash: ls -la · {world.route.sandbox_id}"
    assert (message.op_id, message.identity, message.route) == ("task-1", ALICE, world.route)
    assert message.args == {"command": "ls -la", "timeout_s": 5.0}
    assert message.deadline_ms - message.start_by_ms == 5000
    view = world.store.op("task-1")
    assert view is not None
    assert view.state == "recorded"


def test_the_operation_and_nobody_else_keeps_the_sandbox_in_use(world: World) -> None:
    world.forward("execute_command", **WHOSE, command="ls")
    assert world.state() == (SandboxState.LIVE, 0, 1)
    world.store.claim("task-1", world.route)
    world.store.finish("task-1", world.route, outcome="ok", reply="{}")
    assert world.state() == (SandboxState.WARM, 0, 0)


def test_two_plain_calls_do_not_wait_for_each_other(world: World) -> None:
    lanes = {
        OpMessage.from_wire(world.forward("execute_command", **WHOSE, command="x", task_id=task_id).args[0]).lanes
        for task_id in ("a", "b")
    }
    assert len(lanes) == 2


@pytest.mark.parametrize(("content", "wire"), [({"content": "é"}, "é".encode()), ({"content_b64": "/w=="}, b"\xff")])
def test_content_rides_along_as_text_or_base64(world: World, content: dict[str, str], wire: bytes) -> None:
    message = OpMessage.from_wire(world.forward("write_file", **WHOSE, path="/a", **content).args[0])
    assert decode_content(message.content) == wire
    assert "content" not in message.args


@pytest.mark.parametrize(
    ("kind", "kwargs", "error"),
    [
        ("execute_command", {**WHOSE, "command": "x", "nope": 1}, InvalidArgument),
        ("execute_command", {"command": "x"}, InvalidArgument),
        ("execute_command", {"command": "x", "thread_id": "a/b"}, InvalidArgument),
        ("execute_command", {"command": "x", "thread_id": "alice", "user_id": 7}, InvalidArgument),
        ("execute_command", {"command": "x", "sandbox_id": "00000000"}, SandboxNotFound),
        ("execute_command", {**WHOSE, "command": "x", "queue_timeout_s": "soon"}, InvalidArgument),
        ("execute_command", {**WHOSE, "command": "x", "queue_timeout_s": float("inf")}, InvalidArgument),
        ("execute_command", {**WHOSE, "command": "x", "queue_timeout_s": -5}, InvalidArgument),
        ("write_file", {**WHOSE, "path": "/a", "content": 7}, InvalidArgument),
        ("write_file", {**WHOSE, "path": "/a", "content_b64": "é"}, InvalidArgument),
        ("write_file", {**WHOSE, "path": "/a", "content_b64": "a"}, InvalidArgument),
        ("list_dir", {**WHOSE, "path": "/a", "content": "x"}, InvalidArgument),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[-60:],
)
def test_a_wrong_call_is_a_typed_error_and_leaves_nothing_behind(
    world: World, kind: str, kwargs: dict[str, Any], error: type[SandfleetError]
) -> None:
    with pytest.raises(error):
        world.forward(kind, **kwargs)
    assert world.store.ops() == []
    assert world.state() == (SandboxState.WARM, 0, 0)


def test_positional_arguments_are_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="thread_id"):
        world.forward("execute_command", "ls")


def test_a_sandbox_named_together_with_another_thread_is_not_found(world: World) -> None:
    named = {"sandbox_id": world.route.sandbox_id}
    world.forward("noop", **named)
    for other in ({"thread_id": "alice"}, {"thread_id": "mallory"}, {"thread_id": "alice", "user_id": "mallory"}):
        with pytest.raises(SandboxNotFound):
            world.forward("noop", **named, **other)


def test_a_node_that_takes_nothing_is_a_typed_error_and_holds_nothing(world: World) -> None:
    world.store.set_node_state("n1", NodeState.DRAINING)
    with pytest.raises(NotStarted):
        world.forward("noop", sandbox_id=world.route.sandbox_id)
    assert world.store.ops() == []


# --- one call delivered twice ----------------------------------------------------------------------------


def test_the_second_delivery_of_a_call_is_ignored_while_the_first_one_runs(world: World) -> None:
    world.forward("execute_command", **WHOSE, command="ls")
    with pytest.raises(Ignore):
        world.forward("execute_command", **WHOSE, command="ls")
    world.store.claim("task-1", world.route)
    with pytest.raises(Ignore):
        world.forward("execute_command", **WHOSE, command="ls")
    assert world.state() == (SandboxState.LIVE, 0, 1)
    assert len(world.store.ops()) == 1


def test_a_second_delivery_that_finds_no_sandbox_is_no_failure_of_the_first(world: World) -> None:
    world.forward("execute_command", **WHOSE, command="ls")
    world.store.set_node_state("n1", NodeState.DRAINING)
    for named in (WHOSE, {"sandbox_id": world.route.sandbox_id}, {**WHOSE, "sandbox_id": world.route.sandbox_id}):
        with pytest.raises(Ignore):
            world.forward("execute_command", **named, command="ls")


def test_another_call_that_was_given_the_same_task_id_is_told_so(world: World) -> None:
    world.forward("execute_command", **WHOSE, command="ls")
    with pytest.raises(OpConflict):
        world.forward("noop", **WHOSE)
    world.store.set_node_state("n1", NodeState.DRAINING)
    with pytest.raises(NoCapacity):
        world.forward("execute_command", thread_id="bob", command="ls")


# --- many calls that wait for a sandbox ------------------------------------------------------------------


@pytest.fixture
def crowded(world: World) -> Iterator[World]:
    """One thread of two waits for a sandbox, which is as many as may."""
    world.gateway._waiting.acquire()
    yield world
    world.gateway._waiting.release()


def test_a_call_that_would_hold_one_thread_too_many_goes_round_and_keeps_its_headers(crowded: World) -> None:
    with pytest.raises(WentRound) as round_one:
        crowded.forward("noop", thread_id="new", headers={"theirs": 1})
    [headers] = round_one.value.args
    assert headers["theirs"] == 1
    with pytest.raises(WentRound) as round_two:
        crowded.forward("noop", thread_id="new", headers=headers)
    assert round_two.value.args == (headers,)
    assert crowded.store.ops() == []


def test_a_call_goes_round_no_longer_than_it_may_wait(crowded: World) -> None:
    since = {"sandfleet_since_ms": crowded.store.now_ms() - 10_000}
    with pytest.raises(Busy, match="10 s"):
        crowded.forward("noop", thread_id="new", queue_timeout_s=9.0, headers=since)
    with pytest.raises(WentRound):
        crowded.forward("noop", thread_id="new", queue_timeout_s=60.0, headers=since)
    with pytest.raises(WentRound):
        crowded.forward("noop", thread_id="new", headers={"sandfleet_since_ms": "forged"})


def test_a_call_whose_sandbox_lives_does_not_stand_in_line(crowded: World) -> None:
    assert crowded.forward("noop", **WHOSE).queue.name == "sandfleet.node.n1"
    assert crowded.forward("noop", sandbox_id=crowded.route.sandbox_id, task_id="task-2")


# --- calls whose thread stands in line -------------------------------------------------------------------


@pytest.fixture
def full(world: World) -> World:
    """Every place is taken by somebody who stays."""
    world.store.renew_agents("somebody", {world.route.sandbox_id: ALICE.digest}, ttl_s=600)
    for number in range(3):
        other = Identity(f"other-{number}")
        reserved = world.store.reserve(
            other, SandboxSpec("mock"), node_id="n1", incarnation="i1", data_id="d", expires_s=600
        )
        assert reserved.status == "reserved"
    return world


def went_round(world: World, headers: Any = None, **kwargs: Any) -> dict[str, Any]:
    with pytest.raises(WentRound) as told:
        world.forward("noop", thread_id="new", headers=headers, **kwargs)
    [headers] = told.value.args
    return dict(headers)


def test_a_call_whose_thread_stands_in_line_goes_round_and_keeps_its_turn(full: World) -> None:
    headers = went_round(full)
    before = full.store.parked()
    assert [entry.digest for entry in before] == [Identity("new").digest]
    assert went_round(full, headers) == headers
    assert full.store.parked() == before
    full.forward("noop", **WHOSE, task_id="task-2")  # the gateway has threads for others meanwhile


def test_more_calls_than_threads_may_stand_in_line(full: World) -> None:
    for number in range(5):
        with pytest.raises(WentRound):
            full.forward("noop", thread_id=f"new-{number}", task_id=f"task-{number}")
    assert full.store.line_length() == 5


def test_the_sandbox_that_was_granted_while_the_call_went_round_is_its_own(full: World) -> None:
    headers = went_round(full)
    full.store.create_failed(full.route_of("other-0"), {"code": "x", "message": "", "facts": {}})
    LineServer(full.scheduler).serve()
    route = full.route_of("new")
    assert full.store.created(route)
    granted = full.store.sandbox(route.sandbox_id)
    assert granted is not None
    assert (granted.state, granted.agents) == (SandboxState.LIVE, 1), "nothing evicts it before the call is back"
    full.forward("noop", thread_id="new", headers=headers)
    recorded = full.store.sandbox(route.sandbox_id)
    assert recorded is not None
    assert (recorded.agents, recorded.ops) == (0, 1)


def test_a_call_that_never_comes_back_holds_what_it_was_given_for_a_short_time_only(full: World) -> None:
    assert full.client.settings.agent_ttl_s == 60
    went_round(full, went_round(full))
    full.store.create_failed(full.route_of("other-0"), {"code": "x", "message": "", "facts": {}})
    LineServer(full.scheduler).serve()
    route, now_ms = full.route_of("new"), full.store.now_ms()
    assert full.store.created(route)
    full.store._clock = lambda: now_ms + 30_000
    lost = full.store.sandbox(route.sandbox_id)
    assert lost is not None
    assert lost.agents == 0


def test_a_call_that_stood_in_line_for_as_long_as_it_may_leaves_it(full: World) -> None:
    headers = went_round(full)
    headers["sandfleet_since_ms"] -= 10_000
    with pytest.raises(NoCapacity, match="number 1 in line"):
        full.forward("noop", thread_id="new", queue_timeout_s=9.0, headers=headers)
    assert full.store.line_length() == 0


def test_another_delivery_of_a_call_in_line_waits_as_somebody_else(full: World) -> None:
    headers, second = went_round(full), went_round(full)
    assert headers["sandfleet_waiter"] != second["sandfleet_waiter"]
    full.store.withdraw(Identity("new"), second["sandfleet_waiter"])
    assert full.store.line_length() == 1


def test_whoever_waited_gives_the_thread_back(world: World) -> None:
    world.store.set_node_state("n1", NodeState.CORDONED)
    for task_id in ("a", "b", "c"):
        with pytest.raises(NoCapacity):
            world.forward("noop", thread_id="new", task_id=task_id)


def test_plain_callers_are_sent_errors_only() -> None:
    assert wants_errors_only(PLAIN_CALLERS)


def test_those_who_go_round_rest_but_not_while_one_of_them_was_answered(full: World) -> None:
    reader = full.client.reader()
    rounds = Rounds(full.client.reader, pause_s=30.0)
    resting = threading.Thread(target=rounds.rest, args=("w1",), daemon=True)
    resting.start()
    wait_until(lambda: "w1" in reader._pending, 5)
    reader._deliver("w1", "{}")
    resting.join(5)
    assert not resting.is_alive(), "the answer wakes it"
    rounds.rest("w2")  # w1 is still somewhere in the queue: at once
    rounds.over("w1")
    resting = threading.Thread(target=rounds.rest, args=("w2",), daemon=True)
    resting.start()
    resting.join(0.2)
    assert resting.is_alive(), "nobody is on the way to a sandbox"
    reader._deliver("w2", "{}")
    resting.join(5)
    assert not resting.is_alive()


def test_a_waiter_that_is_over_is_not_listened_for_any_more(full: World) -> None:
    rounds = Rounds(full.client.reader, pause_s=0.001)
    rounds.rest("w1")
    rounds.rest("w1")
    assert len(full.client.reader()._pending["w1"]) == 1
    rounds.over("w1")
    assert "w1" not in full.client.reader()._pending
