"""Doubles for tests of code that uses sandfleet, judged by the same suites as the real things.

`MockSandboxProvider` gives real handles without a fleet. `MockBackend` is a node-side
 technology without sandboxes, `ManualClock` a clock turned by hand,
`backend_contract.BackendContract` the suite for a backend of one's own.
"""

from __future__ import annotations

from sandfleet.store.memory import MemoryStore
from sandfleet.testing.backend import MockBackend, MockConnection, MockOutput
from sandfleet.testing.clock import ManualClock
from sandfleet.testing.provider import MockSandboxProvider

__all__ = ["ManualClock", "MemoryStore", "MockBackend", "MockConnection", "MockOutput", "MockSandboxProvider"]
