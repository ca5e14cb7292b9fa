"""The node's journal: whole entries after any crash, and no entry that could keep a node from starting."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sandfleet.errors import StartFailed
from sandfleet_workers.journal import Journal

ENTRY = {"thread": "t\n\u2028ü", "epoch": 7, "mounts": ["a", "b"], "token": None}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "n")


def files(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "n/sandboxes"))


def test_what_was_written_is_read_by_the_next_run(journal: Journal, tmp_path: Path) -> None:
    journal.write("0a", ENTRY)
    journal.write("0b", {})
    assert Journal(tmp_path / "n").read() == {"0a": ENTRY, "0b": {}}


def test_an_entry_replaces_the_earlier_one(journal: Journal) -> None:
    journal.write("0a", {"epoch": 1, "long": "x" * 100_000})
    journal.write("0a", {"epoch": 2})
    assert journal.read() == {"0a": {"epoch": 2}}


def test_nobody_else_reads_it(journal: Journal, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        journal.write("0a", ENTRY)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "n/sandboxes").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "n/sandboxes/0a.json").stat().st_mode) == 0o600


def test_a_removed_entry_is_gone_and_a_missing_one_is_fine(journal: Journal, tmp_path: Path) -> None:
    journal.write("0a", ENTRY)
    journal.remove("0a")
    journal.remove("0a")
    assert journal.read() == {}
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b'{"half": ', b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_corrupted_entry_is_set_aside_and_the_others_are_read(
    journal: Journal, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal.write("0a", ENTRY)
    (tmp_path / "n/sandboxes/0b.json").write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert journal.read() == {"0a": ENTRY}
    assert "journal.entry_unreadable" in caplog.text
    (kept,) = (name for name in files(tmp_path) if name.endswith(".bad"))
    assert kept.startswith("0b.")
    assert (tmp_path / "n/sandboxes" / kept).read_bytes() == content
    assert journal.read() == {"0a": ENTRY}


def test_a_directory_in_an_entrys_place_is_set_aside(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "n/sandboxes/0b.json").mkdir()
    assert journal.read() == {}
    journal.write("0b", ENTRY)
    assert journal.read() == {"0b": ENTRY}


def test_what_a_crash_left_unfinished_is_removed_by_reading(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    journal.write("0a", {"epoch": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        patch.setattr(os, "replace", die)
        with pytest.raises(Died):
            journal.write("0a", {"epoch": 2})
    assert len(files(tmp_path)) == 2
    assert journal.read() == {"0a": {"epoch": 1}}
    assert files(tmp_path) == ["0a.json"]


def test_a_disk_that_fails_is_an_error_and_the_earlier_entry_stands(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal.write("0a", {"epoch": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StartFailed) as refused:
            journal.write("0a", {"epoch": 2})
    assert refused.value.facts["reason"] == "journal"
    assert files(tmp_path) == ["0a.json"]
    assert journal.read() == {"0a": {"epoch": 1}}


def test_file_and_directory_are_on_the_disk_before_write_returns(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(fd: int) -> None:
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def seen_replace(src: Any, dst: Any) -> None:
        calls.append(("replace", os.path.basename(dst)))
        replace(src, dst)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    journal.write("0a", ENTRY)
    assert calls == [("fsync", ".0a.new"), ("replace", "0a.json"), ("fsync", "sandboxes")]


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a.b", "x" * 200])
def test_a_name_that_leads_elsewhere_is_a_mistake_of_the_caller(journal: Journal, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        journal.write(name, {})


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("")
    with pytest.raises(StartFailed) as refused:
        Journal(tmp_path / "n")
    assert refused.value.facts["reason"] == "journal"
