"""Commands that no pool job stands for: who is told what, when, and by which name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.backends import Capability, Completion, Connection, Operation
from sandfleet.config import INLINE_BYTES, Settings
from sandfleet.errors import JobNotFound, OutcomeUnknown, SandboxLost, StoreUnavailable
from sandfleet.ids import Identity, resend_id
from sandfleet.model import SandboxSpec
from sandfleet.ops import MAX_OUTPUT_BYTES
from sandfleet.store.base import NodeRecord, OpRecord, Output
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import Outbox
from sandfleet_workers.holdings import Held
from sandfleet_workers.runs import Runs, cut, stream_of
from sandfleet_workers.watching import Watch
from tests.unit.test_following import Line

ALICE = Identity("alice")
VALUE = {"stdout": "out", "stderr": "", "exit_code": 0, "duration_s": 1.5}


class Sandbox(Connection):
    """Ends a command when the test says how; its output is ``out``."""

    def __init__(self) -> None:
        self.out = b""
        self.running = True
        self.refuses = False
        self.recalls: list[Callable[[Completion], None]] = []
        self.asked: list[Operation] = []

    def start(self, op: Operation, done: Callable[[Completion], None]) -> None:
        self.asked.append(op)
        if op.kind == "kill_job":
            done(Completion({"found": True, "running": False}))
            return
        if self.refuses:
            done(Completion(error=JobNotFound("it says")))
            return
        at = op.args["offset"]
        part = self.out[at:]
        if part or not self.running:
            value = {"running": self.running, "offset": at + len(part), "stderr_offset": 0}
            done(Completion({**value, "stdout_bytes": len(part), "stderr_bytes": 0}, part))

    def recall(self, op: Operation, done: Callable[[Completion], None]) -> None:
        self.asked.append(op)
        self.recalls.append(done)

    def end(self, completion: Completion) -> None:
        self.recalls.pop()(completion)

    def cancel(self, op_id: str) -> bool:
        return False

    def close(self) -> None: ...


class World:
    """A node that holds alice's sandbox, in which the claimed command ``op`` runs."""

    def __init__(self, **args: Any) -> None:
        self.store, self.line, self.sandbox = MemoryStore(), Line(), Sandbox()
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
        reserved = self.store.reserve(
            ALICE, SandboxSpec("mock"), node_id="n1", incarnation="i1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        self.route = reserved.route
        self.store.created(self.route)
        backend: Any = SimpleNamespace(capabilities=frozenset({Capability.JOBS}), name="mock")
        self.held = Held(self.route, ALICE, SandboxSpec("mock"), backend, self.sandbox)
        self.node: Any = SimpleNamespace(
            store=self.store,
            settings=Settings(),
            held={self.route.sandbox_id: self.held},
            watch=Watch(),
            outbox=Outbox(self.store),
            lease=SimpleNamespace(now_ms=self.store.now_ms),
            lifecycle=SimpleNamespace(checkpoints=SimpleNamespace(touched=lambda message: None)),
        )
        self.runs = Runs(self.node)
        self.runs.line = self.line
        self.store.open_replies("client", ttl_s=60)
        now = self.store.now_ms()
        self.message = OpMessage(
            "op", "execute_command", ALICE, self.route, (), args, None, now + 5000, now + 9000, "client", now
        )
        record = OpRecord("op", "execute_command", self.route, ALICE.digest, now + 5000, now + 9000, "client")
        assert self.store.record(record, None).status == "recorded"
        assert self.store.claim("op", self.route).status == "claimed"

    def settle(self) -> None:
        for _ in range(100):
            if not self.line.step():
                return

    def replies(self) -> list[Any]:
        return [json.loads(reply.payload) for reply in self.store.read_replies("client", "0", block_s=0)]

    def view(self) -> Any:
        view = self.store.op("op")
        assert view is not None
        return view

    def stream(self) -> list[Output]:
        return self.store.read_output("op", 0, 0, block_s=0, reader="r")


def test_a_job_is_told_begun_then_followed_and_its_end_is_kept_for_whoever_asks() -> None:
    world = World(background=True)
    world.sandbox.out = b"out"
    world.runs.begun(world.message, world.held, json.dumps({"ok": {"job_id": "op", "pid": 7}}), 3600)
    world.settle()
    assert world.replies() == [{"ok": {"job_id": "op", "pid": 7}}]
    assert (world.view().state, world.view().job, world.runs.count()) == ("claimed", True, 1)
    world.sandbox.running = False
    world.sandbox.start(Operation("x", "job_output", {"offset": 3}), lambda _: None)
    world.line.soon(world.runs._runs["op"].follower._pull)  # type: ignore[union-attr]
    world.settle()
    world.sandbox.end(Completion(VALUE))
    world.settle()
    assert world.view().outcome == "ok"
    assert json.loads(world.view().reply)["ok"] == VALUE
    assert len(world.replies()) == 1
    assert world.stream() == [Output(0, 0, b"out"), Output(3, 0, end="ok")]
    assert world.runs.count() == 0


def test_a_command_of_an_earlier_run_is_answered_to_its_caller() -> None:
    world, over = World(), list[str]()
    world.runs.track(world.message, world.held, job=False, over=lambda: over.append("over"))
    world.settle()
    world.sandbox.end(Completion(VALUE))
    world.settle()
    assert [reply["ok"] for reply in world.replies()] == [VALUE]
    assert over == ["over"]


def test_an_end_that_redis_does_not_take_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    finish, tries = world.store.finish, list[str]()

    def flaky(*args: Any, **given: Any) -> bool:
        tries.append(args[0])
        if len(tries) < 4:
            raise StoreUnavailable("away")
        return finish(*args, **given)

    monkeypatch.setattr(world.store, "finish", flaky)
    world.runs.track(world.message, world.held, job=False)
    world.settle()
    world.sandbox.end(Completion(VALUE))
    world.settle()
    assert len(tries) == 4
    assert [reply["ok"] for reply in world.replies()] == [VALUE]


def test_a_caller_hears_of_the_beginning_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(background=True)
    started, tries = world.store.started, list[str]()

    def flaky(op_id: str, *args: Any, **given: Any) -> bool:
        tries.append(op_id)
        if len(tries) < 4:
            raise StoreUnavailable("away for a moment")
        return started(op_id, *args, **given)

    monkeypatch.setattr(world.store, "started", flaky)
    world.sandbox.running = False
    world.runs.begun(world.message, world.held, json.dumps({"ok": {"job_id": "op", "pid": 7}}), 3600)
    for _ in range(100):
        if world.sandbox.recalls:
            world.sandbox.end(Completion(VALUE))
        elif not world.line.step():
            break
    assert [reply["ok"] for reply in world.replies()] == [{"job_id": "op", "pid": 7}]
    assert world.view().outcome == "ok"


def test_a_job_that_redis_forgot_keeps_its_sandbox_again() -> None:
    world = World(background=True)
    world.runs.begun(world.message, world.held, json.dumps({"ok": {"job_id": "op", "pid": 7}}), 3600, "bash: make")
    world.settle()
    world.store.forget_everything()
    world.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
    world.store.adopt(ALICE, SandboxSpec("mock"), world.route, data_id="d", age_s=1.0)
    world.runs.tell_again()
    world.settle()
    assert (world.view().state, world.view().job, world.view().describe) == ("claimed", True, "bash: make")
    assert [info.ops for info in world.store.sandboxes()] == [1]


def test_the_end_of_a_job_that_redis_forgot_is_told_again() -> None:
    """A fail-over loses what was written a moment before it: the record is there, and says that it runs."""
    world = World(background=True)
    world.runs.begun(world.message, world.held, json.dumps({"ok": {"job_id": "op", "pid": 7}}), 3600)
    world.settle()
    before = replace(world.store._ops.get("op"))  # type: ignore[type-var]
    world.sandbox.running = False
    world.line.soon(world.runs._runs["op"].follower._pull)  # type: ignore[union-attr]
    world.settle()
    world.sandbox.end(Completion(VALUE))
    world.settle()
    world.store._ops.put("op", before)  # type: ignore[arg-type]
    assert world.view().state == "claimed"
    assert world.node.outbox.tell_again("op")
    assert json.loads(world.view().reply)["ok"] == VALUE


def test_output_that_could_not_be_read_is_asked_for_once_more_when_the_sandbox_talks_again() -> None:
    world = World(background=True)
    world.sandbox.out, world.sandbox.refuses = b"out", True
    world.runs.begun(world.message, world.held, json.dumps({"ok": {"job_id": "op", "pid": 7}}), 3600)
    world.settle()
    world.sandbox.refuses, world.sandbox.running = False, False
    world.sandbox.end(Completion(VALUE))
    world.settle()
    assert world.stream() == [Output(0, 0, b"out"), Output(3, 0, end="ok")]
    assert world.runs.count() == 0


@pytest.mark.parametrize("how", ["stopping", "replaced"])
def test_a_job_whose_sandbox_ends_is_told_so(how: str) -> None:
    world = World(background=True)
    world.runs.begun(world.message, world.held, "{}", 3600)
    world.settle()
    if how == "stopping":
        world.held.stopping = True
    else:
        world.node.held[world.route.sandbox_id] = replace(world.held)
    world.runs._recall(world.runs._runs["op"])
    world.settle()
    assert (world.view().state, world.view().outcome) == ("done", "outcome_unknown")
    assert world.stream()[-1].end == "outcome_unknown"


def test_a_command_that_ran_in_a_sandbox_that_died_is_not_told_to_be_repeatable() -> None:
    """Callers repeat what met a lost sandbox, for that says that it never began."""
    world = World()
    world.runs.track(world.message, world.held, job=False)
    world.settle()
    world.sandbox.end(Completion(error=SandboxLost("the sandbox is dead", reason="dead")))
    world.settle()
    assert (world.view().state, world.view().outcome) == ("done", "outcome_unknown")


def test_what_nobody_can_tell_is_said_so() -> None:
    world = World()
    world.runs.track(world.message, world.held, job=False)
    world.settle()
    world.sandbox.end(Completion(error=OutcomeUnknown("who knows")))
    world.settle()
    assert [reply["error"]["code"] for reply in world.replies()] == ["outcome_unknown"]


def test_nobody_is_told_anything_after_the_node_let_go() -> None:
    world = World()
    world.runs.track(world.message, world.held, job=False)
    world.settle()
    world.runs.close()
    world.sandbox.end(Completion(VALUE))
    world.settle()
    assert world.replies() == []
    assert world.view().state == "claimed"


def test_a_job_is_killed_by_its_id_in_its_own_sandbox_only() -> None:
    world = World(background=True)
    world.runs.begun(world.message, world.held, "{}", 3600)
    assert not world.runs.cancel("another", "op")
    assert not world.runs.cancel(world.route.sandbox_id, "other")
    assert world.runs.cancel(world.route.sandbox_id, "op")
    assert world.sandbox.asked[-1].args == {"job_id": "op", "signal": "SIGKILL"}


@pytest.mark.parametrize(
    "args",
    [{"max_output_bytes": 10**12}, {"max_output_bytes": "x"}, {"as_bytes": 1}, {"stream": "../x"}, {"nonsense": 1}],
)
def test_what_a_sandbox_made_up_is_not_believed(args: dict[str, Any]) -> None:
    world = World(**args)
    world.runs.track(world.message, world.held, job=False)
    world.settle()
    # Nothing is known of it then: it may have been asked to keep as much as there can be.
    assert world.sandbox.asked[-1].args == {"max_output_bytes": MAX_OUTPUT_BYTES}


LONG = "x" * 75


@pytest.mark.parametrize(
    ("op_id", "args", "stream"),
    [
        ("op", {"background": True}, "op"),
        ("op", {"background": True, "stream": "other"}, "op"),
        ("op", {"stream": "op"}, "op"),
        ("op.r7", {"stream": "op"}, "op"),
        (resend_id(LONG, 3), {"stream": LONG}, LONG),
        ("op", {"stream": "other"}, ""),
        ("op.rx", {"stream": "op"}, ""),
        ("op", {"stream": 7}, ""),
        ("op", {}, ""),
    ],
)
def test_a_command_writes_to_no_stream_but_its_own(op_id: str, args: dict[str, Any], stream: str) -> None:
    world = World()
    assert stream_of(replace(world.message, op_id=op_id, args=args)) == stream


@pytest.mark.parametrize("char", ["x", "\x01", "\U0001f600", "A"])
def test_what_is_kept_of_a_jobs_output_fits_into_its_record(char: str) -> None:
    value = {**VALUE, "stdout": char * 1024 * 1024, "stderr": char * 10}
    kept = cut(value)
    assert len(json.dumps(kept)) <= INLINE_BYTES
    assert (kept["cut"], kept["truncated"]) == (True, True)
    assert value["stdout"].endswith(kept["stdout"])
    assert len(kept["stdout"]) % 4 == 0
    assert kept["stdout"]
    assert cut(VALUE) is VALUE
    assert cut(None) is None
