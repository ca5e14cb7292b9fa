"""The caller's side of one operation, over the memory store and a node that does what the test says."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet import blobs, calls, replies
from sandfleet import client as client_module
from sandfleet import holds as holds_module
from sandfleet.client import Answer, Call, Client, Target
from sandfleet.config import INLINE_BYTES, Settings
from sandfleet.errors import (
    Busy,
    ByteBudgetExceeded,
    Cancelled,
    InvalidArgument,
    NotStarted,
    OpConflict,
    OutcomeUnknown,
    PathNotFound,
    QueueTimeout,
    ReplyTimeout,
    SandboxLost,
    SandboxNotFound,
    SandboxStopping,
    SandfleetError,
    StoreUnavailable,
)
from sandfleet.holds import Holds
from sandfleet.ids import Identity, resend_id
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.steps import Do, Sleep, Steps, Wait, drive, drive_async
from sandfleet.store.base import NodeRecord, Push, Recorded, Route
from sandfleet.store.memory import MemoryStore
from sandfleet.testing import ManualClock
from sandfleet.wire import OpMessage
from tests.services import wait_until, wait_until_async

ALICE, BOB = Identity("alice"), Identity("bob")
SOON_S = 5.0
MIB = 1024 * 1024

#: What the fake node does with one message.
Deed = Callable[["FakeNode", OpMessage], None]


class PublishingStore(MemoryStore):
    """Hands every published message to the fake node as well."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.published: queue.SimpleQueue[Push | None] = queue.SimpleQueue()

    def _push(self, push: Push) -> None:
        super()._push(push)
        self.published.put(push)


class FakeNode:
    """A thread that takes published messages and does with each the next deed, the last one for ever."""

    def __init__(self, store: PublishingStore) -> None:
        self.store = store
        self.deeds: list[Deed] = [ok({})]
        self.seen: list[OpMessage] = []
        self.raw: list[Push] = []
        self.failed: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (push := self.store.published.get()) is not None:
            try:
                message = OpMessage.from_wire(json.loads(json.loads(push.message)["body"])[0][0])
                self.raw.append(push)
                self.seen.append(message)
                (self.deeds.pop(0) if len(self.deeds) > 1 else self.deeds[0])(self, message)
            except BaseException as exc:  # noqa: BLE001  (shown by the fixture)
                self.failed.append(exc)

    def answer(self, message: OpMessage, reply: dict[str, Any], outcome: str = "ok") -> None:
        assert self.store.finish(message.op_id, message.route, outcome=outcome, reply=json.dumps(reply))

    @property
    def ids(self) -> list[str]:
        return [message.op_id for message in self.seen]


def ok(value: Any, content: bytes | None = None) -> Deed:
    """Claim and answer."""

    def deed(node: FakeNode, message: OpMessage) -> None:
        assert node.store.claim(message.op_id, message.route).status == "claimed"
        blobs.unpack_json(node.store, message.args)
        blobs.drop(node.store, message.content)
        reply = {"ok": blobs.pack_json(node.store, value, client=message.reply_to, ttl_s=60), "t": [1.0, 2.0, 3.0]}
        if content is not None:
            reply["content"] = blobs.pack_bytes(node.store, content, client=message.reply_to, ttl_s=60)
        node.answer(message, reply)

    return deed


def fails(error: SandfleetError) -> Deed:
    """Answer with an error, unclaimed."""
    return lambda node, message: node.answer(message, {"error": error.to_wire(), "t": [1, 2, 3]}, error.code)


def silent(_node: FakeNode, _message: OpMessage) -> None:
    """Take the message and say nothing."""


