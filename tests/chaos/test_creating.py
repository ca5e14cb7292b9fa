"""Promises about a node that dies, or is frozen, while it makes a sandbox: at each step of a start and of a claim."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.errors import SandboxError, SandfleetError, Unavailable
from tests.chaos.dying import importable
from tests.chaos.fleet import Answers, Fleet, Process, errors, note, unique
from tests.services import RedisServer, require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(240)]

STARTS = [
    "docker.api.container:ContainerApiMixin.create_container_from_config@before",
    "docker.api.container:ContainerApiMixin.create_container_from_config@after",
    "docker.api.container:ContainerApiMixin.start@before",
    "docker.api.container:ContainerApiMixin.start@after",
    # The sandbox runs, and the fleet was not told; it was told, and the node's own books were not.
    "sandfleet.store.redis_sandboxes:SandboxesMixin.created@before",
    "sandfleet.store.redis_sandboxes:SandboxesMixin.created@after",
]
CLAIM = "sandfleet_workers.sandbox_dirs:SandboxDirs.claim@"
KEPT = "/mnt/user-data/workspace/kept"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A scheduler; each test starts its own nodes, for containers."""
    require("redis")
    require("docker")
    directory = tmp_path_factory.mktemp("making")
    with RedisServer(directory / "redis") as server:
        running = Fleet(directory / "fleet", server.url)
        try:
            running.start_scheduler()
            yield running
        finally:
            running.close()
            left = containers(running)
            if left:
                subprocess.run(["docker", "rm", "-f", *left], check=False, capture_output=True)


