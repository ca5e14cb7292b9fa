"""The values that cross the seams."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from sandfleet.errors import CommandFailed, CommandTimeout, ResourceLimitExceeded
from sandfleet.model import CommandResult, Health, NodeState, NodeView, SandboxSpec, Timings

OK = CommandResult(stdout="out", stderr="", exit_code=0, duration_s=0.5, op_id="op-1")


def test_a_result_answers_by_attribute_and_as_the_seeds_write_it() -> None:
    assert OK.exit_code == OK["exit_code"] == 0
    assert OK["stdout"] == "out"
    assert dict(OK)["duration_s"] == 0.5
    assert OK.get("nope") is None
    assert "stderr" in OK
    assert "nope" not in OK
    assert len(OK) == len(list(OK)) == len(dict(OK))


def test_a_result_has_no_other_keys() -> None:
    for key in ("nope", "ok", "check", "__class__", 7):
        with pytest.raises(KeyError):
            OK[key]  # type: ignore[index]


def test_results_are_values() -> None:
    assert replace(OK) == OK
    assert replace(OK, stdout="other") != OK
    assert len({OK, replace(OK)}) == 1
    with pytest.raises(FrozenInstanceError):
        OK.stdout = "x"  # type: ignore[misc]


def test_check_gives_the_result_of_a_command_that_exited_with_0() -> None:
    assert OK.check() is OK
    assert OK.ok


def test_check_of_another_exit_raises_with_the_code_and_the_end_of_stderr() -> None:
    result = replace(OK, exit_code=3, stderr="x" * 10_000 + "the reason\n")
    with pytest.raises(CommandFailed, match=r"exit code 3: x+the reason$") as failed:
        result.check()
    assert failed.value.facts["exit_code"] == 3
    assert failed.value.facts["op_id"] == "op-1"
    assert len(str(failed.value)) < 600
    assert len(failed.value.facts["stderr"]) <= 2000
    assert not result.ok


def test_check_of_a_killed_command_names_the_signal() -> None:
    with pytest.raises(CommandFailed, match="SIGKILL"):
        replace(OK, exit_code=None, signal="SIGKILL").check()


def test_check_of_a_timeout_is_a_timeout_error_with_the_partial_output() -> None:
    result = replace(OK, exit_code=None, signal="SIGKILL", timed_out=True, duration_s=5.0)
    with pytest.raises(TimeoutError) as ended:
        result.check()
    assert isinstance(ended.value, CommandTimeout)
    assert ended.value.facts["stdout"] == "out"
    assert "5 s" in str(ended.value)


def test_check_of_a_command_that_took_all_memory_names_the_limit() -> None:
    with pytest.raises(ResourceLimitExceeded, match="all the memory") as exceeded:
        replace(OK, exit_code=None, signal="SIGKILL", out_of_memory=True).check()
    assert exceeded.value.facts["resource"] == "memory"


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 3},
        {"exit_code": None, "timed_out": True},
        {"exit_code": None, "signal": "SIGKILL", "out_of_memory": True},
    ],
    ids=["failed", "timed out", "out of memory"],
)
def test_the_error_of_check_holds_the_whole_result(change: dict[str, object]) -> None:
    # Promised by the docstrings of CommandFailed, CommandTimeout and ResourceLimitExceeded.
    result = replace(OK, stdout="x" * 100_000, **change)  # type: ignore[arg-type]
    with pytest.raises((CommandFailed, CommandTimeout, ResourceLimitExceeded)) as failed:
        result.check()
    assert failed.value.result is result  # type: ignore[attr-defined]


def test_unknown_health_is_not_ok() -> None:
    assert Health("alive", "3f9a1c22").ok
    assert not Health("unknown", "3f9a1c22").ok
    assert not Health("dead", "3f9a1c22").ok


def test_a_spec_survives_the_wire_and_ignores_what_it_does_not_know() -> None:
    spec = SandboxSpec("mock", "img", {"A": "b"}, {"zone": "a"})
    assert SandboxSpec.from_wire({**spec.to_wire(), "from_the_future": 1}) == spec
    assert SandboxSpec.from_wire({}) == SandboxSpec()
    assert SandboxSpec.from_wire({"env": None, "labels": None}) == SandboxSpec()


def test_a_node_that_holds_more_than_it_should_has_nothing_free() -> None:
    node = NodeView("n", "i", NodeState.READY, True, replicas=2, places=3, warm=0, data_id="d")
    assert node.free == 0
    assert replace(node, places=0).free == 2


def test_clocks_that_were_not_read_are_none() -> None:
    assert Timings() == Timings(None, None, None, None)
