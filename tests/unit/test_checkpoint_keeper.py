"""When a node saves threads' files and when it brings them back: over a store in memory, the work done by the test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.backends import Completion
from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    InvalidArgument,
    NoCheckpoint,
    NotSupported,
)
from sandfleet.ids import Identity
from sandfleet.store.base import Route
from sandfleet.testing import ManualClock
from sandfleet.wire import OpMessage
from sandfleet_workers import lease as lease_module
from sandfleet_workers import upkeep as upkeep_module
from sandfleet_workers.checkpoints import keeper as keeper_module
from sandfleet_workers.holdings import Held
from tests.unit.node_world import ALICE
from tests.unit.node_world import World as NodeWorld

AGAIN_S = keeper_module._AGAIN_S


class World(NodeWorld):
    """A node with a storage, whose threads are the test."""

    def __init__(self, root: Path, clock: ManualClock, **given: Any) -> None:
        super().__init__(root, clock, **given)
        self.root = root
        self.checkpoints = self.node.lifecycle.checkpoints

    def saved(self) -> int:
        """Do what the threads of the checkpoints would; how much there was."""
        for ran in range(100):
            try:
                work = self.checkpoints._work.get_nowait()
            except Empty:
                return ran
            assert work is not None
            work()
        raise AssertionError("work without end")

    def files(self, identity: Identity = ALICE) -> Path:
        return self.life.dirs.data_root / "threads" / identity.thread_id / "user-data" / "workspace"

    def change(self, route: Route, content: str, kind: str = "write_file") -> Held:
        held = self.node.held[route.sandbox_id]
        (self.files(held.identity) / "file").write_text(content)
        self.checkpoints.touched(OpMessage("op", kind, held.identity, route, (), {}, None, 0, 0, "", 0))
        return held

    def list(self, identity: Identity = ALICE) -> list[Checkpoint]:
        ended: list[Completion] = []
        message = OpMessage(
            "op", "node.checkpoints", identity, Route(identity.digest, "n1", "i", 0), (), {}, None, 0, 0, "", 0
        )
        self.checkpoints.answer(message, ended.append)
        self.saved()
        if ended[0].error is not None:
            raise ended[0].error
        return [Checkpoint.from_wire(one) for one in ended[0].value["checkpoints"]]

    def release(self, route: Route) -> None:
        self.store.release(route.sandbox_id, ALICE.digest, "agent")


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> World:
    clock = ManualClock()
    monkeypatch.setattr(lease_module, "boot_s", clock.boottime)
    monkeypatch.setattr(upkeep_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(keeper_module, "_THREADS", 0)
    monkeypatch.setattr(keeper_module, "_END_WITHIN_S", 0.0)
    return World(tmp_path, clock, **{"checkpoint_url": str(tmp_path / "storage"), **given})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make(tmp_path, monkeypatch)


# --- saving ------------------------------------------------------------------------------------


def test_what_was_changed_is_saved_when_it_is_released_and_once(world: World) -> None:
    route = world.live()
    world.change(route, "one")
    world.tick(1)
    assert world.saved() == 0, "it is in use"
    world.release(route)
    world.tick(1)
    world.tick(1)
    assert world.saved() == 1
    world.tick(1)
    assert world.saved() == 0
    (made,) = world.list()
    assert (made.thread_id, made.files, made.epoch) == ("alice", 1, route.epoch)
    assert world.checkpoints.tally == {"made": 1}


def test_what_only_looked_is_not_saved(world: World) -> None:
    route = world.live()
    for kind in ("read_file", "health", "checkpoint", "node.create"):
        world.change(route, "x", kind)
    world.release(route)
    world.tick(1)
    assert world.saved() == 0


def test_what_an_owner_that_died_did_not_save_is_saved_by_the_next(world: World) -> None:
    world.files().mkdir(parents=True)
    (world.files() / "file").write_text("of an earlier run")
    route = world.live()
    world.tick(1)
    assert world.saved() == 0
    world.release(route)
    world.tick(1)
    assert world.saved() == 1
    assert [one.files for one in world.list()] == [1]


def test_a_change_that_ends_while_it_is_saved_is_saved_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.live()
    world.change(route, "one")
    world.release(route)
    world.tick(1)
    original = keeper_module.save

    def meanwhile(*given: Any) -> Any:
        done = original(*given)
        world.change(route, "two")
        return done

    monkeypatch.setattr(keeper_module, "save", meanwhile)
    assert world.saved() == 1
    monkeypatch.undo()
    world.tick(1)
    assert world.saved() == 1


def test_what_is_in_use_is_saved_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(tmp_path, monkeypatch, checkpoint_every_s=300, checkpoint_on_release=False)
    route = world.live()
    held = world.change(route, "one")
    world.tick(1)
    assert world.saved() == 0
    held.made_at -= 301
    world.tick(1)
    assert world.saved() == 1
    world.tick(1)
    assert world.saved() == 0, "nothing has changed since"
    world.change(route, "two")
    world.tick(1)
    assert world.saved() == 0, "it is not due yet"
    held.saved_at -= 301
    world.tick(1)
    assert world.saved() == 1
    held.saved_at -= 301
    world.record(route, "running")
    world.tick(1)
    assert world.saved() == 1, "what runs may be writing"
    assert [one.files for one in world.list()] == [1, 1]
    world.release(route)
    world.change(route, "three")
    world.tick(1)
    assert world.saved() == 0


def test_a_sandbox_that_ends_is_saved_before_its_place_is_free(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_END_WITHIN_S", 60.0)
    places: list[int] = []

    def at_once(work: Any) -> None:
        places.append(world.store.nodes()[0].places)
        work()

    route = world.stopping()
    world.change(route, "last")
    with monkeypatch.context() as patch:
        patch.setattr(world.checkpoints, "_work", SimpleNamespace(put=at_once))
        assert world.run("node.destroy", route).error is None
    assert places == [1]
    assert world.store.nodes()[0].places == 0
    assert len(world.list()) == 1


def test_a_sandbox_that_dies_is_saved(world: World) -> None:
    route = world.live()
    world.change(route, "last")
    world.backend.destroy(route.sandbox_id)
    world.life._died(route.sandbox_id, "killed")
    assert world.saved() == 1
    assert len(world.list()) == 1


def test_deleted_data_is_not_saved_and_what_was_saved_goes(world: World) -> None:
    route = world.live()
    world.change(route, "one")
    world.release(route)
    world.tick(1)
    world.saved()
    world.change(route, "two")
    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    assert world.run("node.destroy", route, delete_data=True).error is None
    assert world.saved() == 0
    assert world.list() == []
    assert not world.files().exists()


def test_what_was_saved_is_gone_before_the_threads_next_sandbox_can_begin(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.stopping()
    states: list[str] = []

    def forget(_identity: Identity) -> None:
        states.extend(info.state for info in world.store.sandboxes())

    monkeypatch.setattr(world.checkpoints, "forget", forget)
    assert world.run("node.destroy", route, delete_data=True).error is None
    assert states == ["stopping"]
    assert world.store.sandboxes() == []


def test_what_ends_with_its_node_is_waited_for_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(keeper_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    world.node.draining = True
    whole_s = world.checkpoints._patience_s()
    assert whole_s == world.node.settings.drain_timeout_s
    clock.advance(whole_s + 1)
    assert world.checkpoints._patience_s() == 0


def test_a_storage_in_trouble_is_asked_again_later(world: World) -> None:
    storage = world.root / "storage"
    storage.write_text("no directory")
    route = world.live()
    held = world.change(route, "one")
    world.release(route)
    world.tick(1)
    assert world.saved() == 1
    assert world.checkpoints.tally == {"failed": 1}
    world.tick(1)
    assert world.saved() == 0
    storage.unlink()
    held.save_after -= AGAIN_S
    world.tick(1)
    assert world.saved() == 1
    assert len(world.list()) == 1


def test_a_checkpoint_on_demand_tells_what_went_wrong(world: World) -> None:
    held = world.node.held[world.live().sandbox_id]
    ended: list[Completion] = []
    world.checkpoints.start(held, {"name": "mine"}, ended.append)
    world.saved()
    assert Checkpoint.from_wire(ended[0].value).name == "mine"
    shutil.rmtree(world.root / "storage")
    (world.root / "storage").write_text("no directory")
    world.checkpoints.start(held, {}, ended.append)
    world.saved()
    assert isinstance(ended[1].error, CheckpointFailed)
    shutil.rmtree(world.files().parent)
    (world.root / "storage").unlink()
    world.checkpoints.start(held, {}, ended.append)
    world.saved()
    assert isinstance(ended[2].error, CheckpointFailed)


def test_a_fenced_node_saves_nothing(world: World) -> None:
    route = world.live()
    world.change(route, "x")
    world.node.fenced = True
    world.life.end(route)
    assert world.saved() == 0


# --- restoring ---------------------------------------------------------------------------------

LATEST = {"checkpoint": "latest", "required": True, "replace": True}


def gone(world: World, content: str = "saved") -> Checkpoint:
    """A thread that was saved, and has neither a sandbox nor anything here any more."""
    route = world.live()
    world.change(route, content)
    world.life.end_and_tell(route)
    world.saved()
    shutil.rmtree(world.files().parent.parent)
    return world.list()[0]


def test_a_creation_begins_with_what_it_is_told_to(world: World) -> None:
    made = gone(world)
    route = world.reserved()
    assert world.run("node.create", route, restore=LATEST).error is None
    assert (world.files() / "file").read_text() == "saved"
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.restored is not None
    assert (info.restored.checkpoint_id, info.restored.files) == (made.id, 1)
    assert world.saved() == 1, "it is the newest state now"
    assert len(world.list()) == 1, "and differs from the last one in nothing"


def test_a_changed_checkpoint_is_passed_over_and_told(world: World) -> None:
    older = gone(world, "older")
    before = set(world.root.glob("storage/*/*/objects/*/*"))
    route = world.reserved()
    assert world.run("node.create", route, restore=LATEST).error is None
    world.change(route, "newer")
    world.life.end_and_tell(route)
    world.saved()
    for path in set(world.root.glob("storage/*/*/objects/*/*")) - before:
        path.write_bytes(path.read_bytes()[::-1])
    newest = world.list()[0]
    shutil.rmtree(world.files().parent.parent)
    # Whoever asks for that very one gets it or nothing.
    error = world.run("node.create", world.reserved(), restore={**LATEST, "checkpoint": newest.id}).error
    assert isinstance(error, CheckpointCorrupt)
    route = world.reserved()
    assert world.run("node.create", route, restore=LATEST).error is None
    assert (world.files() / "file").read_text() == "older"
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.restored is not None
    assert (info.restored.checkpoint_id, info.restored.passed_over) == (older.id, (newest.id,))


def test_without_a_checkpoint_nothing_is_begun_and_the_place_is_free(world: World) -> None:
    route = world.reserved()
    error = world.run("node.create", route, restore=LATEST).error
    assert isinstance(error, NoCheckpoint)
    assert world.store.nodes()[0].places == 0
    assert world.backend.running() == []
    assert world.run("node.create", world.reserved(), restore={**LATEST, "required": False}).error is None


def test_what_a_thread_has_here_is_kept_unless_it_is_to_be_replaced(world: World) -> None:
    made = gone(world)
    world.files().mkdir(parents=True)
    (world.files() / "here").write_text("here")
    route = world.reserved()
    assert world.run("node.create", route, restore={"checkpoint": "latest"}).error is None
    assert os.listdir(world.files()) == ["here"]
    world.life.end_and_tell(route)
    assert world.run("node.create", world.reserved(), restore={"checkpoint": made.id, "replace": True}).error is None
    assert os.listdir(world.files()) == ["file"]


def test_an_earlier_home_that_a_registry_takes_for_the_threads_does_not_give_it_older_files(world: World) -> None:
    first = world.reserved()
    assert world.run("node.create", first).error is None
    world.change(first, "older")
    world.life.end_and_tell(first)
    world.saved()
    earlier = world.files().parent.parent
    shutil.copytree(earlier, aside := earlier.with_name("earlier"))
    then = world.reserved()
    assert world.run("node.create", then).error is None
    world.change(then, "newer")
    world.life.end_and_tell(then)
    world.saved()
    # Its home goes; the machine it came from is back, and Redis has lost its data.
    shutil.rmtree(earlier)
    aside.rename(earlier)
    route = world.reserved()
    assert world.run("node.create", route, restore={"checkpoint": "latest"}).error is None
    assert (world.files() / "file").read_text() == "newer"
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.restored is not None


def test_a_fresh_start_does_not_begin_with_what_an_earlier_home_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(tmp_path, monkeypatch, checkpoint_url="")
    world.files().mkdir(parents=True)
    (world.files() / "older").write_text("older")
    assert world.run("node.create", world.reserved(), restore={"checkpoint": None}).error is None
    assert os.listdir(world.files()) == []
    (aside,) = world.files().parent.parent.glob(".earlier-*")
    assert os.listdir(aside / "workspace") == ["older"]


def test_a_thread_begins_with_its_newest_checkpoint_where_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = {"persistent_volume": str(tmp_path / "volume"), "restore_on_start": True}
    world = make(tmp_path, monkeypatch, checkpoint_url="", container=volume)
    first = world.live()
    world.change(first, "state")
    world.life.end_and_tell(first)
    world.saved()
    shutil.rmtree(world.files().parent.parent)
    # A fresh start that was asked for is fresh.
    fresh = world.reserved()
    assert world.run("node.create", fresh, restore={"checkpoint": None}).error is None
    assert os.listdir(world.files()) == []
    world.life.end_and_tell(fresh)
    again = world.reserved()
    assert world.run("node.create", again).error is None
    assert os.listdir(world.files()) == ["file"]
    # A storage that is away is no reason to begin with nothing.
    world.life.end_and_tell(again)
    world.saved()
    shutil.rmtree(world.files().parent.parent)
    shutil.rmtree(tmp_path / "volume")
    (tmp_path / "volume").write_text("no directory")
    assert isinstance(world.run("node.create", world.reserved()).error, CheckpointFailed)


def test_a_fork_reads_only_threads_of_its_user(world: World) -> None:
    gone(world)
    mine, other = Identity("copy"), Identity("copy", "somebody")
    restore = {**LATEST, "from": "alice"}
    assert isinstance(world.run("node.create", world.reserved(other), other, restore=restore).error, NoCheckpoint)
    assert world.run("node.create", world.reserved(mine), mine, restore=restore).error is None
    assert (world.files(mine) / "file").read_text() == "saved"
    world.saved()
    assert len(world.list(mine)) == 1, "it has a place of its own at once"


@pytest.mark.parametrize(
    "restore",
    [
        "latest",
        {"checkpoint": 7},
        {"checkpoint": "latest", "from": ["u", "t"]},
        {"checkpoint": "latest", "from": "../x"},
    ],
    ids=str,
)
def test_a_malformed_wish_is_refused(world: World, restore: Any) -> None:
    error = world.run("node.create", world.reserved(), restore=restore).error
    assert isinstance(error, InvalidArgument)
    assert world.backend.running() == []


def test_a_node_without_a_storage_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(tmp_path, monkeypatch, checkpoint_url="")
    with pytest.raises(NotSupported, match=r"checkpoints\.url"):
        world.list()
    assert isinstance(world.run("node.create", world.reserved(), restore=LATEST).error, NotSupported)
    assert world.run("node.create", world.reserved(), restore={**LATEST, "required": False}).error is None


def test_a_slow_restoration_holds_no_thread_that_quick_creations_need(world: World) -> None:
    route = world.reserved()
    message = OpMessage("op", "node.create", ALICE, route, (), {"blank": "s", "restore": LATEST}, None, 0, 0, "", 0)
    assert not world.life.is_quick(message)
