"""Promises about a Redis that is away for longer than a lease and comes back with its data."""

from __future__ import annotations

import time

import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import SandfleetError
from sandfleet.stack import Stack
from tests.services import require, wait_until

LEASE_S = 3.0
AWAY_S = 7.0


@pytest.mark.chaos
def test_an_outage_of_several_leases_costs_no_node_its_incarnation_and_no_thread_its_sandbox() -> None:
    require("redis")
    with Stack(nodes=1, backend="mock", lease_s=LEASE_S, durable=True) as stack, SandboxProvider(stack.settings) as one:
        ids = {thread: one.acquire(thread) for thread in ("a", "b")}
        before = {node.node_id: node.incarnation for node in stack.store.nodes()}
        owners = {info.sandbox_id: (info.incarnation, info.epoch) for info in stack.store.sandboxes()}

        stack.kill_redis()
        gone_at = time.monotonic()
        wait_until(lambda: time.monotonic() - gone_at > AWAY_S, AWAY_S + 2)
        stack.start_redis()
        back_at = time.monotonic()

        def everybody_works() -> bool:
            try:
                return all(one.get(sandbox_id).run("true").exit_code == 0 for sandbox_id in ids.values())  # type: ignore[union-attr]
            except SandfleetError as exc:
                raise AssertionError(repr(exc)) from exc

        wait_until(everybody_works, 10, story=lambda: stack.tail("node-1", 40))
        took_s = time.monotonic() - back_at
        # Long enough for a reconciler that was going to close the node.
        wait_until(lambda: time.monotonic() - back_at > LEASE_S + 0.5, LEASE_S + 3)
        told = stack.tail("node-1", 40)
        assert {node.node_id: node.incarnation for node in stack.store.nodes() if node.alive} == before, told
        assert {info.sandbox_id: (info.incarnation, info.epoch) for info in stack.store.sandboxes()} == owners, told
        assert {str(info.state) for info in stack.store.sandboxes()} == {"live"}, told
        assert took_s < LEASE_S, told
