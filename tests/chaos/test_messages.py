"""Promises about messages: lost, doubled, replayed, in thousands, and written by somebody hostile."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from sandfleet import CommandResult, SandboxProvider
from sandfleet.errors import OutcomeUnknown, SandboxLost, SandboxNotFound
from sandfleet.ids import Identity, new_op_id
from sandfleet.store.base import OpRecord, Push, Recorded, Route
from sandfleet.wire import OPS_QUEUE, SCHEDULER_QUEUE, OpMessage, celery_message, node_queue
from tests.chaos.fleet import (
    Answers,
    Fleet,
    Gate,
    Process,
    errors,
    lane_is_held,
    node_of,
    node_took_all,
    note,
    unique,
    wait_in_lane,
)
from tests.services import wait_until

N1 = node_queue("n1")


def route_of(fleet: Fleet, sandbox_id: str) -> Route:
    route = fleet.store.route(sandbox_id)
    assert route is not None
    return route


def a_command(
    fleet: Fleet, thread: str, route: Route, command: str, *, reply_to: str = "", caller: str = "t"
) -> OpMessage:
    """A well-formed operation message, as a client would send it."""
    now_ms = fleet.store.now_ms()
    return OpMessage(
        op_id=new_op_id(),
        kind="execute_command",
        identity=Identity(thread),
        route=route,
        lanes=(f"{route.sandbox_id}/shell/{caller}",),
        args={"command": command},
        content=None,
        start_by_ms=now_ms + 30_000,
        deadline_ms=now_ms + 60_000,
        reply_to=reply_to,
        sent_at_ms=now_ms,
    )


def record_of(message: OpMessage) -> OpRecord:
    return OpRecord(
        op_id=message.op_id,
        kind=message.kind,
        route=message.route,
        owner=message.identity.digest,
        start_by_ms=message.start_by_ms,
        deadline_ms=message.deadline_ms,
        reply_to=message.reply_to,
        describe="test",
    )


def envelope(message: OpMessage, **changes: Any) -> str:
    """The Celery message of an operation, with fields of its body overwritten."""
    body = {**message.to_wire(), **changes}
    return celery_message(
        f"sandbox.{message.kind}", message.op_id, body, queue=node_queue(message.route.node_id), describe="test"
    )


def capture(provider: SandboxProvider) -> list[Push]:
    """Every message the provider publishes from now on."""
    sent: list[Push] = []
    store = provider._client().store
    record = store.record

    def recording(op: OpRecord, push: Push | None, **options: Any) -> Recorded:
        if push is not None:
            sent.append(push)
        return record(op, push, **options)

    store.record = recording  # type: ignore[method-assign]
    return sent


# -- lost and doubled -------------------------------------------------------------------------------------


@pytest.mark.chaos
def test_an_operation_whose_message_vanished_is_answered_and_sent_again(
    fleet: Fleet, broker: redis.Redis, spare: Process
) -> None:
    thread = unique("vanish")
    queue = node_queue("spare")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label="spare") as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        assert sandbox.run("true").exit_code == 0
        op_id = new_op_id()
        deaf(broker, spare)
        try:
            answers.ask("lost", lambda: sandbox.run(note(1), op_id=op_id))
            wait_until(lambda: broker.llen(queue) == 1, 1.5, story=fleet.story)
            assert broker.delete(queue) == 1
        finally:
            spare.send(signal.SIGCONT)

        got = answers.all(20)
        assert not errors(got), fleet.story(sandbox.id)
        assert fleet.numbers(thread) == [1]
        first = fleet.store.op(op_id)
        assert first is not None
        assert (first.outcome, first.claimed_at_ms) == ("not_started", None)
        result = got["lost"]
        assert isinstance(result, CommandResult)
        assert result.op_id == f"{op_id}.r1", "the second sending has an id of its own"


def deaf(broker: redis.Redis, node: Process) -> None:
    """Freeze a node and cut its consumer off: what is sent now stays in its queue. Its lease is still good."""
    node.send(signal.SIGSTOP)
    for connection in broker.client_list():
        if connection["cmd"].lower() == "brpop":
            broker.client_kill_filter(_id=connection["id"])


@pytest.mark.chaos
def test_a_creation_whose_message_vanished_is_made_up_for_while_the_acquire_waits(
    fleet: Fleet, broker: redis.Redis, spare: Process
) -> None:
    thread = unique("lost-create")
    queue = node_queue("spare")
    answers: Answers[str] = Answers(fleet)
    with fleet.provider(label="spare") as provider:
        deaf(broker, spare)
        try:
            answers.ask("acquire", lambda: provider.acquire(thread))
            wait_until(lambda: broker.llen(queue) == 1, 2, story=fleet.story)
            assert broker.delete(queue) == 1
        finally:
            spare.send(signal.SIGCONT)
        got = answers.all(30)
        assert not errors(got), fleet.story()
        sandbox = provider.get(str(got["acquire"]))
        assert sandbox is not None
        assert sandbox.run("echo served").stdout == "served\n"


@pytest.mark.chaos
def test_what_was_decided_and_never_sent_is_finished_by_the_node(fleet: Fleet) -> None:
    # A scheduler that dies between reserving and sending, a caller that dies between stopping and sending.
    reserved, stopped = Identity(unique("limbo-reserved")), Identity(unique("limbo-stopped"))
    answers: Answers[str] = Answers(fleet)
    with fleet.provider() as provider:
        (n1,) = [view for view in fleet.store.nodes() if view.node_id == "n1"]
        place = {"node_id": "n1", "incarnation": n1.incarnation, "data_id": n1.data_id}
        assert fleet.store.reserve(reserved, provider.spec, **place, expires_s=60).status == "reserved"
        first = provider.acquire(stopped.thread_id)
        epoch = route_of(fleet, first).epoch
        stop = fleet.store.begin_stop(first, owner=stopped.digest, force=True, reason="its caller dies now")
        assert stop.status == "recorded"

        for identity in (reserved, stopped):
            answers.ask(identity, lambda i=identity: provider.acquire(i.thread_id, timeout_s=25))
        got = answers.all(30)
        assert not errors(got), fleet.story(first)
        assert route_of(fleet, first).epoch > epoch
        for sandbox_id in got.values():
            sandbox = provider.get(str(sandbox_id))
            assert sandbox is not None
            assert sandbox.run("echo served").stdout == "served\n"


@pytest.mark.chaos
def test_the_queue_of_a_node_that_died_does_not_outlive_it(fleet: Fleet, broker: redis.Redis, spare: Process) -> None:
    thread = unique("orphan-queue")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label="spare") as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        deaf(broker, spare)
        wait_in_lane(fleet, answers, sandbox, range(3))
        assert broker.llen(node_queue("spare")) == 3
        spare.kill()
        assert {type(answer) for answer in answers.all().values()} == {SandboxLost}
        wait_until(lambda: not broker.exists(node_queue("spare")), 5, story=fleet.story)


def test_a_message_delivered_again_before_while_and_after_it_runs_runs_once(fleet: Fleet, broker: redis.Redis) -> None:
    thread = unique("double")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, sandbox, gate)
        sent = capture(provider)
        op_ids = wait_in_lane(fleet, answers, sandbox, [1])
        (push,) = sent
        broker.lpush(push.queue, push.message, push.message)
        node_took_all(fleet, "n1")
        gate.open()
        assert not errors(answers.all())
        broker.lpush(push.queue, push.message, push.message)
        node_took_all(fleet, "n1")
        # The same lane: whatever the copies did has been done before this one runs.
        assert sandbox.run(note(2)).exit_code == 0
        assert fleet.numbers(thread) == [1, 2]
        view = fleet.store.op(op_ids[1])
        assert view is not None
        assert (view.state, view.outcome) == ("done", "ok")


def test_a_message_replayed_after_its_sandbox_has_a_new_owner_is_refused(fleet: Fleet, broker: redis.Redis) -> None:
    thread = unique("replay")
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        sent = capture(provider)
        assert sandbox.run(note(1)).exit_code == 0
        (push,) = sent
        old = route_of(fleet, sandbox.id)
        provider.destroy(sandbox.id)
        again = provider.get(provider.acquire(thread))
        assert again is not None
        new = route_of(fleet, again.id)
        assert new.epoch > old.epoch
        # As it was; under a fresh id that nobody recorded; and recorded by hand for the old epoch.
        unrecorded = a_command(fleet, thread, old, note(3))
        assert fleet.store.record(record_of(unrecorded), None).status == "moved"
        forged = a_command(fleet, thread, new, note(4))
        assert fleet.store.record(record_of(forged), None).status == "recorded"
        stale_body = envelope(forged, epoch=old.epoch)
        broker.lpush(push.queue, push.message, envelope(unrecorded), stale_body)
        node_took_all(fleet, "n1")
        wait_until(lambda: (fleet.store.op(forged.op_id) or forged).state in ("done", "closed"), 10, fleet.story)  # type: ignore[union-attr]
        assert again.run(note(2)).exit_code == 0
        assert fleet.numbers(thread) == [1, 2]
        view = fleet.store.op(forged.op_id)
        assert view is not None
        assert (view.outcome, view.claimed_at_ms) == ("not_started", None)


# -- in thousands -----------------------------------------------------------------------------------------


@pytest.mark.chaos
def test_five_thousand_messages_behind_one_busy_lane_hold_up_nobody_else(
    fleet: Fleet, broker: redis.Redis, spare: Process
) -> None:
    thread = unique("flood")
    queue = node_queue("spare")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label="spare") as provider:
        crowded = provider.get(provider.acquire(thread))
        calm = provider.get(provider.acquire(f"{thread}-calm"))
        assert crowded is not None
        assert calm is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, crowded, gate)
        route = route_of(fleet, crowded.id)
        lane = f"{provider._client().id}.{crowded._handle}"
        recorded = []
        for _ in range(10):
            # An operation looks at its record when its turn comes: most of these can do without.
            unrecorded = [envelope(a_command(fleet, thread, route, note(666), caller=lane)) for _ in range(480)]
            broker.lpush(queue, *unrecorded)
            for _ in range(20):
                message = a_command(fleet, thread, route, note(1), caller=lane)
                assert fleet.store.record(record_of(message), Push(queue, envelope(message))).status == "recorded"
                recorded.append(message.op_id)
            assert calm.run("echo here").stdout == "here\n", "an operation beside the flood"
        node_took_all(fleet, "spare")
        for _ in range(20):
            assert calm.run("echo here").stdout == "here\n"
        # Other lanes of the very same sandbox, too: its files, and another handle's shell.
        crowded.write_file("/mnt/user-data/workspace/beside.txt", "beside")
        assert crowded.read_file("/mnt/user-data/workspace/beside.txt") == "beside"
        other = provider.get(crowded.id)
        assert other is not None
        assert other.run("echo handle").stdout == "handle\n"
        assert fleet.numbers(thread) == [], "nothing has overtaken the busy one"
        states = {view.state for view in (fleet.store.op(op_id) for op_id in recorded) if view is not None}
        assert states == {"recorded"}

        # Nobody waits for ever: with its node gone, each of them is answered.
        spare.kill()
        wait_until(lambda: not fleet.store.ops(node_id="spare", limit=1), 30, story=fleet.story)
        outcomes = {view.outcome for view in (fleet.store.op(op_id) for op_id in recorded) if view is not None}
        assert outcomes == {"not_started"}
        assert isinstance(answers.all()["gate"], OutcomeUnknown)


# -- from somebody hostile --------------------------------------------------------------------------------


class Payload:
    """Unpickling it runs a command on the node."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def hostile_messages(good: str, marker: Path) -> Iterator[tuple[str, str | bytes]]:
    """Messages by name, none of which may run anything or end the worker. ``good`` is a well-formed one."""
    whole = json.loads(good)

    def changed(**parts: Any) -> str:
        return json.dumps({**whole, **parts})

    def headers(**fields: Any) -> str:
        return changed(headers={**whole["headers"], **fields})

    def body(*args: Any) -> str:
        return changed(body=json.dumps([list(args), {}, {}]))

    (operation,), _, _ = json.loads(whole["body"])
    pickled = base64.b64encode(pickle.dumps(((Payload(marker),), {}, {}))).decode()
    properties = whole["properties"]
    yield "empty", b""
    yield "not json", b"{"
    yield "binary", bytes(range(256))
    yield "a number", b"5"
    yield "null", b"null"
    yield "a list", b"[]"
    yield "an empty object", b"{}"
    yield "deeply nested", b"[" * 100_000 + b"]" * 100_000
    yield "no properties", json.dumps({key: value for key, value in whole.items() if key != "properties"})
    yield "no delivery tag", changed(properties={k: v for k, v in properties.items() if k != "delivery_tag"})
    yield "properties of the wrong type", changed(properties="x")
    yield "no headers", changed(headers={})
    yield "headers of the wrong type", changed(headers=[1])
    yield "a body that is a number", changed(body=5)
    yield "a body that is no json", changed(body="{")
    yield "a body that is an object", changed(body="{}")
    yield "a body of too few parts", changed(body="[[]]")
    yield "no arguments", body()
    yield "two arguments", body(operation, operation)
    yield "an argument that is a list", body([1, 2])
    yield "an argument that is null", body(None)
    yield "arguments of the wrong type", body({**operation, "args": "x"})
    yield "numbers of the wrong type", body({**operation, "epoch": "1e9", "start_by": None})
    yield (
        "pickle declared",
        changed(
            **{"content-type": "application/x-python-serialize", "content-encoding": "binary"},
            body=pickled,
            properties={**properties, "body_encoding": "base64"},
        ),
    )
    yield "pickle disguised", changed(body=pickled, properties={**properties, "body_encoding": "base64"})
    yield (
        "yaml declared",
        changed(**{"content-type": "application/x-yaml"}, body="!!python/object/apply:os.system [ls]"),
    )
    yield "an unknown content type", changed(**{"content-type": "application/x-nonsense"})
    yield "an unknown encoding", changed(**{"content-encoding": "nonsense"})
    yield "an unknown task", headers(task="os.system")
    yield "a celery task", headers(task="celery.backend_cleanup")
    yield "a task that is no text", headers(task=None)
    yield "an id that is no text", headers(id=None)
    yield "an id that is a list", headers(id=["x"])
    yield "an id of 100 000 characters", headers(id="x" * 100_000)
    yield "another task than the body's", headers(task="sandbox.read_file")
    yield "another id than the body's", headers(id=new_op_id())
    yield "an eta far away", headers(eta="2999-01-01T00:00:00")
    yield "an eta that is none", headers(eta="never")
    yield "expired long ago", headers(expires="2001-01-01T00:00:00")
    yield "a time limit that is none", headers(timelimit=["x", "y"])
    yield "a wrong version", body({**operation, "v": 99})
    yield "no version", body({key: value for key, value in operation.items() if key != "v"})
    yield "a forged owner", body({**operation, "owner": ["mallory", "thread"]})
    yield "an owner that is a path", body({**operation, "owner": ["../..", "../../etc"]})
    yield "a sandbox that is a path", body({**operation, "sid": "../../etc"})
    yield (
        "a lifecycle task for a foreign path",
        changed(
            headers={**whole["headers"], "task": "node.destroy"},
            body=json.dumps([[{**operation, "kind": "node.destroy", "args": {"delete_data": True}}], {}, {}]),
        ),
    )
    yield "twenty megabytes", body({**operation, "args": {"command": "x" * 20_000_000}})


