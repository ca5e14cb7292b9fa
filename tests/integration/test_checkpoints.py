"""Checkpoints in a fleet of two machines: each node has a data root of its own, and they share a storage only."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import AsyncSandboxProvider, Sandbox, SandboxProvider
from sandfleet.celery_app import celery_app
from sandfleet.errors import (
    CheckpointFailed,
    HomeUnavailable,
    InvalidArgument,
    NoCheckpoint,
    NotSupported,
    SandboxNotFound,
)
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxInfo
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LEASE_S = 2.0


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "storage"


@pytest.fixture(scope="module")
def machines(storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two nodes that share no disk but the storage of checkpoints."""
    require("redis")
    require("bwrap")
    yield from _machines(tmp_path_factory.mktemp("machines"), {"SANDFLEET_CHECKPOINT_URL": f"file://{storage}"})


def _machines(base: Path, env: dict[str, str]) -> Iterator[Stack]:
    node_env = {name: {"SANDFLEET_DATA_ROOT": str(base / name)} for name in ("node-1", "node-2")}
    with Stack(nodes=2, backend="local", lease_s=LEASE_S, env=env, node_env=node_env) as stack:
        yield stack


@pytest.fixture
def provider(machines: Stack) -> Iterator[SandboxProvider]:
    for name in ("node-1", "node-2"):
        if name not in {node.node_id for node in machines.store.nodes() if node.alive}:
            machines.start_node(name)
    with SandboxProvider(machines.settings) as made:
        yield made


def taken(provider: SandboxProvider, sandbox_id: str) -> Sandbox:
    found = provider.get(sandbox_id)
    assert found is not None
    return found


def info(stack: Stack, sandbox_id: str) -> SandboxInfo:
    found = stack.store.sandbox(sandbox_id)
    assert found is not None
    return found


def lose(stack: Stack, sandbox_id: str) -> str:
    """The machine that has the sandbox dies; its name."""
    node_id = info(stack, sandbox_id).node_id
    stack.kill_node(node_id)
    wait_until(lambda: info(stack, sandbox_id).state == "lost", 20)
    return node_id


def test_a_thread_goes_on_elsewhere_with_what_was_saved_of_it(machines: Stack, provider: SandboxProvider) -> None:
    before = provider.acquire("gone", user_id="u")
    box = taken(provider, before)
    box.run("mkdir -p deep/er && echo kept > deep/er/file && ln -s deep/er/file link && chmod 750 deep").check()
    made = provider.snapshot(before, name="by hand")
    assert (made.thread_id, made.user_id, made.files, made.name, made.consistent) == ("gone", "u", 1, "by hand", True)
    box.write_file("/mnt/user-data/workspace/later.txt", "not saved")
    lost = lose(machines, before)
    with pytest.raises(HomeUnavailable):
        provider.acquire("gone", user_id="u", timeout_s=2)
    after = provider.acquire("gone", user_id="u", on_lost="restore", timeout_s=30)
    assert after == before
    assert info(machines, after).node_id != lost
    box = taken(provider, after)
    assert box.run("cat link; stat -c %a deep; ls").check().stdout == "kept\n750\ndeep\nlink\n"
    box.run("echo more >> deep/er/file").check()
    told = info(machines, after).restored
    assert told is not None
    assert (told.checkpoint_id, told.files, told.saved_at) == (made.id, 1, made.saved_at)
    assert told.missing == ("processes", "memory", "changes since")
    # It lives there now: nobody waits for the old home any more.
    provider.release(after)
    assert provider.acquire("gone", user_id="u", timeout_s=10) == after
    provider.destroy(after)


