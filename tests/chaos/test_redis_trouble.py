"""Promises about a Redis in trouble while a fleet works: patience or typed errors, no second run, no lost sandbox."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import redis

from sandfleet import CommandResult, OutputChunk, SandboxProvider
from sandfleet.errors import SandfleetError, Unavailable
from tests.chaos.fleet import LEASE_S, Fleet, unique
from tests.chaos.load import Load
from tests.services import RedisServer, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

Passing = Callable[[float], None]
"""Lets time pass while the trouble lasts."""


LINES = 200


def let_pass(seconds: float) -> None:
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds, seconds + 10)


def restarts(server: RedisServer, passing: Passing) -> None:
    for _ in range(3):
        server.kill()
        server.durable = True
        server.start()
        passing(0.5)


def is_emptied(server: RedisServer, passing: Passing) -> None:
    with redis.Redis.from_url(server.url) as operator:
        for _ in range(2):
            operator.flushall()
            passing(1.0)


def is_full(server: RedisServer, passing: Passing) -> None:
    with redis.Redis.from_url(server.url) as operator:
        operator.config_set("maxmemory-policy", "noeviction")
        operator.config_set("maxmemory", "1")
        try:
            passing(LEASE_S + 2)
        finally:
            operator.config_set("maxmemory", "0")


def is_paused(server: RedisServer, passing: Passing) -> None:
    with redis.Redis.from_url(server.url) as operator:
        operator.client_pause(int((LEASE_S + 0.5) * 1000))
    passing(LEASE_S + 0.5)


def hangs(server: RedisServer, passing: Passing) -> None:
    server._running().send_signal(signal.SIGSTOP)
    try:
        passing(2 * LEASE_S)
    finally:
        server._running().send_signal(signal.SIGCONT)


def loses_its_connections(server: RedisServer, passing: Passing) -> None:
    with redis.Redis.from_url(server.url) as operator:
        for _ in range(5):
            operator.client_kill_filter(_type="normal", skipme=True)
            passing(0.3)


@pytest.mark.parametrize("trouble", [restarts, is_emptied, is_full, is_paused, hangs, loses_its_connections])
def test_redis_in_trouble_under_load_costs_typed_errors_at_most_and_no_sandbox(
    restartable: tuple[Fleet, RedisServer], trouble: Callable[[RedisServer, Passing], None]
) -> None:
    fleet, server = restartable
    nodes = {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive}
    assert len(nodes) == 2, fleet.story()
    with fleet.provider(label="") as provider:
        ids = [provider.acquire(unique("held")) for _ in range(2)]
        for sandbox_id in ids:
            assert works(provider, sandbox_id, "sleep 1000 & echo $! > pid")
        loads = [Load(fleet, unique("load")) for _ in range(3)]

        def told() -> str:
            return "\n".join([fleet.story(), *(repr(list(load.answers.items())[-3:]) for load in loads)])

        try:
            wait_until(lambda: all(load.good >= 5 for load in loads), 40, story=told)
            owners = {sandbox_id: owner_of(fleet, sandbox_id) for sandbox_id in ids}
            trouble(server, let_pass)
            reached = [load.good for load in loads]
            wait_until(lambda: all(n.good >= m + 5 for n, m in zip(loads, reached, strict=True)), 60, story=told)
        finally:
            for load in loads:
                load.join()
        for load in loads:
            load.judge()
            for answer in load.answers.values():
                assert isinstance(answer, (CommandResult, SandfleetError)), repr(answer)
                if isinstance(answer, Unavailable) and answer.code == "store_unavailable":
                    assert answer.retryable

        def as_before() -> bool:
            alive = {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive}
            return alive == nodes and all(owner_of(fleet, one) == owner for one, owner in owners.items())

        wait_until(as_before, 20, story=told)
        for sandbox_id in ids:
            wait_until(lambda one=sandbox_id: works(provider, one, "kill -0 $(cat pid)"), 20, story=told)  # type: ignore[misc]
        threads = [info.thread_id for info in fleet.store.sandboxes() if info.state != "lost"]
        assert len(threads) == len(set(threads)), "one sandbox per thread"


def owner_of(fleet: Fleet, sandbox_id: str) -> tuple[str, str, int] | None:
    info = fleet.store.sandbox(sandbox_id)
    return None if info is None else (info.node_id, info.incarnation, info.epoch)


def works(provider: SandboxProvider, sandbox_id: str, command: str) -> bool:
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None
    try:
        return sandbox.run(command).exit_code == 0
    except SandfleetError as exc:
        raise AssertionError(repr(exc)) from exc


@pytest.mark.parametrize("trouble", [restarts, is_emptied, is_full, hangs, loses_its_connections])
def test_a_job_and_its_output_come_through_redis_trouble_without_a_byte_twice_or_missing(
    restartable: tuple[Fleet, RedisServer], trouble: Callable[[RedisServer, Passing], None]
) -> None:
    fleet, server = restartable
    with fleet.provider(label="") as provider:
        sandbox = provider.get(provider.acquire(unique("job")))
        assert sandbox is not None
        job = sandbox.run(f"for n in $(seq {LINES}); do echo line $n; sleep 0.05; done", background=True)
        wait_until(lambda: job.poll().state == "running", 20, story=fleet.story)
        trouble(server, let_pass)
        expected = "".join(f"line {n}\n" for n in range(1, LINES + 1)).encode()

        def told() -> bool:
            try:
                chunks = [piece.data for piece in job.output() if isinstance(piece, OutputChunk)]
                assert job.wait(timeout_s=30).exit_code == 0
            except SandfleetError as exc:
                raise AssertionError(repr(exc)) from exc
            assert b"".join(chunks) == expected
            return True

        wait_until(told, 60, story=fleet.story)