@pytest.mark.chaos
def test_no_message_written_by_an_enemy_runs_anything_or_ends_the_worker(
    fleet: Fleet, broker: redis.Redis, tmp_path: Path, spare: Process
) -> None:
    thread = unique("hostile")
    queue = node_queue("spare")
    marker = tmp_path / "ran"
    with fleet.provider(label="spare") as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        route = route_of(fleet, sandbox.id)
        (before,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == "spare"]
        for name, message in hostile_messages(envelope(a_command(fleet, thread, route, note(666))), marker):
            broker.lpush(queue, message)
            node_took_all(fleet, "spare")
            assert spare.running, f"{name}: {spare.tail()}"
        # Well-formed, but never recorded: an effect needs its record.
        broker.lpush(queue, envelope(a_command(fleet, thread, route, note(666))))

        assert sandbox.run(note(1), timeout_s=10, queue_timeout_s=20).exit_code == 0, fleet.story()
        assert fleet.numbers(thread) == [1]
        assert not marker.exists()
        assert sorted(path.name for path in fleet.workspace(thread).iterdir()) == ["log"]
        (after,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == "spare"]
        assert (spare.running, after) == (True, before), spare.tail()


@pytest.mark.chaos
def test_no_message_written_by_an_enemy_ends_a_scheduler(fleet: Fleet, broker: redis.Redis, tmp_path: Path) -> None:
    thread = unique("hostile-scheduler")
    marker = tmp_path / "ran"
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        good = envelope(a_command(fleet, thread, route_of(fleet, sandbox.id), note(666)))
        scheduler = fleet.scheduler
        assert scheduler is not None
        for queue in (SCHEDULER_QUEUE, OPS_QUEUE):
            for _name, message in hostile_messages(good, marker):
                broker.lpush(queue, message)
            broker.lpush(queue, good.replace("sandbox.execute_command", "scheduler.acquire"))
            wait_until(lambda q=queue: broker.llen(q) == 0, 30, story=fleet.story)
        assert provider.acquire(unique("after")), fleet.story()
        assert sandbox.run(note(1)).exit_code == 0
        assert fleet.numbers(thread) == [1]
        assert not marker.exists()
        assert scheduler.running, scheduler.tail()


