"""``sandfleet shell`` on a real terminal, against a real fleet."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import pytest

from sandfleet import CommandResult
from sandfleet.cli import main
from sandfleet.cli.shell import lend
from sandfleet.errors import Busy, SandfleetError, StoreUnavailable
from sandfleet.job_values import OutputChunk, OutputEnd
from sandfleet.stack import Stack
from tests.services import wait_until

pytestmark = pytest.mark.slow

#: The slave becomes the controlling terminal, so that the kernel tells of resizes and Ctrl-C as it does a person.
_PROGRAM = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from sandfleet.cli import main; sys.exit(main())"
)
#: bash switches it on and off around each line.
_MARKED_PASTE = re.compile(rb"\x1b\[\?2004[hl]\r?")
_CTRL_C, _DETACH = b"\x03", b"\x1d"


class Terminal:
    """A terminal with `sandfleet shell` in it: what a person types and sees."""

    def __init__(self, redis_url: str, *words: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.theirs)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "--redis-url", redis_url, "shell", *words],
            stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, start_new_session=True,
        )  # fmt: skip

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def read(self) -> bytes:
        """All that was shown so far."""
        while select.select([self.ours], [], [], 0)[0]:
            self.seen += os.read(self.ours, 65536)
        self.seen = _MARKED_PASTE.sub(b"", self.seen)
        return self.seen

    def shows(self, pattern: bytes) -> re.Match[bytes]:
        """Wait until it shows that; what was there before is forgotten."""
        found = wait_until(
            lambda: re.search(pattern, self.read(), re.DOTALL),
            20,
            story=lambda: self.seen[-2000:].decode("utf-8", "replace"),
        )
        assert found is not None
        self.seen = self.seen[found.end() :]
        return found

    def ends(self) -> int:
        wait_until(lambda: (self.read(), self.process.poll())[1] is not None, 20, story=lambda: str(self.seen[-2000:]))
        self.read()
        return int(self.process.returncode)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for fd in (self.ours, self.theirs):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def open_terminal(fleet: Stack) -> Iterator[object]:
    """Open terminals with `sandfleet shell WORDS`; the shell's prompt has come when it returns."""
    opened: list[Terminal] = []

    def open_one(*words: str) -> Terminal:
        opened.append(Terminal(fleet.settings.redis_url, *words))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


def begin(open_terminal: object, thread: str) -> Terminal:
    terminal: Terminal = open_terminal("--thread", thread)  # type: ignore[operator]
    terminal.type(b"PS1='ready> '\r")
    terminal.shows(rb"\nready> ")
    return terminal


def test_a_shell_is_a_terminal_and_its_exit_code_is_passed_on(open_terminal: object) -> None:
    terminal = begin(open_terminal, "shell-1")
    terminal.type(b"tty; pwd; echo $((6 * 7)) $TERM\r")
    terminal.shows(rb"/dev/pts/\d+.*/mnt/user-data/workspace.*42 \S+")
    assert not terminal.is_as_before(), "keys are not passed on one by one"
    terminal.type(b"exit 7\r")
    assert terminal.ends() == 7
    assert terminal.is_as_before()


def test_a_shell_follows_the_size_of_the_window(open_terminal: object) -> None:
    terminal = begin(open_terminal, "shell-2")
    terminal.type(b"stty size\r")
    terminal.shows(rb"\n24 80\r")
    terminal.resize(33, 101)

    def followed() -> bool:
        terminal.type(b"stty size\r")
        return bool(terminal.shows(rb"\n(\d+ \d+)\r")[1] == b"33 101")

    wait_until(followed, 20)
    terminal.type(b"exit\r")
    assert terminal.ends() == 0


def test_ctrl_c_ends_what_runs_in_the_shell_and_not_the_shell(open_terminal: object) -> None:
    terminal = begin(open_terminal, "shell-3")
    terminal.type(b"echo begun; sleep 300\r")
    terminal.shows(rb"\nbegun\r\n")
    terminal.type(_CTRL_C)
    terminal.shows(rb"ready> ")
    terminal.type(b"echo $?; exit 0\r")
    terminal.shows(rb"\n130\r")
    assert terminal.ends() == 0


