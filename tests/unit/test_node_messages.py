"""What a node makes of the messages on its queue, before and while it begins them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.backends import Completion, Connection, Operation
from sandfleet.config import Settings
from sandfleet.errors import Busy, SandfleetError, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Claim, NodeRecord, OpRecord, Route
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OpMessage
from sandfleet_workers.jobs import Job
from sandfleet_workers.node import Held, Node
from sandfleet_workers.pool import LanePool

ALICE = Identity("alice")
ROUTE = Route("3f9a1c22", "n1", "i1", 7)
LANES = ("3f9a1c22/shell/me",)


def message(op_id: str = "op", kind: str = "execute_command", **changes: Any) -> dict[str, Any]:
    now = 1_700_000_000_000
    made = OpMessage(op_id, kind, ALICE, ROUTE, LANES, {"command": "x"}, None, now, now, "client", now)
    return {**made.to_wire(), **changes}


def body(data: Any) -> str:
    try:
        return json.dumps([[data], {}, {}], default=str)
    except RecursionError:
        return "["  # deeper than json writes; a hostile sender has other means


def job(data: Any, *, op_id: str = "op", name: str = "sandbox.execute_command") -> Job:
    request = SimpleNamespace(
        id=op_id,
        message=SimpleNamespace(body=body(data)),
        name=name,
        args=(data,),
        kwargs={},
        ignore_result=True,
        _payload=((data,), {}, {}),
        _already_revoked=False,
    )
    request.on_accepted = request.on_success = lambda *_args: None
    return Job(request, lambda: (0, None, 0.0))


def node(store: MemoryStore | None = None) -> Node:
    pool = LanePool(limit=1)
    made = Node(Settings.load({}, backend="mock"), store or MemoryStore(), pool, "n1")
    pool.attach(made, max_lane=10, max_jobs=10, max_bytes=1000, lifecycle_threads=0)
    return made


# --- planning: on Celery's main loop, where an exception ends the worker ---------------------------------


def test_a_command_takes_its_caller_s_lane_and_shares_the_sandbox_s() -> None:
    plan = node().plan(job(message()))
    assert (plan.exclusive, plan.shared) == (("3f9a1c22/shell/me",), ("3f9a1c22",))


def test_lifecycle_work_has_a_lane_of_its_own() -> None:
    plan = node().plan(job(message(kind="node.create"), name="node.create"))
    assert plan.lifecycle
    assert plan.exclusive == ("3f9a1c22/life",)


def test_a_waiting_message_counts_by_all_its_bytes() -> None:
    waiting = job(message())
    assert waiting.size == len(json.dumps([[message()], {}, {}]))
    assert node().plan(waiting).size == waiting.size


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (message(op_id="other"), "sandbox.execute_command"),
        (message(kind="write_file"), "sandbox.execute_command"),
        (message(kind="node.create"), "sandbox.execute_command"),
        ("ls -la", "sandbox.execute_command"),
        (None, "sandbox.execute_command"),
    ],
)
def test_a_message_that_does_not_belong_to_its_task_is_refused(data: Any, name: str) -> None:
    with pytest.raises(SandfleetError):
        node().plan(job(data, name=name))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "batch", "args": {"ops": 5}},
        {"kind": "batch", "args": {"ops": ["x"]}},
        {"kind": "batch", "args": {"ops": [{"kind": "execute_command", "args": "x"}]}},
        {"kind": "batch", "args": {"ops": {"a": 1}}},
        {"content": {"t": 5}},
        {"content": {"b": 5}},
    ],
    ids=str,
)
def test_a_hostile_message_never_reaches_celery_s_main_loop_as_an_exception(changes: dict[str, Any]) -> None:
    data = message(**changes)
    assert_taken_or_refused(node(), job(data, name=f"sandbox.{data['kind']}"))


def test_batches_nested_in_batches_never_exhaust_the_stack() -> None:
    args: Any = {"ops": [{"kind": "noop"}]}
    for _ in range(5000):
        args = {"ops": [{"kind": "batch", "args": args}]}
    assert_taken_or_refused(node(), job(message(kind="batch", args=args), name="sandbox.batch"))


def assert_taken_or_refused(of: Node, taken: Job) -> None:
    of.pool._take(taken)
    assert taken.failure is not None or of.pool.holds(taken.op_id)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "args", "ops", "t"]), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["batch", "execute_command", "write_file", "cancel", "nope"]),
    args=st.dictionaries(st.sampled_from(["ops", "session", "command", "$blob"]), values),
    content=st.none() | st.dictionaries(st.sampled_from(["t", "b", "blob"]), values),
)
def test_no_message_makes_planning_raise(kind: str, args: Any, content: Any) -> None:
    assert_taken_or_refused(NODE, job(message(kind=kind, args=args, content=content), name=f"sandbox.{kind}"))
    NODE.pool._jobs.clear()
    NODE.pool._finished.clear()


NODE = node()


# --- beginning -------------------------------------------------------------------------------------------


class FakeConnection(Connection):
    """Notes what it is asked; ends an operation only when it is told to, or cancelled."""

    def __init__(self) -> None:
        self.running: dict[str, Callable[[Completion], None]] = {}
        self.started: list[str] = []

    def start(self, op: Operation, done: Callable[[Completion], None]) -> None:
        self.started.append(op.op_id)
        self.running[op.op_id] = done

    def cancel(self, op_id: str) -> bool:
        done = self.running.pop(op_id, None)
        if done is not None:
            done(Completion({"exit_code": None, "cancelled": True}))
        return done is not None

    def close(self) -> None: ...


class World:
    """A node that holds alice's sandbox, and an operation recorded for it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.node = node(self.store)
        self.store.announce(NodeRecord("n1", self.node.incarnation, 4, "d", ("mock",)), lease_s=600)
        reserved = self.store.reserve(
            ALICE, SandboxSpec("mock"), node_id="n1", incarnation=self.node.incarnation, data_id="d", expires_s=60
        )
        assert reserved.route is not None
        self.route = reserved.route
        assert self.store.created(self.route)
        self.connection = FakeConnection()
        backend: Any = None
        self.node.held[self.route.sandbox_id] = Held(self.route, ALICE, SandboxSpec("mock"), backend, self.connection)
        self.node.lease = SimpleNamespace(now_ms=self.store.now_ms, holds=lambda: True)
        self.store.open_replies("client", ttl_s=60)

    def deliver(self, op_id: str = "op", kind: str = "execute_command", **changes: Any) -> Job:
        now = self.store.now_ms()
        sent = OpMessage(
            op_id, kind, ALICE, self.route, (), {"command": "x"}, None, now + 5000, now + 9000, "client", now
        )
        data = {**sent.to_wire(), **changes}
        record = OpRecord(op_id, kind, self.route, ALICE.digest, now + 5000, now + 9000, "client", "shown")
        assert self.store.record(record, None).status == "recorded"
        made = job(data, op_id=op_id, name=f"sandbox.{kind}")
        self.node.pool._take(made)
        return made

    def work(self) -> None:
        while not self.node.pool._work.empty():
            item = self.node.pool._work.get()
            assert item is not None
            item()

    def replies(self) -> dict[str, Any]:
        return {r.op_id: json.loads(r.payload) for r in self.store.read_replies("client", "0", block_s=0)}


