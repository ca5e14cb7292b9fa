"""``doctor`` passes on what a backend finds on its machine, and fails for what was asked for only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandfleet.backends import Finding
from sandfleet.cli import doctor, doctor_storage
from sandfleet.cli.doctor_storage import checkpoint_storage
from sandfleet.config import Settings
from sandfleet.errors import ConfigError
from sandfleet.testing import MockBackend

HOLE = Finding("docker runc", "fail", "runc 1.0 has 3 known holes", "install another")
ENGINE = Finding("docker engine", "ok", "29.5.1")
AWAY = Finding("docker engine", "fail", "no engine answers", "start it", ready=False)

Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Make backends of these names be installed, each with what its examination finds or raises."""

    def install(**found: list[Finding] | Exception) -> None:
        def made(name: str) -> type[MockBackend]:
            if name not in found:
                raise ConfigError(f"no backend {name!r}")

            class Made(MockBackend):
                @classmethod
                def examine(cls, settings: object) -> list[Finding]:
                    said = found[name]
                    if isinstance(said, Exception):
                        raise said
                    return said

            return Made

        monkeypatch.setattr(doctor, "backend_class", made)

    return install


def of_backends(**settings: object) -> dict[str, Finding]:
    loaded = Settings.load({}, redis_url="redis://127.0.0.1:1/0", **settings)
    found = list(doctor.examine(loaded))
    return {one.name: one for one in found if one.name.startswith(("backend", "docker"))}


def test_what_the_configured_backend_finds_is_told_as_it_is(installed: Installed) -> None:
    installed(docker=[ENGINE, HOLE])
    found = of_backends(backend="docker")
    assert list(found) == ["backend docker", "docker engine", "docker runc"]
    assert found["docker runc"] == HOLE


def test_docker_beside_another_backend_never_fails(installed: Installed) -> None:
    installed(local=[], docker=[ENGINE, HOLE])
    found = of_backends(backend="local")
    assert found["docker"].status == "ok"
    assert "sandbox.backend: docker" in found["docker"].found
    assert (found["docker runc"].status, found["docker runc"].advice) == ("warn", HOLE.advice)


@pytest.mark.parametrize("docker", [[AWAY], [], RuntimeError("broken")])
def test_docker_that_is_not_there_is_not_mentioned(installed: Installed, docker: list[Finding] | Exception) -> None:
    installed(local=[], docker=docker)
    assert list(of_backends(backend="local")) == ["backend local"]


def test_docker_without_its_sdk_is_not_mentioned(installed: Installed) -> None:
    installed(local=[])
    assert list(of_backends(backend="local")) == ["backend local"]


def test_an_examination_that_raises_is_a_finding(installed: Installed) -> None:
    installed(docker=RuntimeError("broken"))
    found = of_backends(backend="docker")["backend docker"]
    assert (found.status, found.found) == ("fail", "RuntimeError: broken")


def test_a_disk_below_the_floor_fails(tmp_path: Path, installed: Installed) -> None:
    installed(local=[])
    settings = Settings.load({}, redis_url="redis://127.0.0.1:1/0", data_root=tmp_path, min_free_bytes=2**60)
    found = {one.name: one for one in doctor.examine(settings)}["data root"]
    assert found.status == "fail"
    assert "min_free_bytes" in found.advice


def test_the_storage_of_checkpoints_is_tried(tmp_path: Path) -> None:
    def found(url: str) -> Finding:
        return checkpoint_storage(Settings.load({}, checkpoint_url=url))

    assert found("").status == "warn"
    assert found(str(tmp_path / "new")).status == "ok"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("no directory")
    assert found(str(tmp_path / "file")).status == "fail"
    told = found("nosuch://key:secret@host/x")
    assert told.status == "fail"
    assert "secret" not in told.found


def test_a_storage_that_hangs_holds_doctor_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(doctor_storage, "_use", lambda *_: hang.wait(60))
    try:
        told = checkpoint_storage(Settings.load({}, checkpoint_url="/x"), within_s=0.05)
    finally:
        hang.set()
    assert (told.status, "no answer" in told.found) == ("fail", True)
