"""A fleet on this machine: it gets ready, its processes can be ended one by one, and nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import ConfigError, StoreUnavailable, Unavailable
from sandfleet.stack import Stack
from tests.services import require, wait_until

_FLEET_OF_ITS_OWN = """
import json, sys, time
from pathlib import Path
from sandfleet.stack import Stack
stack = Stack(nodes=1, backend="mock", state_dir=Path(sys.argv[1])).start(wait_s=None)
print(json.dumps([stack.redis.pid, stack.scheduler.pid, stack.nodes["node-1"].pid]), flush=True)
time.sleep(60)
"""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short path: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="sf-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_fleet_takes_work_as_soon_as_it_is_ready(mock_fleet: Stack, mock_provider: SandboxProvider) -> None:
    assert {node.node_id for node in mock_fleet.store.nodes() if node.alive} == {"node-1", "node-2"}
    sandbox = mock_provider.get(mock_provider.acquire("first"))
    assert sandbox is not None
    sandbox.noop()


@pytest.mark.slow
def test_a_killed_node_is_told_from_a_crashed_one_and_can_be_started_again(mock_fleet: Stack) -> None:
    before = mock_fleet.nodes["node-1"].pid
    mock_fleet.nodes["node-1"].kill()
    wait_until(lambda: mock_fleet.crashed() == {"node-1": "signal SIGKILL"}, 5)
    mock_fleet.kill_node("node-1")
    assert mock_fleet.crashed() == {}
    process = mock_fleet.start_node("node-1")
    assert process.pid != before
    alive = {node.node_id: node.pid for node in mock_fleet.store.nodes() if node.alive}
    assert alive == {"node-1": process.pid, "node-2": mock_fleet.nodes["node-2"].pid}


def test_a_running_node_is_not_started_twice(mock_fleet: Stack) -> None:
    with pytest.raises(ConfigError, match="running already"):
        mock_fleet.start_node("node-2")


def test_what_a_node_writes_is_found_in_its_log(mock_fleet: Stack) -> None:
    wait_until(lambda: "node.started" in mock_fleet.tail("node-2", lines=100), 5)
    assert mock_fleet.log("node-2").stat().st_mode & 0o077 == 0


def test_the_password_of_the_private_redis_is_not_in_its_arguments(mock_fleet: Stack) -> None:
    password = mock_fleet.settings.redis_url.split("@")[0].rpartition(":")[2]
    assert len(password) >= 32
    for process in (mock_fleet.redis, mock_fleet.scheduler, *mock_fleet.nodes.values()):
        assert process is not None
        assert password not in " ".join(psutil.Process(process.pid).cmdline())


@pytest.mark.slow
def test_redis_comes_back_at_the_same_url_and_stopping_leaves_nothing() -> None:
    require("redis")
    before = set(psutil.Process().children(recursive=True))
    with Stack(nodes=0) as stack:
        state_dir, url = stack.state_dir, stack.settings.redis_url
        stack.kill_redis()
        with pytest.raises(StoreUnavailable):
            stack.store.now_ms()
        stack.start_redis()
        assert stack.settings.redis_url == url
        assert stack.store.now_ms() > 0
        assert len(set(psutil.Process().children(recursive=True)) - before) == 2
    assert set(psutil.Process().children(recursive=True)) == before
    assert not state_dir.exists()
    stack.stop()


@pytest.mark.slow
def test_a_node_that_cannot_start_is_told_with_its_log_and_nothing_is_left() -> None:
    require("redis")
    before = set(psutil.Process().children(recursive=True))
    nowhere = {"node-1": {"SANDFLEET_DATA_ROOT": "/proc/nowhere"}}
    with pytest.raises(Unavailable, match="node-1 ended with exit code") as caught:
        Stack(nodes=1, backend="mock", node_env=nowhere).start()
    assert "/proc/nowhere" in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) == before


def test_its_processes_end_when_their_parent_is_killed(short_dir: Path) -> None:
    require("redis")
    parent = subprocess.Popen(
        [sys.executable, "-c", _FLEET_OF_ITS_OWN, str(short_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
    wait_until(lambda: not any(_runs(pid) for pid in pids), 10)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
