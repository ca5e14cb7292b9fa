"""A promise to people's files: what somebody uses is never collected, however they race."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli.retaining import ask_nodes
from sandfleet.errors import SandfleetError
from sandfleet.stack import Stack
from tests.services import require

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

EVERYTHING = {"older_than_s": 0.0, "thread_data": True, "remove": True}
ROUNDS = 40


def test_a_thread_that_is_acquired_while_gc_removes_everything_never_loses_what_it_wrote() -> None:
    require("redis")
    require("bwrap")
    with Stack(nodes=1, backend="local", lease_s=5.0) as stack, SandboxProvider(stack.settings) as provider:
        enough, tally, wrong = threading.Event(), Counter[str](), list[str]()

        def collect() -> None:
            while not enough.is_set():
                for report in ask_nodes(stack.settings, stack.store, EVERYTHING, timeout_s=30):
                    if report.error is not None:
                        wrong.append(repr(report.error))
                    tally["removed"] += report.document.get("removed", 0)

        def use(thread: str) -> None:
            for number in range(ROUNDS):
                try:
                    sandbox_id = provider.acquire(thread)
                    sandbox = provider.get(sandbox_id)
                    assert sandbox is not None
                    for part in range(3):
                        sandbox.write_file("notes", f"{number}.{part}\n", append=part > 0)
                    found = sandbox.read_file("notes")
                    if found != "".join(f"{number}.{part}\n" for part in range(3)):
                        wrong.append(found)
                    provider.destroy(sandbox_id)
                    tally["used"] += 1
                except SandfleetError as exc:
                    wrong.append(repr(exc))

        users = [threading.Thread(target=use, args=(f"t{n}",)) for n in range(3)]
        collector = threading.Thread(target=collect)
        for thread in (collector, *users):
            thread.start()
        for thread in users:
            thread.join(120)
        enough.set()
        collector.join(40)
        assert wrong == [], stack.tail("node-1", 30)
        assert tally["used"] == 3 * ROUNDS
        assert tally["removed"] > 0, "they met"
