"""What a container is, and what callers may make of it: the cases E12, E13 and E15 of the catalogue."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandfleet.errors import ConfigError, InvalidArgument, SandfleetError
from sandfleet_workers.backends.docker.engine import Engine
from tests.security.boxes import Box, Boxes, docker, inspected, on, opened


@on("docker")
def test_E12_the_engine_shows_the_container_that_the_policy_describes(box: Box) -> None:
    told = inspected(box)
    host = told["HostConfig"]
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"], "the engine's own seccomp and AppArmor profiles hold"
    assert told["AppArmorProfile"] in {"", "docker-default"}
    assert host["ReadonlyRootfs"] is True
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "private"
    for name in ("PidMode", "UTSMode", "UsernsMode", "CgroupParent", "VolumeDriver", "CpusetCpus", "Cgroup"):
        assert not host[name], name
    # Private where the engine can (cgroup v2): on v1 it mounts the sandbox's own groups alone, read-only.
    assert host.get("CgroupnsMode") == "private" or json.loads(_info())["CgroupVersion"] == "1"
    for name in ("Binds", "CapAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "VolumesFrom", "ExtraHosts",
                 "Links", "GroupAdd", "Sysctls", "StorageOpt", "PortBindings", "Dns", "CgroupPermissions"):  # fmt: skip
        assert not host.get(name), name
    assert host["PublishAllPorts"] is False
    assert told["NetworkSettings"]["Ports"] == {}
    assert host["MaskedPaths"], "the engine hides what it hides by default"
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(host["MaskedPaths"])
    assert {"/proc/sys", "/proc/sysrq-trigger", "/proc/bus"} <= set(host["ReadonlyPaths"])
    assert {(each["Name"], each["Soft"], each["Hard"]) for each in host["Ulimits"]} == {
        ("core", 0, 0),
        ("nofile", 4096, 4096),
    }
    assert (host["Memory"], host["MemorySwap"]) == (1024**3, 1024**3)
    assert (host["NanoCpus"], host["PidsLimit"]) == (1_000_000_000, 256)
    assert not host["OomKillDisable"]
    assert host["OomScoreAdj"] >= 0
    assert host["LogConfig"]["Type"] == "none"
    assert host["RestartPolicy"]["Name"] == "no"
    assert all("nosuid" in options and "nodev" in options and "size=" in options for options in host["Tmpfs"].values())


@on("docker")
def test_E12_it_sees_of_the_host_what_it_is_meant_to_and_no_more(box: Box) -> None:
    told = inspected(box)
    mounts = {each["Destination"]: (each["Type"], each["RW"], each["Propagation"]) for each in told["Mounts"]}
    assert mounts == {
        "/mnt/user-data": ("bind", True, "rprivate"),
        "/.sandfleet/run": ("bind", True, "rprivate"),
        "/.sandfleet/sandboxd.pyc": ("bind", False, "rprivate"),
    }
    sources = {each["Destination"]: Path(each["Source"]) for each in told["Mounts"]}
    assert sources["/mnt/user-data"] == box.plan.user_data
    assert sources["/.sandfleet/run"] == box.plan.run_dir
    assert set(told["Config"]["Labels"]) >= {"sandfleet.deployment", "sandfleet.node", "sandfleet.slot"}
    images = json.loads(docker("inspect", told["Image"]))[0]["Config"]["Env"] or []
    ours = {"HOME=/mnt/user-data/workspace", "LANG=C.UTF-8", "TMPDIR=/tmp", "USER=sandbox"}
    assert set(told["Config"]["Env"]) - set(images) <= ours


def _info() -> str:
    return docker("info", "--format", "{{json .}}")


FORBIDDEN = {
    "privileged": True, "volumes": ["/:/host"], "binds": ["/:/host"], "mounts": [], "Mounts": [], "cap_add": ["ALL"],
    "devices": ["/dev/sda"], "device_requests": [], "pid_mode": "host", "ipc_mode": "host", "uts_mode": "host",
    "userns_mode": "host", "cgroupns": "host", "security_opt": ["seccomp=unconfined"], "labels": {}, "user": "0",
    "sysctls": {}, "group_add": ["0"], "ports": {"22": 22}, "extra_hosts": {}, "entrypoint": ["sh"], "init": True,
    "HostConfig": {"Privileged": True}, "restart_policy": "always", "oom_kill_disable": True, "read_only": False,
    "log_driver": "json-file", "docker_network": "host", "container_user": "0", "allowed_options": ["runtime"],
    "docker_host": "tcp://evil", "image": "evil", "volumes_from": ["x"], "tmpfs": {}, "working_dir": "/proc/self/fd/8",
}  # fmt: skip
BEYOND = {
    "network_mode": "full", "preset": "developer", "memory_bytes": 2 * 1024**3, "cpus": 4, "pids": 100_000,
    "nofile": 1_000_000, "tmp_bytes": 64 * 1024**3,
}  # fmt: skip
NONSENSE = {"network_mode": "host", "preset": "privileged", "memory_bytes": -1, "cpus": float("inf"), "pids": 0}


@on("docker")
@pytest.mark.parametrize(("name", "value"), [*FORBIDDEN.items(), *BEYOND.items(), *NONSENSE.items()])
def test_E13_a_caller_gets_nothing_that_the_operator_does_not_allow(boxes: Boxes, name: str, value: Any) -> None:
    before = boxes.backend.running()
    with pytest.raises(InvalidArgument) as refused, boxes.one(options={name: value}):
        pytest.fail("it was made")
    assert refused.value.facts["argument"] == name
    assert boxes.backend.running() == before


@on("docker")
@pytest.mark.parametrize(
    "image",
    ["busybox", "evil/image:1", "sandfleet/sandbox:latest@sha256:" + "0" * 64, "-v/:/host", "a b", "../x", "x" * 500],
)
def test_E13_nor_another_image(boxes: Boxes, image: str) -> None:
    with pytest.raises(InvalidArgument) as refused, boxes.one(image=image):
        pytest.fail("it was made")
    assert refused.value.facts["argument"] == "image"


def _containers_of(data_root: Path) -> str:
    data_id = (data_root / "data-id").read_text().strip()
    return docker("ps", "-aq", "--filter", f"label=sandfleet.deployment={data_id}")


@pytest.mark.docker
def test_E15_a_node_whose_engine_lacks_the_runtime_does_not_start(tmp_path: Path) -> None:
    never = pytest.raises(ConfigError, match=r"runtime 'runsc-of-tomorrow' is unknown.*never fall back")
    with never as refused, opened("docker", tmp_path, container={"runtime": "runsc-of-tomorrow"}):
        pytest.fail("it started")
    assert refused.value.facts["key"] == "sandbox.runtime"
    assert _containers_of(tmp_path) == ""


@on("docker")
def test_E15_a_caller_who_asks_for_a_runtime_that_is_not_there_is_refused(boxes: Boxes) -> None:
    for runtime in ("runsc-of-tomorrow", "runc --privileged", "../runc", "RUNC"):
        with pytest.raises(InvalidArgument, match="no runtime"), boxes.one(options={"runtime": runtime}):
            pytest.fail("it was made")


@pytest.mark.docker
def test_E15_a_runtime_that_has_gone_since_the_node_started_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's facts of the node's start are old: it believes in a runtime that is not there any more."""
    real = Engine._facts
    gone = "runsc-of-yesterday"
    monkeypatch.setattr(Engine, "_facts", lambda engine: replace(real(engine), runtimes=frozenset({"runc", gone})))
    # A ConfigError already where the node starts a container to look around, else when the sandbox is to start.
    never = pytest.raises(SandfleetError, match=gone)
    with never, opened("docker", tmp_path, container={"runtime": gone}) as boxes, boxes.one():
        pytest.fail("it was made")
    assert _containers_of(tmp_path) == ""


@on("docker")
def test_E15_the_runtime_that_was_asked_for_is_the_one(boxes: Boxes) -> None:
    assert inspected(boxes.box)["HostConfig"]["Runtime"] == json.loads(_info())["DefaultRuntime"]
    with pytest.raises(InvalidArgument, match="goes beyond"), boxes.one(options={"runtime": "runc"}):
        pytest.fail("even one that is there has to be allowed")
