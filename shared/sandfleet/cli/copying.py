"""``cp``: files and trees between this machine and a thread's sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
from click.shell_completion import CompletionItem

from sandfleet.cli.completing import complete_threads
from sandfleet.cli.context import Cli, fleet_command, pass_cli, signals_as_interrupt
from sandfleet.cli.output import note, printable
from sandfleet.cli.streams import write_bytes
from sandfleet.errors import (
    AlreadyExists,
    FileError,
    InvalidArgument,
    IsDirectory,
    NoSpace,
    NotDirectory,
    PathNotFound,
    PermissionDenied,
    SandfleetError,
    from_wire,
)
from sandfleet.sandbox import Sandbox
from sandfleet.steps import drive
from sandfleet.transfer import Progress, Tally, Transfer, send

__all__ = ["COMMANDS", "Place", "place_of", "target_path"]

WORKSPACE = "/mnt/user-data/workspace"
_TOLD = 20
_BUFFER = 1024 * 1024
_LEFT_AWAY = 1
_ERRORS: dict[int, type[FileError]] = {
    errno.ENOENT: PathNotFound,
    errno.EISDIR: IsDirectory,
    errno.ENOTDIR: NotDirectory,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EEXIST: AlreadyExists,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
}


@dataclass(frozen=True, slots=True)
class Place:
    """One end of a copy: ``thread`` None is this machine, and its ``path`` ``-`` a standard stream."""

    text: str
    path: str
    thread: str | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it is standard input or output."""
        return self.thread is None and self.path == "-"


def _complete_place(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if "/" in incomplete or ":" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="file")]
    threads = complete_threads(ctx, param, incomplete)
    return [CompletionItem(f"{item.value}:", help=item.help) for item in threads] or [
        CompletionItem(incomplete, type="file")
    ]


@fleet_command("cp", short_help="Copy files and trees into a sandbox, or out of it.")
@click.argument("source", metavar="SRC", shell_complete=_complete_place)
@click.argument("target", metavar="DST", shell_complete=_complete_place)
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@click.option("-r", "--recursive", is_flag=True, expose_value=False, help="As with cp; trees are copied anyway.")
@pass_cli
def copy(cli: Cli, source: str, target: str, user: str | None, quiet: bool) -> int:
    """Copy a file or a whole directory into a thread's sandbox, or out of it.

    One of SRC and DST is THREAD:PATH; a relative path there begins in /mnt/user-data/workspace. A local name with a
    colon is written ./a:b. A - is standard input or output, for one file.

    As with cp, what is copied goes into DST if that is a directory, and gets the name DST otherwise; a DST that ends
    with / must be a directory. A directory is copied with all that is in it (SRC/. copies only what is in it) and is
    merged into one that is there. Files are replaced whole or not at all; permissions are kept, links stay links.

    Nothing is written outside DST, whatever the sandbox says: links that lead out of a tree are left away. If
    anything was, that is told, and the exit code is 1.

    \b
    Examples:
      sandfleet cp data.csv alice:
      sandfleet cp src alice:project/src
      sandfleet cp alice:/mnt/user-data/outputs/ results
      echo hello | sandfleet cp - alice:greeting.txt
      sandfleet cp alice:greeting.txt - | wc -c
    """
    here_to_there, ends = _ends(source, target)
    if cli.json and ends[1].is_stream:
        raise click.UsageError("--json and a copy to standard output would mix")
    began = time.monotonic()
    with signals_as_interrupt(), cli.provider() as provider, _naming_both(*ends):
        sandbox_id = provider.acquire((ends[1] if here_to_there else ends[0]).thread, user_id=user)
        sandbox = provider.get(sandbox_id)
        assert sandbox is not None  # the id was just given
        try:
            with _bar(quiet or cli.json) as on_progress:
                final, done = (_into if here_to_there else _out_of)(sandbox, *ends, on_progress)
        finally:
            provider.release(sandbox_id)
    document = {
        "source": source,
        "target": target,
        "path": final,
        **asdict(done),
        "sandbox_id": sandbox_id,
        "took_s": round(time.monotonic() - began, 3),
    }
    cli.show(document, lambda: None)
    _tell_skipped(done)
    return _LEFT_AWAY if done.skipped else 0


# --- what was typed ----------------------------------------------------------------------------


def place_of(text: str) -> Place:
    """What a SRC or DST means.

    Raises:
        click.BadParameter: It is empty.
    """
    if not text:
        raise click.BadParameter("an empty path is no path; this directory is .")
    thread, colon, path = text.partition(":")
    if not colon or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", thread) is None:
        return Place(text, text)
    joined = posixpath.join(WORKSPACE, path)
    return Place(text, joined if joined != f"{WORKSPACE}/" else WORKSPACE, thread)


def _ends(source: str, target: str) -> tuple[bool, tuple[Place, Place]]:
    ends = place_of(source), place_of(target)
    if ends[0].thread is None and ends[1].thread is None:
        raise click.UsageError("one of SRC and DST must be in a sandbox: THREAD:PATH")
    if ends[0].thread is not None and ends[1].thread is not None:
        raise click.UsageError(
            "a copy has one end on this machine; between sandboxes: sandfleet cp A:FILE - | sandfleet cp - B:FILE"
        )
    return ends[0].thread is None, ends


