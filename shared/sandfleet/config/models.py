"""The parts of `Settings` that come in groups: mounts, and what only some backends read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sandfleet.config.mounts import check_container_path, check_host_path

__all__ = ["CloudSettings", "ContainerSettings", "GuardSettings", "Mount", "parse_bytes"]

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_bytes(value: object) -> object:
    """``512m``, ``1.5GiB`` or ``2048`` as bytes; what is no text comes back as it is.

    Raises:
        ValueError: The text is no size.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a size such as 512m, 1g or a number of bytes")
    return int(float(found["number"]) * _UNITS[found["unit"].lower()])


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: Backends that read this group; empty when none of this version does.
    used_by: ClassVar[tuple[str, ...]] = ()


class Mount(_Group):
    """A directory of the node's host that its sandboxes see."""

    host_path: Path = Field(description="Absolute path on the node; it must exist when the node starts.")
    container_path: str = Field(description="Absolute path in the sandbox, outside the reserved ones.")
    read_only: bool = Field(default=False, description="Whether the sandbox may only read it.")

    @field_validator("host_path")
    @classmethod
    def _host(cls, path: Path) -> Path:
        return check_host_path(path)

    @field_validator("container_path")
    @classmethod
    def _container(cls, path: str) -> str:
        return check_container_path(path)


class ContainerSettings(_Group):
    """How sandboxes that are containers or pods are made."""

    used_by: ClassVar[tuple[str, ...]] = ("docker", "aio", "kubernetes")

    image: str = Field(default="", description="Image of the sandboxes; empty takes the backend's own.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the image is pulled."
    )
    image_pull_secrets: tuple[str, ...] = Field(
        default=(), description="Names of the secrets with the registry's credentials."
    )
    registry_config: Path | None = Field(
        default=None,
        description="A Docker config.json with the registries' credentials; None takes the worker's own, if any.",
    )
    allowed_images: tuple[str, ...] = Field(
        default=(), description="Images that callers may ask for beside `image`, as globs (`ghcr.io/acme/*`)."
    )
    allowed_options: tuple[str, ...] = Field(
        default=(),
        description="Options that callers may loosen, by name (`network_mode`); the others they may only tighten.",
    )
    preset: Literal["strict", "developer"] = Field(
        default="strict", description="strict: read-only root file system; developer: a writable one."
    )
    runtime: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$|^$",
        description="OCI runtime (`runsc`, `crun`…); a node without it does not start. Empty: the engine's default.",
    )
    container_user: str = Field(
        default="",
        pattern=r"^([1-9]\d{0,9}(:[1-9]\d{0,9})?)?$",
        description="uid or uid:gid inside; empty: 10001, or the worker's own where that is not root.",
    )
    docker_network: str = Field(
        default="",
        description="Docker network when `network_mode` is full; empty: one that sandfleet makes, without ICC.",
    )
    # Not `port`: Kubernetes sets SANDFLEET_PORT in every pod beside a Service that is called sandfleet.
    container_port: int = Field(default=8080, ge=1, le=65_535, description="Port of the HTTP API in the container.")
    container_prefix: str = Field(
        default="sandfleet",
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,40}$",
        description="How the names of containers begin.",
    )
    docker_host: str = Field(
        default="", repr=False, description="Docker's address; empty takes DOCKER_HOST or the usual socket."
    )
    memory_bytes: int = Field(default=1024**3, ge=4 * 1024**2, description="Memory of one sandbox.")
    memory_request_bytes: int = Field(default=0, ge=0, description="Memory a pod reserves; 0: what the backend takes.")
    cpus: float = Field(default=1.0, gt=0, le=1024, description="CPU cores of one sandbox.")
    cpu_request: float = Field(default=0.0, ge=0, le=1024, description="CPU cores a pod reserves; 0 as above.")
    disk_bytes: int = Field(
        default=0, ge=0, description="Disk a thread's data may fill, where the file system has quotas; 0: no limit."
    )
    disk_inodes: int = Field(default=0, ge=0, description="Files a thread's data may have, likewise; 0: no limit.")
    pids: int = Field(default=256, ge=8, description="Processes of one sandbox.")
    network_mode: Literal["none", "restricted", "full"] = Field(
        default="none", description="No network, the allowed domains only, or everything."
    )
    allowed_domains: tuple[str, ...] = Field(default=(), description="Reachable when restricted; `*.example.org`.")
    blocked_domains: tuple[str, ...] = Field(default=(), description="Never reachable; wins over allowed ones.")
    http_proxy: str = Field(default="", repr=False, description="Proxy for HTTP and HTTPS.")
    persistent_volume: str = Field(
        default="", description="A directory that all nodes see, or a URL: `checkpoints.url`, unless that is set."
    )
    restore_on_start: bool = Field(
        default=False, description="A thread without data on its node begins with its newest checkpoint."
    )
    temp_dir: str = Field(default="/tmp", min_length=1, description="Directory for temporary files in the sandbox.")
    provisioner_url: str = Field(default="", repr=False, description="The provisioner; non-empty selects `kubernetes`.")
    provisioner_api_key: str = Field(default="", repr=False, description="Its API key.")
    kubeconfig_path: Path | None = Field(default=None, description="A kubeconfig; None is the cluster's own.")


class CloudSettings(_Group):
    """Access to sandboxes of a cloud."""

    used_by: ClassVar[tuple[str, ...]] = ("aliyun", "volcengine")

    region: str = Field(default="", description="Region; empty takes the kind's own (cn-hangzhou, cn-beijing).")
    access_key: str = Field(default="", repr=False, description="Id of the access key.")
    secret_key: str = Field(default="", repr=False, description="The access key's secret.")
    instance_type: Literal["standard", "performance"] = Field(default="standard", description="Size of a sandbox.")


class GuardSettings(_Group):
    """Rules and alarms around what runs in a sandbox. Read and checked today, enforced by none of the backends."""

    allowed_commands: tuple[str, ...] = Field(default=(), description="Programs that may run; empty: all.")
    blocked_commands: tuple[str, ...] = Field(default=(), description="Programs that may not run.")
    readonly_paths: tuple[str, ...] = Field(default=(), description="Paths that may only be read.")
    blocked_paths: tuple[str, ...] = Field(default=(), description="Paths that may not be opened.")
    alert_cpu_threshold: float = Field(default=80.0, ge=0, le=100, description="Alarm above this CPU use, in percent.")
    alert_memory_threshold: float = Field(default=90.0, ge=0, le=100, description="The same for memory.")
    alert_disk_threshold: float = Field(default=95.0, ge=0, le=100, description="The same for disk.")
    alert_webhook: str = Field(default="", repr=False, description="URL that is told of an alarm.")
