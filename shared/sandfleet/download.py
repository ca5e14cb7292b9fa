"""Files and trees out of a sandbox; see `sandfleet.transfer`."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from sandfleet import calls
from sandfleet.client import Call
from sandfleet.errors import (
    DigestMismatch,
    InternalError,
    InvalidArgument,
    IsDirectory,
    NotDirectory,
    NotRegularFile,
    PathNotFound,
    PermissionDenied,
)
from sandfleet.ids import new_token
from sandfleet.model import FileInfo
from sandfleet.steps import Do, Steps
from sandfleet.transfer import (
    BATCH_BYTES,
    BATCH_ITEMS,
    CHUNK_BYTES,
    SMALL_BYTES,
    Caller,
    Progress,
    Tally,
    Transfer,
    local_of,
)

__all__ = ["download"]

#: How often a file that changes under the download is begun anew.
_TRIES = 3
_DEPTH = 64
_ENTRIES, _MOST_ENTRIES = 10_000, 100_000
#: What may become of a file between the listing and its turn, and how that is told: the rest of the tree goes on.
_UNREAD: dict[type[BaseException], str] = {
    PathNotFound: "gone when its turn came",
    NotRegularFile: "no file any more when its turn came",
    IsDirectory: "no file any more when its turn came",
    NotDirectory: "gone when its turn came",
    PermissionDenied: "it may not be read",
}


def download(
    call: Caller, path: str, local_path: str | os.PathLike[str], *, on_progress: Progress | None
) -> Steps[Transfer]:
    """`Sandbox.download`."""
    local = local_of(local_path)
    top = calls.info((yield from call(Call("stat", {"path": path}))).value)
    tally = Tally(on_progress, top.size if top.type == "file" else None)
    if top.type == "file":
        yield Do(partial(_make_room, local))
        yield from _fetch(call, top, path, local, tally)
    elif top.type == "dir":
        yield Do(lambda: local.mkdir(parents=True, exist_ok=True))
        tally.directories += 1
        yield from _Tree(call, top.path, local, tally).fetch()
    else:
        raise NotRegularFile("neither a file nor a directory", path=path)
    return tally.result()


def _make_room(local: Path) -> None:
    """Told before anything is moved: a file does not take a directory's name."""
    if local.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(local))
    local.parent.mkdir(parents=True, exist_ok=True)


