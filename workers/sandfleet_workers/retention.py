"""``gc`` on a node: data of threads that nobody came back to, and what dead nodes left in the data root.

Data is removed in one step that nobody can begin to use it in: its holder's file is locked, the registry knows no
sandbox of the thread, no container runs on it, and the directory is moved aside. Whoever wants the thread then waits
for that moment and begins anew.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import Busy, ConfigError, InternalError, NodeIdInUse, SandfleetError, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.leftover_dirs import TRASH, ThreadData, directories, measured, remove_whole, thread_data
from sandfleet.node_locks import is_held, lock_of
from sandfleet.store.base import Waiter
from sandfleet_workers.checkpoints.pruning import prune, saved_threads
from sandfleet_workers.checkpoints.storage import Storage
from sandfleet_workers.holders import thread_at_rest
from sandfleet_workers.node_identity import hold_node_id
from sandfleet_workers.retention_plan import Rules, surplus, surplus_checkpoints

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["Retention", "answer_gc"]

log = logging.getLogger("sandfleet.node")

#: What nobody would miss sooner: leftovers of dead nodes, and what was set aside.
_LEFTOVER_S = 86_400.0
_ROWS = 2000
_one_at_a_time = threading.Lock()


@dataclass
class Item:
    """One thing that may go. ``done`` and ``failed`` say what came of it."""

    kind: str
    id: str
    why: str
    size_bytes: int
    remove: Callable[[], bool] = field(repr=False)
    done: bool = False
    failed: str = ""

    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        facts = {"kind": self.kind, "id": self.id, "why": self.why, "size_bytes": self.size_bytes, "done": self.done}
        return {**facts, "failed": self.failed} if self.failed else facts


def answer_gc(node: Node, asked: Mapping[str, Any], *, reply_to: str, request: str) -> None:
    """Carry out a message of remote control on a thread of its own, and send what was found to the caller's stream."""

    def work() -> None:
        try:
            payload: dict[str, Any] = {"ok": Retention(node).collect(Rules.from_wire(asked))}
        except SandfleetError as exc:
            payload = {"error": exc.to_wire()}
        except Exception as exc:
            log.exception("gc.failed", extra={"node_id": node.node_id})
            payload = {"error": InternalError(f"{type(exc).__name__}: {exc}").to_wire()}
        try:
            node.store.reply(Waiter(request, reply_to, "", 0.0), json.dumps(payload))
        except StoreUnavailable as exc:
            log.warning("gc.not_told", extra={"node_id": node.node_id, "error": str(exc)})

    threading.Thread(target=work, name="sandfleet-gc", daemon=True).start()


