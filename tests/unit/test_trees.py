"""Removing trees that a sandbox made: deep, closed, full of links, or changed meanwhile."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import trees
from sandfleet.trees import remove_tree


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """What a test leaves is removed by another program: pytest could not."""
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=False)


def nest(path: Path, depth: int) -> None:
    """Directories in each other, deeper than any path could name."""
    path.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_a_tree_deeper_than_recursion_and_descriptors_go_is_removed(tmp_path: Path) -> None:
    nest(tmp_path / "t", 3000)
    nest(tmp_path / "t" / "other", 3)
    held = len(os.listdir("/proc/self/fd"))
    remove_tree(tmp_path / "t")
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == held


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/keep").write_text("")
    tree = tmp_path / "t"
    (tree / "d").mkdir(parents=True)
    (tree / "d/out").symlink_to(tmp_path / "out")
    (tree / "loop").symlink_to("loop")
    os.mkfifo(tree / "fifo")
    (tmp_path / "link").symlink_to("out")
    for path in (tree, tmp_path / "link"):
        remove_tree(path)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out/keep").exists()


def test_what_is_not_there_is_fine_and_a_file_is_removed(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    remove_tree(tmp_path / "none/none")
    (tmp_path / "f").write_text("")
    remove_tree(tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_directories_closed_by_their_owner_are_removed(tmp_path: Path) -> None:
    for mode in (0o000, 0o555):
        (tmp_path / "t/d/e").mkdir(parents=True)
        (tmp_path / "t/d/f").write_text("")
        (tmp_path / "t/d").chmod(mode)
        remove_tree(tmp_path / "t")
        assert os.listdir(tmp_path) == []


def test_what_cannot_be_removed_is_told_or_left_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x", "keep/x", "z/x"):
        (tmp_path / "t" / name).mkdir(parents=True)
        (tmp_path / "t" / name / "f").write_text("")
    unlink = os.unlink

    def refusing(name: str, *, dir_fd: int) -> None:
        if "keep" in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise PermissionError(1, "Operation not permitted", name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("sandfleet.trees.os.unlink", refusing)
    with pytest.raises(PermissionError):
        remove_tree(tmp_path / "t")
    remove_tree(tmp_path / "t", ignore_errors=True)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["t/keep/x/f"]


def test_a_directory_that_is_moved_away_meanwhile_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t/a/b").mkdir(parents=True)
    (tmp_path / "elsewhere/b").mkdir(parents=True)
    enter = trees._enter

    def moved(name: str, parent: int) -> int:
        fd = enter(name, parent)
        if name == "b":
            os.rename(tmp_path / "t/a/b", tmp_path / "elsewhere/b")
        return fd

    monkeypatch.setattr(trees, "_enter", moved)
    with pytest.raises(OSError, match="busy"):
        remove_tree(tmp_path / "t")
    assert (tmp_path / "elsewhere/b").is_dir()
