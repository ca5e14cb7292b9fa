"""Limits per thread on file systems that keep project quotas, made here in a file and mounted.

Skipped where that cannot be done: without root, without mkfs, or on a kernel that was built without quotas.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet.errors import StartFailed
from sandfleet_workers.quota import Quotas, quota_problem
from sandfleet_workers.slots import Slots, settle

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: needs root")

MIB = 1024 * 1024
SLOT, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
UID = 10_001
FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))

MAKE = {
    "xfs": ["mkfs.xfs", "-q"],
    "ext4": ["mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"],
}


@pytest.fixture(scope="module", params=sorted(MAKE))
def volume(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mounted file system with project quotas."""
    kind = request.param
    if shutil.which(MAKE[kind][0]) is None:
        pytest.skip(f"{MAKE[kind][0]} is missing")
    base = tmp_path_factory.mktemp(kind)
    image, mount = base / "image", base / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(320 * MIB)
    subprocess.run([*MAKE[kind], image], check=True)
    mounted = subprocess.run(
        ["mount", "-t", kind, "-o", "loop,prjquota", image, mount], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"{kind} with prjquota cannot be mounted here: {mounted.stderr.splitlines()[0]}")
    try:
        if problem := quota_problem(mount):
            pytest.skip(f"this kernel keeps no project quotas on {kind}: {problem}")
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
        image.unlink()


@pytest.fixture
def root(volume: Path) -> Iterator[Path]:
    """An empty data root on it."""
    path = volume / "data"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


@pytest.fixture
def quotas(root: Path) -> Quotas:
    found = Quotas(root)
    assert found.available
    return found


@pytest.fixture
def slots(root: Path) -> Slots:
    return Slots(root / "nodes" / "n", uid=UID)


def new_thread(root: Path, slots: Slots, name: str, slot: str = SLOT) -> Path:
    slots.make(slot)
    slots.claim(slot, root / "threads" / name)
    return root / "threads" / name


def as_sandbox(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script], cwd=directory, user=UID, group=UID, extra_groups=[], capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def fill(path: Path, size: int) -> int:
    """Write until it is refused or done, as the sandbox (ext4 holds root to no limit); returns how much there is."""
    done = as_sandbox(path.parent, f"dd if=/dev/zero of={path.name} bs=1M count={size // MIB} conv=fsync")
    assert done.returncode == 0 or any(word in done.stderr for word in FULL)
    return path.stat().st_size


def projects(path: Path) -> set[str]:
    """The project numbers that files and directories below carry, as the file system's own tool tells them."""
    lines = subprocess.run(["lsattr", "-pRa", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0] for line in lines if line and "/" in line and not line.endswith((":", "/.."))}


def test_r4_a_thread_that_fills_its_disk_is_stopped_and_its_neighbour_is_not(
    root: Path, slots: Slots, quotas: Quotas
) -> None:
    thread, neighbour = new_thread(root, slots, "t"), new_thread(root, slots, "neighbour", OTHER)
    for each in (thread, neighbour):
        quotas.apply(each, max_bytes=8 * MIB, max_inodes=1000)
    free = shutil.disk_usage(root).free
    done = as_sandbox(thread / "user-data/workspace", "dd if=/dev/zero of=x bs=1M count=64 2>&1; stat -c %s x")
    assert any(word in done.stdout for word in FULL)
    assert int(done.stdout.split()[-1]) <= 8 * MIB
    assert free - shutil.disk_usage(root).free <= 16 * MIB
    # All directories of the thread together are full, and a refused write leaves no hole.
    assert as_sandbox(thread / "user-data/outputs", "head -c 2000000 /dev/zero > y").returncode != 0
    assert as_sandbox(neighbour / "user-data/workspace", "head -c 6000000 /dev/zero > y").returncode == 0
    # Room that is made can be used.
    assert as_sandbox(thread / "user-data/workspace", "rm x && head -c 4000000 /dev/zero > z").returncode == 0


def test_r5_a_thread_that_makes_endless_files_is_stopped_and_its_neighbour_is_not(
    root: Path, slots: Slots, quotas: Quotas
) -> None:
    thread, neighbour = new_thread(root, slots, "t"), new_thread(root, slots, "neighbour", OTHER)
    for each in (thread, neighbour):
        quotas.apply(each, max_bytes=0, max_inodes=50)
    flood = "i=0; while [ $i -lt 200 ]; do touch f$i || break; i=$((i+1)); done; ls | wc -l"
    done = as_sandbox(thread / "user-data/workspace", flood)
    assert 30 <= int(done.stdout) <= 50
    assert as_sandbox(thread / "user-data/uploads", "mkdir d").returncode != 0
    assert as_sandbox(neighbour / "user-data/workspace", ": > f").returncode == 0


