"""What each tool does, written once for threads and event loops: a generator that gives the answer's text."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from sandfleet.config import Settings
from sandfleet.errors import (
    AmbiguousMatch,
    BinaryFile,
    DigestMismatch,
    FileError,
    FileTooLarge,
    InvalidArgument,
    InvalidPattern,
    NoMatch,
    NotRegularFile,
    NotSupported,
)
from sandfleet.tools import arguments as given
from sandfleet.tools.effects import Effects
from sandfleet.tools.failures import Failures, blocked_text
from sandfleet.tools.holding import ToolCall
from sandfleet.tools.marks import digest_read, forget_read, note_read
from sandfleet.tools.paths import OUTPUTS, listed, output_path
from sandfleet.tools.plain import lacks, replaced, text_read
from sandfleet.tools.runtime import env_of, host_bash_refused
from sandfleet.tools.text import (
    bounded_write_error,
    clamp,
    cut_head,
    cut_middle,
    glob_text,
    grep_text,
    one_line,
    read_text,
    redact,
    secrets_of,
)

__all__ = ["bash", "glob", "grep", "ls", "present_files", "read_file", "str_replace", "write_file", "write_limit"]

log = logging.getLogger("sandfleet.client")

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: How a node begins to tell of a regular expression; a glob it tells of otherwise.
_BAD_EXPRESSION = "not a valid expression: "
_WRITE_LIMIT_ENV = "DEERFLOW_WRITE_FILE_MAX_BYTES"

_HOST_BASH_REFUSED = (
    "Error: Host bash execution is disabled for the host backend because it is not a secure sandbox boundary. Switch "
    "to an isolated backend (sandbox.backend: local or docker) for isolated bash access, or set "
    "sandbox.allow_host_bash: true only in a fully trusted local environment."
)

_NO_DIRECTORY = (FileNotFoundError, "Directory not found: {path}")
_NOT_DIRECTORY = (NotADirectoryError, "Path is not a directory: {path}")
_DENIED = (PermissionError, "Permission denied: {path}{why}")
_NO_FILE = (FileNotFoundError, "File not found: {path}")
_IS_DIRECTORY = (IsADirectoryError, "Path is a directory, not a file: {path}")
_NO_REGULAR_FILE = (NotRegularFile, "Path is a FIFO, a socket or a device, not a regular file: {path}")
_BINARY = (
    "cannot read '{path}' as text — it appears to be a binary file (e.g. .xlsx, .pdf, or an image). read_file only "
    "supports UTF-8 text. Use bash with a suitable library instead (pandas/openpyxl for spreadsheets), or view_image "
    "for images."
)

BASH_FAILURES = Failures("executing command")
LS_FAILURES = Failures("listing directory", (_NO_DIRECTORY, _NOT_DIRECTORY, _DENIED))
GLOB_FAILURES = Failures(
    "searching paths", (_NO_DIRECTORY, _NOT_DIRECTORY, _DENIED, (InvalidPattern, "Invalid glob pattern: {error}"))
)
GREP_FAILURES = Failures("searching file contents", (_NO_DIRECTORY, _NOT_DIRECTORY, _DENIED, _NO_REGULAR_FILE))
READ_FAILURES = Failures(
    "reading file",
    (
        _NO_FILE,
        (PermissionError, "Permission denied reading file: {path}{why}"),
        _IS_DIRECTORY,
        (BinaryFile, _BINARY),
        _NO_REGULAR_FILE,
        (FileTooLarge, "File too large to read: {path}. Use bash with head, tail, sed or grep on it."),
    ),
)
WRITE_FAILURES = Failures(
    "writing file",
    ((PermissionError, "Permission denied writing to file: {path}{why}"), _IS_DIRECTORY, _NO_REGULAR_FILE),
    otherwise="Failed to write file '{path}'",
)
REPLACE_FAILURES = Failures(
    "replacing string",
    (
        _NO_FILE,
        (PermissionError, "Permission denied accessing file: {path}{why}"),
        _IS_DIRECTORY,
        (NoMatch, "String to replace not found in file: {path}"),
        _NO_REGULAR_FILE,
    ),
)
PRESENT_FAILURES = Failures("presenting files", (_NO_FILE, (NotADirectoryError, _NO_FILE[1]), _DENIED))


# --- commands ----------------------------------------------------------------------------------


def bash(call: ToolCall, args: given.BashArguments) -> Effects[str]:
    """Run a command line; its output with the middle cut out and without the values of its environment."""
    if host_bash_refused(call.settings, call.provider):
        return _HOST_BASH_REFUSED
    env = env_of(call.runtime)
    for name in env:
        if _ENV_NAME.fullmatch(name) is None:
            raise InvalidArgument(
                f"extra_env key {name[:80]!r} is not a valid POSIX environment variable name "
                f"(must match ^{_ENV_NAME.pattern}$)",
                argument="sandbox_env",
            )
    options: dict[str, Any] = {"timeout": call.settings.command_timeout_s}
    if env:
        options["env"] = env
    try:
        output = yield from call.on("execute_command", args.command, **options)
    except PermissionError as exc:
        output = f"Error: {exc}"
    except Exception as exc:  # noqa: BLE001  (its text may quote the environment, so it is redacted as output is)
        output = BASH_FAILURES.text(exc)
    return cut_middle(redact(output, secrets_of(env)), call.settings.bash_output_max_chars)


# --- looking around ----------------------------------------------------------------------------


def ls(call: ToolCall, args: given.LsArguments) -> Effects[str]:
    """What lies below a directory, two levels deep, one path per line."""
    note = ""
    try:
        found = yield from call.on("list_dir", args.path, 2)
    except InvalidArgument as exc:
        if exc.facts.get("path") is None:
            raise
        # More than one listing holds. One level is worth more than an error, and says that it is not all.
        found = yield from call.on("list_dir", args.path, 1)
        note = "\n... [truncated: too many entries, showing one level. Use a more specific path to see more] ..."
    unread = getattr(found, "unread", 0)
    if unread:
        note += f"\n... [incomplete: {unread} directories below could not be read] ..."
    text = "\n".join(one_line(path) for path in listed(args.path, found))
    limit = call.settings.ls_output_max_chars
    return cut_head(text, max(limit - len(note), 1) if limit > 0 else 0) + note if text or note else "(empty)"


def glob(call: ToolCall, args: given.GlobArguments) -> Effects[str]:
    """Paths that match a pattern."""
    most = clamp(args.max_results, call.settings.glob_max_results, default=200, hard=1000)
    answer = yield from call.on("glob", args.path, args.pattern, include_dirs=args.include_dirs, max_results=most)
    found, truncated = answer
    return glob_text(args.path, found, truncated, getattr(answer, "skipped", {}))


def grep(call: ToolCall, args: given.GrepArguments) -> Effects[str]:
    """Lines that match a regular expression or a text."""
    most = clamp(args.max_results, call.settings.grep_max_results, default=100, hard=500)
    try:
        answer = yield from call.on(
            "grep",
            args.path,
            args.pattern,
            glob=args.glob,
            literal=args.literal,
            case_sensitive=args.case_sensitive,
            max_results=most,
        )
    except InvalidPattern as exc:
        reason = exc.message.removeprefix(_BAD_EXPRESSION)
        return f"Error: Invalid {'regex' if reason != exc.message else 'glob'} pattern: {reason}"
    found, truncated = answer
    return grep_text(args.path, found, truncated, getattr(answer, "skipped", {}))


# --- files -------------------------------------------------------------------------------------


def read_file(call: ToolCall, args: given.ReadFileArguments) -> Effects[str]:
    """A text file or a range of its lines, cut at a line's end, with the line to go on with."""
    start, end, limit = args.start_line, args.end_line, call.settings.read_file_output_max_chars
    if start is not None and start < 1:
        return "(start_line must be >= 1)"
    if end is not None and end < 1:
        return "(end_line must be >= 1)"
    if start is not None and end is not None and start > end:
        return "(start_line > end_line — no lines in range)"
    most = limit if limit > 0 else None
    try:
        read = yield from call.on("read_text", args.path, start, end, max_chars=most)
    except (AttributeError, NotSupported) as exc:
        if not lacks(exc, "read_text"):
            raise
        read = text_read((yield from call.on("read_file", args.path)), start, end, most)
    if call.settings.read_before_write:
        note_read(call.runtime.state, args.path, read.digest)
    return read_text(read, args.path, start_line=start, end_line=end, max_chars=limit)


