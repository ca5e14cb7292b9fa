"""What a client process holds: which sandboxes, how often acquired, and their renewal as in use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from sandfleet.store.base import Route, Store

__all__ = ["Holds"]

log = logging.getLogger("sandfleet.client")

#: A store that lost its data keeps what nodes tell it again in use for a little longer than this.
_RENEWED_WITHIN_S = 20.0


@dataclass(slots=True)
class _Hold:
    owner: str
    epoch: int
    count: int


@dataclass(slots=True, eq=False)
class Arrival:
    """An acquire that is under way. ``disturbed``: the owner's sandbox was released meanwhile, by another thread of
    this process and in the name of both: what was acquired may not be held any more. ``leaving``: or it is still being
    released."""

    disturbed: bool = False
    leaving: tuple[threading.Event, ...] = ()


_T = TypeVar("_T")


def _take_out(lists: dict[str, list[_T]], key: str, one: _T) -> None:
    left = [other for other in lists.pop(key) if other is not one]
    if left:
        lists[key] = left


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
        self._arriving: dict[str, list[Arrival]] = {}
        self._leaving: dict[str, list[threading.Event]] = {}
        self._renewed_at = time.monotonic()

    @contextmanager
    def arriving(self, owner: str) -> Iterator[Arrival]:
        """Around an acquire and the `add` that follows it: tells whether it has to be made sure of (`retake`)."""
        arrival = Arrival()
        with self._lock:
            self._arriving.setdefault(owner, []).append(arrival)
        try:
            yield arrival
        finally:
            with self._lock:
                _take_out(self._arriving, owner, arrival)
                arrival.leaving = tuple(self._leaving.get(owner, ()))
                arrival.disturbed |= bool(arrival.leaving)

    def retake(self, arrival: Arrival, sandbox_id: str, owner: str) -> bool:
        """Hold once more what was counted by a disturbed arrival; False, and it is counted no more, when it is gone."""
        for left in arrival.leaving:
            left.wait(self._ttl_s)
        with self._lock:
            before = self._held.get(sandbox_id)
        if not self._store.renew_agents(self._agent, {sandbox_id: owner}, ttl_s=self._ttl_s):
            return True
        self._forget(sandbox_id, before)
        return False

    def _forget(self, sandbox_id: str, hold: _Hold | None) -> None:
        """The sandbox of that hold is gone; one that was acquired anew since is another."""
        with self._lock:
            if self._held.get(sandbox_id) is hold:
                self._held.pop(sandbox_id, None)

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

    def __getitem__(self, sandbox_id: str) -> int:
        """How often it is acquired and not released."""
        with self._lock:
            held = self._held.get(sandbox_id)
            return held.count if held is not None else 0

    def __contains__(self, sandbox_id: object) -> bool:
        with self._lock:
            return sandbox_id in self._held

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._held))

    def release(self, sandbox_id: str, owner: str) -> bool:
        """Release the sandbox; False if another thread of this process acquired it meanwhile (it keeps its hold), or is
        about to."""
        left = threading.Event()
        with self._lock:
            if sandbox_id in self._held:
                return False
            self._leaving.setdefault(owner, []).append(left)
        try:
            self._store.release(sandbox_id, owner, self._agent)
        finally:
            with self._lock:
                _take_out(self._leaving, owner, left)
                arriving = self._arriving.get(owner, [])
                for arrival in arriving:
                    arrival.disturbed = True
                held = sandbox_id in self._held
            left.set()
        if held:
            self._store.renew_agents(self._agent, {sandbox_id: owner}, ttl_s=self._ttl_s)
        return not held and not arriving

    def renew(self) -> None:
        """Renew what is due; called about once a second."""
        if time.monotonic() - self._renewed_at < min(self._ttl_s / 3, _RENEWED_WITHIN_S):
            return
        with self._lock:
            before = dict(self._held)
        owners = {sandbox_id: hold.owner for sandbox_id, hold in before.items()}
        if owners:
            gone = self._store.renew_agents(self._agent, owners, ttl_s=self._ttl_s)
            for sandbox_id in gone:
                self._forget(sandbox_id, before[sandbox_id])
            if gone:
                log.warning("client.sandboxes_gone", extra={"sandbox_ids": gone})
        # Only now: a renewal that failed is tried again with the next tick.
        self._renewed_at = time.monotonic()