class Retention:
    """Finds, and with `Rules.remove` removes, what the rules give up on this node's data root."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._data_root: Path = node.settings.data_root

    def collect(self, rules: Rules) -> dict[str, Any]:
        """What was found and what came of it: ``found`` (the biggest first, 2000 at most), ``count``, ``size_bytes``,
        ``removed``, ``removed_bytes``.

        Raises:
            Busy: Another one is about it.
            ConfigError: The data root cannot be read.
            StoreUnavailable: Nobody can tell what is in use.
        """
        if not _one_at_a_time.acquire(blocking=False):
            raise Busy("this node is at another gc", retry_after_s=5.0)
        try:
            items = list(self._items(rules))
            if rules.remove:
                for item in items:
                    self._remove(item)
        finally:
            _one_at_a_time.release()
        items.sort(key=lambda item: -item.size_bytes)
        done = [item for item in items if item.done]
        return {
            "found": [item.document() for item in items[:_ROWS]],
            "count": len(items),
            "size_bytes": sum(item.size_bytes for item in items),
            "removed": len(done),
            "removed_bytes": sum(item.size_bytes for item in done),
        }

    def _items(self, rules: Rules) -> Iterator[Item]:
        now_s = self._file_system_now()
        # Only what is nobody's goes without being asked for by age.
        left_s = rules.older_than_s if rules.older_than_s is not None else _LEFTOVER_S
        yield from self._trash(now_s)
        yield from self._set_aside(now_s, left_s)
        yield from self._dead_nodes(now_s, left_s)
        if rules.thread_data:
            yield from self._thread_data(rules, now_s)
        if rules.checkpoints:
            yield from self._checkpoints(rules)

    def _file_system_now(self) -> float:
        """The clock that the ages of files are told by; another machine's, on a shared data root."""
        own = self._data_root / "nodes" / self._node.node_id
        os.utime(own)
        return own.stat().st_mtime

    def _remove(self, item: Item) -> None:
        try:
            item.done = item.remove()
        except (SandfleetError, OSError) as exc:
            item.failed = exc.message if isinstance(exc, SandfleetError) else str(exc)
            log.warning("gc.not_removed", extra={"what": item.kind, "id": item.id, "error": str(exc)})
        else:
            log.info("gc.removed" if item.done else "gc.in_use", extra={"what": item.kind, "id": item.id})

    # --- threads' data -----------------------------------------------------------------------

    def _thread_data(self, rules: Rules, now_s: float) -> Iterator[Item]:
        running = self._running()
        for data in surplus(thread_data(self._data_root, now_s=now_s), rules):
            if not self._in_use(data):
                whose = data.thread_id if data.user_id is None else f"{data.user_id}/{data.thread_id}"
                why = f"no sandbox, nothing changed for {data.idle_s / 86_400:.1f} days"
                yield Item("thread data", whose, why, data.size_bytes, self._forget(data, running))

    def _forget(self, data: ThreadData, running: set[str]) -> Callable[[], bool]:
        def forget() -> bool:
            aside = self._data_root / f"{TRASH}{secrets.token_hex(8)}"
            checkpoints = self._node.lifecycle.checkpoints
            try:
                # What is being saved is saved to its end: half of it would be the thread's newest checkpoint.
                with checkpoints.alone(Identity(data.thread_id, data.user_id)), thread_at_rest(data.path) as holder:
                    # From here on nobody can begin; whoever began before is in the registry.
                    if self._in_use(data) or (holder is not None and holder.container in running):
                        return False
                    data.path.rename(aside)
            except BlockingIOError:
                return False
            remove_whole(aside)
            if data.user_id is not None:
                _remove_empty(data.path.parent, data.path.parent.parent)
            return True

        return forget

    def _in_use(self, data: ThreadData) -> bool:
        return self._has_sandbox(Identity(data.thread_id, data.user_id))

    def _has_sandbox(self, identity: Identity) -> bool:
        """Whether the registry has a sandbox of the thread, in whatever state: a lost one may run still."""
        found = self._node.store.sandboxes(thread_id=identity.thread_id, user_id=identity.user_id)
        # Without a user the filter lets every user's thread of that name through.
        return any(Identity(info.thread_id, info.user_id) == identity for info in found)

    def _running(self) -> set[str]:
        """The names of all containers here, whosever."""
        return {name for names in self._node.lifecycle.leftovers.listed().values() for name in names}

    # --- checkpoints -------------------------------------------------------------------------

    def _checkpoints(self, rules: Rules) -> Iterator[Item]:
        storage = self._node.lifecycle.checkpoints.storage
        if storage is None:
            why = f"node {self._node.node_id} saves no checkpoints: checkpoints.url is empty"
            raise ConfigError(why, key="checkpoints.url")
        now_s = self._node.store.now_ms() / 1000
        for saved in saved_threads(storage):
            identity = saved.identity
            if identity is None or (rules.user_id is not None and identity.user_id != rules.user_id):
                continue  # where nothing is whole, the first one may be being saved at this moment
            gone = surplus_checkpoints(saved.checkpoints, rules, now_s=now_s)
            # A thread that has a sandbox may be about to save it.
            if gone and not self._has_sandbox(identity):
                whose = identity.thread_id if identity.user_id is None else f"{identity.user_id}/{identity.thread_id}"
                left = len(saved.checkpoints) - len(gone)
                days = (now_s - min(one.saved_at for one in gone)) / 86_400
                why = f"{len(gone)} checkpoints, the oldest of {days:.1f} days; {left} stay"
                # Objects are shared: what goes with some of them is only known when they have gone.
                size = saved.stored_bytes if not left else 0
                yield Item("checkpoints", whose, why, size, self._prune(storage, saved.digest, identity, gone))

    def _prune(
        self, storage: Storage, digest: str, identity: Identity, gone: Sequence[Checkpoint]
    ) -> Callable[[], bool]:
        def remove() -> bool:
            with self._node.lifecycle.checkpoints.alone(identity):
                if self._has_sandbox(identity):
                    return False
                prune(storage, digest, {one.id for one in gone})
            return True

        return remove

    # --- what is nobody's --------------------------------------------------------------------

    def _trash(self, now_s: float) -> Iterator[Item]:
        for entry in directories(self._data_root):
            if entry.name.startswith(TRASH):
                path = Path(entry.path)
                size = measured(path, now_s=now_s).size_bytes
                yield Item("half removed", entry.name, "a gc that was cut short", size, lambda path=path: _gone(path))  # type: ignore[misc]

    def _set_aside(self, now_s: float, older_than_s: float) -> Iterator[Item]:
        journal = self._data_root / "nodes" / self._node.node_id / "sandboxes"
        for path in sorted(journal.glob("*.bad")):
            status = path.lstat()
            if now_s - status.st_mtime >= older_than_s:
                why = "an entry of the journal that could not be read"
                yield Item("journal entry", path.name, why, status.st_size, lambda path=path: _unlinked(path))  # type: ignore[misc]

    def _dead_nodes(self, now_s: float, older_than_s: float) -> Iterator[Item]:
        known = {view.node_id for view in self._node.store.nodes()}
        running = self._node.lifecycle.leftovers.listed()
        for entry in directories(self._data_root / "nodes"):
            name = entry.name
            if name in known or running.get(name) or is_held(lock_of(self._data_root, name)):
                continue
            found = measured(Path(entry.path), now_s=now_s)
            if found.idle_s >= older_than_s and any(other != "lock" for other in os.listdir(found.path)):
                yield Item(
                    "node directory",
                    name,
                    "a node that the fleet does not know",
                    found.size_bytes,
                    lambda name=name: self._clear_node(name),  # type: ignore[misc]
                )

    def _clear_node(self, node_id: str) -> bool:
        """Remove what a dead node wrote down; its lock stays, for whoever waits for it."""
        try:
            held = hold_node_id(self._data_root, node_id, clearing=True)
        except NodeIdInUse:
            return False
        try:
            if any(view.node_id == node_id for view in self._node.store.nodes()):
                return False
            for name in sorted(os.listdir(held.directory)):
                if name != "lock":
                    _gone(held.directory / name)
            return True
        finally:
            held.release()


def _gone(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        remove_whole(path)
        return True
    return _unlinked(path)


def _unlinked(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be removed: {exc.strerror}", key="data_root") from exc
    return True


def _remove_empty(*paths: Path) -> None:
    for path in paths:
        try:
            path.rmdir()
        except OSError:
            return  # other threads of the user
