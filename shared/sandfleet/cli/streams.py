"""What ``exec`` takes in and gives out: standard input, environment files, sizes, and output as the bytes it was."""

from __future__ import annotations

import io
import os
import re
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import click

from sandfleet.cli.output import note, printable
from sandfleet.errors import PayloadTooLarge

__all__ = ["MAX_STDIN_BYTES", "environment", "pass_on", "piped_in", "read_stdin", "size", "write_bytes"]

#: One operation carries no more.
MAX_STDIN_BYTES = 100 * 1024 * 1024
_CHUNK = 1024 * 1024
_PATIENCE_S = 3.0
_PIPE_CLOSED = 141
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


def pass_on(stdout: str, stderr: str) -> None:
    """Write both streams as the bytes the command wrote (text from ``errors="surrogateescape"``).

    Whoever reads them may have enough (``head`` does): the process ends with 141 then, as one that SIGPIPE ends.
    """
    try:
        for stream, text in ((sys.stdout, stdout), (sys.stderr, stderr)):
            write_bytes(stream, text.encode("utf-8", "surrogateescape"))
    except BrokenPipeError:
        raise click.exceptions.Exit(_PIPE_CLOSED) from None


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
