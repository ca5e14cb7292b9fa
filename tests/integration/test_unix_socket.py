"""A Redis that listens on a unix socket alone serves the whole fleet: store, broker and results, in one database."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sandfleet import SandboxProvider
from sandfleet.celery_app import celery_app
from sandfleet.stack import Stack
from tests.services import find_redis_binary, require, wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

PASSWORD = "of/this@test"
QUOTED = "of%2Fthis%40test"


@pytest.fixture
def socket_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require("redis")
    # A socket's path has 107 bytes at most.
    path = Path(tmp_path_factory.mktemp("r")) / "s"
    server = subprocess.Popen(
        [find_redis_binary(), "--port", "0", "--unixsocket", str(path), "--requirepass", PASSWORD, "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: path.exists(), 10.0)
        yield path
    finally:
        server.terminate()
        server.wait(10)


def test_a_fleet_works_over_a_unix_socket_in_the_database_its_url_names(socket_redis: Path) -> None:
    url = f"unix://:{QUOTED}@{socket_redis}?db=3"
    with Stack(nodes=1, backend="mock", redis_url=url) as stack:
        with SandboxProvider(stack.settings) as provider:
            sandbox = provider.get(provider.acquire("socketed"))
            assert sandbox is not None
            sandbox.write_file("/mnt/user-data/workspace/a", "over the socket")
            assert sandbox.read_file("/mnt/user-data/workspace/a") == "over the socket"
        app = celery_app(stack.settings)
        sent = app.send_task(
            "sandbox.read_file", kwargs={"thread_id": "socketed", "path": "/mnt/user-data/workspace/a"}
        )
        assert "over the socket" in str(sent.get(timeout=20))
        app.close()
    with redis.Redis(unix_socket_path=str(socket_redis), password=PASSWORD, db=0) as other:
        assert other.keys("*") == [], "something went to the default database"
