"""Which node this process is: an id held under a file lock, and the data root it serves."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import time
from pathlib import Path

from sandfleet.errors import ConfigError, NodeIdInUse
from sandfleet.ids import check_node_id, new_op_id

__all__ = ["HeldNodeId", "data_id", "hold_node_id"]

_MAX_NODES_PER_ROOT = 1000
_CLEARING = "clearing up: "
_CLEARED_WITHIN_S, _TOLD_WITHIN_S, _LOOK_S = 120.0, 0.5, 0.05


class HeldNodeId:
    """A node id this process holds until `release` or its death (the kernel drops the lock)."""

    def __init__(self, node_id: str, directory: Path, fd: int) -> None:
        self.node_id = node_id
        self.directory = directory
        self._fd = fd

    def release(self) -> None:
        """Give the id back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hold_node_id(data_root: Path, wanted: str | None, *, clearing: bool = False) -> HeldNodeId:
    """Take ``wanted``, or the first free ``<host>-<n>`` of this data root.

    So ``--scale worker=N`` on one volume gives N distinct nodes without anybody counting. An id whose holder is
    ``clearing`` is waited for.

    Args:
        data_root: Where ids are held.
        wanted: The id, if any.
        clearing: It is taken to remove what its dead node left, for a moment only, and the node may come back.

    Raises:
        NodeIdInUse: Another live process on this data root holds ``wanted``.
        ConfigError: The data root cannot be written.
    """
    names = [check_node_id(wanted)] if wanted else [f"{_host()}-{n}" for n in range(1, _MAX_NODES_PER_ROOT + 1)]
    for name in names:
        directory = data_root / "nodes" / name
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"data_root {data_root} cannot be used: {exc.strerror} ({exc.filename}); "
                "set SANDFLEET_DATA_ROOT to a directory this user may write",
                key="data_root",
            ) from exc
        if not _locked(fd, patient=bool(wanted) and not clearing):
            os.close(fd)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_CLEARING if clearing else ''}{os.getpid()}\n".encode(), 0)
        return HeldNodeId(name, directory, fd)
    raise NodeIdInUse(
        f"node id {wanted or names[0]} is held by another process on {data_root}; "
        "choose another --node-id or --data-root, or end that one",
        node_id=wanted or names[0],
    )


def _locked(fd: int, *, patient: bool) -> bool:
    """Take the lock; a ``patient`` caller waits for one who clears up."""
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited_s = time.monotonic() - began
            # Whoever took the lock this very moment has not said yet what for.
            clears = os.pread(fd, 100, 0).startswith(_CLEARING.encode())
            if not patient or waited_s > (_CLEARED_WITHIN_S if clears else _TOLD_WITHIN_S):
                return False
            time.sleep(_LOOK_S)


def data_id(data_root: Path) -> str:
    """The id of the data root itself: nodes that share it (one machine, NFS) share thread data.

    Raises:
        ConfigError: It cannot be read or made, or what is there is no id.
    """
    path = data_root / "data-id"
    try:
        if not path.exists():
            _make_data_id(path)
        # Read even by whoever made it: of several nodes that start at once, one wins, and all must agree.
        found = path.read_text(errors="replace").strip()
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be made or read: {exc.strerror}; "
            "set SANDFLEET_DATA_ROOT to a directory this user may write",
            key="data_root",
        ) from exc
    if not re.fullmatch(r"[0-9a-f]{32}", found):
        raise ConfigError(f"{path} does not hold a data id; restore it from a backup", key="data_root")
    return found


def _make_data_id(path: Path) -> None:
    """Put a new id there, complete from its first moment on, unless another node was faster."""
    # A random name: in containers every node may be the same pid.
    fresh = path.with_name(f"data-id.{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            os.write(fd, f"{new_op_id()}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(fresh, path)
    except FileExistsError:
        pass  # the first of several nodes won
    finally:
        fresh.unlink(missing_ok=True)


def _host() -> str:
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")[:40]
    return name or "node"
