"""Lending a person's terminal: raw meanwhile, as before afterwards, whatever happens."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet.cli.terminal import Bell, Screen, lent, size_of


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def rang(bell: Bell) -> bool:
    return bool(select.select([bell.fd], [], [], 0)[0])


def test_a_lent_terminal_gives_every_key_and_is_as_before_after_an_error(terminal: tuple[int, int], bell: Bell) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with contextlib.suppress(ZeroDivisionError), lent(theirs, bell):
        assert not termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
        os.write(ours, b"\x03")
        assert os.read(theirs, 10) == b"\x03"
        raise ZeroDivisionError
    assert termios.tcgetattr(theirs) == before


def test_a_window_that_changed_its_size_rings_once_and_only_while_it_is_lent(
    terminal: tuple[int, int], bell: Bell
) -> None:
    handler = signal.getsignal(signal.SIGWINCH)
    with lent(terminal[1], bell):
        signal.raise_signal(signal.SIGWINCH)
        signal.raise_signal(signal.SIGWINCH)
        assert rang(bell)
        bell.heard()
        assert not rang(bell)
    assert signal.getsignal(signal.SIGWINCH) is handler


def test_a_process_that_was_stopped_takes_the_terminal_again(terminal: tuple[int, int], bell: Bell) -> None:
    theirs = terminal[1]
    before = termios.tcgetattr(theirs)
    with lent(theirs, bell):
        termios.tcsetattr(theirs, termios.TCSANOW, before)  # as a shell does for itself
        signal.raise_signal(signal.SIGCONT)
        assert not termios.tcgetattr(theirs)[3] & termios.ICANON
        assert rang(bell), "the window may have got another size meanwhile"
    assert termios.tcgetattr(theirs) == before


def test_a_terminal_that_was_closed_is_given_back_in_silence(bell: Bell) -> None:
    ours, theirs = pty.openpty()
    with lent(theirs, bell):
        os.close(ours)
        os.close(theirs)


def test_a_program_that_is_left_leaves_no_full_screen_behind(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "screen", os.O_RDWR | os.O_CREAT)
    try:
        screen = Screen(fd)
        screen.write(b"\x1b[?1049hvim")
        screen.calm()
        shown = (tmp_path / "screen").read_bytes()
        assert shown.startswith(b"\x1b[?1049hvim\x1b[?1049l")
        assert b"\x1b[?25h" in shown, "the cursor"
        screen.write(b"\x1b[?1049l$ ")
        screen.calm()
        # Sent to an ordinary screen, it would move the cursor.
        assert b"\x1b[?1049l" not in (tmp_path / "screen").read_bytes()[len(shown) :].partition(b"$ ")[2]
    finally:
        os.close(fd)


def test_what_is_no_terminal_has_a_size_all_the_same(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert size_of(file.fileno()) == (24, 80)


def test_a_bell_that_was_put_away_is_silent() -> None:
    bell = Bell()
    bell.close()
    bell.ring()
