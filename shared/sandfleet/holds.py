"""What a client process holds: which sandboxes, how often acquired, and their renewal as in use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sandfleet.store.base import Route, Store

__all__ = ["Holds"]

log = logging.getLogger("sandfleet.client")


@dataclass(slots=True)
class _Hold:
    owner: str
    epoch: int
    count: int


class Holds:
    """Counts acquires per sandbox, so that the first of several to finish does not release it under the others.

    Args:
        store: Where the holds are kept.
        agent: Who holds: the client's id.
        ttl_s: How long a hold lives without renewal; it is renewed three times as often.
    """

    def __init__(self, store: Store, agent: str, *, ttl_s: float) -> None:
        self._store = store
        self._agent = agent
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: dict[str, _Hold] = {}
        self._renewed_at = time.monotonic()

    def add(self, route: Route, owner: str) -> None:
        """Count one more acquire. Another epoch is another sandbox: what was counted before ended with it."""
        with self._lock:
            held = self._held.get(route.sandbox_id)
            count = held.count if held is not None and held.epoch == route.epoch else 0
            self._held[route.sandbox_id] = _Hold(owner, route.epoch, count + 1)

    def remove(self, sandbox_id: str, *, all_of_them: bool = False) -> bool:
        """Count one acquire less; True when none is left and the sandbox should be released."""
        with self._lock:
            held = self._held.get(sandbox_id)
            left = 0 if all_of_them or held is None else held.count - 1
            if held is not None and left > 0:
                held.count = left
                return False
            self._held.pop(sandbox_id, None)
            return True

    def __contains__(self, sandbox_id: object) -> bool:
        with self._lock:
            return sandbox_id in self._held

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._held))

    def release(self, sandbox_id: str, owner: str) -> bool:
        """Release the sandbox; False if another thread of this process acquired it meanwhile (it keeps its hold)."""
        self._store.release(sandbox_id, owner, self._agent)
        if sandbox_id not in self:
            return True
        self._store.renew_agents(self._agent, {sandbox_id: owner}, ttl_s=self._ttl_s)
        return False

    def renew(self) -> None:
        """Renew what is due; called about once a second."""
        if time.monotonic() - self._renewed_at < self._ttl_s / 3:
            return
        with self._lock:
            owners = {sandbox_id: hold.owner for sandbox_id, hold in self._held.items()}
        if owners:
            gone = self._store.renew_agents(self._agent, owners, ttl_s=self._ttl_s)
            with self._lock:
                for sandbox_id in gone:
                    self._held.pop(sandbox_id, None)
            if gone:
                log.warning("client.sandboxes_gone", extra={"sandbox_ids": gone})
        # Only now: a renewal that failed is tried again with the next tick.
        self._renewed_at = time.monotonic()
