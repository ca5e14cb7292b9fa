"""Walking the virtual paths of host mode, component by component, without leaving the sandbox's directories.

This file is copied beside sandboxd and runs with it, so it is standard library only, Python >= 3.8.

A walk begins at a directory that was opened when the sandbox started and opens each component relative to the last,
never following. A symlink is read through its own descriptor and followed here, and only to where one of the sandbox's
directories is. What comes out is a descriptor and one name: nothing can be put in their place between look and use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager

LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_PATH = 4096
_MAX_LINKS = 40
_MAX_STEPS = 20_000
#: Descriptors of helpers and of standard streams lie below.
_FIRST_PINNED = 10


def failure(number: int | None, path: str) -> OSError:
    """The error as the kernel would tell it."""
    return OSError(number or errno.EIO, os.strerror(number or errno.EIO), path)


class Root:
    """One directory of the sandbox, held open."""

    def __init__(self, virtual: str, hosts: list[str], read_only: bool) -> None:
        self.virtual, self.hosts, self.read_only = virtual, hosts, read_only
        fd = os.open(hosts[-1], LOOK | os.O_DIRECTORY)
        try:
            self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_PINNED)
        finally:
            os.close(fd)


class Place:
    """An open directory, a name in it (``.`` for itself), its root, and the whole as a virtual path."""

    def __init__(self, fd: int, name: str, root: Root, path: str) -> None:
        self.fd, self.name, self.root, self.path = fd, name, root, path

    def writable(self) -> None:
        """Raise EROFS where files are only read."""
        if self.root.read_only:
            raise failure(errno.EROFS, self.path)

    def removable(self) -> None:
        """Raise EBUSY for a root itself, as a mount point would."""
        self.writable()
        if self.name == ".":
            raise failure(errno.EBUSY, self.path)


class Tree:
    """The sandbox's directories by their virtual names.

    Args:
        roots: (virtual path, host paths of it with the resolved one last, read_only).
        aliases: Second names: virtual path → virtual path.
    """

    def __init__(self, roots: list[tuple[str, list[str], bool]], aliases: dict[str, str]) -> None:
        self.roots = {virtual: Root(virtual, hosts, read_only) for virtual, hosts, read_only in roots}
        self.aliases = aliases
        self._hosts = sorted(
            ((host, root.virtual) for root in self.roots.values() for host in root.hosts),
            key=lambda pair: len(pair[0]),
            reverse=True,
        )
        #: Directories that are nothing but the way down to a root.
        self.above = {"/"}
        for virtual in self.roots:
            while virtual != "/":
                virtual = posixpath.dirname(virtual)
                self.above.add(virtual)

    def close(self) -> None:
        """Let go of the directories."""
        for root in self.roots.values():
            os.close(root.fd)

    def covers(self, path: object) -> bool:
        """Whether a path is one of the sandbox's, by its name."""
        if isinstance(path, bytes) and len(path) <= MAX_PATH:
            path = os.fsdecode(path)
        return isinstance(path, str) and self.root_of(self.plain(path)) is not None

    def plain(self, path: str) -> str:
        """The path without double slashes and second names."""
        while "//" in path:
            path = path.replace("//", "/")
        for alias, virtual in self.aliases.items():
            if path == alias or path.startswith(alias + "/"):
                return virtual + path[len(alias) :]
        return path

    def root_of(self, path: str) -> Root | None:
        """The root a plain path begins with, the longest; None outside all."""
        while path.startswith("/") and path != "/":
            root = self.roots.get(path)
            if root is not None:
                return root
            path = path[: path.rindex("/")]
        return None

    def virtual_of(self, host: str) -> str | None:
        """The virtual name of an absolute host path, None outside the sandbox's directories."""
        for prefix, virtual in self._hosts:
            if host == prefix or host.startswith(prefix + "/"):
                return virtual + host[len(prefix) :]
        return None

    @contextmanager
    def place(self, path: str, follow: bool = True) -> Iterator[Place]:
        """Where a path leads, held open as long as it is used. Its last name need not exist.

        Raises:
            OSError: As opening it would; EACCES where it leads out of the sandbox's directories.
        """
        if "\0" in path:
            raise ValueError("embedded null byte")
        walk = _Walk(self, path)
        try:
            yield walk.run(follow)
        except OSError as exc:
            if exc.filename == path:
                raise
            raise failure(exc.errno, path) from None
        finally:
            walk.release()


class _Walk:
    """Where a walk has come to: an open directory ``fd``, called ``at``, and the components left, last first.

    Above the roots, as ``..`` in a link may lead there, there is no directory to hold and ``root`` is None.
    """

    def __init__(self, tree: Tree, path: str) -> None:
        self.tree, self.asked = tree, path
        self.root: Root | None = None
        self.at, self.fd = "/", -1
        self.todo: list[str] = []
        self.links = 0

    def run(self, follow: bool) -> Place:
        self.jump(self.asked)
        for _ in range(_MAX_STEPS):
            if not self.todo:
                return self._place(".")
            name = self.todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                self.jump("/".join([posixpath.dirname(self.at), *reversed(self.todo)]))
            elif posixpath.join(self.at, name) in self.tree.roots:
                self.jump("/".join([self.at, name, *reversed(self.todo)]))
            elif self.root is None and posixpath.join(self.at, name) in self.tree.above:
                self.at = posixpath.join(self.at, name)
            elif (not self.todo and not follow) or self._step(name):
                return self._place(name)
        raise failure(errno.ELOOP, self.asked)

    def release(self) -> None:
        if self.root is not None and self.fd != self.root.fd:
            os.close(self.fd)
        self.root, self.fd = None, -1

    def jump(self, path: str) -> None:
        """Go on from the root of another path."""
        path = self.tree.plain(path)
        root = self.tree.root_of(path)
        self.release()
        if root is not None:
            self.root, self.at, self.fd = root, root.virtual, root.fd
            self.todo = path[len(root.virtual) :].split("/")[::-1]
        else:
            self.at, self.todo = "/", path.split("/")[::-1]

    def _place(self, name: str) -> Place:
        if self.root is None:
            raise failure(errno.EACCES, self.asked)
        return Place(self.fd, name, self.root, self.at if name == "." else posixpath.join(self.at, name))

    def _step(self, name: str) -> bool:
        """Enter a directory or follow a symlink; true when ``name`` is where the walk ends."""
        if self.root is None:
            raise failure(errno.EACCES, self.asked)
        try:
            found = os.open(name, LOOK, dir_fd=self.fd)
        except FileNotFoundError:
            if self.todo:
                raise
            return True
        try:
            mode = os.fstat(found).st_mode
            if stat.S_ISLNK(mode):
                self._follow(os.readlink("", dir_fd=found))
                return False
            if not self.todo:
                return True
            if not stat.S_ISDIR(mode):
                raise failure(errno.ENOTDIR, self.asked)
            root, kept, found = self.root, found, -1
        finally:
            if found >= 0:
                os.close(found)
        self.release()
        self.root, self.fd, self.at = root, kept, posixpath.join(self.at, name)
        return False

    def _follow(self, target: str) -> None:
        self.links += 1
        if self.links > _MAX_LINKS:
            raise failure(errno.ELOOP, self.asked)
        if not target.startswith("/"):
            self.todo += target.split("/")[::-1]
            return
        # The kernel would take it for a path of the host, so that meaning comes first.
        virtual = self.tree.virtual_of(target)
        if virtual is None and self.tree.covers(target):
            virtual = target
        if virtual is None:
            raise failure(errno.EACCES, self.asked)
        self.jump("/".join([virtual, *reversed(self.todo)]))
