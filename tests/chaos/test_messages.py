"""Promises about messages: lost, doubled, replayed, and in thousands."""

from __future__ import annotations

import signal

import pytest
import redis

from sandfleet import CommandResult
from sandfleet.errors import OutcomeUnknown, SandboxLost
from sandfleet.ids import Identity, new_op_id
from sandfleet.store.base import Push
from sandfleet.wire import node_queue
from tests.chaos.fleet import (
    Answers,
    Fleet,
    Gate,
    Process,
    errors,
    lane_is_held,
    node_took_all,
    note,
    unique,
    wait_in_lane,
)
from tests.chaos.forging import a_command, capture, envelope, record_of, route_of
from tests.services import wait_until

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


def test_a_command_whose_answer_finds_no_room_is_not_reported_as_one_to_repeat(
    fleet: Fleet, broker: redis.Redis
) -> None:
    thread = unique("no-room")
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        broker.hincrby("sandfleet:bytes", "total", 2**30)  # as if the fleet's byte budget were used up
        try:
            with pytest.raises(OutcomeUnknown) as told:
                sandbox.run(f"{note(1)}; head -c 600000 /dev/zero | tr '\\0' x")
        finally:
            broker.hincrby("sandfleet:bytes", "total", -(2**30))
        assert told.value.retryable is False
        assert fleet.numbers(thread) == [1]


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