class World:
    """A client, a live sandbox of alice on node n1, and the node."""

    def __init__(self, **settings: Any) -> None:
        self.store = PublishingStore(blob_client_bytes=settings.pop("client_bytes", 128 * MIB))
        self.settings = Settings.load({}, backend="mock", **settings)
        self.client = Client(self.settings, self.store)
        self.node = FakeNode(self.store)
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
        self.route = self.place(ALICE)
        self.slept: list[float] = []

    def place(self, identity: Identity, node_id: str = "n1", incarnation: str = "i1") -> Route:
        spec = SandboxSpec("mock")
        reserved = self.store.reserve(
            identity, spec, node_id=node_id, incarnation=incarnation, data_id="d", expires_s=60
        )
        assert reserved.route is not None
        assert self.store.created(reserved.route)
        return reserved.route

    @property
    def target(self) -> Target:
        return Target(self.route.sandbox_id, ALICE)

    def drive(self, steps: Steps[Any], sleep: Callable[[float], None] = lambda _: None) -> Any:
        """`drive`, but the pauses are noted and not slept."""

        def noted() -> Steps[Any]:
            step = next(steps)
            try:
                while True:
                    try:
                        if isinstance(step, Sleep):
                            self.slept.append(step.seconds)
                            sleep(step.seconds)
                            value = None
                        else:
                            assert isinstance(step, Do | Wait)
                            value = yield step
                    except Exception as exc:  # noqa: BLE001  (as in drive)
                        step = steps.throw(exc)
                    else:
                        step = steps.send(value)
            except StopIteration as stop:
                return stop.value

        return drive(noted())

    def call(self, call: Call | None = None, *, target: Target | None = None) -> Answer:
        answer: Answer = self.drive(self.client.call(target or self.target, call or Call("noop", {})))
        return answer

    def awaited(self) -> list[str]:
        return list(self.client.reader()._pending)

    def blobs(self) -> list[str]:
        return [key for key in sorted(self.store.keys()) if "blob" in key]

    def close(self) -> None:
        self.store.published.put(None)
        self.node.thread.join(SOON_S)
        self.client.close()
        assert self.node.failed == []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replies, "_CHECK_AFTER_S", 0.1)
    world = World()
    read = world.store.read_replies
    # Never blocks long, so that the reader ends at once.
    monkeypatch.setattr(world.store, "read_replies", lambda client, cursor, block_s: read(client, cursor, block_s=0.02))
    yield world
    world.close()


def run(command: str = "x", **more: Any) -> Call:
    return Call("execute_command", {"command": command}, **more)


# --- the plain way ---------------------------------------------------------------------------------------


def test_a_call_gives_the_value_the_bytes_and_where_the_time_went(world: World) -> None:
    world.node.deeds = [ok({"size": 3}, b"\xff\0a")]
    answer = world.call(Call("read_file", {"path": "/a"}))
    assert (answer.value, answer.content) == ({"size": 3}, b"\xff\0a")
    assert (answer.timings.queued_ms, answer.timings.lane_ms, answer.timings.run_ms) == (1.0, 2.0, 3.0)
    assert answer.timings.total_ms is not None
    assert answer.op_id == world.node.ids[0]
    assert world.awaited() == []


def test_the_message_says_what_to_do_for_whom_where_and_until_when(world: World) -> None:
    world.call(run("ls -la", timeout_s=5.0, queue_timeout_s=2.0, op_id="mine", caller="agent-7"))
    [message], [push] = world.node.seen, world.node.raw
    assert (message.op_id, message.kind, message.args) == ("mine", "execute_command", {"command": "ls -la"})
    assert (message.identity, message.route) == (ALICE, world.route)
    assert message.lanes == (f"{world.route.sandbox_id}/shell/agent-7",)
    assert message.reply_to == world.client.id
    assert message.deadline_ms - message.start_by_ms == 5000
    assert 0 < message.start_by_ms - message.sent_at_ms <= 2000
    assert push.queue == "sandfleet.node.n1"
    headers = json.loads(push.message)["headers"]
    assert (headers["task"], headers["id"]) == ("sandbox.execute_command", "mine")
    assert headers["argsrepr"] == f"bash: ls -la · {world.route.sandbox_id}"


def test_a_wrong_call_is_refused_before_anything_is_sent(world: World) -> None:
    for call in (run(op_id="a b"), Call("read_file", {}), Call("read_file", {"path": "/a"}, content=b"x")):
        with pytest.raises(ValueError):
            world.call(call)
    assert world.node.seen == []
    assert world.store.ops() == []


