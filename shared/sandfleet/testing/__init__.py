"""Doubles for tests of code that uses sandfleet, judged by the same suites as the real things.

`MockBackend` is a node-side technology without sandboxes, `ManualClock` a clock turned by hand,
`backend_contract.BackendContract` the suite for a backend of one's own.
"""

from __future__ import annotations

from sandfleet.testing.backend import MockBackend, MockConnection, MockOutput
from sandfleet.testing.clock import ManualClock

__all__ = ["ManualClock", "MockBackend", "MockConnection", "MockOutput"]
