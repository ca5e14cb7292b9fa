"""Workers that are not root on the engine's own host: in a container, or a normal user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine_proxy import EngineProxy
from tests.services import CHECKOUT, require

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make itself another namespace or user"),
]

#: A worker's whole life with one sandbox: what it sees, how its death is heard of, and that nothing is left.
LIFE = """
import os, sys
from pathlib import Path
from sandfleet.backends import Liveness
from sandfleet.testing.backend_world import wait_for
from tests.docker.sandboxes import docker_world, output_of
import sandfleet_workers.backends.docker.backend

def live(root, **container):
    with docker_world(Path(root), container=container) as world:
        dies, ends = world.plan(), world.plan()
        connection = world.backend.create(dies)
        print("uid", output_of(world, connection, "id -u; touch /mnt/user-data/workspace/x && echo wrote").split())
        held = world.backend._holding.get(dies.sandbox_id)
        print("sees the process", held.vital.pidfd >= 0)
        world.backend.create(ends)
        world.backend._engine.api.kill(held.ticket.container)
        wait_for(lambda: world.deaths, "a report of the death")
        print("deaths", world.deaths == [(dies.sandbox_id, "killed by SIGKILL")])
        print("other", world.backend.probe(ends.sandbox_id) is Liveness.ALIVE)
        world.backend.destroy(ends.sandbox_id)
        print("left", world.backend.leftovers(), world.backend.running())
"""


def told_by(argv: list[str]) -> dict[str, str]:
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("uid", "sees the process", "deaths", "other", "left")
    return {word: line[len(word) + 1 :] for line in done.stdout.splitlines() for word in words if line.startswith(word)}


def test_a_worker_in_a_container_of_its_own_works_as_any_other(tmp_path: Path) -> None:
    """In other namespaces of pids and mounts than the engine: it cannot see the sandboxes' processes."""
    require("docker")
    program = f"{LIFE}\nlive(sys.argv[1])"
    apart = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
    assert told_by([*apart, sys.executable, "-c", program, str(tmp_path)]) == {
        "uid": "['10001', 'wrote']",
        "sees the process": "False",
        "deaths": "True",
        "other": "True",
        "left": "{} []",
    }


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user can walk to, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_a_worker_that_is_not_root_runs_sandboxes_as_itself(open_to_all: Path) -> None:
    require("docker")
    proxy = EngineProxy(open_to_all / "docker.sock")
    proxy.path.chmod(0o777)
    (root := open_to_all / "root").mkdir()
    os.chown(root, 12345, 12345)
    program = f"{LIFE}\nos.setgroups([]); os.setresgid(*[12345] * 3); os.setresuid(*[12345] * 3)\n"
    program += "live(sys.argv[1], docker_host=sys.argv[2])"
    try:
        told = told_by([sys.executable, "-c", program, str(root), proxy.address])
    finally:
        proxy.go_away()
    assert told["uid"] == "['12345', 'wrote']"
    assert told["deaths"] == told["other"] == "True"
    assert told["left"] == "{} []"
