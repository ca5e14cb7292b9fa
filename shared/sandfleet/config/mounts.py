"""Which mounts are allowed, and whether what they name is there.

`check_mounts` is pure and runs when settings are loaded, on any machine; `check_mounts_exist` looks at the disk
and runs where the mounts are used: on a node, when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Protocol

from sandfleet.errors import ConfigError

__all__ = [
    "RESERVED_PREFIXES",
    "check_container_path",
    "check_host_path",
    "check_local_mounts",
    "check_mounts",
    "check_mounts_exist",
    "mount_conflict",
]

#: What a mount may neither be, nor lie in, nor hide. `skills_container_path` is one more.
RESERVED_PREFIXES = ("/mnt/user-data", "/mnt/acp-workspace", "/proc", "/sys", "/dev", "/.sandfleet")
#: A second name of the thread's working directory: it may not be replaced, but a mount may lie in it.
_WORKSPACE_ALIAS = "/workspace"
#: Where local sandboxes have the system's own files, or links: no mount may be or lie there.
LOCAL_SYSTEM = (
    "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/workspace", "/var/tmp", "/var/run",
)  # fmt: skip
#: Where they have directories of their own: no mount may be there.
LOCAL_OWN = ("/tmp", "/run", "/var")
_LOCAL_BACKENDS = frozenset({"local", "host"})


class MountLike(Protocol):
    """What the checks look at."""

    @property
    def host_path(self) -> Path: ...

    @property
    def container_path(self) -> str: ...


def check_host_path(path: Path) -> Path:
    """The path, when it is absolute.

    Raises:
        ValueError: It is not, or holds a NUL.
    """
    if "\0" in str(path):
        raise ValueError("must not contain a NUL")
    # A client on Windows reads the node's paths too, and does not call them absolute.
    if not path.is_absolute() and not path.as_posix().startswith("/"):
        raise ValueError("must be an absolute path on the node")
    return path


def check_container_path(path: str) -> str:
    """The path without a slash at its end, when it is absolute and plain.

    Raises:
        ValueError: It is relative, or has ``.``, ``..``, ``//``, a NUL, a line break or a backslash in it.
    """
    if "\0" in path or "\\" in path:
        raise ValueError("must not contain a NUL or a backslash")
    if not path.isprintable():
        raise ValueError("must not contain line breaks or other control characters")
    if not path.startswith("/"):
        raise ValueError("must be an absolute path in the sandbox")
    plain = path.rstrip("/") or "/"
    parts = plain.split("/")[1:]
    if plain != "/" and any(part in ("", ".", "..") for part in parts):
        raise ValueError("must be a plain path, without `.`, `..` or `//`")
    return plain


def mount_conflict(container_path: str, skills_container_path: str = "/mnt/skills") -> str | None:
    """The reserved path that a mount there would be, lie in or hide; None when there is none."""
    reserved = _touched(container_path, (*RESERVED_PREFIXES, skills_container_path))
    return _WORKSPACE_ALIAS if reserved is None and container_path == _WORKSPACE_ALIAS else reserved


def _touched(container_path: str, prefixes: Iterable[str]) -> str | None:
    path = PurePosixPath(container_path)
    for prefix in prefixes:
        taken = PurePosixPath(prefix)
        if path.is_relative_to(taken) or taken.is_relative_to(path):
            return prefix
    return None


def check_mounts(mounts: Iterable[MountLike], skills_container_path: str = "/mnt/skills") -> None:
    """Nothing, when all of them may stand together.

    Raises:
        ConfigError: One, or the skills, are at a reserved path or at another's; the message names it.
    """
    reserved = _touched(skills_container_path, (*RESERVED_PREFIXES, _WORKSPACE_ALIAS))
    if reserved is not None:
        raise ConfigError(
            f"skills.container_path: {skills_container_path} cannot be used, {reserved} is reserved",
            key="skills_container_path",
        )
    seen: dict[str, int] = {}
    for number, mount in enumerate(mounts):
        reserved = mount_conflict(mount.container_path, skills_container_path)
        if reserved is not None:
            raise ConfigError(
                f"mounts[{number}]: {mount.container_path} cannot be used, {reserved} is reserved; "
                "choose a path of its own, such as /mnt/my-project",
                key="mounts",
                index=number,
                container_path=mount.container_path,
            )
        if mount.container_path in seen:
            raise ConfigError(
                f"mounts[{number}]: {mount.container_path} is taken by mounts[{seen[mount.container_path]}] already",
                key="mounts",
                index=number,
                container_path=mount.container_path,
            )
        seen[mount.container_path] = number


def check_local_mounts(
    mounts: Iterable[MountLike], skills_container_path: str = "/mnt/skills", offered: Iterable[str] = ("local",)
) -> None:
    """Nothing, when sandboxes of the backends ``local`` and ``host`` can have all of them, or none is ``offered``.

    Raises:
        ConfigError: One lies where such a sandbox has files of its own; the message names it.
    """
    if _LOCAL_BACKENDS.isdisjoint(offered):
        return
    named = [(f"mounts[{number}]", mount.container_path, "mounts") for number, mount in enumerate(mounts)]
    for name, target, key in [*named, ("skills.container_path", skills_container_path, "skills_container_path")]:
        inside = (prefix for prefix in LOCAL_SYSTEM if PurePosixPath(target).is_relative_to(prefix))
        taken = next(inside, target if target in LOCAL_OWN else None)
        if taken is not None:
            raise ConfigError(
                f"{name}: {target} cannot be used, local sandboxes need {taken} themselves; "
                "choose a path of its own, such as /mnt/my-project",
                key=key,
                container_path=target,
            )


def check_mounts_exist(mounts: Iterable[MountLike], skills_path: Path | None = None) -> None:
    """Nothing, when every directory is there. For a node, when it starts.

    Raises:
        ConfigError: One is missing or no directory; the message names the mount.
    """
    for number, mount in enumerate(mounts):
        problem = _problem(mount.host_path)
        if problem:
            raise ConfigError(
                f"mounts[{number}] ({mount.container_path}): host_path {mount.host_path} {problem} on this node; "
                "make it, or take the mount out",
                key="mounts",
                index=number,
                host_path=str(mount.host_path),
                container_path=mount.container_path,
            )
    problem = _problem(skills_path) if skills_path is not None else None
    if problem:
        raise ConfigError(
            f"skills.path {skills_path} {problem} on this node; make it, or take the setting out", key="skills_path"
        )


def _problem(path: Path) -> str | None:
    try:
        if path.is_dir():
            return None
        return "is no directory" if path.exists() else "does not exist"
    except OSError as exc:
        return f"cannot be looked at ({exc.strerror})"
