"""How the command line speaks: tables, ages, exit codes, advice, and what a hostile text may not do."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from pathlib import Path

import pytest

from sandfleet.cli import _tell, main
from sandfleet.cli.context import advice, exit_code
from sandfleet.cli.output import age, plain_lines, printable, show_size, table
from sandfleet.cli.running import Announcement, find_running
from sandfleet.cli.use import command_of, exit_code_of
from sandfleet.errors import (
    ConfigError,
    InvalidArgument,
    NoCapacity,
    PathNotFound,
    SandboxLost,
    SandfleetError,
    StoreUnavailable,
)
from sandfleet.model import CommandResult


def test_columns_are_aligned_and_lines_end_with_their_text() -> None:
    lines = plain_lines(("node", "state"), [("node-1", "ready"), ("n", "x")])
    assert lines == ["NODE    STATE", "node-1  ready", "n       x"]


def test_a_table_without_rows_says_what_would_bring_one() -> None:
    out = io.StringIO()
    table(("node",), [], empty="No nodes. Start one: sandfleet worker", out=out)
    assert out.getvalue() == "No nodes. Start one: sandfleet worker\n"


def test_text_of_others_cannot_move_the_cursor_or_add_a_line() -> None:
    out = io.StringIO()
    table(("what",), [("bash: \x1b[2J\rrm\nnode-9  ready",)], empty="", out=out)
    assert len(out.getvalue().splitlines()) == 2
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert printable("[red]") == "[red]"


def test_a_missing_value_is_a_dash() -> None:
    assert printable(None) == printable("") == "-"
    assert printable(0) == "0"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (12.9, "12 s"), (200, "3 m 20 s"), (7500, "2 h 5 m"), (349_200, "4 d 1 h")],
)
def test_age_is_short(seconds: float, told: str) -> None:
    assert age(seconds) == told


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (80 << 20, "80 MiB"),
        (2 << 30, "2.0 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_is_short(size: int, told: str) -> None:
    assert show_size(size) == told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (InvalidArgument("x"), 2),
        (StoreUnavailable("x"), 3),
        (NoCapacity("x"), 3),
        (SandboxLost("x"), 4),
        (PathNotFound("x"), 4),
    ],
)
def test_exit_code_tells_whose_turn_it_is(error: SandfleetError, code: int) -> None:
    assert exit_code(error) == code


def test_redis_that_is_down_is_told_with_what_to_type() -> None:
    assert "sandfleet up" in (advice(StoreUnavailable("x", reason="refused")) or "")
    assert "PASSWORD" in (advice(StoreUnavailable("x", reason="auth")) or "")


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (("ls",), ["ls"]),
        (("ls -la | wc",), "ls -la | wc"),
        (("echo", "a b", "$HOME"), ["echo", "a b", "$HOME"]),
        (("FOO=1",), "FOO=1"),
    ],
)
def test_one_argument_for_a_shell_is_a_line_and_several_are_an_argv(
    words: tuple[str, ...], run: str | list[str]
) -> None:
    assert command_of(words) == run


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (CommandResult("", "", 7, 0.1), 7),
        (CommandResult("", "", None, 0.1, timed_out=True, signal="SIGKILL"), 124),
        (CommandResult("", "", None, 0.1, signal="SIGTERM"), 143),
        (CommandResult("", "", None, 0.1, signal="strange"), 1),
    ],
)
def test_exec_exits_as_a_shell_would(result: CommandResult, code: int) -> None:
    assert exit_code_of(result) == code


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["exec", "--help"], ["up", "-h"], ["drain", "--help"]])
def test_asking_for_help_is_not_a_failure(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "sandfleet" in capsys.readouterr().out


class _Full(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_output_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", _Full())
    assert main(["--version"]) == 1
    assert "standard output cannot be written: No space left on device" in capsys.readouterr().err


def test_a_closed_standard_output_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["--version"]) == 0
    assert main(["no-such-command"]) == 2
    sys.stdout.close()


def test_a_failure_about_a_path_names_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("No such file or directory", "No such file or directory: /a"):
        _tell(PathNotFound(message, path="/a"), as_json=False)
        assert capsys.readouterr().err == "sandfleet: No such file or directory: /a\n"


def test_a_wrong_call_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "--", "true"]) == 2
    assert "--thread" in capsys.readouterr().err
    assert main(["nodes", "--json", "--nope"]) == 2
    assert '"invalid_argument"' in capsys.readouterr().out


# --- finding the running fleet -----------------------------------------------------------------


def test_a_running_fleet_is_found_and_an_ended_one_is_not(tmp_path: Path) -> None:
    announcement = Announcement(tmp_path)
    announcement.tell({"pid": 1, "redis_url": "redis://127.0.0.1:1/0"})
    assert find_running(tmp_path) == {"pid": 1, "redis_url": "redis://127.0.0.1:1/0"}
    announcement.close()
    assert find_running(tmp_path) is None


def test_the_file_of_a_killed_fleet_is_not_believed(tmp_path: Path) -> None:
    tmp_path.joinpath("up.json").write_text('{"redis_url": "redis://127.0.0.1:1/0"}')
    assert find_running(tmp_path) is None


def test_a_directory_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    # Held as a running fleet would hold it, by whoever planted it.
    fd = os.open(tmp_path / "up.json", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b'{"redis_url": "redis://evil:6379/0"}')
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert find_running(tmp_path) is not None
        tmp_path.chmod(0o777)
        assert find_running(tmp_path) is None
        with pytest.raises(ConfigError, match="SANDFLEET_RUN_ROOT"):
            Announcement(tmp_path)
    finally:
        os.close(fd)


def test_a_second_fleet_of_the_same_user_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    announcement = Announcement(tmp_path)
    announcement.tell({"pid": 4711})
    with pytest.raises(ConfigError, match=r"4711.*SANDFLEET_RUN_ROOT.*--data-root"):
        Announcement(tmp_path)
    announcement.close()