def test_a_returning_thread_keeps_its_number_and_its_use_counts(root: Path, slots: Slots, quotas: Quotas) -> None:
    thread = new_thread(root, slots, "t")
    quotas.apply(thread, max_bytes=8 * MIB, max_inodes=1000)
    assert fill(thread / "user-data/workspace/half", 5 * MIB) == 5 * MIB
    (thread / "user-data/outputs/d").mkdir()
    (thread / "acp-workspace/plan").write_text("")
    numbers = projects(thread)
    assert len(numbers) == 1
    for slot in (OTHER, "c" * 16):
        slots.make(slot)
        slots.claim(slot, thread)
        quotas.apply(thread, max_bytes=8 * MIB, max_inodes=1000)
    assert projects(thread) == numbers
    assert fill(thread / "user-data/uploads/more", 20 * MIB) < 3.5 * MIB


def test_a_claim_that_was_interrupted_is_completed_under_a_limit(root: Path, slots: Slots, quotas: Quotas) -> None:
    thread = new_thread(root, slots, "t")
    quotas.apply(thread, max_bytes=8 * MIB, max_inodes=1000)
    fill(thread / "user-data/workspace/half", 5 * MIB)
    (thread / "user-data/top").write_text("")
    path = slots.make(OTHER)
    for name in ("user-data", "acp-workspace"):
        (path / name).rename(thread / f"{name}.{OTHER}")
    (thread / "user-data/workspace").rename(thread / f"user-data.{OTHER}/workspace")
    settle(thread)
    quotas.apply(thread, max_bytes=8 * MIB, max_inodes=1000)
    assert (thread / "user-data/top").exists()
    assert len(projects(thread)) == 1
    assert fill(thread / "user-data/uploads/more", 20 * MIB) < 3.5 * MIB


def test_what_a_thread_had_before_there_were_limits_counts(root: Path, quotas: Quotas) -> None:
    thread = root / "threads" / "t"
    deep = thread / "user-data/workspace" / "/".join("d" * 60)
    deep.mkdir(parents=True)
    for number in range(30):
        (thread / f"user-data/workspace/wide{number}").mkdir()
    subprocess.run(["chown", "-R", f"{UID}:{UID}", thread / "user-data/workspace"], check=True)
    fill(deep / "big", 6 * MIB)
    (thread / "user-data/workspace/pipe-like").symlink_to("/etc/passwd")
    os.mkfifo(thread / "user-data/workspace/fifo")
    quotas.apply(thread, max_bytes=8 * MIB, max_inodes=1000)
    assert len(projects(thread / "user-data/workspace/wide0") | projects(deep)) == 1
    assert fill(thread / "user-data/workspace/more", 20 * MIB) < 2.5 * MIB


def test_another_limit_holds_from_its_application_on_and_none_is_none(root: Path, slots: Slots, quotas: Quotas) -> None:
    thread = new_thread(root, slots, "t")
    quotas.apply(thread, max_bytes=2 * MIB, max_inodes=20)
    assert fill(thread / "user-data/workspace/a", 8 * MIB) <= 2 * MIB
    quotas.apply(thread, max_bytes=6 * MIB, max_inodes=20)
    assert 4 * MIB <= fill(thread / "user-data/workspace/a", 8 * MIB) <= 6 * MIB
    quotas.apply(thread, max_bytes=0, max_inodes=0)
    assert fill(thread / "user-data/workspace/a", 8 * MIB) == 8 * MIB


def test_a_thread_that_was_deleted_and_comes_back_starts_from_nothing(root: Path, slots: Slots, quotas: Quotas) -> None:
    thread = new_thread(root, slots, "t")
    quotas.apply(thread, max_bytes=4 * MIB, max_inodes=100)
    fill(thread / "user-data/workspace/a", 8 * MIB)
    subprocess.run(["rm", "-rf", thread], check=True)
    thread = new_thread(root, slots, "t", OTHER)
    quotas.apply(thread, max_bytes=4 * MIB, max_inodes=100)
    assert fill(thread / "user-data/workspace/a", 3 * MIB) == 3 * MIB


def test_a_link_in_the_threads_place_is_refused(root: Path, quotas: Quotas) -> None:
    (root / "threads").mkdir()
    (root / "threads/t").symlink_to("/etc")
    with pytest.raises(StartFailed) as refused:
        quotas.apply(root / "threads/t", max_bytes=MIB, max_inodes=10)
    assert refused.value.facts["reason"] == "quota"
