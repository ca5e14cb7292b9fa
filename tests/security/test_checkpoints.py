"""Attacks on saving and restoring threads' files (catalogue F10, F11).

Two enemies: the code in a sandbox, whose tree the node reads on the host, and whoever can write to the storage. No case
may read or write a byte outside the thread's own directories, or take the node's time, memory or disk without end.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandfleet import Sandbox
from sandfleet.errors import CheckpointCorrupt, StartFailed
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints.manifest import PIECE_BYTES, ManifestName
from tests.security.boxes import as_root
from tests.security.grounds import CANARY, GROUNDS, WORK, Ground, ground
from tests.unit.checkpoint_world import World

THREAD = "packed"


# --- the enemy is in the sandbox ---------------------------------------------------------------


@pytest.fixture(scope="module", params=GROUNDS)
def field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    base = tmp_path_factory.mktemp(request.param)
    with ground(request.param, base, checkpoint_url=str(base / "storage"), checkpoint_keep=1000) as made:
        yield made


@pytest.fixture
def sandbox(field: Ground) -> Iterator[Sandbox]:
    """The attacker's sandbox, empty; afterwards the host is as it was."""
    made = field.sandbox(THREAD)
    made.run(f"chmod -R u+rwX {WORK}; rm -rf {WORK}/* {WORK}/.[!.]*")
    yield made
    field.assert_untouched()


def stored(field: Ground) -> Iterator[bytes]:
    """Everything in the storage."""
    return (path.read_bytes() for path in (field.root.parent / "storage").rglob("*") if path.is_file())


@pytest.mark.slow
def test_f10_nothing_of_the_host_is_packed(field: Ground, sandbox: Sandbox) -> None:
    sandbox.run(
        f"ln -s {field.secret} secret; ln -s {field.root} root; ln -s / all; ln -s ../../.. up; mkdir d; "
        f"ln -s {field.secret} d/secret; echo mine > d/mine"
    ).check()
    made = field.provider.snapshot(sandbox.id)
    assert (made.files, made.consistent) == (1, True)
    assert not any(CANARY.encode() in content for content in stored(field))


@pytest.mark.slow
def test_f10_a_directory_that_flips_to_a_link_leads_nowhere(field: Ground, sandbox: Sandbox) -> None:
    sandbox.run(
        "mkdir -p d; echo mine > d/secret; (for i in $(seq 300000); do mv d e && ln -s "
        f"{field.secret.parent} d && rm d && mv e d; done) >/dev/null 2>&1 &",
    ).check()
    for _ in range(5):
        field.provider.snapshot(sandbox.id)
    assert not any(CANARY.encode() in content for content in stored(field))


@pytest.mark.slow
@as_root
def test_f10_what_comes_back_is_the_sandboxs_own_and_has_no_special_bits(field: Ground, sandbox: Sandbox) -> None:
    sandbox.run(
        "echo x > tool; chmod 6777 tool; mkdir shared; chmod 7777 shared; ln tool twin; ln -s /etc link"
    ).check()
    made = field.provider.snapshot(sandbox.id)
    owner = (field.user_data(THREAD) / "workspace").stat().st_uid
    field.provider.restore(THREAD, made.id)
    work = field.user_data(THREAD) / "workspace"
    assert work.stat().st_uid == owner
    found = {path.name: path.lstat() for path in work.iterdir()}
    assert {status.st_uid for status in found.values()} == {owner}
    assert all(not stat.S_IMODE(status.st_mode) & 0o7000 for status in found.values())
    assert {name: status.st_nlink for name, status in found.items() if name != "shared"} == {
        "tool": 1, "twin": 1, "link": 1
    }  # fmt: skip
    assert field.sandbox(THREAD).run("cat twin && rm -rf * && ls -A").check().stdout == "x\n"


@pytest.mark.slow
def test_f11_a_tree_that_is_made_to_hang_or_fill_the_node_does_neither(field: Ground, sandbox: Sandbox) -> None:
    sandbox.run(
        "mkfifo pipe; truncate -s 4T giant; echo x >> giant; for i in $(seq 2000); do : > e$i; done; "
        'd=d; for i in $(seq 600); do mkdir "$d" && cd "$d" && d=dddddddddddddddd; done; : > bottom'
    ).check()
    began = time.monotonic()
    made = field.provider.snapshot(sandbox.id)
    assert time.monotonic() - began < 60
    assert made.size_bytes < 100_000
    assert f"{WORK.rpartition('/')[2]}/pipe: a pipe" in made.skipped
    assert any("path is too long" in line for line in made.skipped)
    field.provider.restore(THREAD, made.id)
    assert field.sandbox(THREAD).run("stat -c %s giant; stat -c %b giant").check().stdout.split()[0] == str(
        (4 << 40) + 2
    )