def test_the_route_is_looked_up_once_and_then_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    target = world.target
    world.call(target=target)
    assert target.route == world.route
    monkeypatch.setattr(world.store, "route", None)
    world.call(target=target)


def test_a_bare_id_speaks_as_its_owner(world: World) -> None:
    target = Target(world.route.sandbox_id)
    world.call(target=target)
    assert target.identity == ALICE


# --- refusals --------------------------------------------------------------------------------------------


def test_a_sandbox_that_nobody_knows_is_not_found(world: World) -> None:
    for target in (Target("00000000"), Target("00000000", ALICE)):
        with pytest.raises(SandboxNotFound):
            world.call(target=target)


def test_somebody_else_s_sandbox_is_not_found(world: World) -> None:
    with pytest.raises(SandboxNotFound) as refused:
        world.call(target=Target(world.route.sandbox_id, BOB))
    assert "alice" not in str(refused.value.to_wire())
    assert world.node.seen == []


def test_a_lost_and_a_stopping_sandbox_say_so_at_once(world: World) -> None:
    lost = world.place(BOB)
    world.store.lost(lost, reason="test")
    with pytest.raises(SandboxLost):
        world.call(target=Target(lost.sandbox_id, BOB))
    world.store.begin_stop(world.route.sandbox_id, owner=None, force=True, reason="test")
    with pytest.raises(SandboxStopping):
        world.call()
    assert world.slept == []


@pytest.mark.parametrize("state", [NodeState.DRAINING, NodeState.AWAY, NodeState.GONE])
def test_a_node_that_takes_nothing_is_asked_as_long_as_the_caller_waits(world: World, state: NodeState) -> None:
    world.store.set_node_state("n1", state)
    with pytest.raises(NotStarted):
        world.call(run(queue_timeout_s=0.7))
    assert len(world.slept) > 4
    assert max(world.slept) == 0.5
    assert world.node.seen == []
    assert world.store.ops() == []


def test_a_full_node_is_asked_again_and_then_busy(world: World) -> None:
    world.client.settings = world.settings.model_copy(update={"max_queue": 0})
    with pytest.raises(Busy):
        world.call(run())
    assert len(world.slept) == 4


def test_a_moved_sandbox_is_found_again_without_a_second_message(world: World) -> None:
    target = world.target
    world.call(target=target)
    world.store.announce(NodeRecord("n2", "i2", 4, "d", ("mock",)), lease_s=600)
    world.store.begin_stop(world.route.sandbox_id, owner=None, force=True, reason="test")
    world.store.stopped(world.route)
    moved = world.place(ALICE, "n2", "i2")
    world.call(target=target)
    assert [message.route for message in world.node.seen] == [world.route, moved]
    assert [push.queue for push in world.node.raw] == ["sandfleet.node.n1", "sandfleet.node.n2"]
    assert target.route == moved
    assert world.slept == []


# --- sending again ---------------------------------------------------------------------------------------


def test_what_never_began_is_sent_again_under_the_next_id(world: World) -> None:
    world.node.deeds = [fails(NotStarted("a")), fails(NotStarted("b", retry_after_s=0.7)), ok({"n": 3})]
    assert world.call(run(op_id="mine")).value == {"n": 3}
    assert world.node.ids == ["mine", "mine.r1", "mine.r2"]
    assert len({json.dumps(m.args) for m in world.node.seen}) == 1
    assert world.slept[1] == 0.7
    assert world.awaited() == []


def test_a_long_op_id_stays_valid_when_it_is_sent_again(world: World) -> None:
    world.node.deeds = [fails(NotStarted("a")), ok({})]
    world.call(run(op_id="x" * 80))
    again = world.node.ids[1]
    assert len(again) <= 80
    assert again.endswith(".r1")
    assert again != resend_id("x" * 79 + "y", 1), "two long ids must not meet under one"


def test_after_four_repeats_the_caller_hears_that_nothing_began(world: World) -> None:
    world.node.deeds = [fails(NotStarted("still not"))]
    with pytest.raises(NotStarted, match="still not"):
        world.call(run(op_id="m"))
    assert world.node.ids == ["m", "m.r1", "m.r2", "m.r3", "m.r4"]


