"""When a node saves its threads' data, and when it brings it back.

What talks to the storage runs on threads of its own: never on the lease's, never on the waiter's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Completion, Done
from sandfleet.checkpoints import Checkpoint, Restoration
from sandfleet.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    InternalError,
    NotSupported,
    SandfleetError,
)
from sandfleet.ids import Identity
from sandfleet.ops import OPS
from sandfleet.store.base import Swept
from sandfleet.wire import OpMessage
from sandfleet_workers.checkpoints import restoring
from sandfleet_workers.checkpoints.saving import INDEX, Policy, Request, save
from sandfleet_workers.checkpoints.storage import Storage
from sandfleet_workers.checkpoints.vault import Vault
from sandfleet_workers.checkpoints.wishes import Wish
from sandfleet_workers.holdings import Held
from sandfleet_workers.sandbox_dirs import thread_directory
from sandfleet_workers.slots import settle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sandfleet_workers.node import Node

__all__ = ["Checkpoints"]

log = logging.getLogger("sandfleet.node")

_THREADS = 3
#: How long the end of a sandbox waits for its data to be saved; it is saved on after that.
_END_WITHIN_S = 10.0
#: After a failure, and after one that found something changing, the next one comes so much later.
_AGAIN_S = 60.0
_LISTED, _SKIPPED_LISTED = 100, 5
_SEEN = "checkpoint-storage"
_NO_STORAGE = "there is no place for checkpoints: set checkpoints.url (SANDFLEET_CHECKPOINT_URL) on the nodes"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Checkpoints:
    """The checkpoints of one node's threads. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._storage: Storage | None = None
        self._lock = threading.Lock()
        self._threads: dict[str, _InUse] = {}
        self._waiting: set[int] = set()
        self._leaving_until = 0.0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        #: How many were made, found unchanged, failed, restored.
        self.tally: Counter[str] = Counter()

    # --- coming and going --------------------------------------------------------------------

    def open(self) -> None:
        """Find the storage, if one is set; without one nothing here does anything.

        Raises:
            ConfigError: It cannot be used: fsspec is missing, or the URL is wrong.
        """
        settings = self._node.settings
        url = settings.checkpoint_url or settings.container.persistent_volume
        if not url:
            return
        seen = settings.data_root / "nodes" / self._node.node_id / _SEEN
        self._storage = Storage(url, settings.checkpoint_options, seen=seen)
        for number in range(_THREADS):
            name = f"sandfleet-checkpoint-{number}"
            # A storage that hangs must not keep the process from ending.
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def storage(self) -> Storage | None:
        """Where they are kept, if anywhere."""
        return self._storage

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("checkpoint.thread_failed")

    def close(self) -> None:
        """Take nothing more; what is being saved is cut short with the process."""
        for _ in range(_THREADS):
            self._work.put(None)

    # --- saving by itself --------------------------------------------------------------------

    def touched(self, message: OpMessage) -> None:
        """An operation has ended: if it is of a kind that changes anything, its sandbox may have other files now."""
        held = self._node.held.get(message.route.sandbox_id)
        if held is not None and message.kind in OPS and OPS[message.kind].effect and message.kind != "checkpoint":
            held.effects += 1

    def look(self, swept: Iterable[Swept]) -> None:
        """Have saved what has changed and is not in use, or was not saved for long. Only a look: for the lease's
        thread."""
        if self._storage is None:
            return
        settings, now = self._node.settings, time.monotonic()
        every_s = settings.checkpoint_every_s
        for one in swept:
            held = self._node.held.get(one.sandbox_id)
            if held is None or held.stopping or held.save_after > now:
                continue
            if one.busy and every_s and now - max(held.saved_at, held.made_at) >= every_s:
                held.effects += 1  # what runs may have written
            if held.effects == held.saved_effects:
                continue
            released = one.warm_since_ms is not None and settings.checkpoint_on_release
            if released or (every_s and now - max(held.saved_at, held.made_at) >= every_s):
                self.save_soon(held, "released" if released else "due")

    def save_soon(self, held: Held, reason: str) -> None:
        """Save on another thread what has changed, unless that is under way."""
        with self._lock:
            if self._storage is None or held.effects == held.saved_effects or id(held) in self._waiting:
                return
            self._waiting.add(id(held))

        def run() -> None:
            try:
                self._save_quietly(held, reason)
            finally:
                with self._lock:
                    self._waiting.discard(id(held))

        self._work.put(run)

    def save(self, held: Held, reason: str) -> None:
        """Save what has changed, and wait for that a while. Never raises: what goes wrong is logged and counted."""
        if self._storage is None or held.effects == held.saved_effects or self._node.fenced:
            return
        within_s = self._patience_s()
        over = threading.Event()

        def run() -> None:
            try:
                self._save_quietly(held, reason)
            finally:
                over.set()

        self._work.put(run)
        if not over.wait(within_s):
            extra = {"sandbox_id": held.route.sandbox_id, "reason": reason, "waited_s": within_s}
            log.warning("checkpoint.not_waited_for", extra=extra)

    def _patience_s(self) -> float:
        if not self._node.draining:
            return _END_WITHIN_S
        now = time.monotonic()
        with self._lock:
            # All that end with the node share its time, or a storage that hangs would hold the node for each.
            self._leaving_until = self._leaving_until or now + self._node.settings.drain_timeout_s
            return max(0.0, self._leaving_until - now)

    def _save_quietly(self, held: Held, reason: str) -> None:
        if held.effects == held.saved_effects:
            return  # by another one that was in line, or it is to be kept no more
        try:
            self._save(held, reason)
        except SandfleetError as exc:
            held.save_after = time.monotonic() + _AGAIN_S
            extra = {"sandbox_id": held.route.sandbox_id, "reason": reason, "code": exc.code, "error": str(exc)}
            log.error("checkpoint.failed", extra=extra)

    def _save(self, held: Held, reason: str, *, label: str | None = None, always: bool = False) -> Checkpoint:
        vault, effects, now = self._vault(held.identity), held.effects, time.monotonic()
        request = Request(
            held.identity,
            held.route.epoch,
            self._node.lease.now_ms(),
            label=label,
            always=always,
            may_remove=lambda: self._node.lease.holds() and not self._node.fenced,
        )
        settings = self._node.settings
        policy = Policy(settings.checkpoint_max_bytes, settings.checkpoint_keep)
        user_data = self._directory(held.identity)
        try:
            with self.alone(held.identity), closing(_Opened(user_data)) as top:
                made, new = save(top.fd, vault, request, policy, user_data.parent / INDEX)
        except OSError as exc:
            self.tally["failed"] += 1
            raise CheckpointFailed(f"the thread's data cannot be read: {exc.strerror}", reason="data") from exc
        except SandfleetError:
            self.tally["failed"] += 1
            raise
        held.saved_at = now
        if made.consistent:
            held.saved_effects = effects
        else:
            held.save_after = now + _AGAIN_S
        self.tally["made" if new else "unchanged"] += 1
        facts = {"sandbox_id": held.route.sandbox_id, "checkpoint_id": made.id, "files": made.files, "new": new}
        log.info("checkpoint.saved", extra={**facts, "reason": reason, "took_s": round(time.monotonic() - now, 3)})
        return made

    # --- what is asked for -------------------------------------------------------------------

    def start(self, held: Held, args: Mapping[str, Any], done: Done) -> None:
        """Save the sandbox's data now, as the operation ``checkpoint`` asks; ``done`` gets the `Checkpoint`."""
        self._aside(lambda: self._save(held, "asked", label=args.get("name"), always=True).to_wire(), done)

    def answer(self, message: OpMessage, done: Done) -> None:
        """Carry out ``node.checkpoints``: list what is saved of the message's identity, the newest first."""
        self._aside(lambda: {"checkpoints": self._list(message.identity)}, done)

    def _list(self, identity: Identity) -> list[dict[str, Any]]:
        found = self._vault(identity).checkpoints()[:_LISTED]
        # A reply has a limit.
        return [replace(one, skipped=one.skipped[:_SKIPPED_LISTED]).to_wire() for _, one in found]

    def _aside(self, work: Callable[[], Any], done: Done) -> None:
        if self._storage is None:
            done(Completion(error=NotSupported(_NO_STORAGE, reason="no_checkpoints")))
            return

        def run() -> None:
            try:
                completion = Completion(value=work())
            except SandfleetError as exc:
                completion = Completion(error=exc)
            except Exception as exc:
                log.exception("checkpoint.thread_failed")
                completion = Completion(error=InternalError(f"{type(exc).__name__}: {exc}"))
            done(completion)

        self._work.put(run)

    def forget(self, identity: Identity) -> None:
        """Everything that was saved of it goes, with its data.

        Raises:
            CheckpointFailed: Something of it may be there still.
        """
        if self._storage is not None:
            with self.alone(identity):
                self._vault(identity).remove()

    # --- restoring ---------------------------------------------------------------------------

    def may_restore(self, args: Mapping[str, Any]) -> bool:
        """Whether a creation with these arguments may take the time of a restoration."""
        return bool(args.get("restore")) or (self._storage is not None and self._wanted_on_start)

    @property
    def _wanted_on_start(self) -> bool:
        return self._node.settings.container.restore_on_start

    def restore(self, message: OpMessage, take: Callable[[], None]) -> Restoration | None:
        """Bring back what the creation asks for, before its sandbox starts; None when that is nothing.

        Args:
            take: Called before anything is touched, and again before anything is replaced: nobody works on the thread's
                data after that.

        Raises:
            NoCheckpoint, CheckpointCorrupt, CheckpointFailed: It cannot be had.
            NotSupported: This node has no storage.
            StartFailed: It cannot be put in its place here.
        """
        wish = self._wish(message.args)
        if wish is None:
            return None
        identity = message.identity
        thread_dir = self._directory(identity).parent
        try:
            settle(thread_dir)
            if wish.empty:
                take()
                restoring.set_aside(thread_dir)
                return None
            if not wish.replace and restoring.stands(self._vault(identity), thread_dir):
                return None
            source = identity if wish.source is None else Identity(wish.source, identity.user_id)
            with self.alone(identity):  # what was here is saved to its end
                return self._restored(source, wish, thread_dir, take)
        except OSError as exc:
            raise InternalError(f"the thread's directory cannot be looked at: {exc}") from exc

    def _restored(self, source: Identity, wish: Wish, thread_dir: Path, take: Callable[[], None]) -> Restoration | None:
        vault, settings, began = self._vault(source), self._node.settings, time.monotonic()
        passed_over: list[str] = []
        while True:
            manifest = restoring.choose(vault, wish.checkpoint, required=wish.required, passed_over=passed_over)
            if manifest is None:
                return None
            take()
            try:
                restoring.restore(
                    vault,
                    manifest,
                    thread_dir,
                    max_bytes=settings.checkpoint_max_bytes,
                    min_free_bytes=settings.min_free_bytes,
                    still_ours=take,
                )
                break
            except CheckpointCorrupt as exc:
                if wish.checkpoint is not None:
                    raise
                log.error("checkpoint.unusable", extra={"checkpoint_id": manifest.name.id, "error": str(exc)})
                passed_over.append(manifest.name.id)
        self.tally["restored"] += 1
        told = manifest.summary()
        facts = {"thread_id": source.thread_id, "checkpoint_id": told.id, "files": told.files}
        log.info("checkpoint.restored", extra={**facts, "took_s": round(time.monotonic() - began, 3)})
        return Restoration.of(told, passed_over=passed_over)

    def began_with(self, held: Held, restored: Restoration | None) -> None:
        """A sandbox begins with what `restore` gave: if that was something, it is the thread's newest state now, and
        saved as such (which copies nothing where nothing differs from the last checkpoint)."""
        held.restored = restored
        if restored is not None:
            held.effects += 1
            self.save_soon(held, "restored")
        elif self._storage is not None and _has_data(self._directory(held.identity).parent):
            held.effects += 1  # whoever had it before may have died before it was saved

    def _wish(self, args: Mapping[str, Any]) -> Wish | None:
        wish = Wish.of(args, on_start=self._storage is not None and self._wanted_on_start)
        if wish is not None and self._storage is None and not wish.empty:
            if wish.required:
                raise NotSupported(_NO_STORAGE, reason="no_checkpoints")
            return None
        return wish

    # --- how ---------------------------------------------------------------------------------

    def _vault(self, identity: Identity) -> Vault:
        if self._storage is None:
            raise NotSupported(_NO_STORAGE, reason="no_checkpoints")
        return Vault(self._storage, identity.digest)

    def _directory(self, identity: Identity) -> Path:
        return thread_directory(self._node.settings.data_root, identity)

    @contextmanager
    def alone(self, identity: Identity) -> Iterator[None]:
        """Nothing else of the thread is saved, restored or removed on this node while this lasts."""
        digest = identity.digest
        with self._lock:
            in_use = self._threads.setdefault(digest, _InUse())
            in_use.count += 1
        try:
            with in_use.lock:
                yield
        finally:
            with self._lock:
                in_use.count -= 1
                if not in_use.count:
                    del self._threads[digest]


def _has_data(thread_dir: Path) -> bool:
    try:
        return restoring.has_data(thread_dir)
    except OSError:
        return True


class _InUse:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


class _Opened:
    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, _DIRECTORY)

    def close(self) -> None:
        os.close(self.fd)
