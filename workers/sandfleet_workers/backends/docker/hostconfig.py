"""The one place where a container's whole description is put together, as the Engine API takes it. Pure.

tests/golden/docker holds what comes out; a change here is a change of what sandboxes may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandfleet_workers.backends.docker.policy import Policy

__all__ = [
    "HOME",
    "LABEL_BACKEND",
    "LABEL_DATA_ROOT",
    "LABEL_DEPLOYMENT",
    "LABEL_NODE",
    "LABEL_SLOT",
    "LABEL_SPEC",
    "RUN_DIR",
    "SANDBOXD",
    "USER_DATA",
    "Bind",
    "Place",
    "container_body",
]

USER_DATA = "/mnt/user-data"
HOME = "/mnt/user-data/workspace"
RUN_DIR = "/.sandfleet/run"
SANDBOXD = "/.sandfleet/sandboxd"

#: What never changes about a container; Docker cannot relabel, so what changes is in the node's journal.
LABEL_BACKEND = "sandfleet.backend"
LABEL_DATA_ROOT = "sandfleet.data-root"
LABEL_DEPLOYMENT = "sandfleet.deployment"
LABEL_NODE = "sandfleet.node"
LABEL_SLOT = "sandfleet.slot"
LABEL_SPEC = "sandfleet.spec"


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or directory of the engine's host, seen at ``target``.

    A read-only one brings no file system along that is mounted below it: engines before 25 would leave that writable.
    """

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """What tells one container from others of its policy.

    Attributes:
        labels: Whose it is.
        binds: What it sees of the host; a bind inside another comes after it.
        entrypoint: What runs as process 1, an absolute path first.
        env: Environment of process 1. No secrets: everybody who may ask the engine can read it.
        network: The engine's name for its network.
        init: Whether the engine's own init is process 1.
        cgroup_v2: Whether the engine has it; only then there are private cgroup namespaces.
    """

    labels: Mapping[str, str]
    binds: tuple[Bind, ...]
    entrypoint: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"
    init: bool = False
    cgroup_v2: bool = False


def container_body(policy: Policy, place: Place) -> dict[str, Any]:
    """The body of ``POST /containers/create``."""
    env = {"HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": policy.temp_dir, "USER": "sandbox", **place.env}
    return {
        "Image": policy.image,
        "User": policy.user,
        # The image's own could be a descriptor of the runtime (CVE-2024-21626).
        "WorkingDir": "/",
        "Entrypoint": list(place.entrypoint),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in sorted(env.items())],
        "Hostname": "sandbox",
        "Labels": dict(place.labels),
        # The image's would run in the sandbox, as often as it likes.
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "AttachStdin": False,
        "OpenStdin": False,
        "Tty": False,
        "HostConfig": _host_config(policy, place),
    }


def _host_config(policy: Policy, place: Place) -> dict[str, Any]:
    host: dict[str, Any] = {
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(policy.cap_add),
        # No word about seccomp: the engine's default filter holds.
        "SecurityOpt": ["no-new-privileges:true"],
        "ReadonlyRootfs": policy.read_only_root,
        "NetworkMode": place.network,
        "PublishAllPorts": False,
        "IpcMode": "private",
        "Memory": policy.memory_bytes,
        "MemorySwap": policy.memory_bytes,
        "OomKillDisable": False,
        "NanoCpus": round(policy.cpus * 1_000_000_000),
        "PidsLimit": policy.pids,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": policy.nofile, "Hard": policy.nofile},
        ],
        "Tmpfs": _tmpfs(policy),
        "ShmSize": policy.tmp_bytes // 4,
        "Mounts": [_mount(bind) for bind in place.binds],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": False,
        "Init": place.init,
    }
    if place.cgroup_v2:
        host["CgroupnsMode"] = "private"
    if policy.runtime:
        host["Runtime"] = policy.runtime
    return host


def _tmpfs(policy: Policy) -> dict[str, str]:
    options = "rw,exec,nosuid,nodev,mode=1777,size="
    sizes = {"/tmp": policy.tmp_bytes, "/run": policy.tmp_bytes // 4}
    written = (*sizes, "/dev/shm", USER_DATA)
    if not any(policy.temp_dir == path or policy.temp_dir.startswith(path + "/") for path in written):
        sizes[policy.temp_dir] = policy.tmp_bytes
    return {path: f"{options}{size}" for path, size in sizes.items()}


def _mount(bind: Bind) -> dict[str, Any]:
    options: dict[str, Any] = {"Propagation": "rprivate"}
    if bind.read_only:
        options["NonRecursive"] = True
    return {
        "Type": "bind",
        "Source": bind.source,
        "Target": bind.target,
        "ReadOnly": bind.read_only,
        "BindOptions": options,
    }
