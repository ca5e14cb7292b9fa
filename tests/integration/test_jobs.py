"""Long commands over a real fleet: jobs, live output, and coming back to both from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import threading

import pytest

from sandfleet import AsyncSandboxProvider, Sandbox, SandboxProvider
from sandfleet.client import Answer
from sandfleet.errors import (
    InvalidArgument,
    JobNotFound,
    NotSupported,
    OutcomeUnknown,
    ReplyTimeout,
    SandboxLost,
    SandboxNotFound,
    SandfleetError,
)
from sandfleet.job_steps import JobSteps
from sandfleet.jobs import Job, JobState, OutputChunk, OutputEnd, OutputGap
from sandfleet.stack import Stack
from sandfleet.steps import Steps
from tests.services import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def sandbox(provider: SandboxProvider, request: pytest.FixtureRequest) -> Sandbox:
    thread_id = "jobs-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    found = provider.get(provider.acquire(thread_id))
    assert found is not None
    return found


def bytes_of(records: list[object], stream: str = "stdout") -> bytes:
    assert not [record for record in records if isinstance(record, OutputGap)]
    return b"".join(record.data for record in records if isinstance(record, OutputChunk) and record.stream == stream)


# --- output of a call that waits -------------------------------------------------------------------------------


def test_callbacks_get_all_output_in_order_before_the_call_returns(sandbox: Sandbox) -> None:
    out, err = list[bytes](), list[bytes]()
    result = sandbox.run(
        "for n in $(seq 200); do echo out $n; echo err $n >&2; done; printf '\\377'; exit 3",
        on_stdout=out.append,
        on_stderr=err.append,
        errors="surrogateescape",
    )
    assert result.exit_code == 3
    assert b"".join(out) == result.stdout.encode("utf-8", "surrogateescape")
    assert b"".join(err) == result.stderr.encode() == b"".join(b"err %d\n" % n for n in range(1, 201))


def test_output_comes_while_the_command_runs(sandbox: Sandbox) -> None:
    seen = threading.Event()

    def answer(data: bytes) -> None:
        if b"ready" in data:
            seen.set()
            sandbox_beside.write_file("/mnt/user-data/workspace/go", "")

    sandbox_beside = sandbox._provider.get(sandbox.id)
    assert sandbox_beside is not None
    result = sandbox.run("echo ready; until [ -e go ]; do sleep 0.02; done; echo done", on_stdout=answer, timeout_s=60)
    assert seen.is_set()
    assert result.stdout == "ready\ndone\n"


def test_a_callback_that_raises_does_not_cost_the_result(sandbox: Sandbox) -> None:
    def bad(data: bytes) -> None:
        raise RuntimeError("not mine")

    assert sandbox.run("echo hello", on_stdout=bad).stdout == "hello\n"


def test_async_callbacks_are_awaited_on_the_loop(fleet: Stack) -> None:
    async def run() -> None:
        async with AsyncSandboxProvider(fleet.settings) as provider:
            sandbox = provider.get(await provider.acquire("jobs-async"))
            assert sandbox is not None
            got = list[bytes]()

            async def keep(data: bytes) -> None:
                await asyncio.sleep(0)
                got.append(data)

            result = await sandbox.run("seq 500", on_stdout=keep)
            assert b"".join(got).decode() == result.stdout
            job = await sandbox.run("seq 500; sleep 600", background=True)
            chunks = list[OutputChunk]()
            async for record in job.output():
                assert isinstance(record, OutputChunk)
                chunks.append(record)
                if sum(len(chunk.data) for chunk in chunks) >= len(result.stdout):
                    break
            assert b"".join(chunk.data for chunk in chunks).decode() == result.stdout
            assert (await job.poll()).state is JobState.RUNNING
            assert await job.kill("SIGKILL")
            assert (await job.wait(30)).signal == "SIGKILL"

    asyncio.run(run())


# --- jobs ------------------------------------------------------------------------------------------------------


def test_a_job_runs_beside_its_callers_commands_and_tells_how_it_ended(sandbox: Sandbox) -> None:
    job = sandbox.run("until [ -e go ]; do sleep 0.02; done; echo went; echo oops >&2; exit 7", background=True)
    assert isinstance(job, Job)
    assert job.poll().state is JobState.RUNNING
    assert sandbox.run("echo beside").stdout == "beside\n"
    assert [status.job_id for status in sandbox.jobs()] == [job.id]
    assert any("go" in process.command for process in sandbox.processes())
    with pytest.raises(ReplyTimeout):
        job.wait(0.1)
    sandbox.run("touch go")
    result = job.wait(30)
    assert (result.stdout, result.stderr, result.exit_code, result.op_id) == ("went\n", "oops\n", 7, job.id)
    status = job.poll()
    assert (status.state, status.exit_code) == (JobState.EXITED, 7)
    records = list(job.output())
    assert bytes_of(records) == b"went\n"
    assert bytes_of(records, "stderr") == b"oops\n"
    assert isinstance(records[-1], OutputEnd)
    assert records[-1].outcome == "ok"
    assert list(job.output(after=records[-1].cursor)) == [records[-1]]


def test_stdin_arrives_in_order_and_ends_when_it_is_closed(sandbox: Sandbox) -> None:
    job = sandbox.run("cat; echo over", background=True, stdin_open=True)
    for n in range(20):
        job.send_stdin(f"{n}\n")
    job.close_stdin()
    assert job.wait(30).stdout == "".join(f"{n}\n" for n in range(20)) + "over\n"


def test_a_terminal_has_the_size_it_was_given(sandbox: Sandbox) -> None:
    job = sandbox.run("trap 'stty size; exit 0' USR1; stty size; while :; do sleep 0.05; done",
                      background=True, pty=(30, 100))  # fmt: skip
    output = job.output()
    assert b"30 100" in next(record.data for record in output if isinstance(record, OutputChunk))
    job.resize(31, 101)
    job.kill("SIGUSR1")
    assert b"31 101" in bytes_of(list(output))


def test_states_of_jobs_that_end_otherwise(sandbox: Sandbox) -> None:
    late = sandbox.run("sleep 60", background=True, timeout_s=0.3)
    assert late.wait(30).timed_out
    assert late.poll().state is JobState.FAILED
    killed = sandbox.run("sleep 60", background=True)
    assert sandbox.cancel(killed.id)
    assert killed.wait(30).signal == "SIGKILL"
    assert killed.poll().state is JobState.EXITED
    assert not killed.kill()
    with pytest.raises(JobNotFound):
        sandbox.job("nobody").poll()
    with pytest.raises(InvalidArgument):
        sandbox.run("true", background=True, session="s")
    with pytest.raises(InvalidArgument):
        sandbox.run("true", background=True, on_stdout=print)


def test_the_same_op_id_is_the_same_job(sandbox: Sandbox) -> None:
    first = sandbox.run("echo once >> log; sleep 60", background=True, op_id="my-job")
    again = sandbox.run("echo once >> log; sleep 60", background=True, op_id="my-job")
    assert first.id == again.id == "my-job"
    wait_until(lambda: sandbox.run("cat log").stdout == "once\n", 10)
    with pytest.raises(OutcomeUnknown, match="my-job"):
        sandbox.run("echo once >> log; sleep 60", op_id="my-job")
    assert first.kill("SIGKILL")
    assert first.wait(30).signal == "SIGKILL"
    assert sandbox.run("echo once >> log; sleep 60", op_id="my-job").signal == "SIGKILL", "the first answer"
    assert sandbox.run("echo once >> log; sleep 60", background=True, op_id="my-job").wait(30).signal == "SIGKILL"


def test_a_job_keeps_its_sandbox_and_ends_with_it(provider: SandboxProvider, sandbox: Sandbox) -> None:
    job = sandbox.run("echo here; sleep 600", background=True)
    provider.release(sandbox.id)
    info = next(info for info in provider.list() if info.sandbox_id == sandbox.id)
    assert (info.state, info.agents, info.ops) == ("live", 0, 1)
    ended = list[object]()
    reader = threading.Thread(target=lambda: ended.extend(job.output()))
    reader.start()
    provider.destroy(sandbox.id)
    reader.join(30)
    assert isinstance(ended[-1], OutputEnd)
    assert job.poll().state is JobState.LOST
    with pytest.raises((SandboxLost, SandfleetError)):
        job.wait(10)


# --- coming back -----------------------------------------------------------------------------------------------

_ELSEWHERE = """
import sys
from sandfleet import SandboxProvider
from sandfleet.jobs import OutputChunk
url, sandbox_id, job_id, after, many = sys.argv[1:]
with SandboxProvider(redis_url=url) as provider:
    job = provider.get(sandbox_id).job(job_id)
    left, cursor = int(many), after or None
    for record in job.output(after=cursor):
        if isinstance(record, OutputChunk):
            sys.stdout.buffer.write(record.data)
            cursor = record.cursor
            left -= len(record.data)
        if left <= 0:
            break
