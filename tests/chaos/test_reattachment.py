"""Promises about nodes that are restarted while sandboxes that end with them are at work. Those that outlive their node
are in tests/docker/test_reattachment.py, and in tests/unit/test_adopting.py step by step."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from sandfleet import CommandResult
from sandfleet.errors import NotStarted, SandboxLost, SandboxStopping
from tests.chaos.fleet import Answers, Fleet, Gate, Process, lane_is_held, node_took_all, unique, wait_in_lane
from tests.services import wait_until

pytestmark = pytest.mark.chaos

LABEL = "returns"


@pytest.fixture
def returning(fleet: Fleet) -> Iterator[Process]:
    """A node that is restarted, as an operator has it."""
    node = fleet.node("returns", label=LABEL, env={"SANDFLEET_DETACH_S": "30", "SANDFLEET_DRAIN_TIMEOUT_S": "30"})
    yield node
    if found := fleet.process("returns"):
        fleet.end(found)


def state(fleet: Fleet) -> str:
    """What the node says of itself."""
    (view,) = [view for view in fleet.store.nodes() if view.node_id == "returns"]
    return str(view.state)


def test_a_node_that_is_restarted_lets_commands_finish_that_would_end_with_it(fleet: Fleet, returning: Process) -> None:
    thread = unique("finish")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider(label=LABEL) as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, sandbox, gate)
        wait_in_lane(fleet, answers, sandbox, range(3), queue_timeout_s=5.0)
        node_took_all(fleet, "returns")
        returning.send(signal.SIGTERM)
        wait_until(lambda: state(fleet) == "draining", 20, story=fleet.story)
        gate.open()
        got = answers.all()
        assert returning.wait(20) == 0
        result = got.pop("gate")
        assert isinstance(result, CommandResult), repr(result)
        assert result.exit_code == 0
        assert all(isinstance(answer, (NotStarted, SandboxLost, SandboxStopping)) for answer in got.values()), got
        assert fleet.numbers(thread) == []


def test_a_killed_node_is_back_before_its_lease_has_lapsed(fleet: Fleet, returning: Process) -> None:
    returning.kill()
    assert [view.alive for view in fleet.store.nodes() if view.node_id == "returns"] == [True]
    fleet.node("returns", label=LABEL, env={"SANDFLEET_DETACH_S": "30"})
    thread = unique("back")
    with fleet.provider(label=LABEL) as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        assert sandbox.run("echo here").stdout == "here\n"
