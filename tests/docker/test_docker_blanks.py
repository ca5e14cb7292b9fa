"""Containers that belong to nobody yet, and those that belong to nobody any more (catalogue C17)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from sandfleet.backends import Liveness, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.testing.backend_world import World, wait_for
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.docker.sandboxes import docker_world, output_of
from tests.services import SANDBOX_IMAGE, require

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


@pytest.fixture(scope="module")
def world(api: docker.APIClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with docker_world(tmp_path_factory.mktemp("docker")) as made:
        yield made


def docker_of(world: World) -> DockerBackend:
    assert isinstance(world.backend, DockerBackend)
    return world.backend


def blank_of(world: World, slot: str) -> SandboxPlan:
    """The plan of a blank sandbox with a directory of its own."""
    return replace(world.plan(slot), sandbox_id=slot, identity=None, epoch=0)


def given_to_thread(plan: SandboxPlan, thread: SandboxPlan) -> None:
    """What a claim does to the directories of a thread that is new."""
    for child in thread.user_data.iterdir():
        child.rmdir()
    thread.user_data.rmdir()
    plan.user_data.rename(thread.user_data)
    plan.user_data.symlink_to(thread.user_data)


# --- blanks --------------------------------------------------------------------------------------


def test_a_claimed_sandbox_is_the_threads_in_every_respect(world: World, api: docker.APIClient) -> None:
    plan, thread = blank_of(world, "b1a0"), world.plan()
    blank = world.backend.create(plan)
    container = docker_of(world).container_of("b1a0")
    assert api.inspect_container(container)["Config"]["Labels"]["sandfleet.slot"] == "b1a0"
    assert world.backend.running() == ["b1a0"]
    given_to_thread(plan, thread)
    claimed = world.backend.claim("b1a0", thread.sandbox_id)
    assert claimed is blank
    assert world.backend.running() == [thread.sandbox_id]
    assert world.backend.probe(thread.sandbox_id) is Liveness.ALIVE
    assert world.backend.probe("b1a0") is Liveness.DEAD
    assert docker_of(world).container_of(thread.sandbox_id) == container
    output_of(world, claimed, "echo mine > /mnt/user-data/outputs/a")
    assert (thread.user_data / "outputs" / "a").read_text() == "mine\n"
    assert world.backend.leftovers() == {}
    world.backend.destroy("b1a0")
    assert world.backend.probe(thread.sandbox_id) is Liveness.ALIVE
    os.kill(docker_of(world).pid_of(thread.sandbox_id), signal.SIGKILL)
    wait_for(lambda: world.deaths, "a report of the death")
    assert world.deaths == [(thread.sandbox_id, "killed by SIGKILL")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root worker can give files to others")
def test_what_a_returning_thread_brings_becomes_the_sandboxs_own(world: World) -> None:
    plan, thread = blank_of(world, "b1a1"), world.plan()
    world.backend.create(plan)
    given_to_thread(plan, thread)
    workspace = thread.user_data / "workspace"
    (workspace / "old").write_text("of another user\n")
    for path in (workspace, workspace / "old"):
        os.chown(path, 1_900_000_123, 1_900_000_123)
    claimed = world.backend.claim("b1a1", thread.sandbox_id)
    assert output_of(world, claimed, "echo more >> old; cat old") == "of another user\nmore\n"
    world.backend.destroy(thread.sandbox_id)


def test_a_blank_that_is_gone_cannot_be_claimed(world: World) -> None:
    plan, thread = blank_of(world, "b1a2"), world.plan()
    world.backend.create(plan)
    os.kill(docker_of(world).pid_of("b1a2"), signal.SIGKILL)
    wait_for(lambda: "b1a2" not in world.backend.running(), "the end of the blank")
    for slot in ("b1a2", "never"):
        with pytest.raises(StartFailed) as caught:
            world.backend.claim(slot, thread.sandbox_id)
        assert caught.value.facts["reason"] == "blank_gone"
    assert world.backend.running() == []


# --- leftovers -----------------------------------------------------------------------------------


def test_what_dead_nodes_of_this_data_root_left_is_found_and_nothing_else(
    world: World, api: docker.APIClient, tmp_path: Path
) -> None:
    ours, theirs = world.plan(), None
    world.backend.create(ours)
    labels = {**docker_of(world)._labels, "sandfleet.node": "dead-1", "sandfleet.slot": "5107"}
    none = api.create_host_config(network_mode="none")
    left = api.create_container(SANDBOX_IMAGE, ["sleep", "60"], labels=labels, name="sf-left-5107", host_config=none)
    api.start(left)
    foreign = {**labels, "sandfleet.deployment": "0" * 32}
    api.create_container(SANDBOX_IMAGE, ["sleep", "60"], labels=foreign, name="sf-other-5107", host_config=none)
    try:
        with docker_world(tmp_path) as neighbour:  # another data root on the same engine
            theirs = neighbour.plan()
            neighbour.backend.create(theirs)
            assert neighbour.backend.leftovers() == {}
            assert world.backend.leftovers() == {"dead-1": ["sf-left-5107"]}
            held = api.inspect_container(docker_of(world).container_of(ours.sandbox_id))["Name"].lstrip("/")
            for name in ("sf-left-5107", "sf-left-5107", "sf-other-5107", held, "no-such-container"):
                world.backend.remove_leftover(name)
            assert world.backend.leftovers() == {}
            assert api.inspect_container("sf-other-5107")["State"]["Status"] == "created"
            assert neighbour.backend.probe(theirs.sandbox_id) is Liveness.ALIVE
        assert world.backend.probe(ours.sandbox_id) is Liveness.ALIVE
        with pytest.raises(docker.errors.NotFound):
            api.inspect_container(left)
    finally:
        for name in ("sf-left-5107", "sf-other-5107"):
            try:
                api.remove_container(name, force=True)
            except docker.errors.NotFound:
                continue
        world.backend.destroy(ours.sandbox_id)


def test_a_node_that_was_killed_finds_its_own_at_its_next_start(world: World, tmp_path: Path) -> None:
    with docker_world(tmp_path) as first:
        plan = first.plan()
        first.backend.create(plan)
        with docker_world(tmp_path) as second:  # the same node's next run, as far as the engine can tell
            found = second.backend.leftovers()
            assert list(found) == ["n1"]
            assert second.backend.running() == []
            for name in found["n1"]:
                second.backend.remove_leftover(name)
            assert second.backend.leftovers() == {}
        wait_for(lambda: first.deaths, "a report of the death")
        assert first.deaths[0][0] == plan.sandbox_id
