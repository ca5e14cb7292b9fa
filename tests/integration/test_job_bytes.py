"""Every byte of a job's output, once, in whatever pieces it is written and read; and what that costs Redis."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from sandfleet import Sandbox, SandboxProvider
from sandfleet.jobs import Job, OutputEnd, OutputGap
from sandfleet.stack import Stack
from tests.services import wait_until

pytestmark = pytest.mark.slow

#: Writes pieces of random sizes to both streams, characters of four bytes among them, and waits now and then.
_WRITER = """
import os, random, sys, time
rng = random.Random(int(sys.argv[1]))
for n in range(400):
    piece = rng.choice([b"x", "\\U0001f600é".encode(), rng.randbytes(rng.choice([1, 7, 300, 5000]))])
    os.write(rng.choice([1, 2]), piece)
    if rng.random() < 0.05:
        time.sleep(0.01)
"""


def written(seed: int) -> dict[str, bytes]:
    """What the writer wrote."""
    rng, streams = random.Random(seed), {1: b"", 2: b""}
    for _ in range(400):
        piece = rng.choice([b"x", "\U0001f600é".encode(), rng.randbytes(rng.choice([1, 7, 300, 5000]))])
        streams[rng.choice([1, 2])] += piece
        rng.random()
    return {"stdout": streams[1], "stderr": streams[2]}


def read_in_parts(sandbox: Sandbox, job: Job, seed: int) -> dict[str, bytes]:
    """Readers that leave after some chunks, each followed by one that has nothing but its cursor."""
    rng, got, cursor = random.Random(seed), {"stdout": b"", "stderr": b""}, None
    while True:
        left = rng.randrange(1, 6)
        for record in sandbox.job(job.id).output(after=cursor):
            assert not isinstance(record, OutputGap)
            if isinstance(record, OutputEnd):
                assert record.outcome == "ok"
                return got
            got[record.stream] += record.data
            cursor, left = record.cursor, left - 1
            if not left:
                break


def test_each_byte_comes_once_whatever_it_is_written_and_read_in(provider: SandboxProvider) -> None:
    sandbox = provider.get(provider.acquire("job-bytes"))
    assert sandbox is not None
    sandbox.write_file("/mnt/user-data/workspace/writer.py", _WRITER)
    for seed in range(3):
        job = sandbox.run(["python3", "writer.py", str(seed)], background=True)
        with ThreadPoolExecutor(3) as readers:
            parts = [readers.submit(read_in_parts, sandbox, job, seed * 10 + n) for n in range(3)]
            for part in parts:
                assert part.result(60) == written(seed)
        result = sandbox.job(job.id).wait(30)
        assert result.exit_code == 0


def test_what_many_jobs_write_as_fast_as_they_can_is_bounded_in_redis_and_expires(fleet: Stack) -> None:
    many, kept = 20, fleet.settings.output_bytes
    with SandboxProvider(fleet.settings) as provider, redis.Redis.from_url(fleet.settings.redis_url) as raw:
        sandbox = provider.get(provider.acquire("job-flood"))
        assert sandbox is not None
        jobs = [sandbox.run("yes sandfleet", background=True, timeout_s=60) for _ in range(many)]
        keys = [f"{fleet.settings.prefix}out:{job.id}" for job in jobs]
        try:
            wait_until(lambda: all(_trimmed(raw, key) for key in keys), 60)
            assert sandbox.run("echo beside").stdout == "beside\n"
            for key in keys:
                assert raw.memory_usage(key, samples=0) < 2 * kept + 600_000
                assert raw.pttl(key) > 0
        finally:
            for job in jobs:
                job.kill("SIGKILL")
        for job in jobs:
            assert job.wait(30).signal == "SIGKILL"
        assert all(0 < raw.pttl(key) <= 3_600_000 for key in keys)


def _trimmed(raw: redis.Redis, key: str) -> bool:
    first = raw.xrange(key, count=1)
    return bool(first) and first[0][1][b"a"] != b"0,0"


def test_a_call_s_output_is_soon_gone(fleet: Stack, provider: SandboxProvider) -> None:
    sandbox = provider.get(provider.acquire("job-call"))
    assert sandbox is not None
    seen = list[bytes]()
    result = sandbox.run("echo out", on_stdout=seen.append)
    with redis.Redis.from_url(fleet.settings.redis_url) as raw:
        assert 0 < raw.pttl(f"{fleet.settings.prefix}out:{result.op_id}") <= 60_000
    assert seen == [b"out\n"]


def test_what_a_node_tells_of_its_load_counts_jobs(provider: SandboxProvider) -> None:
    sandbox = provider.get(provider.acquire("job-load"))
    assert sandbox is not None
    job = sandbox.run("sleep 60", background=True)
    store = provider._client().store
    wait_until(lambda: any(node.load.get("running", 0) >= 1 for node in store.nodes()), 20)
    assert job.kill("SIGKILL")
    assert job.wait(30).signal == "SIGKILL"
    assert [type(record) for record in job.output()] == [OutputEnd]
