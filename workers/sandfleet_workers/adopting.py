"""A node that is back: which of its earlier run's sandboxes it holds again.

The journal names them, their backend finds them, and the registry says whether they still are this node's: somebody
else may have got the thread meanwhile. Every one of them ends as exactly one of: held, ended, or told to be lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sandfleet.backends import Connection, SandboxBackend
from sandfleet.errors import SandfleetError, StartFailed, StoreUnavailable
from sandfleet.store.base import Route
from sandfleet_workers.creating import outlives
from sandfleet_workers.entries import Entry
from sandfleet_workers.holdings import Held
from sandfleet_workers.lease import boot_s
from sandfleet_workers.reattaching import reattach

if TYPE_CHECKING:
    from sandfleet_workers.node import Node
    from sandfleet_workers.sandbox_dirs import SandboxDirs

__all__ = ["Adoption"]

log = logging.getLogger("sandfleet.node")

_AT_ONCE = 8
_STORE_WITHIN_S = 10.0
_LOOK_S = 0.2
#: What is refused at once may be the engine's trouble, which passes; a sandbox that does not answer was given time.
_ATTACH_TRIES = 4
_AT_ONCE_S = 2.0


class Adoption:
    """Takes back what an earlier run of this node left. The lease must be held, and nothing else of the node's run yet.

    Args:
        node: Who takes it.
        dirs: Its journal.
        backends: What it offers, by name.
    """

    def __init__(self, node: Node, dirs: SandboxDirs, backends: Mapping[str, SandboxBackend]) -> None:
        self._node = node
        self._dirs = dirs
        self._backends = backends

    def run(self) -> list[Entry]:
        """Hold again what still runs and is still this node's, and answer for what ran in it: the entries of those that
        are held. All others are ended or have become leftovers.

        Raises:
            LeaseLost: Somebody else is this node by now.
            StoreUnavailable: The registry stays away; what was found again is held by nobody, and runs on.
        """
        entries = list(self._dirs.entries().values())
        if not entries:
            return []
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sandfleet-attaching") as attachers:
            found = list(attachers.map(self._attached, entries))
        kept = []
        for held in filter(None, found):
            if self._is_ours(held) and held.entry is not None:
                kept.append(held.entry)
        if kept:
            reattach(self._node)
        log.info("node.took_back", extra={"node_id": self._node.node_id, "sandboxes": len(kept), "of": len(entries)})
        return kept

    # --- finding it --------------------------------------------------------------------------

    def _attached(self, entry: Entry) -> Held | None:
        """The sandbox of an entry, held; None when there is none any more."""
        node, route = self._node, self._route(entry)
        backend = self._backends.get(entry.backend)
        try:
            if backend is None or not outlives(backend):
                raise StartFailed(f"node {node.node_id} does not offer {entry.backend} any more", reason="no_backend")
            connection = _attach(backend, entry)
        except Exception as exc:  # noqa: BLE001  (one that cannot be found keeps no other one from being found)
            self._tell_lost(entry, exc)
            return None
        made_at = time.monotonic() - max(0.0, boot_s() - entry.made_at_s)
        held = Held(
            route, entry.identity, entry.spec, backend, connection, slot=entry.slot, entry=entry, made_at=made_at
        )
        held.effects = 1  # since its last checkpoint, as far as this run knows
        node.held[entry.sandbox_id] = held
        if entry.sandbox_id not in backend.running():
            # It ended before it was held, so nobody heard of it.
            node.held.pop(entry.sandbox_id, None)
            self._tell_lost(entry, StartFailed("it ended a moment ago", reason="gone"))
            return None
        return held

    def _route(self, entry: Entry) -> Route:
        return Route(entry.sandbox_id, self._node.node_id, self._node.incarnation, entry.epoch)

    def _tell_lost(self, entry: Entry, exc: Exception) -> None:
        """Its callers need not wait until the earlier run is closed out."""
        reason = exc.facts.get("reason", exc.code) if isinstance(exc, SandfleetError) else type(exc).__name__
        facts = {"sandbox_id": entry.sandbox_id, "epoch": entry.epoch, "reason": reason, "error": str(exc)}
        log.warning("sandbox.not_taken_back", extra=facts)
        try:
            last = self._last_route(entry)
            told = last is None or self._node.store.lost(last, reason=f"it ended while its node was away ({reason})")
            if last is not None and not told and reason == "gone":
                self._node.store.stopped(last)  # it was being removed
        except StoreUnavailable as unavailable:
            # The earlier run is about to be closed out, and this with it.
            log.warning("sandbox.death_not_recorded", extra={**facts, "error": str(unavailable)})
        if reason == "gone":
            self._dirs.forget(entry)  # any other may yet run: it is removed with the leftovers

    def _last_route(self, entry: Entry) -> Route | None:
        """How the registry knows it, if it does: under the earlier incarnation."""
        last = self._node.store.route(entry.sandbox_id)
        return last if last is not None and (last.node_id, last.epoch) == (self._node.node_id, entry.epoch) else None

    # --- whose it is -------------------------------------------------------------------------

    def _is_ours(self, held: Held) -> bool:
        """Tell the registry that it runs here; if it is another's by now, or was being removed, end it."""
        entry = held.entry
        assert entry is not None
        if not entry.stopping and self._adopted(held):
            if self._node.held.get(entry.sandbox_id) is not held:
                self._node.store.lost(held.route, reason="it ended while its node came back")
                return False
            log.info("sandbox.taken_back", extra={"sandbox_id": entry.sandbox_id, "epoch": entry.epoch})
            return True
        log.warning("sandbox.superseded", extra={"sandbox_id": entry.sandbox_id, "epoch": entry.epoch})
        held.stopping = True
        last = self._last_route(entry)
        try:
            self._node.lifecycle.end(held.route)
        except SandfleetError as exc:
            log.warning("sandbox.end_failed", extra={"sandbox_id": entry.sandbox_id, "error": str(exc)})
            return True  # it is held, and ended later
        if last is not None and not self._node.store.stopped(last):
            log.info("sandbox.end_not_recorded", extra={"sandbox_id": entry.sandbox_id})
        return False

    def _adopted(self, held: Held) -> bool:
        """The registry's word; it is asked for a while."""
        node, until = self._node, time.monotonic() + _STORE_WITHIN_S
        while True:
            try:
                age_s = time.monotonic() - held.made_at
                return node.store.adopt(
                    held.identity, held.spec, held.route, data_id=node.lifecycle.data_id, age_s=age_s
                )
            except StoreUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


def _attach(backend: SandboxBackend, entry: Entry) -> Connection:
    """As `SandboxBackend.attach`; an engine that stumbles costs no sandbox."""
    for tries in range(_ATTACH_TRIES):
        began = time.monotonic()
        try:
            return backend.attach(entry.sandbox_id, entry.ticket)
        except StartFailed as exc:
            slow = time.monotonic() - began > _AT_ONCE_S
            if slow or exc.facts.get("reason") != "unreachable" or tries == _ATTACH_TRIES - 1:
                raise
            time.sleep(_LOOK_S * 2**tries)
    raise AssertionError("unreachable")