class _Part:
    """A local file that gets its name when it is complete."""

    def __init__(self, local: Path) -> None:
        self._local = local
        self._name = local.with_name(f".{new_token()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self.file: BinaryIO = os.fdopen(os.open(self._name, flags, 0o600), "wb")

    def finish(self, mode: int) -> None:
        """Give it its mode and its name."""
        self.file.close()
        self._name.chmod(mode & 0o777)
        self._name.replace(self._local)

    def drop(self) -> None:
        """Nothing of it stays; after `finish` there is nothing to drop."""
        self.file.close()
        self._name.unlink(missing_ok=True)


def _fetch(call: Caller, info: FileInfo, path: str, local: Path, tally: Tally) -> Steps[None]:
    """One file of any size. A large one is read in pieces: if it changed meanwhile, they do not fit together."""
    part: _Part = yield Do(lambda: _Part(local))
    before = tally.bytes
    try:
        for _ in range(_TRIES):
            size = 0
            while True:
                args = {"path": path, "offset": size, "max_bytes": CHUNK_BYTES}
                answer = yield from call(Call("read_file", args))
                piece = answer.content or b""
                yield Do(partial(part.file.write, piece))
                size += len(piece)
                tally.moved(len(piece))
                if not answer.value["truncated"] or not piece or size > info.size:
                    break  # one that grows as fast as it is read would never end
            if size <= CHUNK_BYTES and not answer.value["truncated"]:
                break
            now = calls.info((yield from call(Call("stat", {"path": path}))).value)
            if (now.size, now.modified_at) == (size, info.modified_at):
                break
            info = now
            tally.bytes = before
            yield Do(lambda: (part.file.seek(0), part.file.truncate()))
        else:
            raise DigestMismatch("the file changes while it is downloaded; copy it, then download the copy", path=path)
        yield Do(partial(part.finish, info.mode))
    finally:
        part.drop()
    tally.files += 1


class _Tree:
    """A directory on its way out: directories first, files in batches, links last."""

    def __init__(self, call: Caller, path: str, local: Path, tally: Tally) -> None:
        self._call, self._path, self._local, self._tally = call, path.rstrip("/") or "/", local, tally
        self._made = {""}
        self._modes: list[tuple[str, int]] = []
        self._links: list[tuple[str, FileInfo]] = []

    def fetch(self) -> Steps[None]:
        """Do it."""
        folders = [self._path]
        first = True
        while folders:
            folder = folders.pop()
            depth, entries = yield from self._list(folder)
            if first:
                known = depth == _DEPTH
                self._tally.expect(sum(entry.size for entry in entries if entry.type == "file") if known else None)
            first = False
            yield from self._take(entries)
            base = folder.rstrip("/").count("/")
            folders += [entry.path for entry in entries if entry.type == "dir" and _below(entry, base) == depth]
        for relative, info in self._links:
            yield from self._link(relative, info)
        for relative, mode in reversed(self._modes):
            yield Do(partial((self._local / relative).chmod, mode))

    def _list(self, folder: str) -> Steps[tuple[int, list[FileInfo]]]:
        for depth, most in ((_DEPTH, _ENTRIES), (1, _MOST_ENTRIES)):
            args = {"path": folder, "max_depth": depth, "max_entries": most}
            value = (yield from self._call(Call("list_dir", args))).value
            if not value["truncated"]:
                if unread := value.get("errors"):
                    self._tally.skipped.append(f"{folder}: {unread} directories below it could not be read")
                return depth, [calls.info(entry) for entry in value["entries"]]
        raise InvalidArgument(f"{folder} holds more than {_MOST_ENTRIES} entries; download it in parts", path=folder)

    def _take(self, entries: list[FileInfo]) -> Steps[None]:
        small: list[tuple[str, FileInfo]] = []
        for info in entries:
            relative = self._relative(info.path)
            if info.type == "dir":
                yield Do(partial(_make_real_dir, self._local / relative))
                self._made.add(relative)
                self._modes.append((relative, (info.mode & 0o777) | 0o700))
                self._tally.directories += 1
            elif info.type == "symlink":
                self._links.append((relative, info))
            elif info.type != "file":
                self._tally.skipped.append(f"{info.path}: neither a file nor a directory nor a link")
            elif info.size <= SMALL_BYTES:
                small.append((relative, info))
            else:
                yield from self._one(relative, info)
        for group in _groups(small):
            yield from self._together(group)

    def _relative(self, path: str) -> str:
        """Where an entry goes, judged by its name alone: the listing comes from the sandbox."""
        prefix = self._path.rstrip("/") + "/"
        relative = path.removeprefix(prefix)
        parts = relative.split("/")
        folder = posixpath.dirname(relative)
        if not path.startswith(prefix) or not all(map(_is_name, parts)) or folder not in self._made:
            raise InternalError(f"the sandbox listed {path[:200]!r} below {self._path[:200]!r}", reason="bad_listing")
        return relative

    def _one(self, relative: str, info: FileInfo) -> Steps[None]:
        try:
            yield from _fetch(self._call, info, info.path, self._local / relative, self._tally)
        except tuple(_UNREAD) as exc:
            self._skip(info, exc)

    def _skip(self, info: FileInfo, exc: BaseException) -> None:
        why = next(told for kind, told in _UNREAD.items() if isinstance(exc, kind))
        self._tally.skipped.append(f"{info.path}: {why}")

    def _together(self, group: list[tuple[str, FileInfo]]) -> Steps[None]:
        reads = [Call("read_file", {"path": info.path, "max_bytes": SMALL_BYTES + 1}) for _relative, info in group]
        answer = yield from self._call(calls.batch(reads, stop_on_error=False, timeout_s=None))
        for (relative, info), data in zip(group, calls.batch_results(answer), strict=True):
            if isinstance(data, BaseException):
                if not isinstance(data, tuple(_UNREAD)):
                    raise data
                self._skip(info, data)
            elif len(data) > SMALL_BYTES:  # it has grown
                yield from self._one(relative, info)
            else:
                yield Do(partial(_put, self._local / relative, data, info.mode))
                self._tally.files += 1
                self._tally.moved(len(data))

    def _link(self, relative: str, info: FileInfo) -> Steps[None]:
        target = info.target or ""
        if not _stays_inside(relative, target):
            self._tally.skipped.append(f"{info.path}: a link that leads out, to {target[:200]!r}")
            return
        yield Do(lambda: _put_link(self._local / relative, target))
        self._tally.links += 1


def _below(info: FileInfo, base: int) -> int:
    return info.path.rstrip("/").count("/") - base


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and _is_encodable(part) and (os.sep == "/" or os.sep not in part)


def _is_encodable(text: str) -> bool:
    """Whether a kernel takes it: no NUL, and of lone surrogates only those that stand for bytes."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _groups(files: list[tuple[str, FileInfo]]) -> Iterator[list[tuple[str, FileInfo]]]:
    group: list[tuple[str, FileInfo]] = []
    size = 0
    for item in files:
        if group and (len(group) >= BATCH_ITEMS or size + item[1].size > BATCH_BYTES):
            yield group
            group, size = [], 0
        group.append(item)
        size += item[1].size
    if group:
        yield group


def _stays_inside(relative: str, target: str) -> bool:
    """Whether a link at ``relative`` leads to something in the tree, whatever the other links of the tree are.

    ``..`` is fine at the beginning, where it is counted from a real directory; behind a name, which may be a link, it
    would mean another place than it says.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if not target or target.startswith("/") or ".." in parts[up:] or not _is_encodable(target):
        return False
    return up <= relative.count("/")


def _make_real_dir(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise


def _put(local: Path, data: bytes, mode: int) -> None:
    part = _Part(local)
    try:
        part.file.write(data)
        part.finish(mode)
    finally:
        part.drop()


def _put_link(local: Path, target: str) -> None:
    name = local.with_name(f".{new_token()}.part")
    name.symlink_to(target)
    try:
        name.replace(local)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
