"""Slots: a blank sandbox's directories become a thread's, whatever lies in them and wherever the node dies."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet.errors import StartFailed
from sandfleet_workers import slots as module
from sandfleet_workers.slots import DIRECTORIES, Slots, rename_problem, settle

SLOT, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
ROOT = os.geteuid() == 0


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    return Slots(tmp_path / "nodes" / "n", uid=None)


@pytest.fixture
def thread(tmp_path: Path) -> Path:
    return tmp_path / "threads" / "t"


@pytest.fixture
def mounted(slots: Slots) -> Iterator[tuple[int, int]]:
    """The slot's directories as a container has them: held, not named."""
    path = slots.make(SLOT)
    held = [os.open(path / name, os.O_RDONLY) for name in DIRECTORIES]
    yield held[0], held[1]
    for fd in held:
        os.close(fd)


def reason(refused: pytest.ExceptionInfo[StartFailed]) -> str:
    return str(refused.value.facts["reason"])


def is_the_slots(mounted: tuple[int, int], thread: Path) -> bool:
    return all(
        os.path.samestat(os.fstat(fd), (thread / name).lstat()) for fd, name in zip(mounted, DIRECTORIES, strict=True)
    )


def test_a_new_slot_is_empty_and_has_the_three_directories(slots: Slots) -> None:
    path = slots.make(SLOT)
    assert sorted(os.listdir(path / "user-data")) == ["outputs", "uploads", "workspace"]
    assert os.listdir(path / "acp-workspace") == []
    assert slots.names() == [SLOT]


def test_modes_do_not_depend_on_the_umask(slots: Slots) -> None:
    before = os.umask(0o077)
    try:
        path = slots.make(SLOT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / "user-data").stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "acp-workspace").stat().st_mode) == 0o755
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_new_thread_gets_the_slots_directories_and_the_container_writes_into_them(
    slots: Slots, thread: Path, mounted: tuple[int, int]
) -> None:
    slots.claim(SLOT, thread)
    assert is_the_slots(mounted, thread)
    os.close(os.open("workspace/new", os.O_CREAT | os.O_WRONLY, dir_fd=mounted[0]))
    assert (thread / "user-data/workspace/new").exists()


def test_a_returning_threads_data_is_what_the_container_sees(
    slots: Slots, thread: Path, mounted: tuple[int, int]
) -> None:
    for name in ("user-data/workspace", "user-data/mine", "acp-workspace/sub"):
        (thread / name).mkdir(parents=True)
    (thread / "user-data/workspace/a\nb").write_text("1")
    (thread / "user-data/top").write_text("2")
    (thread / "user-data/link").symlink_to("/etc/passwd")
    (thread / "acp-workspace/sub/plan").write_text("3")
    slots.claim(SLOT, thread)
    assert is_the_slots(mounted, thread)
    assert set(os.listdir(mounted[0])) == {"link", "mine", "outputs", "top", "uploads", "workspace"}
    assert os.listdir(mounted[1]) == ["sub"]
    assert (thread / "user-data/workspace/a\nb").read_text() == "1"
    assert (thread / "acp-workspace/sub/plan").read_text() == "3"
    assert os.readlink(thread / "user-data/link") == "/etc/passwd"
    assert sorted(os.listdir(thread)) == sorted(DIRECTORIES)


def test_the_slots_names_lead_to_the_thread_for_a_container_that_is_restarted(slots: Slots, thread: Path) -> None:
    path = slots.make(SLOT)
    slots.claim(SLOT, thread)
    for name in DIRECTORIES:
        assert os.readlink(path / name) == str(thread / name)
        assert (path / name).resolve() == thread / name


@pytest.mark.usefixtures("mounted")
def test_removing_a_claimed_slot_leaves_the_thread_its_data(slots: Slots, thread: Path) -> None:
    slots.claim(SLOT, thread)
    (thread / "user-data/workspace/keep").write_text("")
    slots.remove(SLOT)
    assert slots.names() == []
    assert (thread / "user-data/workspace/keep").exists()
    slots.remove(SLOT)  # a missing one is fine


def test_claiming_twice_is_claiming_once(slots: Slots, thread: Path, mounted: tuple[int, int]) -> None:
    slots.claim(SLOT, thread)
    (thread / "user-data/workspace/work").write_text("")
    slots.claim(SLOT, thread)
    assert is_the_slots(mounted, thread)
    assert (thread / "user-data/workspace/work").exists()


def test_the_next_slot_takes_over_and_the_former_one_is_told(slots: Slots, thread: Path) -> None:
    slots.make(SLOT)
    slots.claim(SLOT, thread)
    (thread / "user-data/workspace/work").write_text("")
    path = slots.make(OTHER)
    inode = (path / "user-data").stat().st_ino
    slots.claim(OTHER, thread)
    assert (thread / "user-data").stat().st_ino == inode
    assert (thread / "user-data/workspace/work").exists()
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "slot_gone"
    slots.remove(SLOT)
    assert (thread / "user-data/workspace/work").exists()


