"""Who runs a sandbox on a thread's data: the word that the next owner finds, and what becomes of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sandfleet.errors import InternalError, NotStarted, StartFailed
from sandfleet_workers.holders import Holder, give_up_thread, hold_thread

FIRST = Holder("n1", "docker", 5, "box-1")
SECOND = Holder("n2", "docker", 6, "box-2")


def hold(path: Path, mine: Holder) -> list[Holder]:
    """Hold the thread; whom that ended."""
    ended: list[Holder] = []
    hold_thread(path, mine, ended.append)
    return ended


def test_the_next_owner_ends_what_the_last_one_named(tmp_path: Path) -> None:
    assert hold(tmp_path / "thread", FIRST) == []
    assert hold(tmp_path / "thread", FIRST) == [], "it is its own"
    assert hold(tmp_path / "thread", SECOND) == [FIRST]
    assert hold(tmp_path / "thread", SECOND) == []


def test_an_owner_that_named_nothing_has_nothing_to_end(tmp_path: Path) -> None:
    hold(tmp_path, Holder("n1", "docker", 5))
    assert hold(tmp_path, SECOND) == []


def test_an_older_owner_is_refused_and_ends_nobody(tmp_path: Path) -> None:
    hold(tmp_path, SECOND)
    with pytest.raises(NotStarted, match="newer owner"):
        hold(tmp_path, FIRST)
    assert hold(tmp_path, Holder("n3", "docker", 7, "box-3")) == [SECOND]


def test_an_owner_that_ended_for_sure_leaves_no_word_but_another_s_stays(tmp_path: Path) -> None:
    hold(tmp_path, FIRST)
    give_up_thread(tmp_path, 4)
    assert hold(tmp_path, SECOND) == [FIRST]
    give_up_thread(tmp_path, 6)
    assert hold(tmp_path, FIRST) == []
    give_up_thread(tmp_path / "nowhere", 1)


@pytest.mark.parametrize("found", [b"", b"{", b"[]", b'{"node": 1}', b'{"x": 1}', b"\xff\n", b"9" * 9000])
def test_a_word_that_makes_no_sense_is_none(tmp_path: Path, found: bytes) -> None:
    (tmp_path / ".holder").write_bytes(found)
    assert hold(tmp_path, FIRST) == []
    assert hold(tmp_path, SECOND) == [FIRST]


def test_a_word_cut_short_while_it_was_written_is_still_the_first_line(tmp_path: Path) -> None:
    hold(tmp_path, FIRST)
    path = tmp_path / ".holder"
    path.write_bytes(path.read_bytes() + b'er one", "epoch": 99}\n')
    assert hold(tmp_path, SECOND) == [FIRST]


def test_who_cannot_end_the_last_owner_does_not_take_its_place(tmp_path: Path) -> None:
    hold(tmp_path, FIRST)

    def refuse(_holder: Holder) -> None:
        raise InternalError("the engine is away", reason="not_gone")

    with pytest.raises(InternalError):
        hold_thread(tmp_path, SECOND, refuse)
    assert hold(tmp_path, SECOND) == [FIRST]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / ".holder").symlink_to(tmp_path / "target")
    with pytest.raises(StartFailed):
        hold(tmp_path, FIRST)
    assert (tmp_path / "target").read_text() == "precious"


def test_two_who_come_at_once_take_turns(tmp_path: Path) -> None:
    hold(tmp_path, FIRST)
    ended: list[Holder] = []
    inside = threading.Event()

    def slow(holder: Holder) -> None:
        inside.set()
        assert not third.is_alive() or not done
        ended.append(holder)

    done: list[bool] = []

    def last() -> None:
        inside.wait(10)
        hold_thread(tmp_path, Holder("n3", "docker", 7, "box-3"), ended.append)
        done.append(True)

    third = threading.Thread(target=last)
    third.start()
    hold_thread(tmp_path, SECOND, slow)
    third.join(10)
    assert ended == [FIRST, SECOND]
    assert os.stat(tmp_path / ".holder").st_mode & 0o077 == 0
