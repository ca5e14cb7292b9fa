"""What a node remembers: of a sandbox it holds, and of an operation between its steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from sandfleet.backends import Capability, Connection, SandboxBackend
from sandfleet.checkpoints import Restoration
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Route
from sandfleet.wire import OpMessage
from sandfleet_workers.batch import BatchRun
from sandfleet_workers.entries import Entry

__all__ = ["Carry", "Held"]


@dataclass(slots=True)
class Held:
    """A sandbox this node holds; ``made_at`` is of the monotonic clock, ``slot`` names the one it was claimed from.

    ``stuck``: it was to be ended and could not be. It is held until another try succeeds. ``entry`` is what the journal
    has of one that may outlive this process. ``effects`` counts what may have changed its files; ``saved_effects`` is
    what that was at its last checkpoint, begun at ``saved_at``, and the next one comes after ``save_after``.
    ``restored``: what it began with, if that was a checkpoint.
    """

    route: Route
    identity: Identity
    spec: SandboxSpec
    backend: SandboxBackend
    connection: Connection
    stopping: bool = False
    stuck: bool = False
    slot: str | None = None
    entry: Entry | None = None
    made_at: float = field(default_factory=time.monotonic)
    effects: int = 0
    saved_effects: int = 0
    saved_at: float = -math.inf
    save_after: float = -math.inf
    restored: Restoration | None = None

    def can(self, capability: Capability) -> bool:
        """Whether this very sandbox can do it."""
        return capability in self.backend.capabilities and capability not in self.connection.lacks


@dataclass(slots=True)
class Carry:
    """What the node remembers of a job between its steps."""

    message: OpMessage
    route: Route
    claimed: bool = False
    finished: bool = False
    batch: BatchRun | None = None
    stream: str = ""  # where its output goes while it runs