def target_path(target: str, source: str, *, source_is_dir: bool, found: str | None) -> str:
    """The path that the copy gets, by the rules of cp.

    Args:
        target: As it was typed.
        source: Likewise; its last component is the name, unless it is ``.`` or ``..``.
        found: What is at ``target`` now: ``dir``, another type, or None for nothing.

    Raises:
        NotDirectory: A directory is wanted there and something else is.
        PathNotFound: ``target`` ends with ``/`` and is not there.
    """
    if found == "dir":
        # The text, not the normal form, tells a directory from its contents: src and src/.
        name = "" if source.rstrip("/").endswith("/.") else posixpath.basename(source.rstrip("/"))
        return target if name in ("", ".", "..") else posixpath.join(target, name)
    if found is not None and (source_is_dir or target.endswith("/")):
        raise NotDirectory(f"{target} is no directory", path=target)
    if found is None and target.endswith("/") and not source_is_dir:
        raise PathNotFound(f"there is no directory {target}; make it, or leave the last / away", path=target)
    return target.rstrip("/") or "/"


# --- both ways ---------------------------------------------------------------------------------


def _into(sandbox: Sandbox, source: Place, target: Place, on_progress: Progress | None) -> tuple[str, Transfer]:
    if source.is_stream:
        if _type_there(sandbox, target.path) == "dir" or target.path.endswith("/"):
            raise IsDirectory("standard input has no name; say which file it becomes", path=target.path)
        tally = Tally(on_progress, None)
        stdin: BinaryIO = sys.stdin.buffer
        drive(send(sandbox._steps, stdin, target.path, mode=None, tally=tally))
        tally.files += 1
        return target.path, tally.result()
    local = source.path
    is_dir = Path(local).is_dir()
    if not is_dir and local.endswith("/"):
        raise NotDirectory(f"{local} is no directory", path=local)
    # `..` as a source means the directory's contents: it has no name that would say anything.
    found = _type_there(sandbox, target.path)
    final = target_path(target.path, local, source_is_dir=is_dir, found=found)
    return final, sandbox.upload(local, final, on_progress=on_progress)


def _out_of(sandbox: Sandbox, source: Place, target: Place, on_progress: Progress | None) -> tuple[str, Transfer]:
    is_dir = sandbox.stat(source.path).type == "dir"
    if target.is_stream:
        if is_dir:
            raise IsDirectory("a directory cannot go to standard output", path=source.path)
        # By way of a file, because a file that changes meanwhile is begun anew.
        with tempfile.TemporaryDirectory(prefix="sandfleet-cp-") as directory:
            done = sandbox.download(source.path, Path(directory) / "file", on_progress=on_progress)
            with (Path(directory) / "file").open("rb") as file:
                _to_stdout(file)
        return "-", done
    local = target.path
    found = "dir" if Path(local).is_dir() else "file" if os.path.lexists(local) else None
    final = target_path(local, source.path, source_is_dir=is_dir, found=found)
    return final, sandbox.download(source.path, final, on_progress=on_progress)


def _type_there(sandbox: Sandbox, path: str) -> str | None:
    try:
        return sandbox.stat(path).type
    except PathNotFound:
        return None


def _to_stdout(file: BinaryIO) -> None:
    while chunk := file.read(_BUFFER):
        write_bytes(sys.stdout, chunk)


# --- what a person sees ------------------------------------------------------------------------


@contextlib.contextmanager
def _naming_both(source: Place, target: Place) -> Iterator[None]:
    """Let every failure name both ends."""
    what = f"cannot copy {source.text} to {target.text}"
    try:
        yield
    except (FileError, InvalidArgument) as exc:
        if isinstance(exc, InvalidArgument) and "errno" not in exc.facts:
            raise  # about an id, not about these paths
        raise _retold(exc, f"{what}: {exc.message}") from exc
    except SandfleetError:
        raise  # about the fleet or the sandbox, not about these paths
    except BrokenPipeError:
        raise
    except OSError as exc:
        kind = _ERRORS.get(exc.errno or 0, FileError)
        name = f": {exc.filename}" if exc.filename else ""
        raise kind(f"{what}: {exc.strerror}{name}", path=str(exc.filename or "")) from exc


def _retold(error: SandfleetError, message: str) -> SandfleetError:
    return from_wire({**error.to_wire(), "message": message})


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal and rich is there."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console  # noqa: PLC0415  (an extra)
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
        from rich.progress import Progress as Bar  # noqa: PLC0415
    except ImportError:
        yield None
        return
    columns: Any = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=cast("float", total))


def _tell_skipped(done: Transfer) -> None:
    for line in done.skipped[:_TOLD]:
        note(f"sandfleet: left away: {printable(line)}")
    if len(done.skipped) > _TOLD:
        note(f"sandfleet: and {len(done.skipped) - _TOLD} more (--json lists them)")


COMMANDS = (copy,)
