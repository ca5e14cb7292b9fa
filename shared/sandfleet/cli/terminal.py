"""A person's terminal, lent to a program elsewhere: raw while it is lent, then as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

__all__ = ["Bell", "Screen", "is_terminal", "lent", "size_of"]

#: Cursor shown, no mouse, no marked pastes, ordinary keys, no colours.
_CALM = b"\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[0m"
_FULL_SCREEN, _LINES = b"\x1b[?1049h", b"\x1b[?1049l"


def is_terminal() -> bool:
    """Whether a person sits at both standard input and standard output."""
    try:
        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def size_of(fd: int) -> tuple[int, int]:
    """Rows and columns; 24 and 80 where the terminal does not say."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return size.lines or 24, size.columns or 80


def write_all(fd: int, data: bytes) -> None:
    """Write bytes past Python's buffers, all of them."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class Screen:
    """Where a program writes, and what it would have to switch off again if it were let end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._full = False

    def write(self, data: bytes) -> None:
        """Show what the program wrote."""
        if _FULL_SCREEN in data or _LINES in data:
            self._full = data.rfind(_FULL_SCREEN) > data.rfind(_LINES)
        write_all(self._fd, data)

    def calm(self) -> None:
        """Switch off what the program, which goes on without this terminal, had switched on."""
        with contextlib.suppress(OSError):  # the terminal was closed
            write_all(self._fd, (_LINES if self._full else b"") + _CALM)


class Bell:
    """Wakes a `select` from another thread or a signal's handler."""

    def __init__(self) -> None:
        self.fd, self._ring_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Wake it; rings that nobody has heard yet are one."""
        with contextlib.suppress(BlockingIOError):
            if self._ring_fd >= 0:
                os.write(self._ring_fd, b"!")

    def heard(self) -> None:
        """It woke up."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Give the pipe back; `ring` does nothing from now on."""
        ring_fd, self._ring_fd = self._ring_fd, -1
        os.close(ring_fd)
        os.close(self.fd)


@contextlib.contextmanager
def lent(keys_fd: int, on_resize: Bell) -> Iterator[None]:
    """Every key is a byte, Ctrl-C too, until the end: then the terminal is what it was, however it ends.

    Args:
        on_resize: Rung when the window got another size.
    """
    before = termios.tcgetattr(keys_fd)

    def resized(number: int, frame: FrameType | None) -> None:
        on_resize.ring()

    def awake(number: int, frame: FrameType | None) -> None:
        # Whoever stopped this process gave the terminal to a shell meanwhile, which set it otherwise.
        tty.setraw(keys_fd, termios.TCSADRAIN)
        on_resize.ring()

    handlers = {signal.SIGWINCH: resized, signal.SIGCONT: awake}
    replaced = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setraw(keys_fd, termios.TCSADRAIN)
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        # A terminal that was closed needs nothing.
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(keys_fd, termios.TCSADRAIN, before)
