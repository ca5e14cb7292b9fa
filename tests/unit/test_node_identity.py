"""Which node a process is: an id held under a file lock."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandfleet.errors import ConfigError, InvalidArgument, NodeIdInUse
from sandfleet_workers import node_identity
from sandfleet_workers.node_identity import data_id, hold_node_id


def test_two_holders_on_one_data_root_get_different_ids(tmp_path: Path) -> None:
    one, other = hold_node_id(tmp_path, None), hold_node_id(tmp_path, None)
    assert one.node_id != other.node_id
    assert one.node_id.endswith("-1")
    assert other.node_id.endswith("-2")
    one.release()
    other.release()


def test_two_holders_on_two_data_roots_do_not_meet(tmp_path: Path) -> None:
    one, other = hold_node_id(tmp_path / "a", "n"), hold_node_id(tmp_path / "b", "n")
    one.release()
    other.release()


def test_an_id_that_is_held_is_refused_and_free_again_after_its_release(tmp_path: Path) -> None:
    held = hold_node_id(tmp_path, "node-1")
    with pytest.raises(NodeIdInUse) as refused:
        hold_node_id(tmp_path, "node-1")
    assert refused.value.facts["node_id"] == "node-1"
    held.release()
    held.release()  # twice is fine
    hold_node_id(tmp_path, "node-1").release()


def test_the_kernel_gives_the_id_of_a_killed_process_back(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from sandfleet_workers.node_identity import hold_node_id\n"
        "held = hold_node_id(pathlib.Path(sys.argv[1]), None)\n"
        "print(held.node_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = process.stdout.readline().strip()
        mine = hold_node_id(tmp_path, None)
        assert mine.node_id != theirs
        with pytest.raises(NodeIdInUse):
            hold_node_id(tmp_path, theirs)
        process.kill()
    again = hold_node_id(tmp_path, theirs)
    assert (again.directory / "lock").read_text() == f"{os.getpid()}\n"
    again.release()
    mine.release()


@pytest.mark.parametrize("wanted", ["../x", "A", "a/b", "a\n", "-a"])
def test_a_wanted_id_cannot_leave_the_data_root(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(InvalidArgument):
        hold_node_id(tmp_path, wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_symlink_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "nodes" / "node-1"
    directory.mkdir(parents=True)
    (tmp_path / "victim").write_text("precious")
    (directory / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError):
        hold_node_id(tmp_path, "node-1")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_data_root_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SANDFLEET_DATA_ROOT") as refused:
        hold_node_id(tmp_path / "file", None)
    assert refused.value.facts["key"] == "data_root"


def test_the_node_directory_is_only_its_owners(tmp_path: Path) -> None:
    held = hold_node_id(tmp_path, "node-1")
    assert held.directory.stat().st_mode & 0o777 == 0o700
    held.release()


def test_a_data_root_has_one_id_for_all_its_nodes(tmp_path: Path) -> None:
    first = data_id(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert data_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["data-id"]
    (tmp_path / "other").mkdir()
    assert data_id(tmp_path / "other") != first


def test_nodes_that_start_at_once_agree_on_the_id_and_leave_nothing_else(tmp_path: Path) -> None:
    together, ids = threading.Barrier(8), list[str]()

    def ask() -> None:
        together.wait()
        ids.append(data_id(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data-id"]


def test_a_node_that_was_slower_takes_the_id_of_the_faster_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(source: Path, target: Path) -> None:
        target.write_text("f" * 32 + "\n")
        source.unlink()  # a node in another container, with our pid, may have tidied up
        raise FileExistsError

    monkeypatch.setattr(os, "link", beaten)
    assert data_id(tmp_path) == "f" * 32


def test_a_file_that_lies_in_the_way_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "data-id.same").symlink_to(tmp_path / "victim")
    monkeypatch.setattr(secrets, "token_hex", lambda _size=32: "same")
    with pytest.raises(ConfigError):
        data_id(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_damaged_data_id_is_an_error_and_not_a_new_home(tmp_path: Path) -> None:
    (tmp_path / "data-id").write_text("")
    with pytest.raises(ConfigError):
        data_id(tmp_path)


def test_a_node_waits_for_a_neighbour_that_clears_up_after_it(tmp_path: Path) -> None:
    clearing = hold_node_id(tmp_path, "node-1", clearing=True)
    came: list[str] = []
    node = threading.Thread(target=lambda: came.append(hold_node_id(tmp_path, "node-1").node_id))
    node.start()
    node.join(node_identity._TOLD_WITHIN_S + 0.5)
    assert node.is_alive(), "its start failed because of a neighbour's tidiness"
    clearing.release()
    node.join(10)
    assert came == ["node-1"]


def test_nobody_waits_to_clear_up_after_a_node_that_lives(tmp_path: Path) -> None:
    held = hold_node_id(tmp_path, "node-1")
    with pytest.raises(NodeIdInUse):
        hold_node_id(tmp_path, "node-1", clearing=True)
    held.release()
