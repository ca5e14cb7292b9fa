"""What ``exec`` takes in and gives out: standard input, environment files, sizes, and output as the bytes it was."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import click

from sandfleet.cli.output import note, printable, show_size
from sandfleet.errors import PayloadTooLarge
from sandfleet.job_values import OutputGap
from sandfleet.model import CommandResult

__all__ = [
    "MAX_STDIN_BYTES",
    "LiveOutput",
    "environment",
    "pipe_may_close",
    "piped_in",
    "read_stdin",
    "size",
    "write_bytes",
]

#: One operation carries no more.
MAX_STDIN_BYTES = 100 * 1024 * 1024
_CHUNK = 1024 * 1024
_PATIENCE_S = 3.0
_PIPE_CLOSED = 141
_LEFT_OUT = re.compile(rb"\n\.\.\. \[([0-9]{1,15}) bytes discarded\] \.\.\.\n")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def size(most: int) -> Callable[[click.Context | None, click.Parameter | None, str], int]:
    """A callback for an option that takes a size in bytes as people write it: ``65536``, ``64k``, ``8M``.

    Args:
        most: The largest that is taken.
    """

    def read(ctx: click.Context | None, param: click.Parameter | None, value: str) -> int:
        found = re.fullmatch(r"([0-9]{1,12})([kmg]?)(i?b)?", value.strip().lower())
        if found is None:
            raise click.BadParameter(f"{value!r} is not a size; write 65536, 64k or 8M", ctx, param)
        wanted = int(found[1]) * _UNITS[found[2]]
        if wanted > most:
            raise click.BadParameter(f"{value} is more than {most // 1024**2}M", ctx, param)
        return wanted

    return read


# --- in ----------------------------------------------------------------------------------------


def piped_in() -> bool:
    """Whether a pipe, a socket or a file is standard input; a terminal and ``/dev/null`` are not."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def read_stdin() -> bytes:
    """All of standard input.

    Says so on a terminal when nothing comes for a while: whoever inherits a pipe that nobody closes would wait for ever
    without knowing what for.

    Raises:
        PayloadTooLarge: More than 100 MiB.
    """
    source = cast("io.BufferedReader", sys.stdin.buffer)
    if sys.stderr.isatty() and not sys.stdin.isatty() and not _something_comes(source):
        note("sandfleet: waiting for standard input to end (--no-stdin leaves it alone)")
    parts, size = [], 0
    # One read at a time: on a terminal, `read` would take the Ctrl-D for itself and the loop want another.
    while chunk := source.read1(_CHUNK):
        size += len(chunk)
        if size > MAX_STDIN_BYTES:
            raise PayloadTooLarge(
                "standard input is longer than 100 MiB, the most one command takes; "
                "copy it with `sandfleet cp - THREAD:FILE` and let the command read the file",
                limit_bytes=MAX_STDIN_BYTES,
            )
        parts.append(chunk)
    return b"".join(parts)


def _something_comes(source: BinaryIO) -> bool:
    try:
        return bool(select.select([source], [], [], _PATIENCE_S)[0])
    except (OSError, ValueError):
        return True  # a file, which `select` may refuse, is always ready


def environment(pairs: tuple[str, ...], files: tuple[Path, ...]) -> dict[str, str]:
    """The variables of ``--env-file`` and, over them, of ``--env``.

    ``NAME`` without a value takes that of this process, so that a secret need not be typed where `ps` shows it; a name
    that is not set here is left out, as docker does.

    Raises:
        click.BadParameter: Not ``NAME=VALUE``; says where, and never shows a value.
    """
    found: dict[str, str] = {}
    for file in files:
        for number, line in enumerate(_lines(file), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                _take(found, line.lstrip(), f"line {number} of {file}", "--env-file")
    for pair in pairs:
        _take(found, pair, "it", "--env")
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file} is not UTF-8 text", param_hint="--env-file") from None
    except OSError as exc:
        raise click.BadParameter(f"{file} cannot be read: {exc.strerror}", param_hint="--env-file") from None