@pytest.mark.parametrize(
    ("flaw", "code"),
    [
        ({"v": 99}, "version_mismatch"),
        ({"args": {"command": 5}}, "invalid_argument"),
        ({"args": {"no such": "argument"}}, "invalid_argument"),
        ({"owner": ["mallory", "somebody"]}, "sandbox_not_found"),
        ({"epoch": 1}, "not_started"),
        ({"args": [], "start_by": "soon"}, "invalid_argument"),
    ],
    ids=["version", "argument", "unknown argument", "owner", "epoch", "shape"],
)
def test_a_recorded_operation_whose_message_is_wrong_is_answered(
    fleet: Fleet, broker: redis.Redis, flaw: dict[str, Any], code: str
) -> None:
    thread = unique("flaw")
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        message = a_command(fleet, thread, route_of(fleet, sandbox.id), note(666))
        pushed = Push(N1, envelope(message, **flaw))
        assert fleet.store.record(record_of(message), pushed).status == "recorded"

        def outcome() -> str:
            view = fleet.store.op(message.op_id)
            assert view is not None
            return view.outcome

        assert wait_until(outcome, 10, story=fleet.story) == code
        assert fleet.numbers(thread) == []
        assert node_of(fleet, thread) == "n1"


# -- somebody else's --------------------------------------------------------------------------------------


