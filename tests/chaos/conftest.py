"""The fleet the chaos tests share, and a Redis whose connections they may kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.chaos.fleet import Fleet, Process
from tests.services import RedisServer, require


@pytest.fixture(scope="session")
def chaos_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis of the chaos tests alone."""
    require("redis")
    with RedisServer(tmp_path_factory.mktemp("chaos-redis")) as server:
        yield server


@pytest.fixture(scope="session")
def fleet(chaos_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A scheduler and the node ``n1``, for the whole session. Destructive tests add nodes of their own."""
    require("bwrap")
    running = Fleet(tmp_path_factory.mktemp("fleet"), chaos_redis.url)
    try:
        running.start_scheduler()
        # Never killed, never fenced by a busy machine, and never full.
        running.node("n1", label="n1", env={"SANDFLEET_LEASE_S": "10", "SANDFLEET_REPLICAS": "200"})
        yield running
    finally:
        running.close()


@pytest.fixture
def spare(fleet: Fleet) -> Process:
    """A node that a test may freeze, flood or kill: ``spare``, for threads that ask for that label."""
    found = fleet.process("spare")
    return found or fleet.node("spare", label="spare", env={"SANDFLEET_REPLICAS": "200"})


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, RedisServer]]:
    """A fleet of its own with two nodes, on a Redis that the tests restart."""
    require("redis")
    require("bwrap")
    directory = tmp_path_factory.mktemp("restartable")
    server = RedisServer(directory / "redis", durable=True)
    server.start()
    running = Fleet(directory / "fleet", server.url)
    try:
        running.start_scheduler()
        running.nodes("r1", "r2")
        yield running, server
    finally:
        running.close()
        server.stop()


@pytest.fixture
def broker(chaos_redis: RedisServer) -> Iterator[redis.Redis]:
    """A raw connection to the fleet's Redis, for what only an operator or an attacker does."""
    with redis.Redis.from_url(chaos_redis.url, client_name="test-broker") as client:
        yield client
