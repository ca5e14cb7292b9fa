"""What ``exec`` takes in and gives out: sizes, environments, and which standard input counts as given."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

import click
import pytest

from sandfleet.cli import main
from sandfleet.cli.streams import LiveOutput, behind, environment, pipe_may_close, piped_in, read_stdin, size
from sandfleet.cli.use import command_of
from sandfleet.errors import PayloadTooLarge
from sandfleet.job_values import OutputGap
from sandfleet.model import CommandResult


@pytest.mark.parametrize(
    ("text", "found"), [("0", 0), ("65536", 65536), ("64k", 65536), ("8M", 8 << 20), ("1MiB", 1 << 20)]
)
def test_sizes_are_read_as_people_write_them(text: str, found: int) -> None:
    assert size(32 << 20)(None, None, text) == found


@pytest.mark.parametrize("text", ["", "-1", "8 M", "x", "33M", "1G", "9" * 30])
def test_a_wrong_size_says_what_is_allowed(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"8M|32M"):
        size(32 << 20)(None, None, text)


def test_variables_of_files_come_first_and_a_bare_name_takes_its_value_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.env"
    file.write_text("# a comment\n\nA=1\n  B=two words \nHERE\nNOWHERE\nEMPTY=\n")
    monkeypatch.setenv("HERE", "from-here")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert environment(("A=9", "C=x=y"), (file,)) == {
        "A": "9", "B": "two words ", "HERE": "from-here", "EMPTY": "", "C": "x=y",
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["=hunter2", "A-B=hunter2", "9A=hunter2"])
def test_a_wrong_variable_is_refused_and_its_value_never_shown(
    pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env").write_text(f"OK=1\n{pair}\n")
    assert main(["exec", "-t", "a", "--env", pair, "--", "true"]) == 2
    assert main(["exec", "-t", "a", "--env-file", str(tmp_path / "env"), "--", "true"]) == 2
    _, err = capsys.readouterr()
    assert "hunter2" not in err
    assert "line 2" in err


def test_an_environment_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"A=\xff\n")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "latin"):
        assert main(["exec", "-t", "a", "--env-file", str(path), "--", "true"]) == 2
        assert path.name in capsys.readouterr().err


def test_a_pipe_and_a_file_are_given_and_dev_null_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b"\xff\n")
    with (tmp_path / "in").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert piped_in()
        assert read_stdin() == b"\xff\n"
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert piped_in()
        assert read_stdin() == b""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert not piped_in()
    monkeypatch.setattr(sys, "stdin", None)
    assert not piped_in()


def test_a_flood_on_standard_input_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandfleet.cli.streams.MAX_STDIN_BYTES", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 11)))
    with pytest.raises(PayloadTooLarge, match="sandfleet cp"):
        read_stdin()


def result(stdout: bytes, stderr: bytes = b"") -> CommandResult:
    out, err = (data.decode("utf-8", "surrogateescape") for data in (stdout, stderr))
    return CommandResult(stdout=out, stderr=err, exit_code=0, duration_s=0.1)


def test_bytes_pass_as_they_are_each_on_its_stream(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    live = LiveOutput()
    live.out(b"\xff\x00")
    live.finish(result(b"\xff\x00out", b"\xc3"), 1024)
    assert capfdbinary.readouterr() == (b"\xff\x00out", b"\xc3")


def test_output_that_came_too_fast_to_be_kept_is_held_back_until_the_result_has_it(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    live = LiveOutput()
    live.out(b"one ")
    live.gap(OutputGap("stdout", 4, 8, "8.0"))
    live.out(b"three ")
    live.err(b"err")
    assert capfdbinary.readouterr() == (b"one ", b"err"), "what is missing would stand before what came first"
    live.finish(result(b"one two three four", b"err"), 1024)
    assert capfdbinary.readouterr() == (b"two three four", b"")


@pytest.mark.parametrize(
    ("at", "rest", "missing"),
    [
        (0, b"ab\n... [5 bytes discarded] ...\nyz", 5),
        (2, b"\n... [5 bytes discarded] ...\nyz", 5),
        (4, b"\n... [3 bytes discarded] ...\nyz", 3),
        (7, b"yz", 0),
        (8, b"z", 0),
        (9, b"", 0),
    ],
)
def test_of_a_result_that_left_something_out_only_what_was_not_seen_is_missing(
    at: int, rest: bytes, missing: int
) -> None:
    kept = b"ab\n... [5 bytes discarded] ...\nyz"
    assert behind(kept, at, 4) == (rest, missing)
    assert behind(kept, at, None) == (kept[at:], 0), "somebody printed such a line"


def test_a_person_at_a_terminal_sees_what_comes_now_and_how_much_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            live = LiveOutput()
            live.out(b"one ")
            live.gap(OutputGap("stdout", 4, 8, "8.0"))
            live.out(b"three ")
            live.finish(result(b"one two three four"), 1024)
        assert not live.complete
        shown = b""
        while not shown.endswith(b"four"):
            shown += os.read(ours, 1000)
        assert shown == b"one three four"
    finally:
        os.close(ours)


def test_a_stream_that_nobody_reads_any_more_takes_nothing_and_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w")) as pipe:  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdout", pipe)
        live = LiveOutput()
        live.out(b"one")
        live.out(b"two")
        assert isinstance(live.failure, BrokenPipeError)
        with pytest.raises(BrokenPipeError):
            live.finish(result(b"one"), 1024)
    with pytest.raises(click.exceptions.Exit) as ended, pipe_may_close():
        raise live.failure
    assert ended.value.exit_code == 141


def test_a_session_gets_a_command_line_with_its_words_kept_apart() -> None:
    assert command_of(("echo", "a b", "$HOME"), as_line=True) == "echo 'a b' '$HOME'"
    assert command_of(("ls",), as_line=True) == "ls"


def test_stdin_cannot_be_wanted_and_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exec", "-t", "a", "-i", "-n", "--", "true"]) == 2
    assert "contradict" in capsys.readouterr().err
