"""Walking down trees that a sandbox made."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet_workers.descent import directories


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """What a test leaves is removed by another program: pytest could not."""
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=False)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def inodes(top: Path) -> list[int]:
    fd = os.open(top, os.O_RDONLY)
    try:
        return [os.fstat(below).st_ino for below in directories(fd)]
    finally:
        os.close(fd)


def test_every_directory_is_seen_once_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "t/a/b").mkdir(parents=True)
    (tmp_path / "t/line\nfeed").mkdir()
    (tmp_path / "t/a/file").write_text("")
    (tmp_path / "t/a/out").symlink_to("/etc")
    (tmp_path / "t/loop").symlink_to(".")
    wanted = [(tmp_path / "t" / name).stat().st_ino for name in ("", "a", "a/b", "line\nfeed")]
    assert sorted(inodes(tmp_path / "t")) == sorted(wanted)


@pytest.mark.usefixtures("few_descriptors")
def test_a_tree_that_is_deep_and_wide_takes_two_descriptors(tmp_path: Path) -> None:
    top = tmp_path / "t"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    for number in range(500):
        (top / str(number)).mkdir()
    held = len(os.listdir("/proc/self/fd"))
    assert len(inodes(top)) == 2001
    assert len(os.listdir("/proc/self/fd")) == held


def test_a_directory_that_is_moved_away_is_an_error_and_nothing_outside_is_seen(tmp_path: Path) -> None:
    (tmp_path / "t/a/b").mkdir(parents=True)
    (tmp_path / "outside/secret").mkdir(parents=True)
    fd, seen = os.open(tmp_path / "t", os.O_RDONLY), []

    def walk() -> None:
        for below in directories(fd):
            seen.append(os.fstat(below).st_ino)
            if len(seen) == 3:
                (tmp_path / "t/a").rename(tmp_path / "outside/a")
                (tmp_path / "outside/a/b").rename(tmp_path / "outside/b")

    try:
        with pytest.raises(OSError, match="moved"):
            walk()
    finally:
        os.close(fd)
    assert (tmp_path / "outside/secret").stat().st_ino not in seen
