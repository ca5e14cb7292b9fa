"""Fleets for integration tests: real processes, started once per module.

A test that kills, drains or starves something starts a `Stack` of its own, or puts back what it took.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandfleet import SandboxProvider
from sandfleet.stack import Stack
from tests.services import require


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    """Redis, a scheduler and two nodes with local (bubblewrap) sandboxes. The lease is short: 3 seconds."""
    require("redis")
    require("bwrap")
    with Stack(nodes=2, backend="local", lease_s=3.0) as stack:
        yield stack


@pytest.fixture(scope="module")
def mock_fleet() -> Iterator[Stack]:
    """The same with mock sandboxes: for what concerns the way to the node and not the sandbox."""
    require("redis")
    with Stack(nodes=2, backend="mock", lease_s=3.0) as stack:
        yield stack


@pytest.fixture
def provider(fleet: Stack) -> Iterator[SandboxProvider]:
    """A client of `fleet`; what it holds is released at the end."""
    with SandboxProvider(fleet.settings) as made:
        yield made


@pytest.fixture
def mock_provider(mock_fleet: Stack) -> Iterator[SandboxProvider]:
    """A client of `mock_fleet`."""
    with SandboxProvider(mock_fleet.settings) as made:
        yield made
