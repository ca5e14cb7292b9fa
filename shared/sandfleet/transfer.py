"""Files and trees between this machine and a sandbox: in pieces, with bounded memory, whole or not at all.

Written once as steps (`sandfleet.steps`) for `Sandbox` and `AsyncSandbox`. A file appears under its name when it is
complete. Permission bits are kept, links stay links, and nothing that a sandbox says makes a download write outside
its destination: names are checked, directories are real ones that the download made or found, links that lead out
are left away and told.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sandfleet import calls
from sandfleet.client import Answer, Call
from sandfleet.errors import AlreadyExists, DigestMismatch
from sandfleet.ids import new_token
from sandfleet.steps import Do, Steps, aside, drive

__all__ = ["CHUNK_BYTES", "Caller", "Progress", "Tally", "Transfer", "local_of", "open_regular", "send", "upload"]

#: Called with the bytes moved so far, and all there are to move; None when that is not known.
Progress = Callable[[int, int | None], None]
#: Carries out one operation in the sandbox.
Caller = Callable[[Call], Steps[Answer]]

#: One piece. sandboxd takes as much in one request, and a fleet's Redis holds it for a moment.
CHUNK_BYTES = 4 * 1024 * 1024
#: Files up to this size travel together.
SMALL_BYTES = 256 * 1024
BATCH_ITEMS, BATCH_BYTES = 64, CHUNK_BYTES
_REMOVE_WITHIN_S = 5.0

log = logging.getLogger("sandfleet.client")


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an upload or download moved.

    Attributes:
        files, directories, links: How many of each.
        bytes: In files.
        skipped: One line for each thing left away: sockets and devices, links that lead out of a downloaded tree,
            what could not be read, and files that were gone or no files any more when their turn came.
    """

    files: int
    directories: int
    links: int
    bytes: int
    skipped: tuple[str, ...] = ()


class Tally:
    """Counts what has been moved, and tells who wants to know."""

    def __init__(self, on_progress: Progress | None, total: int | None) -> None:
        self.files = self.directories = self.links = self.bytes = 0
        self.skipped: list[str] = []
        self._tell, self._total = on_progress, total

    def expect(self, total: int | None) -> None:
        """All there are, now that they are known."""
        self._total = total

    def moved(self, count: int) -> None:
        """So many bytes more."""
        self.bytes += count
        if self._tell is not None:
            self._tell(self.bytes, self._total)

    def result(self) -> Transfer:
        """What there was, in the end."""
        return Transfer(self.files, self.directories, self.links, self.bytes, tuple(self.skipped))


# --- one file into the sandbox ---------------------------------------------------------------


def send(
    call: Caller, stream: BinaryIO, path: str, *, mode: int | None, tally: Tally, overwrite: bool = True
) -> Steps[None]:
    """Write all of ``stream`` to ``path``; what was there stays until the new file is complete.

    Raises:
        AlreadyExists: Something is at ``path`` and ``overwrite`` is not set.
        DigestMismatch: Somebody in the sandbox wrote to the unfinished file.
    """
    piece: bytes = yield Do(lambda: stream.read(CHUNK_BYTES))
    ahead: bytes = yield Do(lambda: stream.read(CHUNK_BYTES)) if len(piece) == CHUNK_BYTES else Do(bytes)
    bits = {} if mode is None else {"mode": mode}
    if not ahead:
        rule = {} if overwrite else {"if_digest": ""}
        try:
            yield from call(Call("write_file", {"path": path, **bits, **rule}, piece))
        except DigestMismatch:
            raise AlreadyExists(f"{path} is there already", path=path) from None
        tally.moved(len(piece))
        return
    part = posixpath.join(posixpath.dirname(path), f".upload-{new_token()}.part")
    try:
        yield from call(Call("write_file", {"path": part, "mode": 0o600}, piece))
        size = len(piece)
        tally.moved(size)
        while ahead:
            piece, ahead = ahead, (yield Do(lambda: stream.read(CHUNK_BYTES)))
            last = {} if ahead else bits or {"mode": 0o644}
            yield from call(Call("write_file", {"path": part, "append": True, "if_size": size, **last}, piece))
            size += len(piece)
            tally.moved(len(piece))
        yield from call(Call("move", {"path": part, "new_path": path, "overwrite": overwrite, "follow": overwrite}))
    except Exception:
        yield from _remove(call, part)
        raise
    except BaseException:
        # Cancelled or interrupted. A generator that is being closed may wait for nothing.
        removal = _remove(call, part)
        aside(lambda: drive(removal))
        raise


def _remove(call: Caller, part: str) -> Steps[None]:
    """An unfinished file, as well as can be: searches ignore its name. It comes after what was written to it."""
    asked = call(Call("remove", {"path": part, "missing_ok": True}, None, _REMOVE_WITHIN_S, _REMOVE_WITHIN_S))

    def steps() -> Steps[None]:
        try:
            yield from asked
        except Exception as exc:  # noqa: BLE001  (what went wrong before this is what matters)
            log.info("upload.part_left", extra={"path": part, "error": str(exc)[:200]})

    return steps()


