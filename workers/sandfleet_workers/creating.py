"""How a thread's sandbox comes to run on this node: a new one is started, or a blank one becomes it.

Whichever way, before anybody may rely on it the thread's holder names it (so that two never run on one thread's data),
and if it may outlive this process the journal has what the next run needs to find it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Capability, Connection, SandboxBackend, SandboxPlan
from sandfleet.checkpoints import Restoration
from sandfleet.errors import SandfleetError, StartFailed, StoreUnavailable
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Route, Store
from sandfleet.wire import OpMessage
from sandfleet_workers.backends.mounts import ACP_WORKSPACE, PlannedMount, acp_directory
from sandfleet_workers.blanks import Blank
from sandfleet_workers.entries import Entry
from sandfleet_workers.holders import Holder
from sandfleet_workers.holdings import Held
from sandfleet_workers.lease import boot_s

if TYPE_CHECKING:
    from sandfleet_workers.checkpoints.keeper import Checkpoints
    from sandfleet_workers.sandbox_dirs import SandboxDirs

__all__ = ["Creating", "confirmed", "outlives"]

log = logging.getLogger("sandfleet.node")

_CONFIRM_WITHIN_S = 10.0


def outlives(backend: SandboxBackend) -> bool:
    """Whether its sandboxes may outlive their node's process."""
    return Capability.SURVIVES_NODE in backend.capabilities


def confirmed(store: Store, route: Route, *, restored: Restoration | None = None) -> bool:
    """Tell the store that the sandbox lives. False: its reservation lapsed or belongs to a newer epoch.

    Raises:
        StoreUnavailable: For so long that nobody will ever know of it.
    """
    until, asked = time.monotonic() + _CONFIRM_WITHIN_S, 0
    while True:
        asked += 1
        try:
            # Asked again, a confirmation whose answer got lost is refused: then the registry has it as live.
            return store.created(route, restored=restored) or (asked > 1 and store.route(route.sandbox_id) == route)
        except StoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


class Creating:
    """Starts sandboxes for threads. Thread-safe for different sandboxes.

    Args:
        dirs: The node's directories and journal.
        backends: What the node offers, by name.
        run_dir: Where the sockets of its sandboxes lie.
        mounts: What every sandbox sees beside its thread's directories.
    """

    def __init__(
        self,
        dirs: SandboxDirs,
        backends: Mapping[str, SandboxBackend],
        run_dir: Path,
        mounts: tuple[PlannedMount, ...],
    ) -> None:
        self._dirs = dirs
        self._backends = backends
        self._run_dir = run_dir
        self._mounts = mounts

    def made(
        self,
        blank: Blank | None,
        message: OpMessage,
        spec: SandboxSpec,
        backend: SandboxBackend,
        checkpoints: Checkpoints,
        *,
        discard: Callable[[Blank], None],
    ) -> Held:
        """The thread's sandbox, on what the thread has or what is restored of it: the blank one that became it or, when
        there is none or it could not be used, a new one.

        Args:
            discard: Called with the blank one if it is not to be the thread's.

        Raises:
            SandfleetError: It does not run, and nothing of it is left.
        """
        held = None
        try:
            restored = checkpoints.restore(message, lambda: self._take_data(message, backend))
            if blank is not None:
                held = self.claimed(blank, message, spec)
        finally:
            if blank is not None and held is None:
                discard(blank)
        held = held or self.started(message, spec, backend)
        checkpoints.began_with(held, restored)
        return held

    def _take_data(self, message: OpMessage, backend: SandboxBackend) -> None:
        """Nobody else's sandbox works on the thread's data any more."""
        self._dirs.hold(message.identity, message.route.epoch, backend.name, self._end_last)

    def started(self, message: OpMessage, spec: SandboxSpec, backend: SandboxBackend) -> Held:
        """Start a sandbox for the thread, with the thread's own directories.

        Raises:
            SandfleetError: It does not run, and nothing of it is left.
        """
        route, identity = message.route, message.identity
        self._dirs.hold(identity, route.epoch, spec.backend, self._end_last)
        user_data = self._dirs.user_data(identity)
        made_at_s = boot_s()
        plan = SandboxPlan(
            sandbox_id=route.sandbox_id,
            identity=identity,
            epoch=route.epoch,
            user_data=user_data,
            # Of this ownership alone: whoever still buries the last one must not remove it.
            run_dir=self._run_dir / f"{route.sandbox_id[:16]}.{route.epoch:x}",
            spec=spec,
            mounts=(*self._mounts, (acp_directory(user_data), ACP_WORKSPACE, True)),
        )
        held = Held(route, identity, spec, backend, backend.create(plan))
        if outlives(backend):
            ticket = self._ticket(backend, route.sandbox_id)
            self._note(held, ticket, made_at_s)
        return held

    def claimed(self, blank: Blank, message: OpMessage, spec: SandboxSpec) -> Held | None:
        """Make a blank sandbox the thread's; None when that one cannot be used, and a new one has to be started.

        Raises:
            SandfleetError: It was made the thread's and could not be kept; nothing of it is left.
        """
        route, identity, slot = message.route, message.identity, blank.slot
        try:
            if outlives(blank.backend):
                container = str(self._ticket(blank.backend, slot).get("name") or "")
                self._dirs.hold(identity, route.epoch, spec.backend, self._end_last, container=container)
            self._dirs.claim(slot, identity, {"sandbox_id": route.sandbox_id, "epoch": route.epoch})
            connection: Connection = blank.backend.claim(slot, route.sandbox_id)
        except StartFailed as exc:
            log.warning("blank.not_claimed", extra={"slot": slot, "sandbox_id": route.sandbox_id, "error": str(exc)})
            return None
        held = Held(route, identity, spec, blank.backend, connection, slot=slot)
        if outlives(blank.backend):
            made_at_s = boot_s()
            try:
                self._note(held, self._ticket(blank.backend, route.sandbox_id), made_at_s)
            except SandfleetError:
                self._dirs.remove_slot(slot)
                raise
        return held

    @staticmethod
    def _ticket(backend: SandboxBackend, sandbox_id: str) -> dict[str, Any]:
        try:
            return backend.ticket(sandbox_id)
        except KeyError:
            raise StartFailed(f"sandbox {sandbox_id} ended while it started", reason="died") from None

    def _note(self, held: Held, ticket: Mapping[str, Any], made_at_s: float) -> None:
        """Write down what runs, or end it."""
        route, identity = held.route, held.identity
        backend = held.spec.backend
        entry = Entry(route.sandbox_id, identity, route.epoch, held.spec, backend, held.slot, made_at_s, ticket)
        try:
            self._dirs.hold(identity, route.epoch, backend, self._end_last, container=entry.container)
            self._dirs.note(entry)
        except SandfleetError:
            held.connection.close()
            held.backend.destroy(route.sandbox_id)
            raise
        held.entry = entry

    def _end_last(self, holder: Holder) -> None:
        """End what another owner left running on the thread's data, whoever that was.

        Raises:
            SandfleetError: It cannot be ended now.
        """
        facts = {"node_id": holder.node, "container": holder.container, "epoch": holder.epoch}
        backend = self._backends.get(holder.backend)
        if backend is None:
            log.warning("holder.not_ended", extra={**facts, "error": f"no backend {holder.backend} here"})
            return
        log.info("holder.ended", extra=facts)
        backend.remove_leftover(holder.container)
