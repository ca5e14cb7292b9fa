"""`world` is a fleet over each store in turn; `redis_world` one over Redis only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.store_fixtures import MemoryWorld, RedisWorld, World
from tests.services import RedisServer


@pytest.fixture(params=["memory", "redis"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "memory":
        made: World = MemoryWorld()
    else:
        made = RedisWorld(request.getfixturevalue("fresh_redis_url"))
    yield made
    made.close()


@pytest.fixture
def redis_world(fresh_redis_url: str) -> Iterator[RedisWorld]:
    made = RedisWorld(fresh_redis_url)
    yield made
    made.close()


@pytest.fixture
def full(private_redis: RedisServer) -> Iterator[RedisWorld]:
    """A world whose server has no memory left for anything new."""
    world = RedisWorld(private_redis.url)
    world.announce()
    yield world
    world.raw.config_set("maxmemory", 0)
    world.close()
