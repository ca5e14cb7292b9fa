"""Promises about nodes that end, crash, freeze or start in numbers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from sandfleet import CommandResult
from sandfleet.errors import NotStarted, OutcomeUnknown, SandboxLost, SandboxStopping
from tests.chaos.fleet import (
    LEASE_S,
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

pytestmark = pytest.mark.chaos

LABEL = "four"

NOT_BEGUN = (NotStarted, SandboxLost, SandboxStopping)
"""What a caller may be told whose operation never began."""


@pytest.fixture(scope="module")
def four(fleet: Fleet) -> Iterator[list[Process]]:
    """Four workers of one data root that nobody gave an id. The tests below use them up, one after the other."""
    labels = {"SANDFLEET_LABELS": f"for={LABEL}"}
    workers = [fleet.start(f"four-{n}", ["-m", "sandfleet_workers"], **labels) for n in range(4)]
    wait_until(lambda: len(living(fleet, workers)) == 4, 60, story=fleet.story)
    yield workers
    fleet.end(*workers)


def living(fleet: Fleet, workers: list[Process]) -> dict[str, Process]:
    """The nodes of these workers that the fleet counts as alive."""
    by_pid = {worker.pid: worker for worker in workers if worker.running}
    return {view.node_id: by_pid[view.pid] for view in fleet.store.nodes() if view.alive and view.pid in by_pid}


def test_workers_started_without_an_id_on_one_data_root_become_distinct_nodes_that_all_serve(
    fleet: Fleet, four: list[Process]
) -> None:
    nodes = living(fleet, four)
    assert len(nodes) == 4, "four workers, four ids"
    answers: Answers[str] = Answers(fleet)
    with fleet.provider(label=LABEL) as provider:
        threads = [unique(f"scale-{n}") for n in range(8)]

        def work(thread: str) -> str:
            sandbox = provider.get(provider.acquire(thread))
            assert sandbox is not None
            return sandbox.run(f"echo {thread}").stdout

        for thread in threads:
            answers.ask(thread, lambda t=thread: work(t))
        got = answers.all()
        assert not errors(got)
        assert got == {thread: f"{thread}\n" for thread in threads}
        assert {node_of(fleet, thread) for thread in threads} == set(nodes)


def test_a_node_frozen_past_its_lease_starts_nothing_that_was_answered_meanwhile(
    fleet: Fleet, four: list[Process]
) -> None:
    thread = unique("freeze")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=LABEL) as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        home = node_of(fleet, thread)
        node = living(fleet, four)[home]
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, sandbox, gate)
        op_ids = wait_in_lane(fleet, answers, sandbox, range(5))
        node_took_all(fleet, home)
        (before,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == home]

        node.send(signal.SIGSTOP)
        got = answers.all(4 * LEASE_S)
        assert isinstance(got.pop("gate"), OutcomeUnknown)
        assert all(isinstance(answer, SandboxLost) for answer in got.values()), got
        # The lane is free the moment the node wakes: only its fences keep the closed operations from starting.
        gate.open()
        node.send(signal.SIGCONT)

        def came_back_as_another() -> bool:
            views = [view for view in fleet.store.nodes() if view.node_id == home]
            return views[0].alive and views[0].incarnation != before

        wait_until(came_back_as_another, 40, story=fleet.story)
        assert fleet.numbers(thread) == []
        for op_id in op_ids.values():
            view = fleet.store.op(op_id)
            assert view is not None
            assert (view.state, view.outcome, view.claimed_at_ms) == ("closed", "not_started", None)

        again = provider.get(provider.acquire(thread))
        assert again is not None
        assert again.run(note(9)).exit_code == 0
        assert fleet.numbers(thread) == [9]


def test_a_node_that_is_told_to_stop_answers_every_operation_it_has_not_started(
    fleet: Fleet, four: list[Process]
) -> None:
    thread = unique("term")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=LABEL) as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        home = node_of(fleet, thread)
        node = living(fleet, four)[home]
        lane_is_held(fleet, answers, sandbox, Gate(fleet, thread))
        wait_in_lane(fleet, answers, sandbox, range(100))
        node_took_all(fleet, home)

        node.send(signal.SIGTERM)

        got = answers.all()
        assert node.wait(20) == 0
        running = got.pop("gate")
        assert isinstance(running, (OutcomeUnknown, SandboxLost, CommandResult)), repr(running)
        ran = fleet.numbers(thread)
        assert len(ran) == len(set(ran)), f"some ran twice: {ran}"
        for number, answer in got.items():
            assert isinstance(answer, CommandResult if number in ran else NOT_BEGUN), (number, repr(answer), ran)


def test_a_node_killed_leaves_no_caller_without_the_right_answer_within_two_leases(
    fleet: Fleet, four: list[Process]
) -> None:
    victim = unique("kill")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=LABEL) as provider:
        sandbox = provider.get(provider.acquire(victim))
        assert sandbox is not None
        home = node_of(fleet, victim)
        others = [unique("bystander") for _ in range(4)]
        ids = {thread: provider.acquire(thread) for thread in others}
        bystander = next(thread for thread in others if node_of(fleet, thread) != home)
        neighbour = provider.get(ids[bystander])
        assert neighbour is not None
        sandbox.write_file("/mnt/user-data/workspace/kept.txt", "still here")
        lane_is_held(fleet, answers, sandbox, Gate(fleet, victim))
        wait_in_lane(fleet, answers, sandbox, range(5))
        node_took_all(fleet, home)
        stop = threading.Event()
        worked: list[CommandResult] = []

        def go_on() -> None:
            while not stop.is_set():
                worked.append(neighbour.run("echo fine"))

        going_on = threading.Thread(target=go_on, daemon=True)
        going_on.start()

        living(fleet, four)[home].kill()
        got = answers.all(2 * LEASE_S)

        stop.set()
        going_on.join(20)
        assert isinstance(got.pop("gate"), OutcomeUnknown)
        assert all(isinstance(answer, SandboxLost) for answer in got.values()), got
        assert fleet.numbers(victim) == [], "what was told not to have begun did not run"
        assert worked, "the other node's thread went on"
        assert all(result.stdout == "fine\n" for result in worked)

        again = provider.get(provider.acquire(victim))
        assert again is not None
        assert node_of(fleet, victim) != home
        assert again.read_file("/mnt/user-data/workspace/kept.txt") == "still here"
        assert again.run(note(7)).exit_code == 0
        assert fleet.numbers(victim) == [7]
