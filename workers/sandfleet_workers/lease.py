"""The node's lease: who renews it, and what says that it is still ours."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sandfleet.errors import LeaseLost, StoreUnavailable
from sandfleet.model import NodeState
from sandfleet.store.base import NodeRecord, Store

__all__ = ["Lease"]

log = logging.getLogger("sandfleet.node")


def boot_s() -> float:
    """Seconds since boot, counting sleep and SIGSTOP: the clock that fences a node that was paused."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Announces the node, renews its lease from a thread of its own, and knows until when it holds.

    Renewal is gated on Celery's main loop: a node whose loop hangs consumes nothing, so it must not look alive.
    A consumer that is connecting to the broker stands still as well, but it does not hang: it will consume.

    Args:
        record: What the node says of itself.
        on_tick: Called after each renewal, on this thread: the node's upkeep.
        on_lost: Called once when another incarnation holds the node id.
        on_forgotten: Called when the store had lost its data and the node announced itself again.
        load: What the node says of its load with each renewal; cheap, and never raises.

    Attributes:
        reconnecting: The consumer is on its way to the broker; set by Celery's bootsteps.
        renewals: How many renewals found the node in the registry so far.
        upkeep: There is a node to keep up: ``on_tick`` and ``on_forgotten`` are called.
    """

    def __init__(
        self,
        store: Store,
        record: NodeRecord,
        *,
        lease_s: float,
        on_tick: Callable[[int], None],
        on_lost: Callable[[LeaseLost], None],
        on_forgotten: Callable[[], None],
        load: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._store = store
        self._record = record
        self._lease_s = lease_s
        self._load = load
        self._on_tick, self._on_lost, self._on_forgotten = on_tick, on_lost, on_forgotten
        self._valid_until = 0.0
        self._loop_ticked_at = boot_s()
        self._offset_ms = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandfleet-lease", daemon=True)
        self.state = NodeState.READY
        self.reconnecting = False
        self.renewals = 0
        self.upkeep = True

    def announce(self, *, again: bool = False, take_over: bool = False) -> None:
        """Take the lease; with ``again`` the store knows this node, or it has lost its data. ``take_over``: no process
        has the node's id but this one.

        Raises:
            NodeIdInUse: Another incarnation holds it; a killed one's lapses within ``lease_s``.
            LeaseLost: ``again``, and another incarnation has come since.
        """
        asked_at = boot_s()
        self._learn(self._store.announce(self._record, lease_s=self._lease_s, again=again, take_over=take_over))
        self._valid_until = asked_at + self._lease_s

    def start(self, *, with_upkeep: bool = True) -> None:
        """Begin to renew, ``with_upkeep`` or at first without."""
        self.upkeep = with_upkeep
        self._thread.start()

    def only_renew(self, *, lease_s: float | None = None) -> None:
        """The node ends its sandboxes: until they are gone nobody may take it for dead and start others on their files.
        There is no upkeep any more, and no main loop that ticks. From now on the lease lasts ``lease_s``, if given."""
        self.upkeep = False
        self.reconnecting = True
        self._lease_s = lease_s or self._lease_s

    def stop(self) -> None:
        """Stop renewing; the lease itself is left to the caller."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def loop_ticked(self) -> None:
        """Celery's main loop is alive (called by a timer in it)."""
        self._loop_ticked_at = boot_s()

    def holds(self) -> bool:
        """Whether the lease surely holds now, by this machine's boot clock."""
        return boot_s() < self._valid_until

    def age_s(self) -> float:
        """Seconds since the last renewal; the node's start before the first."""
        return max(0.0, boot_s() - (self._valid_until - self._lease_s)) if self._valid_until else 0.0

    def now_ms(self) -> int:
        """The store's time, from the last renewal and this process' monotonic clock."""
        return int(time.monotonic() * 1000 + self._offset_ms)

    def _learn(self, store_ms: int) -> None:
        self._offset_ms = store_ms - time.monotonic() * 1000

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._lease_s / 4)):
            try:
                if self.reconnecting or boot_s() - self._loop_ticked_at < self._lease_s:
                    self._renew()
                else:
                    log.warning("lease.loop_silent", extra={"node_id": self._record.node_id})
                if self.upkeep and self.holds():
                    self._on_tick(self.now_ms())
            except LeaseLost as exc:
                self._valid_until = 0.0
                self._on_lost(exc)
                return
            except StoreUnavailable as exc:
                log.warning("lease.store_unavailable", extra={"node_id": self._record.node_id, "error": str(exc)})
            except Exception:
                # Upkeep must not end the renewals: the node would look dead with its sandboxes alive.
                log.exception("lease.tick_failed", extra={"node_id": self._record.node_id})

    def _renew(self) -> None:
        asked_at = boot_s()
        load = self._load() if self._load is not None else None
        answer = self._store.renew(self._record.node_id, self._record.incarnation, lease_s=self._lease_s, load=load)
        if self._stop.is_set():
            return
        self._learn(answer.now_ms)
        self.state = answer.state
        if not answer.known:
            if self.upkeep:
                self._on_forgotten()
            self.announce(again=True)
            log.warning("node.reannounced", extra={"node_id": self._record.node_id})
            return
        self.renewals += 1
        self._valid_until = asked_at + self._lease_s
