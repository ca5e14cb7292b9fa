"""What lies on a node's machine and may be nobody's: how big it is, and for how long it was left alone."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandfleet.errors import ConfigError
from sandfleet.node_locks import is_held, lock_of
from sandfleet.trees import remove_tree

__all__ = ["TRASH", "Found", "ThreadData", "data_id_of", "directories", "measured", "remove_run_dir", "remove_whole"]
__all__ += ["run_dirs", "thread_data"]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: How directories begin that were moved aside to be removed.
TRASH = ".gc-"


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that may go: how big it is, and for how long nothing in it changed."""

    path: Path
    size_bytes: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class ThreadData(Found):
    """The data of one thread."""

    thread_id: str
    user_id: str | None


def data_id_of(data_root: Path) -> str:
    """The id of a data root, by which the fleet knows whose it is.

    Raises:
        ConfigError: It is no data root.
    """
    try:
        return (data_root / "data-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError as exc:
        raise ConfigError(
            f"{data_root} is no node's data root ({exc.strerror}); run this on a node's machine, with its data_root",
            key="data_root",
        ) from exc


def run_dirs(run_root: Path, data_root: Path, data_id: str, *, now_s: float) -> Iterator[Found]:
    """The run directories of this data root's nodes that do not run: a node holds its lock for as long as it does."""
    for entry in directories(run_root):
        node_id, dash, root = entry.name.rpartition("-")
        if dash and root == data_id[:8] and not is_held(lock_of(data_root, node_id)):
            yield measured(Path(entry.path), now_s=now_s)


def thread_data(data_root: Path, *, now_s: float) -> Iterator[ThreadData]:
    """The data of every thread on this data root."""
    homes: list[tuple[str | None, Path]] = [(None, data_root / "threads")]
    homes += [(user.name, Path(user.path) / "threads") for user in directories(data_root / "users")]
    for user_id, home in homes:
        for entry in directories(home):
            if _ID.fullmatch(entry.name) and (user_id is None or _ID.fullmatch(user_id)):
                found = measured(Path(entry.path), now_s=now_s)
                yield ThreadData(found.path, found.size_bytes, found.idle_s, entry.name, user_id)


def directories(path: Path) -> list[os.DirEntry[str]]:
    """The directories right in another one, by name; none where there is no such directory.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        with os.scandir(path) as entries:
            return sorted((e for e in entries if e.is_dir(follow_symlinks=False)), key=lambda e: e.name)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}; run this as the node's user", key="data_root"
        ) from exc


def measured(top: Path, *, now_s: float) -> Found:
    """Size and age of a tree. Sandboxes wrote it: no link is followed, and however deep it is, nothing recurses.

    Args:
        now_s: The time now, as its file system tells it.
    """
    size, newest, waiting = 0, top.lstat().st_mtime, [str(top)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    newest = max(newest, status.st_mtime)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
                    else:
                        size += status.st_blocks * 512
        except OSError as exc:
            if exc.errno != errno.ENOENT:
                newest = now_s  # what cannot be looked at is not known to be old
    return Found(top, size, max(0.0, now_s - newest))


def remove_run_dir(found: Found, data_root: Path) -> bool:
    """Remove a run directory, holding its node's lock, so that the node cannot start meanwhile; False if it runs.

    Raises:
        ConfigError: It cannot be removed whole.
    """
    lock = lock_of(data_root, found.path.name.rpartition("-")[0])
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        remove_whole(found.path)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_whole(found.path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def remove_whole(path: Path) -> None:
    """Remove a directory with all in it.

    Raises:
        ConfigError: Something is there still.
    """
    try:
        remove_tree(path)
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be removed whole: {exc.strerror} ({exc.filename}); run this as the node's user",
            key="data_root",
        ) from exc
