"""A lock around one file of one sandbox, for a caller's own read-modify-write; it holds across processes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from sandfleet.errors import Busy, NotSupported, SandfleetError
from sandfleet.ids import new_token
from sandfleet.tools.paths import normalise

__all__ = ["FileOperationLock", "get_file_operation_lock"]

log = logging.getLogger("sandfleet.client")

#: A holder that died is waited for so long.
_TTL_S = 15.0
_WAIT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


class _Locks(Protocol):
    """Where locks are kept: a store, or `_ProcessLocks`."""

    def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
        """Take or extend."""

    def unlock(self, name: str, token: str) -> None:
        """Give back."""


class _ProcessLocks:
    """Locks of this process only, for providers without a store."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: dict[str, str] = {}

    def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
        """Take or extend; ``ttl_s`` does not matter, since holders die with this process."""
        with self._mutex:
            return self._held.setdefault(name, token) == token

    def unlock(self, name: str, token: str) -> None:
        """Give back if it is still the token's."""
        with self._mutex:
            if self._held.get(name) == token:
                del self._held[name]


class _Renewer:
    """One daemon thread that extends the locks this process holds; it ends when there were none for a while."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, FileOperationLock] = {}
        self._running = False

    def add(self, lock: FileOperationLock) -> None:
        """Extend the lock until `discard`."""
        with self._changed:
            self._held[lock.token] = lock
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="sandfleet-file-locks", daemon=True).start()

    def discard(self, lock: FileOperationLock) -> None:
        """Extend it no longer."""
        with self._changed:
            self._held.pop(lock.token, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_TTL_S / 4)
                if not self._held:
                    self._running = False
                    return
                held = list(self._held.values())
            for lock in held:
                lock.renew()


_in_process = _ProcessLocks()
_renewer = _Renewer()


def _after_fork() -> None:
    global _in_process, _renewer  # their mutexes may have been held, and their thread is not here
    _in_process, _renewer = _ProcessLocks(), _Renewer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class FileOperationLock:
    """What `get_file_operation_lock` gives: ``with`` or ``async with``, or `acquire` and `release`. Not re-entrant.

    Attributes:
        lost: The lock could not be extended and somebody else may have taken it meanwhile. What was written under it
            may have overwritten their version; `Sandbox.write_file` with ``if_digest`` cannot.
    """

    def __init__(self, locks: _Locks, name: str, *, timeout_s: float = _WAIT_S) -> None:
        self.token = new_token()
        self.lost = False
        self._locks = locks
        self._name = name
        self._timeout_s = timeout_s
        self._held = False
        self._abandoned = False

    def acquire(self) -> bool:
        """Wait for the lock and take it; always True.

        Raises:
            Busy: Somebody held it longer than a minute.
            RuntimeError: This very object holds it already.
        """
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._take():
            self._check(until)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        return True

    async def acquire_async(self) -> bool:
        """`acquire` for event loops."""
        loop = asyncio.get_running_loop()
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        try:
            while not await loop.run_in_executor(None, self._take):
                self._check(until)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        except asyncio.CancelledError:
            # The executor may take it after we stopped listening: then nobody would give it back before it expires.
            self._abandoned = True
            loop.run_in_executor(None, self.release)
            raise
        return True

    def release(self) -> None:
        """Give the lock back; nothing happens when it is not held. A store that does not answer lets it expire."""
        _renewer.discard(self)
        self._held = False
        try:
            self._locks.unlock(self._name, self.token)
        except SandfleetError as exc:
            log.warning("file_lock.release_failed", extra={"lock": self._name, "error": str(exc)})

    async def release_async(self) -> None:
        """`release` for event loops."""
        await asyncio.get_running_loop().run_in_executor(None, self.release)

    def renew(self) -> None:
        """Push the expiry on; called by a thread of this process four times per lifetime of the lock."""
        try:
            kept = self._locks.lock(self._name, self.token, ttl_s=_TTL_S)
        except SandfleetError as exc:
            log.warning("file_lock.not_renewed", extra={"lock": self._name, "error": str(exc)})
            return
        if not self._held:
            # Released between the renewer's look and ours: the renewal must not bring it back to life.
            self._locks.unlock(self._name, self.token)
        elif not kept and not self.lost:
            self.lost = True
            log.warning("file_lock.lost", extra={"lock": self._name})

    def _take(self) -> bool:
        if self._held:
            raise RuntimeError("this file operation lock is held already; it is not re-entrant")
        if not self._locks.lock(self._name, self.token, ttl_s=_TTL_S):
            return False
        self._held, self.lost = True, False
        _renewer.add(self)
        if self._abandoned:
            self.release()
        return True

    def _check(self, until: float) -> None:
        if time.monotonic() >= until:
            raise Busy(
                f"another call has been working on this file for more than {self._timeout_s:g} s", retry_after_s=5.0
            )

    def __enter__(self) -> FileOperationLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> FileOperationLock:
        await self.acquire_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.release_async()


def get_file_operation_lock(sandbox: Any, path: str) -> FileOperationLock:
    """A lock on one file of a sandbox, for reading it, changing it and writing it back.

    ``with get_file_operation_lock(sandbox, path):`` or ``async with``. All processes of a fleet that ask for the same
    file get the same lock, however they spell its path (symbolic links are not followed); write_file and
    str_replace take it too, so do not call these two while you hold it. A holder that dies loses it after 15 seconds.
    With a provider that has no store (a mock, or one of your own) the lock holds in this process.

    Args:
        sandbox: A `Sandbox` or `AsyncSandbox`, or anything with an ``id``.
        path: The file, in the sandbox.
    """
    key = hashlib.sha256(normalise(path).encode("utf-8", "surrogatepass")).hexdigest()
    return FileOperationLock(_locks_of(sandbox), f"file:{sandbox.id}:{key}")


def _locks_of(sandbox: Any) -> _Locks:
    try:
        provider: Any = getattr(sandbox, "_provider", None)
    except NotSupported:  # a `Sandbox` with operations of its own
        provider = None
    provider = getattr(provider, "_sync", provider)
    client = provider._client() if hasattr(provider, "_client") else None
    store: _Locks | None = getattr(client, "store", None)
    return store if store is not None else _in_process
