"""A node that is back: what it holds again, what it answers for, and what it leaves to be ended.

Two runs of one node share a store in memory and an engine of mock sandboxes; each is a whole `Node` without threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.backends import Completion, Operation
from sandfleet.config import Settings
from sandfleet.errors import OutcomeUnknown, StartFailed
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.store.base import NodeRecord, OpRecord, Route, Waiter
from sandfleet.store.memory import MemoryStore
from sandfleet.testing.surviving import MockEngine, SurvivingMockBackend
from sandfleet.wire import OpMessage
from sandfleet_workers import lifecycle as lifecycle_module
from sandfleet_workers.entries import Entry
from sandfleet_workers.lease import Lease
from sandfleet_workers.node import Node
from sandfleet_workers.pool import LanePool
from sandfleet_workers.runs import Runs
from sandfleet_workers.sandbox_dirs import thread_directory
from sandfleet_workers.worker import _take_lease
from tests.services import wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

ALICE = Identity("alice")
DATA_ID = "0123456789abcdef" * 2
SPEC = SandboxSpec(backend="mock")
LONG_S = 36_000.0


class Machine:
    """What outlives a run of the node: the disk, the sandboxes, the registry."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = MockEngine()
        self.store = MemoryStore()
        self.store.close = lambda: None  # type: ignore[method-assign]
        self.store.open_replies("client", ttl_s=LONG_S)
        self.runs: list[Run] = []

    def run(self, node_id: str = "n1", **settings: Any) -> Run:
        """The node's next run, joined."""
        return Run(self, node_id, settings)

    def died(self) -> None:
        """kill -9 of the last run, however far it came."""
        if self.runs[-1].node.lifecycle._backends:
            self.runs[-1].die()

    @property
    def journal(self) -> Path:
        return self.root / "data" / "nodes" / "n1" / "sandboxes"

    def entries(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in self.journal.glob("*.json")}

    def holder(self, identity: Identity = ALICE) -> dict[str, Any] | None:
        path = thread_directory(self.root / "data", identity).parent / ".holder"
        text = path.read_text().partition("\n")[0] if path.exists() else ""
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found if found and found["node"] else None

    def replies(self) -> dict[str, dict[str, Any]]:
        page = self.store.read_replies("client", "0", block_s=0)
        return {reply.op_id: json.loads(reply.payload) for reply in page}


