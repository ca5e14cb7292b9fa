"""The public doubles: what an agent developer's unit tests are written against."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sandfleet import AsyncSandboxProvider, Batch
from sandfleet.errors import AmbiguousMatch, JobNotFound, PathNotFound, SandboxLost, SandboxNotFound
from sandfleet.testing import MockBackend, MockSandboxProvider


def test_a_prepared_output_is_what_the_agent_sees() -> None:
    provider = MockSandboxProvider()
    provider.backend.set_output("go test", "PASS\n", exit_code=0)
    provider.backend.set_output("bad", "", exit_code=3, stderr="no")
    sandbox = provider.get(provider.acquire("thread-1"))
    assert sandbox is not None
    assert sandbox.run("go test").stdout == "PASS\n"
    assert sandbox.execute_command("bad") == "no\nExit Code: 3"


def test_an_injected_factory_makes_the_backend() -> None:
    prepared = MockBackend()
    prepared.set_output("x", "y")
    assert MockSandboxProvider(factory=lambda: prepared).backend is prepared


def test_files_behave_and_survive_the_sandbox() -> None:
    provider = MockSandboxProvider()
    sandbox_id = provider.acquire("thread-1", user_id="u")
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None
    sandbox.write_file("/mnt/user-data/workspace/a.txt", "one\ntwo\none\n")
    with pytest.raises(AmbiguousMatch):
        sandbox.str_replace("/mnt/user-data/workspace/a.txt", "one", "1")
    with pytest.raises(FileNotFoundError) as missing:
        sandbox.read_file("/mnt/user-data/workspace/b.txt")
    assert isinstance(missing.value, PathNotFound)
    wrote, read = sandbox.batch(
        Batch().write_file("/mnt/user-data/workspace/c", "x").read_file("/mnt/user-data/workspace/c")
    )
    assert (wrote["size"], read) == (1, b"x")
    provider.destroy(sandbox_id)
    with pytest.raises(SandboxNotFound):
        sandbox.read_file("/mnt/user-data/workspace/a.txt")


def test_another_users_handle_and_a_dead_sandbox_are_refused() -> None:
    provider = MockSandboxProvider()
    sandbox_id = provider.acquire("thread-1", user_id="alice")
    stranger = provider.get(sandbox_id, thread_id="thread-1", user_id="mallory")
    mine = provider.get(sandbox_id)
    assert stranger is not None
    assert mine is not None
    with pytest.raises(SandboxNotFound):
        stranger.run("true")
    provider.backend.kill(sandbox_id)
    with pytest.raises(SandboxLost):
        mine.run("true")
    assert provider.acquire("thread-1", user_id="alice") == sandbox_id
    assert mine.run("true").exit_code == 0


def test_a_slow_command_is_cancelled_by_its_op_id() -> None:
    provider = MockSandboxProvider()
    provider.backend.set_output("slow", "never", delay_s=60)
    sandbox = provider.get(provider.acquire("thread-1"))
    assert sandbox is not None
    results = []
    runner = threading.Thread(target=lambda: results.append(sandbox.run("slow", op_id="mine")))
    runner.start()
    while not sandbox.cancel("mine"):
        pass
    runner.join(5)
    assert results[0].cancelled


def test_the_async_twin_works_over_the_same_double() -> None:
    async def use() -> str:
        async with AsyncSandboxProvider.over(MockSandboxProvider()) as provider:
            sandbox = provider.get(await provider.acquire("thread-1"))
            assert sandbox is not None
            await sandbox.write_file("/mnt/user-data/workspace/a", "text")
            return await sandbox.read_file("/mnt/user-data/workspace/a")

    assert asyncio.run(use()) == "text"


def test_jobs_and_live_output_are_there_too() -> None:
    provider = MockSandboxProvider()
    provider.backend.set_output("make", "built\n", stderr="warned\n")
    provider.backend.set_output("serve", "", delay_s=600)
    sandbox = provider.get(provider.acquire("thread-1"))
    assert sandbox is not None
    seen = list[bytes]()
    assert sandbox.run("make", on_stdout=seen.append, on_stderr=seen.append).exit_code == 0
    assert seen == [b"built\n", b"warned\n"]
    made = sandbox.run("make", background=True)
    assert made.wait(5).stdout == "built\n"
    assert [type(record).__name__ for record in made.output()] == ["OutputChunk", "OutputChunk", "OutputEnd"]
    served = sandbox.run("serve", background=True, stdin_open=True)
    served.send_stdin("hello")
    assert served.poll().state == "running"
    assert [job.state for job in sandbox.jobs()] == ["exited", "running"]
    assert [process.command for process in sandbox.processes()] == ["serve"]
    assert served.kill()
    assert (served.wait(5).signal, served.poll().state) == ("SIGTERM", "exited")
    with pytest.raises(JobNotFound):
        sandbox.job("other").poll()


def test_jobs_on_an_event_loop() -> None:
    async def run() -> None:
        provider = AsyncSandboxProvider.over(MockSandboxProvider())
        sandbox = provider.get(await provider.acquire("thread-1"))
        assert sandbox is not None
        job = await sandbox.run("ls", background=True)
        assert [type(record).__name__ async for record in job.output()] == ["OutputChunk", "OutputEnd"]
        assert (await job.wait(5)).stdout == "Mock output for: ls"
        assert (await sandbox.job(job.id).poll()).exit_code == 0

    asyncio.run(run())