def test_another_users_sandbox_is_not_found_by_any_method(fleet: Fleet) -> None:
    thread = unique("private")
    path = "/mnt/user-data/workspace/secret.txt"
    with fleet.provider() as provider, fleet.provider() as theirs:
        own = provider.get(provider.acquire(thread, user_id="alice"))
        assert own is not None
        own.write_file(path, "secret")
        for user in ("mallory", None):
            sandbox = theirs.get(own.id, thread_id=thread, user_id=user)
            assert sandbox is not None
            calls: dict[str, Callable[[], Any]] = {
                "run": lambda s=sandbox: s.run("cat secret.txt"),
                "execute_command": lambda s=sandbox: s.execute_command("cat secret.txt"),
                "session": lambda s=sandbox: s.run("cat secret.txt", session="x"),
                "close_session": lambda s=sandbox: s.close_session("x"),
                "read_file": lambda s=sandbox: s.read_file(path),
                "download_file": lambda s=sandbox: s.download_file(path),
                "write_file": lambda s=sandbox: s.write_file(path, "mine"),
                "append": lambda s=sandbox: s.write_file(path, "mine", True),
                "update_file": lambda s=sandbox: s.update_file(path, b"mine"),
                "str_replace": lambda s=sandbox: s.str_replace(path, "secret", "mine"),
                "list_dir": lambda s=sandbox: s.list_dir("/mnt/user-data/workspace"),
                "list_files": lambda s=sandbox: s.list_files("/mnt/user-data/workspace"),
                "glob": lambda s=sandbox: s.glob("/mnt/user-data/workspace", "*"),
                "grep": lambda s=sandbox: s.grep("/mnt/user-data/workspace", "secret"),
                "stat": lambda s=sandbox: s.stat(path),
                "exists": lambda s=sandbox: s.exists(path),
                "make_dir": lambda s=sandbox: s.make_dir("/mnt/user-data/workspace/d"),
                "remove": lambda s=sandbox: s.remove(path),
                "move": lambda s=sandbox: s.move(path, path + ".mine"),
                "health": lambda s=sandbox: s.health(),
                "noop": lambda s=sandbox: s.noop(),
                "cancel": lambda s=sandbox: s.cancel(new_op_id()),
            }
            for name, call in calls.items():
                with pytest.raises(SandboxNotFound):
                    print(f"{user} got through {name}: {call()!r}")
        assert theirs.acquire(thread, user_id="mallory") != own.id
        theirs.release(own.id)
        assert own.read_file(path) == "secret"
        assert fleet.store.sandbox(own.id).agents == 1  # type: ignore[union-attr]


