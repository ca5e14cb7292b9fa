"""The places of blank sandboxes, in memory: the twin of `sandfleet.store.redis_blanks`."""

from __future__ import annotations

import math

from sandfleet.model import NodeState
from sandfleet.store.base import Store
from sandfleet.store.codec import ms_of
from sandfleet.store.memory_steps import MemorySteps, blank_place


class MemoryBlanks(MemorySteps, Store):
    """The part of `MemoryStore` about blank sandboxes."""

    def begin_blank(self, node_id: str, incarnation: str, slot: str, *, expires_s: float, reserve_free: int) -> bool:
        with self._lock:
            node, places, member = self._nodes.get(node_id), self._places[node_id], blank_place(slot)
            if node is None or node.state != NodeState.READY or member in places or self._in_line:
                return False
            if not node.record.incarnation == incarnation == self._leases.get(node_id):
                return False
            if node.record.replicas - self._taken(node_id) - 1 < reserve_free:
                return False
            places[member] = self._now() + ms_of(expires_s)
            return True

    def blank_ready(self, node_id: str, incarnation: str, slot: str, *, spec_digest: str, again: bool = False) -> bool:
        with self._lock:
            node, member = self._nodes.get(node_id), blank_place(slot)
            if node is None or node.record.incarnation != incarnation or node.state == NodeState.GONE:
                return False
            if not again and self._place_until(node_id, member) <= self._now():
                return False
            self._places[node_id][member] = math.inf
            self._blanks[node_id][slot] = spec_digest
            self._kick()
            return True

    def blank_gone(self, node_id: str, incarnation: str, slot: str) -> bool:
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.record.incarnation != incarnation or not self._drop_blank(node_id, slot):
                return False
            self._kick()
            return True

    def blanks(self, node_id: str) -> dict[str, str]:
        with self._lock:
            return dict(self._blanks[node_id])
