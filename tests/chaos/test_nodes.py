"""Promises about nodes that end, crash, freeze or start in numbers."""

from __future__ import annotations

import signal
import threading
import time

from sandfleet import CommandResult
from sandfleet.errors import NotStarted, OutcomeUnknown, SandboxLost, SandboxStopping
from tests.chaos.fleet import (
    LEASE_S,
    Answers,
    Fleet,
    Gate,
    errors,
    lane_is_held,
    node_of,
    node_took_all,
    note,
    unique,
    wait_in_lane,
)
from tests.services import wait_until

NOT_BEGUN = (NotStarted, SandboxLost, SandboxStopping)
"""What a caller may be told whose operation never began."""


def test_a_node_that_is_told_to_stop_answers_every_operation_it_has_not_started(fleet: Fleet) -> None:
    label = unique("term")
    node = fleet.node(label, label=label)
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=label) as provider:
        sandbox = provider.get(provider.acquire(label))
        assert sandbox is not None
        lane_is_held(fleet, answers, sandbox, Gate(fleet, label))
        wait_in_lane(fleet, answers, sandbox, range(100))
        node_took_all(fleet, label)

        node.send(signal.SIGTERM)

        got = answers.all()
        assert node.wait(20) == 0
        running = got.pop("gate")
        assert isinstance(running, (OutcomeUnknown, SandboxLost, CommandResult)), repr(running)
        ran = fleet.numbers(label)
        assert len(ran) == len(set(ran)), f"some ran twice: {ran}"
        for number, answer in got.items():
            assert isinstance(answer, NOT_BEGUN if number not in ran else CommandResult), (number, repr(answer), ran)


def test_a_node_killed_leaves_no_caller_without_the_right_answer_within_two_leases(fleet: Fleet) -> None:
    label = unique("kill")
    doomed, _other = fleet.nodes(f"{label}-a", f"{label}-b", label=label)
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=label) as provider:
        threads = [f"{label}-{n}" for n in range(2)]
        ids = {thread: provider.acquire(thread) for thread in threads}
        homes = {node_of(fleet, thread): thread for thread in threads}
        assert set(homes) == {f"{label}-a", f"{label}-b"}, "two equal nodes take one thread each"
        victim, bystander = homes[f"{label}-a"], homes[f"{label}-b"]
        sandbox, neighbour = provider.get(ids[victim]), provider.get(ids[bystander])
        assert sandbox is not None
        assert neighbour is not None
        sandbox.write_file("/mnt/user-data/workspace/kept.txt", "still here")
        lane_is_held(fleet, answers, sandbox, Gate(fleet, victim))
        wait_in_lane(fleet, answers, sandbox, range(5))
        node_took_all(fleet, f"{label}-a")
        stop = threading.Event()
        worked: list[CommandResult] = []

        def go_on() -> None:
            while not stop.is_set():
                worked.append(neighbour.run("echo fine"))

        going_on = threading.Thread(target=go_on, daemon=True)
        going_on.start()

        doomed.kill()
        killed_at = time.monotonic()
        got = answers.all(2 * LEASE_S)
        assert time.monotonic() - killed_at < 2 * LEASE_S

        stop.set()
        going_on.join(20)
        assert isinstance(got.pop("gate"), OutcomeUnknown)
        assert all(isinstance(answer, SandboxLost) for answer in got.values()), got
        assert fleet.numbers(victim) == [], "what was told not to have begun did not run"
        assert worked, "the other node's thread went on"
        assert all(result.stdout == "fine\n" for result in worked)

        again = provider.get(provider.acquire(victim))
        assert again is not None
        assert node_of(fleet, victim) == f"{label}-b"
        assert again.read_file("/mnt/user-data/workspace/kept.txt") == "still here"
        assert again.run(note(7)).exit_code == 0
        assert fleet.numbers(victim) == [7]
    fleet.end(_other)


def test_a_node_frozen_past_its_lease_starts_nothing_that_was_answered_meanwhile(fleet: Fleet) -> None:
    label = unique("freeze")
    node = fleet.node(label, label=label)
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=label) as provider:
        sandbox = provider.get(provider.acquire(label))
        assert sandbox is not None
        gate = Gate(fleet, label)
        lane_is_held(fleet, answers, sandbox, gate)
        op_ids = wait_in_lane(fleet, answers, sandbox, range(5))
        node_took_all(fleet, label)
        (before,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == label]

        node.send(signal.SIGSTOP)
        got = answers.all(4 * LEASE_S)
        assert isinstance(got.pop("gate"), OutcomeUnknown)
        assert all(isinstance(answer, SandboxLost) for answer in got.values()), got
        # The lane is free the moment the node wakes: only its fences keep the closed operations from starting.
        gate.open()
        node.send(signal.SIGCONT)

        def came_back_as_another() -> bool:
            views = [view for view in fleet.store.nodes() if view.node_id == label]
            return views[0].alive and views[0].incarnation != before

        wait_until(came_back_as_another, 20, story=fleet.story)
        assert fleet.numbers(label) == []
        for op_id in op_ids.values():
            view = fleet.store.op(op_id)
            assert view is not None
            assert (view.state, view.outcome, view.claimed_at_ms) == ("closed", "not_started", None)

        again = provider.get(provider.acquire(label))
        assert again is not None
        assert again.run(note(9)).exit_code == 0
        assert fleet.numbers(label) == [9]
    fleet.end(node)


def test_workers_started_without_an_id_on_one_data_root_become_distinct_nodes_that_all_serve(fleet: Fleet) -> None:
    label = unique("scale")
    known = {view.node_id for view in fleet.store.nodes()}
    workers = [
        fleet.start(f"{label}-{n}", ["-m", "sandfleet_workers"], SANDFLEET_LABELS=f"for={label}") for n in range(4)
    ]

    def four_are_ready() -> list[str]:
        ids = [view.node_id for view in fleet.store.nodes() if view.alive and view.node_id not in known]
        assert len(ids) == 4, f"{ids} so far"
        return ids

    ids = wait_until(four_are_ready, 40, story=fleet.story)
    answers: Answers[str] = Answers(fleet)
    with fleet.provider(label=label) as provider:
        threads = [f"{label}-{n}" for n in range(12)]

        def work(thread: str) -> str:
            sandbox = provider.get(provider.acquire(thread))
            assert sandbox is not None
            return sandbox.run(f"echo {thread}").stdout

        for thread in threads:
            answers.ask(thread, lambda t=thread: work(t))
        got = answers.all()
        assert not errors(got)
        assert got == {thread: f"{thread}\n" for thread in threads}
        assert {node_of(fleet, thread) for thread in threads} == set(ids)
    fleet.end(*workers)


