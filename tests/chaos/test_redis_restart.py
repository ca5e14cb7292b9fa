"""Promises about a Redis that goes away and comes back, with its data and without."""

from __future__ import annotations

import itertools
import threading

import pytest

from sandfleet import CommandResult
from sandfleet.errors import NotStarted, SandboxLost, SandfleetError
from tests.chaos.fleet import Fleet, unique
from tests.services import RedisServer, wait_until


class Load:
    """A caller that writes numbers for as long as it may, each in one command, and keeps every answer."""

    def __init__(self, fleet: Fleet, thread: str) -> None:
        self.fleet = fleet
        self.thread = thread
        self.answers: dict[int, CommandResult | BaseException] = {}
        self.enough = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"load-{thread}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self.fleet.provider(
            label="", queue_timeout_s=10.0, command_timeout_s=5.0, acquire_timeout_s=15.0
        ) as provider:
            sandbox = None
            for number in itertools.count():
                if self.enough.is_set():
                    return
                try:
                    sandbox = sandbox or provider.get(provider.acquire(self.thread))
                    assert sandbox is not None
                    self.answers[number] = sandbox.run(f"echo {number} >> log")
                except BaseException as exc:  # noqa: BLE001  (the test judges it)
                    self.answers[number] = exc
                    sandbox = None
                    if not isinstance(exc, SandfleetError):
                        return

    @property
    def good(self) -> int:
        return sum(isinstance(answer, CommandResult) for answer in self.answers.values())

    def join(self) -> None:
        self.enough.set()
        # Its own deadlines end it: queue 10 s, command 5 s, and the grace a reply has.
        wait_until(lambda: not self._thread.is_alive(), 45, story=self.fleet.story)


@pytest.mark.chaos
@pytest.mark.parametrize("durable", [True, False], ids=["keeps its data", "loses its data"])
def test_a_redis_that_restarts_under_load_costs_typed_errors_at_most_and_nothing_runs_twice(
    restartable: tuple[Fleet, RedisServer], durable: bool
) -> None:
    fleet, server = restartable
    before = {view.node_id: view.incarnation for view in fleet.store.nodes()}
    loads = [Load(fleet, unique("load")) for _ in range(3)]

    def told() -> str:
        return "\n".join([fleet.story(), *(repr(list(load.answers.items())[-3:]) for load in loads)])

    try:
        wait_until(lambda: all(load.good >= 5 for load in loads), 40, story=told)
        server.kill()
        server.durable = durable  # a server that is not does not look at what the last one wrote
        server.start()
        reached = [load.good for load in loads]
        wait_until(lambda: all(n.good >= m + 5 for n, m in zip(loads, reached, strict=True)), 40, story=told)
    finally:
        for load in loads:
            load.join()
    for load in loads:
        for number, answer in load.answers.items():
            assert isinstance(answer, (CommandResult, SandfleetError)), (number, repr(answer))
        ran = fleet.numbers(load.thread)
        assert ran == sorted(set(ran)), f"in order, none twice: {ran}"
        done = [number for number, answer in load.answers.items() if isinstance(answer, CommandResult)]
        assert set(done) <= set(ran), "what was answered with a result ran"
        begun = [n for n, a in load.answers.items() if isinstance(a, (NotStarted, SandboxLost)) and n in ran]
        assert not begun, f"told not to have begun, and ran: {begun}"

    def as_before() -> bool:
        return {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive} == before

    wait_until(as_before, 10, story=told)  # the nodes announce themselves again, as who they were
    assert {info.thread_id for info in fleet.store.sandboxes()} >= {load.thread for load in loads}