class Run:
    """One run of a node, as `NodeStep` makes it."""

    def __init__(self, machine: Machine, node_id: str, given: dict[str, Any]) -> None:
        self.machine, store = machine, machine.store
        self.store = store
        given = {"backend": "mock", "idle_timeout_s": 0, "replicas": 4, "blank_pool": 0, **given}
        data, run = machine.root / "data", machine.root / "run"
        settings = Settings.load({}, data_root=data, run_root=run, node_id=node_id, **given)
        self.pool = LanePool(limit=2)
        self.pool.on_start()
        self.node = Node(settings, store, self.pool, node_id)
        machine.runs.append(self)
        self.node.lifecycle.data_id = DATA_ID
        record = NodeRecord(node_id, self.node.incarnation, settings.replicas, DATA_ID, ("mock",))
        self.node.lease = Lease(
            store,
            record,
            lease_s=LONG_S,
            on_tick=self.node.tick,
            on_lost=lambda _exc: None,
            on_forgotten=self.node.lifecycle.upkeep.forgotten,
        )
        _take_lease(self.node)
        self.node.lifecycle.load()
        self.node.lifecycle.open()
        while store.close_incarnation(node_id, self.node.incarnation, reason="its node came back").more:
            pass
        self.pool.attach(self.node, max_lane=9, max_jobs=9, max_bytes=9999, lifecycle_threads=1)

    @property
    def backend(self) -> SurvivingMockBackend:
        backend = self.node.lifecycle._backends["mock"]
        assert isinstance(backend, SurvivingMockBackend)
        return backend

    def die(self) -> None:
        """kill -9: nothing is said and nothing ended."""
        self.node.left_running = frozenset(self.node.held)
        self.node.runs.close()
        self.backend.detach()

    def live(self, identity: Identity = ALICE) -> Route:
        """A live sandbox that an agent holds."""
        reserved = self.store.reserve(
            identity,
            SPEC,
            node_id=self.node.node_id,
            incarnation=self.node.incarnation,
            data_id=DATA_ID,
            expires_s=LONG_S,
        )
        assert reserved.route is not None, reserved
        assert self.life("node.create", reserved.route, identity).error is None
        self.store.acquire(identity, Waiter("a", "client", "agent", LONG_S), wait_s=1, push=None)
        return reserved.route

    def life(self, kind: str, route: Route, identity: Identity = ALICE, **args: Any) -> Completion:
        """Carry out a lifecycle operation; its completion."""
        ended: list[Completion] = []
        message = OpMessage("life", kind, identity, route, (), {"spec": SPEC.to_wire(), **args}, None, 0, 0, "", 0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.node, "finish", lambda _job, completion: ended.append(completion))
            self.node.lifecycle.run(SimpleNamespace(op_id="life"), message)  # type: ignore[arg-type]
        return ended[0]

    def begin(self, route: Route, op_id: str, kind: str = "execute_command", *, sent: bool = True, **args: Any) -> None:
        """An operation that is claimed and, if ``sent``, begun in the sandbox."""
        until = self.store.now_ms() + int(LONG_S * 1000)
        record = OpRecord(op_id, kind, route, ALICE.digest, until, until, "client", "")
        assert self.store.record(record, None).status == "recorded"
        assert self.store.claim(op_id, route).status == "claimed"
        lanes = (f"{route.sandbox_id}/shell/me",)
        message = OpMessage(op_id, kind, ALICE, route, lanes, {}, None, until, until, "client", 0)
        if sent:
            note = json.dumps(message.to_wire())
            content = args.pop("content", None)
            op = Operation(op_id, kind, args, content, note)
            held = self.node.held[route.sandbox_id]
            held.connection.start(op, lambda _completion: None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)

    class Surviving(SurvivingMockBackend):
        def __init__(self, settings: Any, on_death: Any) -> None:
            super().__init__(settings, on_death, engine=made.engine)

    monkeypatch.setattr(lifecycle_module, "load_backend", lambda _name: Surviving)
    yield made
    for run in made.runs:
        run.node.runs.close()
        run.pool.on_stop()


def slow(run: Run, command: str = "make", delay_s: float = 0.5) -> str:
    """A command that takes its time."""
    run.backend.set_output(command, "built\n", exit_code=3, delay_s=delay_s)
    return command


# --- sandboxes -------------------------------------------------------------------------------


def test_a_returning_node_holds_its_sandboxes_again_with_epoch_age_and_route(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.die()
    second = machine.run()
    held = second.node.held[route.sandbox_id]
    assert held.route == Route(route.sandbox_id, "n1", second.node.incarnation, route.epoch)
    assert machine.store.route(route.sandbox_id) == held.route
    assert machine.store.acquire(ALICE, Waiter("b", "client", "agent", 9), wait_s=1, push=None).status == "live"
    assert second.backend.running() == [route.sandbox_id]
    assert second.backend.leftovers() == {}
    assert held.made_at <= first.node.held[route.sandbox_id].made_at + 1.0
    assert machine.holder() is not None
    assert machine.holder()["epoch"] == route.epoch  # type: ignore[index]


def test_a_lease_that_has_not_lapsed_does_not_keep_a_node_from_coming_back(machine: Machine) -> None:
    machine.run().die()
    again = machine.run()
    assert [(view.incarnation, view.alive) for view in machine.store.nodes()] == [(again.node.incarnation, True)]


def test_a_sandbox_that_ended_meanwhile_is_lost_and_leaves_nothing(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first, delay_s=60))
    first.die()
    machine.engine.end(machine.holder()["container"])  # type: ignore[index]
    second = machine.run()
    assert second.node.held == {}
    info = machine.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.state == "lost"
    assert machine.replies()["op"]["error"]["code"] == "outcome_unknown"
    assert machine.entries() == {}
    assert machine.holder() is None
    (lost,) = [each for each in machine.store.story(route.sandbox_id) if each["event"] == "lost"]
    assert "gone" in lost["reason"]


