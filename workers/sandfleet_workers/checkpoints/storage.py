"""The place where checkpoints are kept: any file system that fsspec knows, with time limits and typed errors."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sandfleet.errors import CheckpointFailed, ConfigError, SandfleetError
from sandfleet.redaction import without_credentials

__all__ = ["Storage"]

log = logging.getLogger("sandfleet.node")

T = TypeVar("T")

_AT_ONCE = 8
#: A file that says that the storage is one of ours.
_MARKER = "sandfleet-checkpoints.txt"
#: Calls that never came back. So many, and nothing more is tried: each holds a thread.
_MOST_STUCK = 16
#: There a file appears whole or not at all, so nothing has to be renamed.
_WHOLE_OR_NOT = frozenset({"s3", "s3a", "gcs", "gs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"})


class Storage:
    """A directory of a storage; every path is relative to it. Thread-safe. Blocks, so it is for threads of its own.

    Args:
        url: As fsspec takes it: ``s3://bucket/prefix``, ``file:///srv/checkpoints``, a path.
        options: fsspec's options for that kind of storage.
        timeout_s: How long one call may take.
        seen: A file of this machine that remembers that the storage was there: a file system that was not mounted again
            after a restart must not be taken for an empty storage.

    Raises:
        ConfigError: fsspec or what it needs for this URL is not installed, or the options are wrong.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, *, timeout_s: float = 120.0, seen: Path | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._stuck = 0
        self._seen = seen
        self._is_marked = False
        self._turns = threading.Semaphore(_AT_ONCE)
        self.shown = without_credentials(url).partition("?")[0]
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415  (an extra)

        except ImportError as exc:
            raise ConfigError(
                "checkpoints.url needs fsspec: pip install 'sandfleet[checkpoints]', and s3fs, gcsfs or adlfs for S3, "
                "Google Cloud or Azure",
                key="checkpoints.url",
            ) from exc
        try:
            # Others write there too: what it listed once is not what there is.
            self._fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **dict(options or {}))
        except Exception as exc:
            raise ConfigError(
                f"checkpoints.url {self.shown} cannot be used: {without_credentials(str(exc))}", key="checkpoints.url"
            ) from exc
        self._root = str(root).rstrip("/")
        kinds = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._is_local = "file" in kinds
        self._renames = kinds.isdisjoint(_WHOLE_OR_NOT)
        self._called = hashlib.sha256(f"{sorted(kinds)} {self._root}".encode()).hexdigest()
        if seen is not None:
            with contextlib.suppress(OSError):
                self._is_marked = seen.read_text() == self._called

    # --- what is done there ------------------------------------------------------------------

    def files(self, folder: str) -> dict[str, int]:
        """The files right in a folder, and their sizes; none where there is no such folder.

        Raises:
            CheckpointFailed: It cannot be told.
        """
        return {name: size for name, kind, size in self._listed(folder) if kind == "file"}

    def all_files(self, folder: str) -> dict[str, int]:
        """The files anywhere below a folder by their names without folders, and their sizes.

        Raises:
            CheckpointFailed: It cannot be told.
        """
        if self._renames:
            # Folder by folder: fsspec's own walk over a file system passes over what it cannot read.
            parts = self.each(partial(self.files, f"{folder}/{part}") for part in self.folders(folder))
            return {name: size for files in parts for name, size in files.items()}

        def run() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = self._fs.find(self._at(folder), detail=True)
            return found

        found = self._call("list", run)
        if not found:
            self._check_place()
        return {path.rpartition("/")[2]: int(entry.get("size") or 0) for path, entry in found.items()}

    def folders(self, folder: str) -> list[str]:
        """The folders right in a folder, sorted.

        Raises:
            CheckpointFailed: It cannot be told.
        """
        return sorted(name for name, kind, _ in self._listed(folder) if kind == "directory")

    def read(self, path: str, *, most: int, begin: bool = False) -> bytes:
        """A file of at most ``most`` bytes, or with ``begin`` so much of its beginning.

        Raises:
            FileNotFoundError: There is none.
            CheckpointFailed: It cannot be read, or is larger.
        """

        def run() -> bytes:
            data: bytes = self._fs.cat_file(self._at(path), start=0, end=most if begin else most + 1)
            return data

        data = self._call("read", run)
        if len(data) > most:
            raise CheckpointFailed(f"a file in {self.shown} is larger than it may be", reason="too_large")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Put a file in its place, whole or not at all.

        Raises:
            CheckpointFailed: It cannot be written; where nothing is renamed, an earlier one stands.
        """
        self._call("write", lambda: self._write(self._at(path), data))

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; those that are gone are fine.

        Raises:
            CheckpointFailed: One is there still.
        """
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._call("remove", partial(self._fs.rm_file, self._at(path)))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all in it; none is fine.

        Raises:
            CheckpointFailed: Something is there still.
        """
        with contextlib.suppress(FileNotFoundError):
            self._call("remove", lambda: self._fs.rm(self._at(folder), recursive=True))

    def each(self, work: Iterable[Callable[[], T]]) -> list[T]:
        """Carry out calls of this storage beside each other; their results in order.

        Raises:
            SandfleetError, OSError: The first that failed; the others were carried out or not.
        """
        results: list[Future[T]] = []
        slots = threading.BoundedSemaphore(_AT_ONCE)
        for one in work:
            failed = next((done for done in results[-2 * _AT_ONCE :] if done.done() and done.exception()), None)
            if failed is not None:
                break
            slots.acquire()
            future: Future[T] = Future()
            results.append(future)
            _run_aside(one, future, slots.release)
        return [future.result() for future in results]

    # --- how ---------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _listed(self, folder: str) -> list[tuple[str, str, int]]:
        def run() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self._fs.ls(self._at(folder), detail=True)
            return found

        try:
            found = self._call("list", run)
        except FileNotFoundError:
            self._check_place()
            return []
        return [
            (str(entry["name"]).rstrip("/").rpartition("/")[2], str(entry.get("type")), int(entry.get("size") or 0))
            for entry in found
        ]

    def _check_place(self) -> None:
        """That a folder is missing means that nothing was saved, but only if the storage is the one that it was: a file
        system that is not mounted has nothing in it either.

        Raises:
            CheckpointFailed: It is not, or does not tell.
        """
        marker = self._at(_MARKER)
        if self._call("look", lambda: bool(self._fs.exists(marker))):
            self._remember()
        elif self._is_marked:
            text = f"what was in the storage {self.shown} is not there any more; see that it is mounted"
            if self._seen is not None:
                text += f" (if it was emptied on purpose: remove {self._seen} and restart the node)"
            raise CheckpointFailed(text, reason="storage", retry_after_s=5.0)
        else:
            self.write(_MARKER, b"Checkpoints of sandfleet: one folder for each thread.\n")
            self._remember()

    def _remember(self) -> None:
        if not self._is_marked and self._seen is not None:
            try:
                self._seen.write_text(self._called)
            except OSError as exc:
                log.warning("checkpoint.storage_not_remembered", extra={"path": str(self._seen), "error": str(exc)})
        self._is_marked = True

    def _write(self, path: str, data: bytes) -> None:
        if not self._renames:
            self._fs.pipe_file(path, data)
            return
        parent = path.rpartition("/")[0]
        fresh = f"{parent}/.{secrets.token_hex(8)}.part"
        self._fs.makedirs(parent, exist_ok=True)
        try:
            with self._fs.open(fresh, "wb") as file:
                file.write(data)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            self._fs.mv(fresh, path)
        except BaseException:
            with contextlib.suppress(Exception):  # the one above is what matters
                self._fs.rm_file(fresh)
            raise

    def _call(self, what: str, run: Callable[[], T]) -> T:
        """On a thread that may be given up: a storage that hangs must hang nothing else."""
        if self._stuck >= _MOST_STUCK:
            raise CheckpointFailed(f"the storage {self.shown} does not answer", reason="stuck", retry_after_s=60.0)
        if not self._turns.acquire(timeout=self._timeout_s):
            raise self._late(what)
        future: Future[T] = Future()
        _run_aside(run, future, self._turns.release)
        try:
            return future.result(self._timeout_s)
        except NotInTime:
            if not future.done():
                self._stuck += 1
                self._turns.release()  # its own comes when it is back
                future.add_done_callback(lambda _: self._came_back())
                raise self._late(what) from None
            raise self._failed(what, TimeoutError("timed out")) from None
        except (FileNotFoundError, SandfleetError):
            raise
        except Exception as exc:
            raise self._failed(what, exc) from exc

    def _came_back(self) -> None:
        self._stuck -= 1
        self._turns.acquire(blocking=False)

    def _late(self, what: str) -> CheckpointFailed:
        log.error("checkpoint.storage_hangs", extra={"storage": self.shown, "call": what})
        text = f"the storage {self.shown} did not answer within {self._timeout_s:g} s ({what})"
        return CheckpointFailed(text, reason="timeout", retry_after_s=10.0)

    def _failed(self, what: str, exc: Exception) -> CheckpointFailed:
        text = without_credentials(f"{type(exc).__name__}: {exc}")[:500]
        reason = "no_space" if isinstance(exc, OSError) and exc.errno in (28, 122) else "storage"
        return CheckpointFailed(f"the storage {self.shown} refused to {what}: {text}", reason=reason, retry_after_s=5.0)


def _run_aside(run: Callable[[], T], future: Future[T], after: Callable[[], None]) -> None:
    def carry_out() -> None:
        try:
            value = run()
        except BaseException as exc:  # noqa: BLE001  (whoever waits for it decides)
            after()
            future.set_exception(exc)
        else:
            after()
            future.set_result(value)

    threading.Thread(target=carry_out, name="sandfleet-storage", daemon=True).start()
