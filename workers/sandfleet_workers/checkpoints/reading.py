"""Reading a tree that a sandbox made, while it may go on changing it, without being led out of it or held up.

Directories are entered one name at a time and never through a link; only regular files are opened, and what was opened
is looked at again. Everything is bounded: entries, bytes read, the length of paths.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from sandfleet.errors import CheckpointFailed
from sandfleet_workers.checkpoints.manifest import (
    DIRECTORY,
    FILE,
    LINK,
    MAX_ENTRIES,
    MAX_PATH_BYTES,
    MAX_PATHS_BYTES,
    MAX_PIECES,
    PIECE_BYTES,
    Entry,
    Piece,
)

__all__ = ["Known", "Tree", "read_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TRIES = 3
#: What was changed so shortly before it was read may have been changed again without another time stamp: clocks of
#: file systems are coarse, and what a program has mapped gets a stamp only when it is written back.
_TOO_FRESH_NS = 60 * 10**9
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE}
_OTHER = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True, slots=True)
class Known:
    """What a file was when it was read last: as long as all this is the same, so is its content."""

    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Tree:
    """What was read. ``known`` is for the next time; ``consistent``: nothing changed meanwhile."""

    entries: list[Entry] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    consistent: bool = True


def read_tree(
    top: int,
    *,
    known: Mapping[str, Known],
    keep: Callable[[bytes], str],
    max_bytes: int,
    now_ns: int,
) -> Tree:
    """Everything below the open directory ``top``.

    Args:
        known: Files of the last time; those that did not change since are not read again.
        keep: Given each piece that was read; gives its digest.
        max_bytes: How much may be read; 0: no limit.
        now_ns: The file system's own time.

    Raises:
        CheckpointFailed: ``reason`` too_large: more data or more files than may be saved.
    """
    reader = _Reader(top, known, keep, max_bytes, now_ns)
    reader.run()
    return reader.tree


class _Reader:
    def __init__(
        self, top: int, known: Mapping[str, Known], keep: Callable[[bytes], str], max_bytes: int, now_ns: int
    ) -> None:
        self.top, self.before, self.keep = top, known, keep
        self.max_bytes, self.now_ns = max_bytes, now_ns
        self.tree = Tree()
        self.left = max_bytes or 2**62
        self.pieces = 0
        self.seen: dict[str, tuple[int, ...]] = {}

    def run(self) -> None:
        for path, name, parent, status in self.walk():
            self.seen[path] = _mark(status)
            self.take(path, name, parent, status)
        self.tree.consistent &= self.seen == {path: _mark(status) for path, _, _, status in self.walk(told=False)}

    def walk(self, told: bool = True) -> Iterator[tuple[str, str, int, os.stat_result]]:
        """Each entry as path, name, open directory (good until the next one) and status; directories come before what
        is in them."""
        todo, count, path_bytes = [""], 0, 0
        while todo:
            path = todo.pop()
            try:
                directory = self.enter(path)
            except OSError as exc:
                self.cannot(path, exc, told)
                continue
            with closing(_Opened(directory)):
                try:
                    with os.scandir(directory) as found:
                        names = sorted(entry.name for entry in itertools.islice(found, MAX_ENTRIES + 1 - count))
                except OSError as exc:
                    self.cannot(path, exc, told)
                    continue
                for name in names:
                    below = f"{path}/{name}" if path else name
                    count += 1
                    if count > MAX_ENTRIES:
                        raise _too_large(f"there are more than {MAX_ENTRIES} files and directories")
                    length = len(os.fsencode(below))
                    path_bytes += length
                    if path_bytes > MAX_PATHS_BYTES:
                        raise _too_large("the paths of its files and directories are too long together")
                    if length > MAX_PATH_BYTES:
                        self.skip(below[:100] + "…", "its path is too long", told)
                        continue
                    try:
                        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    except OSError as exc:
                        self.cannot(below, exc, told)
                        continue
                    yield below, name, directory, status
                    if stat.S_ISDIR(status.st_mode):
                        todo.append(below)

    def enter(self, path: str) -> int:
        fd = os.open(".", _DIRECTORY, dir_fd=self.top)
        for part in path.split("/") if path else ():
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd

    def skip(self, path: str, why: str, told: bool = True) -> None:
        if told:
            self.tree.skipped.append(f"{path}: {why}")

    def cannot(self, path: str, exc: OSError, told: bool = True) -> None:
        if exc.errno in _GONE:
            self.tree.consistent = False
        else:
            self.skip(path or ".", exc.strerror or "unreadable", told)

    def take(self, path: str, name: str, parent: int, status: os.stat_result) -> None:
        mode, mtime_ns = stat.S_IMODE(status.st_mode) & 0o777, _bounded(status.st_mtime_ns)
        if stat.S_ISDIR(status.st_mode):
            self.tree.entries.append(Entry(path, DIRECTORY, mode, mtime_ns))
        elif stat.S_ISLNK(status.st_mode):
            try:
                self.tree.entries.append(Entry(path, LINK, target=os.readlink(name, dir_fd=parent)))
            except OSError as exc:
                self.cannot(path, exc)
        elif stat.S_ISREG(status.st_mode):
            self.take_file(path, name, parent, status)
        else:
            self.skip(path, _OTHER.get(stat.S_IFMT(status.st_mode), "no file"))

    def take_file(self, path: str, name: str, parent: int, status: os.stat_result) -> None:
        known = self.before.get(path)
        if known is not None and _is(known, status):
            pieces = known.pieces
            self.count(pieces)
        else:
            try:
                status, pieces = self.read(name, parent)
            except OSError as exc:
                self.cannot(path, exc)
                return
        mode, mtime_ns = stat.S_IMODE(status.st_mode) & 0o777, _bounded(status.st_mtime_ns)
        self.tree.entries.append(Entry(path, FILE, mode, mtime_ns, pieces))
        if max(status.st_ctime_ns, status.st_mtime_ns) < self.now_ns - _TOO_FRESH_NS:
            self.tree.known[path] = Known(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, pieces)

    def count(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces += len(pieces)
        self.left -= sum(piece.size for piece in pieces if piece.digest)
        self.check()

    def check(self) -> None:
        if self.left < 0:
            raise _too_large(f"the data is more than checkpoints.max_bytes ({self.max_bytes} bytes)")
        if self.pieces > MAX_PIECES:
            raise _too_large("the files have too many parts")

    def read(self, name: str, parent: int) -> tuple[os.stat_result, tuple[Piece, ...]]:
        """Once more when it changed meanwhile; in the end as it was found."""
        with closing(_Opened(os.open(name, _FILE, dir_fd=parent))) as file:
            for tries_left in reversed(range(_TRIES)):
                before, left, count = os.fstat(file.fd), self.left, self.pieces
                if not stat.S_ISREG(before.st_mode):
                    raise OSError(errno.ENOENT, "it is no file any more")
                pieces = tuple(self.parts(file.fd, before.st_size))
                after = os.fstat(file.fd)
                if _mark(before) == _mark(after) and sum(piece.size for piece in pieces) == before.st_size:
                    return before, pieces
                if not tries_left:
                    self.tree.consistent = False
                    return after, pieces
                self.left, self.pieces = left, count
        raise AssertionError("unreachable")

    def parts(self, fd: int, size: int) -> Iterator[Piece]:
        at = 0
        while at < size:
            begins = _seek(fd, at, os.SEEK_DATA, size)
            if begins > at:
                yield self.counted(Piece(min(begins, size) - at, ""))
                at = begins
                continue
            wanted = min(PIECE_BYTES, size - at, max(1, _seek(fd, at, os.SEEK_HOLE, size) - at))
            data = _pread(fd, wanted, at)
            if not data:
                return  # it became shorter
            yield self.counted(Piece(len(data), self.keep(data)))
            at += len(data)

    def counted(self, piece: Piece) -> Piece:
        self.pieces += 1
        if piece.digest:
            self.left -= piece.size
        self.check()
        return piece


class _Opened:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _seek(fd: int, at: int, whence: int, size: int) -> int:
    """Where data or a hole begins; a file system that does not tell has data only."""
    try:
        return os.lseek(fd, at, whence)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return size
        return at if whence == os.SEEK_DATA else size


def _pread(fd: int, wanted: int, at: int) -> bytes:
    parts = []
    while wanted > 0 and (part := os.pread(fd, wanted, at)):
        parts.append(part)
        wanted, at = wanted - len(part), at + len(part)
    return b"".join(parts)


def _mark(status: os.stat_result) -> tuple[int, ...]:
    if stat.S_ISDIR(status.st_mode):
        return status.st_ino, status.st_mode, status.st_mtime_ns
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is(known: Known, status: os.stat_result) -> bool:
    return (known.size, known.mtime_ns, known.ctime_ns, known.ino) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
    )


def _bounded(time_ns: int) -> int:
    return max(-(2**63) + 1, min(time_ns, 2**63 - 1))


def _too_large(why: str) -> CheckpointFailed:
    return CheckpointFailed(f"the thread's data is not saved: {why}", reason="too_large")
