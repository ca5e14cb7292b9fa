"""Every backend is judged by the same suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import SandboxBackend
from sandfleet.testing.backend import MockBackend
from sandfleet.testing.backend_contract import BackendContract
from sandfleet_workers.backends.local import LocalBackend, LocalSettings
from tests.services import require


class TestMockBackend(BackendContract):
    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return MockBackend(None, on_death)

    def teach(self, backend: SandboxBackend, command: str, **answer: Any) -> None:
        assert isinstance(backend, MockBackend)
        backend.set_output(command, answer.pop("stdout", ""), **answer)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, MockBackend)
        backend.kill(sandbox_id)


class TestLocalBackend(BackendContract):
    @pytest.fixture(autouse=True, scope="class")
    def bwrap(self) -> None:
        require("bwrap")

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return LocalBackend(LocalSettings(data_root=root), on_death)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, LocalBackend)
        os.kill(backend.pid_of(sandbox_id), signal.SIGKILL)
