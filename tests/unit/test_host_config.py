"""What containers may do, as the engine is told it: whole, and compared with files a reviewer reads (catalogue E12)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sandfleet.config import Settings
from sandfleet_workers.backends.docker.hostconfig import Bind, Place, container_body
from sandfleet_workers.backends.docker.policy import NodeRules, resolve

GOLDEN = Path(__file__).parents[1] / "golden" / "docker"
#: Set to write the files anew; then read the difference, line by line.
REWRITE = "SANDFLEET_REWRITE_GOLDEN"

PLACE = Place(
    labels={"sandfleet.deployment": "d" * 32, "sandfleet.node": "n1", "sandfleet.slot": "ab12", "sandfleet.spec": "5p"},
    binds=(
        Bind("/data/threads/t/user-data", "/mnt/user-data", read_only=False),
        Bind("/data/skills", "/mnt/skills"),
        Bind("/run/sandfleet/ab12", "/.sandfleet/run", read_only=False),
        Bind("/data/nodes/n1/sandboxd/d1/sandboxd.pyc", "/.sandfleet/sandboxd.pyc"),
    ),
    entrypoint=("/usr/bin/python3", "-I", "-S", "-B", "/.sandfleet/sandboxd.pyc", "--socket", "/.sandfleet/run/s"),
)


def body(place: Place = PLACE, runtimes: tuple[str, ...] = ("runc",), **container: Any) -> dict[str, Any]:
    settings = Settings(container=container)
    user = settings.container.container_user or "10001:10001"
    rules = NodeRules(settings.container, user, settings.nofile, settings.tmp_bytes, frozenset(runtimes))
    return container_body(resolve(rules, "", {}), place)


CASES = {
    "strict": body(),
    "developer": body(preset="developer", memory_bytes=4 * 1024**3, cpus=2.5, pids=1024, temp_dir="/var/tmp"),
    "full-network": body(
        Place(PLACE.labels, PLACE.binds, PLACE.entrypoint, network="sandfleet-dddddddd", cgroup_v2=True),
        network_mode="full",
        runtime="runsc",
        runtimes=("runc", "runsc"),
        image="ghcr.io/acme/agent:1",
        container_user="1000:1000",
    ),
    "without-python": body(Place(PLACE.labels, PLACE.binds[:1], ("/bin/sh", "-c", "wait"), init=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_container_is_described_as_the_golden_file_says(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    if os.environ.get(REWRITE):
        path.write_text(json.dumps(CASES[name], indent=2, sort_keys=True) + "\n")
    assert CASES[name] == json.loads(path.read_text()), f"{REWRITE}=1 writes {path.name} anew; read the difference"


@pytest.mark.parametrize("name", CASES)
def test_no_description_loosens_what_all_share(name: str) -> None:
    host = CASES[name]["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == []
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert not CASES[name]["User"].startswith("0")
    for absent in ("Binds", "Devices", "PidMode", "UTSMode", "PortBindings", "VolumesFrom", "ExtraHosts", "Sysctls"):
        assert absent not in host
    assert not any("docker.sock" in mount["Source"] for mount in host["Mounts"])


def test_a_temporary_directory_of_its_own_is_memory_too() -> None:
    assert "size=268435456" in body(temp_dir="/var/tmp")["HostConfig"]["Tmpfs"]["/var/tmp"]
    assert set(body(temp_dir="/mnt/user-data/tmp")["HostConfig"]["Tmpfs"]) == {"/tmp", "/run"}


def test_private_control_groups_are_asked_for_only_where_the_engine_has_them() -> None:
    assert "CgroupnsMode" not in CASES["strict"]["HostConfig"]
    assert CASES["full-network"]["HostConfig"]["CgroupnsMode"] == "private"
