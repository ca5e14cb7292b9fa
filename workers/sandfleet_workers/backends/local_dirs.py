"""The host side of a local sandbox's directories: who owns them, and nothing followed on the way.

Everything below the thread's directory was written by a sandbox, so it is only ever touched through
descriptors of directories, and never through a symlink.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from sandfleet import trees
from sandfleet.errors import StartFailed
from sandfleet_workers.descent import directories

__all__ = ["CHILDREN", "open_user_data", "prepare_run_dir", "remove_tree", "sandbox_uid"]

log = logging.getLogger("sandfleet.node")

CHILDREN = ("workspace", "uploads", "outputs")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def sandbox_uid(digest: str, base: int, count: int) -> int:
    """The uid of an identity's sandboxes: always the same, in ``range(base, base + count)``."""
    return base + int(digest[:15], 16) % count


def open_user_data(path: Path, uid: int | None) -> int:
    """The thread's directory, opened; its three children exist and belong to ``uid``.

    The top stays with the worker's user, so that the sandbox can neither rename nor replace the
    children in it. Without ``uid`` (a worker that is not root) everything has one owner and that
    cannot be enforced.

    Raises:
        StartFailed: Something else lies in the place of a directory.
    """
    try:
        top = os.open(path, _DIRECTORY)
    except OSError as exc:
        raise StartFailed(f"the thread's directory cannot be opened: {exc.strerror}", reason="data_missing") from exc
    try:
        if uid is not None:
            if os.fstat(top).st_uid != os.geteuid():
                os.fchown(top, os.geteuid(), os.getegid())
            os.fchmod(top, 0o755)
        for name in CHILDREN:
            _own_child(top, name, uid)
    except OSError as exc:
        os.close(top)
        reason = "disk" if exc.errno in (28, 122) else "data_unusable"
        raise StartFailed(f"the thread's directory cannot be prepared: {exc.strerror}", reason=reason) from exc
    return top


def _own_child(top: int, name: str, uid: int | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=top)
    except FileExistsError:
        pass
    child = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        if uid is not None and os.fstat(child).st_uid != uid:
            _give(child, uid)
            os.fchown(child, uid, uid)  # the mark that the walk below was completed, hence last
    finally:
        os.close(child)


def _give(top: int, uid: int) -> None:
    """Make everything below ``top`` belong to ``uid``; the tree may be as deep and as wide as it likes."""
    for directory in directories(top):
        for name in os.listdir(directory):
            os.chown(name, uid, uid, dir_fd=directory, follow_symlinks=False)


def prepare_run_dir(path: Path, uid: int | None) -> int:
    """An empty directory for the socket, owned by the sandbox's user, opened.

    Raises:
        StartFailed: Others could put something else in its place.
    """
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    above = path.parent.stat()
    if above.st_uid not in {0, os.geteuid()} or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise StartFailed(
            f"{path.parent} belongs to another user or is writable by others; remove it or set run_root",
            reason="run_dir",
        )
    remove_tree(path)
    path.mkdir(mode=0o700)
    fd = os.open(path, _DIRECTORY)
    if uid is not None:
        os.fchown(fd, uid, uid)
    return fd


def remove_tree(path: Path) -> None:
    """Remove what the sandbox left there, following nothing. That something could not be removed is logged."""
    trees.remove_tree(path, ignore_errors=True)
    if os.path.lexists(path):
        log.warning("directory.not_removed", extra={"path": str(path)})
