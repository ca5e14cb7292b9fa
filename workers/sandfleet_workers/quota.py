"""Limits of disk space and files per thread, where the file system keeps *project quotas*: XFS and ext4 do if asked to.

A project is a number that directories and files carry; new ones inherit it from their directory, and the file system
counts and limits what carries it. The number of a thread is kept where it belongs, on the thread's own directory, so
there is no list of them that could be lost. That directory does not hand it on, since a file system refuses to rename
anything into a directory that does when it carries another number, and slots come with none; what is in it does.

The owner of a file may change its number, except in a user namespace of its own. The seccomp filter of sandboxes
(`sandfleet_workers.backends.seccomp`) refuses that; those without sandboxd (images without Python, AIO) have none, and
what they move out counts again from the next time their thread's limits are applied.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
from contextlib import closing
from pathlib import Path

from sandfleet.errors import StartFailed
from sandfleet_workers.descent import directories

__all__ = ["Quotas", "quota_problem"]

log = logging.getLogger("sandfleet.node")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

#: Far from the numbers that Docker (from 1) and Kubernetes (from 2^20) give on the same file system.
_FIRST, _COUNT = 1 << 30, 1 << 30
_TRIES = 64

# linux/quota.h, linux/dqblk_xfs.h; the same on every architecture.
_QUOTACTL_FD = 443
_PROJECT = 2
_Q_GETQUOTA, _Q_SETQUOTA, _Q_XGETQSTAT = 0x800007, 0x800008, (ord("X") << 8) + 5
_ENFORCED = 1 << 5
_LIMITS = struct.Struct("8QI4x")  # struct if_dqblk
_VALID_LIMITS = 1 | 4
_BLOCK = 1024

# linux/fs.h
_FSGETXATTR, _FSSETXATTR = 0x801C581F, 0x401C5820
_FSXATTR = struct.Struct("5I8x")
_INHERIT = 0x200

_libc = ctypes.CDLL(None, use_errno=True)


def quota_problem(data_root: Path) -> str:
    """Why threads of this data root cannot be given limits, and what to do; nothing when they can."""
    try:
        with closing(_Opened(data_root.resolve())) as root:
            state = ctypes.create_string_buffer(256)
            _quotactl(root.fd, _Q_XGETQSTAT, 0, state)
    except OSError as exc:
        if exc.errno in {errno.EPERM, errno.EACCES}:
            return "limits per thread need a worker that is root, in a container with CAP_SYS_ADMIN"
        if exc.errno == errno.ENOENT:
            return f"{data_root} does not exist"
        return _no_quota(data_root)
    if not struct.unpack_from("H", state, 2)[0] & _ENFORCED:
        return _no_quota(data_root)
    return ""


def _no_quota(data_root: Path) -> str:
    return (
        f"no limits per thread: {_file_system(data_root)} keeps no project quotas; put data_root on XFS mounted with "
        "prjquota, or on ext4 made with `mkfs.ext4 -O project,quota` and mounted with prjquota (Linux 5.14 or newer)"
    )


def _file_system(path: Path) -> str:
    """For people: ``ext4 at /``."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return f"{kind.split()[0]} at {mount.split()[4]}"
    return f"the file system of {path}"


