"""Sandboxes in containers, judged by the suite of all backends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sandfleet.backends import SandboxBackend
from sandfleet.testing.backend_contract import BackendContract
from tests.docker.sandboxes import docker_backend
from tests.services import require

pytestmark = pytest.mark.docker


class TestDockerBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def engine(self) -> None:
        require("docker")

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return docker_backend(root, on_death)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        os.kill(backend.pid_of(sandbox_id), signal.SIGKILL)  # type: ignore[attr-defined]
