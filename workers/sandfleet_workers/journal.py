"""What a node knows about its sandboxes and nobody else does, on disk, so that its next run knows it too."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandfleet.errors import StartFailed

__all__ = ["Journal"]

log = logging.getLogger("sandfleet.node")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class Journal:
    """A node's sandboxes, one file each, which only its own user can read. Thread-safe for different names.

    Whoever makes one holds the lock of that node.

    Raises:
        StartFailed: ``reason`` journal: its directory cannot be made.
    """

    def __init__(self, node_dir: Path) -> None:
        self._path = node_dir / "sandboxes"
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.chmod(0o700)
            _sync(node_dir)
        except OSError as exc:
            raise _failed(exc) from exc

    def write(self, name: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry in place of an earlier one: after any crash either of them is there, whole.

        When this returns it is on the disk.

        Raises:
            StartFailed: ``reason`` journal; the earlier entry stands.
        """
        target, fresh = self._at(name), self._unfinished(name)
        data = json.dumps(dict(entry), sort_keys=True, allow_nan=False).encode()
        try:
            try:
                _write(fresh, data)
                fresh.replace(target)
            except OSError:
                with suppress(OSError):  # the one above is what matters
                    fresh.unlink()
                raise
            _sync(self._path)
        except OSError as exc:
            raise _failed(exc) from exc

    def remove(self, name: str) -> None:
        """Forget a sandbox. It may be back after a crash, and so may its file if the disk refuses (which is logged)."""
        for path in (self._at(name), self._unfinished(name)):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.error("journal.not_removed", extra={"path": str(path), "error": str(exc)})

    def read(self) -> dict[str, dict[str, Any]]:
        """Every entry by name. What cannot be read is set aside as ``*.bad`` and logged; what a crash left unfinished
        is removed, so nobody may write meanwhile. Never raises for what it finds.
        """
        entries = {}
        for path in self._files():
            if path.name.startswith("."):
                self._discard(path)
            elif path.suffix == ".json":
                try:
                    entries[path.stem] = _entry(path)
                except (OSError, ValueError, RecursionError) as exc:
                    self._set_aside(path, exc)
        return entries

    def set_aside(self, name: str, why: Exception) -> None:
        """What was read makes no sense: keep the file as ``*.bad``, out of the way, and say so. Never raises."""
        self._set_aside(self._at(name), why)

    def _at(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name an entry of the journal")
        return self._path / f"{name}.json"

    def _unfinished(self, name: str) -> Path:
        return self._path / f".{name}.new"

    def _files(self) -> list[Path]:
        try:
            return sorted(self._path.iterdir())
        except OSError as exc:
            log.error("journal.not_readable", extra={"path": str(self._path), "error": str(exc)})
            return []

    def _discard(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.error("journal.not_removed", extra={"path": str(path), "error": str(exc)})

    def _set_aside(self, path: Path, why: Exception) -> None:
        aside = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.bad")
        log.error("journal.entry_unreadable", extra={"path": str(path), "kept_as": str(aside), "error": str(why)})
        try:
            path.rename(aside)
        except OSError as exc:
            log.error("journal.not_set_aside", extra={"path": str(path), "error": str(exc)})


def _entry(path: Path) -> dict[str, Any]:
    entry = json.loads(path.read_bytes())
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    return entry


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, _WRITE, 0o600), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(exc: OSError) -> StartFailed:
    return StartFailed(
        f"the node's journal cannot be written: {exc.strerror} ({exc.filename}); see that its disk has room and works",
        reason="journal",
    )
