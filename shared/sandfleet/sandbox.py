"""A handle on one sandbox: what the seeds call ``Sandbox``, with richer calls beside it."""

from __future__ import annotations

import os
from typing import Any

from sandfleet import calls
from sandfleet.batch_calls import Batch
from sandfleet.client import Call
from sandfleet.download import download
from sandfleet.errors import NotSupported, PathNotFound
from sandfleet.handle import SandboxHandle, next_handle
from sandfleet.model import FileInfo, GrepMatch, Health, SandboxMetrics, TextRead
from sandfleet.standing import start, stop
from sandfleet.steps import drive
from sandfleet.transfer import Progress, Transfer, upload

__all__ = ["Batch", "Sandbox", "next_handle"]


class Sandbox(SandboxHandle):
    """A handle on one sandbox. Making one does no I/O; every method is one operation on the node that holds it.

    Thread-safe. Paths are the sandbox' own (``/mnt/user-data/workspace/…``). All methods raise
    `sandfleet.errors.SandfleetError` subclasses; the ones named by the field's builtins also derive from those
    (``FileNotFoundError``, ``TimeoutError``…).

    Commands sent through one handle run one after the other, in order; another handle on the same sandbox
    (a subagent's) runs beside it. Writes of all handles share one order.

    A provider of one's own (`sandbox.use`) may give a subclass with operations of its own. It has an id alone, as in
    the seeds (``super().__init__(id)``, or ``self._id``), and what it leaves out raises `NotSupported`.
    """

    # --- files -------------------------------------------------------------------------------

    def read_file(self, path: str, start_line: int | None = None, end_line: int | None = None) -> str:
        """The file as text, or its lines ``start_line``…``end_line`` (1-based, inclusive).

        UTF-8, or UTF-16 or UTF-32 where the file begins with a byte order mark, which is left out. What is not text in
        that encoding is replaced by U+FFFD: `read_text` refuses it instead, and tells more.

        Raises:
            PathNotFound, IsDirectory, PermissionDenied, NotRegularFile
            FileTooLarge: Above 100 MiB, or a range above 16 Mi characters; read less, or `run` a tool on it.
        """
        return calls.text_of(self._call(calls.read_file(path, start_line, end_line)), path)

    def read_text(
        self,
        path: str,
        start_line: int | None = None,
        end_line: int | None = None,
        *,
        max_chars: int | None = None,
    ) -> TextRead:
        """A part of a text file: whole lines up to ``max_chars``, and what is known of the rest.

        UTF-8, and UTF-16 or UTF-32 with a byte order mark (which is left out); line ends stay as they are.

        Args:
            start_line, end_line: 1-based, inclusive; the whole file without them. A start beyond the end gives an empty
                text, with ``total_lines``.
            max_chars: Characters at most; 16 Mi without it.

        Raises:
            BinaryFile: It is not text: NUL bytes, or no valid encoding, in its first 8 KiB or in what would be shown.
            InvalidArgument: A line below 1, or ``start_line`` above ``end_line``.
            SearchTimeout: ``start_line`` lies further away than twenty seconds of reading.
            PathNotFound, IsDirectory, PermissionDenied, NotRegularFile
        """
        return calls.text_read(self._call(calls.read_text(path, start_line, end_line, max_chars)))

    def download_file(self, path: str) -> bytes:
        """The file's bytes, up to 100 MiB."""
        return self._call(calls.read(path)).content or b""

    def write_file(self, path: str, content: str, append: bool = False, *, if_digest: str | None = None) -> None:
        """Write text atomically (readers see the old or the new file), or append it. Parents are made.

        Args:
            if_digest: sha256 (hex) the file must have now; ``""`` = it must not exist.

        Raises:
            DigestMismatch: Somebody else wrote it meanwhile.
            ReadOnly, NoSpace, IsDirectory, PermissionDenied
        """
        self._call(calls.write(path, content, append, if_digest))

    def update_file(self, path: str, content: bytes) -> None:
        """Write bytes atomically."""
        self._call(calls.write(path, content))

    def str_replace(
        self, path: str, old_str: str, new_str: str, *, replace_all: bool = False, if_digest: str | None = None
    ) -> int:
        """Replace ``old_str`` by ``new_str`` in a file, atomically; how many times.

        The file keeps its encoding (UTF-16 and UTF-32 by their byte order mark) and its line ends: where every line
        ends with CR LF, a bare line feed in ``old_str`` and ``new_str`` means that.

        Args:
            if_digest: sha256 (hex) the file must have now.

        Raises:
            DigestMismatch: Somebody else wrote it meanwhile.
            BinaryFile: It has NUL bytes near its beginning, or is not what its byte order mark says.
            NoMatch: ``old_str`` does not occur.
            AmbiguousMatch: It occurs several times and ``replace_all`` is not set; ``facts["lines"]`` names the lines.
        """
        return int(self._call(calls.replace_text(path, old_str, new_str, replace_all, if_digest)).value["count"])

    def list_dir(self, path: str, max_depth: int = 2) -> list[str]:
        """Absolute paths below ``path`` to ``max_depth``, sorted; directories end with ``/``."""
        return calls.names(self.list_files(path, max_depth=max_depth))

    def list_files(self, path: str, *, max_depth: int = 1) -> list[FileInfo]:
        """The entries below ``path`` with type, size and times, sorted by path."""
        return calls.entries(self._call(calls.list_call(path, max_depth)), path, max_depth)

    def glob(
        self, path: str, pattern: str, *, include_dirs: bool = False, max_results: int = 200
    ) -> tuple[list[str], bool]:
        """Paths below ``path`` that match, sorted, and whether there are more than ``max_results``."""
        return calls.glob_answer(self._call(calls.glob(path, pattern, include_dirs, max_results)))

    def grep(
        self,
        path: str,
        pattern: str,
        *,
        glob: str | None = None,
        literal: bool = False,
        case_sensitive: bool = False,
        max_results: int = 100,
    ) -> tuple[list[GrepMatch], bool]:
        """Matching lines in a file or below a directory, and whether there are more than ``max_results``.

        Raises:
            InvalidPattern: The regular expression does not parse.
            SearchTimeout: It took longer than 20 seconds.
        """
        call = calls.grep(path, pattern, glob, literal, case_sensitive, max_results)
        return calls.grep_answer(self._call(call))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Type, size, mode and time of what is at the path.

        Args:
            follow: Of a symbolic link tell what it leads to; False tells of the link. ``target`` is told either way.
        """
        return calls.info(self._call(Call("stat", {"path": path, "follow": follow})).value)

    def exists(self, path: str) -> bool:
        """Whether something is at the path; a link that leads nowhere is not."""
        try:
            self.stat(path)
        except PathNotFound:
            return False
        return True

    def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Create a directory."""
        self._call(Call("make_dir", {"path": path, "parents": parents, "exist_ok": exist_ok}))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, or a tree with ``recursive``."""
        self._call(Call("remove", {"path": path, "recursive": recursive, "missing_ok": missing_ok}))

    def move(self, path: str, new_path: str, *, overwrite: bool = False) -> None:
        """Rename within the sandbox."""
        self._call(Call("move", {"path": path, "new_path": new_path, "overwrite": overwrite}))

    def make_link(self, path: str, target: str, *, overwrite: bool = False) -> None:
        """Create a symbolic link to ``target``; ``overwrite`` replaces one that is there, and nothing else."""
        self._call(Call("make_link", {"path": path, "target": target, "overwrite": overwrite}))

    # --- between this machine and the sandbox ------------------------------------------------

    def upload(self, local_path: str | os.PathLike[str], path: str, *, on_progress: Progress | None = None) -> Transfer:
        """Copy a file or a whole directory of this machine to ``path`` in the sandbox; what was moved.

        Of any size: large files go in pieces and get their name when they are complete. Parents are made. A directory
        is merged into one that is there. Permission bits are kept (directories get the owner's full rights on top),
        links stay links, sockets and devices are left away and told in ``skipped``.

        Args:
            path: The new name itself, not the directory to put it in.
            on_progress: Called with the bytes moved so far and all there are; None while that is not known.

        Raises:
            OSError: The local side: missing, not readable.
            NoSpace, ReadOnly, PermissionDenied, IsDirectory, NotDirectory, ByteBudgetExceeded
        """
        return drive(upload(self._steps, local_path, path, on_progress=on_progress))

    def download(
        self, path: str, local_path: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Transfer:
        """Copy a file or a whole directory of the sandbox to ``local_path`` on this machine; what was moved.

        As `upload`, the other way. Nothing is written outside ``local_path``, whatever the sandbox says. What of a tree
        leads out of it, may not be read, or was gone when its turn came is left away and told in ``skipped``. How much
        comes is up to the sandbox: a file of a terabyte is a terabyte here (``on_progress`` may raise to end it).

        Raises:
            DigestMismatch: A large file kept changing.
            OSError: The local side: no space, not writable, a directory of that name.
            PathNotFound, PermissionDenied, ByteBudgetExceeded
        """
        return drive(download(self._steps, path, local_path, on_progress=on_progress))

    # --- several, and the sandbox itself -----------------------------------------------------

    def batch(self, batch: Batch, *, stop_on_error: bool = True, timeout_s: float | None = None) -> list[Any]:
        """Run the collected calls in order as one operation: one round trip, nothing of the same lanes between them.

        One element per call that ran: `CommandResult`, bytes of a read, a plain value, or an *unraised* error.
        """
        if not isinstance(batch, Batch):
            raise NotSupported("batch() takes a sandfleet.Batch: Batch().write_file(…).run(…)")
        return calls.batch_results(
            self._call(calls.batch(batch.calls, stop_on_error=stop_on_error, timeout_s=timeout_s))
        )

    def health(self) -> Health:
        """Whether the sandbox answers right now."""
        return calls.health(self._call(Call("health", {}, timeout_s=10.0)), self._target)

    def metrics(self) -> SandboxMetrics:
        """What the sandbox uses right now: processor, memory, processes, the thread's files. Unknown is None."""
        return calls.metrics(self._call(Call("metrics", {}, timeout_s=20.0)))

    def stop(self) -> None:
        """End the sandbox and what runs in it. The thread's files stay; `start` gives it a new sandbox.

        It ends for everyone who uses it, and their acquires with it: whoever goes on acquires, or starts, again. One
        that is stopped or gone already is fine.
        """
        drive(stop(self._provider, self._target))

    def start(self) -> None:
        """Give the handle's thread its sandbox again after `stop`, or after it was lost; nothing while it lives.

        Raises:
            SandboxNotFound: The handle came from a bare id, and nobody knows any more whose it was.
            NoCapacity, HomeUnavailable, StartFailed
        """
        drive(start(self._provider, self._target))

    def noop(self) -> None:
        """Go the whole way to the node and back without touching the sandbox; for measurements."""
        self._call(Call("noop", {}))
