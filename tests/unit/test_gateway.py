"""The gateway for plain Celery callers, over the memory store: what a call becomes, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import InvalidArgument, NotStarted, SandboxNotFound, SandfleetError
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec, SandboxState
from sandfleet.store.base import NodeRecord, Route
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OpMessage, decode_content
from sandfleet_scheduler.gateway import Gateway
from sandfleet_scheduler.service import Scheduler

ALICE = Identity("alice", "u")
WHOSE = {"thread_id": "alice", "user_id": "u"}


class World:
    """A gateway, a node, and alice's warm sandbox on it."""

    def __init__(self) -> None:
        settings = Settings.load({}, backend="mock", acquire_timeout_s=1.0)
        self.store = MemoryStore()
        self.client = Client(settings, self.store)
        self.gateway = Gateway(settings, Scheduler(self.client))
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
        reserved = self.store.reserve(
            ALICE, SandboxSpec("mock"), node_id="n1", incarnation="i1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        self.route: Route = reserved.route
        assert self.store.created(self.route)

    def forward(self, kind: str, *args: Any, task_id: str = "task-1", **kwargs: Any) -> Any:
        request = SimpleNamespace(id=task_id, group=None, chord=None, errbacks=None)
        task: Any = SimpleNamespace(request=request, app=None, signature=lambda **options: SimpleNamespace(**options))
        return self.gateway.forward(task, kind, args, kwargs)

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