def test_a_sandbox_whose_thread_has_a_newer_owner_is_ended(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.die()
    newer = Route(route.sandbox_id, "n2", "other", route.epoch + 1)
    machine.store.announce(NodeRecord("n2", "other", 4, DATA_ID, ("mock",)), lease_s=LONG_S)
    assert machine.store.adopt(ALICE, SPEC, newer, data_id=DATA_ID)
    second = machine.run()
    assert second.node.held == {}
    assert machine.engine.sandboxes == {}
    assert machine.store.route(route.sandbox_id) == newer
    assert machine.entries() == {}


def test_a_sandbox_that_was_being_removed_is_removed(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    machine.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    first.die()
    second = machine.run()
    assert second.node.held == {}
    assert machine.engine.sandboxes == {}
    assert machine.store.sandbox(route.sandbox_id) is None


def test_a_sandbox_that_was_being_removed_and_is_gone_is_not_lost(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    machine.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    first.die()
    machine.engine.end(machine.holder()["container"])  # type: ignore[index]
    machine.run()
    assert machine.store.sandbox(route.sandbox_id) is None
    assert (machine.entries(), machine.holder()) == ({}, None)


def test_what_the_journal_says_to_be_stopping_is_ended_whatever_the_registry_says(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.node.lifecycle.dirs.note_stopping(first.node.held[route.sandbox_id].entry)  # type: ignore[arg-type]
    first.die()
    assert machine.run().node.held == {}
    assert machine.engine.sandboxes == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 1}', '{"v": 99}', "\x00\xff"])
def test_an_entry_that_makes_no_sense_stops_nobody_and_its_container_goes(machine: Machine, text: str) -> None:
    first = machine.run()
    route = first.live()
    first.die()
    (name,) = machine.entries()
    (machine.journal / f"{name}.json").write_text(text)
    second = machine.run()
    assert second.node.held == {}
    assert machine.engine.sandboxes == {}
    assert machine.store.route(route.sandbox_id) is None
    assert second.live().epoch > route.epoch


@pytest.mark.parametrize(
    "change",
    [
        {"sandbox_id": "00000000"},
        {"epoch": "7"},
        {"epoch": -1},
        {"thread": "../x"},
        {"backend": None},
        {"ticket": []},
        {"slot": "../../etc"},
        {"made_at_s": "soon"},
        {"spec": 3},
        {"user": 5},
    ],
    ids=str,
)
def test_a_forged_entry_is_refused(change: dict[str, Any]) -> None:
    entry = Entry(ALICE.digest[:8], ALICE, 7, SPEC, "mock", None, 1.0, {"name": "x"})
    assert Entry.from_wire(json.loads(json.dumps(entry.to_wire()))) == entry
    with pytest.raises(ValueError):
        Entry.from_wire({**entry.to_wire(), **change})


def test_an_entry_under_another_name_is_set_aside(machine: Machine) -> None:
    first = machine.run()
    first.live()
    first.die()
    (name,) = machine.entries()
    (machine.journal / f"{name}.json").rename(machine.journal / "elsewhere.json")
    assert machine.run().node.held == {}
    assert list(machine.journal.glob("*.bad"))


def test_an_ended_sandbox_leaves_neither_entry_nor_holder(machine: Machine) -> None:
    run = machine.run()
    route = run.live()
    assert len(machine.entries()) == 1
    machine.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    assert run.life("node.destroy", route).error is None
    assert (machine.entries(), machine.holder(), machine.engine.sandboxes) == ({}, None, {})


def test_a_sandbox_that_dies_leaves_neither_entry_nor_holder(machine: Machine) -> None:
    run = machine.run()
    run.backend.kill(run.live().sandbox_id)
    wait_until(lambda: machine.entries() == {} and machine.holder() is None, 10)


# --- two owners ------------------------------------------------------------------------------


def test_what_another_node_left_on_the_thread_s_data_is_ended_before_the_next_one_starts(machine: Machine) -> None:
    first = machine.run()
    first.live()
    first.die()
    machine.store._leases.drop("n1")
    machine.store.close_incarnation("n1", None, reason="it died")
    (before,) = machine.engine.sandboxes
    second = machine.run("n2")
    route = second.live()
    assert before not in machine.engine.sandboxes
    assert machine.holder() == {
        "node": "n2",
        "backend": "mock",
        "epoch": route.epoch,
        "container": second.backend.sandbox(route.sandbox_id).name,
    }


def test_an_older_owner_does_not_start_beside_a_newer_one(machine: Machine) -> None:
    first, second = machine.run(), machine.run("n2")
    reserved = machine.store.reserve(
        ALICE, SPEC, node_id="n1", incarnation=first.node.incarnation, data_id=DATA_ID, expires_s=LONG_S
    )
    assert reserved.route is not None
    machine.store.create_failed(reserved.route, {"code": "not_started", "message": "", "facts": {}})
    second.live()
    late = first.life("node.create", reserved.route)
    assert late.error is not None
    assert late.error.code == "not_started"
    assert len(machine.engine.sandboxes) == 1


# --- operations ------------------------------------------------------------------------------


def test_a_command_that_runs_on_is_answered_with_its_real_result_once(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first))
    first.die()
    sandbox = next(iter(machine.engine.sandboxes.values()))
    second = machine.run()
    view = machine.store.op("op")
    assert view is not None
    assert (view.state, view.incarnation) == ("claimed", second.node.incarnation)
    wait_until(lambda: "op" in machine.replies(), 10)
    value = machine.replies()["op"]["ok"]
    assert (value["exit_code"], value["stdout"]) == (3, "built\n")
    assert sandbox.began == ["op"]


def test_a_command_that_ended_while_the_node_was_away_is_answered(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first, delay_s=0))
    first.die()
    machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["ok"]["exit_code"] == 3


def test_a_change_of_a_file_is_answered(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", "write_file", path="/mnt/user-data/workspace/a", content=b"abc")
    first.die()
    machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["ok"]["size"] == 3


def test_what_was_claimed_and_never_reached_its_sandbox_did_not_start_and_never_will(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", sent=False)
    first.die()
    second = machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["error"]["code"] == "not_started"
    late = second.node.held[route.sandbox_id].connection.perform(Operation("op", "execute_command", {"command": "x"}))
    assert late.error is not None


@pytest.mark.parametrize(("part", "told"), [("op.0", "outcome_unknown"), ("other.0", "not_started")])
def test_of_a_batch_it_is_told_whether_any_part_of_it_began(machine: Machine, part: str, told: str) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", "batch", sent=False)
    connection = first.node.held[route.sandbox_id].connection
    connection.start(Operation(part, "execute_command", {"command": "x"}), lambda _completion: None)
    first.die()
    machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["error"]["code"] == told


def test_a_reattached_command_keeps_its_lane(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first, delay_s=1.0))
    first.die()
    second = machine.run()
    assert second.pool.lane_count() == 2
    wait_until(lambda: second.pool.lane_count() == 0, 10)


@pytest.mark.parametrize("note", ["", "nonsense", "{}", "[" * 5000])
def test_a_note_is_not_believed(machine: Machine, note: str) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first))
    first.backend.sandbox(route.sandbox_id)._ops["op"].note = note
    first.die()
    machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["ok"]["exit_code"] == 3


