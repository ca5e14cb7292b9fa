"""A short run of the torture; `make chaos SECONDS=600` is the long one."""

from __future__ import annotations

import json
import random

import pytest

from tests.chaos.torture.run import torture
from tests.chaos.torture.world import Options
from tests.services import require

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(400)]

LEAST_OPERATIONS = 100
"""Not a measure of speed: a run that did next to nothing shows nothing."""


@pytest.mark.parametrize("backend", [pytest.param("docker", marks=pytest.mark.docker), "local"])
def test_random_faults_under_load_lose_nothing_and_do_nothing_twice(backend: str) -> None:
    require("redis")
    require("docker" if backend == "docker" else "bwrap")
    seed = random.randrange(1 << 32)
    report = torture(Options(seconds=45, backend=backend, seed=seed))
    print(report.table())
    numbers = report.numbers
    assert report.kept_every_promise, json.dumps(numbers["broken"], indent=1)
    assert numbers["operations"] > LEAST_OPERATIONS
    assert numbers["faults"]["total"] > 5
    assert numbers["leaked"]["total"] == 0
    assert [numbers[name] for name in ("twice", "falsely_ok", "acknowledged_missing", "unanswered")] == [0, 0, 0, 0]


def test_a_fleet_that_runs_something_twice_is_convicted() -> None:
    require("redis")
    require("bwrap")
    report = torture(Options(seconds=5, backend="local", nodes=2, sabotage=True))
    print(report.table())
    assert report.numbers["twice"] == 1
    assert not report.kept_every_promise
