"""Nodes that are killed or restarted while containers of theirs are at work: callers get the real answers."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.errors import OutcomeUnknown, SandboxLost
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos, pytest.mark.timeout(240)]

LEASE_S = 5.0
NODE = "node-1"


@pytest.fixture
def stack() -> Iterator[Stack]:
    """One node whose containers outlive it."""
    require("docker")
    require("redis")
    with Stack(1, backend="docker", lease_s=LEASE_S, detach_s=30.0, blank_pool=0, replicas=4) as running:
        yield running
    assert containers(running.settings.data_root) == []


@pytest.fixture
def provider(stack: Stack) -> Iterator[SandboxProvider]:
    with SandboxProvider(stack.settings) as made:
        yield made


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def containers(data_root: Path) -> list[str]:
    """Names of the containers of a data root's nodes, running or not."""
    try:
        deployment = (data_root / "data-id").read_text().strip()
    except FileNotFoundError:
        return []  # removed with the fleet, which looked before
    label = f"label=sandfleet.deployment={deployment}"
    argv = ["docker", "ps", "-a", "--format", "{{.Names}}", "--filter", label]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def sandbox_of(provider: SandboxProvider, thread_id: str) -> Sandbox:
    sandbox = provider.get(provider.acquire(thread_id))
    assert sandbox is not None
    return sandbox


def workspace(stack: Stack, thread_id: str) -> Path:
    return stack.settings.data_root / "threads" / thread_id / "user-data" / "workspace"


def gated(name: str) -> str:
    """A command that says when it runs and ends when the test lets it, with a result of its own."""
    return f"echo x >> {name}.ran; until [ -e {name}.go ]; do sleep 0.05; done; echo {name}; exit 7"


def begun(stack: Stack, callers: ThreadPoolExecutor, sandbox: Sandbox, thread: str, name: str) -> Future[Any]:
    """The command's future, once it runs."""
    future = callers.submit(sandbox.run, gated(name))
    wait_until((workspace(stack, thread) / f"{name}.ran").exists, 60, story=lambda: log_of(stack))
    return future


def log_of(stack: Stack) -> str:
    return "\n".join((stack.log_dir / f"{NODE}.log").read_text().splitlines()[-40:])


def go(stack: Stack, thread: str, name: str) -> None:
    path = workspace(stack, thread) / f"{name}.go"
    path.touch()
    path.chmod(0o666)


def killed(stack: Stack) -> None:
    stack.kill_node(NODE)
    stack.start_node(NODE)


def restarted(stack: Stack) -> None:
    stack.stop_node(NODE)
    stack.start_node(NODE)


@pytest.mark.parametrize("trouble", [killed, restarted], ids=["kill -9", "SIGTERM"])
def test_a_command_outlives_its_node_and_its_caller_gets_the_real_result(
    stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor, trouble: Callable[[Stack], None]
) -> None:
    sandbox = sandbox_of(provider, "one")
    future = begun(stack, callers, sandbox, "one", "job")
    before = containers(stack.settings.data_root)
    trouble(stack)
    assert not future.done()
    go(stack, "one", "job")
    result = future.result(60)
    assert (result.stdout, result.exit_code) == ("job\n", 7)
    assert (workspace(stack, "one") / "job.ran").read_text() == "x\n", "it ran once"
    assert containers(stack.settings.data_root) == before
    assert sandbox.run("echo on").stdout == "on\n"
    assert sandbox_of(provider, "one").id == sandbox.id


def test_a_session_survives_its_node_with_all_that_was_set_in_it(stack: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "shell")
    sandbox.run("cd /tmp; export KEPT=yes; greet() { echo hello; }", session="mine")
    killed(stack)
    assert sandbox.run("pwd; echo $KEPT; greet", session="mine").stdout == "/tmp\nyes\nhello\n"


def test_lanes_hold_across_a_restart(stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor) -> None:
    sandbox = sandbox_of(provider, "lane")
    first = begun(stack, callers, sandbox, "lane", "first")
    killed(stack)
    second = callers.submit(sandbox.run, "cat first.done")
    wait_until(lambda: len(stack.store.ops()) == 2, 30)
    time.sleep(0.5)
    assert not second.done(), "it waits for the command before it"
    (workspace(stack, "lane") / "first.done").write_text("after")
    go(stack, "lane", "first")
    assert first.result(60).exit_code == 7
    assert second.result(60).stdout == "after"


def test_a_container_that_ended_meanwhile_is_lost_and_its_callers_are_answered(
    stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor
) -> None:
    sandbox = sandbox_of(provider, "gone")
    future = begun(stack, callers, sandbox, "gone", "job")
    stack.kill_node(NODE)
    (name,) = containers(stack.settings.data_root)
    subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)
    stack.start_node(NODE)
    with pytest.raises((OutcomeUnknown, SandboxLost)):
        future.result(30)
    again = sandbox_of(provider, "gone")
    assert again.run("cat job.ran").stdout == "x\n"
    assert len(containers(stack.settings.data_root)) == 1


