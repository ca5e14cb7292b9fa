"""A fleet whose sandboxes are containers: the blank pool, lifecycles, and what is left when nodes die."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.errors import SandboxLost
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

LEASE_S = 3.0


#: Data ids of the fleets, which outlive their data roots here.
DEPLOYMENTS: dict[int, str] = {}


def started(stack: Stack) -> Stack:
    DEPLOYMENTS[id(stack)] = (stack.settings.data_root / "data-id").read_text().strip()
    wait_until(lambda: blanks(stack) == 2, 60)
    return stack


def containers(stack: Stack, node_id: str | None = None) -> list[str]:
    """Containers of the fleet's nodes, running or not."""
    argv = ["docker", "ps", "-aq", "--filter", f"label=sandfleet.deployment={DEPLOYMENTS[id(stack)]}"]
    if node_id is not None:
        argv += ["--filter", f"label=sandfleet.node={node_id}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def blanks(stack: Stack) -> int:
    return sum(sum(view.blanks.values()) for view in stack.store.nodes())


def sandbox_of(provider: SandboxProvider, thread_id: str) -> Sandbox:
    sandbox = provider.get(provider.acquire(thread_id))
    assert sandbox is not None
    return sandbox


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    """Two nodes that share one engine and one data root."""
    require("docker")
    require("redis")
    with Stack(2, backend="docker", lease_s=LEASE_S, blank_pool=1, replicas=4, acquire_timeout_s=60.0) as stack:
        yield started(stack)
        stack.stop()
        assert containers(stack) == []


@pytest.fixture
def provider(fleet: Stack) -> Iterator[SandboxProvider]:
    with SandboxProvider(fleet.settings) as provider:
        yield provider
        for info in provider.list():
            provider.destroy(info.sandbox_id)
    wait_until(lambda: blanks(fleet) == 2, 60)


def test_a_new_thread_gets_a_container_that_was_there_before_it(fleet: Stack, provider: SandboxProvider) -> None:
    before = set(containers(fleet))
    sandbox = sandbox_of(provider, "new")
    assert sandbox.run("echo hi > a && cat a").stdout == "hi\n"
    workspace = fleet.settings.data_root / "threads" / "new" / "user-data" / "workspace"
    assert (workspace / "a").read_text() == "hi\n"
    (view,) = (info for info in provider.list() if info.thread_id == "new")
    log = (fleet.log_dir / f"{view.node_id}.log").read_text()
    started = [line for line in log.splitlines() if "sandbox.started" in line and view.sandbox_id in line]
    assert '"blank": true' in started[-1] or "blank=True" in started[-1], started
    assert len(before & set(containers(fleet))) == 2, "both are still there, one of them is the thread's"


def test_a_returning_thread_finds_its_files_in_another_container(fleet: Stack, provider: SandboxProvider) -> None:
    sandbox = sandbox_of(provider, "back")
    sandbox.write_file("/mnt/user-data/outputs/kept", "mine")
    sandbox.run("mkdir -p deep/er && echo x > deep/er/file && ln -s /etc/passwd link && chmod 700 deep").check()
    sandbox.run("touch /tmp/only-here").check()
    provider.destroy(sandbox.id)
    wait_until(lambda: blanks(fleet) == 2, 60)
    again = sandbox_of(provider, "back")
    assert again.run("test -e /tmp/only-here").exit_code == 1, "the same container again"
    assert again.read_file("/mnt/user-data/outputs/kept") == "mine"
    assert again.run("cat deep/er/file; readlink link; stat -c %a deep").stdout == "x\n/etc/passwd\n700\n"
    again.run("echo more >> deep/er/file").check()


def test_released_sandboxes_end_with_the_lifecycle_task(fleet: Stack, provider: SandboxProvider) -> None:
    settings = fleet.settings.model_copy(update={"lifecycle": "task"})
    with SandboxProvider(settings) as tasks:
        sandbox_id = tasks.acquire("one-task")
        tasks.release(sandbox_id)
        wait_until(lambda: all(info.sandbox_id != sandbox_id for info in tasks.list()), 30)


def test_many_threads_at_once_each_get_their_own(fleet: Stack, provider: SandboxProvider) -> None:
    names = [f"many-{number}" for number in range(6)]
    for name in names:
        sandbox_of(provider, name).write_file("/mnt/user-data/workspace/who", name)
    assert [sandbox_of(provider, name).run("cat who").stdout for name in names] == names
    views = fleet.store.nodes()
    assert all(view.places <= view.replicas for view in views)


@pytest.mark.timeout(300)  # neighbours look once a minute
def test_what_a_killed_node_left_is_removed_by_its_neighbour_and_by_itself() -> None:
    require("docker")
    require("redis")
    with Stack(2, backend="docker", lease_s=LEASE_S, blank_pool=1, replicas=4, acquire_timeout_s=60.0) as stack:
        with SandboxProvider(started(stack).settings) as provider:
            sandbox = sandbox_of(provider, "orphan")
            sandbox.write_file("/mnt/user-data/workspace/kept", "mine")
            (info,) = provider.list()
            other = next(node_id for node_id in stack.node_ids if node_id != info.node_id)
            wait_until(lambda: blanks(stack) == 2, 60)
            theirs = set(containers(stack, other))
            stack.kill_node(info.node_id)
            assert containers(stack, info.node_id), "nothing ended them"
            wait_until(lambda: not containers(stack, info.node_id), 120)
            assert theirs <= set(containers(stack, other)), "the living node's own were not touched"
            with pytest.raises(SandboxLost):
                sandbox.run("true")
            again = sandbox_of(provider, "orphan")
            assert again.read_file("/mnt/user-data/workspace/kept") == "mine"
            # The other way round: a node that comes back takes its sandboxes back, and clears up the rest after itself.
            wait_until(lambda: len(containers(stack, other)) == 2, 60)
            left = set(containers(stack, other))
            stack.kill_node(other)
            stack.start_node(other)
            wait_until(lambda: len(left & set(containers(stack, other))) == 1, 60)
            assert again.run("cat kept").stdout == "mine"
        stack.stop()
        assert containers(stack) == []