def test_a_note_about_somebody_else_s_operation_is_not_believed(machine: Machine) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first))
    ops = first.backend.sandbox(route.sandbox_id)._ops
    forged = json.loads(ops["op"].note)
    forged.update(reply="another-client", owner=[None, "bob"])
    ops["op"].note = json.dumps(forged)
    first.die()
    machine.run()
    wait_until(lambda: "op" in machine.replies(), 10)


# --- leaving ---------------------------------------------------------------------------------


def test_a_node_that_is_expected_back_is_away_and_says_nothing_of_what_runs(machine: Machine) -> None:
    first = machine.run(detach_s=60)
    route = first.live()
    first.begin(route, "op", command=slow(first, delay_s=1.0))
    first.node.stop()
    (view,) = machine.store.nodes()
    assert (view.state, view.alive) == (NodeState.AWAY, True)
    assert len(machine.engine.sandboxes) == 1
    assert machine.replies() == {}
    machine.run(detach_s=60)
    wait_until(lambda: "op" in machine.replies(), 10)
    assert machine.replies()["op"]["ok"]["exit_code"] == 3


@pytest.mark.parametrize("how", ["drained", "detach_s=0"])
def test_a_node_that_leaves_for_good_ends_everything(machine: Machine, how: str) -> None:
    run = machine.run(detach_s=60 if how == "drained" else 0)
    run.live()
    run.node.leaves_for_good = how == "drained"
    run.node.stop()
    assert machine.engine.sandboxes == {}
    assert [view.state for view in machine.store.nodes()] == [NodeState.GONE]
    assert machine.entries() == {}


