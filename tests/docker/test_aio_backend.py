"""Containers of an AIO image: how they come to be, what they may, whom they reach."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandfleet.backends import Capability, Connection, Liveness, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.testing.backend_world import World
from tests.docker.sandboxes import docker_settings, docker_world, output_of
from tests.services import require

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    require("docker")
    from tests.docker.aio_image import aio_image  # noqa: PLC0415  (it needs the Docker SDK, which is an extra)

    with aio_image() as name:
        yield name


@contextmanager
def aio_world(root: Path, image: str, **container: Any) -> Iterator[World]:
    from tests.docker.aio_image import aio_backend  # noqa: PLC0415  (as above)

    deaths: list[tuple[str, str]] = []
    backend = aio_backend(root, lambda *death: deaths.append(death), image, **container)
    try:
        yield World(backend, root, deaths)
    finally:
        backend.close()


@pytest.fixture(scope="module")
def world(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One backend with one sandbox for the tests that change nothing."""
    with aio_world(tmp_path_factory.mktemp("aio"), image) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(world: World) -> tuple[SandboxPlan, Connection]:
    plan = world.plan()
    return plan, world.backend.create(plan)


def _engine(world: World) -> Any:
    return world.backend._engine.api  # type: ignore[attr-defined]


def _inspect(world: World, plan: SandboxPlan) -> dict[str, Any]:
    found: dict[str, Any] = _engine(world).inspect_container(world.backend.container_of(plan.sandbox_id))  # type: ignore[attr-defined]
    return found


def test_the_container_is_hardened_as_far_as_such_an_image_allows(
    world: World, sandbox: tuple[SandboxPlan, Connection]
) -> None:
    plan, connection = sandbox
    found = _inspect(world, plan)
    host = found["HostConfig"]
    assert sorted(host["CapAdd"]) == ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]
    assert (host["CapDrop"], host["SecurityOpt"], host["Privileged"]) == (["ALL"], ["no-new-privileges:true"], False)
    assert host["Memory"] == host["MemorySwap"] == 1024**3
    assert (host["PidsLimit"], host["NanoCpus"], host["IpcMode"]) == (256, 10**9, "private")
    assert not host["PortBindings"]
    assert found["NetworkSettings"]["Ports"] in ({}, {"8080/tcp": None})
    assert [(mount["Destination"], mount["RW"]) for mount in found["Mounts"]] == [("/mnt/user-data", True)]
    assert "token" not in " ".join(found["Config"]["Env"]).lower()
    # CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID are bits 0, 1, 3, 6 and 7.
    assert output_of(world, connection, "grep CapBnd /proc/self/status").split()[1].lstrip("0") == "cb"


def test_without_a_network_nothing_beyond_the_node_is_reached(
    world: World, sandbox: tuple[SandboxPlan, Connection]
) -> None:
    plan, connection = sandbox
    (name,) = _inspect(world, plan)["NetworkSettings"]["Networks"]
    network = _engine(world).inspect_network(name)
    assert network["Internal"] is True
    assert network["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    # The engine's resolver would carry names out of such a network; it is told to ask nobody.
    assert _inspect(world, plan)["HostConfig"]["Dns"] == ["192.0.2.1"]
    assert output_of(world, connection, "timeout 3 getent hosts a-secret.example.org || echo nobody") == "nobody\n"


def test_sandboxes_do_not_reach_each_others_servers(world: World, sandbox: tuple[SandboxPlan, Connection]) -> None:
    plan, connection = sandbox
    (network,) = _inspect(world, plan)["NetworkSettings"]["Networks"].values()
    other_plan = world.plan()
    other = world.backend.create(other_plan)
    knock = f"timeout 3 bash -c 'echo > /dev/tcp/{network['IPAddress']}/8080' 2>/dev/null && echo open || echo closed"
    assert output_of(world, other, knock) == "closed\n"
    assert output_of(world, connection, knock) == "open\n", "nothing listens there at all, so this proves nothing"
    world.backend.destroy(other_plan.sandbox_id)


def test_a_connection_speaks_to_its_own_container_only(world: World, sandbox: tuple[SandboxPlan, Connection]) -> None:
    """An address that another container has by now is told by the name of its host."""
    from sandfleet_workers.backends.aio.connection import AioConnection, AioDialect  # noqa: PLC0415  (the extra)
    from sandfleet_workers.backends.aio.endpoint import AioEndpoint  # noqa: PLC0415  (the extra)

    plan, _ = sandbox
    (network,) = _inspect(world, plan)["NetworkSettings"]["Networks"].values()
    endpoint = AioEndpoint(network["IPAddress"], 8080, b"another-slot", world.backend.token)  # type: ignore[attr-defined]
    stranger = AioConnection(endpoint, sandbox_id="ab", liveness=lambda: Liveness.ALIVE, dialect=AioDialect({}))
    try:
        assert world.code(stranger, "execute_command", command="true") == "sandbox_lost"
    finally:
        stranger.close()


def test_a_blank_container_becomes_a_threads(world: World) -> None:
    assert Capability.BLANKS in world.backend.capabilities
    slot = world.plan()
    blank = SandboxPlan(slot.sandbox_id, None, 0, slot.user_data, slot.run_dir, slot.spec)
    world.backend.create(blank)
    (slot.user_data / "workspace" / "mine").write_bytes(b"here")
    connection = world.backend.claim(blank.sandbox_id, "abcdef0123")
    assert world.read(connection, "mine") == b"here"
    assert world.backend.probe("abcdef0123") is Liveness.ALIVE
    assert blank.sandbox_id not in world.backend.running()
    world.backend.destroy("abcdef0123")


def test_docker_sandboxes_of_the_same_node_are_left_alone(world: World, tmp_path: Path) -> None:
    with docker_world(world.root) as docker:
        plan = docker.plan()
        docker.backend.create(plan)
        assert world.backend.leftovers() == {}
        assert docker.backend.leftovers() == {}, "the sandboxes of the aio backend are none of the docker backend's"
        docker.backend.destroy(plan.sandbox_id)


def test_a_server_that_never_answers_is_given_up_and_nothing_is_left(image: str, tmp_path: Path) -> None:
    from tests.docker.aio_image import TokenBackend  # noqa: PLC0415  (the extra)

    class Hasty(TokenBackend):
        ready_s: ClassVar[float] = 1.0

    settings = docker_settings(tmp_path, container={"image": image, "container_port": 9}, start_timeout_s=1.0)
    backend = Hasty(settings, lambda *_: None)
    try:
        with pytest.raises(StartFailed, match="container_port") as caught:
            backend.create(World(backend, tmp_path, []).plan())
        assert caught.value.facts["reason"] == "not_ready"
        assert backend.running() == []
        assert backend.leftovers() == {}
    finally:
        backend.close()
    assert not _networks(backend._data_id)


def test_an_image_whose_server_ends_is_told_so_at_once(tmp_path: Path) -> None:
    from sandfleet_workers.backends.docker.policy import DEFAULT_IMAGE  # noqa: PLC0415  (the extra)

    with aio_world(tmp_path, DEFAULT_IMAGE) as world:  # its shell finds no terminal and ends
        with pytest.raises(StartFailed) as caught:
            world.backend.create(world.plan())
        assert caught.value.facts["reason"] == "died"
        assert world.backend.leftovers() == {}


def _networks(data_id: str) -> list[str]:
    names = subprocess.run(
        ["docker", "network", "ls", "--format", "{{.Name}}"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.split()
    return [name for name in names if data_id[:8] in name]
