"""The directories of a node that its sandboxes see beside their thread's own: custom mounts, skills, ACP workspace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sandfleet.config.mounts import MountLike, check_mounts, check_mounts_exist
from sandfleet.errors import ConfigError

__all__ = ["ACP_WORKSPACE", "PlannedMount", "acp_directory", "node_mounts"]

#: Where an agent of the Agent Client Protocol leaves its files; sandboxes only read them.
ACP_WORKSPACE = "/mnt/acp-workspace"
#: (host path, sandbox path, read_only), as in `SandboxPlan`.
PlannedMount = tuple[Path, str, bool]

#: Where local sandboxes have the system's own files, or data that a mount would hide.
_SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/workspace")
_WHOLE = ("/tmp", "/run", "/var")


class MountSpec(MountLike, Protocol):
    """A custom mount of the settings."""

    @property
    def read_only(self) -> bool: ...


class MountSettings(Protocol):
    """The part of a node's settings that is about mounts."""

    @property
    def mounts(self) -> Sequence[MountSpec]: ...

    @property
    def skills_path(self) -> Path | None: ...

    @property
    def skills_container_path(self) -> str: ...


def node_mounts(settings: MountSettings) -> tuple[PlannedMount, ...]:
    """What every sandbox of the node sees. Symlinks and ``..`` of host paths are resolved here, once.

    Ordered so that a mount inside another comes after it.

    Raises:
        ConfigError: A host path is missing, or a path in the sandbox is taken or reserved; names the mount.
    """
    check_mounts(settings.mounts, settings.skills_container_path)
    check_mounts_exist(settings.mounts, settings.skills_path)
    planned = []
    for number, mount in enumerate(settings.mounts):
        if (taken := _system_path(mount.container_path)) is not None:
            raise ConfigError(
                f"mounts[{number}]: {mount.container_path} cannot be used, sandboxes need {taken} themselves; "
                "choose a path of its own, such as /mnt/my-project",
                key="mounts",
                index=number,
                container_path=mount.container_path,
            )
        planned.append((_resolved(mount.host_path), mount.container_path, mount.read_only))
    if settings.skills_path is not None:
        planned.append((_resolved(settings.skills_path), settings.skills_container_path, True))
    return tuple(sorted(planned, key=lambda each: len(each[1])))


def _system_path(target: str) -> str | None:
    for taken in (*_SYSTEM, *_WHOLE):
        if target == taken or (taken in _SYSTEM and target.startswith(taken + "/")):
            return taken
    return None


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except OSError as exc:  # it was there a moment ago
        raise ConfigError(f"the mounted directory {path} cannot be resolved: {exc.strerror}", key="mounts") from exc


def acp_directory(user_data: Path) -> Path:
    """The host directory of a thread's ACP workspace: beside its user data. Made if missing."""
    path = user_data.parent / "acp-workspace"
    path.mkdir(exist_ok=True)
    return path
