"""Every backend is judged by the same suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import SandboxBackend
from sandfleet.errors import ConfigError
from sandfleet.testing.backend import MockBackend
from sandfleet.testing.backend_contract import BackendContract
from sandfleet.testing.surviving import MockEngine, SurvivingMockBackend
from sandfleet_workers.backends import known_backends, load_backend
from sandfleet_workers.backends.local import LocalBackend, LocalSettings
from tests.services import require

THIRD_PARTY = Path(__file__).with_name("sample_backend")


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of somebody else's, as if installed."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))


class TestMockBackend(BackendContract):
    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return MockBackend(None, on_death)

    def teach(self, backend: SandboxBackend, command: str, **answer: Any) -> None:
        assert isinstance(backend, MockBackend)
        backend.set_output(command, answer.pop("stdout", ""), **answer)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, MockBackend)
        backend.kill(sandbox_id)


class TestSurvivingMockBackend(TestMockBackend):
    @pytest.fixture(autouse=True)
    def engine(self) -> None:
        self.lives = MockEngine()

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return SurvivingMockBackend(None, on_death, engine=self.lives)


class TestLocalBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def bwrap(self) -> None:
        require("bwrap")

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return LocalBackend(LocalSettings(data_root=root), on_death)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, LocalBackend)
        os.kill(backend.pid_of(sandbox_id), signal.SIGKILL)


class TestThirdPartyBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def installed(self, third_party: None) -> None: ...

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return load_backend("sample")(None, on_death)


def test_the_built_in_backends_need_no_installed_distribution() -> None:
    assert load_backend("local") is LocalBackend
    assert load_backend("mock") is MockBackend


@pytest.mark.usefixtures("third_party")
def test_a_declared_backend_is_known_by_name() -> None:
    assert "sample" in known_backends()
    assert load_backend("sample").name == "sample"


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("name", "words"),
    [("docket", "known here: .*local, mock, .*sample"), ("broken", "cannot be imported"), ("odd", "no SandboxBackend")],
)
def test_a_backend_that_cannot_be_used_is_a_configuration_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_backend(name)
