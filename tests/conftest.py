"""Fixtures every test may use. What they are made of is in `tests.services`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.services import SESSION_VARIABLE, RedisServer, next_database, processes_left, require


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail the session when a process it started is still there at its end, and end that process.

    The first fixture of all, so that every other is torn down before it looks.
    """
    session = uuid.uuid4().hex
    os.environ[SESSION_VARIABLE] = session
    # Nobody's own configuration file takes part; a test of files names one, or takes this away.
    os.environ["SANDFLEET_CONFIG"] = os.devnull
    yield
    left = processes_left(session)
    if left:
        pytest.fail("processes left behind by the tests:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that lives for the whole session.

    It is the one `SANDFLEET_TEST_REDIS_URL` names, else a private one. Take `redis_url` instead unless the
    test has no use for an empty database; take `private_redis` to stop it, kill connections or flush all.
    """
    url = os.environ.get("SANDFLEET_TEST_REDIS_URL")
    if url:
        yield url
        return
    require("redis")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def fresh_redis_url(redis_server: str) -> str:
    """The URL of an empty logical database, this test's own among the last fifteen that were handed out."""
    url = next_database(redis_server)
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def redis_url(fresh_redis_url: str) -> str:
    """The same database as `fresh_redis_url`, by its short name."""
    return fresh_redis_url


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis of this test's own, to stop, restart, kill or flood."""
    require("redis")
    with RedisServer(tmp_path / "redis") as server:
        yield server


_ROOT_LEVEL = logging.getLogger().level


@pytest.fixture(autouse=True)
def logs_can_be_heard() -> None:
    """A Celery worker that ran in this process left the root logger at its own level."""
    logging.getLogger().setLevel(_ROOT_LEVEL)
