"""Containers that outlive their node: who is let back in, and what an upgrade meanwhile does to them (issue 5)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import docker
import pytest

from sandfleet.backends import Liveness
from sandfleet.errors import StartFailed
from sandfleet.model import SandboxSpec
from sandfleet.testing.backend_world import World, wait_for
from sandfleet_workers import sandboxd
from sandfleet_workers.backends.docker import attaching
from sandfleet_workers.backends.docker.backend import DockerBackend
from sandfleet_workers.backends.docker.starting import Starter
from tests.docker.images import BUSYBOX, require_image
from tests.docker.sandboxes import docker_backend, docker_world, output_of
from tests.services import SANDBOX_IMAGE, require

pytestmark = [
    pytest.mark.docker,
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket .*family=1:ResourceWarning"),
]


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


@contextmanager
def left_by(world: World, **given: Any) -> Iterator[World]:
    """The next run of a node that has let go of what it held; at the end nothing is left of either."""
    world.backend.detach()
    world.backend.close()
    with docker_world(world.root, **given) as after:
        try:
            yield after
        finally:
            for names in after.backend.leftovers().values():
                for name in names:
                    after.backend.remove_leftover(name)


def reason_of(world: World, sandbox_id: str, ticket: dict[str, Any]) -> str:
    """Why a sandbox is not attached; nothing is held then."""
    with pytest.raises(StartFailed) as caught:
        world.backend.attach(sandbox_id, ticket)
    assert sandbox_id not in world.backend.running()
    return str(caught.value.facts["reason"])


def docker_of(world: World) -> DockerBackend:
    assert isinstance(world.backend, DockerBackend)
    return world.backend


# --- who is let back in --------------------------------------------------------------------------


@pytest.mark.usefixtures("api")
def test_only_the_sandbox_with_the_key_is_taken_back(tmp_path: Path) -> None:
    with docker_world(tmp_path) as world:
        mine, other = world.plan(), world.plan()
        for plan in (mine, other):
            world.backend.create(plan)
        ticket, theirs = (world.backend.ticket(plan.sandbox_id) for plan in (mine, other))
        with left_by(world) as after:
            assert reason_of(after, "00000000", {**ticket, "key": theirs["key"]}) == "unreachable"
            assert reason_of(after, "00000000", {**ticket, "run_dir": theirs["run_dir"]}) == "unreachable"
            assert reason_of(after, "00000000", {**ticket, "key": "no hex"}) == "unreachable"
            assert reason_of(after, "00000000", {**ticket, "started_at": theirs["started_at"]}) == "gone"
            for plan, right in ((mine, ticket), (other, theirs)):
                output_of(after, after.backend.attach(plan.sandbox_id, right), "true")
            assert reason_of(after, "00000000", ticket) == "unreachable", "one is held once"


def test_a_ticket_that_names_somebody_elses_container_touches_nothing(api: docker.APIClient, tmp_path: Path) -> None:
    none = api.create_host_config(network_mode="none")
    foreign = api.create_container(SANDBOX_IMAGE, ["sleep", "300"], name="sf-foreign-5", host_config=none)["Id"]
    api.start(foreign)
    state = api.inspect_container(foreign)["State"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    try:
        with docker_world(tmp_path / "a") as world, docker_world(tmp_path / "b") as neighbour:
            plan, theirs = world.plan(), neighbour.plan()
            world.backend.create(plan)
            neighbour.backend.create(theirs)
            ticket = world.backend.ticket(plan.sandbox_id)
            stolen = neighbour.backend.ticket(theirs.sandbox_id)
            with left_by(world) as after:
                forged = {**ticket, "container": foreign, "pid": state["Pid"], "started_at": state["StartedAt"]}
                assert reason_of(after, plan.sandbox_id, forged) == "unreachable"
                assert reason_of(after, plan.sandbox_id, stolen) == "unreachable"
                after.backend.remove_leftover("sf-foreign-5")
                assert api.inspect_container(foreign)["State"]["Running"]
                assert neighbour.backend.probe(theirs.sandbox_id) is Liveness.ALIVE
    finally:
        api.remove_container(foreign, force=True)


@pytest.mark.usefixtures("api")
def test_a_run_directory_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    with docker_world(tmp_path) as world:
        plan = world.plan()
        world.backend.create(plan)
        ticket = world.backend.ticket(plan.sandbox_id)
        with left_by(world) as after:
            moved = plan.run_dir.with_name("moved")
            plan.run_dir.rename(moved)
            plan.run_dir.symlink_to(moved)
            assert reason_of(after, plan.sandbox_id, ticket) == "unreachable"
            outside = {**ticket, "run_dir": str(tmp_path / "run" / ".." / "run" / "moved")}
            assert reason_of(after, plan.sandbox_id, outside) == "unreachable"
            shutil.rmtree(moved)


def test_a_container_that_somebody_paused_is_unreachable_in_time(
    api: docker.APIClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_PROVED_WITHIN_S", 1.0)
    with docker_world(tmp_path) as world:
        plan = world.plan()
        world.backend.create(plan)
        ticket = world.backend.ticket(plan.sandbox_id)
        with left_by(world) as after:
            api.pause(ticket["container"])
            assert reason_of(after, plan.sandbox_id, ticket) == "unreachable"
            api.unpause(ticket["container"])
            after.backend.attach(plan.sandbox_id, ticket)
            after.backend.destroy(plan.sandbox_id)


def test_a_container_that_was_started_once_more_is_another_one(api: docker.APIClient, tmp_path: Path) -> None:
    with docker_world(tmp_path) as world:
        plan = world.plan()
        world.backend.create(plan)
        ticket = world.backend.ticket(plan.sandbox_id)
        with left_by(world) as after:
            api.kill(ticket["container"])
            assert reason_of(after, plan.sandbox_id, ticket) == "gone"
            api.restart(ticket["container"])  # sandboxd does not find its configuration any more
            assert reason_of(after, plan.sandbox_id, ticket) == "gone"


# --- other ways in -------------------------------------------------------------------------------


@pytest.mark.usefixtures("api")
def test_a_sandbox_with_a_network_is_taken_back_by_its_port(tmp_path: Path) -> None:
    container = {"network_mode": "full"}
    with docker_world(tmp_path, container=container) as world:
        plan = world.plan()
        connection = world.backend.create(plan)
        assert docker_of(world).transport_of(plan.sandbox_id) == "tcp"
        output_of(world, connection, "echo kept > /tmp/a")
        ticket = world.backend.ticket(plan.sandbox_id)
        with left_by(world, container=container) as after:
            assert reason_of(after, plan.sandbox_id, {**ticket, "token": "wrong"}) == "unreachable"
            assert output_of(after, after.backend.attach(plan.sandbox_id, ticket), "cat /tmp/a") == "kept\n"
            after.backend.destroy(plan.sandbox_id)


@pytest.mark.usefixtures("api")
def test_a_sandbox_without_python_is_taken_back_with_its_environment(tmp_path: Path) -> None:
    require_image(BUSYBOX)
    container = {"image": BUSYBOX}
    with docker_world(tmp_path, container=container) as world:
        plan = replace(world.plan(), spec=SandboxSpec("docker", env={"COLOUR": "green"}))
        connection = world.backend.create(plan)
        assert docker_of(world).transport_of(plan.sandbox_id) == "exec"
        output_of(world, connection, "echo kept > /tmp/a")
        ticket = world.backend.ticket(plan.sandbox_id)
        with left_by(world, container=container) as after:
            connection = after.backend.attach(plan.sandbox_id, ticket)
            assert output_of(after, connection, 'cat /tmp/a; echo "$COLOUR"') == "kept\ngreen\n"
            after.backend.destroy(plan.sandbox_id)


@pytest.mark.usefixtures("api")
def test_a_start_under_way_when_the_node_lets_go_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = docker_backend(tmp_path, lambda *_: None)
    world = World(backend, tmp_path, [])
    held = world.plan()
    backend.create(held)
    ticket = backend.ticket(held.sandbox_id)
    start, reached, go_on = Starter.start, [], []

    def slow(self: Starter, *args: Any) -> Any:
        made = start(self, *args)
        reached.append(made)
        wait_for(lambda: go_on, "the node letting go")
        return made

    monkeypatch.setattr(Starter, "start", slow)
    failures: list[str] = []

    def begin() -> None:
        try:
            backend.create(world.plan())
        except StartFailed as exc:
            failures.append(str(exc.facts["reason"]))

    starter = Thread(target=begin)
    starter.start()
    wait_for(lambda: reached, "a start")
    letting_go = Thread(target=backend.detach)
    letting_go.start()
    wait_for(lambda: backend.running() == [], "the end of its holding")
    go_on.append(True)
    for thread in (starter, letting_go):
        thread.join(30)
    assert failures == ["closing"]
    backend.close()
    with docker_world(tmp_path) as after:
        after.backend.attach(held.sandbox_id, ticket)
        assert after.backend.leftovers() == {}


# --- upgrades ------------------------------------------------------------------------------------


@pytest.fixture
def another_sandboxd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives the worker another version of the file."""

    def upgrade(version: str) -> None:
        source = original.read_text()
        path = tmp_path / f"sandboxd-{version}.py"
        path.write_text(source.replace(f'VERSION = "{was}"', f'VERSION = "{version}"'))
        monkeypatch.setattr(sandboxd, "PATH", path)
        sandboxd.digest.cache_clear()
        sandboxd.version.cache_clear()

    was, original = sandboxd.version(), sandboxd.PATH
    yield upgrade
    monkeypatch.undo()
    sandboxd.digest.cache_clear()
    sandboxd.version.cache_clear()