@pytest.mark.parametrize("planted", ["user-data/workspace/x", "user-data/extra", "acp-workspace/x"])
def test_a_slot_that_is_not_empty_goes_to_nobody(slots: Slots, thread: Path, planted: str) -> None:
    (slots.make(SLOT) / planted).write_text("of somebody else")
    (thread / "user-data/workspace").mkdir(parents=True)
    (thread / "user-data/workspace/mine").write_text("")
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "slot_dirty"
    assert os.listdir(thread) == ["user-data"]
    assert os.listdir(thread / "user-data/workspace") == ["mine"]


@pytest.mark.usefixtures("mounted")
def test_a_slot_of_another_thread_is_refused(slots: Slots, thread: Path) -> None:
    slots.claim(SLOT, thread.with_name("first"))
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "slot_taken"


def test_a_slot_that_is_not_there_is_refused(slots: Slots, thread: Path) -> None:
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "slot_gone"
    with pytest.raises(ValueError, match="names no slot"):
        slots.claim("../../etc", thread)


@pytest.mark.usefixtures("mounted")
@pytest.mark.parametrize("place", ["user-data", "user-data/workspace", "acp-workspace"])
def test_a_link_in_a_directorys_place_is_not_followed(slots: Slots, thread: Path, place: str) -> None:
    outside = thread.parent / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_text("")
    (thread / place).parent.mkdir(parents=True)
    (thread / place).symlink_to(outside)
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "data_unusable"
    assert os.listdir(outside) == ["secret"]


@pytest.mark.usefixtures("mounted")
def test_a_thread_directory_that_is_a_link_is_refused(slots: Slots, thread: Path) -> None:
    thread.parent.mkdir()
    thread.symlink_to("/")
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "data_unusable"


def test_an_acp_workspace_keeps_its_mode(slots: Slots, thread: Path) -> None:
    (thread / "acp-workspace").mkdir(parents=True)
    (thread / "acp-workspace").chmod(0o2777)
    slots.make(SLOT)
    slots.claim(SLOT, thread)
    assert stat.S_IMODE((thread / "acp-workspace").stat().st_mode) == 0o2777


def test_a_directory_that_nobody_may_write_moves_and_stays_so(slots: Slots, thread: Path) -> None:
    (thread / "user-data/workspace").mkdir(parents=True)
    (thread / "user-data/workspace/kept").write_text("")
    (thread / "user-data/workspace").chmod(0o555)
    slots.make(SLOT)
    slots.claim(SLOT, thread)
    assert os.listdir(thread / "user-data/workspace") == ["kept"]
    assert stat.S_IMODE((thread / "user-data/workspace").stat().st_mode) == 0o555
    (thread / "user-data/workspace").chmod(0o755)


# --- interrupted claims ----------------------------------------------------------------------


def interrupted(slots: Slots, thread: Path) -> None:
    """A claim whose node died after all directories had been sent, and half of the data."""
    slots.make(SLOT)
    for name in DIRECTORIES:
        (slots._path / SLOT / name).rename(thread / f"{name}.{SLOT}")
    (thread / "user-data/workspace").rename(thread / f"user-data.{SLOT}/workspace")


def returning(thread: Path) -> None:
    for child in ("workspace", "uploads", "outputs"):
        (thread / "user-data" / child).mkdir(parents=True)
        (thread / "user-data" / child / f"of-{child}").write_text(child)
    (thread / "acp-workspace").mkdir()
    (thread / "acp-workspace/plan").write_text("")


def contents(thread: Path) -> set[str]:
    return {str(path.relative_to(thread)) for path in thread.rglob("*")}


def test_settling_completes_what_a_dead_node_began(slots: Slots, thread: Path) -> None:
    returning(thread)
    before = contents(thread)
    interrupted(slots, thread)
    slots.remove(SLOT)
    settle(thread)
    assert contents(thread) == before


def test_another_slot_completes_what_a_dead_node_began(slots: Slots, thread: Path) -> None:
    returning(thread)
    before = contents(thread)
    interrupted(slots, thread)
    slots.make(OTHER)
    slots.claim(OTHER, thread)
    assert contents(thread) == before


def test_settling_gives_a_new_thread_its_directories(slots: Slots, thread: Path) -> None:
    thread.mkdir(parents=True)
    slots.make(SLOT)
    for name in DIRECTORIES:
        (slots._path / SLOT / name).rename(thread / f"{name}.{SLOT}")
    settle(thread)
    assert contents(thread) == {
        "user-data", "acp-workspace", "user-data/workspace", "user-data/uploads", "user-data/outputs",
    }  # fmt: skip


def test_settling_a_thread_that_is_not_there_is_nothing(thread: Path) -> None:
    settle(thread)
    assert not thread.exists()


