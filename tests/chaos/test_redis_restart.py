"""Promises about a Redis that goes away and comes back, with its data and without."""

from __future__ import annotations

import pytest

from tests.chaos.fleet import Fleet, unique
from tests.chaos.load import Load
from tests.services import RedisServer, wait_until


@pytest.mark.chaos
@pytest.mark.parametrize("durable", [True, False], ids=["keeps its data", "loses its data"])
def test_a_redis_that_restarts_under_load_costs_typed_errors_at_most_and_nothing_runs_twice(
    restartable: tuple[Fleet, RedisServer], durable: bool
) -> None:
    fleet, server = restartable
    before = {view.node_id: view.incarnation for view in fleet.store.nodes()}
    loads = [Load(fleet, unique("load")) for _ in range(3)]

    def told() -> str:
        return "\n".join([fleet.story(), *(repr(list(load.answers.items())[-3:]) for load in loads)])

    try:
        wait_until(lambda: all(load.good >= 5 for load in loads), 40, story=told)
        server.kill()
        server.durable = durable  # a server that is not does not look at what the last one wrote
        server.start()
        reached = [load.good for load in loads]
        wait_until(lambda: all(n.good >= m + 5 for n, m in zip(loads, reached, strict=True)), 40, story=told)
    finally:
        for load in loads:
            load.join()
    for load in loads:
        load.judge()

    def as_before() -> bool:
        return {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive} == before

    wait_until(as_before, 10, story=told)  # the nodes announce themselves again, as who they were
    assert {info.thread_id for info in fleet.store.sandboxes()} >= {load.thread for load in loads}