def test_sending_again_stops_when_the_queue_budget_is_used_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    world.node.deeds = [fails(NotStarted("no", retry_after_s=0.6))]
    with pytest.raises(NotStarted):
        world.drive(world.client.call(world.target, run(queue_timeout_s=1.0)), sleep=clock.advance)
    assert world.slept[0] == 0.6
    assert sum(world.slept) <= 1.0, "it waited longer than the caller allowed"
    assert len(world.node.seen) == 2


def test_a_busy_node_is_not_asked_again_when_its_pause_does_not_fit(world: World) -> None:
    world.node.deeds = [fails(Busy("full", retry_after_s=30.0))]
    with pytest.raises(Busy):
        world.call(run(queue_timeout_s=1.0))
    assert len(world.node.seen) == 1


@pytest.mark.parametrize(
    "error",
    [
        OutcomeUnknown("it may have run"),
        QueueTimeout("too late"),
        Cancelled("somebody did"),
        SandboxLost("gone"),
        PathNotFound("no", path="/a"),
        InvalidArgument("no"),
    ],
    ids=lambda error: error.code,
)
def test_any_other_error_is_told_and_never_sent_again(world: World, error: SandfleetError) -> None:
    world.node.deeds = [fails(error)]
    with pytest.raises(type(error), match=str(error)):
        world.call(run())
    assert len(world.node.seen) == 1
    assert world.awaited() == []


def test_a_lost_record_of_a_command_is_an_unknown_outcome_and_not_a_second_run(world: World) -> None:
    world.node.deeds = [lambda node, message: bool(node.store._ops.drop(message.op_id)) and None]
    with pytest.raises(OutcomeUnknown):
        world.call(run())
    assert len(world.node.seen) == 1


def test_a_lost_record_of_a_read_is_read_again(world: World) -> None:
    world.node.deeds = [lambda node, message: bool(node.store._ops.drop(message.op_id)) and None, ok({"size": 1})]
    assert world.call(Call("stat", {"path": "/a"})).value == {"size": 1}
    assert len(world.node.seen) == 2


def test_no_answer_at_all_is_a_reply_timeout_that_names_the_operation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_REPLY_GRACE_S", 0.0)
    world.node.deeds = [silent]
    with pytest.raises(ReplyTimeout) as ended:
        world.call(run(op_id="mine", timeout_s=0.05, queue_timeout_s=0.05))
    assert ended.value.facts["op_id"] == "mine"
    assert len(world.node.seen) == 1
    assert world.awaited() == []