def test_two_versions_of_a_directory_are_kept_and_shown_to_a_person(slots: Slots, thread: Path) -> None:
    returning(thread)
    interrupted(slots, thread)
    (thread / "user-data/workspace").mkdir()  # by somebody who did not settle first
    (thread / "user-data/workspace/newer").write_text("")
    with pytest.raises(StartFailed, match="'workspace'") as refused:
        settle(thread)
    assert reason(refused) == "data_conflict"
    slots.make(OTHER)
    with pytest.raises(StartFailed) as refused:
        slots.claim(OTHER, thread)
    assert reason(refused) == "data_conflict"
    assert (thread / "user-data/workspace/newer").exists()
    assert (thread / f"user-data.{SLOT}/workspace/of-workspace").exists()


def test_a_file_is_never_replaced_by_a_file(slots: Slots, thread: Path) -> None:
    returning(thread)
    interrupted(slots, thread)
    (thread / f"user-data.{SLOT}/notes").write_text("older")
    (thread / "user-data/notes").write_text("newer")
    with pytest.raises(StartFailed) as refused:
        slots.claim(SLOT, thread)
    assert reason(refused) == "data_conflict"
    assert (thread / "user-data/notes").read_text() == "newer"
    assert (thread / f"user-data.{SLOT}/notes").read_text() == "older"


# --- whose they are --------------------------------------------------------------------------

UID = 10_001
as_root = pytest.mark.skipif(not ROOT, reason="gives directories to another user: needs root")


@as_root
def test_what_another_uid_left_belongs_to_the_sandboxs_user(tmp_path: Path, thread: Path) -> None:
    returning(thread)
    for path in (thread / "user-data/workspace", thread / "user-data/workspace/of-workspace"):
        os.chown(path, 1_900_000_123, 1_900_000_123)
    (thread / "user-data/workspace/link").symlink_to("/etc/passwd")
    slots = Slots(tmp_path / "nodes" / "n", uid=UID)
    slots.make(SLOT)
    slots.claim(SLOT, thread)
    owners = {path.lstat().st_uid for path in (thread / "user-data").rglob("*")}
    assert owners == {UID}
    assert (thread / "user-data").stat().st_uid == 0
    assert Path("/etc/passwd").stat().st_uid == 0


@as_root
def test_a_tree_of_more_directories_than_descriptors_is_given_over_too(tmp_path: Path, thread: Path) -> None:
    for number in range(300):
        (thread / f"user-data/workspace/{number}/below").mkdir(parents=True)
    slots = Slots(tmp_path / "nodes" / "n", uid=UID)
    slots.make(SLOT)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        slots.claim(SLOT, thread)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {path.lstat().st_uid for path in (thread / "user-data").rglob("*")} == {UID}


@as_root
def test_the_sandboxs_user_works_in_the_three_directories_and_cannot_move_them(tmp_path: Path, thread: Path) -> None:
    slots = Slots(tmp_path / "nodes" / "n", uid=UID)
    slots.make(SLOT)
    slots.claim(SLOT, thread)
    script = (
        "for d in workspace uploads outputs; do echo x > $d/f || exit 9; done; mv workspace w; rmdir outputs; > new"
    )
    # As in a container, the directory is entered before the user is changed.
    subprocess.run(
        ["sh", "-c", script], cwd=thread / "user-data", user=UID, group=UID, extra_groups=[], check=False,
        capture_output=True,
    )  # fmt: skip
    assert contents(thread / "user-data") == {
        "outputs", "outputs/f", "uploads", "uploads/f", "workspace", "workspace/f",
    }  # fmt: skip


# --- whether it can work here ----------------------------------------------------------------


def test_one_file_system_has_no_problem_and_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    assert rename_problem(tmp_path / "nodes" / "n", tmp_path) == ""
    assert [
        path.name for path in tmp_path.rglob("*") if path.name not in {"nodes", "n", "slots", "threads", "users"}
    ] == []


def test_two_file_systems_are_named_as_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def across(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if dst.startswith("user-data."):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), src)
        real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(module.os, "rename", across)
    problem = rename_problem(tmp_path / "nodes" / "n", tmp_path)
    assert "keep all of data_root on one mount" in problem
    assert "blank_pool: 0" in problem


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_real_second_file_system_is_noticed(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm") / f"sandfleet-{os.getpid()}-{tmp_path.name}"
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("the temporary directory is on it too")
    try:
        assert "Invalid cross-device link" in rename_problem(elsewhere / "n", tmp_path)
        assert not any(tmp_path.rglob(".probe*"))
    finally:
        subprocess.run(["rm", "-rf", elsewhere], check=True)


def test_no_room_for_a_slot_is_said_and_leaves_nothing(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.local_dirs, "open_user_data", full)
    with pytest.raises(StartFailed) as refused:
        slots.make(SLOT)
    assert reason(refused) == "disk"
    assert slots.names() == []
