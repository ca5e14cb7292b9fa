"""What ``gc`` finds on this machine: directories of nodes that ended, and data of threads that nobody came back to."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandfleet.errors import ConfigError
from sandfleet.node_locks import is_held, lock_of
from sandfleet.trees import remove_tree

__all__ = ["Found", "ThreadData", "data_id_of", "remove_run_dir", "remove_thread_data", "run_dirs", "thread_data"]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TRASH = ".gc-"


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


# --- what lies there -----------------------------------------------------------------------------


def run_dirs(run_root: Path, data_root: Path, data_id: str) -> Iterator[Found]:
    """The run directories of this data root's nodes that do not run: a node holds its lock for as long as it does."""
    for entry in _directories(run_root):
        node_id, dash, root = entry.name.rpartition("-")
        if dash and root == data_id[:8] and not is_held(lock_of(data_root, node_id)):
            yield _measured(Path(entry.path))


def thread_data(data_root: Path) -> Iterator[ThreadData]:
    """The data of every thread on this data root."""
    homes: list[tuple[str | None, Path]] = [(None, data_root / "threads")]
    homes += [(user.name, Path(user.path) / "threads") for user in _directories(data_root / "users")]
    for user_id, home in homes:
        for entry in _directories(home):
            if _ID.fullmatch(entry.name) and (user_id is None or _ID.fullmatch(user_id)):
                found = _measured(Path(entry.path))
                yield ThreadData(found.path, found.size_bytes, found.idle_s, entry.name, user_id)


def _directories(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted((e for e in entries if e.is_dir(follow_symlinks=False)), key=lambda e: e.name)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}; run this as the node's user", key="data_root"
        ) from exc


def _measured(top: Path) -> Found:
    """Size and age of a tree. Sandboxes wrote it: no link is followed, and however deep it is, nothing recurses."""
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
                newest = time.time()  # what cannot be looked at is not known to be old
    return Found(top, size, max(0.0, time.time() - newest))


# --- removal -------------------------------------------------------------------------------------


def remove_run_dir(found: Found, data_root: Path) -> bool:
    """Remove a run directory, holding its node's lock, so that the node cannot start meanwhile; False if it runs."""
    lock = lock_of(data_root, found.path.name.rpartition("-")[0])
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        _remove(found.path)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(found.path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def remove_thread_data(found: ThreadData, data_root: Path, *, in_use: Callable[[], bool]) -> bool:
    """Remove a thread's data unless it is in use; False if it is.

    It is moved aside first and the fleet is asked again then: a sandbox that came to life in between keeps its files (a
    mount follows what is moved), and they are moved back; one that comes later begins with none.
    """
    if in_use():
        return False
    aside = data_root / f"{_TRASH}{secrets.token_hex(8)}"
    try:
        os.rename(found.path, aside)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise ConfigError(
            f"{found.path} cannot be moved aside: {exc.strerror}; run this as the node's user", key="data_root"
        ) from exc
    if in_use():
        os.rename(aside, found.path)
        return False
    _remove(aside)
    if found.user_id is not None:
        for empty in (found.path.parent, found.path.parent.parent):
            try:
                empty.rmdir()
            except OSError:
                break  # other threads of the user
    return True


def _remove(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be removed whole: {exc.strerror} ({exc.filename}); run this as the node's user",
            key="data_root",
        ) from exc