def test_a_store_that_was_away_is_asked_again_under_the_same_id(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record, refused = world.store.record, iter([True, True, False])

    def sometimes(*args: Any, **kwargs: Any) -> Recorded:
        if next(refused, False):
            raise StoreUnavailable("away")
        return record(*args, **kwargs)

    monkeypatch.setattr(world.store, "record", sometimes)
    world.call(run(op_id="mine"))
    assert world.node.ids == ["mine"]


def test_a_record_whose_answer_was_lost_is_not_sent_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record, lost = world.store.record, iter([True])

    def loses(*args: Any, **kwargs: Any) -> Recorded:
        recorded = record(*args, **kwargs)
        if next(lost, False):
            raise StoreUnavailable("the connection broke before the answer")
        return recorded

    monkeypatch.setattr(world.store, "record", loses)
    world.node.deeds = [ok({"n": 1})]
    assert world.call(run(op_id="mine")).value == {"n": 1}
    assert world.node.ids == ["mine"]


# --- repeated op ids -------------------------------------------------------------------------------------


def test_an_op_id_that_is_repeated_gives_the_first_answer_and_runs_nothing(world: World) -> None:
    world.node.deeds = [ok({"n": 1}), ok({"n": 2})]
    assert world.call(run(op_id="mine")).value == {"n": 1}
    assert world.call(run(op_id="mine")).value == {"n": 1}
    assert world.node.ids == ["mine"]


def test_an_op_id_that_is_repeated_walks_the_same_row_of_ids(world: World) -> None:
    world.node.deeds = [fails(NotStarted("a")), ok({"n": 1}), ok({"n": 2})]
    assert world.call(run(op_id="mine")).value == {"n": 1}
    assert world.call(run(op_id="mine")).value == {"n": 1}
    assert world.node.ids == ["mine", "mine.r1"]


def test_an_op_id_of_another_operation_is_a_conflict(world: World) -> None:
    world.call(run(op_id="mine"))
    with pytest.raises(OpConflict):
        world.call(Call("noop", {}, op_id="mine"))


def test_two_threads_that_repeat_one_op_id_at_once_both_get_the_one_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, asked, may_answer = world.store.record, threading.Semaphore(0), threading.Event()

    def counted(*args: Any, **kwargs: Any) -> Recorded:
        recorded = record(*args, **kwargs)
        asked.release()
        return recorded

    def later(node: FakeNode, message: OpMessage) -> None:
        assert may_answer.wait(SOON_S)
        ok({"n": 1})(node, message)

    monkeypatch.setattr(world.store, "record", counted)
    world.node.deeds = [later]
    got: list[Any] = []

    def caller() -> None:
        got.append(drive(world.client.call(world.target, run(op_id="mine"))).value)

    for _ in range(2):
        threading.Thread(target=caller, daemon=True).start()
        assert asked.acquire(timeout=SOON_S)
    may_answer.set()
    wait_until(lambda: len(got) == 2, 2.0, story=lambda: f"only {len(got)} of 2 callers were answered")
    assert got == [{"n": 1}, {"n": 1}]
    assert world.node.ids == ["mine"]


# --- bytes above the inline limit ------------------------------------------------------------------------


def test_big_contents_travel_as_blobs_and_leave_nothing_behind(world: World) -> None:
    sent = bytes(range(256)) * (3 * MIB // 256)
    got: list[bytes | None] = []

    def deed(node: FakeNode, message: OpMessage) -> None:
        got.append(blobs.unpack_bytes(node.store, message.content))
        ok({})(node, message)

    world.node.deeds = [deed]
    world.call(calls.write("/a", sent))
    assert got == [sent]
    assert len(world.node.raw[0].message) < 4096
    assert world.blobs() == []


def test_big_arguments_travel_as_blobs(world: World) -> None:
    command = "echo " + "x" * INLINE_BYTES
    got: list[Any] = []

    def deed(node: FakeNode, message: OpMessage) -> None:
        got.append(blobs.unpack_json(node.store, message.args))
        assert node.store.claim(message.op_id, message.route).status == "claimed"
        node.answer(message, {"ok": {}})

    world.node.deeds = [deed]
    world.call(run(command))
    assert got == [{"command": command}]
    assert len(world.node.raw[0].message) < 4096
    assert world.blobs() == []


@pytest.mark.parametrize(
    "call",
    [
        Call("execute_command", {"argv": ["echo", *["x" * 65536] * 16]}),
        Call("execute_command", {"command": "x", "env": {f"V{n}": "x" * 65536 for n in range(16)}}),
        calls.batch([calls.write(f"/{n}", "x" * 65536) for n in range(16)], stop_on_error=True, timeout_s=None),
    ],
    ids=["argv", "env", "batch"],
)
def test_no_message_is_much_larger_than_the_inline_limit(world: World, call: Call) -> None:
    world.call(call)
    assert len(world.node.raw[0].message) < 2 * INLINE_BYTES


def test_big_answers_come_as_blobs_and_leave_nothing_behind(world: World) -> None:
    content, value = b"\xff" * (2 * MIB), {"paths": ["x" * 1000] * 1000}
    world.node.deeds = [ok(value, content)]
    answer = world.call(Call("read_file", {"path": "/a"}))
    assert (answer.content, answer.value) == (content, value)
    assert world.blobs() == []


def test_a_session_keeps_its_lane_however_long_its_command(world: World) -> None:
    # The node chooses lanes from the message, before any I/O.
    for command in ("short", "x" * (INLINE_BYTES + 1)):
        world.call(Call("execute_command", {"command": command, "session": "s"}, caller="me"))
    lanes = [message.lanes for message in world.node.seen]
    assert lanes[1] == lanes[0] == (f"{world.route.sandbox_id}/session/s",)


def test_the_bytes_of_a_repeated_call_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # 50 MiB must go through a budget of 128 MiB, also when a node says twice that it did not start.
    monkeypatch.setattr(replies, "_CHECK_AFTER_S", 0.1)
    world = World(client_bytes=5 * MIB)
    world.node.deeds = [fails(NotStarted("a")), fails(NotStarted("b")), ok({})]
    try:
        world.call(calls.write("/a", b"\xff" * (2 * MIB)))
        assert world.blobs() == []
    finally:
        world.close()


def test_a_call_beyond_the_byte_budget_is_refused_before_it_is_recorded() -> None:
    world = World(client_bytes=MIB)
    try:
        with pytest.raises(ByteBudgetExceeded):
            world.call(calls.write("/a", b"\xff" * (2 * MIB)))
        assert world.store.ops() == []
    finally:
        world.close()


# --- on an event loop ------------------------------------------------------------------------------------


async def test_the_async_driver_gives_the_same_answer(world: World) -> None:
    world.node.deeds = [fails(NotStarted("a", retry_after_s=0.01)), ok({"n": 1})]
    answer = await drive_async(world.client.call(world.target, run(op_id="mine")))
    assert (answer.value, answer.op_id) == ({"n": 1}, "mine.r1")


async def test_many_calls_on_one_loop_are_answered_each(world: World) -> None:
    world.node.deeds = [lambda node, message: ok({"command": message.args["command"]})(node, message)]
    answers = await asyncio.gather(*(drive_async(world.client.call(world.target, run(f"c{n}"))) for n in range(30)))
    assert [answer.value["command"] for answer in answers] == [f"c{n}" for n in range(30)]


async def test_an_error_reaches_the_awaiting_task(world: World) -> None:
    world.node.deeds = [fails(PathNotFound("no", path="/a"))]
    with pytest.raises(FileNotFoundError):
        await drive_async(world.client.call(world.target, Call("stat", {"path": "/a"})))


async def test_a_cancelled_task_forgets_the_reply_it_awaited(world: World) -> None:
    world.node.deeds = [silent]
    task = asyncio.create_task(drive_async(world.client.call(world.target, run(op_id="mine"))))
    await wait_until_async(lambda: world.node.ids == ["mine"] and world.awaited() == ["mine"], SOON_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.awaited() == []
    # The reader still serves others.
    world.node.deeds = [ok({"n": 1})]
    assert (await drive_async(world.client.call(world.target, run()))).value == {"n": 1}


async def test_a_reply_that_never_comes_times_out_on_a_loop_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_REPLY_GRACE_S", 0.0)
    world.node.deeds = [silent]
    with pytest.raises(ReplyTimeout):
        await drive_async(world.client.call(world.target, run(timeout_s=0.05, queue_timeout_s=0.05)))
    assert world.awaited() == []


def test_a_loop_that_is_gone_when_the_reply_comes_does_not_hurt_others(world: World) -> None:
    world.node.deeds = [silent]

    async def begin_and_leave() -> None:
        loop = asyncio.get_running_loop()
        pending = world.client.reader().expect("mine", recorded=False)
        pending.forward(lambda payload: loop.call_soon_threadsafe(print, payload))

    asyncio.run(begin_and_leave())
    with world.store._lock:
        world.store._send(world.client.id, "mine", '"late"')
    world.node.deeds = [ok({"n": 1})]
    assert world.call(run()).value == {"n": 1}


# --- cancelling, holding ---------------------------------------------------------------------------------


def test_cancelling_what_waits_closes_it_and_answers_its_caller(world: World) -> None:
    world.node.deeds = [silent]
    ended: list[BaseException] = []

    def caller() -> None:
        try:
            drive(world.client.call(world.target, run(op_id="mine")))
        except SandfleetError as exc:
            ended.append(exc)

    thread = threading.Thread(target=caller)
    thread.start()
    wait_until(lambda: world.node.ids == ["mine"], SOON_S)
    assert world.drive(calls.cancel_steps(world.client, world.target, "mine")) is True
    thread.join(SOON_S)
    assert [type(exc) for exc in ended] == [Cancelled]


def test_cancelling_what_runs_asks_its_node(world: World) -> None:
    world.node.deeds = [
        lambda node, message: bool(node.store.claim(message.op_id, message.route)) and None,
        ok({"found": True}),
    ]
    thread = threading.Thread(target=lambda: drive(world.client.call(world.target, run(op_id="mine"))))
    thread.start()
    wait_until(lambda: (view := world.store.op("mine")) is not None and view.state == "claimed", SOON_S)
    assert world.drive(calls.cancel_steps(world.client, world.target, "mine")) is True
    assert (world.node.seen[1].kind, world.node.seen[1].args) == ("cancel", {"op_id": "mine"})
    world.node.answer(world.node.seen[0], {"ok": {}})
    thread.join(SOON_S)


def test_nobody_cancels_what_is_unknown_done_or_of_another_sandbox(world: World) -> None:
    world.call(run(op_id="done"))
    other = world.place(BOB)
    for target, op_id in ((world.target, "unknown"), (world.target, "done"), (Target(other.sandbox_id, BOB), "done")):
        assert world.drive(calls.cancel_steps(world.client, target, op_id)) is False


def test_cancelling_through_another_sandbox_s_handle_ends_nothing(world: World) -> None:
    world.node.deeds = [silent]
    thread = threading.Thread(target=lambda: drive(world.client.call(world.target, run(op_id="mine"))))
    thread.start()
    wait_until(lambda: world.node.ids == ["mine"], SOON_S)
    other = world.place(BOB)
    found = world.drive(calls.cancel_steps(world.client, Target(other.sandbox_id, BOB), "mine"))
    view = world.store.op("mine")
    assert view is not None
    still_open = view.state == "recorded"
    if still_open:
        world.node.answer(world.node.seen[0], {"ok": {}})
    thread.join(SOON_S)
    assert (found, still_open) == (False, True), "bob's handle ended alice's operation"


def test_acquires_are_counted_and_another_epoch_begins_anew(world: World) -> None:
    holds = world.client.holds
    first, later = Route("s1", "n", "i", 1), Route("s1", "n", "i", 2)
    holds.add(first, "owner")
    holds.add(first, "owner")
    assert holds.remove("s1") is False
    assert list(holds) == ["s1"]
    assert holds.remove("s1") is True
    assert list(holds) == []
    holds.add(first, "owner")
    holds.add(later, "owner")
    assert holds.remove("s1") is True, "the acquire before the loss ended with its sandbox"


def test_held_sandboxes_are_renewed_about_three_times_per_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(holds_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    renewed: list[dict[str, str]] = []
    monkeypatch.setattr(world.store, "renew_agents", lambda _agent, holds, ttl_s: renewed.append(dict(holds)) or [])
    holds = Holds(world.store, "me", ttl_s=60.0)
    holds.add(Route("s1", "n", "i", 1), "owner")
    for _ in range(60):
        clock.advance(1)
        holds.renew()
    assert renewed == [{"s1": "owner"}] * 3


def test_a_renewal_that_failed_is_tried_again_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(holds_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    answers: list[Any] = [StoreUnavailable("away"), []]
    asked: list[float] = []

    def renew(_agent: str, _holds: Any, ttl_s: float) -> Any:
        asked.append(ttl_s)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(world.store, "renew_agents", renew)
    holds = Holds(world.store, "me", ttl_s=60.0)
    holds.add(Route("s1", "n", "i", 1), "owner")
    clock.advance(21)
    with pytest.raises(StoreUnavailable):
        holds.renew()
    holds.renew()
    assert len(asked) == 2


def test_what_was_acquired_again_meanwhile_keeps_its_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = world.client.holds
    route = Route("s1", "n", "i", 1)
    taken: list[dict[str, str]] = []

    def release(*_args: Any) -> bool:
        holds.add(route, "owner")  # another thread acquires between the count and the release
        return True

    monkeypatch.setattr(world.store, "release", release)
    monkeypatch.setattr(world.store, "renew_agents", lambda _agent, holds, ttl_s: taken.append(dict(holds)) or [])
    assert holds.release("s1", "owner") is False
    assert taken == [{"s1": "owner"}]
