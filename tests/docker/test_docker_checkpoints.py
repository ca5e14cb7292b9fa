"""Checkpoints of containers: what comes back is the sandbox user's own, in a container that was started ahead, too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require("redis")
    require("docker")
    storage = tmp_path_factory.mktemp("storage")
    with Stack(nodes=1, backend="docker", replicas=4, blank_pool=1, checkpoint_url=str(storage)) as stack:
        yield stack


@pytest.fixture
def provider(fleet: Stack) -> Iterator[SandboxProvider]:
    with SandboxProvider(fleet.settings) as made:
        yield made


def blank_is_ready(fleet: Stack) -> bool:
    return any(sum(node.blanks.values()) for node in fleet.store.nodes())


def taken(provider: SandboxProvider, sandbox_id: str) -> Sandbox:
    found = provider.get(sandbox_id)
    assert found is not None
    return found


def test_a_blank_container_becomes_the_thread_with_what_was_restored(fleet: Stack, provider: SandboxProvider) -> None:
    wait_until(lambda: blank_is_ready(fleet), 60)
    sandbox_id = provider.acquire("kept", timeout_s=60)
    box = taken(provider, sandbox_id)
    box.run("mkdir d && echo kept > d/file && chmod 700 d && echo up > ../uploads/file").check()
    made = provider.snapshot(sandbox_id)
    box.run("echo later > d/file").check()
    wait_until(lambda: blank_is_ready(fleet), 60)
    again = provider.restore("kept", made.id, timeout_s=60)
    box = taken(provider, again)
    assert box.run("cat d/file ../uploads/file").check().stdout == "kept\nup\n"
    box.run("echo mine >> d/file && rm ../uploads/file && stat -c %u d/file").check()
    provider.destroy(again)


def test_a_thread_whose_directory_is_gone_is_restored(fleet: Stack, provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("lost", timeout_s=60)
    taken(provider, sandbox_id).run("echo saved > file").check()
    provider.destroy(sandbox_id)
    wait_until(lambda: provider.checkpoints("lost"), 30)
    shutil.rmtree(Path(fleet.settings.data_root) / "threads" / "lost")
    again = provider.acquire("lost", on_lost="restore", timeout_s=60)
    assert taken(provider, again).run("cat file").check().stdout == "saved\n"
    info = fleet.store.sandbox(again)
    assert info is not None
    assert info.restored is not None
    provider.destroy(again, delete_data=True)
    assert provider.checkpoints("lost") == []
