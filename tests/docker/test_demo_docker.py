"""``make demo`` with containers: every step right, and nothing left on the engine, though a node was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandfleet.cli.demo_play import STEPS
from tests.services import require

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def listed(*argv: str) -> set[str]:
    return set(subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout.split())


def of_sandfleet() -> set[str]:
    return listed("ps", "-aq", "--filter", "label=sandfleet.deployment")


@pytest.mark.timeout(180)
def test_the_demo_shows_docker_where_it_can_and_leaves_no_container(tmp_path: Path) -> None:
    require("docker")
    require("redis")
    before = of_sandfleet()
    command = [sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())", "demo", "--json"]
    with tempfile.TemporaryDirectory(prefix="sf") as state:  # short: socket paths are
        env_of_demo = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": state}
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=env_of_demo)
        left = sorted(path.name for path in Path(state).iterdir())
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert [step for step in told["steps"] if not step["ok"]] == [], done.stderr
    assert (done.returncode, told["ok"], len(told["steps"])) == (0, True, STEPS)
    assert (told["backend"], told["passed_over"]) == ("docker", {"local": "docker isolates better"})
    assert "container" in told["isolation"]
    assert left == []
    # Others use the engine too: what is there now and was not before may be theirs, but not a killed node's of ours.
    assert [name for name in names_of(of_sandfleet() - before) if "-node-" in name and state in name] == []


def names_of(containers: set[str]) -> list[str]:
    """Name and mounted directories of containers that are still there."""
    told = []
    for container in containers:
        done = subprocess.run(
            ["docker", "inspect", "--format", "{{.Name}} {{range .Mounts}}{{.Source}} {{end}}", container],
            capture_output=True,
            text=True,
            check=False,
        )
        told.append(done.stdout.strip())
    return told
