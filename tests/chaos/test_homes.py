"""Promises about threads whose sandbox has ended, and whose files lie on one of several data roots."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from sandfleet import SandboxProvider
from sandfleet.ids import Identity
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("restarted", [False, True], ids=["nodes live on", "nodes are started again"])
def test_a_redis_that_lost_its_data_sends_no_thread_to_a_machine_without_its_files(
    tmp_path: Path, restarted: bool
) -> None:
    require("redis")
    roots = {f"node-{n}": {"SANDFLEET_DATA_ROOT": str(tmp_path / f"root-{n}")} for n in (1, 2)}
    with (
        Stack(nodes=2, backend="mock", lease_s=2.0, node_env=roots) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        threads = [f"t{n}" for n in range(6)]
        homes = {}
        for thread in threads:
            sandbox_id = provider.acquire(thread)
            homes[thread] = stack.store.sandbox(sandbox_id).node_id  # type: ignore[union-attr]
            provider.destroy(sandbox_id)
        assert set(homes.values()) == {"node-1", "node-2"}
        before = {thread: stack.store.thread_home(Identity(thread)) for thread in threads}
        with redis.Redis.from_url(stack.settings.redis_url) as operator:
            if restarted:
                for node_id in roots:
                    stack.kill_node(node_id)
            operator.flushall()
        if restarted:
            for node_id in roots:
                stack.start_node(node_id)
        wait_until(lambda: {t: stack.store.thread_home(Identity(t)) for t in threads} == before, 15)
        for thread in threads:
            sandbox_id = provider.acquire(thread)
            assert stack.store.sandbox(sandbox_id).node_id == homes[thread], thread  # type: ignore[union-attr]