def test_a_node_without_sandboxes_just_leaves(machine: Machine) -> None:
    run = machine.run(detach_s=60)
    run.node.stop()
    assert [view.state for view in machine.store.nodes()] == [NodeState.GONE]


def test_a_fenced_node_lets_go_and_its_next_run_decides(machine: Machine) -> None:
    first = machine.run(detach_s=60)
    route = first.live()
    machine.store._leases.drop("n1")
    machine.store.close_incarnation("n1", None, reason="it was silent")
    first.node.fenced = True
    first.node.stop()
    assert len(machine.engine.sandboxes) == 1
    second = machine.run(detach_s=60)
    assert machine.store.route(route.sandbox_id) == second.node.held[route.sandbox_id].route


def test_an_unknown_outcome_of_what_was_let_go_is_not_told(machine: Machine) -> None:
    run = machine.run(detach_s=60)
    route = run.live()
    message = OpMessage("op", "execute_command", ALICE, route, (), {}, None, 0, 0, "client", 0)
    carry = SimpleNamespace(message=message, finished=False, claimed=True)
    dropped: list[Any] = []
    run.pool.drop = dropped.append  # type: ignore[method-assign, assignment]
    run.node.left_running = frozenset({route.sandbox_id})
    job = SimpleNamespace(carry=carry, op_id="op")
    run.node.finish(job, Completion(error=OutcomeUnknown("the connection was closed")))  # type: ignore[arg-type]
    assert dropped == [job]


# --- deaths at any moment --------------------------------------------------------------------


class Killed(BaseException):
    """kill -9 at this very call."""