# --- the enemy is the storage ------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def forge(world: World, rows: list[Any], **contents: bytes) -> None:
    """A manifest that says that, with right digests, and objects."""
    world.save()
    name = ManifestName(99, 1, "0123456789abcdef")
    (_, told) = world.vault.checkpoints()[0]
    summary = {**told.to_wire(), "id": name.id, "epoch": name.epoch, "seq": name.seq, "v": 1, "parent": None}
    lines = [json.dumps(value).encode() + b"\n" for value in (summary, rows)]
    digests = " ".join(hashlib.sha256(line).hexdigest() for line in lines)
    data = f"sandfleet-checkpoint 1 {digests} {len(lines[1])}\n".encode() + b"".join(lines)
    world.storage.write(world.vault._path(name), data)
    for digest, content in contents.items():
        world.vault.put_object(digest, content)


ROOM = ["workspace", "d", 0o755, 0]
EVIL = hashlib.sha256(b"evil").hexdigest()
FILE = ["f", 0o4755, 0, [[4, EVIL]]]
LEADING_OUT = {
    "absolute": [["/tmp/sandfleet-evil", *FILE]],
    "up": [["../evil", *FILE]],
    "up from within": [ROOM, ["workspace/../../evil", *FILE]],
    "through a link": [ROOM, ["workspace/l", "l", "{out}"], ["workspace/l/evil", *FILE]],
    "through a link that is a directory too": [
        ROOM, ["workspace/l", "l", "{out}"], ["workspace/l", "d", 0o755, 0], ["workspace/l/evil", *FILE]
    ],
    "over a link": [ROOM, ["workspace/l", "l", "{out}/evil"], ["workspace/l", *FILE]],
    "the thread's own directory as a link": [["workspace", "l", "{out}"], ["workspace/evil", *FILE]],
    "a link in place of workspace": [["workspace", "l", "{out}"]],
    "a file in place of workspace": [["workspace", *FILE]],
    "a device": [ROOM, ["workspace/x", "c", 0o666, 0]],
    "a hard link": [ROOM, ["workspace/x", "h", "{out}/secret"]],
}  # fmt: skip


@pytest.mark.parametrize("rows", LEADING_OUT.values(), ids=LEADING_OUT)
def test_f10_nothing_is_unpacked_outside(world: World, tmp_path: Path, rows: list[list[Any]]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "secret").write_text(CANARY)
    told = [[part.replace("{out}", str(out)) if isinstance(part, str) else part for part in row] for row in rows]
    forge(world, told, **{EVIL: b"evil"})
    (world.work("two") / "present").write_text("stays")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointCorrupt):
        world.restore(checkpoint="0123456789abcdef")
    assert sorted(tmp_path.rglob("*")) == before
    assert (out / "secret").read_text() == CANARY
    assert not Path("/tmp/sandfleet-evil").exists()


def test_f10_links_are_made_as_they_were_and_never_followed(world: World, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    rows = [ROOM, ["workspace/l", "l", str(tmp_path / "out")], ["workspace/x", *FILE]]
    forge(world, rows, **{EVIL: b"evil"})
    work = world.restore(checkpoint="0123456789abcdef")
    assert os.readlink(work / "l") == str(tmp_path / "out")
    assert stat.S_IMODE((work / "x").stat().st_mode) == 0o755
    assert list((tmp_path / "out").iterdir()) == []


def test_f11_what_does_not_fit_is_refused_before_anything_is_written(world: World) -> None:
    data = bytes(PIECE_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    # One object, a hundred thousand times: 800 GB.
    rows = [ROOM, *([f"workspace/{number}", "f", 0o644, 0, [[PIECE_BYTES, digest]] * 100] for number in range(1000))]
    forge(world, rows, **{digest: data})
    for limits in ({"max_bytes": 10 * PIECE_BYTES}, {"min_free_bytes": 2**50}):
        with pytest.raises(StartFailed) as told:
            world.restore(checkpoint="0123456789abcdef", **limits)
        assert told.value.facts["reason"] == "disk"
    assert not (world.base / "two" / "t" / "user-data").exists()


@pytest.mark.parametrize("pieces", [[[2**53, ""]], [[1, ""]] * 300], ids=["one hole", "many holes"])
def test_f11_holes_cost_nothing_or_are_refused(world: World, pieces: list[Any]) -> None:
    forge(world, [ROOM, ["workspace/x", "f", 0o644, 0, pieces]])
    with suppress(StartFailed):  # a file system has a largest file
        work = world.restore(checkpoint="0123456789abcdef")
        assert (work / "x").stat().st_blocks == 0


def test_f11_an_object_that_is_longer_than_it_says_is_not_taken(world: World) -> None:
    forge(world, [ROOM, ["workspace/x", *FILE]], **{EVIL: b"evil" * 10_000_000})
    with pytest.raises(CheckpointCorrupt):
        world.restore(checkpoint="0123456789abcdef")


def test_f10_another_threads_checkpoint_is_none_of_this_one(world: World) -> None:
    (world.work() / "file").write_text("mine")
    world.save()
    other = World(world.base)
    other.identity = Identity("other", "u")
    other.vault = type(world.vault)(world.storage, other.identity.digest)
    for name in world.vault.names():
        world.storage.write(other.vault._path(name), world.storage.read(world.vault._path(name), most=2**20))
    for digest in world.objects():
        other.vault.put_object(digest, world.storage.read(world.vault._object(digest), most=2**20))
    assert other.vault.checkpoints() == []
    with pytest.raises(CheckpointCorrupt):
        other.restore()