class Quotas:
    """The limits of a data root's threads. Thread-safe.

    Attributes:
        problem: Why there are none, as of `quota_problem`; empty when there are.
    """

    def __init__(self, data_root: Path) -> None:
        self.problem = quota_problem(data_root)
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether `apply` can work."""
        return not self.problem

    def apply(self, directory: Path, *, max_bytes: int, max_inodes: int) -> None:
        """Limit what a thread stores from now on, all its directories together; 0 is no limit.

        To be called whenever the thread's directories were made or claimed, before anybody works in them. What is
        there already counts: the first time for a thread that has data takes a walk through all of it.

        Args:
            directory: The thread's own, which holds ``user-data``.
            max_bytes: Disk space, rounded up to whole KiB.
            max_inodes: Files, directories and links.

        Raises:
            StartFailed: ``reason`` quota: the file system refuses.
        """
        try:
            with closing(_Opened(directory)) as thread:
                with self._lock:
                    project = _project_of(thread.fd)
                limits = (-(-max_bytes // _BLOCK), 0, 0, max_inodes, 0, 0, 0, 0, _VALID_LIMITS)
                _quotactl(thread.fd, _Q_SETQUOTA, project, ctypes.create_string_buffer(_LIMITS.pack(*limits)))
                for name in os.listdir(thread.fd):
                    _enlist(name, thread.fd, project, depth=1)
        except OSError as exc:
            raise StartFailed(
                f"the limits of the thread's directory cannot be set: {exc.strerror} ({exc.filename or directory})",
                reason="quota",
            ) from exc


def _project_of(thread: int) -> int:
    """The number of a thread; a free one is found and kept if it has none."""
    project, _ = _carried(thread)
    if _FIRST <= project < _FIRST + _COUNT:
        return project
    # No two directories have one inode number; two numbers may have one remainder, though.
    inode = os.fstat(thread).st_ino
    for number in range(_TRIES):
        project = _FIRST + (inode + number * number) % _COUNT
        if not _inodes_of(thread, project):
            _carry(thread, project, inherit=False)
            return project
    raise OSError(errno.EBUSY, "no free project number was found")


def _enlist(name: str, parent: int, project: int, *, depth: int) -> None:
    """Make an entry and all below it carry the number. Down to ``depth`` each is looked at; what lies deeper has it if
    its directory has, since a directory gets it last."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        if stat.S_ISREG(status.st_mode):
            _enlist_file(name, parent, project)
        return  # a link or a pipe takes no room worth the count
    with closing(_Opened(name, parent)) as directory:
        if _carried(directory.fd) != (project, True):
            for below in directories(directory.fd):
                with os.scandir(below) as entries:
                    for entry in entries:
                        if entry.is_file(follow_symlinks=False):
                            _enlist_file(entry.name, below, project)
                if below != directory.fd:
                    _carry(below, project, inherit=True)
            _carry(directory.fd, project, inherit=True)
        elif depth:
            for child in os.listdir(directory.fd):
                _enlist(child, directory.fd, project, depth=depth - 1)


def _enlist_file(name: str, parent: int, project: int) -> None:
    fd = os.open(name, _FILE, dir_fd=parent)
    try:
        if _carried(fd)[0] != project:
            _carry(fd, project, inherit=False)
    finally:
        os.close(fd)


# --- the kernel ------------------------------------------------------------------------------


class _Opened:
    """A directory, held open and not followed."""

    def __init__(self, path: Path | str, parent: int | None = None) -> None:
        self.fd = os.open(path, _DIRECTORY, dir_fd=parent)

    def close(self) -> None:
        os.close(self.fd)


def _carried(fd: int) -> tuple[int, bool]:
    """The project number of an open file, and whether new entries inherit it."""
    flags, _, _, project, _ = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
    return project, bool(flags & _INHERIT)


def _carry(fd: int, project: int, *, inherit: bool) -> None:
    flags, extent, extents, _, cow = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
    flags = flags | _INHERIT if inherit else flags & ~_INHERIT
    fcntl.ioctl(fd, _FSSETXATTR, _FSXATTR.pack(flags, extent, extents, project, cow))


def _inodes_of(fd: int, project: int) -> int:
    """How many files carry the number."""
    found = ctypes.create_string_buffer(_LIMITS.size)
    try:
        _quotactl(fd, _Q_GETQUOTA, project, found)
    except OSError as exc:
        if exc.errno != errno.ENOENT:  # XFS says so of a number it has never seen
            raise
        return 0
    return int(_LIMITS.unpack(found.raw)[5])


def _quotactl(fd: int, command: int, project: int, data: ctypes.Array[ctypes.c_char]) -> None:
    result = _libc.syscall(
        ctypes.c_long(_QUOTACTL_FD),
        ctypes.c_uint(fd),
        ctypes.c_uint(command << 8 | _PROJECT),
        ctypes.c_uint(project),
        ctypes.byref(data),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