def _take(found: dict[str, str], pair: str, where: str, option: str) -> None:
    name, given, value = pair.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        shown = f"{printable(name)!r}" if not given else "what stands before ="
        raise click.BadParameter(f"{where} is not NAME=VALUE: {shown} is no name of a variable", param_hint=option)
    if given:
        found[name] = value
    elif name in os.environ:
        found[name] = os.environ[name]


# --- out ---------------------------------------------------------------------------------------


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """Whoever reads the output may have enough (``head`` does): end with 141 then, as a process that SIGPIPE ends."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(_PIPE_CLOSED) from None


def behind(kept: bytes, at: int, limit: int | None) -> tuple[bytes, int]:
    """What is in a result's stream behind a position in what the command wrote, and how many bytes of that are missing.

    Args:
        limit: Of longer output a result has the first and the last half of so many bytes, and says between them how
            much it left out. None: nothing was left out.
    """
    found = None if limit is None else _LEFT_OUT.match(kept, limit - limit // 2)
    if found is None:
        return kept[at:], 0
    head, left_out, tail = kept[: found.start()], int(found[1]), kept[found.end() :]
    if at >= len(head) + left_out:
        return tail[at - len(head) - left_out :], 0
    missing = left_out - max(0, at - len(head))
    return head[at:] + b"\n... [%d bytes discarded] ...\n" % missing + tail, missing


class LiveOutput:
    """Passes on what a command writes while it runs; its methods are the callbacks of `Sandbox.run`.

    Where it wrote faster than that is kept for readers, a person at a terminal is told, and sees what comes now. A
    program that reads gets every byte: the rest of that stream is held back, and comes with the result.
    """

    def __init__(self) -> None:
        self._at = {"stdout": 0, "stderr": 0}
        self._held: set[str] = set()
        #: Why nothing more can be written: whoever reads has enough, or the disk is full.
        self.failure: OSError | None = None
        #: Whether every byte was passed on.
        self.complete = True

    def out(self, data: bytes) -> None:
        """Some standard output."""
        self._pass_on("stdout", data)

    def err(self, data: bytes) -> None:
        """Some standard error."""
        self._pass_on("stderr", data)

    def gap(self, gap: OutputGap) -> None:
        """Some output that cannot be had before the result is there."""
        stream = self._file(gap.stream)
        if not stream.isatty():
            self._held.add(gap.stream)
        elif gap.stream not in self._held:
            self._at[gap.stream] = gap.end
            self.complete = False
            note(f"sandfleet: {show_size(gap.missing)} of {gap.stream} came too fast to be shown")

    def finish(self, result: CommandResult, max_output_bytes: int) -> None:
        """Write what is in the result (text from ``errors="surrogateescape"``) and was not written yet.

        Raises:
            OSError: It cannot be written, or could not be while the command ran.
        """
        self._held.clear()
        for name in self._at:
            kept = str(result[name]).encode("utf-8", "surrogateescape")
            rest, missing = behind(kept, self._at[name], max_output_bytes if result.truncated else None)
            self.complete = self.complete and not missing
            self._pass_on(name, rest)
        if self.failure is not None:
            raise self.failure

    def _pass_on(self, name: str, data: bytes) -> None:
        if self.failure is not None or name in self._held or not data:
            return
        self._at[name] += len(data)
        try:
            write_bytes(self._file(name), data)
        except OSError as exc:
            self.failure = exc
            if threading.current_thread() is not threading.main_thread():
                # The command is ended, as SIGPIPE would end it here.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @staticmethod
    def _file(name: str) -> TextIO:
        return sys.stdout if name == "stdout" else sys.stderr


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Write bytes to a text stream's file, all of them."""
    stream.flush()
    raw = getattr(stream, "buffer", None)
    if raw is None:
        stream.write(data.decode("utf-8", "replace"))
        return
    left = memoryview(data)
    while left:
        # Unbuffered (PYTHONUNBUFFERED), one write to a pipe takes as much as fits.
        left = left[raw.write(left) or 0 :]
    raw.flush()
