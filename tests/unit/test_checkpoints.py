"""Checkpoints without a fleet: what is saved comes back as it was, only what is new is written, and nothing half."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.errors import CheckpointCorrupt, CheckpointFailed, ConfigError, NoCheckpoint, NotStarted, StartFailed
from sandfleet_workers.checkpoints import reading, restoring
from sandfleet_workers.checkpoints.manifest import PIECE_BYTES
from sandfleet_workers.checkpoints.pruning import prune, saved_threads
from sandfleet_workers.checkpoints.saving import GRACE_MS, INDEX, Index, Policy
from sandfleet_workers.checkpoints.storage import Storage
from sandfleet_workers.checkpoints.vault import Vault, vaults
from tests.unit.checkpoint_world import HOUR_MS, World, picture

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Watched(Vault):
    """Notes which objects are written, and may fail or wait there."""

    def __init__(self, world: World) -> None:
        super().__init__(world.storage, world.identity.digest)
        self.written: list[str] = []
        self.before: Any = lambda digest: None

    def put_object(self, digest: str, data: bytes) -> None:
        self.before(digest)
        super().put_object(digest, data)
        self.written.append(digest)


# --- what comes back ---------------------------------------------------------------------------


def test_a_tree_comes_back_as_it_was(world: World) -> None:
    work = world.work()
    (work / "a").mkdir(mode=0o700)
    (work / "a" / "run.sh").write_text("#!/bin/sh\n")
    (work / "a" / "run.sh").chmod(0o751)
    (work / "a" / "empty").touch()
    (work / "link").symlink_to("a/run.sh")
    (work / "out").symlink_to("/etc/passwd")
    Path(os.fsdecode(os.fsencode(work) + b"/\xff\n-rf")).write_text("odd")
    os.link(work / "a" / "run.sh", work / "twin")
    (work / "a").chmod(0o555)
    before = picture(work)
    made, new = world.save()
    assert (new, made.files, made.consistent, made.skipped) == (True, 4, True, ())
    assert picture(world.restore()) == before


names = st.binary(min_size=1, max_size=12).map(lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"_"))
trees = st.recursive(
    st.one_of(
        st.tuples(st.just("file"), st.binary(max_size=50), st.integers(0o600, 0o777)),
        st.tuples(st.just("link"), names, st.just(0)),
    ),
    lambda inner: st.tuples(st.just("dir"), st.dictionaries(names, inner, max_size=4), st.integers(0o700, 0o777)),
    max_leaves=12,
)


def plant(at: bytes, tree: Any) -> None:
    kind, what, mode = tree
    if kind == "link":
        os.symlink(what, at)
    elif kind == "file":
        with open(at, "wb") as file:
            file.write(what)
        os.chmod(at, mode)
    else:
        os.mkdir(at)
        for name, inner in what.items():
            if name not in (b".", b".."):
                plant(at + b"/" + name, inner)
        os.chmod(at, mode)


@given(st.dictionaries(names, trees, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_tree_a_sandbox_makes_comes_back(planted: dict[bytes, Any]) -> None:
    with tempfile.TemporaryDirectory() as base:
        world = World(Path(base))
        for name, tree in planted.items():
            if name not in (b".", b".."):
                plant(os.fsencode(world.work()) + b"/" + name, tree)
        before = picture(world.work())
        world.save()
        assert picture(world.restore()) == before


def test_a_big_file_is_cut_and_holes_stay_holes(world: World) -> None:
    with (world.work() / "big").open("wb") as file:
        file.write(os.urandom(PIECE_BYTES + 1))
        file.seek(1 << 40)
        file.write(b"end")
        file.truncate((1 << 40) + 5000)
    made, _ = world.save()
    assert made.size_bytes < 4 * PIECE_BYTES
    found = world.restore() / "big"
    assert found.stat().st_size == (1 << 40) + 5000
    assert found.stat().st_blocks * 512 < 4 * PIECE_BYTES
    with found.open("rb") as file, (world.work() / "big").open("rb") as original:
        assert file.read(PIECE_BYTES + 1) == original.read(PIECE_BYTES + 1)
        file.seek(1 << 40)
        assert file.read(4) == b"end\0"


def test_what_is_no_file_is_left_out_and_told_and_hangs_nothing(world: World) -> None:
    os.mkfifo(world.work() / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(world.work() / "socket"))
        (world.work() / "file").write_text("x")
        made, _ = world.save()
    assert made.skipped == ("workspace/pipe: a pipe", "workspace/socket: a socket")
    assert os.listdir(world.restore()) == ["file"]


def test_what_is_above_the_limit_is_not_saved(world: World) -> None:
    (world.work() / "big").write_bytes(os.urandom(5000))
    with pytest.raises(CheckpointFailed, match="max_bytes") as told:
        world.save(policy=Policy(max_bytes=4999))
    assert told.value.facts["reason"] == "too_large"
    assert world.vault.names() == []
    world.save(policy=Policy(max_bytes=5000))


# --- only what is new --------------------------------------------------------------------------


def test_deep_paths_without_end_cost_no_memory_without_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_PATHS_BYTES", 1000)
    for number in range(5):
        (world.work() / ("x" * 200) / str(number)).mkdir(parents=True)
    with pytest.raises(CheckpointFailed) as told:
        world.save()
    assert told.value.facts["reason"] == "too_large"


def test_only_what_is_new_is_written(world: World) -> None:
    for number in range(20):
        (world.work() / str(number)).write_text(f"file {number}")
    (world.work() / "same").write_text("file 3")
    vault = Watched(world)
    world.save(vault=vault)
    assert len(vault.written) == 20
    vault.written.clear()
    (world.work() / "3").write_text("changed")
    made, new = world.save(vault=vault)
    assert (len(vault.written), new, made.files) == (1, True, 21)
    again, new = world.save(vault=vault)
    assert (again, new, len(vault.written)) == (made, False, 1)
    asked, new = world.save(vault=vault, always=True)
    assert (asked.parent, new, len(vault.written)) == (made.id, True, 1)


def test_files_that_have_not_changed_for_long_are_not_read_again(world: World) -> None:
    (world.work() / "old").write_text("content")
    world.save()
    index_path = world.thread() / INDEX
    assert Index.read(index_path).known == {}, "it is too fresh to be trusted"
    # As if it had been written an hour ago: the index is trusted for exactly that file, size, times and inode.
    from sandfleet_workers.checkpoints import saving  # noqa: PLC0415

    original = saving._file_system_time_ns
    try:
        saving._file_system_time_ns = lambda beside: original(beside) + 3600 * 10**9
        world.save(always=True)
        (known,) = Index.read(index_path).known.values()
        assert known.pieces[0].size == 7
        os.chmod(world.work() / "old", 0o600)  # another change time: read again
        made, new = world.save()
        assert new
    finally:
        saving._file_system_time_ns = original
    assert (world.restore() / "old").read_text() == "content"
    index_path.write_text("{broken")
    world.save(always=True)
    assert made.files == 1


def test_an_index_is_not_believed_about_objects_that_are_gone(world: World) -> None:
    from sandfleet_workers.checkpoints import saving  # noqa: PLC0415

    (world.work() / "file").write_text("content")
    original = saving._file_system_time_ns
    try:
        saving._file_system_time_ns = lambda beside: original(beside) + 3600 * 10**9
        world.save()
        world.vault.sweep(world.objects())
        world.save(always=True)
    finally:
        saving._file_system_time_ns = original
    assert (world.restore() / "file").read_text() == "content"


# --- what moves meanwhile ----------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_read_is_told(world: World) -> None:
    (world.work() / "a").write_text("x" * 100)
    vault = Watched(world)
    count = iter(range(10**6))

    def change(_digest: str) -> None:
        (world.work() / "a").write_text(f"changed {next(count)}")

    vault.before = change
    (world.work() / "b").write_bytes(os.urandom(64))
    for number in range(200):
        (world.work() / f"c{number}").write_text(str(number))
    made, _ = world.save(vault=vault)
    assert not made.consistent
    assert (world.restore() / "a").exists()


def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    target, stop = world.work() / "d", threading.Event()
    target.mkdir()
    (target / "key").write_text("mine")

    def swap() -> None:
        while not stop.is_set():
            target.rename(world.work() / "aside")
            target.symlink_to(secret)
            target.unlink()
            (world.work() / "aside").rename(target)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(30):
            world.save(always=True, policy=Policy(keep=100))
    finally:
        stop.set()
        swapping.join()
    contents = {world.vault.storage.read(world.vault._object(digest), most=100) for digest in world.objects()}
    assert contents <= {b"mine"}


# --- half of it --------------------------------------------------------------------------------


def test_a_checkpoint_without_its_manifest_is_none(world: World) -> None:
    (world.work() / "file").write_text("one")
    first, _ = world.save()
    vault = Watched(world)
    (world.work() / "file").write_text("two")

    def fail(_digest: str) -> None:
        raise CheckpointFailed("the node was killed")

    vault.before = fail
    with pytest.raises(CheckpointFailed):
        world.save(vault=vault)
    assert [told.id for _, told in world.vault.checkpoints()] == [first.id]
    assert (world.restore() / "file").read_text() == "one"


def test_of_several_the_newest_whole_one_is_restored(world: World) -> None:
    (world.work() / "file").write_text("one")
    world.save()
    (world.work() / "file").write_text("two")
    broken, _ = world.save()
    (world.work() / "file").write_text("three")
    torn, _ = world.save()
    files = {name.id: world.base / "storage" / world.vault._path(name) for name in world.vault.names()}
    files[torn.id].write_bytes(files[torn.id].read_bytes()[:-10])
    assert (world.restore() / "file").read_text() == "two"
    manifest = restoring.choose(world.vault, broken.id)
    assert manifest is not None
    (digest,) = manifest.digests()
    (world.base / "storage" / world.vault._object(digest)).unlink()
    assert (world.restore() / "file").read_text() == "one"
    with pytest.raises(CheckpointCorrupt):
        world.restore(checkpoint=torn.id)
    with pytest.raises(NoCheckpoint):
        world.restore(checkpoint="0" * 16)


def test_a_changed_object_is_found_out_and_nothing_of_it_is_used(world: World) -> None:
    (world.work() / "a").write_text("first")
    (world.work() / "b").write_text("other")
    world.save()
    for digest in world.objects():
        path = world.base / "storage" / world.vault._object(digest)
        path.write_bytes(path.read_bytes()[::-1])
    here = world.work("two")
    (here / "present").write_text("stays")
    with pytest.raises(CheckpointCorrupt):
        world.restore()
    assert os.listdir(here) == ["present"]
    assert os.listdir(here.parent.parent) == ["user-data"]


def test_who_is_no_longer_the_owner_replaces_nothing(world: World) -> None:
    (world.work() / "file").write_text("saved")
    world.save()
    here = world.work("two")
    (here / "newer").write_text("newer")
    manifest = restoring.choose(world.vault, None)
    assert manifest is not None

    def lost() -> None:
        raise NotStarted("the thread has a newer owner", reason="stale_route")

    with pytest.raises(NotStarted):
        restoring.restore(world.vault, manifest, world.thread("two"), max_bytes=0, min_free_bytes=0, still_ours=lost)
    assert os.listdir(here) == ["newer"]
    assert os.listdir(world.thread("two")) == ["user-data"]


def test_what_was_half_restored_is_removed_and_never_seen(world: World) -> None:
    (world.work() / "file").write_text("x")
    world.save()
    thread = world.thread("two")
    half = thread / f".restore-{'0' * 16}"
    (half / "workspace").mkdir(parents=True)
    (half / "workspace" / "half").write_text("half")
    assert os.listdir(world.restore()) == ["file"]
    assert os.listdir(thread) == ["user-data"]


def test_what_was_there_is_replaced_whole(world: World) -> None:
    (world.work() / "file").write_text("saved")
    world.save()
    here = world.work("two")
    (here / "old").write_text("old")
    opened = os.open(here, os.O_RDONLY)
    try:
        assert os.listdir(world.restore()) == ["file"]
        assert os.listdir(opened) == [], "the old directory is gone, not merged"
    finally:
        os.close(opened)


def test_without_room_nothing_is_restored(world: World) -> None:
    (world.work() / "file").write_bytes(os.urandom(2000))
    world.save()
    with pytest.raises(StartFailed) as told:
        world.restore(min_free_bytes=2**60)
    assert told.value.facts["reason"] == "disk"
    with pytest.raises(StartFailed):
        world.restore(max_bytes=1999)
    assert not restoring.has_data(world.base / "two" / "t")


def test_a_thread_has_data_when_anything_lies_there(world: World) -> None:
    thread = world.thread()
    assert not restoring.has_data(thread)
    assert not restoring.has_data(thread / "nowhere")
    (world.work() / "file").touch()
    assert restoring.has_data(thread)


# --- old ones ----------------------------------------------------------------------------------


def test_old_checkpoints_go_and_their_objects_later(world: World) -> None:
    for number in range(5):
        (world.work() / "file").write_text(f"content {number}")
        world.save(policy=Policy(keep=2), label="named" if number == 0 else None)
        world.now_ms += 1000
    assert [told.name for _, told in world.vault.checkpoints()] == [None, None, "named"]
    assert len(world.objects()) == 5, "whoever was about to name them gets an hour"
    world.now_ms += GRACE_MS
    (world.work() / "file").write_text("content 5")
    world.save(policy=Policy(keep=2))
    assert len(world.objects()) == 4  # three that are named, and the one whose checkpoint went just now
    assert {path.read_text() for path in (world.base / "storage").rglob("objects/*/*")} == {
        "content 0", "content 3", "content 4", "content 5"
    }  # fmt: skip
    for _, told in world.vault.checkpoints():
        world.restore(f"for-{told.id}", told.id)


def test_an_old_owner_removes_nothing_and_is_never_newest(world: World) -> None:
    (world.work("new") / "file").write_text("new")
    newer, _ = world.save("new", epoch=5)
    for number in range(8):
        (world.work("old") / "file").write_text(f"old {number}")
        world.save("old", epoch=4, policy=Policy(keep=1, grace_ms=0))
    assert world.vault.checkpoints()[0][1].id == newer.id
    assert len(world.vault.names()) == 9
    assert (world.restore() / "file").read_text() == "new"
    (world.work("new") / "file").write_text("newer")
    world.save("new", epoch=5, policy=Policy(keep=1), may_remove=lambda: False)
    assert len(world.vault.names()) == 10


def test_two_owners_who_save_at_once_leave_whole_checkpoints(world: World) -> None:
    (world.work("one") / "shared").write_text("shared")
    world.save("one", epoch=1)
    policy, failed = Policy(keep=2, grace_ms=HOUR_MS), []

    def run(machine: str, epoch: int) -> None:
        try:
            for number in range(12):
                (world.work(machine) / "file").write_text(f"{machine} {number}")
                (world.work(machine) / "shared").write_text("shared")
                world.save(machine, epoch=epoch, policy=policy)
        except Exception as exc:  # noqa: BLE001  (told below)
            failed.append(exc)

    both = [threading.Thread(target=run, args=args) for args in (("one", 1), ("two", 2))]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert failed == []
    assert world.vault.checkpoints()[0][0].epoch == 2
    restored = world.restore("three")
    assert (restored / "file").read_text() == "two 11"
    assert (restored / "shared").read_text() == "shared"


# --- the storage -------------------------------------------------------------------------------


def test_a_thread_can_be_removed_whole(world: World) -> None:
    (world.work() / "file").write_text("x")
    world.save()
    assert list(vaults(world.storage)) == [world.identity.digest]
    world.vault.remove()
    world.vault.remove()
    assert list(vaults(world.storage)) == []
    with pytest.raises(NoCheckpoint):
        restoring.choose(world.vault, None)
    assert restoring.choose(world.vault, None, required=False) is None


def test_a_storage_can_be_looked_through_and_pruned(world: World) -> None:
    made = []
    for number in range(3):
        (world.work() / "file").write_text(f"content {number}")
        made.append(world.save()[0].id)
    (found,) = saved_threads(world.storage)
    assert (found.digest, found.identity, found.stored_bytes) == (world.identity.digest, world.identity, 27)
    assert [told.id for told in found.checkpoints] == made[::-1]
    prune(world.storage, found.digest, made[:2])
    (found,) = saved_threads(world.storage)
    assert ([told.id for told in found.checkpoints], found.stored_bytes) == (made[2:], 9)
    assert (world.restore() / "file").read_text() == "content 2"
    torn = world.base / "storage" / world.vault._path(replace(world.vault.names()[0], id="0" * 16))
    torn.write_text("not written whole")
    prune(world.storage, found.digest, made)
    assert list(saved_threads(world.storage)) == []


def test_pruning_takes_nothing_from_whoever_saves_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (world.work() / "file").write_text(f"content {number}")
        world.save()
    old = world.vault.names()[-1].id
    (world.work() / "file").write_text("content 2")
    write = Vault.put_manifest

    def pruned_first(vault: Vault, manifest: Any) -> None:
        monkeypatch.undo()
        prune(world.storage, world.identity.digest, {old})
        write(vault, manifest)

    monkeypatch.setattr(Vault, "put_manifest", pruned_first)
    world.save()
    assert old not in {name.id for name in world.vault.names()}
    assert (world.restore() / "file").read_text() == "content 2"


def test_pruning_leaves_the_last_whole_checkpoint(world: World) -> None:
    (world.work() / "file").write_text("content 0")
    whole = world.save()[0].id
    before = world.objects()
    (world.work() / "file").write_text("content 1")
    world.save()
    world.vault.sweep(world.objects() - before)
    with pytest.raises(CheckpointCorrupt, match="would stay"):
        prune(world.storage, world.identity.digest, {whole})
    assert (world.restore() / "file").read_text() == "content 0"


def test_an_object_that_was_cut_short_is_written_again(world: World) -> None:
    (world.work() / "file").write_text("content 0")
    world.save()
    (digest,) = world.objects()
    (world.base / "storage" / world.vault._object(digest)).write_bytes(b"con")
    world.save(always=True)
    assert (world.restore() / "file").read_text() == "content 0"


def test_it_works_on_a_storage_that_is_no_file_system(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.storage = Storage("memory://sandfleet-test/checkpoints")
    world.vault = Vault(world.storage, world.identity.digest)
    try:
        (world.work() / "file").write_text("in memory")
        for _ in range(3):
            world.save(always=True, policy=Policy(keep=2))
        assert len(world.vault.names()) == 2
        assert (world.restore() / "file").read_text() == "in memory"
        assert list(vaults(world.storage)) == [world.identity.digest]
    finally:
        world.vault.remove()
    assert list(vaults(world.storage)) == []


def test_a_storage_that_hangs_is_given_up_and_holds_nobody(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path), timeout_s=0.1)
    hang = threading.Event()
    storage._fs.ls = lambda *_args, **_options: hang.wait(30) or []
    try:
        for _ in range(20):
            with pytest.raises(CheckpointFailed) as told:
                storage.files("x")
            assert told.value.facts["reason"] in ("timeout", "stuck")
        assert told.value.facts["reason"] == "stuck"
    finally:
        hang.set()


def test_a_storage_that_was_unmounted_is_not_an_empty_one(world: World) -> None:
    assert world.vault.names() == []
    (world.work() / "file").write_text("x")
    world.save()
    mounted, root = world.base / "aside", world.base / "storage"
    root.rename(mounted)
    root.mkdir()
    with pytest.raises(CheckpointFailed, match="mounted"):
        restoring.choose(world.vault, None, required=False)
    root.rmdir()
    with pytest.raises(CheckpointFailed, match="mounted"):
        world.vault.names()
    mounted.rename(root)
    assert (world.restore() / "file").read_text() == "x"


def test_a_storage_that_is_not_mounted_after_a_restart_is_not_an_empty_one(world: World) -> None:
    root, seen = world.base / "storage", world.base / "seen"
    world.vault = Vault(Storage(str(root), seen=seen), world.identity.digest)
    (world.work() / "file").write_text("x")
    world.save()
    mounted = root.rename(world.base / "aside")
    root.mkdir()
    again = Vault(Storage(str(root), seen=seen), world.identity.digest)
    for ask in (lambda: restoring.choose(again, None, required=False), lambda: world.save(vault=again)):
        with pytest.raises(CheckpointFailed, match="mounted"):
            ask()
    assert os.listdir(root) == []
    elsewhere = Vault(Storage(str(world.base / "other"), seen=seen), world.identity.digest)
    assert elsewhere.names() == []
    root.rmdir()
    mounted.rename(root)
    assert again.names()


def test_a_url_that_cannot_be_used_is_an_error_of_the_configuration() -> None:
    for url in ("nosuch://bucket/x", "s3://bucket/x"):
        with pytest.raises(ConfigError, match=r"checkpoints\.url|sandfleet\[checkpoints\]"):
            Storage(url, {"secret": "x"})


def test_errors_of_the_storage_name_no_credentials(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}/x")

    def refuse(*_args: Any, **_options: Any) -> None:
        raise PermissionError("s3://key:secret@host/bucket is not yours")

    storage._fs.cat_file = refuse
    with pytest.raises(CheckpointFailed) as told:
        storage.read("x", most=10)
    assert "secret" not in str(told.value)