sys.stderr.write(cursor)
"""


def test_readers_in_other_processes_go_on_where_one_stopped(fleet: Stack, sandbox: Sandbox) -> None:
    job = sandbox.run("for n in $(seq 3000); do echo line $n; done; until [ -e go ]; do sleep 0.05; done; seq 3000",
                      background=True)  # fmt: skip
    expected = "".join(f"line {n}\n" for n in range(1, 3001)) + "".join(f"{n}\n" for n in range(1, 3001))
    got, cursor = b"", ""
    for many in (1, 10_000, 10**9):
        if many == 10**9:
            sandbox.run("touch go")
        ran = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE, fleet.settings.redis_url, sandbox.id, job.id, cursor, str(many)],
            capture_output=True,
            timeout=60,
            check=True,
        )
        got, cursor = got + ran.stdout, ran.stderr.decode()
    assert got.decode() == expected
    assert bytes_of(list(job.output())).decode() == expected, "a reader who comes late gets all"


def test_output_that_comes_faster_than_it_is_kept_has_gaps_that_are_told(sandbox: Sandbox) -> None:
    # Byte number 8 n begins the eight digits of n.
    job = sandbox.run("seq -f '%07.0f' 0 2000000", background=True)
    records = list[object]()
    reader = threading.Event()
    for record in job.output():
        records.append(record)
        reader.wait(0.02)
    at = 0
    for record in records:
        if isinstance(record, OutputGap):
            assert (record.stream, record.start) == ("stdout", at)
            at = record.end
        elif isinstance(record, OutputChunk):
            first = at + (-at % 8)
            if first - at + 8 <= len(record.data):
                assert int(record.data[first - at : first - at + 7]) == first // 8
            at += len(record.data)
            assert record.cursor == f"{at}.0"
    assert at == 8 * 2_000_001
    assert isinstance(records[-1], OutputEnd)


def test_nobody_reads_another_threads_job(provider: SandboxProvider, sandbox: Sandbox) -> None:
    job = sandbox.run("echo secret; sleep 600", background=True)
    other = provider.get(provider.acquire("jobs-stranger"))
    forged = provider.get(sandbox.id, thread_id="jobs-stranger")
    assert other is not None
    assert forged is not None
    for stranger in (other, forged):
        theirs = stranger.job(job.id)
        with pytest.raises(JobNotFound):
            theirs.poll()
        with pytest.raises(JobNotFound):
            next(theirs.output())
        with pytest.raises(JobNotFound):
            theirs.wait(5)
        with contextlib.suppress(SandboxNotFound):
            assert not theirs.kill("SIGKILL")
    assert job.poll().state is JobState.RUNNING


def test_a_sandbox_that_says_that_anothers_job_is_its_own_is_not_believed(
    provider: SandboxProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sandbox.run("echo secret; sleep 600", background=True)
    next(iter(job.output()))
    other = provider.get(provider.acquire("jobs-liar"))
    assert other is not None

    def lie(*_: object) -> Steps[Answer]:
        yield from ()
        return Answer("x", {"running": True})

    monkeypatch.setattr(JobSteps, "_ask", lie)
    theirs = other.job(job.id)
    for ask in (theirs.poll, lambda: next(theirs.output()), lambda: next(theirs.output(follow=False)), theirs.wait):
        with pytest.raises(JobNotFound):
            ask()


# --- other ways to run -----------------------------------------------------------------------------------------


def test_a_sessions_output_comes_live_as_well(sandbox: Sandbox) -> None:
    seen = list[bytes]()
    sandbox.run("export A=live", session="s")
    result = sandbox.run("echo $A; echo err >&2", session="s", on_stdout=seen.append)
    assert b"".join(seen).decode() == result.stdout
    assert result.stdout.startswith("live\n")


def test_where_commands_cannot_be_followed_output_comes_at_the_end(mock_provider: SandboxProvider) -> None:
    sandbox = mock_provider.get(mock_provider.acquire("jobs-mock"))
    assert sandbox is not None
    seen = list[bytes]()
    result = sandbox.run("anything", on_stdout=seen.append)
    assert b"".join(seen).decode() == result.stdout == "Mock output for: anything"
    with pytest.raises(NotSupported, match="background"):
        sandbox.run("anything", background=True)


def test_a_call_that_fails_keeps_its_error(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgument):
        sandbox.run("true", cwd="/nul\0", on_stdout=print)
    with pytest.raises(SandfleetError):
        sandbox.run("true", cwd="/missing", on_stdout=print)
