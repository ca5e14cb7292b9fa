"""Promises about live output: whatever happens to readers and to Redis, no byte comes twice and none is missing."""

from __future__ import annotations

import shutil
import threading

import pytest
import redis

from sandfleet import CommandResult, Sandbox
from sandfleet.jobs import Job, JobState, OutputChunk, OutputEnd, OutputGap
from tests.chaos.fleet import Fleet, unique
from tests.services import RedisServer, wait_until

pytestmark = pytest.mark.chaos

#: Writes numbered lines until it is told to stop, and says on stderr how many there were.
_COUNT = "n=0; until [ -e stop ]; do n=$((n+1)); echo line $n; sleep 0.005; done; echo $n >&2"


class Reader:
    """Reads a job's output on a thread of its own, as far as it may."""

    def __init__(self, job: Job, after: str | None = None) -> None:
        self._job = job
        self._after = after
        self.out = b""
        self.err = b""
        self.gaps: list[OutputGap] = []
        self.cursor = after
        self.end: OutputEnd | None = None
        self.leaves = threading.Event()
        self.trouble: Exception | None = None
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            for record in self._job.output(after=self._after):
                if isinstance(record, OutputChunk):
                    if record.stream == "stdout":
                        self.out += record.data
                    else:
                        self.err += record.data
                    self.cursor = record.cursor
                elif isinstance(record, OutputGap):
                    self.gaps.append(record)
                else:
                    self.end = record
                if self.leaves.is_set():
                    return
        except Exception as exc:  # noqa: BLE001  (the test tells of it)
            self.trouble = exc

    @property
    def lines(self) -> int:
        return self.out.count(b"\n")


def counted(reader: Reader) -> None:
    """It read everything, once and in order."""
    reader.thread.join(60)
    assert reader.trouble is None
    assert not reader.thread.is_alive()
    assert reader.gaps == []
    assert reader.end is not None
    many = int(reader.err)
    assert reader.out == b"".join(b"line %d\n" % n for n in range(1, many + 1))


def begin(fleet: Fleet, sandbox: Sandbox) -> Job:
    job = sandbox.run(_COUNT, background=True)
    wait_until(lambda: job.poll().state is JobState.RUNNING, 10, story=fleet.story)
    return job


@pytest.mark.parametrize("durable", [True, False], ids=["keeps its data", "loses its data"])
def test_output_is_whole_though_redis_restarts_while_it_is_written_and_read(
    restartable: tuple[Fleet, RedisServer], durable: bool
) -> None:
    fleet, server = restartable
    if durable:
        _durable(server)
    with fleet.provider(label="") as provider:
        sandbox = provider.get(provider.acquire(unique("stream")))
        assert sandbox is not None
        job = begin(fleet, sandbox)
        reader = Reader(job)
        try:
            for _ in range(2):
                reached = reader.lines
                wait_until(lambda: reader.lines > reached + 50, 30, story=fleet.story)  # noqa: B023
                server.kill()
                server.durable = durable
                server.start()
                reached = reader.lines
                wait_until(lambda: reader.lines > reached + 50, 60, story=fleet.story)  # noqa: B023
            late = Reader(sandbox.job(job.id))
        finally:
            wait_until(lambda: _did(sandbox, "touch stop"), 60, story=fleet.story)
        counted(reader)
        counted(late)
        assert job.wait(30).exit_code == 0
        assert job.poll().state is JobState.EXITED


def _durable(server: RedisServer) -> None:
    """From now on the server keeps what it has, and nothing that it had when it last did."""
    if not server.durable:
        server.kill()
        shutil.rmtree(server.directory / "appendonlydir", ignore_errors=True)
        server.durable = True
        server.start()


def _did(sandbox: Sandbox, command: str) -> bool:
    try:
        return sandbox.run(command).exit_code == 0
    except Exception:  # noqa: BLE001  (Redis is on its way back)
        return False


def test_output_is_whole_though_redis_forgets_everything_while_it_is_written_and_read(
    restartable: tuple[Fleet, RedisServer],
) -> None:
    fleet, server = restartable
    with fleet.provider(label="") as provider:
        sandbox = provider.get(provider.acquire(unique("stream")))
        assert sandbox is not None
        job = begin(fleet, sandbox)
        reader = Reader(job)
        try:
            wait_until(lambda: reader.lines > 50, 30, story=fleet.story)
            for _ in range(2):
                with redis.Redis.from_url(server.url) as raw:
                    raw.flushall()
                reached = reader.lines
                wait_until(lambda: reader.lines > reached + 100, 60, story=fleet.story)  # noqa: B023
            wait_until(lambda: any(view.job for view in fleet.store.ops()), 30, story=fleet.story)
            provider.release(sandbox.id)
            assert [info.ops for info in fleet.store.sandboxes() if info.sandbox_id == sandbox.id] == [1]
            assert job.poll().state is JobState.RUNNING, "the sandbox knows what Redis has forgotten"
        finally:
            wait_until(lambda: _did(sandbox, "touch stop"), 60, story=fleet.story)
        counted(reader)
        assert job.poll().state is JobState.EXITED


def test_readers_that_die_are_followed_by_others_without_a_byte_twice_or_missing(fleet: Fleet) -> None:
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(unique("stream")))
        assert sandbox is not None
        job = begin(fleet, sandbox)
        whole = Reader(job)
        parts, cursor = b"", None
        for _ in range(5):
            part = Reader(sandbox.job(job.id), cursor)
            wait_until(lambda: part.lines > 20, 30, story=fleet.story)  # noqa: B023
            part.leaves.set()
            part.thread.join(30)
            parts, cursor = parts + part.out, part.cursor
        sandbox.run("touch stop")
        last = Reader(sandbox.job(job.id), cursor)
        counted(whole)
        last.thread.join(30)
        assert parts + last.out == whole.out


def test_callbacks_get_each_byte_once_though_redis_restarts_while_the_command_runs(
    restartable: tuple[Fleet, RedisServer],
) -> None:
    fleet, server = restartable
    _durable(server)
    with fleet.provider(label="") as provider:
        sandbox = provider.get(provider.acquire(unique("stream")))
        assert sandbox is not None
        seen, results = list[bytes](), list[CommandResult]()
        line = "for n in $(seq 400); do echo line $n; sleep 0.01; done"
        caller = threading.Thread(target=lambda: results.append(sandbox.run(line, on_stdout=seen.append, timeout_s=60)))
        caller.start()
        wait_until(lambda: len(seen) > 5, 30, story=fleet.story)
        server.kill()
        server.start()
        caller.join(90)
        (result,) = results
        assert b"".join(seen).decode() == result.stdout
        assert result.stdout.count("\n") == 400
