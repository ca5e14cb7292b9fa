"""A fleet that is full: who waits, who is refused, whose sandbox makes room. Real processes, mock sandboxes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from sandfleet import AsyncSandboxProvider, SandboxProvider
from sandfleet.celery_app import celery_app
from sandfleet.errors import NoCapacity, QuotaExceeded, SandfleetError, StartFailed
from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView, SandboxState
from sandfleet.stack import Stack, child_environ
from tests.services import require, wait_until, wait_until_async

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

SOON_S = 20.0


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    """Two nodes with two places each, the second one with a burst place."""
    require("redis")
    extra = {"node-2": {"SANDFLEET_BURST_LIMIT": "1"}}
    with Stack(nodes=2, backend="mock", lease_s=3.0, replicas=2, acquire_timeout_s=SOON_S, node_env=extra) as stack:
        yield stack


class Agents:
    """Providers and threads of one test, which leave nothing behind."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.store = stack.store
        self._open = ExitStack()
        self._pool = ThreadPoolExecutor(32)
        self.main = self.provider()

    def provider(self, **settings: Any) -> SandboxProvider:
        made = SandboxProvider(self.stack.settings.model_copy(update=settings))
        return self._open.enter_context(made)

    def later(self, run: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        return self._pool.submit(run, *args, **options)

    def fill(self, count: int = 4, prefix: str = "held") -> list[str]:
        return [self.main.acquire(f"{prefix}-{number}") for number in range(count)]

    def state(self, sandbox_id: str) -> str:
        info = self.store.sandbox(sandbox_id)
        return str(info.state) if info is not None else "none"

    def line(self) -> int:
        return self.store.line_length()

    def close(self) -> None:
        self._open.close()
        self._pool.shutdown()
        for info in self.store.sandboxes():
            with SandboxProvider(self.stack.settings) as provider:
                try:
                    provider.destroy(info.sandbox_id)
                except SandfleetError:
                    continue  # its node ended it meanwhile
        wait_until(lambda: not any(node.places for node in self.store.nodes()), SOON_S)


@pytest.fixture
def agents(small: Stack) -> Iterator[Agents]:
    made = Agents(small)
    yield made
    made.close()


def node(stack: Stack, node_id: str) -> NodeView:
    return next(node for node in stack.store.nodes() if node.node_id == node_id)


# --- waiting, and whose sandbox makes room ---------------------------------------------------------------


def test_a_full_fleet_makes_callers_wait_and_the_longest_idle_sandbox_makes_room(agents: Agents) -> None:
    held = agents.fill()
    waiting = agents.later(agents.main.acquire, "newcomer")
    wait_until(lambda: agents.line() == 1, SOON_S)
    assert not waiting.done()
    agents.main.release(held[2])
    assert agents.main.get(waiting.result(SOON_S)) is not None
    wait_until(lambda: agents.state(held[2]) == "none", SOON_S)
    agents.main.release(held[0])
    released_ms = agents.store.now_ms()
    wait_until(lambda: agents.store.now_ms() > released_ms, SOON_S)  # two in one millisecond are equally idle
    agents.main.release(held[1])
    second = agents.main.acquire("newcomer-2")
    assert agents.state(second) == "live"
    assert [agents.state(one) for one in (held[0], held[1], held[3])] == ["none", "warm", "live"]


def test_a_thread_that_comes_back_finds_its_warm_sandbox_although_others_wait(agents: Agents) -> None:
    held = agents.fill()
    waiting = agents.later(agents.main.acquire, "newcomer")
    wait_until(lambda: agents.line() == 1, SOON_S)
    assert agents.main.acquire("held-1") == held[1]
    agents.main.destroy(held[3])
    waiting.result(SOON_S)


def test_whoever_waits_too_long_is_told_the_position_and_stands_in_nobody_s_way(agents: Agents) -> None:
    held = agents.fill()
    began = time.monotonic()
    with pytest.raises(NoCapacity) as told:
        agents.main.acquire("impatient", timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert (told.value.facts["position"], told.value.facts["reason"]) == (1, "in_line")
    assert agents.line() == 0
    agents.main.release(held[0])
    assert agents.state(held[0]) == "warm", "room for nobody"


async def test_a_cancelled_coroutine_leaves_the_line(agents: Agents) -> None:
    agents.fill()
    provider = AsyncSandboxProvider.over(agents.main)
    task = asyncio.create_task(provider.acquire("cancelled"))
    await wait_until_async(lambda: agents.line() == 1, SOON_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(lambda: agents.line() == 0, SOON_S)


def test_reject_is_refused_at_once_with_the_numbers(agents: Agents) -> None:
    agents.fill()
    began = time.monotonic()
    with pytest.raises(NoCapacity, match="every fitting node is full") as told:
        agents.provider(overflow_policy="reject").acquire("rejected")
    assert time.monotonic() - began < 5
    facts = told.value.facts
    assert (facts["reason"], facts["active"], facts["warm"], facts["replicas"]) == ("full", 4, 0, 4)
    assert told.value.retry_after_s == 5.0


def test_burst_goes_above_the_replicas_where_that_is_allowed_and_then_waits(agents: Agents) -> None:
    held = agents.fill()
    burst = agents.provider(overflow_policy="burst")
    above = burst.acquire("burst")
    info = agents.store.sandbox(above)
    assert info is not None
    assert info.node_id == "node-2"
    assert node(agents.stack, "node-2").places == 3
    waiting = agents.later(burst.acquire, "burst-2")
    wait_until(lambda: agents.line() == 1, SOON_S)
    agents.main.destroy(held[0])
    waiting.result(SOON_S)


def test_plain_tasks_in_line_block_no_scheduler_thread(agents: Agents) -> None:
    held = agents.fill()
    app = celery_app(agents.stack.settings)
    try:
        calls = [
            app.send_task("sandbox.execute_command", kwargs={"thread_id": f"plain-{n}", "command": "true"})
            for n in range(30)
        ]
        wait_until(lambda: agents.line() == 30, SOON_S)
        # Meanwhile an SDK client and a plain caller whose sandboxes live are served, and a newcomer gets in line.
        assert agents.main.acquire("held-0") == held[0]
        late = app.send_task("sandbox.execute_command", kwargs={"sandbox_id": held[1], "command": "true"})
        assert late.get(timeout=SOON_S)["exit_code"] == 0
        waiting = agents.later(agents.main.acquire, "newcomer")
        wait_until(lambda: agents.line() == 31, SOON_S)
        for sandbox_id in held[1:]:
            agents.main.release(sandbox_id)
        assert [call.get(timeout=2 * SOON_S)["exit_code"] for call in calls] == [0] * 30
        waiting.result(SOON_S)
    finally:
        app.close()
    assert agents.line() == 0


# --- agents that share a sandbox -------------------------------------------------------------------------

_OTHER_PROCESS = """
import sys
from sandfleet import SandboxProvider
with SandboxProvider() as provider:
    print(provider.acquire("shared"), flush=True)
    sys.stdin.readline()
"""


def other_process(stack: Stack) -> subprocess.Popen[str]:
    """A program that acquires the thread ``shared`` and leaves when a line comes."""
    return subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS],
        env=child_environ(stack.settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_first_of_several_agents_to_finish_does_not_release_the_sandbox_under_the_others(agents: Agents) -> None:
    subagents = [agents.main.acquire("shared") for _ in range(2)]
    with other_process(agents.stack) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        sandbox_id = other.stdout.readline().strip()
        assert subagents == [sandbox_id] * 2
        held = agents.fill(3)
        waiting = agents.later(agents.main.acquire, "newcomer")
        wait_until(lambda: agents.line() == 1, SOON_S)
        agents.main.release(sandbox_id)
        assert agents.state(sandbox_id) == "live"
        agents.main.release(sandbox_id)
        assert agents.state(sandbox_id) == "live", "the other process is in it"
        assert not waiting.done()
        sandbox = agents.main.get(held[0])
        assert sandbox is not None
        assert sandbox.run("true").exit_code == 0
        other.stdin.write("\n")
        other.stdin.flush()
        waiting.result(SOON_S)
        assert other.wait(SOON_S) == 0
    wait_until(lambda: agents.state(sandbox_id) == "none", SOON_S)


def test_destroy_on_release_ends_the_sandbox_with_its_last_agent_only(agents: Agents) -> None:
    one, two = agents.provider(destroy_on_release=True), agents.provider(destroy_on_release=True)
    sandbox_id = one.acquire("task")
    assert two.acquire("task") == sandbox_id
    one.release(sandbox_id)
    assert agents.state(sandbox_id) == "live"
    two.release(sandbox_id)
    wait_until(lambda: agents.state(sandbox_id) == "none", SOON_S)
    wait_until(lambda: sum(node.places for node in agents.store.nodes()) == 0, SOON_S)


# --- cordon ----------------------------------------------------------------------------------------------


def test_a_cordoned_node_keeps_its_own_and_takes_nothing_new_until_it_is_opened_again(agents: Agents) -> None:
    held = agents.fill(2)
    by_node = {info.node_id: info.sandbox_id for info in agents.store.sandboxes()}
    assert set(by_node) == {"node-1", "node-2"}
    agents.store.set_node_state("node-1", NodeState.CORDONED, reason="new disk")
    try:
        kept = agents.main.get(by_node["node-1"])
        assert kept is not None
        assert kept.run("true").exit_code == 0
        assert agents.main.acquire("held-0") in held, "its threads are still served"
        agents.main.acquire("more")
        assert node(agents.stack, "node-1").places == 1
        waiting = agents.later(agents.main.acquire, "newcomer")
        wait_until(lambda: agents.line() == 1, SOON_S)
        with pytest.raises(NoCapacity, match=r"node-1 is cordoned \(new disk\); `sandfleet uncordon node-1`"):
            agents.provider(overflow_policy="reject").acquire("rejected")
    finally:
        agents.store.set_node_state("node-1", NodeState.READY)
    waiting.result(SOON_S)
    assert node(agents.stack, "node-1").places == 2


# --- quota, ages, failures -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict() -> Iterator[Stack]:
    """Two places per user; one node ends what is held but not used, another what is old; a third fails on demand."""
    require("redis")
    kinds = {
        "idle": {"SANDFLEET_LABELS": "kind=idle", "SANDFLEET_ACTIVE_IDLE_TIMEOUT_S": "1.5"},
        "aged": {"SANDFLEET_LABELS": "kind=aged", "SANDFLEET_MAX_AGE_S": "1.5"},
        "plain": {"SANDFLEET_LABELS": "kind=plain"},
    }
    with Stack(nodes=list(kinds), backend="mock", lease_s=3.0, max_per_user=2, node_env=kinds) as stack:
        yield stack


@pytest.fixture
def limited(strict: Stack) -> Iterator[Agents]:
    made = Agents(strict)
    yield made
    made.close()


def test_a_user_at_the_quota_waits_for_its_own_and_others_do_not(limited: Agents) -> None:
    one = limited.provider(labels={"kind": "plain"})
    first, second = (one.acquire(f"t{number}", user_id="u") for number in range(2))
    waiting = limited.later(one.acquire, "t2", user_id="u")
    wait_until(lambda: limited.line() == 1, SOON_S)
    assert one.acquire("t0", user_id="v")
    with pytest.raises(QuotaExceeded) as told:
        limited.provider(labels={"kind": "plain"}, overflow_policy="reject").acquire("t3", user_id="u")
    assert told.value.facts["max_per_user"] == 2
    assert not waiting.done()
    one.release(second)
    waiting.result(SOON_S)
    assert (limited.state(first), limited.state(second)) == ("live", "none")


def test_a_held_sandbox_that_nobody_uses_ends_and_one_that_works_does_not(limited: Agents) -> None:
    provider = limited.provider(labels={"kind": "idle"})
    forgotten, used = provider.acquire("forgotten"), provider.acquire("used")
    working = provider.get(used)
    assert working is not None

    def is_gone() -> bool:
        assert working.run("true").exit_code == 0
        return limited.state(forgotten) == "none"

    wait_until(is_gone, SOON_S)
    assert limited.state(used) == "live"
    assert provider.acquire("forgotten")


def test_a_sandbox_of_the_maximum_age_ends_when_it_rests(limited: Agents) -> None:
    provider = limited.provider(labels={"kind": "aged"})
    sandbox_id = provider.acquire("old")
    first = limited.store.route(sandbox_id)
    wait_until(lambda: limited.state(sandbox_id) == "none", SOON_S)
    assert provider.acquire("old") == sandbox_id
    assert limited.store.route(sandbox_id) != first


def test_threads_whose_creates_fail_back_off_and_a_node_that_fails_them_all_cordons_itself(limited: Agents) -> None:
    provider, threads = limited.provider(labels={"kind": "plain"}), limited.stack.settings.data_root / "threads"
    fine = provider.acquire("fine")
    bad = [f"bad-{number}" for number in range(3)]
    for name in bad:
        (threads / name).write_text("where its directory should be")
    try:
        with pytest.raises(StartFailed) as first:
            provider.acquire(bad[0], timeout_s=1.0)
        assert first.value.facts["reason"] == "backing_off"
        assert first.value.retry_after_s is not None
        began = time.monotonic()
        with pytest.raises(StartFailed, match="not tried again for"):
            provider.acquire(bad[0], timeout_s=0.01)
        assert time.monotonic() - began < 2
        for name in bad[1:]:
            with pytest.raises((StartFailed, NoCapacity)):
                provider.acquire(name, timeout_s=0.3)
        wait_until(lambda: node(limited.stack, "plain").state is NodeState.CORDONED, SOON_S)
        assert node(limited.stack, "plain").reason.startswith("creates of 3 threads in a row failed")
        kept = provider.get(fine)
        assert kept is not None
        assert kept.run("true").exit_code == 0
        with pytest.raises(NoCapacity, match=r"plain is cordoned \(creates of 3 threads"):
            provider.acquire("another", timeout_s=0.3)
    finally:
        for name in bad:
            (threads / name).unlink()
        limited.store.set_node_state("plain", NodeState.READY)
    assert provider.acquire("another")


# --- many ------------------------------------------------------------------------------------------------


def crowd(provider: SandboxProvider, count: int, at_once: int) -> int:
    """So many threads acquire, work and leave, as many of them at once as given; the most that worked at one time."""
    inside, most, lock = 0, 0, threading.Lock()

    def one(number: int) -> None:
        nonlocal inside, most
        user = f"user-{number % 7}" if number % 3 else None
        sandbox_id = provider.acquire(f"many-{number}", user_id=user, timeout_s=50.0)
        with lock:
            inside += 1
            most = max(most, inside)
        sandbox = provider.get(sandbox_id)
        assert sandbox is not None
        assert sandbox.run("true").exit_code == 0
        with lock:
            inside -= 1
        provider.release(sandbox_id)

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(one, number) for number in range(count)]:
            done.result()
    return most


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hundreds_of_threads_on_a_few_places_are_all_served(tmp_path: Any) -> None:
    require("redis")
    with Stack(nodes=4, backend="mock", lease_s=3.0, replicas=4) as stack, SandboxProvider(stack.settings) as provider:
        over = threading.Event()
        seen: list[int] = []

        def look() -> None:
            while not over.wait(0.05):
                seen.append(max(view.places for view in stack.store.nodes()))

        looking = threading.Thread(target=look)
        looking.start()
        most = crowd(provider, 300, 150)
        over.set()
        looking.join()
        assert most <= 16
        assert max(seen) <= 4, "more sandboxes than places"
        assert stack.store.line_length() == 0
        for view in stack.store.nodes():
            held = stack.store.sandboxes(node_id=view.node_id)
            assert (view.places, view.stopping) == (len(held), 0)
            assert {info.state for info in held} <= {SandboxState.WARM}


@pytest.mark.slow
@pytest.mark.chaos
def test_those_in_line_are_served_by_the_next_scheduler_when_the_first_one_dies() -> None:
    require("redis")
    with (
        Stack(nodes=1, backend="mock", lease_s=3.0, replicas=2) as stack,
        SandboxProvider(stack.settings) as provider,
        ThreadPoolExecutor(8) as pool,
    ):
        held = [provider.acquire(f"held-{number}") for number in range(2)]
        waiting = [pool.submit(provider.acquire, f"t{number}", timeout_s=40.0) for number in range(6)]
        wait_until(lambda: stack.store.line_length() == 6, SOON_S)
        line = [entry.digest for entry in stack.store.parked()]
        stack.kill_scheduler()
        for sandbox_id in held:
            provider.release(sandbox_id)
        # Nobody hears the wake-up; or somebody takes the message and dies with it.
        stack.start_scheduler()
        served: list[str] = []
        by_digest = {Identity(f"t{number}").digest: future for number, future in enumerate(waiting)}
        while len(served) < 6:
            digest = wait_until(
                lambda: next((d for d, future in by_digest.items() if d not in served and future.done()), ""), SOON_S
            )
            served.append(digest)
            provider.release(by_digest[digest].result())
        assert set(served) == set(line)
        assert stack.store.line_length() == 0