def write_file(call: ToolCall, args: given.WriteFileArguments) -> Effects[str]:
    """Write or append a text; with the gate, only over a version that was read."""
    size, limit = len(args.content.encode("utf-8", "surrogatepass")), write_limit(call.settings)
    if not args.append and 0 < limit < size:
        return (
            f"Error: write_file content ({size} bytes) exceeds the {limit}-byte single-call limit. Split the content "
            "into smaller pieces: write the first piece with write_file, then add each further piece with append=true."
        )
    try:
        yield from call.lock(args.path)
        if not call.settings.read_before_write:
            yield from call.on("write_file", args.path, args.content, args.append)
        elif not (yield from _write_what_was_read(call, args)):
            return blocked_text("write_file", args.path)
    except Exception as exc:  # noqa: BLE001  (a failed write may quote all of its content)
        return bounded_write_error(WRITE_FAILURES.text(exc, args.path))
    return "OK"


def _write_what_was_read(call: ToolCall, args: given.WriteFileArguments) -> Effects[bool]:
    """Write if the file has the version that was read, or is not there: one step on the node, with no gap."""
    state = call.runtime.state
    # "" asks for a file that does not exist: what was never read may be created, not replaced.
    expected = digest_read(state, args.path) or ""
    try:
        yield from call.on("write_file", args.path, args.content, args.append, if_digest=expected)
    except DigestMismatch:
        forget_read(state, args.path)
        return False
    except FileError:
        raise  # nothing was written, so what was read is still current
    except Exception:
        forget_read(state, args.path)
        raise
    forget_read(state, args.path)
    return True


