"""Containers with a server of their own, judged by the suite of all backends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandfleet.backends import SandboxBackend
from sandfleet.testing.backend_contract import BackendContract
from tests.services import require

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    require("docker")
    from tests.docker.aio_image import aio_image  # noqa: PLC0415  (it needs the Docker SDK, which is an extra)

    with aio_image() as name:
        yield name


class TestAioBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def use_image(self, image: str) -> None:
        self.image = image

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        from tests.docker.aio_image import aio_backend  # noqa: PLC0415  (as above)

        return aio_backend(root, on_death, self.image)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        os.kill(backend.pid_of(sandbox_id), signal.SIGKILL)  # type: ignore[attr-defined]
