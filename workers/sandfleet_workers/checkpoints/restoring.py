"""Bringing a checkpoint back: into a directory beside the thread's, which takes its place when all of it is there.

Whatever the manifest says, nothing is written but new files, directories and links below that directory: each directory
is entered by name and never through a link, each file is made and never opened, and no special bit is set. What was
half restored is never seen, and is removed by whoever restores or looks next.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from sandfleet.errors import CheckpointCorrupt, CheckpointError, NoCheckpoint, StartFailed
from sandfleet.trees import remove_tree, remove_tree_at
from sandfleet_workers.backends.local_dirs import CHILDREN
from sandfleet_workers.checkpoints.manifest import DIRECTORY, FILE, Entry, Manifest, Piece
from sandfleet_workers.checkpoints.vault import Vault
from sandfleet_workers.holders import last_epoch

__all__ = ["choose", "clear_unfinished", "has_data", "restore", "set_aside", "stands"]

log = logging.getLogger("sandfleet.node")

_USER_DATA = "user-data"
_UNFINISHED = re.compile(r"\.restore-[0-9a-f]{16}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FETCHED_AHEAD = 8
_EXCHANGE = 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP}

_libc = ctypes.CDLL(None, use_errno=True)


# --- which one ---------------------------------------------------------------------------------


def choose(
    vault: Vault, wanted: str | None, *, required: bool = True, passed_over: list[str] | None = None
) -> Manifest | None:
    """The checkpoint of that id, or the newest one that is whole; None if nothing was saved and none is required.

    Args:
        passed_over: Ids of those that turned out to be of no use; each that does so here is added.

    Raises:
        NoCheckpoint: There is none, or not that one, and it is required.
        CheckpointCorrupt: It cannot be used; of the newest: none can.
        CheckpointFailed: The storage does not tell.
    """
    names, unusable = vault.names(), passed_over if passed_over is not None else []
    if wanted is not None:
        names = [name for name in names if name.id == wanted]
    if not names and not required:
        return None
    if not names:
        what = f"no checkpoint {wanted[:40]!r}" if wanted is not None else "nothing"
        raise NoCheckpoint(f"{what} was saved of the thread", checkpoint_id=wanted)
    stored: dict[str, int] | None = None
    last: CheckpointError | None = None
    for name in names:
        if name.id in unusable:
            continue
        try:
            manifest = vault.load(name)
            if wanted is None:
                # So that the next one is taken, rather than that this one fails half-way.
                stored = vault.objects() if stored is None else stored
                _check_there(manifest, stored)
            return manifest
        except (CheckpointCorrupt, NoCheckpoint) as exc:
            log.error("checkpoint.unusable", extra={"checkpoint_id": name.id, "error": str(exc)})
            unusable.append(name.id)
            last = exc
    if wanted is not None and last is not None:
        raise last
    raise CheckpointCorrupt(
        f"none of the {len(names)} checkpoints of the thread is whole; the oldest: {last or unusable[-1]}"
    )


def _check_there(manifest: Manifest, stored: dict[str, int]) -> None:
    for entry in manifest.entries:
        for piece in entry.pieces:
            if piece.digest and stored.get(piece.digest) != piece.size:
                raise CheckpointCorrupt(
                    f"checkpoint {manifest.name.id} lacks the object {piece.digest}", checkpoint_id=manifest.name.id
                )


# --- the directory -----------------------------------------------------------------------------


def has_data(thread_dir: Path) -> bool:
    """Whether the thread has anything here: a file, a link, or a directory that not every thread has."""
    try:
        top = os.open(thread_dir / _USER_DATA, _DIRECTORY)
    except FileNotFoundError:
        return False
    with ExitStack() as held:
        held.callback(os.close, top)
        for name in os.listdir(top):
            if name not in CHILDREN:
                return True
            try:
                child = os.open(name, _DIRECTORY, dir_fd=top)
            except OSError:
                return True  # something else lies in its place
            held.callback(os.close, child)
            with os.scandir(child) as found:
                if next(found, None) is not None:
                    return True
    return False


def stands(vault: Vault, thread_dir: Path) -> bool:
    """Whether the thread has data here that no checkpoint of a later owner has overtaken. A registry that lost its data
    may take an earlier home for the thread's; a storage that does not tell says nothing against what is here.

    Raises:
        OSError: The thread's directory cannot be looked at.
    """
    if not has_data(thread_dir):
        return False
    here = last_epoch(thread_dir)
    try:
        saved = next((name.epoch for name in vault.names()), 0)
    except CheckpointError as exc:
        log.warning("checkpoint.not_compared", extra={"path": str(thread_dir), "error": str(exc)})
        return True
    if here and saved > here:
        log.warning("checkpoint.data_overtaken", extra={"path": str(thread_dir), "epoch": here, "saved_epoch": saved})
        return False
    return True


def set_aside(thread_dir: Path) -> None:
    """What the thread has here is not its data any more; it stays beside it until the thread's data goes.

    Raises:
        OSError: It is where it was.
    """
    if has_data(thread_dir):
        name = f".earlier-{secrets.token_hex(8)}"
        (thread_dir / _USER_DATA).rename(thread_dir / name)
        log.warning("checkpoint.data_set_aside", extra={"path": str(thread_dir / name)})


def clear_unfinished(thread_dir: Path) -> None:
    """Remove what a restoration left that did not get to its end."""
    with suppress(FileNotFoundError):
        for name in os.listdir(thread_dir):
            if _UNFINISHED.fullmatch(name):
                remove_tree(thread_dir / name, ignore_errors=True)


def restore(
    vault: Vault,
    manifest: Manifest,
    thread_dir: Path,
    *,
    max_bytes: int,
    min_free_bytes: int,
    still_ours: Callable[[], None] = lambda: None,
) -> None:
    """Make ``thread_dir``'s user-data what the checkpoint says; what was there is replaced.

    Nobody may work in the thread's directories meanwhile.

    Args:
        still_ours: Called when all is there and before anything is replaced: reading took its time, and the thread may
            have a newer owner by now. What it raises is raised.

    Raises:
        CheckpointCorrupt: An object is not what was saved, or the manifest holds what it must not.
        CheckpointFailed: The storage does not answer.
        StartFailed: ``reason`` disk (no room), rename, or data_unusable. In all cases the directory is as it was.
    """
    _check_shape(manifest)
    if max_bytes and manifest.data_bytes > max_bytes:
        raise StartFailed(
            f"checkpoint {manifest.name.id} holds {manifest.data_bytes} bytes, more than checkpoints.max_bytes here",
            reason="disk",
        )
    try:
        thread_dir.mkdir(parents=True, exist_ok=True)
        clear_unfinished(thread_dir)
        free = shutil.disk_usage(thread_dir).free
        if free - manifest.data_bytes < min_free_bytes:
            raise StartFailed(
                f"checkpoint {manifest.name.id} needs {manifest.data_bytes >> 20} MiB; {free >> 20} MiB are free, and "
                f"{min_free_bytes >> 20} MiB of them stay free",
                reason="disk",
            )
        with ExitStack() as held:
            thread = os.open(thread_dir, _DIRECTORY)
            held.callback(os.close, thread)
            fresh = f".restore-{secrets.token_hex(8)}"
            os.mkdir(fresh, 0o755, dir_fd=thread)
            held.callback(_remove, fresh, thread)
            top = os.open(fresh, _DIRECTORY, dir_fd=thread)
            held.callback(os.close, top)
            _Extraction(vault, top).run(manifest.entries)
            still_ours()
            _take_place(fresh, thread)
    except OSError as exc:
        reason = {errno.ENOSPC: "disk", errno.EDQUOT: "disk", errno.EFBIG: "disk"}.get(exc.errno or 0, "data_unusable")
        raise StartFailed(f"the thread's data cannot be restored: {exc.strerror}", reason=reason) from exc


def _check_shape(manifest: Manifest) -> None:
    for entry in manifest.entries:
        if entry.path in CHILDREN and entry.kind != DIRECTORY:
            raise CheckpointCorrupt(
                f"checkpoint {manifest.name.id} has something else in place of {entry.path}",
                checkpoint_id=manifest.name.id,
            )


def _take_place(fresh: str, thread: int) -> None:
    """``user-data`` is the new directory from one moment to the next; the old one has the other's name then."""
    for child in CHILDREN:
        with suppress(FileExistsError):
            os.mkdir(f"{fresh}/{child}", 0o755, dir_fd=thread)
    if _libc.renameat2(thread, os.fsencode(fresh), thread, _USER_DATA.encode(), _EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number == errno.ENOENT:
        os.rename(fresh, _USER_DATA, src_dir_fd=thread, dst_dir_fd=thread)
    elif number in _NO_EXCHANGE and _is_bare(thread):
        for child in CHILDREN:
            with suppress(FileNotFoundError):
                os.rmdir(f"{_USER_DATA}/{child}", dir_fd=thread)
        os.rename(fresh, _USER_DATA, src_dir_fd=thread, dst_dir_fd=thread)
    elif number in _NO_EXCHANGE:
        raise StartFailed(
            "the file system of data_root cannot exchange two directories, and the thread has data here already",
            reason="rename",
        )
    else:
        raise OSError(number, os.strerror(number))


def _is_bare(thread: int) -> bool:
    with ExitStack() as held:
        top = os.open(_USER_DATA, _DIRECTORY, dir_fd=thread)
        held.callback(os.close, top)
        for name in os.listdir(top):
            child = os.open(name, _DIRECTORY, dir_fd=top)
            held.callback(os.close, child)
            if name not in CHILDREN or os.listdir(child):
                return False
    return True


def _remove(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        remove_tree_at(name, parent, ignore_errors=True)


# --- what is in it -----------------------------------------------------------------------------


class _Extraction:
    """Makes the entries below an open, empty directory that nobody else knows."""

    def __init__(self, vault: Vault, top: int) -> None:
        self._vault = vault
        self._top = top
        self._at: tuple[str, int] | None = None

    def run(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        try:
            contents = self._contents(piece for entry in entries for piece in entry.pieces if piece.digest)
            for entry in entries:
                self._make(entry, contents)
            # Last, and from below: a directory may be one that nobody may write in, and writing changes its time.
            for entry in reversed(entries):
                if entry.kind == DIRECTORY:
                    self._finish_directory(entry)
        finally:
            self._leave()

    def _contents(self, pieces: Iterator[Piece]) -> Iterator[bytes]:
        """The bytes of each piece in turn, a few of them fetched beside each other."""
        while ahead := list(islice(pieces, _FETCHED_AHEAD)):
            yield from self._vault.storage.each(partial(self._vault.object, piece) for piece in ahead)

    def _make(self, entry: Entry, contents: Iterator[bytes]) -> None:
        above, _, name = entry.path.rpartition("/")
        parent, name_bytes = self._enter(above), _fs(name)
        if entry.kind == DIRECTORY:
            os.mkdir(name_bytes, 0o700, dir_fd=parent)
        elif entry.kind == FILE:
            file = os.open(name_bytes, _NEW_FILE, 0o600, dir_fd=parent)
            try:
                _fill(file, entry, contents)
                os.fchmod(file, entry.mode)
                os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(file)
        else:
            os.symlink(_fs(entry.target), name_bytes, dir_fd=parent)

    def _finish_directory(self, entry: Entry) -> None:
        directory = self._enter(entry.path)
        # The worker goes in and out of the three that every thread has.
        mode = entry.mode if entry.path not in CHILDREN else entry.mode | stat.S_IRWXU
        os.fchmod(directory, mode)
        os.utime(directory, ns=(entry.mtime_ns, entry.mtime_ns))

    def _enter(self, path: str) -> int:
        """The directory, opened from the top, one name after the other; good until the next call."""
        if self._at is not None and self._at[0] == path:
            return self._at[1]
        self._leave()
        fd = os.open(".", _DIRECTORY, dir_fd=self._top)
        for part in path.split("/") if path else ():
            try:
                below = os.open(_fs(part), _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        self._at = (path, fd)
        return fd

    def _leave(self) -> None:
        if self._at is not None:
            os.close(self._at[1])
            self._at = None


def _fill(file: int, entry: Entry, contents: Iterator[bytes]) -> None:
    at = 0
    for piece in entry.pieces:
        if piece.digest:
            data = memoryview(next(contents))
            while data:
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
        else:
            at += piece.size
    if entry.pieces and not entry.pieces[-1].digest:
        os.ftruncate(file, at)


def _fs(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