def copies(root: Path) -> set[str]:
    return {path.name for path in (root / "nodes" / "n1" / "sandboxd").iterdir()}


@pytest.mark.usefixtures("api")
def test_an_upgrade_of_the_worker_leaves_running_sandboxes_their_sandboxd(
    tmp_path: Path, another_sandboxd: Callable[[str], None]
) -> None:
    shown = "sha256sum /.sandfleet/sandboxd* | cut -c1-64"
    with docker_world(tmp_path) as world:
        plan = world.plan()
        connection = world.backend.create(plan)
        before = output_of(world, connection, shown)
        old = copies(tmp_path)
        ticket = world.backend.ticket(plan.sandbox_id)
        another_sandboxd("9.9.9")
        with left_by(world) as after:
            assert copies(tmp_path) == old, "a container has it mounted"
            fresh = after.plan()
            assert output_of(after, after.backend.create(fresh), shown) != before
            connection = after.backend.attach(plan.sandbox_id, ticket)
            assert output_of(after, connection, shown) == before
            assert after.backend.outdated() == [], "its image is the same"
            assert old < copies(tmp_path)
            after.backend.destroy(plan.sandbox_id)
            with left_by(after) as last:
                last.backend.create(last.plan())
                assert not old & copies(tmp_path), "nobody has it any more"


def test_a_sandbox_whose_image_was_replaced_is_outdated_and_one_whose_image_is_gone_is_not(
    api: docker.APIClient, tmp_path: Path
) -> None:
    image = f"sandfleet/test-moving-{os.getpid()}"
    api.tag(SANDBOX_IMAGE, image, "1")
    try:
        with docker_world(tmp_path, container={"image": f"{image}:1"}) as world:
            plan = world.plan()
            connection = world.backend.create(plan)
            assert world.backend.outdated() == []
            kind = world.backend.digest(plan.spec)
            made = api.create_container(
                SANDBOX_IMAGE, ["true"], host_config=api.create_host_config(network_mode="none")
            )
            api.commit(made["Id"], image, "1", changes=["LABEL moved=1"])
            api.remove_container(made["Id"])
            assert world.backend.outdated() == [plan.sandbox_id]
            assert world.backend.digest(plan.spec) != kind, "asked for anew, it is another kind at once"
            assert output_of(world, connection, "echo on") == "on\n"
            api.remove_image(f"{image}:1", force=True)
            assert world.backend.outdated() == []
            assert output_of(world, connection, "echo on") == "on\n"
    finally:
        subprocess.run(["docker", "rmi", "-f", f"{image}:1"], capture_output=True, check=False)
