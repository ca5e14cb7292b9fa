"""The directories of a node that its sandboxes see beside their thread's own: custom mounts, skills, ACP workspace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sandfleet.config.mounts import MountLike, check_local_mounts, check_mounts, check_mounts_exist
from sandfleet.errors import ConfigError, StartFailed

__all__ = ["ACP_WORKSPACE", "PlannedMount", "acp_directory", "node_mounts"]

#: Where an agent of the Agent Client Protocol leaves its files; sandboxes only read them.
ACP_WORKSPACE = "/mnt/acp-workspace"
#: (host path, sandbox path, read_only), as in `SandboxPlan`.
PlannedMount = tuple[Path, str, bool]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class MountSpec(MountLike, Protocol):
    """A custom mount of the settings."""

    @property
    def read_only(self) -> bool: ...


class MountSettings(Protocol):
    """The part of a node's settings that is about mounts."""

    @property
    def offered(self) -> tuple[str, ...]: ...

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
        ConfigError: A host path is missing, or a path in the sandbox is taken or reserved, or lies in another mount
            that has no directory there; names the mount.
    """
    check_mounts(settings.mounts, settings.skills_container_path)
    check_local_mounts(settings.mounts, settings.skills_container_path, settings.offered)
    check_mounts_exist(settings.mounts, settings.skills_path)
    planned = [(_resolved(mount.host_path), mount.container_path, mount.read_only) for mount in settings.mounts]
    if settings.skills_path is not None:
        planned.append((_resolved(settings.skills_path), settings.skills_container_path, True))
    for number, mount in enumerate(settings.mounts):
        _check_place(number, mount.container_path, planned)
    return tuple(sorted(planned, key=lambda each: len(each[1])))


def _check_place(number: int, target: str, planned: Sequence[PlannedMount]) -> None:
    """A mount in another one lies over a directory of it, which must be there: sandboxes could not make it."""
    around = [each for each in planned if target.startswith(each[1] + "/")]
    if not around:
        return
    host, outer, _ = max(around, key=lambda each: len(each[1]))
    place = host / target[len(outer) + 1 :]
    if place.is_symlink() or not place.is_dir():
        raise ConfigError(
            f"mounts[{number}] ({target}): it lies in the mount {outer}, which has no directory there; make {place}",
            key="mounts",
            index=number,
            container_path=target,
        )


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except OSError as exc:  # it was there a moment ago
        raise ConfigError(f"the mounted directory {path} cannot be resolved: {exc.strerror}", key="mounts") from exc


def acp_directory(user_data: Path) -> Path:
    """The host directory of a thread's ACP workspace: beside its user data. Made if missing.

    Raises:
        StartFailed: It cannot be made, or something else lies there, such as a link that a command in host mode left.
    """
    path = user_data.parent / "acp-workspace"
    try:
        if not os.path.lexists(path):
            path.mkdir(exist_ok=True)
        os.close(os.open(path, _DIRECTORY))
    except OSError as exc:
        raise StartFailed(f"the ACP workspace is no directory: {exc.strerror}", reason="data_unusable") from exc
    return path
