"""Collecting what nobody will remove sooner, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import Store
from sandfleet.store.collecting import Leftover
from sandfleet.store.memory_state import DAY_MS, MemoryState

__all__ = ["MemoryCollecting"]

_MOST = 1000


class MemoryCollecting(MemoryState, Store):
    """The part of `MemoryStore` for ``sandfleet gc``. Marks and chunks without their heads cannot come about here."""

    def collect(self, candidates: Sequence[Leftover], *, remove: bool, older_than_s: float = 3600.0) -> list[Leftover]:
        with self._lock:
            found = [candidate for candidate in candidates[:_MOST] if self._is_left(candidate, older_than_s * 1000)]
            if remove:
                for leftover in found:
                    self._drop_left(leftover)
            return found

    def _is_left(self, candidate: Leftover, older_than_ms: float) -> bool:
        if candidate.kind == "lost":
            sandbox = self._sandboxes.get(candidate.id)
            return sandbox is not None and sandbox.state is SandboxState.LOST
        if candidate.kind != "node":
            return False
        node = self._nodes.get(candidate.id)
        if node is not None and (
            node.state is not NodeState.GONE or self._nodes.left_ms(candidate.id) > DAY_MS - older_than_ms
        ):
            return False
        holds = self._places.get(candidate.id) or self._inflight.get(candidate.id)
        return not holds and self._leases.get(candidate.id) is None

    def _drop_left(self, leftover: Leftover) -> None:
        if leftover.kind == "lost":
            self._sandboxes.drop(leftover.id)
            return
        self._nodes.drop(leftover.id)
        self._warm.pop(leftover.id, None)
        self._stopping.pop(leftover.id, None)
        self.queues.pop(f"sandfleet.node.{leftover.id}", None)
