"""What nodes that died left running on this machine, and who may remove it.

A node's own leftovers are its own to remove, at its start (its lease and its id's lock are held, so nothing of an
earlier run is alive) and once a minute. Another node's only when it was silent for one full lease and the lock of its
id, which the kernel drops with its process, is free: a node that is merely slow, paused or cut off from Redis holds it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sandfleet.backends import SandboxBackend
from sandfleet.errors import NodeIdInUse, SandfleetError
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.node_identity import hold_node_id
from sandfleet_workers.sandbox_dirs import SandboxDirs

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["Leftovers"]

log = logging.getLogger("sandfleet.node")

_EVERY_S = 60.0
_COUNT_EVERY_S = 5.0
_REMOVING_AT_ONCE = 4
#: (backend, node, name)
_Key = tuple[str, str, str]


def monotonic() -> float:
    """The clock between two looks."""
    return time.monotonic()


class Leftovers:
    """Removes containers without an owner. Looks about once a minute, and sooner when a node was lost or the first sign
    of one was seen."""

    def __init__(self, node: Node, dirs: SandboxDirs, backends: Mapping[str, SandboxBackend]) -> None:
        self._node = node
        self._dirs = dirs
        self._backends = backends
        self._next_at = monotonic() + _EVERY_S
        self._busy = threading.Lock()
        self._alive: set[str] = set()
        self._counted_at = -_COUNT_EVERY_S
        #: Since when each was seen without an owner.
        self._seen: dict[_Key, float] = {}

    def remove_own(self) -> None:
        """Remove what an earlier run of this node left. What cannot be removed now is tried again within a minute."""
        node_id, keys = self._node.node_id, list[_Key]()
        for backend_name, backend in self._backends.items():
            try:
                keys += [(backend_name, node_id, name) for name in backend.leftovers().get(node_id, ())]
            except SandfleetError as exc:
                log.warning("leftovers.not_listed", extra={"backend": backend_name, "error": str(exc)})
        self._remove(keys)

    def listed(self) -> dict[str, set[str]]:
        """What lies here of sandboxes that outlive their node, by the node that started them.

        Raises:
            SandfleetError: A backend cannot tell.
        """
        found: dict[str, set[str]] = {}
        for backend in self._backends.values():
            for node_id, names in backend.leftovers().items():
                found.setdefault(node_id, set()).update(names)
        return found

    def tick(self) -> None:
        """Have a look taken if one is due; from the lease's thread."""
        now = monotonic()
        if self._node.draining:
            return
        if now - self._counted_at >= _COUNT_EVERY_S:
            self._counted_at = now
            before, self._alive = self._alive, self._others_alive()
            if before - self._alive:
                # Its commands still run, on files that its threads' next sandboxes have as well.
                self._next_at = now
        if now < self._next_at:
            return
        self._next_at = now + _EVERY_S
        self._node.pool.run_slow(self.look)

    def look(self) -> None:
        """Compare what runs here with who lives; remove what had no owner at the last look either, a lease ago."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            self._look()
        except SandfleetError as exc:
            log.warning("leftovers.not_listed", extra={"error": str(exc)})
        finally:
            self._busy.release()

    def _look(self) -> None:
        found = {
            (name, node_id, leftover)
            for name, backend in self._backends.items()
            for node_id, leftovers in backend.leftovers().items()
            for leftover in leftovers
        }
        if not found:
            self._seen = {}
            return
        alive = self._others_alive()
        now = monotonic()
        self._seen = {key: self._seen.get(key, now) for key in found if key[1] not in alive}
        lease_s = self._node.settings.lease_s
        due = [key for key, since in self._seen.items() if now - since >= lease_s]
        for node_id in {key[1] for key in due}:
            keys = [key for key in due if key[1] == node_id]
            if node_id == self._node.node_id:
                self._remove(keys)
            else:
                self._take_over(node_id, keys)
        if len(due) < len(self._seen):
            # Silent for less than a lease: look again when it would be one.
            self._next_at = min(self._next_at, now + lease_s + 1.0)

    def _others_alive(self) -> set[str]:
        return {view.node_id for view in self._node.store.nodes() if view.alive} - {self._node.node_id}

    def _take_over(self, node_id: str, keys: list[_Key]) -> None:
        try:
            held = hold_node_id(self._dirs.data_root, node_id, clearing=True)
        except (NodeIdInUse, SandfleetError):
            return  # it lives, whatever Redis says
        try:
            # It may have come and gone, or come back elsewhere, since the list was read.
            if any(view.alive for view in self._node.store.nodes() if view.node_id == node_id):
                return
            if not self._remove(keys):
                return  # what runs still uses the directories
            SandboxDirs(self._dirs.data_root, node_id).recover()
            run_dir = self._node.lifecycle.run_dir
            local_dirs.remove_tree(run_dir.with_name(f"{node_id}-{self._node.lifecycle.data_id[:8]}"))
        finally:
            held.release()

    def _remove(self, keys: list[_Key]) -> bool:
        """Remove these, several at once; True if all are gone. One that stays keeps none of the others."""
        with ThreadPoolExecutor(_REMOVING_AT_ONCE, thread_name_prefix="sandfleet-leftover") as removers:
            return all(list(removers.map(self._remove_one, keys)))

    def _remove_one(self, key: _Key) -> bool:
        backend, node_id, name = key
        extra = {"name_of_it": name, "of_node": node_id}
        try:
            self._backends[backend].remove_leftover(name)
        except SandfleetError as exc:
            log.warning("leftover.not_removed", extra={**extra, "error": str(exc)})
            return False
        self._seen.pop(key, None)
        log.warning("leftover.removed", extra=extra)
        return True
