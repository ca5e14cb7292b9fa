"""The Docker engine is restarted under load: typed answers, nothing twice, nothing left behind."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import OutcomeUnknown, SandboxLost, SandfleetError
from sandfleet.stack import Stack
from tests.docker.second_engine import SecondEngine
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 3.0


@contextmanager
def engine_of_its_own(*, live_restore: bool) -> Iterator[SecondEngine]:
    require("docker")
    require("redis")
    # A socket's path is short.
    root = Path(tempfile.mkdtemp(prefix="sf-engine-"))
    with SecondEngine(root, live_restore=live_restore) as engine:
        yield engine
    assert not root.exists()


@contextmanager
def fleet_on(engine: SecondEngine) -> Iterator[Stack]:
    """A node that uses that engine; when it has stopped nothing of it is left there."""
    env = {"SANDFLEET_DOCKER_HOST": engine.address, "SANDFLEET_IMAGE_PULL_POLICY": "Never"}
    given = {"lease_s": LEASE_S, "replicas": 4, "blank_pool": 0, "acquire_timeout_s": 60.0}
    with Stack(1, backend="docker", env=env, **given) as stack:
        yield stack
        stack.stop()
        assert engine.containers() == []


class Caller:
    """Appends numbers to a file in its thread's sandbox, one command each, and keeps what it was told."""

    def __init__(self, provider: SandboxProvider, thread: str) -> None:
        self.done: set[int] = set()
        self.perhaps: set[int] = set()
        self.typed: list[SandfleetError] = []
        self.wrong: list[BaseException] = []
        self.enough = threading.Event()
        self._provider, self._name = provider, thread
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        number = 0
        while not self.enough.is_set():
            number += 1
            try:
                sandbox = self._provider.get(self._provider.acquire(self._name))
                assert sandbox is not None
                if sandbox.run(f"echo {number} >> log; sleep 0.1").exit_code == 0:
                    self.done.add(number)
                else:
                    self.perhaps.add(number)  # killed before it said so
            except (OutcomeUnknown, SandboxLost) as exc:
                self.perhaps.add(number)
                self.typed.append(exc)
            except SandfleetError as exc:
                self.typed.append(exc)
                self.enough.wait(min(exc.retry_after_s or 0.2, 1.0))
            except BaseException as exc:  # noqa: BLE001  (the test judges it)
                self.wrong.append(exc)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.enough.set()
        self._thread.join(90)

    def judge(self) -> None:
        """Nothing that was done is lost, nothing ran twice, and what was said not to have run did not."""
        self.enough.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "it was never answered"
        assert self.wrong == []
        sandbox = self._provider.get(self._provider.acquire(self._name))
        assert sandbox is not None
        lines = [int(line) for line in sandbox.run("cat log").stdout.split()]
        assert len(lines) == len(set(lines)), "something ran twice"
        assert self.done <= set(lines), "something that was done is lost"
        assert set(lines) <= self.done | self.perhaps, "something ran that was said not to have"


def work_on(callers: list[Caller], commands: int) -> None:
    before = [len(caller.done) for caller in callers]

    def all_did() -> bool:
        return all(len(caller.done) >= n + commands for caller, n in zip(callers, before, strict=True))

    wait_until(all_did, 90, story=lambda: str([(len(c.done), c.typed[-3:], c.wrong) for c in callers]))


def test_sandboxes_work_on_while_an_engine_with_live_restore_is_upgraded_or_crashes() -> None:
    with engine_of_its_own(live_restore=True) as engine, fleet_on(engine) as stack:
        with SandboxProvider(stack.settings) as provider, ExitStack() as at_end:
            callers = [at_end.enter_context(Caller(provider, f"thread-{number}")) for number in range(2)]
            work_on(callers, 3)
            there = set(engine.containers())
            for end in (engine.stop, engine.kill):
                end()
                work_on(callers, 3)
                with pytest.raises(SandfleetError) as caught:
                    provider.acquire("new", timeout_s=3.0)
                assert caught.value.code in {"start_failed", "no_capacity", "not_started", "queue_timeout"}
                engine.start()
                work_on(callers, 3)
            for caller in callers:
                caller.judge()
                assert caller.typed == [], "nobody noticed"
            assert there <= set(engine.containers()), "the same containers"
            provider.destroy(provider.acquire("new"))
        # What a death in the meantime would have left is found: the node follows the new engine's events.
        wait_until(lambda: set(engine.containers()) == there, 30)


def test_an_engine_that_takes_its_containers_along_costs_sandboxes_and_nothing_else() -> None:
    with engine_of_its_own(live_restore=False) as engine, fleet_on(engine) as stack:
        with SandboxProvider(stack.settings) as provider, ExitStack() as at_end:
            callers = [at_end.enter_context(Caller(provider, f"thread-{number}")) for number in range(2)]
            work_on(callers, 3)
            for end in (engine.stop, engine.kill):
                sandbox = provider.get(provider.acquire("long"))
                assert sandbox is not None
                answers: list[BaseException] = []
                waiting = threading.Thread(target=_wait_for_long, args=(sandbox, answers), daemon=True)
                waiting.start()
                wait_until(lambda sandbox=sandbox: sandbox.exists("begun"), 20)  # type: ignore[misc]
                end()
                engine.start()  # one that was killed ends its containers now
                waiting.join(30)
                assert not waiting.is_alive(), "whoever waits is answered at once"
                assert isinstance(answers[0], (OutcomeUnknown, SandboxLost)), answers
                work_on(callers, 3)
                again = provider.get(provider.acquire("long"))
                assert again is not None
                assert again.run("rm begun").exit_code == 0, "its files are there"
            for caller in callers:
                caller.judge()
                assert all(isinstance(exc, SandfleetError) for exc in caller.typed)
            wait_until(lambda: len(stack.store.sandboxes()) == 3, 30)
        # Leftovers are looked for about once a minute.
        wait_until(lambda: len(engine.containers()) <= 3, 120)


def _wait_for_long(sandbox: object, answers: list[BaseException]) -> None:
    try:
        sandbox.run("touch begun; sleep 100")  # type: ignore[attr-defined]
        answers.append(AssertionError("it ended"))
    except SandfleetError as exc:
        answers.append(exc)
