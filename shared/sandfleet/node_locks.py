"""Whether a node runs: it holds the lock of its id for as long as its process lives; the kernel sees to the rest."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_held", "lock_of"]


def lock_of(data_root: Path, node_id: str) -> Path:
    """Where the lock of a node's id lies."""
    return data_root / "nodes" / node_id / "lock"


def is_held(lock: Path) -> bool:
    """Whether a process of this machine holds it. One that this user may not look at counts as held."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
