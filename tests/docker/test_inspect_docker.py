"""``inspect`` of a container: what isolates it, and that an image without Python is slower."""

from __future__ import annotations

import json

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.docker.images import BUSYBOX, require_image
from tests.services import require

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_a_sandbox_of_an_image_without_python_says_that_it_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    require("docker")
    require("redis")
    require_image(BUSYBOX)
    with (
        Stack(1, backend="docker", image=BUSYBOX, blank_pool=0, replicas=2, acquire_timeout_s=60.0) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        sandbox_id = provider.acquire("alice")
        capsys.readouterr()
        assert main(["--redis-url", stack.settings.redis_url, "inspect", sandbox_id, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        provider.destroy(sandbox_id)
    assert told["shown_backend"] == "docker (container)"
    assert told["health"]["status"] == "alive"
    assert "docker exec, slower: the image has no Python" in told["health"]["detail"]
