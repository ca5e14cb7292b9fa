"""Callers that work for as long as a test lets them, and what their answers are held to."""

from __future__ import annotations

import itertools
import threading

from sandfleet import CommandResult
from sandfleet.errors import NotStarted, SandboxLost, SandfleetError
from tests.chaos.fleet import Fleet
from tests.services import wait_until


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

    def judge(self) -> None:
        """Every answer is true: a result ran, once; what was told not to have begun did not; the rest is typed."""
        for number, answer in self.answers.items():
            assert isinstance(answer, (CommandResult, SandfleetError)), (number, repr(answer))
        ran = self.fleet.numbers(self.thread)
        assert ran == sorted(set(ran)), f"in order, none twice: {ran}"
        done = [number for number, answer in self.answers.items() if isinstance(answer, CommandResult)]
        assert set(done) <= set(ran), "what was answered with a result ran"
        begun = [n for n, a in self.answers.items() if isinstance(a, (NotStarted, SandboxLost)) and n in ran]
        assert not begun, f"told not to have begun, and ran: {begun}"
