"""The fleet the chaos tests share, and a Redis whose connections they may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import Fleet
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
        running.node("n1", env={"SANDFLEET_LEASE_S": "10"})  # never killed, and never fenced by a busy machine
        yield running
    finally:
        running.close()


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[tuple[Fleet, RedisServer]]:
    """A fleet whose Redis the test may restart; nothing runs yet."""
    require("redis")
    require("bwrap")
    server = RedisServer(tmp_path / "redis")
    running = Fleet(tmp_path / "fleet", server.url)
    try:
        yield running, server
    finally:
        running.close()
        server.stop()


@pytest.fixture
def broker(chaos_redis: RedisServer) -> Iterator[redis.Redis]:
    """A raw connection to the fleet's Redis, for what only an operator or an attacker does."""
    with redis.Redis.from_url(chaos_redis.url, client_name="test-broker") as client:
        yield client
