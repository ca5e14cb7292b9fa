"""Who runs a sandbox on a thread's data, written beside the data: two must never do so at once.

Nodes that share a data root may not see each other's end. The file names the container that the last owner started, so
that the next one, whoever it is, ends it first. It is the worker's own: no sandbox sees it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sandfleet.errors import NotStarted, StartFailed

__all__ = ["Holder", "give_up_thread", "hold_thread", "last_epoch", "thread_at_rest"]

log = logging.getLogger("sandfleet.node")

_NAME = ".holder"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """An owner of a thread's sandbox. ``container`` is its name for `SandboxBackend.remove_leftover`; empty before it
    is known, when nothing can run in it yet."""

    node: str
    backend: str
    epoch: int
    container: str = ""


def hold_thread(thread_dir: Path, mine: Holder, end: Callable[[Holder], None]) -> None:
    """Write down that this sandbox is the thread's, after whatever another one left has been ended. May be repeated,
    when more is known of it.

    Args:
        thread_dir: The directory that holds the thread's ``user-data``; made if missing.
        mine: The new owner.
        end: Called with the last owner if that one named another container.

    Raises:
        NotStarted: The thread has a newer owner.
        StartFailed: The file cannot be written.
        SandfleetError: What ``end`` raised; nothing has changed.
    """
    try:
        with _opened(thread_dir, os.O_CREAT) as fd:
            last = _read(fd)
            if last is not None and last.epoch > mine.epoch:
                raise NotStarted("the thread has a newer owner", reason="stale_route")
            if last is not None and last.container and last.container != mine.container:
                end(last)
            _write(fd, json.dumps(asdict(mine)))
    except OSError as exc:
        raise StartFailed(
            f"the thread's holder cannot be written: {exc.strerror} ({exc.filename}); see that the data root works",
            reason="data_unusable",
        ) from exc


def give_up_thread(thread_dir: Path, epoch: int) -> None:
    """The owner of that epoch has ended for sure. Another one's word stays. Never raises: what stays costs the next
    owner a look."""
    try:
        with _opened(thread_dir) as fd:
            last = _read(fd)
            if last is not None and last.epoch == epoch:
                # Nobody holds it. The epoch tells later which of two data roots has the newer files.
                _write(fd, json.dumps(asdict(Holder("", "", epoch))))
    except FileNotFoundError:
        return
    except OSError as exc:
        log.warning("holder.not_removed", extra={"path": str(thread_dir), "error": str(exc)})


def last_epoch(thread_dir: Path) -> int:
    """The epoch of whoever held the thread last; 0 when that cannot be told."""
    try:
        fd = os.open(thread_dir / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        found = _written(fd)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return 0 if found is None else max(0, found.epoch)


@contextmanager
def thread_at_rest(thread_dir: Path) -> Iterator[Holder | None]:
    """Nobody begins to hold the thread while this lasts; gives who held it last, if that one has not ended for sure.

    Raises:
        BlockingIOError: Somebody is about it.
        OSError: The thread's directory cannot be opened.
    """
    with _opened(thread_dir, os.O_CREAT, fcntl.LOCK_NB) as fd:
        yield _read(fd)


@contextmanager
def _opened(thread_dir: Path, flags: int = 0, lock: int = 0) -> Iterator[int]:
    while True:
        try:
            fd = os.open(thread_dir / _NAME, _OPEN | flags, 0o600)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            thread_dir.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | lock)
            # It may have been moved away (see `sandfleet_workers.retention`) while we waited.
            if _is_there(thread_dir, fd):
                yield fd
                return
        finally:
            os.close(fd)


def _is_there(thread_dir: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(thread_dir / _NAME), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read(fd: int) -> Holder | None:
    """Who holds it; None when nobody does."""
    found = _written(fd)
    return found if found is not None and found.node else None


def _written(fd: int) -> Holder | None:
    """What is written there; nothing readable is nothing."""
    line = os.pread(fd, _MOST_BYTES, 0).partition(b"\n")[0]
    try:
        found = Holder(**json.loads(line))
    except (ValueError, TypeError):
        return None
    fields: dict[str, object] = asdict(found)
    return found if all(isinstance(value, int if name == "epoch" else str) for name, value in fields.items()) else None


def _write(fd: int, line: str) -> None:
    """One line in place of the other; whenever this is cut short, the first line is whole."""
    data = f"{line}\n".encode()
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    os.fsync(fd)
