"""Removing directories that a sandbox filled, however deep they are and whatever lies in them.

`shutil.rmtree` takes a level of recursion and a descriptor for each directory on the way down, so it fails where a
sandbox nested a thousand of them. Here two descriptors are enough.

This file is copied beside sandboxd in host mode, so it is standard library only, Python >= 3.8.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

# Not on Windows, where nodes do not run.
_LOOK = getattr(os, "O_PATH", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Remove a directory with all below it. Links are removed and never followed; nothing there is fine.

    Args:
        ignore_errors: Leave what cannot be removed, and go on.

    Raises:
        OSError: Something could not be removed; what was looked at before it is gone.
    """
    with suppress(OSError if ignore_errors else FileNotFoundError):
        _remove(path, ignore_errors)


def _remove(path: str | os.PathLike[str], ignore_errors: bool) -> None:
    above, name = os.path.split(os.path.abspath(path))
    parent = os.open(above, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            remove_tree_at(name, parent, ignore_errors=ignore_errors)
        else:
            os.unlink(name, dir_fd=parent)
    finally:
        os.close(parent)


def remove_tree_at(name: str, parent: int, *, ignore_errors: bool = False) -> None:
    """The same for a directory ``name`` in the open directory ``parent``, which must be there.

    Raises:
        OSError: Something could not be removed, or somebody moved a directory meanwhile.
    """
    passed = OSError if ignore_errors else FileNotFoundError
    fd = _enter(name, parent)
    try:
        levels = [_Level(fd, name)]
        levels[-1].empty(fd, passed)
        while True:
            if levels[-1].folders:
                below = levels[-1].folders.pop()
                with suppress(passed):
                    entered = _enter(below, fd)
                    os.close(fd)
                    fd = entered
                    levels.append(_Level(fd, below))
                    levels[-1].empty(fd, passed)
                continue
            left = levels.pop()
            if not levels:
                break
            above = os.open("..", _READ, dir_fd=fd)
            os.close(fd)
            fd = above
            if _which(fd) != levels[-1].which:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), left.name)
            with suppress(passed):
                os.rmdir(left.name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


class _Level:
    """A directory on the way down: its name, which it is, and the directories in it that are left."""

    def __init__(self, fd: int, name: str) -> None:
        self.name, self.which = name, _which(fd)
        self.folders: list[str] = []

    def empty(self, fd: int, passed: type[OSError]) -> None:
        """Remove its files, and list its directories."""
        with os.scandir(fd) as found:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        self.folders = [name for name, is_folder in entries if is_folder]
        for file in (name for name, is_folder in entries if not is_folder):
            with suppress(passed):
                os.unlink(file, dir_fd=fd)


def _which(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _enter(name: str, parent: int) -> int:
    """The directory, opened. Its owner may have closed it to himself, as a module cache of Go is."""
    look = os.open(name, _LOOK, dir_fd=parent)
    try:
        found = os.fstat(look)
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod("/proc/self/fd/" + str(look), stat.S_IRWXU)
        return os.open(".", _READ, dir_fd=look)
    finally:
        os.close(look)