def test_another_users_sandbox_is_not_reached_by_forged_messages(fleet: Fleet, broker: redis.Redis) -> None:
    thread = unique("forge")
    with fleet.provider() as provider, fleet.provider() as theirs:
        own = provider.get(provider.acquire(thread, user_id="alice"))
        other = theirs.get(theirs.acquire(thread, user_id="mallory"))
        assert own is not None
        assert other is not None
        route, foreign = route_of(fleet, own.id), route_of(fleet, other.id)
        mallory = Identity(thread, "mallory")

        # Recorded as mallory for alice's sandbox: refused by the store.
        forged = replace(a_command(fleet, thread, route, note(1)), identity=mallory)
        assert fleet.store.record(record_of(forged), Push(N1, envelope(forged))).status == "not_found"
        # Recorded for mallory's own sandbox, sent for alice's, as mallory and as alice.
        for owner in (["mallory", thread], ["alice", thread]):
            message = replace(a_command(fleet, thread, foreign, note(2)), identity=mallory)
            wire = envelope(message, sid=route.sandbox_id, inc=route.incarnation, epoch=route.epoch, owner=owner)
            assert fleet.store.record(record_of(message), Push(N1, wire)).status == "recorded"
            view = wait_until(
                lambda o=message.op_id: (v := fleet.store.op(o)) and v.state in ("done", "closed") and v,
                10,
                fleet.story,
            )
            assert (view.outcome, view.claimed_at_ms) != ("ok", None)
            assert view.claimed_at_ms is None, "its effect never began"
        assert own.run(note(7)).exit_code == 0
        log = fleet.workspace(thread, "alice") / "log"
        assert log.read_text() == "7\n"
