"""A promise about checkpoints: a storage that never answers again costs its checkpoints, and no sandbox or node."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import SandboxProvider
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(180)]

DRAIN_S, LEASE_S, SANDBOXES = 3.0, 3.0, 6

#: Loaded by every process of the fleet: all files of the storage are there, and nothing comes back once `hang` is.
HANGING = """
import os, time
from fsspec.implementations import local
real = local.LocalFileSystem
for name in ("ls", "open", "cat_file", "pipe_file", "exists", "makedirs", "mv"):
    def slow(self, *args, _real=getattr(real, name), **options):
        while os.path.exists({hang!r}):
            time.sleep(0.1)
        return _real(self, *args, **options)
    setattr(real, name, slow)
"""


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    return tmp_path / "hang"


@pytest.fixture
def fleet(tmp_path: Path, hang: Path) -> Iterator[Stack]:
    require("redis")
    require("bwrap")
    loaded = tmp_path / "loaded"
    loaded.mkdir()
    (loaded / "sitecustomize.py").write_text(HANGING.format(hang=str(hang)))
    env = {
        "PYTHONPATH": os.pathsep.join((str(loaded), os.environ.get("PYTHONPATH", ""))),
        "SANDFLEET_CHECKPOINT_URL": str(tmp_path / "storage"),
        "SANDFLEET_DRAIN_TIMEOUT_S": str(DRAIN_S),
    }
    with Stack(nodes=1, backend="local", lease_s=LEASE_S, replicas=SANDBOXES, env=env) as stack:
        yield stack


def test_a_storage_that_hangs_slows_nothing_down_and_lets_the_node_leave(fleet: Stack, hang: Path) -> None:
    with SandboxProvider(fleet.settings) as provider:
        ids = [provider.acquire(f"t{number}") for number in range(SANDBOXES)]
        boxes = [provider.get(sandbox_id) for sandbox_id in ids]
        assert provider.snapshot(ids[0]).files == 0
        hang.touch()
        for box in boxes:
            assert box is not None
            box.run("echo x > file").check()
        for sandbox_id in ids[1:]:
            provider.release(sandbox_id)  # each is to be saved now, and none can
        incarnation = fleet.store.nodes()[0].incarnation
        for _ in range(20):
            assert boxes[0] is not None
            assert boxes[0].run("cat file").check().stdout == "x\n"
        for number in range(1, SANDBOXES):
            assert provider.acquire(f"t{number}") == ids[number], "a save that hangs holds nobody's sandbox"
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > LEASE_S * 1.5, 20)
        assert [node.incarnation for node in fleet.store.nodes() if node.alive] == [incarnation]
        node = fleet.nodes["node-1"]
        fleet.stop_node("node-1", grace_s=60)
        assert node.returncode == 0, f"it had to be killed\n{fleet.tail('node-1', 30)}"
    assert "checkpoint.not_waited_for" in fleet.log("node-1").read_text()
