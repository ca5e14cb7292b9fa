"""The images hold what is promised of them, and nothing that would help somebody who is inside."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from sandfleet import __version__
from tests.services import CHECKOUT, SANDBOX_IMAGE, SERVICE_IMAGE, build_images, require

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first build on a machine downloads everything
]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    require("docker")
    build_images()


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"docker {' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


def in_sandbox(script: str, *options: str) -> str:
    """What ``script`` prints in a container as strict as a sandbox is."""
    strict = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--tmpfs=/tmp"]
    return docker("run", "--rm", *strict, *options, SANDBOX_IMAGE, "bash", "-euc", script).strip()


def test_a_sandbox_runs_as_a_user_without_rights() -> None:
    assert in_sandbox("id -u; id -g; id -G; id -un").split() == ["10001", "10001", "10001", "sandbox"]


def test_no_program_of_a_sandbox_changes_its_user() -> None:
    found = docker("run", "--rm", "--user=0", SANDBOX_IMAGE, "find", "/", "-xdev", "-type", "f", "-perm", "/6000")
    assert found == ""
    capable = docker("run", "--rm", "--user=0", SANDBOX_IMAGE, "bash", "-c", "getcap -r / 2>/dev/null || true")
    assert capable == ""


def test_a_sandbox_has_the_whole_python_by_both_names() -> None:
    whole = "import ctypes, json, lzma, sqlite3, ssl, venv, sys; print(sys.version_info >= (3, 8))"
    assert in_sandbox(f'python -c "{whole}"; python3 -c "{whole}"').split() == ["True", "True"]


def test_a_sandbox_has_the_tools_agents_reach_for() -> None:
    script = 'for tool in bash git rg grep find curl file less ps tar gzip xz zip unzip; do command -v "$tool"; done'
    assert len(in_sandbox(script).split()) == 14
    made = in_sandbox("cd /tmp; git init -q r; cd r; echo needle > a; git add a; git status --short; rg -n needle")
    assert made.splitlines() == ["A  a", "a:1:needle"]


def test_text_in_a_sandbox_is_utf8() -> None:
    assert in_sandbox(
        """printf 'gr\\303\\274n' | wc -m; python -c 'print("grün", __import__("sys").getfilesystemencoding())'"""
    ) == ("4\ngrün utf-8")


def test_the_mount_points_are_there_and_empty() -> None:
    places = "/mnt/user-data /mnt/skills /mnt/acp-workspace /.sandfleet"
    assert in_sandbox(f"ls -A {places} | grep -v : | grep . || true; readlink /workspace") == "/mnt/user-data/workspace"
    assert in_sandbox("pwd; touch here", "--tmpfs=/mnt/user-data/workspace:uid=10001", "--workdir=/workspace") == (
        "/mnt/user-data/workspace"
    )


def test_the_service_tells_its_version() -> None:
    assert docker("run", "--rm", SERVICE_IMAGE, "--version").strip() == f"sandfleet {__version__}"


def test_the_service_runs_without_rights_unless_told_otherwise() -> None:
    assert docker("run", "--rm", "--entrypoint=id", SERVICE_IMAGE, "-u").strip() == "10002"


def test_the_service_has_every_role_and_backend_it_is_used_for() -> None:
    script = (
        "import flower, docker, prometheus_client, rich, sandfleet_scheduler.tasks, sandfleet_workers.worker\n"
        "from importlib.metadata import entry_points\n"
        "print(sorted(entry.name for entry in entry_points(group='sandfleet.backends') if entry.load()))"
    )
    told = docker("run", "--rm", "--entrypoint=python", SERVICE_IMAGE, "-c", script)
    assert {"docker", "local"} <= set(re.findall(r"\w+", told))


def test_the_service_holds_exactly_the_locked_packages() -> None:
    lock = (CHECKOUT / "requirements.lock").read_text()
    locked = {name.replace("_", "-"): number for name, number in re.findall(r"^([\w.-]+)==(\S+)", lock, flags=re.M)}
    listed = docker("run", "--rm", "--entrypoint=pip", SERVICE_IMAGE, "list", "--format=json", "--exclude=pip")
    installed = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(listed)}
    assert installed.pop("sandfleet") == __version__
    installed.pop("setuptools", None)  # a venv of Python 3.11 brings it
    assert len(installed) > 30
    assert {name: locked.get(name) for name in installed} == installed


@pytest.mark.parametrize("image", [SANDBOX_IMAGE, SERVICE_IMAGE])
def test_no_image_carries_a_secret_or_a_package_list(image: str) -> None:
    [facts] = json.loads(docker("image", "inspect", image))
    told = " ".join(facts["Config"]["Env"])
    assert not re.search(r"PASSWORD|TOKEN|SECRET|INDEX", told)
    assert docker("run", "--rm", "--entrypoint=ls", image, "/var/lib/apt/lists").strip() == ""
