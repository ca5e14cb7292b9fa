"""What a node remembers: of a sandbox it holds, and of an operation between its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sandfleet.backends import Connection, SandboxBackend
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Route
from sandfleet.wire import OpMessage
from sandfleet_workers.batch import BatchRun

__all__ = ["Carry", "Held"]


@dataclass(slots=True)
class Held:
    """A sandbox this node holds; ``made_at`` is of the monotonic clock, ``slot`` names the one it was claimed from.

    ``stuck``: it was to be ended and could not be. It is held until another try succeeds.
    """

    route: Route
    identity: Identity
    spec: SandboxSpec
    backend: SandboxBackend
    connection: Connection
    stopping: bool = False
    stuck: bool = False
    slot: str | None = None
    made_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Carry:
    """What the node remembers of a job between its steps."""

    message: OpMessage
    route: Route
    claimed: bool = False
    finished: bool = False
    batch: BatchRun | None = None
