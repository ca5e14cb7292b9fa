"""Nodes with containers that are killed, stopped and started at any moment: nothing is lost, doubled or left behind."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import NotStarted, OutcomeUnknown, SandboxLost, SandfleetError, StartFailed
from sandfleet.stack import Stack
from sandfleet.testing.backend_world import World, wait_for
from sandfleet_workers.backends.docker import backend as backend_module
from sandfleet_workers.backends.docker.backend import DockerBackend
from sandfleet_workers.backends.docker.starting import Starter
from tests.docker.sandboxes import docker_backend
from tests.services import require, wait_until

pytestmark = [
    pytest.mark.docker,
    # The SDK forgets sockets that it could not connect.
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket .*family=1:ResourceWarning"),
]

LEASE_S = 3.0
CHAOS_S = 45.0


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


def deployment_of(data_root: Path) -> str:
    return (data_root / "data-id").read_text().strip()


def containers(deployment: str) -> list[str]:
    """Names of the containers of a data root's nodes, running or not."""
    label = f"label=sandfleet.deployment={deployment}"
    argv = ["docker", "ps", "-a", "--format", "{{.Names}}", "--filter", label]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


# --- a node that is stopped while it starts something --------------------------------------------


@pytest.mark.usefixtures("api")
def test_a_start_under_way_when_the_node_stops_leaves_nothing(tmp_path: Path) -> None:
    backend = docker_backend(tmp_path, lambda *_: None)
    assert isinstance(backend, DockerBackend)
    world = World(backend, tmp_path, [])
    backend.create(world.plan())  # the first one takes a look at the image besides
    starter = threading.Thread(target=backend.create, args=(world.plan(),))
    starter.start()
    wait_for(lambda: backend._starting, "a start that is under way")
    backend.close()
    starter.join(20)
    assert backend.running() == []
    assert containers(deployment_of(tmp_path)) == []


@pytest.mark.usefixtures("api")
def test_a_start_that_is_stuck_when_the_node_stops_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "_STARTED_WITHIN_S", 2.0)
    begun = threading.Event()

    def never_ready(starter: Starter, container: str, *_: object) -> None:
        begun.set()
        wait_for(lambda: starter._engine.inspect(container) is None, "its removal")
        raise StartFailed("it is gone", reason="died")

    monkeypatch.setattr(Starter, "_wait_until_ready", never_ready)
    backend = docker_backend(tmp_path, lambda *_: None)
    plan = World(backend, tmp_path, []).plan()
    failures: list[str] = []

    def start() -> None:
        try:
            backend.create(plan)
        except StartFailed as exc:
            failures.append(str(exc.facts["reason"]))

    starter = threading.Thread(target=start)
    starter.start()
    assert begun.wait(30)
    backend.close()
    starter.join(20)
    assert failures == ["died"]
    assert containers(deployment_of(tmp_path)) == []
    with pytest.raises(StartFailed, match="being stopped"):
        backend.create(plan)


@pytest.mark.slow
def test_a_node_that_is_stopped_while_it_begins_anew_stops_and_leaves_nothing() -> None:
    require("docker")
    require("redis")
    with Stack(1, backend="docker", lease_s=LEASE_S, blank_pool=1, replicas=2) as stack:
        (node_id,) = stack.node_ids
        deployment = deployment_of(stack.settings.data_root)
        wait_until(lambda: len(containers(deployment)) == 1, 60)
        node = stack.nodes[node_id]
        node.send_signal(signal.SIGSTOP)
        wait_until(lambda: not stack.store.nodes()[0].alive, 30)
        wait_until(lambda: stack.store.nodes()[0].state == "gone", 30)
        node.send_signal(signal.SIGCONT)
        wait_until(lambda: "node.fenced" in (stack.log_dir / f"{node_id}.log").read_text(), 30)
        node.terminate()
        assert node.wait(20) in (0, -signal.SIGTERM)
        assert containers(deployment) == []


# --- nodes that are killed at any moment ---------------------------------------------------------


@dataclass
class Log:
    """What one thread was told of its commands, each of which appends one line to a file of its own."""

    name: str
    done: set[str] = field(default_factory=set)
    perhaps: set[str] = field(default_factory=set)
    other: list[str] = field(default_factory=list)

    def work(self, provider: SandboxProvider, until: float, rng: random.Random) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            line = f"{self.name}-{number}"
            try:
                sandbox = provider.get(provider.acquire(self.name))
                assert sandbox is not None
            except SandfleetError as exc:
                self._note(exc)
                continue
            try:
                if sandbox.run(f"echo {line} >> log").exit_code == 0:
                    self.done.add(line)
            except NotStarted:
                pass
            except (OutcomeUnknown, SandboxLost):
                self.perhaps.add(line)
            except SandfleetError as exc:
                self._note(exc)
            if rng.random() < 0.3:
                self._destroy(provider, sandbox.id)

    def _destroy(self, provider: SandboxProvider, sandbox_id: str) -> None:
        try:
            provider.destroy(sandbox_id)
        except SandfleetError as exc:
            self._note(exc)

    def _note(self, exc: SandfleetError) -> None:
        if not exc.retryable and not isinstance(exc, (NotStarted, OutcomeUnknown, SandboxLost)):
            self.other.append(f"{type(exc).__name__}: {exc}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_killed_at_any_moment_lose_double_and_leave_nothing() -> None:
    require("docker")
    require("redis")
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    logs = [Log(f"thread-{number}") for number in range(4)]
    with Stack(2, backend="docker", lease_s=LEASE_S, blank_pool=1, replicas=4, acquire_timeout_s=30.0) as stack:
        data_root = stack.settings.data_root
        deployment = deployment_of(data_root)
        with SandboxProvider(stack.settings) as provider:
            until = time.monotonic() + CHAOS_S
            workers = [
                threading.Thread(target=log.work, args=(provider, until, random.Random(seed + number)))
                for number, log in enumerate(logs)
            ]
            for worker in workers:
                worker.start()
            kills = 0
            while time.monotonic() < until:
                threading.Event().wait(rng.uniform(0.5, 4.0))
                node_id = rng.choice(list(stack.node_ids))
                stack.kill_node(node_id)
                kills += 1
                stack.start_node(node_id)
            for worker in workers:
                worker.join(90)
            assert kills >= 3
            assert sum(len(log.done) for log in logs) > 20, "it must have worked in between"
            for log in logs:
                assert log.other == []
                sandbox = provider.get(provider.acquire(log.name))
                assert sandbox is not None
                lines = sandbox.run("cat log").stdout.split()
                assert len(lines) == len(set(lines)), "something ran twice"
                assert log.done <= set(lines), "something that was done is lost"
                assert set(lines) <= log.done | log.perhaps, "something ran that was said not to have"
        wait_until(lambda: len(containers(deployment)) <= 2 + len(logs), 60)
        for node_id in stack.node_ids:
            stack.stop_node(node_id)
        assert containers(deployment) == []
        for kind in ("slots", "sandboxes"):
            assert [path for node in stack.node_ids for path in (data_root / "nodes" / node / kind).iterdir()] == []
