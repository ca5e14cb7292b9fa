"""A newer image under the same name: warm and blank sandboxes are replaced, those in use stay (issue 5, point 5)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from sandfleet import SandboxProvider
from sandfleet.stack import Stack
from tests.services import SANDBOX_IMAGE, require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(240)]


def docker(*args: str) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def image() -> Iterator[str]:
    require("docker")
    require("redis")
    name = f"sandfleet/test-rolling-{os.getpid()}:1"
    docker("tag", SANDBOX_IMAGE, name)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=False)


def moved(image: str) -> str:
    """Another image has its name now; its id."""
    made = docker("create", "--network", "none", SANDBOX_IMAGE, "true")
    docker("commit", "--change", "LABEL rolled=1", made, image)
    docker("rm", made)
    return docker("image", "inspect", "--format", "{{.Id}}", image)


def images_of(stack: Stack) -> dict[str, str]:
    """Container → image id, of the fleet's."""
    deployment = (stack.settings.data_root / "data-id").read_text().strip()
    names = docker("ps", "--quiet", "--filter", f"label=sandfleet.deployment={deployment}").split()
    told = docker("inspect", "--format", "{{.Id}} {{.Image}}", *names) if names else ""
    return dict(line.split() for line in told.splitlines())


def test_a_moved_tag_rolls_what_nobody_uses_within_about_a_minute(image: str) -> None:
    env = {"SANDFLEET_IMAGE": image, "SANDFLEET_IMAGE_PULL_POLICY": "Never"}
    with (
        Stack(1, backend="docker", lease_s=3.0, replicas=4, blank_pool=1, reserve_free=0, env=env) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        used, warm = (provider.get(provider.acquire(thread)) for thread in ("used", "warm"))
        assert used is not None
        assert warm is not None
        warm.write_file("kept", "mine")
        provider.release(warm.id)
        wait_until(lambda: sum(sum(view.blanks.values()) for view in stack.store.nodes()) == 1, 60)
        before = images_of(stack)
        assert len(before) == 3
        new = moved(image)
        # The one that is in use, and a new blank one.
        wait_until(lambda: sorted(images_of(stack).values()) == sorted([*set(before.values()), new]), 100)
        assert used.run("echo on").stdout == "on\n"
        assert [info.thread_id for info in provider.list()] == ["used"]
        again = provider.get(provider.acquire("warm"))
        assert again is not None
        assert again.read_file("kept") == "mine"
        provider.release(used.id)
        wait_until(lambda: set(images_of(stack).values()) == {new}, 100)
