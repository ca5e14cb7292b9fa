"""Sandboxes whose image was replaced under its name: the warm ones end, the blank ones are started anew.

What a thread has in use keeps its image until it is released.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sandfleet.errors import SandfleetError
from sandfleet_workers.reaping import Ending

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandfleet.backends import SandboxBackend
    from sandfleet_workers.lifecycle import Lifecycle
    from sandfleet_workers.node import Node

__all__ = ["Rolling"]

log = logging.getLogger("sandfleet.node")

_EVERY_S = 60.0


def monotonic() -> float:
    """The clock between two looks."""
    return time.monotonic()


class Rolling:
    """Looks about once a minute which of a node's sandboxes are outdated."""

    def __init__(self, node: Node, lifecycle: Lifecycle, backends: Mapping[str, SandboxBackend]) -> None:
        self._node = node
        self._lifecycle = lifecycle
        self._backends = backends
        self._next_at = monotonic() + _EVERY_S
        self._busy = threading.Lock()

    def tick(self) -> None:
        """Have a look taken if one is due; from the lease's thread."""
        if self._node.draining or monotonic() < self._next_at:
            return
        self._next_at = monotonic() + _EVERY_S
        self._node.pool.run_slow(self.look)

    def look(self) -> None:
        """End what is outdated and in nobody's use. What cannot be told or ended now is looked at again."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            for name, backend in self._backends.items():
                self._roll(name, backend)
        finally:
            self._busy.release()

    def _roll(self, name: str, backend: SandboxBackend) -> None:
        try:
            outdated = backend.outdated()
            self._lifecycle.blanks.replace(outdated)
            now_ms = self._node.store.now_ms()
            for sandbox_id in outdated:
                held = self._node.held.get(sandbox_id)
                if held is not None and held.backend is backend and not held.stopping:
                    ending = Ending(sandbox_id, "its image was replaced", if_warm_before_ms=now_ms)
                    self._lifecycle.upkeep.retire(held, ending)
        except SandfleetError as exc:
            log.warning("rolling.not_looked", extra={"backend": name, "error": str(exc)})
