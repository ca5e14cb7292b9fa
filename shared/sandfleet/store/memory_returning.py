"""Operations that outlive their node, in memory: the twin of `sandfleet.store.redis_returning`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sandfleet.model import SandboxState
from sandfleet.store.base import Route, Store
from sandfleet.store.memory_state import KEEP_MS, Thread
from sandfleet.store.memory_steps import MemorySteps

_MOST = 1000


class MemoryReturning(MemorySteps, Store):
    """The part of `MemoryStore` for a node that is back."""

    def reattach(self, op_id: str, old: Route, new: Route) -> bool:
        with self._lock:
            op = self._ops.get(op_id)
            if replace(old, incarnation=new.incarnation) != new:
                return False
            if op is None or op.state != "claimed" or op.record.route != old:
                return False
            if self._leases.get(new.node_id) != new.incarnation or self._ours(new, SandboxState.LIVE) is None:
                return False
            op.record = replace(op.record, route=new)
            self._inflight[new.node_id].pop(op_id, None)
            self._inflight[new.node_id][op_id] = None
            return True

    def tell_homes(self, data_id: str, threads: Sequence[tuple[str, int]]) -> int:
        with self._lock:
            return sum(self._tell_home(data_id, digest, epoch) for digest, epoch in threads[:_MOST])

    def _tell_home(self, data_id: str, digest: str, epoch: int) -> bool:
        known = self._threads.get(digest)
        if known is not None and known.data_id == data_id:
            self._threads.touch(digest, KEEP_MS)
            return False
        if known is not None and (known.epoch or known.told >= epoch):
            return False
        self._threads.put(digest, Thread("", data_id, 0, told=epoch), KEEP_MS)
        return True
