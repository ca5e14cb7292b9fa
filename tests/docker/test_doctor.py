"""``doctor`` and ``inspect`` against a real engine."""

from __future__ import annotations

import gc
import json
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Finding
from sandfleet.cli import main
from sandfleet.config import Settings
from sandfleet.installed_backends import backend_class
from sandfleet.known_bad import is_distribution_build
from sandfleet_workers.backends.docker.examine import access, examine, host_path
from tests.services import require

pytestmark = pytest.mark.docker

IMAGE = "sandfleet/sandbox:latest"
ABSENT = "sandfleet.invalid/there/is/no:such"


@pytest.fixture(autouse=True)
def engine() -> None:
    require("docker")


def look(image: str = IMAGE, **settings: Any) -> dict[str, Finding]:
    return {found.name: found for found in examine(Settings.load({}, backend="docker", **settings), image)}


def test_an_engine_that_answers_is_examined_from_its_version_to_its_disk() -> None:
    found = look()
    names = ["engine", "version", "containerd", "runc", "runtime", "confinement", "cgroup", "image", "access", "disk"]
    assert [name for name in (f"docker {name}" for name in names) if name not in found] == []
    assert "API 1." in found["docker engine"].found
    assert found["docker image"].status == "ok"
    assert all(finding.advice for finding in found.values() if finding.status != "ok")
    assert [finding for finding in found.values() if not finding.ready] == []


def test_a_distributions_runc_is_no_failure() -> None:
    runc = look()["docker runc"]
    if is_distribution_build(runc.found):
        assert runc.status in ("ok", "warn")
    assert runc.found.startswith("runc ")


def test_an_image_that_is_neither_here_nor_to_be_had_fails_and_says_what_to_type() -> None:
    image = look(ABSENT)["docker image"]
    assert (image.status, image.ready) == ("fail", False)
    assert f"docker pull {ABSENT}" in image.advice


def test_an_image_that_may_not_be_pulled_is_not_asked_for() -> None:
    image = look(ABSENT, image_pull_policy="Never")["docker image"]
    assert (image.status, image.ready) == ("fail", False)
    assert "Never" in image.found


def test_a_runtime_that_the_engine_does_not_know_fails() -> None:
    runtime = look(runtime="no-such-runtime")["docker runtime"]
    assert (runtime.status, runtime.ready) == ("fail", False)


def test_a_socket_that_nobody_answers_is_one_finding(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # The SDK leaves the socket of a connect that failed to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        [away] = look(docker_host=f"unix://{tmp_path}/docker.sock").values()
        gc.collect()
    assert (away.status, away.ready) == ("fail", False)
    assert "docker.sock" in away.advice


def test_a_socket_that_everybody_may_use_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.create_server(str(path), family=socket.AF_UNIX):
        path.chmod(0o660)
        assert access(f"unix://{path}", is_local=True).status == "ok"
        path.chmod(0o666)
        found = access(f"unix://{path}", is_local=True)
    assert found.status == "warn"
    assert f"chmod 660 {path}" in found.advice


def test_an_engine_on_the_network_without_tls_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_TLS_VERIFY", raising=False)
    assert access("tcp://10.0.0.5:2375", is_local=False).status == "warn"
    assert access("ssh://me@10.0.0.5", is_local=False).status == "ok"
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert access("tcp://10.0.0.5:2376", is_local=False).status == "ok"


def test_the_command_tells_it_as_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--redis-url", "redis://127.0.0.1:1/0"])
    told = json.loads(capsys.readouterr().out)
    assert code == 1  # no Redis there
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["docker engine"]["status"] == "ok"
    assert "not used" in checks["docker"]["found"]
    assert not [name for name, check in checks.items() if name.startswith("docker") and check["status"] == "fail"]


def test_the_backend_examines_its_own_image() -> None:
    kind = backend_class("docker")
    found = {one.name: one for one in kind.examine(Settings.load({}, backend="docker", image=ABSENT))}
    assert ABSENT in found["docker image"].found


# --- the worker's own paths, as the engine's host has them ------------------------------------------

MOUNTS = [
    {"Destination": "/var/lib/sandfleet", "Source": "/var/lib/sandfleet"},
    {"Destination": "/data", "Source": "/srv/other"},
    {"Destination": "/data/inner", "Source": "/data/inner"},
]


@pytest.mark.parametrize(
    ("path", "outside"),
    [
        ("/var/lib/sandfleet", "/var/lib/sandfleet"),
        ("/var/lib/sandfleet/data", "/var/lib/sandfleet/data"),
        ("/data/x", "/srv/other/x"),
        ("/data/inner/x", "/data/inner/x"),
        ("/var/lib/sandfleet-2", None),
    ],
)
def test_a_path_of_a_container_is_found_on_the_host_by_its_nearest_mount(path: str, outside: str | None) -> None:
    assert host_path(MOUNTS, Path(path)) == (None if outside is None else Path(outside))


# --- limits of single threads ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "wanted", "status"),
    [("no quotas", 0, "warn"), ("no quotas", 2**30, "fail"), ("", 0, "warn"), ("", 2**30, "ok")],
)
def test_limits_of_threads_that_are_wanted_and_do_not_hold_are_a_failure(
    problem: str, wanted: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandfleet_workers.backends.docker.examine.quota_problem", lambda _: problem)
    found = look(disk_bytes=wanted, data_root=tmp_path / "not" / "made" / "yet")["thread limits"]
    assert found.status == status
    assert status == "ok" or found.advice