def containers(fleet: Fleet, node_id: str = "") -> list[str]:
    """Names of the fleet's containers, or of one node's."""
    deployment = (fleet.data_root / "data-id").read_text().strip()
    argv = ["docker", "ps", "-a", "--format", "{{.Names}}", "--filter", f"label=sandfleet.deployment={deployment}"]
    if node_id:
        argv += ["--filter", f"label=sandfleet.node={node_id}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def settings_of(label: str, blank_pool: int) -> dict[str, str]:
    return {
        "SANDFLEET_BACKEND": "docker",
        "SANDFLEET_LABELS": f"for={label}",
        "SANDFLEET_BLANK_POOL": str(blank_pool),
        "SANDFLEET_REPLICAS": "3",
        "SANDFLEET_DETACH_S": "0",
    }


def dying_node(
    fleet: Fleet, name: str, label: str, point: str, mark: Path, *, told: str = "KILL", blank_pool: int = 0
) -> Process:
    """A node that ends, or stops, when it comes to the point."""
    argv = ["-m", "tests.chaos.dying", told, point, "sandfleet_workers", "--node-id", name]
    node = fleet.start(name, argv, DYING_AT=str(mark), **importable(), **settings_of(label, blank_pool))
    wait_until(lambda: is_alive(fleet, name, node, blank_pool), 60, story=fleet.story)
    return node


def is_alive(fleet: Fleet, name: str, node: Process, blank_pool: int) -> bool:
    assert node.running, node.tail()
    views = [view for view in fleet.store.nodes() if view.node_id == name and view.alive and view.pid == node.pid]
    return bool(views) and sum(views[0].blanks.values()) == blank_pool


def provider_of(fleet: Fleet, label: str) -> SandboxProvider:
    return SandboxProvider(fleet.settings(label=label, backend="docker", acquire_timeout_s=60.0))


def works(fleet: Fleet, provider: SandboxProvider, thread: str, number: int) -> Sandbox:
    """The thread's sandbox, once a command ran in it: what was lost with a node is acquired again."""
    found: list[Sandbox] = []

    def one_command() -> bool:
        try:
            sandbox = provider.get(provider.acquire(thread))
            assert sandbox is not None
            sandbox.run(note(number)).check()
        except (SandboxError, Unavailable) as exc:
            raise AssertionError(str(exc)) from exc
        found.append(sandbox)
        return True

    wait_until(one_command, 90, story=fleet.story)
    return found[0]


def all_in_their_places(fleet: Fleet, name: str) -> bool:
    (view,) = [view for view in fleet.store.nodes() if view.node_id == name]
    there = containers(fleet, name)
    assert len(there) == view.places, (there, view.places)
    return True


def nothing_is_left_of(fleet: Fleet, node: Process) -> None:
    fleet.end(node)
    assert containers(fleet, node.name) == []
    own = fleet.data_root / "nodes" / node.name
    assert [*own.glob("slots/*"), *own.glob("sandboxes/*")] == []


@pytest.mark.parametrize("point", STARTS, ids=lambda point: point.rpartition(".")[2])
def test_a_node_killed_at_any_step_of_a_start_leaves_one_sandbox_and_no_caller_without_it(
    boxes: Fleet, tmp_path: Path, point: str
) -> None:
    label, thread = unique("start"), unique("mid-create")
    dying = dying_node(boxes, label, label, point, tmp_path / "dead")
    answers: Answers[str] = Answers(boxes)
    with provider_of(boxes, label) as provider:
        answers.ask("acquire", lambda: provider.acquire(thread))
        wait_until(lambda: not dying.running, 60, story=boxes.story)
        node = boxes.node(label, label=label, env=settings_of(label, 0))
        assert not errors(answers.all(60)), boxes.story()
        sandbox = works(boxes, provider, thread, 1)
        assert boxes.numbers(thread) == [1]
        wait_until(lambda: all_in_their_places(boxes, label), 60, story=boxes.story)
        assert len(containers(boxes, label)) == 1
        provider.destroy(sandbox.id)
    nothing_is_left_of(boxes, node)


def test_a_node_killed_at_any_step_of_a_claim_loses_nothing_of_the_thread(boxes: Fleet, tmp_path: Path) -> None:
    label = unique("claim")
    steps = (0, 1, 2, 3, 4, 6)
    threads = [unique(f"mid-claim-{step}") for step in steps]
    with provider_of(boxes, label) as provider:
        node = boxes.node(label, label=label, env=settings_of(label, 0))
        for thread in threads:
            sandbox = works(boxes, provider, thread, 1)
            sandbox.write_file(KEPT, thread)
            sandbox.run("mkdir -p deep/er && echo x > deep/er/file && ln -s nowhere link").check()
            provider.destroy(sandbox.id)
        boxes.end(node)
        died = 0
        for step, thread in zip(steps, threads, strict=True):
            mark = tmp_path / f"dead-{step}"
            dying = dying_node(boxes, label, label, f"{CLAIM}change:{step}", mark, blank_pool=1)
            answers: Answers[str] = Answers(boxes)
            answers.ask("acquire", lambda t=thread: provider.acquire(t))
            wait_until(lambda a=answers, d=dying: bool(a.got) or not d.running, 60, story=boxes.story)
            if not dying.running:
                died += 1
                dying = boxes.node(label, label=label, env=settings_of(label, 1))
            answers.all(60)
            sandbox = works(boxes, provider, thread, 2)
            assert boxes.numbers(thread) == [1, 2]
            assert sandbox.read_file(KEPT) == thread
            assert sandbox.run("cat deep/er/file; readlink link").stdout == "x\nnowhere\n"
            wait_until(lambda: all_in_their_places(boxes, label), 60, story=boxes.story)
            provider.destroy(sandbox.id)
            nothing_is_left_of(boxes, dying)
        assert died >= 3, "a claim has more steps than that"


def test_a_node_frozen_past_its_lease_within_a_start_runs_no_second_sandbox_on_the_threads_data(
    boxes: Fleet, tmp_path: Path
) -> None:
    label, thread = unique("frozen"), unique("frozen-create")
    mark = tmp_path / "stopped"
    point = "docker.api.container:ContainerApiMixin.start@before"
    frozen = dying_node(boxes, f"{label}-1", label, point, mark, told="STOP")
    answers: Answers[str] = Answers(boxes)
    with provider_of(boxes, label) as provider:
        answers.ask("acquire", lambda: provider.acquire(thread))
        wait_until(mark.exists, 60, story=boxes.story)
        other = boxes.node(f"{label}-2", label=label, env=settings_of(label, 0))
        try:
            assert not errors(answers.all(60)), boxes.story()
            sandbox = works(boxes, provider, thread, 1)
            assert [info.node_id for info in provider.list() if info.thread_id == thread] == [other.name]
        finally:
            frozen.send(signal.SIGCONT)
        wait_until(lambda: "node.restarts" in frozen.output or not frozen.running, 60, story=boxes.story)
        wait_until(lambda: containers(boxes, frozen.name) == [], 60, story=boxes.story)
        assert sandbox.run(note(2)).exit_code == 0
        assert boxes.numbers(thread) == [1, 2]
        assert len(containers(boxes, other.name)) == 1
        try:
            provider.destroy(sandbox.id)
        except SandfleetError as exc:
            pytest.fail(f"{exc}\n{boxes.story()}")
    nothing_is_left_of(boxes, frozen)
    nothing_is_left_of(boxes, other)
