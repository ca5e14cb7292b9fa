"""Machines that die or pause while their threads' files are saved or restored; they share nothing but the storage."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity
from sandfleet.model import SandboxInfo
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

LEASE_S = 2.0
FILES = 1500


class Machines:
    """Two nodes with disks of their own, a storage, and a client."""

    def __init__(self, stack: Stack, provider: SandboxProvider, base: Path) -> None:
        self.stack, self.provider, self.base = stack, provider, base
        self.storage = base / "storage"

    def sandbox(self, thread_id: str, **options: str) -> Sandbox:
        made = self.provider.get(self.provider.acquire(thread_id, timeout_s=60, **options))
        assert made is not None
        return made

    def info(self, sandbox_id: str) -> SandboxInfo:
        found = self.stack.store.sandbox(sandbox_id)
        assert found is not None
        return found

    def place(self, thread_id: str) -> Path:
        digest = Identity(thread_id).digest
        return self.storage / digest[:2] / digest

    def kill(self, node_id: str) -> None:
        self.stack.kill_node(node_id)
        wait_until(lambda: all(n.node_id != node_id or not n.alive for n in self.stack.store.nodes()), 20)


@contextmanager
def machines(base: Path) -> Iterator[Machines]:
    require("redis")
    require("bwrap")
    node_env = {name: {"SANDFLEET_DATA_ROOT": str(base / name)} for name in ("node-1", "node-2")}
    env = {"SANDFLEET_CHECKPOINT_URL": str(base / "storage"), "SANDFLEET_CHECKPOINT_ON_RELEASE": "false"}
    with (
        Stack(nodes=2, backend="local", lease_s=LEASE_S, env=env, node_env=node_env) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        yield Machines(stack, provider, base)


def count(path: Path, pattern: str) -> int:
    return sum(1 for _ in path.glob(pattern))


def test_a_checkpoint_that_was_cut_short_is_never_restored(tmp_path: Path) -> None:
    with machines(tmp_path) as fleet:
        box = fleet.sandbox("cut")
        box.run("echo whole > state").check()
        first = fleet.provider.snapshot(box.id)
        box.run(f"echo half > state; for i in $(seq {FILES}); do echo $i > new$i; done").check()
        node_id = fleet.info(box.id).node_id

        def snapshot() -> None:
            try:
                fleet.provider.snapshot(box.id, timeout_s=30)
            except SandfleetError:
                pass  # its node dies

        saving = threading.Thread(target=snapshot)
        saving.start()
        objects = fleet.place("cut")
        wait_until(lambda: count(objects, "objects/*/*") > 20, 30)
        fleet.kill(node_id)
        saving.join(60)
        assert count(objects, "manifests/*") == 1, "the manifest is written last"
        assert count(objects, "objects/*/*") < FILES
        again = fleet.sandbox("cut", on_lost="restore")
        assert again.run("cat state; ls").check().stdout == "whole\nstate\n"
        told = fleet.info(again.id).restored
        assert told is not None
        assert told.checkpoint_id == first.id
        # What the cut one left in the storage is in nobody's way.
        assert fleet.provider.snapshot(again.id).files == 1


def test_a_restoration_that_was_cut_short_is_never_seen(tmp_path: Path) -> None:
    with machines(tmp_path) as fleet:
        box = fleet.sandbox("cut")
        box.run(f"for i in $(seq {FILES}); do echo $i > f$i; done; echo last > z").check()
        fleet.provider.snapshot(box.id)
        home = fleet.info(box.id).node_id
        other = "node-2" if home == "node-1" else "node-1"
        fleet.kill(home)
        thread = tmp_path / other / "threads" / "cut"
        asking = threading.Thread(target=lambda: fleet.sandbox("cut", on_lost="restore"))
        asking.start()
        wait_until(lambda: count(thread, ".restore-*/workspace/*") > 20, 30)
        fleet.stack.kill_node(other)
        assert not (thread / "user-data").exists(), "it takes its place when all of it is there"
        fleet.stack.start_node(other)
        asking.join(90)
        again = fleet.sandbox("cut", on_lost="restore")
        assert again.run("ls | wc -l; cat z").check().stdout == f"{FILES + 1}\nlast\n"
        assert count(thread, ".restore-*") == 0


def test_a_machine_that_was_paused_gives_its_thread_nothing_old(tmp_path: Path) -> None:
    with machines(tmp_path) as fleet:
        box = fleet.sandbox("paused")
        box.run("echo old > state").check()
        fleet.provider.snapshot(box.id)
        box.run("echo unsaved > state").check()
        home = fleet.info(box.id).node_id
        paused = fleet.stack.nodes[home]
        paused.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: fleet.info(box.id).state == "lost", 20)
            again = fleet.sandbox("paused", on_lost="restore")
            assert again.run("cat state; echo new > state").check().stdout == "old\n"
            newest = fleet.provider.snapshot(again.id)
        finally:
            paused.send_signal(signal.SIGCONT)
        wait_until(lambda: any(n.node_id == home and n.alive for n in fleet.stack.store.nodes()), 40)
        # It is back as another incarnation, and ended what it had; nothing of that counts for anything.
        assert fleet.provider.checkpoints("paused")[0].id == newest.id
        assert fleet.info(again.id).node_id != home
        assert again.run("cat state").check().stdout == "new\n"
        fleet.kill(fleet.info(again.id).node_id)
        assert fleet.sandbox("paused", on_lost="restore").run("cat state").check().stdout == "new\n"
