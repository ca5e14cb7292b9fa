"""A registry that was lost is made anew from what nodes hold and have written down, and is the one it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sandfleet import SandboxProvider
from sandfleet.errors import SandfleetError
from sandfleet.stack import Stack
from tests.registry import registry
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos]

LEASE_S = 3.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    require("redis")
    require("docker")
    with Stack(
        nodes=2,
        backend="docker",
        lease_s=LEASE_S,
        replicas=3,
        blank_pool=1,
        container={"image": "sandfleet/sandbox:latest"},
        data_root=tmp_path / "data",
    ) as made:
        yield made


def told(stack: Stack) -> str:
    return "\n".join(stack.tail(node, 25) for node in stack.nodes)


def works(provider: SandboxProvider, sandbox_id: str, command: str) -> bool:
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None
    try:
        return sandbox.run(command).exit_code == 0
    except SandfleetError as exc:
        raise AssertionError(repr(exc)) from exc


@pytest.mark.parametrize("killed", [False, True], ids=["nodes live on", "nodes are killed, too"])
def test_the_registry_rebuilt_from_journals_equals_the_one_before(stack: Stack, killed: bool) -> None:
    with SandboxProvider(stack.settings) as provider:
        ids = [provider.acquire(f"t{n}", user_id="acme" if n % 2 else None) for n in range(4)]
        for sandbox_id in ids:
            assert works(provider, sandbox_id, "echo kept > file; sleep 1000 & echo $! > pid")
        provider.release(ids[3])
        wait_until(lambda: stack.store.sandbox(ids[3]).state == "warm", 10)  # type: ignore[union-attr]
        before = registry(stack.settings.redis_url)
        assert len({info.node_id for info in stack.store.sandboxes()}) == 2

        with redis.Redis.from_url(stack.settings.redis_url) as operator:
            if killed:
                for node_id in list(stack.nodes):
                    stack.kill_node(node_id)
            operator.flushall()
        if killed:
            for node_id in sorted(stack.nodes):
                stack.start_node(node_id)

        def is_as_before() -> bool:
            now = registry(stack.settings.redis_url)
            differs = {
                key: (before.get(key), now.get(key)) for key in {*before, *now} if before.get(key) != now.get(key)
            }
            assert not differs, differs
            return True

        wait_until(is_as_before, 30, story=lambda: told(stack))
        for sandbox_id in ids[:3]:
            wait_until(lambda one=sandbox_id: works(provider, one, "kill -0 $(cat pid)"), 15, story=lambda: told(stack))  # type: ignore[misc]
        assert provider.acquire("t3", user_id="acme") == ids[3]
        assert works(provider, ids[3], "cat file && kill -0 $(cat pid)"), "the same sandbox, with what runs in it"
        assert len(stack.store.sandboxes()) == 4
