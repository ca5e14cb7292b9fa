"""A configuration file reaches every process of a fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandfleet import SandboxProvider
from sandfleet.stack import Stack
from tests.services import require

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

SANDFLEET = (sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())")
FILE = """
sandbox:
  use: my_package:Provider
  backend: mock
  replicas: 3
  environment: {FROM_FILE: "a,b=c", FROM_VARIABLE: $OF_THE_PARENT}
node:
  labels: {zone: a}
profiles:
  large:
    sandbox: {replicas: 5}
"""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration file that nobody names yet; the path is short for the sake of sockets."""
    for name in [name for name in os.environ if name.startswith("SANDFLEET_")] + ["REDIS_URL"]:
        if not name.startswith("SANDFLEET_TEST"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OF_THE_PARENT", "value")
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as directory:
        monkeypatch.setenv("SANDFLEET_RUN_ROOT", f"{directory}/run")
        file = Path(directory) / "mine.yaml"
        file.write_text(FILE)
        yield file


def test_a_stack_hands_the_file_on_to_its_nodes_and_keeps_to_it(
    configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("redis")
    monkeypatch.setenv("SANDFLEET_CONFIG", str(configured))
    monkeypatch.setenv("SANDFLEET_ENV", "large")
    with Stack(nodes=1, lease_s=1.5) as stack:
        [node] = stack.store.nodes()
        assert (node.replicas, node.labels, node.backends) == (5, {"zone": "a"}, ("mock",))
        with SandboxProvider(stack.settings) as provider:
            assert provider.settings.environment == {"FROM_FILE": "a,b=c", "FROM_VARIABLE": "value"}
            assert provider.spec.env == provider.settings.environment
            sandbox = provider.get(provider.acquire("t1"))
            assert sandbox is not None
        # What a fleet was started with stays, whatever becomes of the file.
        configured.write_text("nonsense: [")
        stack.kill_node("node-1")
        stack.start_node("node-1")
        [node] = [node for node in stack.store.nodes() if node.alive]
        assert node.replicas == 5


def test_up_takes_the_file_that_is_named(configured: Path) -> None:
    require("redis")
    up = subprocess.Popen(
        [*SANDFLEET, "--config", configured.name, "up", "--json", "--data-root", str(configured.parent / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=configured.parent,
    )
    children: list[psutil.Process] = []
    try:
        assert up.stdout is not None
        facts = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
        assert facts["backend"] == "mock"
        told = subprocess.run([*SANDFLEET, "nodes", "--json"], capture_output=True, text=True, timeout=30, check=True)
        [node] = json.loads(told.stdout)["nodes"]
        assert (node["replicas"], node["labels"]) == (3, {"zone": "a"})
        # Without the file another command still finds the fleet, and says how it knows.
        shown = subprocess.run([*SANDFLEET, "config", "show", "--json"], capture_output=True, text=True, timeout=30)
        settings = json.loads(shown.stdout)["settings"]
        assert settings["sandbox.backend"]["value"] == "mock"
        assert "sandfleet up" in settings["redis.url"]["source"]
        assert settings["sandbox.replicas"]["source"] == "default"
        children = psutil.Process(up.pid).children(recursive=True)
    finally:
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=30)
    assert up.returncode == 0, err
    assert not [child for child in children if child.is_running()]


def test_a_redis_that_the_file_names_is_used_and_none_is_started(configured: Path, redis_url: str) -> None:
    configured.write_text(f"redis: {{url: $SOMEWHERE}}\n{FILE}")
    environ = {**os.environ, "SOMEWHERE": redis_url}
    argv = [*SANDFLEET, "--config", str(configured), "up", "--json", "--data-root", str(configured.parent / "data")]
    up = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        assert up.stdout is not None
        facts = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
        assert facts["redis_url"] == redis_url
        assert len(psutil.Process(up.pid).children()) == 2, "a scheduler and a node"
    finally:
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=30)
    assert up.returncode == 0, err


def test_a_worker_takes_the_file_that_is_named_and_tells_its_mistakes(configured: Path, redis_url: str) -> None:
    configured.write_text("sandbox:\n  mounts: [{host_path: /surely/not/there, container_path: /data}]\n")
    argv = [*SANDFLEET, "worker", "--config", str(configured), "--redis-url", redis_url, "--backend", "mock"]
    argv += ["--data-root", str(configured.parent / "data")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "mounts[0] (/data): host_path /surely/not/there does not exist" in done.stderr
    configured.write_text("sandbox:\n  mount: []\n")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{configured}:2: sandbox.mount: is no setting; did you mean `mounts`?" in done.stderr
