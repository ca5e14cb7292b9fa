"""The bridge that sandboxes with a network share: one per data root, however many nodes want it at once."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandfleet_workers.node_identity import data_id
from tests.docker.sandboxes import docker_world, output_of
from tests.services import require

pytestmark = pytest.mark.docker


def at_once(*calls: Callable[[], object]) -> None:
    """All of them, begun together."""
    failures: list[BaseException] = []
    gate = threading.Barrier(len(calls))

    def guarded(call: Callable[[], object]) -> None:
        gate.wait(10)
        try:
            call()
        except BaseException as exc:  # noqa: BLE001  (raised again below)
            failures.append(exc)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


def networks(root: Path) -> list[str]:
    """Names of the networks of a data root, as often as there are any."""
    argv = ["docker", "network", "ls", "--format", "{{.Name}}", "--filter", f"name=sandfleet-{data_id(root)[:8]}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def test_two_nodes_that_need_it_at_once_make_one_and_the_last_removes_it(tmp_path: Path) -> None:
    require("docker")
    full = {"network_mode": "full"}
    with docker_world(tmp_path, node_id="n1", container=full) as one:
        with docker_world(tmp_path, node_id="n2", container=full) as two:
            plans = [(world, world.plan(f"t{number}")) for number, world in enumerate((one, two, one, two))]
            at_once(*(lambda world=world, plan=plan: world.backend.create(plan) for world, plan in plans))  # type: ignore[misc]
            assert len(networks(tmp_path)) == 1
            assert output_of(two, two.backend.create(two.plan("later")), "echo $HOME") == "/mnt/user-data/workspace\n"
        assert len(networks(tmp_path)) == 1, "the other node's sandboxes are on it"
    assert networks(tmp_path) == []