def test_a_thread_of_which_nothing_was_saved_is_never_begun_afresh(machines: Stack, provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("unsaved")
    taken(provider, sandbox_id).run("echo precious > file").check()
    lost = lose(machines, sandbox_id)
    with pytest.raises(NoCheckpoint):
        provider.acquire("unsaved", on_lost="restore", timeout_s=20)
    # Its place was given back, and its home is where it was.
    assert machines.store.thread_home(Identity("unsaved")) is not None
    with pytest.raises(HomeUnavailable):
        provider.acquire("unsaved", timeout_s=1)
    wait_until(lambda: all(node.places == 0 for node in machines.store.nodes() if node.alive), 10)
    machines.start_node(lost)
    again = provider.acquire("unsaved", on_lost="restore", timeout_s=20)
    assert taken(provider, again).read_file("/mnt/user-data/workspace/file") == "precious\n"
    provider.destroy(again, delete_data=True)


def test_what_is_released_is_saved_by_itself_and_once(machines: Stack, provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("released")
    taken(provider, sandbox_id).run("echo one > file").check()
    provider.release(sandbox_id)
    wait_until(lambda: len(provider.checkpoints("released")) == 1, 20)
    assert provider.acquire("released") == sandbox_id
    taken(provider, sandbox_id).run("true").check()
    taken(provider, sandbox_id).run("echo two > file").check()
    provider.release(sandbox_id)
    wait_until(lambda: len(provider.checkpoints("released")) == 2, 20)
    newest, oldest = provider.checkpoints("released")
    assert (newest.parent, oldest.parent) == (oldest.id, None)
    provider.destroy(sandbox_id)
    assert [one.id for one in provider.checkpoints("released")] == [newest.id, oldest.id]


def test_a_thread_goes_back_to_an_earlier_checkpoint(machines: Stack, provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("back")
    box = taken(provider, sandbox_id)
    box.run("echo one > file; echo same > same").check()
    first = provider.snapshot(sandbox_id)
    box.run("echo two > file; rm same; touch new; sleep 600 &").check()
    again = provider.restore("back", first.id)
    box = taken(provider, again)
    assert box.run("cat file same; ls; pgrep sleep").stdout == "one\nsame\nfile\nsame\n"
    told = info(machines, again).restored
    assert told is not None
    assert told.checkpoint_id == first.id
    # What it had before is not lost either, and what it has now is the newest.
    wait_until(lambda: len(provider.checkpoints("back")) == 3, 20)
    saved = provider.checkpoints("back")
    assert saved[-1].id == first.id
    assert provider.restore("back", saved[1].id) == again
    assert taken(provider, again).run("cat file; ls").stdout == "two\nfile\nnew\n"
    with pytest.raises(NoCheckpoint):
        provider.restore("back", "0" * 16)
    assert taken(provider, again).read_file("/mnt/user-data/workspace/file") == "two\n"
    provider.destroy(again)


async def test_a_fork_shares_nothing_with_its_source(machines: Stack, provider: SandboxProvider) -> None:
    async with AsyncSandboxProvider(machines.settings) as forking:
        sandbox_id = await forking.acquire("source", user_id="u")
        box = forking.get(sandbox_id)
        assert box is not None
        (await box.run("echo shared > file")).check()
        made = await forking.snapshot(thread_id="source", user_id="u")
        copy_id = await forking.fork("source", "copy", user_id="u")
        copy = forking.get(copy_id)
        assert copy is not None
        assert copy_id != sandbox_id
        assert await copy.read_file("/mnt/user-data/workspace/file") == "shared\n"
        (await copy.run("echo mine > file")).check()
        assert await box.read_file("/mnt/user-data/workspace/file") == "shared\n"
        with pytest.raises(InvalidArgument, match="has data already"):
            await forking.fork("source", "copy", user_id="u")
        with pytest.raises(NoCheckpoint):
            await forking.fork("source", "other", user_id="somebody-else")
        assert [one.id for one in await forking.checkpoints("source", user_id="u")] == [made.id]
        await forking.destroy(sandbox_id, delete_data=True)
        assert await forking.checkpoints("source", user_id="u") == []
        await asyncio.to_thread(wait_until, lambda: len(provider.checkpoints("copy", user_id="u")) >= 1, 20)
        await forking.destroy(copy_id)


def test_deleting_a_threads_data_deletes_its_checkpoints(
    machines: Stack, provider: SandboxProvider, storage: Path
) -> None:
    sandbox_id = provider.acquire("deleted")
    taken(provider, sandbox_id).run("echo x > file").check()
    provider.snapshot(sandbox_id)
    digest = Identity("deleted").digest
    assert (storage / digest[:2] / digest).is_dir()
    provider.destroy(sandbox_id, delete_data=True)
    assert not (storage / digest[:2] / digest).exists()


def test_a_storage_that_is_away_disturbs_no_sandbox(machines: Stack, provider: SandboxProvider, storage: Path) -> None:
    sandbox_id = provider.acquire("away")
    box = taken(provider, sandbox_id)
    box.run("echo x > file").check()
    aside = storage.with_name("aside")
    storage.rename(aside)
    storage.write_text("no directory")
    try:
        with pytest.raises(CheckpointFailed) as told:
            provider.snapshot(sandbox_id)
        assert told.value.retryable
        assert box.read_file("/mnt/user-data/workspace/file") == "x\n"
        provider.release(sandbox_id)
        assert provider.acquire("away") == sandbox_id
    finally:
        storage.unlink()
        aside.rename(storage)
    assert provider.snapshot(sandbox_id).files == 1
    provider.destroy(sandbox_id)
    with pytest.raises(SandboxNotFound):
        provider.snapshot(sandbox_id)


def test_a_node_without_a_storage_says_so(tmp_path: Path) -> None:
    require("redis")
    with Stack(nodes=1, backend="mock", lease_s=LEASE_S) as stack, SandboxProvider(stack.settings) as provider:
        sandbox_id = provider.acquire("t")
        for ask in (
            lambda: provider.snapshot(sandbox_id),
            lambda: provider.checkpoints("t"),
            lambda: provider.restore("t"),
        ):
            with pytest.raises(NotSupported, match=r"checkpoints\.url"):
                ask()


def test_the_seeds_persistent_volume_is_where_a_thread_begins_again(tmp_path: Path) -> None:
    require("redis")
    require("bwrap")
    env = {
        "SANDFLEET_PERSISTENT_VOLUME": str(tmp_path / "volume"),
        "SANDFLEET_RESTORE_ON_START": "true",
        "SANDFLEET_CHECKPOINT_EVERY_S": "0.5",
        "SANDFLEET_CHECKPOINT_ON_RELEASE": "false",
    }
    for stack in _machines(tmp_path / "machines", env):
        with SandboxProvider(stack.settings) as provider:
            sandbox_id = provider.acquire("seed")
            assert info(stack, sandbox_id).restored is None
            taken(provider, sandbox_id).run("echo state > file").check()
            # Saved while it is in use, as it is due.
            wait_until(lambda: provider.checkpoints("seed"), 20)
            provider.destroy(sandbox_id)
            for name in ("node-1", "node-2"):
                shutil.rmtree(tmp_path / "machines" / name / "threads" / "seed", ignore_errors=True)
            again = provider.acquire("seed")
            assert taken(provider, again).read_file("/mnt/user-data/workspace/file") == "state\n"
            assert info(stack, again).restored is not None


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_those_who_cannot_say_go_on_as_the_setting_says(tmp_path: Path) -> None:
    require("redis")
    require("bwrap")
    env = {"SANDFLEET_CHECKPOINT_URL": str(tmp_path / "storage"), "SANDFLEET_ON_LOST": "restore"}
    for stack in _machines(tmp_path / "machines", env):
        settings = stack.settings.model_copy(update={"on_lost": "restore"})
        app = celery_app(settings)
        with SandboxProvider(settings) as provider:
            stack.store.set_node_state("node-2", NodeState.CORDONED)
            for thread in ("plain", "ours"):
                sandbox_id = provider.acquire(thread)
                taken(provider, sandbox_id).run("echo saved > file").check()
                provider.snapshot(sandbox_id)
            stack.store.set_node_state("node-2", NodeState.READY)
            assert lose(stack, sandbox_id) == "node-1"
            # A plain Celery caller, whom the scheduler acquires for; a provider that is not told.
            asked = {"thread_id": "plain", "command": "cat file"}
            plain = app.send_task("sandbox.execute_command", kwargs=asked).get(timeout=60)
            assert plain["stdout"] == "saved\n"
            again = taken(provider, provider.acquire("ours", timeout_s=60))
            assert again.run("cat file").check().stdout == "saved\n"
            assert info(stack, again.id).restored is not None
        app.close()