def test_a_large_paste_arrives_whole_though_the_window_changes_all_the_time(open_terminal: object) -> None:
    terminal = begin(open_terminal, "shell-paste")
    # Every byte but the one that leaves.
    paste = bytes(byte for byte in range(256) if bytes([byte]) != _DETACH) * 4112
    terminal.type(b"stty raw -echo; printf 'take%%s' it; head -c %d | sha256sum; stty sane\r" % len(paste))
    terminal.shows(rb"takeit")
    at = 0
    while at < len(paste):
        if select.select([], [terminal.ours], [], 10)[1]:
            at += os.write(terminal.ours, paste[at : at + 2000])
        if at % 50_000 < 2000:
            terminal.resize(20 + at // 50_000, 80)
        terminal.read()
    terminal.shows(hashlib.sha256(paste).hexdigest().encode())
    terminal.type(b"stty size\r")
    terminal.shows(rb"4[01] 80")
    terminal.type(b"exit 5\r")
    assert terminal.ends() == 5
    assert terminal.is_as_before()


def test_ctrl_d_and_ctrl_z_are_the_shells_own(open_terminal: object) -> None:
    terminal = begin(open_terminal, "shell-keys")
    terminal.type(b"echo one; cat; echo over\r")
    terminal.shows(rb"\none\r")
    terminal.type(b"x\r\x04")
    terminal.shows(rb"\nover")
    terminal.type(b"echo two; sleep 600\r")
    terminal.shows(rb"\ntwo\r")
    terminal.type(b"\x1a")
    terminal.shows(rb"Stopped")
    terminal.type(b"kill -9 %1; fg; echo three\r")  # bash may not have heard of the death yet: fg waits for it
    terminal.shows(rb"\nthree\r.*ready> ")
    terminal.type(b"\x04")
    terminal.ends()
    assert terminal.is_as_before()


def test_a_shell_that_is_left_goes_on_and_shows_what_was_there_when_one_comes_back(
    open_terminal: object,
) -> None:
    terminal = begin(open_terminal, "shell-4")
    terminal.type(b"secret=kept-$((40 + 2)); echo begun\r")
    terminal.shows(rb"\nbegun\r")
    terminal.type(_DETACH)
    job_id = terminal.shows(rb"shell --job (\S+)")[1].decode()
    assert terminal.ends() == 0
    assert terminal.is_as_before()

    again: Terminal = open_terminal("--job", job_id)  # type: ignore[operator]
    again.shows(rb"begun")
    again.type(b"echo $secret; exit 3\r")
    again.shows(rb"\nkept-42\r")
    assert again.ends() == 3
    assert again.is_as_before()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_shell_whose_client_is_told_to_end_gives_the_terminal_back_and_goes_on(
    open_terminal: object, number: signal.Signals, fleet: Stack
) -> None:
    terminal = begin(open_terminal, f"shell-{int(number)}")
    terminal.process.send_signal(number)
    job_id = terminal.shows(rb"shell --job (\S+)")[1].decode()
    terminal.ends()
    assert terminal.is_as_before()
    assert main(["--redis-url", fleet.settings.redis_url, "kill", "--signal", "KILL", job_id]) == 0


def test_a_shell_whose_sandbox_is_destroyed_says_so_and_gives_the_terminal_back(
    open_terminal: object, fleet: Stack
) -> None:
    terminal = begin(open_terminal, "shell-6")
    [info] = fleet.store.sandboxes(thread_id="shell-6")
    assert main(["--redis-url", fleet.settings.redis_url, "destroy", info.sandbox_id]) == 0
    terminal.shows(rb"sandfleet: [^\r\n]+")
    assert terminal.ends() in (3, 4)
    assert terminal.is_as_before()


def test_without_a_terminal_a_shell_says_what_to_type(fleet: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--redis-url", fleet.settings.redis_url, "shell", "--thread", "shell-5"]) == 2
    assert "sandfleet exec" in capsys.readouterr().err


# --- a job that misbehaves ---------------------------------------------------------------------


class Sluggish:
    """A job that takes keys at its second asking, and ends when it has all of them."""

    id = "5d0c9f0e8c6a4d1b"

    def __init__(self, wanted: bytes, trouble: SandfleetError | None = None) -> None:
        self.got, self.asked, self.sizes = b"", 0, list[tuple[int, int]]()
        self._wanted, self._trouble = wanted, trouble
        self._all = threading.Event()

    def resize(self, rows: int, cols: int) -> None:
        self.sizes.append((rows, cols))

    def send_stdin(self, data: bytes) -> None:
        self.asked += 1
        if self.asked % 2:
            raise Busy("it does not read", retry_after_s=0.01)
        self.got += data
        if len(self.got) >= len(self._wanted):
            self._all.set()

    def output(self) -> Iterator[OutputChunk | OutputEnd]:
        yield OutputChunk("stdout", b"$ ", "2.0")
        assert self._all.wait(20)
        if self._trouble is not None:
            raise self._trouble
        yield OutputEnd("ok", "2.0")

    def wait(self, timeout_s: float) -> CommandResult:
        return CommandResult(stdout="", stderr="", exit_code=6, duration_s=1.0)


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process sits at a terminal; what a person types into it."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r+b", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", file)
        monkeypatch.setattr(sys, "stdout", file)
        yield ours
    os.close(ours)


def test_keys_that_a_program_does_not_take_yet_wait_and_arrive_once_and_in_order(seat: int) -> None:
    typed = b"".join(b"%d " % n for n in range(500))
    job = Sluggish(typed)
    before = termios.tcgetattr(sys.stdin.fileno())
    tty.setraw(sys.stdin.fileno())  # what is typed before the shell listens is taken byte by byte, too
    os.write(seat, typed)
    assert lend(job) == 6  # type: ignore[arg-type]
    assert job.got == typed
    assert job.sizes, "it was never told the size of the window"
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def test_a_terminal_whose_fleet_went_away_is_given_back_with_the_way_to_come_back(
    seat: int, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(seat, b"\n")
    with pytest.raises(StoreUnavailable):
        lend(Sluggish(b"\n", StoreUnavailable("Redis does not answer")))  # type: ignore[arg-type]
    assert f"sandfleet shell --job {Sluggish.id}" in capfd.readouterr().err