# --- uploads ---------------------------------------------------------------------------------


def local_of(path: str | os.PathLike[str]) -> Path:
    """The local path.

    Raises:
        FileNotFoundError: It is empty; `Path` would take that for this directory.
    """
    if not os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "")
    return Path(path)


def upload(
    call: Caller, local_path: str | os.PathLike[str], path: str, *, on_progress: Progress | None
) -> Steps[Transfer]:
    """`Sandbox.upload`."""
    local = local_of(local_path)
    found: os.stat_result = yield Do(local.stat)
    tally = Tally(on_progress, None if stat.S_ISDIR(found.st_mode) else found.st_size)
    if not stat.S_ISDIR(found.st_mode):
        yield from _upload_file(call, local, path, tally, follow=True)
        return tally.result()
    if on_progress is not None:
        tally.expect((yield Do(lambda: sum(entry.size for entry in _walk(local) if entry.kind == "file"))))
    yield from call(Call("make_dir", {"path": path, "mode": _dir_mode(found.st_mode)}))
    tally.directories += 1
    yield from _upload_tree(call, local, path, tally)
    return tally.result()


@dataclass(frozen=True, slots=True)
class _Entry:
    relative: str
    path: str
    kind: str
    size: int
    mode: int


def _walk(top: Path) -> Iterator[_Entry]:
    """Everything below ``top``, directories before what is in them; links are not entered."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(top / folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            seen = entry.stat(follow_symlinks=False)
            relative = posixpath.join(folder, entry.name)
            kind = _kind(seen.st_mode)
            yield _Entry(relative, entry.path, kind, seen.st_size, stat.S_IMODE(seen.st_mode))
            if kind == "dir":
                folders.append(relative)


def _kind(mode: int) -> str:
    for kind, test in (("file", stat.S_ISREG), ("dir", stat.S_ISDIR), ("symlink", stat.S_ISLNK)):
        if test(mode):
            return kind
    return "other"


def _dir_mode(mode: int) -> int:
    """A directory's own bits, with which its owner can still fill and remove it."""
    return (mode & 0o777) | 0o700


def _upload_tree(call: Caller, top: Path, path: str, tally: Tally) -> Steps[None]:
    entries = _walk(top)
    together = Together(call)
    while True:
        entry: _Entry | None = yield Do(lambda: next(entries, None))
        if entry is None:
            break
        there = posixpath.join(path, entry.relative)
        if entry.kind == "dir":
            yield from together.add(Call("make_dir", {"path": there, "mode": _dir_mode(entry.mode)}))
            tally.directories += 1
        elif entry.kind == "symlink":
            target: str = yield Do(partial(os.readlink, entry.path))
            yield from together.add(Call("make_link", {"path": there, "target": target, "overwrite": True}))
            tally.links += 1
        elif entry.kind == "other":
            tally.skipped.append(f"{entry.path}: neither a file nor a directory nor a link")
        elif entry.size <= SMALL_BYTES:
            data: bytes | None = yield Do(partial(_read_small, entry.path))
            if data is None:  # it has grown
                yield from together.flush()
                yield from _upload_file(call, Path(entry.path), there, tally, follow=False)
                continue
            yield from together.add(Call("write_file", {"path": there, "mode": entry.mode & 0o777}, data))
            tally.files += 1
            tally.moved(len(data))
        else:
            yield from together.flush()
            yield from _upload_file(call, Path(entry.path), there, tally, follow=False)
    yield from together.flush()


class Together:
    """Small operations on their way in one batch."""

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._waiting: list[Call] = []
        self._bytes = 0

    def add(self, item: Call) -> Steps[None]:
        """Take one more; those that wait are sent when they are enough."""
        self._waiting.append(item)
        self._bytes += len(item.content or b"")
        if len(self._waiting) >= BATCH_ITEMS or self._bytes >= BATCH_BYTES:
            yield from self.flush()

    def flush(self) -> Steps[None]:
        """Send what waits; the first error is raised."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            answer = yield from self._call(calls.batch(waiting, stop_on_error=True, timeout_s=None))
            raise_first(calls.batch_results(answer))


def raise_first(results: Iterable[Any]) -> None:
    """Raise the first error among a batch's results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def open_regular(path: str | os.PathLike[str], *, follow: bool) -> BinaryIO:
    """A regular file, and nothing that took its name meanwhile."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "Not a regular file", os.fspath(path))
    return os.fdopen(fd, "rb")


def _read_small(path: str) -> bytes | None:
    with open_regular(path, follow=False) as file:
        data = file.read(SMALL_BYTES + 1)
    return data if len(data) <= SMALL_BYTES else None


def _upload_file(call: Caller, local: Path, path: str, tally: Tally, *, follow: bool) -> Steps[None]:
    file: BinaryIO = yield Do(lambda: open_regular(local, follow=follow))
    try:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        yield from send(call, file, path, mode=mode, tally=tally)
    finally:
        file.close()
    tally.files += 1
