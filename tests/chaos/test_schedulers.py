"""Promises about schedulers that die: at each step of a placement, and with callers that wait in line."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis

from sandfleet.ids import Identity
from tests.chaos.dying import importable
from tests.chaos.fleet import Answers, Fleet, Process, errors, unique
from tests.services import wait_until

pytestmark = pytest.mark.chaos

PLACEMENT = [
    "sandfleet_scheduler.service:Scheduler.place@before",
    "sandfleet_scheduler.service:Scheduler.reserve@before",
    # The place is taken, and its node was not told: the reservation itself has to be made up for.
    "sandfleet_scheduler.service:Scheduler._create@before",
    "sandfleet_scheduler.service:Scheduler._create@after",
    "sandfleet_scheduler.service:Scheduler.place@after",
]


def dying_scheduler(fleet: Fleet, point: str, mark: Path, told: str = "KILL") -> Process:
    """Replace the fleet's scheduler by one that ends, or stops, at the point."""
    assert fleet.scheduler is not None
    fleet.scheduler.kill()
    argv = ["-m", "tests.chaos.dying", told, point, "sandfleet_scheduler"]
    fleet.scheduler = fleet.start("dying-scheduler", argv, DYING_AT=str(mark), **importable())
    return fleet.scheduler


@pytest.mark.parametrize("point", PLACEMENT, ids=lambda point: point.rpartition(".")[2])
def test_a_scheduler_killed_at_any_step_of_a_placement_leaves_one_sandbox_and_no_caller_without_it(
    fleet: Fleet, tmp_path: Path, point: str
) -> None:
    thread = unique("mid-placement")
    dying = dying_scheduler(fleet, point, tmp_path / "dead")
    answers: Answers[str] = Answers(fleet)
    try:
        with fleet.provider() as provider:
            for caller in range(3):
                answers.ask(caller, lambda: provider.acquire(thread, timeout_s=40))
            wait_until(lambda: not dying.running, 30, story=fleet.story)
            fleet.start_scheduler()
            got = answers.all(45)
            assert not errors(got), fleet.story()
            (sandbox_id,) = set(got.values())
            sandbox = provider.get(str(sandbox_id))
            assert sandbox is not None
            assert sandbox.run("echo served").stdout == "served\n"
            held = [info.sandbox_id for info in provider.list() if info.thread_id == thread]
            assert held == [sandbox_id]
            provider.destroy(str(sandbox_id))
    finally:
        if dying.running:
            dying.kill()
            fleet.start_scheduler()


def test_a_scheduler_frozen_between_its_reservation_and_the_creation_makes_no_second_sandbox_when_it_wakes(
    fleet: Fleet, tmp_path: Path
) -> None:
    thread = unique("frozen-placement")
    mark = tmp_path / "stopped"
    frozen = dying_scheduler(fleet, "sandfleet_scheduler.service:Scheduler._create@before", mark, "STOP")
    answers: Answers[str] = Answers(fleet)
    try:
        with fleet.provider() as provider:
            answers.ask("acquire", lambda: provider.acquire(thread, timeout_s=40))
            wait_until(mark.exists, 30, story=fleet.story)
            other = fleet.start_scheduler()
            got = answers.all(45)
            assert not errors(got), fleet.story()
            sandbox = provider.get(str(got["acquire"]))
            assert sandbox is not None
            before = fleet.store.route(sandbox.id)
            frozen.send(signal.SIGCONT)
            # What it sends now is about the same reservation, which was confirmed long ago.
            for number in range(5):
                assert sandbox.run(f"echo {number} >> log").exit_code == 0
            again = unique("after")
            provider.destroy(provider.acquire(again, timeout_s=40))
            assert fleet.store.route(sandbox.id) == before
            assert fleet.numbers(thread) == list(range(5))
            provider.destroy(sandbox.id)
            assert other.running
    finally:
        fleet.end(frozen)


def test_callers_that_stand_in_line_when_every_scheduler_dies_get_their_turns_from_the_next_one(
    fleet: Fleet, broker: redis.Redis
) -> None:
    label = unique("line")
    node = fleet.node(label, label=label, env={"SANDFLEET_REPLICAS": "1"})
    threads = [unique(f"line-{number}") for number in range(3)]
    answers: Answers[str] = Answers(fleet)
    with fleet.provider(label=label) as provider:
        first = provider.acquire(unique("line-first"))
        for thread in threads:
            answers.ask(thread, lambda t=thread: provider.acquire(t, timeout_s=60))
        digests = [Identity(thread).digest for thread in threads]
        wait_until(
            lambda: all(broker.zscore("sandfleet:parked", digest) is not None for digest in digests), 20, fleet.story
        )
        assert fleet.scheduler is not None
        fleet.scheduler.kill()
        try:
            # The place becomes free while there is nobody to give it away.
            provider.destroy(first)
        finally:
            fleet.start_scheduler()
        served: set[str] = set()
        while len(served) < len(threads):
            waiting = set(threads) - served
            thread = wait_until(lambda w=waiting: next(iter(w & set(answers.got)), None), 45, story=fleet.story)
            assert isinstance(answers.got[thread], str), repr(answers.got[thread])
            served.add(thread)
            provider.destroy(str(answers.got[thread]))
        assert not errors(answers.all())
    fleet.end(node)


def test_a_caller_that_dies_in_line_keeps_a_place_no_longer_than_its_silence_lasts(
    fleet: Fleet, broker: redis.Redis
) -> None:
    label = unique("dead-in-line")
    node = fleet.node(label, label=label, env={"SANDFLEET_REPLICAS": "1"})
    dead, alive = unique("dead"), unique("alive")
    answers: Answers[str] = Answers(fleet)
    script = (
        "import sys\n"
        "from sandfleet import SandboxProvider\n"
        "from sandfleet.config import Settings\n"
        "settings = Settings.load(labels={'for': sys.argv[2]}, agent_ttl_s=2.0)\n"
        "SandboxProvider(settings).acquire(sys.argv[1], timeout_s=60)\n"
    )
    with fleet.provider(label=label) as provider:
        first = provider.acquire(unique("holds"))
        client = fleet.client_script("dies-in-line", script, dead, label)
        parked = Identity(dead).digest
        wait_until(lambda: broker.zscore("sandfleet:parked", parked) is not None, 30, story=fleet.story)
        client.kill()
        answers.ask("alive", lambda: provider.acquire(alive, timeout_s=60))
        behind = Identity(alive).digest
        wait_until(lambda: broker.zscore("sandfleet:parked", behind) is not None, 20, story=fleet.story)
        provider.destroy(first)
        got = answers.all(60)
        assert not errors(got), fleet.story()
        assert [info.thread_id for info in provider.list() if info.node_id == label] == [alive]
        provider.destroy(str(got["alive"]))
    fleet.end(node)
