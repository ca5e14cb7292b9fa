"""A container as it is, from inside and from outside (catalogue E1-E4, E12, F5, F7, N1, N3, N7, N8, R2, R6, R9)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest

from sandfleet.backends import Connection, SandboxPlan
from sandfleet.errors import InvalidArgument
from sandfleet.model import SandboxSpec
from sandfleet.testing.backend_world import World, wait_for
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.docker.sandboxes import docker_world, output_of
from tests.services import require

pytestmark = pytest.mark.docker

CANARY = "canary-5ce1f0"
GIB = 1024**3


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


@pytest.fixture(scope="module")
def world(api: docker.APIClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with docker_world(tmp_path_factory.mktemp("docker")) as made:
        yield made


def docker_of(world: World) -> DockerBackend:
    assert isinstance(world.backend, DockerBackend)
    return world.backend


@pytest.fixture(scope="module")
def skills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skills")
    (path / "SKILL.md").write_text("how to\n")
    for each in (path, path / "SKILL.md"):
        each.chmod(0o777)  # nothing but the mount forbids to write
    return path


@pytest.fixture(scope="module")
def plan(world: World, skills: Path) -> SandboxPlan:
    spec = SandboxSpec("docker", env={"TOKEN": CANARY})
    return replace(world.plan("mine"), spec=spec, mounts=((skills, "/mnt/skills", True),))


@pytest.fixture(scope="module")
def connection(world: World, plan: SandboxPlan) -> Connection:
    return world.backend.create(plan)


@pytest.fixture
def run(world: World, connection: Connection) -> Callable[[str], str]:
    return lambda command: output_of(world, connection, command)


@pytest.fixture
def inspected(api: docker.APIClient, world: World, connection: Connection, plan: SandboxPlan) -> dict[str, Any]:
    found: dict[str, Any] = api.inspect_container(docker_of(world).container_of(plan.sandbox_id))
    return found


# --- from outside --------------------------------------------------------------------------------


def test_the_engine_says_that_the_container_is_what_the_golden_file_says(inspected: dict[str, Any]) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "docker" / "strict.json").read_text())
    told, wanted = inspected["HostConfig"], golden["HostConfig"]
    shown = {name: told[name] or [] if name == "CapAdd" else told[name] for name in wanted if name != "Mounts"}
    assert shown == {name: value for name, value in wanted.items() if name != "Mounts"}
    seen = {mount["Target"]: (mount.get("ReadOnly", False), mount["Type"]) for mount in told["Mounts"]}
    assert seen == {
        "/mnt/user-data": (False, "bind"),
        "/mnt/skills": (True, "bind"),
        "/.sandfleet/run": (False, "bind"),
        "/.sandfleet/sandboxd.pyc": (True, "bind"),
    }
    assert {mount["Destination"] for mount in inspected["Mounts"]} == set(seen)
    for name in (
        "Binds",
        "Devices",
        "DeviceRequests",
        "VolumesFrom",
        "ExtraHosts",
        "Links",
        "GroupAdd",
        "PortBindings",
    ):
        assert not told.get(name), name
    for name in ("PidMode", "UTSMode", "UsernsMode", "VolumeDriver"):
        assert told[name] == "", name
    assert inspected["AppArmorProfile"] != "unconfined"
    assert inspected["NetworkSettings"]["Ports"] == {}


def test_labels_say_whose_it_is_and_the_name_says_it_again(
    world: World, inspected: dict[str, Any], plan: SandboxPlan
) -> None:
    labels = inspected["Config"]["Labels"]
    data_id = (docker_of(world).settings.data_root / "data-id").read_text().strip()
    assert labels["sandfleet.deployment"] == data_id
    assert labels["sandfleet.node"] == "n1"
    assert labels["sandfleet.spec"] == world.backend.digest(plan.spec)
    assert inspected["Name"] == f"/sandfleet-{data_id[:8]}-n1-{labels['sandfleet.slot']}"


def test_no_secret_can_be_read_from_the_engine(inspected: dict[str, Any], run: Callable[[str], str]) -> None:
    assert run("echo $TOKEN") == f"{CANARY}\n"
    assert CANARY not in json.dumps(inspected)
    assert "no such file" in run("cat /.sandfleet/run/config").lower()
    assert CANARY not in run("tr '\\0' '\\n' < /proc/1/environ; cat /proc/1/cmdline; ls -la /.sandfleet/run")


def test_nothing_of_the_sandbox_is_logged_by_the_engine(inspected: dict[str, Any]) -> None:
    assert inspected["HostConfig"]["LogConfig"]["Type"] == "none"
    assert inspected["LogPath"] == ""


# --- from inside ---------------------------------------------------------------------------------


def test_the_process_has_no_privilege_and_gets_none(run: Callable[[str], str]) -> None:
    assert re.search(r"uid=10001\b.*gid=10001\b", run("id"))
    status = dict(re.findall(r"^(\w+):\s+(.*)$", run("cat /proc/self/status"), re.MULTILINE))
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for attempt in ("mount -t tmpfs none /mnt", "unshare -Ur true", "dmesg", "chown 0 /tmp/.", "mknod /tmp/d c 1 3"):
        assert run(f"{attempt} && echo done") != "done\n"
        assert "done" not in run(f"{attempt} && echo done")


def test_no_socket_of_an_engine_is_in_reach(run: Callable[[str], str]) -> None:
    assert run("find / -xdev -type s 2>/dev/null | grep -v '^/.sandfleet/run/s$'") == ""
    assert run("ls /var/run/docker.sock /run/containerd /run/podman 2>/dev/null") == ""


def test_only_its_own_places_can_be_written(run: Callable[[str], str]) -> None:
    writable = "/tmp /dev/shm /mnt/user-data/workspace /mnt/user-data/uploads /mnt/user-data/outputs"
    assert run(f"for d in {writable}; do touch $d/x || echo $d; done") == ""
    places = "/ /run /etc /usr/bin /mnt /mnt/skills /mnt/user-data /.sandfleet /.sandfleet/run /var/tmp"
    assert run(f"for d in {places}; do touch $d/x 2>/dev/null && echo $d; done") == ""
    assert "Read-only file system" in run("touch /mnt/skills/x")
    assert "Read-only file system" in run("echo >> /mnt/skills/SKILL.md")
    assert run("cat /mnt/skills/SKILL.md") == "how to\n"


def test_the_three_directories_stay_where_they_are(run: Callable[[str], str]) -> None:
    top = "/mnt/user-data"
    for attempt in (
        f"mv {top}/outputs {top}/o2",
        f"rmdir {top}/uploads",
        f"ln -s / {top}/link",
        f"rm -rf {top}/outputs",
    ):
        run(attempt)
    assert run(f"ls {top}").split() == ["outputs", "uploads", "workspace"]


def test_nobody_inside_can_replace_the_socket(
    world: World, run: Callable[[str], str], plan: SandboxPlan, connection: Connection
) -> None:
    for attempt in ("rm -f s", "mv s t", "ln -sf /tmp/other s", "touch new"):
        assert "Permission denied" in run(f"cd /.sandfleet/run && {attempt}"), attempt
    assert [path.name for path in plan.run_dir.iterdir()] == ["s"]
    assert world.value(connection, "health")["status"] == "alive"


def test_process_one_is_sandboxd_and_cannot_be_ended_from_inside(run: Callable[[str], str]) -> None:
    assert run("cat /proc/1/cmdline | tr '\\0' ' '").endswith("--config /.sandfleet/run/config ")
    assert run("kill -9 1; kill -9 -1; kill -STOP 1; echo alive").strip().endswith("alive") or run("echo alive")
    assert run("echo alive") == "alive\n"
    assert "denied" in run("cat /proc/1/mem; ls -la /proc/1/fd").lower()


def test_there_is_no_network(run: Callable[[str], str]) -> None:
    assert run("ls /sys/class/net").split() == ["lo"]
    connects = "import socket; socket.create_connection(('{}', {}), 2)"
    for host, port in (("169.254.169.254", 80), ("172.17.0.1", 22), ("10.0.0.1", 53)):
        assert "unreachable" in run(f'python3 -c "{connects.format(host, port)}"').lower()
    assert "Operation not permitted" in run('python3 -c "import socket; socket.socket(17, 3)"')  # packets of any kind


def test_limits_hold(run: Callable[[str], str]) -> None:
    assert run("ulimit -n; ulimit -c").split() == ["4096", "0"]
    assert "not permitted" in run("ulimit -n 5000").lower()
    # The kernel rounds to pages and says what it kept.
    cgroup = run("cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max")
    assert int(cgroup) == GIB
    assert int(run("cat /sys/fs/cgroup/pids/pids.max 2>/dev/null || cat /sys/fs/cgroup/pids.max")) == 256
    filled = run("head -c 300M /dev/zero > /tmp/fill; stat -c %s /tmp/fill; rm /tmp/fill")
    assert "No space left" in filled
    assert str(256 * 1024**2) in filled


# --- other containers ----------------------------------------------------------------------------


def test_a_command_that_takes_all_memory_is_killed_and_nothing_else(world: World) -> None:
    plan = world.plan()
    spec = SandboxSpec("docker", options={"memory_bytes": 64 * 1024**2})
    connection = world.backend.create(replace(plan, spec=spec))
    try:
        value = world.value(connection, "execute_command", argv=["python3", "-c", "x = b'a' * 10**9"], timeout_s=15)
        assert value["exit_code"] is None
        assert value["signal"] == "SIGKILL"
        assert output_of(world, connection, "echo alive") == "alive\n"
    finally:
        world.backend.destroy(plan.sandbox_id)


def test_a_caller_may_have_less_and_not_more(world: World) -> None:
    with pytest.raises(InvalidArgument, match="memory_bytes"):
        world.backend.digest(SandboxSpec("docker", options={"memory_bytes": 64 * GIB}))
    with pytest.raises(InvalidArgument, match="no option privileged"):
        world.backend.create(replace(world.plan(), spec=SandboxSpec("docker", options={"privileged": True})))
    less = SandboxSpec("docker", options={"memory_bytes": GIB // 2})
    assert world.backend.digest(less) != world.backend.digest(SandboxSpec("docker"))
    assert world.backend.digest(SandboxSpec("docker", options={"pids": 256})) == world.backend.digest(
        SandboxSpec("docker")
    )


def test_a_developers_sandbox_differs_by_its_root_alone(
    api: docker.APIClient, inspected: dict[str, Any], tmp_path: Path
) -> None:
    with docker_world(tmp_path, container={"preset": "developer"}) as world:
        plan = world.plan()
        world.backend.create(plan)
        told = api.inspect_container(docker_of(world).container_of(plan.sandbox_id))["HostConfig"]
        different = {key for key in told if told[key] != inspected["HostConfig"][key]}
        assert different == {"ReadonlyRootfs", "Mounts"}


def test_with_a_network_it_is_reached_by_tcp_and_by_nobody_else(api: docker.APIClient, tmp_path: Path) -> None:
    with docker_world(tmp_path, container={"network_mode": "full"}) as world:
        plans = [world.plan(), world.plan()]
        connections = [world.backend.create(plan) for plan in plans]
        assert [docker_of(world).transport_of(plan.sandbox_id) for plan in plans] == ["tcp", "tcp"]
        addresses = [output_of(world, each, "hostname -I").strip() for each in connections]
        assert len(set(addresses)) == 2
        # From here it answers nobody without the token, and the neighbour does not even get there.
        with socket.create_connection((addresses[1], 8080), 5) as stranger:
            stranger.sendall(b"GET /v1/sandbox HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 401 " in stranger.recv(4096).split(b"\r\n")[0]
        connect = f"import socket; socket.create_connection(('{addresses[1]}', 8080), 2)"
        refused = output_of(world, connections[0], f'python3 -c "{connect}"')
        assert "timed out" in refused or "unreachable" in refused.lower()
        network = next(net["Name"] for net in api.networks() if net["Name"].startswith("sandfleet-"))
        inspected = api.inspect_container(docker_of(world).container_of(plans[0].sandbox_id))
        assert inspected["HostConfig"]["PortBindings"] in (None, {})
        assert list(inspected["NetworkSettings"]["Networks"]) == [docker_of(world)._networks.own]
    assert docker_of(world)._networks.own not in [net["Name"] for net in api.networks()], network


# --- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [True, False], ids=["by its process", "by the engine's events alone"])
def test_a_death_is_told_with_its_reason(
    tmp_path: Path, api: docker.APIClient, monkeypatch: pytest.MonkeyPatch, *, seen: bool
) -> None:
    if not seen:
        monkeypatch.setattr("sandfleet_workers.backends.docker.starting.open_pidfd", lambda pid, container: -1)
    with docker_world(tmp_path) as world:
        killed, removed = world.plan(), world.plan()
        for plan in (killed, removed):
            world.backend.create(plan)
        os.kill(docker_of(world).pid_of(killed.sandbox_id), signal.SIGKILL)
        wait_for(lambda: world.deaths, "a report of the death")
        assert world.deaths == [(killed.sandbox_id, "killed by SIGKILL")]
        container = docker_of(world).container_of(removed.sandbox_id)
        api.remove_container(container, force=True)
        wait_for(lambda: len(world.deaths) == 2, "a report of the removal")
        assert world.deaths[1][0] == removed.sandbox_id
        assert world.backend.running() == []
        assert not killed.run_dir.exists()
        assert world.backend.leftovers() == {}
