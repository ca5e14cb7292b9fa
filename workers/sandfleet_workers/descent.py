"""Walking down a tree that a sandbox made, however deep and wide it is, without following a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

__all__ = ["directories"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def directories(top: int) -> Iterator[int]:
    """Each directory below the open directory ``top``, and ``top`` itself first, as a descriptor that is good until the
    next one is asked for. Two descriptors are enough for it all. Nobody may work in the tree meanwhile.

    Raises:
        OSError: A directory cannot be opened, or somebody moved it nevertheless.
    """
    yield top
    fd = os.open(".", _DIRECTORY, dir_fd=top)
    try:
        levels = [(_which(fd), _below(fd))]
        while levels:
            left = levels[-1][1]
            if left:
                _replace(fd, os.open(left.pop(), _DIRECTORY, dir_fd=fd))
                yield fd
                levels.append((_which(fd), _below(fd)))
            else:
                levels.pop()
                if levels:
                    _replace(fd, os.open("..", _DIRECTORY, dir_fd=fd))
                    if _which(fd) != levels[-1][0]:
                        raise OSError(errno.EBUSY, "a directory was moved while it was looked at")
    finally:
        os.close(fd)


def _replace(fd: int, by: int) -> None:
    """``fd`` is the other directory from now on."""
    os.dup2(by, fd, inheritable=False)
    os.close(by)


def _below(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _which(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