def str_replace(call: ToolCall, args: given.StrReplaceArguments) -> Effects[str]:
    """Replace a text that occurs once, or everywhere; atomic on the node."""
    if not args.old_str:
        return (
            "Error: old_str is empty, so there is nothing to find. Give the text to replace; use write_file to create "
            "a file or to append to one."
        )
    state = call.runtime.state
    yield from call.lock(args.path)
    # What was never read has no digest that fits, so only a file that is not there gets as far as its own error.
    rule = {"if_digest": digest_read(state, args.path) or ""} if call.settings.read_before_write else {}
    try:
        yield from _replace(call, args, rule)
    except AmbiguousMatch as exc:
        return _several(args.path, exc)
    except DigestMismatch:
        forget_read(state, args.path)
        return blocked_text("str_replace", args.path)
    except (FileError, NoMatch):
        raise  # nothing was written, so what was read is still current
    except Exception:
        forget_read(state, args.path)
        raise
    forget_read(state, args.path)
    return "OK"


def _replace(call: ToolCall, args: given.StrReplaceArguments, rule: Mapping[str, str]) -> Effects[None]:
    try:
        yield from call.on("str_replace", args.path, args.old_str, args.new_str, replace_all=args.replace_all, **rule)
    except (AttributeError, NotSupported) as exc:
        # Without the method there is no comparing in the same step either: the gate stays closed.
        if rule or not lacks(exc, "str_replace"):
            raise
        # Read, change and write back: nobody else does so meanwhile, for the file's lock is held.
        text = yield from call.on("read_file", args.path)
        yield from call.on("write_file", args.path, replaced(text, args.old_str, args.new_str, every=args.replace_all))


def _several(path: str, error: AmbiguousMatch) -> str:
    lines, count = error.facts.get("lines") or [], error.facts.get("count")
    where = ", ".join(str(line) for line in lines)
    if isinstance(count, int) and count > len(lines):
        where += f" and {count - len(lines)} more"
    return (
        f"Error: String to replace occurs {count or 'several'} times in file: {path} (lines {where}). Nothing was "
        "replaced. Give more of the surrounding text so that it occurs once, or set replace_all to true."
    )


def write_limit(settings: Settings, environ: Mapping[str, str] | None = None) -> int:
    """The most bytes one call of write_file takes; 0 or less is no limit.

    The reference's variable counts unless the setting was given; a value that is no number is passed over, loudly.
    """
    text = (os.environ if environ is None else environ).get(_WRITE_LIMIT_ENV)
    if text and "write_file_max_bytes" not in settings.model_fields_set:
        try:
            return int(text)
        except ValueError:
            log.warning("tools.bad_limit", extra={"variable": _WRITE_LIMIT_ENV, "value": text[:80]})
    return settings.write_file_max_bytes


# --- what the user gets ------------------------------------------------------------------------


def present_files(call: ToolCall, args: given.PresentFilesArguments) -> Effects[str]:
    """Note files below outputs/ as artifacts for the user; all of them or none."""
    presented = []
    for path in args.paths:
        full = output_path(path)
        try:
            kind = yield from _kind_of_output(call, full)
        except FileError as exc:
            return PRESENT_FAILURES.text(exc, path)
        if kind == "dir":
            return f"Error: Path is a directory, not a file: {path}"
        if kind != "file":
            return f"Error: Only regular files can be presented, not a {kind}: {path}"
        presented.append(full)
    state = call.runtime.state
    state["artifacts"] = list(dict.fromkeys([*(state.get("artifacts") or ()), *presented]))
    return "Successfully presented files"


def _kind_of_output(call: ToolCall, path: str) -> Effects[str]:
    """What is at the path, or the first thing on the way to it that is no directory: a link may lead anywhere."""
    kind, below = "dir", OUTPUTS
    for name in path.removeprefix(OUTPUTS + "/").split("/"):
        below = f"{below}/{name}"
        kind = (yield from call.on("stat", below, follow=False)).type
        if kind == "symlink":
            break
    return kind
