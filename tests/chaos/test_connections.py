"""Promises about the connections to Redis, which may break at any moment."""

from __future__ import annotations

import redis

from sandfleet import CommandResult
from tests.chaos.fleet import Answers, Fleet, Gate, errors, lane_is_held, node_took_all, unique, wait_in_lane
from tests.services import wait_until


def kill_connections(broker: redis.Redis) -> int:
    """End every connection but ours, as a failing proxy would."""
    return int(broker.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))


def test_operations_that_wait_in_a_lane_run_once_and_in_order_though_every_connection_is_killed(
    fleet: Fleet, broker: redis.Redis
) -> None:
    thread = unique("kill-waiting")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, sandbox, gate)
        wait_in_lane(fleet, answers, sandbox, range(20))
        node_took_all(fleet, "n1")

        assert kill_connections(broker) > 4
        gate.open()

        got = answers.all()
        assert not errors(got), fleet.story(sandbox.id)
        assert fleet.numbers(thread) == list(range(20))


def test_operations_under_way_run_at_most_once_and_in_order_though_connections_are_killed_again_and_again(
    fleet: Fleet, broker: redis.Redis
) -> None:
    thread = unique("kill-running")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, sandbox, gate)
        wait_in_lane(fleet, answers, sandbox, range(20))
        gate.open()
        for _ in range(10):
            before = len(fleet.numbers(thread))
            kill_connections(broker)
            # The next kill comes once this one has been survived.
            wait_until(lambda n=before: len(fleet.numbers(thread)) > n or len(answers.got) == 21, 30, fleet.story)

        got = answers.all()
        assert not errors(got), fleet.story(sandbox.id)
        assert fleet.numbers(thread) == list(range(20))
