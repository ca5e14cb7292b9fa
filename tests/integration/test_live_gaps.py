"""Output that is written faster than it is kept for readers: told where it is missing, and how much."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sandfleet import SandboxProvider
from sandfleet.job_values import OutputGap
from sandfleet.stack import Stack
from tests.services import require

pytestmark = pytest.mark.slow

_WRITTEN = 20_000_000


@pytest.fixture
def provider() -> Iterator[SandboxProvider]:
    """A client of a fleet that keeps as little as it may of what a command writes."""
    require("redis")
    require("bwrap")
    with (
        Stack(nodes=1, backend="local", lease_s=3.0, output_bytes=64 * 1024) as stack,
        SandboxProvider(stack.settings) as made,
    ):
        yield made


def test_what_a_slow_reader_missed_is_told_in_its_place(provider: SandboxProvider) -> None:
    sandbox = provider.get(provider.acquire("gaps"))
    assert sandbox is not None
    told: list[bytes | OutputGap] = []

    def slow(data: bytes) -> None:
        told.append(data)
        time.sleep(0.05)  # it writes a file, say

    result = sandbox.run(f"head -c {_WRITTEN} /dev/zero", on_stdout=slow, on_gap=told.append)
    assert result.truncated
    gaps = [each for each in told if isinstance(each, OutputGap)]
    assert gaps, "nothing was missed: the test is too slow a writer"
    at = 0
    for each in told:
        if isinstance(each, OutputGap):
            assert each.start == at
            at = each.end
        else:
            at += len(each)
    assert at == _WRITTEN
