"""Every key in Redis has an expiry or an owner: the table in docs/operator.md against what a busy fleet leaves."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sandfleet import Sandbox, SandboxProvider, control
from sandfleet.celery_app import celery_app
from sandfleet.cli import main
from sandfleet.errors import NotSupported, SandfleetError
from sandfleet.stack import Stack
from tests.services import RedisServer, require, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MONTH_MS = 31 * 86_400_000
_NAME = re.compile(r"`([^`]+)`")


def table() -> dict[str, bool]:
    """Pattern of a key → whether it may have no expiry."""
    section = (ROOT / "docs" / "operator.md").read_text().partition("## What is in Redis")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {_NAME.search(row)[1]: "**no expiry**" in row for row in rows}  # type: ignore[index]


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split("(<[^>]+>)", name))
    )


def homeless(server: redis.Redis) -> list[str]:
    """Keys that the table does not know, or that live longer than it says."""
    rows = [(pattern(name), free) for name, free in table().items()]
    found = []
    for key in sorted(server.scan_iter("*")):
        matching = [free for expected, free in rows if expected.fullmatch(key)]
        left_ms = server.pttl(key)
        if left_ms == -2:
            continue  # it has gone meanwhile
        if not matching:
            found.append(f"{key}: not in the table")
        elif left_ms == -1 and not any(matching):
            found.append(f"{key}: no expiry")
        elif left_ms > MONTH_MS:
            found.append(f"{key}: lives {left_ms / 86_400_000:.0f} days")
    return found


def test_the_table_knows_every_key_that_the_scripts_and_the_store_write() -> None:
    store = ROOT / "shared" / "sandfleet" / "store"
    names = set()
    for path in store.rglob("scripts/**/*.lua"):
        names |= set(re.findall(r"P \.\. '([a-z_-]+:?)", path.read_text()))
    names |= set(re.findall(r"prefix\}([a-z_-]+:?)", (store / "keys.py").read_text()))
    known = {re.split("<", name.removeprefix("sandfleet:"))[0] for name in table() if name.startswith("sandfleet:")}
    assert names <= known, names - known
    assert known <= names, f"nobody writes {known - names}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    require("redis")
    with RedisServer(tmp_path_factory.mktemp("keys")) as running:
        yield running


def work(stack: Stack) -> None:
    """A bit of everything: sandboxes held, released and ended, results, errors, large files, a line, remote control."""
    with SandboxProvider(stack.settings) as provider:
        for number in range(3):
            sandbox = provider.get(provider.acquire(f"t{number}", user_id="acme" if number else None))
            assert sandbox is not None
            assert sandbox.run("echo hi").ok
            sandbox.write_file("f", "x" * 600_000)
            assert len(sandbox.read_file("f")) == 600_000
            with pytest.raises(OSError):
                sandbox.read_file("nothing")
            background(sandbox)
        provider.release(provider.acquire("t0"))
        provider.destroy(provider.acquire("t1", user_id="acme"))
        waiting = threading.Thread(target=lambda: too_many(provider))
        waiting.start()
        waiting.join(60)
    app = celery_app(stack.settings)
    try:
        call = {"thread_id": "plain", "command": "echo by celery"}
        assert app.send_task("sandbox.execute_command", kwargs=call).get(timeout=30)["stdout"]
    finally:
        app.close()
    assert control.ping(stack.settings)
    assert main(["--redis-url", stack.settings.redis_url, "gc", "--json"]) == 0


def background(sandbox: Sandbox) -> None:
    """A job and its output, where the backend has them."""
    with contextlib.suppress(NotSupported):
        job = sandbox.run("echo out; sleep 0.1", background=True)
        assert job.wait(timeout_s=20).ok


def too_many(provider: SandboxProvider) -> None:
    """More threads than there are places: they stand in line, and give up."""
    for number in range(12):
        try:
            provider.acquire(f"many-{number}", user_id="acme", timeout_s=1.0)
        except SandfleetError:
            return


@pytest.mark.parametrize("backend", ["mock", "local"])
def test_every_key_that_a_busy_fleet_leaves_expires_or_has_an_owner(server: RedisServer, backend: str) -> None:
    if backend == "local":
        require("bwrap")
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.flushall()
        with Stack(nodes=2, backend=backend, redis_url=server.url, lease_s=2.0, replicas=3) as stack:
            work(stack)
            assert homeless(client) == []
            stack.kill_node("node-2")
            wait_until(lambda: not any(n.alive for n in stack.store.nodes() if n.node_id == "node-2"), 15)
            work_again(stack)
            wait_until(lambda: not homeless(client), 5, story=lambda: "\n".join(homeless(client)))
        # Nobody runs any more, so what has no expiry now would stay for ever.
        assert homeless(client) == []
        left = [key for key in client.scan_iter("*") if client.pttl(key) == -1]
        assert all(key.startswith(("_kombu.", "sandfleet.")) or key.endswith(".pidbox") for key in left)
        assert sum(client.memory_usage(key) or 0 for key in left) < 10_000, left


def work_again(stack: Stack) -> None:
    with SandboxProvider(stack.settings) as provider:
        sandbox = provider.get(provider.acquire("after", on_lost="fresh"))
        assert sandbox is not None
        assert sandbox.run("true").ok
