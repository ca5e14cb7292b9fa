"""The store in one process' memory: the same transitions under one lock, for tests and doubles."""

from __future__ import annotations

from sandfleet.store.memory_blanks import MemoryBlanks
from sandfleet.store.memory_collecting import MemoryCollecting
from sandfleet.store.memory_line import MemoryLine
from sandfleet.store.memory_nodes import MemoryNodes
from sandfleet.store.memory_ops import MemoryOps
from sandfleet.store.memory_replies import MemoryReplies
from sandfleet.store.memory_returning import MemoryReturning
from sandfleet.store.memory_sandboxes import MemorySandboxes
from sandfleet.store.memory_streams import MemoryStreams
from sandfleet.store.memory_threads import MemoryThreads

__all__ = ["MemoryStore"]


class MemoryStore(
    MemoryNodes,
    MemoryThreads,
    MemorySandboxes,
    MemoryBlanks,
    MemoryLine,
    MemoryOps,
    MemoryReturning,
    MemoryReplies,
    MemoryStreams,
    MemoryCollecting,
):
    """Shared state of one process.

    Args:
        now_ms: The clock, in unix milliseconds; the wall clock if none is given.
        blob_client_bytes: How many blob bytes one client may have in flight.
        blob_fleet_bytes: How many all clients together may.

    Attributes:
        queues: What was published, per queue, newest first; a consumer takes from the end.
    """
