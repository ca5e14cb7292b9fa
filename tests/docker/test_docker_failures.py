"""Each way an engine can fail has its own answer, and nothing is left of what failed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest

from sandfleet.backends import Liveness
from sandfleet.errors import ConfigError, InternalError, StartFailed
from sandfleet.model import SandboxSpec
from sandfleet.testing.backend_world import World, wait_for
from sandfleet_workers.backends.docker import engine as engine_module
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.docker.engine_proxy import EngineProxy
from tests.docker.sandboxes import docker_backend, docker_world, output_of
from tests.services import CHECKOUT, SANDBOX_IMAGE, require

pytestmark = [
    pytest.mark.docker,
    # The SDK forgets sockets that it could not connect.
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket .*family=1:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def forgotten_sockets_go_here() -> Iterator[None]:
    """And not in the midst of another file's tests, where they are an error."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


@pytest.fixture(scope="module")
def world(api: docker.APIClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    container = {"allowed_images": ("sandfleet/*", "localhost:1/*", "nowhere/*")}
    with docker_world(tmp_path_factory.mktemp("docker"), container=container) as made:
        yield made


@pytest.fixture
def proxy(api: docker.APIClient, tmp_path: Path) -> Iterator[EngineProxy]:
    made = EngineProxy(tmp_path / "docker.sock")
    yield made
    made.go_away()


def docker_of(world: World) -> DockerBackend:
    assert isinstance(world.backend, DockerBackend)
    return world.backend


def fails(world: World, **changes: Any) -> StartFailed:
    """The error of a start that must fail and leave nothing."""
    plan = replace(world.plan(), **changes)
    with pytest.raises(StartFailed) as caught:
        world.backend.create(plan)
    assert plan.sandbox_id not in world.backend.running()
    assert not plan.run_dir.exists()
    assert world.backend.leftovers() == {}
    return caught.value


# --- before the first container ------------------------------------------------------------------


def test_a_node_without_an_engine_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Docker engine answers at .*nothing\.sock; there is no such socket"):
        docker_backend(tmp_path, lambda *_: None, container={"docker_host": f"unix://{tmp_path}/nothing.sock"})


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"runtime": "runsc-of-nobody"}, "sandbox.runtime 'runsc-of-nobody' is unknown"),
        ({"network_mode": "restricted"}, "restricted cannot be enforced"),
        ({"allowed_options": ("privileged",)}, "names privileged"),
        ({"registry_config": "/nowhere/config.json"}, "registry_config /nowhere/config.json cannot be read"),
    ],
)
def test_a_node_that_cannot_keep_its_promises_does_not_start(
    api: docker.APIClient, tmp_path: Path, container: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        docker_backend(tmp_path, lambda *_: None, container=container)


def test_a_node_whose_directories_the_engine_does_not_see_does_not_start(api: docker.APIClient, tmp_path: Path) -> None:
    """As in a container whose data root is not the host's: here by a mount that only this process sees."""
    (root := tmp_path / "root").mkdir()
    code = (
        "from pathlib import Path; import sys; from sandfleet.errors import ConfigError\n"
        "from tests.docker.sandboxes import docker_backend\n"
        "try: docker_backend(Path(sys.argv[1]), print)\n"
        "except ConfigError as exc: print(exc)\n"
    )
    for hidden in (True, False):
        mount = 'mount -t tmpfs none "$1" && ' if hidden else ""
        shell = f'{mount}exec "$2" -c "$3" "$1"'
        argv = ["unshare", "--mount", "sh", "-c", shell, "sh", str(root), sys.executable, code]
        done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, done.stderr
        told = f"the Docker engine does not see this worker's directories {root} and {root}/run"
        assert (told in done.stdout) is hidden, done.stdout
    assert api.containers(all=True, filters={"label": "sandfleet.spec=probe"}) == []


# --- starts --------------------------------------------------------------------------------------


def test_an_image_that_is_not_there_and_may_not_be_pulled(world: World) -> None:
    error = fails(world, spec=SandboxSpec("docker", image="nowhere/at-all:1"))
    assert error.facts["reason"] == "no_image"
    assert "docker pull nowhere/at-all:1" in str(error)


def test_an_image_whose_registry_does_not_answer(api: docker.APIClient, tmp_path: Path) -> None:
    container = {"image": "localhost:1/nobody/here:1", "image_pull_policy": "IfNotPresent"}
    with docker_world(tmp_path, container=container) as world:
        error = fails(world)
        assert error.facts["reason"] == "no_image"
        assert "cannot be pulled" in str(error)
        assert "localhost:1/nobody/here:1" in str(error)


def test_an_image_without_a_shell(api: docker.APIClient, world: World) -> None:
    image = "sandfleet/test-empty:latest"
    api.import_image_from_data(b"\0" * 10240, repository="sandfleet/test-empty", tag="latest")
    try:
        error = fails(world, spec=SandboxSpec("docker", image=image))
        assert error.facts["reason"] == "image_unusable"
        assert "/bin/sh" in str(error)
    finally:
        api.remove_image(image, force=True)


def test_a_mount_whose_source_is_not_there(world: World, tmp_path: Path) -> None:
    error = fails(world, mounts=((tmp_path / "missing", "/mnt/skills", True),))
    assert error.facts["reason"] == "bad_mount"
    assert str(tmp_path / "missing") in str(error)


def test_a_directory_of_the_thread_that_is_not_there(world: World, tmp_path: Path) -> None:
    assert fails(world, user_data=tmp_path / "missing").facts["reason"] == "data_missing"


def test_what_the_engine_refuses_is_told_in_its_own_words(api: docker.APIClient, tmp_path: Path) -> None:
    with docker_world(tmp_path, container={"memory_bytes": 4 * 1024**2}) as world:
        error = fails(world)
        assert error.facts["reason"] == "engine_error"
        assert "Minimum memory limit allowed is 6MB" in str(error)


def test_a_name_that_somebody_else_has(world: World, api: docker.APIClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandfleet_workers.backends.docker.backend.secrets.token_hex", lambda size: "ab" * size)
    name = f"sandfleet-{docker_of(world)._data_id[:8]}-n1-{'ab' * 8}"
    other = api.create_container(SANDBOX_IMAGE, ["true"], name=name)
    try:
        error = fails(world)
        assert error.facts["reason"] == "name_conflict"
        assert api.inspect_container(other)["State"]["Status"] == "created", "it was not ours to touch"
    finally:
        api.remove_container(other, force=True)


def test_a_name_that_a_dead_start_of_ours_has(world: World, api: docker.APIClient) -> None:
    plan = replace(world.plan(), identity=None)
    labels = docker_of(world)._labels_of(plan.sandbox_id, world.backend.digest(plan.spec))
    name = f"sandfleet-{docker_of(world)._data_id[:8]}-n1-{plan.sandbox_id}"
    no_network = api.create_host_config(network_mode="none")
    old = api.create_container(SANDBOX_IMAGE, ["sleep", "60"], name=name, labels=labels, host_config=no_network)
    api.start(old)
    world.backend.create(plan)
    assert docker_of(world).container_of(plan.sandbox_id) != old["Id"]
    world.backend.destroy(plan.sandbox_id)


def test_a_container_whose_creation_was_not_answered_is_taken(proxy: EngineProxy, tmp_path: Path) -> None:
    with docker_world(tmp_path, container={"docker_host": proxy.address}) as world:
        world.backend.create(world.plan())  # everything but the creation itself is known from here on
        proxy.lose_answer_to = f"POST /v{docker_of(world)._engine.api.api_version}/containers/create".encode()
        plan = world.plan()
        connection = world.backend.create(plan)
        assert proxy.lose_answer_to is None, "the answer was not lost"
        assert output_of(world, connection, "echo there") == "there\n"
        assert world.backend.leftovers() == {}


def test_no_more_starts_at_once_than_the_settings_say(
    api: docker.APIClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    start = engine_module.Engine.start

    def counted(self: engine_module.Engine, container: str) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        try:
            start(self, container)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(engine_module.Engine, "start", counted)
    with docker_world(tmp_path, start_concurrency=2) as world:
        threads = [threading.Thread(target=world.backend.create, args=(world.plan(),)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert len(world.backend.running()) == 5
        assert most == 2


# --- an engine that comes and goes ---------------------------------------------------------------


def test_sandboxes_work_while_the_engine_is_away_and_are_removed_when_it_is_back(
    proxy: EngineProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_AWAY_S", 0.3)
    with docker_world(tmp_path, container={"docker_host": proxy.address}) as world:
        plan = world.plan()
        connection = world.backend.create(plan)
        proxy.go_away()
        assert output_of(world, connection, "echo on") == "on\n"
        assert world.backend.probe(plan.sandbox_id) is Liveness.ALIVE
        assert fails_to_start(world).facts["reason"] == "no_daemon"
        with pytest.raises(InternalError, match="cannot list containers now"):
            world.backend.leftovers()
        with pytest.raises(InternalError, match="cannot remove sandbox"):
            world.backend.destroy(plan.sandbox_id)
        assert plan.sandbox_id in world.backend.running(), "its place would be given away"
        proxy.come_back()
        world.backend.destroy(plan.sandbox_id)
        assert world.backend.running() == []
        assert world.backend.leftovers() == {}


def fails_to_start(world: World) -> StartFailed:
    with pytest.raises(StartFailed) as caught:
        world.backend.create(world.plan())
    return caught.value


def test_deaths_that_happened_while_the_engine_was_away_are_told(
    proxy: EngineProxy, api: docker.APIClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandfleet_workers.backends.docker.starting.open_pidfd", lambda pid, container: -1)
    with docker_world(tmp_path, container={"docker_host": proxy.address}) as world:
        died, lives = world.plan(), world.plan()
        for plan in (died, lives):
            world.backend.create(plan)
        proxy.go_away()
        api.remove_container(docker_of(world).container_of(died.sandbox_id), force=True)
        assert world.backend.probe(died.sandbox_id) is Liveness.UNKNOWN
        proxy.come_back()
        wait_for(lambda: world.deaths, "a report of the death")
        assert [death[0] for death in world.deaths] == [died.sandbox_id]
        assert world.backend.running() == [lives.sandbox_id]