def test_a_command_is_claimed_started_and_answered() -> None:
    world = World()
    world.deliver()
    world.work()
    assert world.connection.started == ["op"]
    world.connection.running["op"](Completion({"exit_code": 0}))
    assert world.replies()["op"]["ok"] == {"exit_code": 0}
    assert len(world.node.pool._jobs) == 0


def test_a_cancel_that_comes_while_the_operation_is_being_claimed_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    claim = world.store.claim

    def cancelled_meanwhile(op_id: str, route: Route) -> Claim:
        claimed = claim(op_id, route)
        assert world.node.pool.cancel("op")
        # Another pool thread takes it up at once, before this one has reached the sandbox.
        world.work()
        return claimed

    monkeypatch.setattr(world.store, "claim", cancelled_meanwhile)
    world.deliver()
    world.work()
    assert "op" in world.replies(), "the caller was told that it is being cancelled, and the command runs on"


def test_another_thread_s_sandbox_is_answered_as_one_that_does_not_exist() -> None:
    world = World()
    world.deliver(owner=[None, "bob"])
    world.work()
    assert world.replies()["op"]["error"]["code"] == "sandbox_not_found"
    assert "alice" not in json.dumps(world.replies())
    assert world.connection.started == []


def test_an_operation_of_an_earlier_epoch_never_starts() -> None:
    world = World()
    world.deliver(epoch=world.route.epoch - 1)
    world.work()
    assert world.replies()["op"]["error"]["code"] == "not_started"
    assert world.connection.started == []


def test_a_node_without_its_lease_starts_nothing() -> None:
    world = World()
    world.node.lease.holds = lambda: False
    world.deliver()
    world.work()
    assert world.replies()["op"]["error"]["code"] == "not_started"
    assert world.connection.started == []


def test_arguments_that_are_wrong_on_the_wire_are_answered_and_start_nothing() -> None:
    world = World()
    world.deliver(args={"command": 7})
    world.work()
    assert world.replies()["op"]["error"]["code"] == "invalid_argument"
    assert world.connection.started == []


def test_a_tombstoned_operation_is_dropped_without_a_second_answer() -> None:
    world = World()
    world.deliver()
    world.store.cancel("op")
    world.work()
    assert world.replies()["op"]["error"]["code"] == "cancelled"
    assert world.connection.started == []
    assert len(world.node.pool._jobs) == 0


def test_a_refused_creation_is_answered_though_the_store_cannot_take_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()

    def away(*_args: Any) -> bool:
        raise StoreUnavailable("away")

    monkeypatch.setattr(world.store, "create_failed", away)
    made = world.deliver()
    made.carry.message = replace(made.carry.message, kind="node.create")
    world.node.finish(made, Completion(error=Busy("full")))
    assert world.replies()["op"]["error"]["code"] == "busy"
    assert not world.node.pool.holds("op")
