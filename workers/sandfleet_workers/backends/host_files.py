"""The file system that sandboxd sees in host mode: the sandbox's directories under their virtual names, and no more.

This file is copied beside sandboxd and runs with it, so it is standard library only, Python >= 3.8. Each function is
one of the module ``os`` for virtual paths. Where a path leads is found by `host_walk`; what is opened, made or removed
there is one name in an open directory, never followed.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable
from typing import Any

from sandfleet.trees import remove_tree_at
from sandfleet_workers.backends.host_walk import LOOK, Place, Tree, failure

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_RETRIES = 100


class Entry:
    """What a listing tells of one name, like `os.DirEntry`."""

    def __init__(self, files: Files, folder: str, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, posixpath.join(folder, entry.name)
        self._files = files
        self._dir, self._file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
        self._link = entry.is_symlink()

    def is_symlink(self) -> bool:
        return self._link

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._files.is_kind(self.path, stat.S_ISDIR) if self._link and follow_symlinks else self._dir

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._files.is_kind(self.path, stat.S_ISREG) if self._link and follow_symlinks else self._file

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._files.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class Listing(list):  # type: ignore[type-arg]  # Python 3.8 has no list[Entry] here
    """What `os.scandir` gives."""

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Files(Tree):
    """File operations on virtual paths, named and called as in ``os``."""

    def _again(self, path: str, follow: bool, use: Callable[[Place], Any]) -> Any:
        """Use a place; anew when a symlink came to lie there after the walk."""
        for _ in range(_RETRIES):
            try:
                with self.place(path, follow) as place:
                    return use(place)
            except OSError as exc:
                if exc.errno != errno.ELOOP or not follow:
                    raise
        raise failure(errno.ELOOP, path)

    # -- looking

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        def use(place: Place) -> os.stat_result:
            found = os.stat(place.name, dir_fd=place.fd, follow_symlinks=False)
            if follow_symlinks and stat.S_ISLNK(found.st_mode):
                raise failure(errno.ELOOP, path)
            return found

        found: os.stat_result = self._again(path, follow_symlinks, use)
        return found

    def lstat(self, path: str) -> os.stat_result:
        return self.stat(path, follow_symlinks=False)

    def is_kind(self, path: str, test: Callable[[int], bool], *, follow: bool = True) -> bool:
        try:
            return test(self.stat(path, follow_symlinks=follow).st_mode)
        except (OSError, ValueError):
            return False

    def readlink(self, path: str) -> str:
        def use(place: Place) -> str:
            target = os.readlink(place.name, dir_fd=place.fd)
            return self.virtual_of(target) or target

        return str(self._again(path, False, use))

    def realpath(self, path: str) -> str:
        """The path without symlinks; what does not exist yet stays as it is."""
        rest: list[str] = []
        while True:
            try:
                with self.place(path) as place:
                    return posixpath.join(place.path, *rest)
            except (FileNotFoundError, NotADirectoryError):
                path, _, name = path.rstrip("/").rpartition("/")
                rest.insert(0, name)

    def scandir(self, path: str) -> Listing:
        def use(place: Place) -> Listing:
            fd = os.open(place.name, _DIRECTORY, dir_fd=place.fd)
            try:
                with os.scandir(fd) as found:
                    return Listing(Entry(self, path, entry) for entry in found)
            finally:
                os.close(fd)

        listing: Listing = self._again(path, True, use)
        return listing

    def listdir(self, path: str) -> list[str]:
        return [entry.name for entry in self.scandir(path)]

    def statvfs(self, path: str) -> os.statvfs_result:
        def use(place: Place) -> os.statvfs_result:
            fd = os.open(place.name, LOOK, dir_fd=place.fd)
            try:
                return os.fstatvfs(fd)
            finally:
                os.close(fd)

        found: os.statvfs_result = self._again(path, True, use)
        return found

    def access(self, path: str, mode: int) -> bool:
        try:
            with self.place(path) as place:
                if mode & os.W_OK and place.root.read_only:
                    return False
                return os.access(place.name, mode, dir_fd=place.fd, follow_symlinks=False)
        except OSError:
            return False

    def chdir_host(self, path: str) -> None:
        """Go where a command is to start, by the host's name of it; outside the roots by nothing else."""
        virtual = self.virtual_of(path)
        if virtual is None:
            os.chdir(path)
        else:
            self.chdir(virtual)

    def chdir(self, path: str) -> None:
        def use(place: Place) -> None:
            fd = os.open(place.name, LOOK | os.O_DIRECTORY, dir_fd=place.fd)
            try:
                os.fchdir(fd)
            finally:
                os.close(fd)

        self._again(path, True, use)

    # -- opening and changing

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        def use(place: Place) -> int:
            if flags & _CHANGES:
                place.writable()
            wanted = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(place.name, wanted, mode, dir_fd=place.fd)
            try:
                # A second name of the same file may lie anywhere: it is replaced by a new file, never written into.
                if flags & (os.O_APPEND | os.O_TRUNC) and os.fstat(fd).st_nlink > 1:
                    raise failure(errno.EPERM, path)
                if flags & os.O_TRUNC:
                    os.ftruncate(fd, 0)
            except BaseException:
                os.close(fd)
                raise
            return fd

        return int(self._again(path, not flags & os.O_NOFOLLOW, use))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        with self.place(path.rstrip("/"), follow=False) as place:
            try:
                if place.name != ".":
                    os.stat(place.name, dir_fd=place.fd, follow_symlinks=False)
                raise failure(errno.EEXIST, path)
            except FileNotFoundError:
                place.writable()
            os.mkdir(place.name, mode, dir_fd=place.fd)

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        plain = self.plain(path)
        root = self.root_of(plain)
        if root is None:
            raise failure(errno.EACCES, path)
        names = [name for name in plain[len(root.virtual) :].split("/") if name not in ("", ".")]
        there = self._existing(root.virtual, names)
        if there == len(names):
            if plain.endswith("/."):
                self.stat(path)  # below a file there is nothing, not even "."
            if not exist_ok or not self.is_kind(path, stat.S_ISDIR):
                raise failure(errno.EEXIST, path)
            return
        with self.place(posixpath.join(root.virtual, *names[:there])) as place:
            place.writable()
            fd = os.open(place.name, _DIRECTORY, dir_fd=place.fd)
            try:
                for name in names[there:-1]:
                    fd = self._made(name, fd)
                os.mkdir(names[-1], mode, dir_fd=fd)
            except NotADirectoryError:
                self.stat(path)  # a link or a file lies there: the walk knows what is wrong with it
                raise
            except FileExistsError:
                if not exist_ok or not self.is_kind(path, stat.S_ISDIR):
                    raise failure(errno.EEXIST, path) from None
            finally:
                os.close(fd)

    def _existing(self, virtual: str, names: list[str]) -> int:
        """How many of the names, one in the other, are there already."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high + 1) // 2
            if self.is_kind(posixpath.join(virtual, *names[:middle]), bool):
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def _made(name: str, above: int) -> int:
        """A directory, new or not, opened in place of the one above it."""
        try:
            os.mkdir(name, dir_fd=above)
        except FileExistsError:
            pass
        fd = os.open(name, _DIRECTORY, dir_fd=above)
        os.close(above)
        return fd

    def rename(self, source: str, target: str) -> None:
        if source.endswith("/") or target.endswith("/"):
            self._is_directory(source)
        source, target = source.rstrip("/"), target.rstrip("/")
        with self.place(source, follow=False) as old, self.place(target, follow=False) as new:
            old.removable()
            new.removable()
            if old.root is not new.root:
                raise failure(errno.EXDEV, target)
            os.rename(old.name, new.name, src_dir_fd=old.fd, dst_dir_fd=new.fd)

    def _is_directory(self, path: str) -> None:
        """What a slash at the end of a name says."""
        if not stat.S_ISDIR(self.lstat(path.rstrip("/")).st_mode):
            raise failure(errno.ENOTDIR, path)

    def unlink(self, path: str) -> None:
        if path.endswith("/"):
            self._is_directory(path)
            raise failure(errno.EISDIR, path)
        with self.place(path, follow=False) as place:
            place.removable()
            os.unlink(place.name, dir_fd=place.fd)

    def rmdir(self, path: str) -> None:
        with self.place(path.rstrip("/"), follow=False) as place:
            place.removable()
            os.rmdir(place.name, dir_fd=place.fd)

    def symlink(self, target: str, path: str) -> None:
        plain = self.plain(target)
        root = self.root_of(plain)
        # Commands see the host's names, so that is what a link to one of ours has to say.
        said = target if root is None else root.hosts[-1] + plain[len(root.virtual) :]
        with self.place(path, follow=False) as place:
            place.writable()
            os.symlink(said, place.name, dir_fd=place.fd)

    def utime(self, path: str, times: Any = None, *, ns: Any = None, follow_symlinks: bool = True) -> None:
        with self.place(path, follow=follow_symlinks) as place:
            place.writable()
            when: Any = {"times": times} if ns is None else {"ns": ns}
            os.utime(place.name, dir_fd=place.fd, follow_symlinks=False, **when)

    def chmod(self, path: str, mode: int) -> None:
        with self.place(path) as place:
            place.writable()
        fd = self.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything below it; links are removed, not followed."""
        with self.place(path.rstrip("/"), follow=False) as place:
            place.removable()
            if any(virtual.startswith(place.path + "/") for virtual in self.roots):
                raise failure(errno.EBUSY, path)
            remove_tree_at(place.name, place.fd)
