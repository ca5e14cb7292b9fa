"""The fleet that this user's ``sandfleet up`` runs: told by a file that is locked for as long as it runs."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandfleet.errors import ConfigError

__all__ = ["Announcement", "find_running"]

_NAME = "up.json"


class Announcement:
    """Holds the file from before the fleet starts until it ended."""

    def __init__(self, run_root: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another ``sandfleet up`` of this user holds it, or the directory is not ours.
        """
        try:
            run_root.mkdir(parents=True, exist_ok=True, mode=0o711)
        except OSError as exc:
            raise ConfigError(f"run_root {run_root} cannot be made: {exc.strerror}", key="run_root") from exc
        if not _is_ours(run_root):
            raise ConfigError(
                f"run_root {run_root} belongs to somebody else or others may write to it; "
                "set SANDFLEET_RUN_ROOT to a short path of your own",
                key="run_root",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(run_root / _NAME, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            running = find_running(run_root) or {}
            raise ConfigError(
                f"a fleet of yours is running already (pid {running.get('pid', 'unknown')}); "
                "`sandfleet nodes` shows it, Ctrl-C in its terminal ends it; one beside it "
                "needs a SANDFLEET_RUN_ROOT and a --data-root of its own",
                key="run_root",
            ) from None

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Write what other commands need to find the fleet."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(dict(facts)).encode(), 0)

    def close(self) -> None:
        """The fleet ended: say so and give the lock back. Safe to repeat."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def find_running(run_root: Path) -> dict[str, Any] | None:
    """What the running ``sandfleet up`` of this user told of itself, None when there is none.

    A file that nobody locks was left behind by one that was killed. A directory of somebody else is not
    believed: it could send this user's commands to a Redis of theirs.
    """
    if not _is_ours(run_root):
        return None
    try:
        fd = os.open(run_root / _NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = json.loads(os.read(fd, 65536) or b"null")
            return found if isinstance(found, dict) else None
        return None
    except ValueError:
        return None
    finally:
        os.close(fd)


def _is_ours(directory: Path) -> bool:
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