def count_down(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, str]], number: int, *, after: bool) -> list[str]:
    """Die before (or after) the ``number``-th of these calls; the calls that came, in their order."""
    seen: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) > number:
                raise Killed  # a dead process does nothing more
            if len(seen) == number and not after:
                raise Killed
            value = real(*args, **kwargs)
            if len(seen) == number:
                raise Killed
            return value

        monkeypatch.setattr(owner, name, call)

    for owner, name in calls:
        wrap(owner, name)
    return seen


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("blank", [False, True], ids=["created", "claimed"])
def test_a_node_killed_at_any_step_of_a_creation_leaves_one_sandbox_and_no_leak(
    machine: Machine, blank: bool, number: int, after: bool
) -> None:
    first = machine.run(blank_pool=1 if blank else 0)
    workspace = thread_directory(machine.root / "data", ALICE) / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "kept").write_text("mine")
    if blank:
        first.node.lifecycle.tick(machine.store.now_ms())
        wait_until(lambda: first.node.lifecycle.blanks.counts() == (1, 0), 10)
    reserved = machine.store.reserve(
        ALICE,
        SPEC,
        node_id="n1",
        incarnation=first.node.incarnation,
        data_id=DATA_ID,
        expires_s=LONG_S,
        spec_digest=SPEC.digest,
    )
    assert reserved.route is not None
    args = {"blank": reserved.blank} if blank else {}
    dirs, backend = first.node.lifecycle.dirs, first.backend
    calls: list[tuple[Any, str]] = [
        (dirs, "hold"),
        (dirs._journal, "write"),
        (os, "rename"),
        (os, "symlink"),
        (backend, "create"),
        (backend, "claim"),
        (machine.store, "created"),
    ]
    with pytest.MonkeyPatch.context() as patched:
        seen = count_down(patched, calls, number, after=after)
        try:
            assert first.life("node.create", reserved.route, **args).error is None
        except Killed:
            pass
    first.die()
    assert len(seen) >= (5 if not blank else 8) or number <= len(seen)

    second = machine.run()
    if not second.node.held:
        second.live()
    (held,) = second.node.held.values()
    assert (workspace / "kept").read_text() == "mine"
    assert [sandbox.name for sandbox in machine.engine.sandboxes.values()] == [held.entry.container]  # type: ignore[union-attr]
    assert list(machine.entries()) == [held.entry.name]  # type: ignore[union-attr]
    slots = machine.root / "data" / "nodes" / "n1" / "slots"
    assert {path.name for path in slots.glob("*")} <= {held.slot}
    info = machine.store.sandbox(held.route.sandbox_id)
    assert info is not None
    assert info.state in ("live", "warm")
    assert {path.name for path in workspace.parent.parent.iterdir()} <= {".holder", "user-data", "acp-workspace"}


# --- while it comes back ---------------------------------------------------------------------


