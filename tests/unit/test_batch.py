"""A batch keeps to its time and to its size. (What it does with its items is in the backend contract.)"""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet import batch as batch_module
from sandfleet.backends import Completion, Connection, Done, Operation
from sandfleet.batch import BatchRun
from sandfleet.testing import ManualClock


class Sandbox(Connection):
    """Completes every item at once; each takes ``takes_s`` on the test's clock."""

    def __init__(self, clock: ManualClock, takes_s: float = 0.0, content: bytes | None = None) -> None:
        self.clock, self.takes_s, self.content = clock, takes_s, content
        self.started: list[Operation] = []

    def start(self, op: Operation, done: Done) -> None:
        self.started.append(op)
        self.clock.advance(self.takes_s)
        done(Completion({}, self.content))

    def cancel(self, op_id: str) -> bool:
        return False

    def close(self) -> None: ...

    @property
    def limits(self) -> list[float | None]:
        return [op.args.get("timeout_s") for op in self.started]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr(batch_module, "monotonic", made.monotonic)
    return made


def run(sandbox: Sandbox, *items: dict[str, Any], stop_on_error: bool = True, **limits: Any) -> dict[str, Any]:
    ended: list[Completion] = []
    op = Operation("b", "batch", {"ops": list(items), "stop_on_error": stop_on_error})
    BatchRun(sandbox, op, ended.append, **limits).start()
    assert len(ended) == 1
    value: dict[str, Any] = ended[0].value
    return value


def command(**args: Any) -> dict[str, Any]:
    return {"kind": "execute_command", "args": {"command": "x", **args}}


def test_a_command_of_a_batch_gets_the_time_that_is_left_at_most(clock: ManualClock) -> None:
    sandbox = Sandbox(clock, takes_s=4)
    value = run(sandbox, command(timeout_s=60), command(timeout_s=1), command(), deadline=clock.monotonic() + 10)
    assert sandbox.limits == [10, 1, 2]
    assert value["stopped_at"] is None


def test_a_command_of_a_batch_that_names_no_deadline_gets_the_node_s(clock: ManualClock) -> None:
    sandbox = Sandbox(clock)
    run(sandbox, command(), command(timeout_s=90), {"kind": "noop"}, command_timeout_s=30)
    assert sandbox.limits == [30, 90, None]


@pytest.mark.parametrize("stop_on_error", [True, False])
def test_a_batch_whose_time_is_over_begins_nothing_more_and_says_so_for_each_item(
    clock: ManualClock, stop_on_error: bool
) -> None:
    sandbox = Sandbox(clock, takes_s=6)
    items = [command(), command(), {"kind": "read_file"}, command()]
    value = run(sandbox, *items, stop_on_error=stop_on_error, deadline=clock.monotonic() + 10)
    assert len(sandbox.started) == 2
    assert value["stopped_at"] == 2
    assert [result.get("error", {}).get("code") for result in value["results"]] == [None, None, *["queue_timeout"] * 2]


def test_a_batch_without_a_deadline_leaves_its_commands_as_they_are(clock: ManualClock) -> None:
    sandbox = Sandbox(clock, takes_s=1e6)
    run(sandbox, command(), command(timeout_s=5))
    assert sandbox.limits == [None, 5]


def test_the_contents_of_a_batch_have_a_limit_together(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_CONTENT_BYTES", 100)
    value = run(Sandbox(clock, content=b"x" * 40), *[{"kind": "read_file"}] * 4, stop_on_error=False)
    assert ["ok" in result for result in value["results"]] == [True, True, False, False]
    assert value["results"][2]["error"]["code"] == "payload_too_large"
    assert value["results"][2]["error"]["facts"]["limit"] == 100