def test_a_node_killed_mid_write_answers_and_the_file_is_whole(
    stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor
) -> None:
    sandbox = sandbox_of(provider, "write")
    futures: dict[int, Future[Any]] = {}
    stop = threading.Event()

    def write(number: int) -> int:
        sandbox.write_file(f"/mnt/user-data/workspace/f{number}", f"{number}\n" * 1000)
        return number

    def feed() -> None:
        while not stop.is_set():
            futures[len(futures)] = callers.submit(write, len(futures))
            time.sleep(0.02)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        wait_until(lambda: len(futures) > 10, 30)
        killed(stack)
        count = len(futures)
        wait_until(lambda: len(futures) > count + 10, 30)
    finally:
        stop.set()
        feeder.join()
    for number, future in futures.items():
        error = future.exception(60)
        path = workspace(stack, "write") / f"f{number}"
        if error is None:
            assert path.read_text() == f"{number}\n" * 1000
        else:
            assert isinstance(error, OutcomeUnknown), repr(error)
    told = [repr(future.exception()) for future in futures.values() if future.exception() is not None]
    assert told == [], "a write is remembered by its sandbox"


@pytest.mark.slow
def test_a_rolling_restart_under_load_loses_no_operation(callers: ThreadPoolExecutor) -> None:
    require("docker")
    require("redis")
    with Stack(2, backend="docker", lease_s=LEASE_S, detach_s=30.0, blank_pool=0, replicas=3) as stack:
        data_root = stack.settings.data_root
        with SandboxProvider(stack.settings) as provider:
            sandboxes = {name: sandbox_of(provider, name) for name in ("a", "b", "c", "d")}
            before = sorted(containers(data_root))
            stop = threading.Event()
            done: dict[str, int] = {}

            def work(name: str) -> None:
                number = 0
                while not stop.is_set():
                    assert sandboxes[name].run(f"echo {number} >> log").exit_code == 0
                    number += 1
                    done[name] = number

            workers = [callers.submit(work, name) for name in sandboxes]
            wait_until(lambda: len(done) == len(sandboxes) and min(done.values()) > 5, 60)
            for node_id in stack.node_ids:
                counts = dict(done)
                stack.stop_node(node_id)
                stack.start_node(node_id)
                wait_until(lambda counts=counts: all(done[name] > counts[name] + 5 for name in done), 60)  # type: ignore[misc]
            stop.set()
            for worker in workers:
                worker.result(60)
            for name, sandbox in sandboxes.items():
                lines = sandbox.run("cat log").stdout.split()
                assert lines == [str(number) for number in range(done[name])], "each ran once, in order"
            assert sorted(containers(data_root)) == before, "the same containers"


def test_a_node_frozen_past_its_lease_keeps_its_containers_for_its_next_run(
    stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor
) -> None:
    sandbox = sandbox_of(provider, "frozen")
    begun(stack, callers, sandbox, "frozen", "job")
    node = stack.nodes[NODE]
    node.send_signal(signal.SIGSTOP)
    wait_until(lambda: stack.store.nodes()[0].state == "gone", 60)
    node.send_signal(signal.SIGCONT)
    wait_until(lambda: stack.store.nodes()[0].alive, 60, story=lambda: log_of(stack))
    wait_until(lambda: stack.store.route(sandbox.id) is not None, 60, story=lambda: log_of(stack))
    assert len(containers(stack.settings.data_root)) == 1
    assert sandbox_of(provider, "frozen").run("cat job.ran").stdout == "x\n"
    go(stack, "frozen", "job")


def test_a_background_job_outlives_its_node(stack: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "job")
    job = sandbox.run(gated("job"), background=True)
    wait_until((workspace(stack, "job") / "job.ran").exists, 60)
    killed(stack)
    assert job.poll().state == "running"
    go(stack, "job", "job")
    result = job.wait(60)
    assert (result.stdout, result.exit_code) == ("job\n", 7)
    assert b"".join(chunk.data for chunk in job.output() if hasattr(chunk, "data")) == b"job\n"


def test_a_sandbox_destroyed_while_its_node_is_away_is_gone(stack: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "away")
    stack.stop_node(NODE)
    assert [str(node.state) for node in stack.store.nodes()] == ["away"]
    assert provider.acquire("away") == sandbox.id, "it is expected back"
    with ThreadPoolExecutor(1) as one:
        ending = one.submit(provider.destroy, sandbox.id)
        wait_until(lambda: str(stack.store.sandbox(sandbox.id).state) == "stopping", 30)  # type: ignore[union-attr]
        stack.start_node(NODE)
        ending.result(60)
    assert stack.store.sandbox(sandbox.id) is None
    assert containers(stack.settings.data_root) == []


