"""Containers of a fleet that does not come back end by themselves (issue 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandfleet_workers.backends.docker import backend
from tests.docker.sandboxes import docker_world
from tests.services import SANDBOX_IMAGE, require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_a_container_nobody_comes_back_to_ends_and_one_that_is_held_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("docker")
    monkeypatch.setattr(backend, "_ORPHAN_S", 2.0)
    with docker_world(tmp_path, detach_s=0, container={"image": SANDBOX_IMAGE}) as world:
        held, left = world.plan(), world.plan()
        ways = {plan.sandbox_id: world.backend.create(plan) for plan in (held, left)}
        for way in ways.values():
            world.value(way, "execute_command", command="sleep 600 &")
        # A connection that is idle says that somebody is there; the other one is given up.
        ways[left.sandbox_id].close()
        wait_until(lambda: left.sandbox_id in [sandbox_id for sandbox_id, _ in world.deaths], 30)
        assert world.backend.running() == [held.sandbox_id]
        assert world.value(ways[held.sandbox_id], "noop") == {}
