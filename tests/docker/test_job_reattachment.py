"""Jobs and live output of containers whose node is killed or restarted: no byte twice, none missing, the real end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from sandfleet import CommandResult, Sandbox, SandboxProvider
from sandfleet.jobs import Job, JobState, OutputChunk, OutputEnd, OutputGap
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos, pytest.mark.timeout(240)]

NODE = "node-1"
#: Writes numbered lines until it is told to stop.
COUNT = "n=0; until [ -e stop ]; do n=$((n+1)); echo line $n; echo $n >&2; sleep 0.01; done; exit 7"


@pytest.fixture
def stack() -> Iterator[Stack]:
    """One node whose containers outlive it."""
    require("docker")
    require("redis")
    with Stack(1, backend="docker", lease_s=5.0, detach_s=30.0, blank_pool=0, replicas=4) as running:
        yield running


@pytest.fixture
def sandbox(stack: Stack) -> Iterator[Sandbox]:
    with SandboxProvider(stack.settings) as provider:
        found = provider.get(provider.acquire("jobs"))
        assert found is not None
        yield found


def killed(stack: Stack) -> None:
    stack.kill_node(NODE)
    stack.start_node(NODE)


def restarted(stack: Stack) -> None:
    stack.stop_node(NODE)
    stack.start_node(NODE)


TROUBLE = pytest.mark.parametrize("trouble", [killed, restarted], ids=["kill -9", "SIGTERM"])


def whole(data: bytes, prefix: str = "") -> bool:
    return data == "".join(f"{prefix}{n}\n" for n in range(1, data.count(b"\n") + 1)).encode()


@TROUBLE
def test_a_job_outlives_its_node_and_its_readers_miss_nothing(
    stack: Stack, sandbox: Sandbox, trouble: Callable[[Stack], None]
) -> None:
    job: Job = sandbox.run(COUNT, background=True)
    read: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    others: list[object] = []

    def reader() -> None:
        for record in job.output():
            if isinstance(record, OutputChunk):
                read[record.stream] += record.data
            else:
                others.append(record)

    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(2):
        wait_until(lambda: len(read["stdout"]) > 500, 30)
        trouble(stack)
        before = len(read["stdout"])
        wait_until(lambda: len(read["stdout"]) > before + 500, 60)  # noqa: B023
    assert job.poll().state is JobState.RUNNING
    job.kill("SIGCONT")
    sandbox.run("touch stop")
    thread.join(60)
    assert [type(record) for record in others] == [OutputEnd]
    assert whole(bytes(read["stdout"]), "line ")
    assert whole(bytes(read["stderr"]))
    assert job.wait(30).exit_code == 7
    again = list(job.output())
    assert not [record for record in again if isinstance(record, OutputGap)]
    assert b"".join(r.data for r in again if isinstance(r, OutputChunk) and r.stream == "stdout") == read["stdout"]


@TROUBLE
def test_callbacks_of_a_call_that_waits_miss_nothing_when_its_node_is_replaced(
    stack: Stack, sandbox: Sandbox, trouble: Callable[[Stack], None]
) -> None:
    out, err, results = bytearray(), bytearray(), list[CommandResult]()
    caller = threading.Thread(
        target=lambda: results.append(sandbox.run(COUNT, on_stdout=out.extend, on_stderr=err.extend, timeout_s=200))
    )
    caller.start()
    wait_until(lambda: len(out) > 500, 30)
    trouble(stack)
    before = len(out)
    wait_until(lambda: len(out) > before + 500, 60)
    beside = sandbox._provider.get(sandbox.id)
    assert beside is not None
    beside.run("touch stop")
    caller.join(60)
    (result,) = results
    assert result.exit_code == 7
    assert bytes(out).decode() == result.stdout
    assert bytes(err).decode() == result.stderr
    assert whole(bytes(out), "line ")