def test_a_node_that_does_not_come_back_counts_as_dead(stack: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "left")
    stack.stop_node(NODE)
    stack.store.set_node_state(NODE, stack.store.nodes()[0].state, lease_s=0.5)
    wait_until(lambda: str(stack.store.nodes()[0].state) == "gone", 30)
    with pytest.raises(SandboxLost):
        sandbox.run("true")


def test_a_frozen_owner_s_container_is_ended_before_another_node_starts_one_on_its_files() -> None:
    require("docker")
    require("redis")
    with Stack(2, backend="docker", lease_s=3.0, detach_s=30.0, blank_pool=0, replicas=2) as stack:
        data_root = stack.settings.data_root
        with SandboxProvider(stack.settings) as provider, ThreadPoolExecutor(2) as pool:
            sandbox = sandbox_of(provider, "moved")
            writes = "while sleep 0.05; do date +%s%N > beat; done"
            old = pool.submit(sandbox.run, writes)
            beat = workspace(stack, "moved") / "beat"
            wait_until(beat.exists, 60)
            (before,) = containers(data_root)
            home = stack.store.route(sandbox.id)
            assert home is not None
            node = stack.nodes[home.node_id]
            node.send_signal(signal.SIGSTOP)
            with pytest.raises((OutcomeUnknown, SandboxLost)):
                old.result(60)
            again = sandbox_of(provider, "moved")
            moved = stack.store.route(again.id)
            assert moved is not None
            assert moved.node_id != home.node_id
            assert before not in containers(data_root)
            stamp = beat.read_text()
            again.run("sleep 0.5")
            assert beat.read_text() == stamp, "nothing of the old one works on the files"
            node.send_signal(signal.SIGCONT)
            first = home.incarnation
            wait_until(
                lambda: any(
                    n.node_id == home.node_id and n.alive and n.incarnation != first for n in stack.store.nodes()
                ),
                60,
            )
            assert stack.store.route(again.id) == moved, "its old owner has not taken it back"
            assert again.run("echo mine").stdout == "mine\n"
            assert len(containers(data_root)) == 1
    assert containers(data_root) == []


@pytest.mark.slow
def test_a_node_killed_again_and_again_loses_nothing_it_held(stack: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "again")
    done, stop = list[int](), threading.Event()

    def work() -> None:
        while not stop.is_set():
            assert sandbox.run(f"echo {len(done)} >> log").exit_code == 0
            done.append(len(done))

    with ThreadPoolExecutor(1) as one:
        working = one.submit(work)
        for _ in range(4):
            count = len(done)
            wait_until(lambda count=count: len(done) > count + 3 or working.done(), 60)  # type: ignore[misc]
            killed(stack)
        stop.set()
        working.result(60)
    assert sandbox.run("cat log").stdout.split() == [str(number) for number in done]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_a_node_ended_in_the_middle_of_its_start_keeps_all_it_held(
    stack: Stack, provider: SandboxProvider, callers: ThreadPoolExecutor, how: signal.Signals
) -> None:
    sandbox = sandbox_of(provider, "start")
    future = begun(stack, callers, sandbox, "start", "job")
    epoch = stack.store.route(sandbox.id).epoch  # type: ignore[union-attr]
    before = containers(stack.settings.data_root)
    stack.kill_node(NODE)
    first = stack.store.nodes()[0].incarnation
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.3):
        node = stack.start_node(NODE, wait_s=None)
        last = stack.store.nodes()[0].incarnation
        wait_until(lambda last=last: stack.store.nodes()[0].incarnation != last, 60, story=lambda: log_of(stack))  # type: ignore[misc]
        time.sleep(delay_s)
        node.send_signal(how)
        if how is signal.SIGTERM:
            node.send_signal(how)
        wait_until(lambda node=node: node.poll() is not None, 60, story=lambda: log_of(stack))  # type: ignore[misc]
        assert provider.acquire("start") == sandbox.id
    stack.start_node(NODE)
    assert stack.store.nodes()[0].incarnation != first
    go(stack, "start", "job")
    result = future.result(60)
    assert (result.stdout, result.exit_code) == ("job\n", 7)
    assert stack.store.route(sandbox.id).epoch == epoch  # type: ignore[union-attr]
    assert containers(stack.settings.data_root) == before


def test_whoever_destroys_data_whose_node_is_away_is_told_that_it_stays(
    stack: Stack, provider: SandboxProvider
) -> None:
    sandbox = sandbox_of(provider, "erased")
    sandbox.write_file("/mnt/user-data/workspace/secret", "x")
    stack.stop_node(NODE)
    with ThreadPoolExecutor(1) as one:
        ending = one.submit(provider.destroy, sandbox.id, True)
        wait_until(lambda: str(stack.store.sandbox(sandbox.id).state) == "stopping", 30)  # type: ignore[union-attr]
        stack.start_node(NODE)
        with pytest.raises(SandboxLost, match="not deleted"):
            ending.result(60)
    provider.destroy(sandbox_of(provider, "erased").id, delete_data=True)
    assert not workspace(stack, "erased").exists()
