"""The Docker backend against Podman's API socket. Podman is no part of CI: without it these are skipped.

The service is the tests' own, with its own storage, so nothing of the machine's Podman is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from sandfleet.backends import Connection, Liveness
from sandfleet.errors import NotStarted, SandboxLost
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.docker.images import BUSYBOX, busybox_archive
from tests.docker.sandboxes import docker_backend, docker_world
from tests.services import require, wait_until

pytestmark = pytest.mark.docker
PYTHON = "sandfleet/sandbox:dev"
_SYS_RESOURCE = 24
#: Podman as root asks for more processes than a machine without CAP_SYS_RESOURCE may give.
_FITTING_RUNTIME = """#!{python}
import json, os, sys

def fit(path, process_of):
    with open(path) as file:
        spec = json.load(file)
    process = process_of(spec)
    process["rlimits"] = [each for each in process.get("rlimits") or [] if each["type"] != "RLIMIT_NPROC"]
    with open(path, "w") as file:
        json.dump(spec, file)

argv = sys.argv
if "--bundle" in argv:
    fit(os.path.join(argv[argv.index("--bundle") + 1], "config.json"), lambda spec: spec["process"])
if "--process" in argv:
    fit(argv[argv.index("--process") + 1], lambda spec: spec)
os.execv("{runtime}", ["{runtime}", *argv[1:]])
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Podman of our own, with both images."""
    program, runtime = shutil.which("podman"), shutil.which("crun") or shutil.which("runc")
    if program is None or runtime is None:
        pytest.skip("Podman is not installed")
    if os.geteuid() != 0:
        pytest.skip("needs root, as a Podman for several users does")
    require("docker")  # the Python image comes from there
    root = tmp_path_factory.mktemp("podman")
    options = {
        "root": root / "storage",
        "runroot": root / "run",
        "tmpdir": root / "tmp",
        "network-config-dir": root / "net",
        "cgroup-manager": "cgroupfs",
        "events-backend": "file",
        "runtime": _runtime(root, runtime),
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    # Podman keeps a watcher of each ended exec for five minutes unless it is told otherwise.
    (root / "containers.conf").write_text("[engine]\nexit_command_delay = 1\n")
    environment = {**os.environ, "CONTAINERS_CONF": str(root / "containers.conf")}

    def end(*command: str) -> None:
        subprocess.run([program, *flags, *command], env=environment, capture_output=True, check=False)

    address = f"unix://{root}/podman.sock"
    with (root / "log").open("wb") as log:
        command = [program, *flags, "system", "service", "--time=0", address]
        service = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until((root / "podman.sock").exists, deadline_s=30, story=lambda: (root / "log").read_text())
        client = docker.APIClient(address, version="auto", timeout=120)
        changes = ["ENV PATH=/bin"]
        client.import_image_from_data(
            busybox_archive(), repository=BUSYBOX.partition(":")[0], tag="latest", changes=changes
        )
        _load_python(client)
        yield address
        assert client.containers(all=True) == []
        client.close()
    finally:
        end("rm", "--all", "--force")
        os.killpg(service.pid, signal.SIGTERM)
        service.wait(30)
        end("system", "reset", "--force")
        wait_until(lambda: not _processes_of(root), deadline_s=30, story=lambda: str(_processes_of(root)))


def _processes_of(root: Path) -> list[list[str]]:
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(root) in word for word in line)]


def _runtime(root: Path, runtime: str) -> str:
    words = Path("/proc/self/status").read_text().split()
    if int(words[words.index("CapEff:") + 1], 16) >> _SYS_RESOURCE & 1:
        return runtime
    fitting = root / Path(runtime).name
    fitting.write_text(_FITTING_RUNTIME.format(python=sys.executable, runtime=runtime))
    fitting.chmod(0o755)
    return str(fitting)


def _load_python(client: Any) -> None:
    with subprocess.Popen(["docker", "save", PYTHON], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as saved:
        for _ in client.load_image(saved.stdout):
            pass
    if saved.returncode != 0:
        pytest.skip(f"there is no image {PYTHON}")


@pytest.fixture(scope="module", params=[PYTHON, BUSYBOX], ids=["sandboxd", "exec"])
def world(request: pytest.FixtureRequest, podman: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if (
        request.param == BUSYBOX
        and not shutil.which("catatonit")
        and not Path("/usr/libexec/podman/catatonit").exists()
    ):
        pytest.skip("Podman's init is not installed (catatonit)")
    container = {"image": request.param, "docker_host": podman}
    with docker_world(tmp_path_factory.mktemp("world"), container=container) as world:
        yield world


@pytest.fixture
def connection(world: World) -> Iterator[Connection]:
    plan = world.plan()
    yield world.backend.create(plan)
    world.backend.destroy(plan.sandbox_id)
    assert world.backend.probe(plan.sandbox_id) is Liveness.DEAD
    assert not plan.run_dir.exists()


def test_commands_and_files_work_as_with_docker(world: World, connection: Connection) -> None:
    value = world.value(connection, "execute_command", b"in", command="id -u; cat; pwd >&2; exit 3")
    assert (value["stdout"], value["stderr"], value["exit_code"]) == ("10001\nin", "/mnt/user-data/workspace\n", 3)
    content = os.urandom(3_000_000)
    world.value(connection, "write_file", content, path="deep/f")
    assert world.read(connection, "deep/f") == content
    late = world.value(connection, "execute_command", command="echo before; sleep 51", timeout_s=0.5)
    assert (late["stdout"], late["timed_out"]) == ("before\n", True)
    assert world.value(connection, "health")["status"] == "alive"
    assert world.value(connection, "metrics")["disk_bytes"] >= len(content)


def test_a_container_that_dies_is_noticed(world: World, podman: str) -> None:
    plan = world.plan()
    connection = world.backend.create(plan)
    assert isinstance(world.backend, DockerBackend)
    client = docker.APIClient(podman, version="auto")
    client.kill(world.backend.container_of(plan.sandbox_id))
    client.close()
    wait_until(lambda: plan.sandbox_id in [death[0] for death in world.deaths], deadline_s=30)
    assert isinstance(world.do(connection, "stat", path=".").error, SandboxLost | NotStarted)
    assert plan.sandbox_id not in world.backend.running()


def test_what_another_instance_left_is_found_and_removed(world: World, podman: str) -> None:
    plan = world.plan()
    world.backend.create(plan)
    other = docker_backend(world.backend.settings.data_root, lambda *_: None, container={"docker_host": podman})
    try:
        names = other.leftovers()["n1"]
        assert len(names) == 1
        assert world.backend.leftovers() == {}
        other.remove_leftover(names[0])
        assert other.leftovers() == {}
    finally:
        other.close()
    wait_until(lambda: plan.sandbox_id not in world.backend.running(), deadline_s=30)
    world.backend.destroy(plan.sandbox_id)