def test_a_thread_that_asks_while_its_node_comes_back_keeps_its_sandbox(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.run()
    route = first.live()
    first.die()
    told: list[str] = []
    attach = SurvivingMockBackend.attach

    def attached(backend: SurvivingMockBackend, sandbox_id: str, ticket: Any) -> Any:
        waiter = Waiter("late", "client", "agent-2", LONG_S)
        told.append(machine.store.acquire(ALICE, waiter, wait_s=1, push=None).status)
        (node,) = machine.store.nodes()
        place = {"node_id": "n1", "incarnation": node.incarnation, "data_id": DATA_ID, "expires_s": LONG_S}
        told.append(machine.store.reserve(ALICE, SPEC, **place).status)  # type: ignore[arg-type]
        return attach(backend, sandbox_id, ticket)

    monkeypatch.setattr(SurvivingMockBackend, "attach", attached)
    second = machine.run()
    assert told == ["live", "live"]
    assert second.node.held[route.sandbox_id].route.epoch == route.epoch


def test_an_engine_that_stumbles_while_a_node_comes_back_costs_no_sandbox(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.run()
    route = first.live()
    first.die()
    attach, tries = SurvivingMockBackend.attach, iter([StartFailed("the engine restarts", reason="unreachable")] * 2)

    def attached(backend: SurvivingMockBackend, sandbox_id: str, ticket: Any) -> Any:
        for trouble in tries:
            raise trouble
        return attach(backend, sandbox_id, ticket)

    monkeypatch.setattr(SurvivingMockBackend, "attach", attached)
    assert list(machine.run().node.held) == [route.sandbox_id]


def test_a_lease_that_lapses_at_the_moment_of_the_return_costs_the_operations_and_not_the_sandbox(
    machine: Machine,
) -> None:
    first = machine.run(detach_s=60)
    route = first.live()
    first.begin(route, "op", command=slow(first))
    first.node.stop()
    machine.store._leases.drop("n1")
    machine.store.close_incarnation("n1", None, reason="it was silent")
    assert machine.replies()["op"]["error"]["code"] == "outcome_unknown"
    second = machine.run(detach_s=60)
    assert machine.store.route(route.sandbox_id) == second.node.held[route.sandbox_id].route
    assert len(machine.store.read_replies("client", "0", block_s=0)) == 1


def test_of_two_nodes_on_one_data_root_the_one_with_the_newer_epoch_keeps_the_thread(machine: Machine) -> None:
    first = machine.run(detach_s=60)
    route = first.live()
    first.node.stop()
    machine.store._leases.drop("n1")
    machine.store.close_incarnation("n1", None, reason="it was silent")
    other = machine.run("n2", detach_s=60)
    newer = other.live()
    again = machine.run(detach_s=60)
    assert again.node.held == {}
    assert machine.store.route(route.sandbox_id) == newer
    (running,) = machine.engine.sandboxes.values()
    assert running.node == "n2"
    assert machine.holder()["node"] == "n2"  # type: ignore[index]


def test_a_node_that_is_killed_while_it_lets_go_is_expected_back_as_long_as_any(
    machine: Machine,
) -> None:
    first = machine.run(detach_s=60)
    route = first.live()

    def hung(_backend: SurvivingMockBackend) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SurvivingMockBackend, "detach", hung)
        with pytest.raises(Killed):
            first.node.stop()
    (view,) = machine.store.nodes()
    assert (view.state, view.alive) == (NodeState.AWAY, True)
    assert 50_000 < machine.store._leases.left_ms("n1") <= 60_000
    first.die()
    assert list(machine.run(detach_s=60).node.held) == [route.sandbox_id]


def test_a_registry_that_lost_its_data_while_a_node_was_away_gives_its_threads_to_nobody(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.run(detach_s=60)
    route = first.live()
    first.node.stop()
    machine.store.forget_everything()
    told: list[str] = []
    attach = SurvivingMockBackend.attach

    def attached(backend: SurvivingMockBackend, sandbox_id: str, ticket: Any) -> Any:
        (node,) = machine.store.nodes()
        place = {"node_id": "n1", "incarnation": node.incarnation, "data_id": DATA_ID, "expires_s": LONG_S}
        told.append(machine.store.reserve(ALICE, SPEC, **place).status)  # type: ignore[arg-type]
        return attach(backend, sandbox_id, ticket)

    monkeypatch.setattr(SurvivingMockBackend, "attach", attached)
    second = machine.run(detach_s=60)
    assert told == ["recovering"]
    assert machine.store.route(route.sandbox_id) == second.node.held[route.sandbox_id].route


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 14))
def test_a_node_killed_twice_at_any_step_of_its_start_still_answers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int, after: bool
) -> None:
    first = machine.run()
    route = first.live()
    first.begin(route, "op", command=slow(first))
    first.begin(route, "write", "write_file", path="/mnt/user-data/workspace/a", content=b"abc")
    first.begin(route, "never", sent=False)
    first.die()
    sandbox = next(iter(machine.engine.sandboxes.values()))
    calls: list[tuple[Any, str]] = [
        (machine.store, "announce"),
        (SurvivingMockBackend, "attach"),
        (machine.store, "adopt"),
        (machine.store, "reattach"),
        (LanePool, "occupy"),
        (Runs, "track"),
        (machine.store, "close_incarnation"),
    ]
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patched:
            # What the dead one would have answered, it did not.
            patched.setattr(Runs, "_recall", lambda _runs, _run: None)
            seen = count_down(patched, calls, number, after=after)
            try:
                machine.run()
            except Killed:
                pass
            machine.died()
    assert number <= len(seen) or len(seen) == 13
    second = machine.run()
    assert machine.store.route(route.sandbox_id) == second.node.held[route.sandbox_id].route
    wait_until(lambda: len(machine.replies()) == 3, 10, story=lambda: str(machine.replies()))
    told = machine.replies()
    assert told["op"]["ok"]["exit_code"] == 3
    assert told["write"]["ok"]["size"] == 3
    assert told["never"]["error"]["code"] == "not_started"
    assert sandbox.began == ["op", "write"]
    assert machine.store.acquire(ALICE, Waiter("b", "client", "agent", 9), wait_s=1, push=None).status == "live"
    wait_until(lambda: second.pool.lane_count() == 0, 10)
