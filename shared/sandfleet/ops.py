"""The operations of a sandbox: their names, their arguments, what they touch and how Flower shows them.

One table, read by the client (to validate before publishing), by the node (to validate what came
over the wire and to choose lanes) and by the docs. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sandfleet.errors import InvalidArgument, UnknownOperation
from sandfleet.redaction import without_secrets

__all__ = ["CONTENT_KINDS", "OPS", "OpKind", "describe", "lanes_of", "parse_args", "task_name"]

MAX_TIMEOUT_S = 24 * 3600.0
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def _sized(low: int, high: int) -> AfterValidator:
    """The length a text may have. pydantic's own rule refuses lone surrogates, and a file's name that is not UTF-8 is
    written with them (``surrogateescape``)."""

    def check(value: str) -> str:
        if not low <= len(value) <= high:
            raise ValueError(f"should have {low} to {high} characters, not {len(value)}")
        return value

    return AfterValidator(check)


Path = Annotated[str, _sized(1, 4096)]
Text = Annotated[str, _sized(1, 64 * 1024 * 1024)]
Pattern = Annotated[str, _sized(1, 10_000)]
GlobPattern = Annotated[str, _sized(1, 1000)]


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a path must not contain NUL")
    return value


class Args(BaseModel):
    """Base of every argument model: unknown keys are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("path", "old_path", "new_path", "cwd", check_fields=False)
    @classmethod
    def _no_nul(cls, value: str | None) -> str | None:
        return None if value is None else _without_nul(value)


class ExecuteCommand(Args):
    """Run a shell command line or an argv. ``timeout_s`` is enforced inside the sandbox."""

    command: str | None = None
    argv: list[str] | None = None
    cwd: Path | None = None
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    max_output_bytes: int = Field(default=1024 * 1024, ge=0, le=MAX_OUTPUT_BYTES)
    as_bytes: bool = False  # the streams come back as base64, not decoded with replacement

    @model_validator(mode="after")
    def _one_of(self) -> ExecuteCommand:
        if (self.command is None) == (self.argv is None):
            raise ValueError("give either command or argv")
        if self.argv is not None and not self.argv:
            raise ValueError("argv must not be empty")
        for text in (self.command or "", *(self.argv or ())):
            if "\0" in text:
                raise ValueError("a command must not contain NUL")
        return self

    @field_validator("env")
    @classmethod
    def _env_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if re.fullmatch(_ENV_NAME, name) is None:
                raise ValueError(f"env key {name[:80]!r} is not a valid POSIX environment variable name")
            if "\0" in value:
                raise ValueError(f"the value of env key {name!r} must not contain NUL")
        return env


class ReadFile(Args):
    """Read a file, ``max_bytes`` of it from ``offset``, or a 1-based inclusive range of lines; the bytes come back as
    content.

    ``as_text`` decodes where the file lies (UTF-8, or UTF-16/32 by byte order mark), refuses what is not text with
    ``binary_file``, keeps whole lines up to ``max_chars`` and tells what is left; the content is UTF-8 then, 16 Mi
    characters at most. ``lenient`` with it replaces what is not text, and looks no further than what is shown.
    """

    path: Path
    start_line: int | None = Field(default=None, ge=1)
    end_line: int | None = Field(default=None, ge=1)
    max_bytes: int | None = Field(default=None, ge=0)
    offset: int = Field(default=0, ge=0, lt=2**53)
    as_text: bool = False
    max_chars: int | None = Field(default=None, ge=1, le=64 * 1024 * 1024)
    lenient: bool = False


class WriteFile(Args):
    """Write the content atomically, or append it.

    ``if_digest``: compare-and-swap on sha256 hex; "" = not there. ``if_size``: append only to a file of exactly that
    size, which makes a repeated append harmless. ``mode``: permission bits, as far as a file may have them here.
    """

    path: Path
    append: bool = False
    if_digest: str | None = Field(default=None, max_length=64)
    if_size: int | None = Field(default=None, ge=0, lt=2**53)
    mode: int | None = Field(default=None, ge=0, le=0o777)
    make_parents: bool = True

    @model_validator(mode="after")
    def _if_size_appends(self) -> WriteFile:
        if self.if_size is not None and not self.append:
            raise ValueError("if_size goes with append")
        return self


class StrReplace(Args):
    """Replace text in a file; several matches without ``replace_all`` are an error naming their lines.

    ``if_digest``: compare-and-swap on sha256 hex of the whole file.
    """

    path: Path
    old: Text
    new: str
    replace_all: bool = False
    if_digest: str | None = Field(default=None, max_length=64)


class ListDir(Args):
    """List a directory to a depth."""

    path: Path
    max_depth: int = Field(default=2, ge=1, le=64)
    max_entries: int = Field(default=10_000, ge=1, le=100_000)


class Glob(Args):
    """Find paths by pattern."""

    path: Path
    pattern: GlobPattern
    include_dirs: bool = False
    max_results: int = Field(default=200, ge=1, le=10_000)
    timeout_s: float = Field(default=20.0, gt=0, le=600)


class Grep(Args):
    """Find lines by regular expression or literal text."""

    path: Path
    pattern: Pattern
    glob: GlobPattern | None = None
    literal: bool = False
    case_sensitive: bool = False
    max_results: int = Field(default=100, ge=1, le=10_000)
    timeout_s: float = Field(default=20.0, gt=0, le=600)


class Stat(Args):
    """A path; of a symbolic link what it leads to, or with ``follow=False`` the link itself."""

    path: Path
    follow: bool = True


class MakeLink(Args):
    """Create a symbolic link; ``overwrite`` replaces one that is there, and nothing else."""

    path: Path
    target: Path
    overwrite: bool = False

    @field_validator("target")
    @classmethod
    def _no_nul_in_target(cls, value: str) -> str:
        return _without_nul(value)


class MakeDir(Args):
    """Create a directory; parents too, and an existing one is fine (and keeps its mode), unless told otherwise."""

    path: Path
    parents: bool = True
    exist_ok: bool = True
    mode: int | None = Field(default=None, ge=0, le=0o777)


class Remove(Args):
    """Remove a file, or with ``recursive`` a tree."""

    path: Path
    recursive: bool = False
    missing_ok: bool = False


class Move(Args):
    """Rename; ``overwrite`` replaces an existing file, with ``follow`` the one a link at ``new_path`` leads to."""

    path: Path
    new_path: Path
    overwrite: bool = False
    follow: bool = False


class Nothing(Args):
    """No arguments."""


class Batch(Args):
    """Several operations in one task, in order. Each item: ``{"kind", "args", "content" or "content_b64"}``."""

    ops: list[dict[str, Any]] = Field(min_length=1, max_length=200)
    stop_on_error: bool = True

    @field_validator("ops")
    @classmethod
    def _contents(cls, ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, item in enumerate(ops):
            for key in ("content", "content_b64"):
                if not isinstance(item.get(key, ""), str):
                    raise ValueError(f"item {number}: {key} must be text")
            if not isinstance(item.get("args", {}), dict):
                raise ValueError(f"item {number}: args must be an object")
        return ops


class Cancel(Args):
    """End another operation of the same sandbox."""

    op_id: str = Field(min_length=1, max_length=80)


class CloseSession(Args):
    """End a persistent shell session."""

    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


@dataclass(frozen=True, slots=True)
class OpKind:
    """One kind of operation.

    Attributes:
        args: The argument model.
        effect: Whether it changes anything. Operations without effect are not claimed and may be repeated.
        lane: shell, files or None (no lane: runs beside everything but barriers).
        describe: What Flower and logs show of the arguments; never contents or environment values.
    """

    args: type[Args]
    effect: bool
    lane: str | None
    describe: Callable[[Mapping[str, Any]], str]


def _cut(text: object, limit: int = 80) -> str:
    # What a sandbox's user wrote must not move the cursor of whoever reads it.
    line = " ".join("".join(ch if ch.isprintable() else " " for ch in str(text)[: 4 * limit]).split())
    line = line if len(line) <= limit else line[: limit - 1] + "…"
    # Terminals and logs show it: an escape sequence in a command must not reach them.
    return "".join(ch if ch.isprintable() else "\ufffd" for ch in line)


def _command(args: Mapping[str, Any]) -> str:
    line = args.get("command")
    words = [str(word)[:1000] for word in list(args.get("argv") or ())[:100]]
    text = str(line) if line is not None else shlex.join(words)
    return "bash: " + _cut(without_secrets(text[:1000]))


def _path(word: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda args: f"{word}: {_cut(args.get('path'))}"


def _search(word: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda args: f"{word}: {_cut(args.get('pattern'), 40)} in {_cut(args.get('path'), 60)}"


OPS: dict[str, OpKind] = {
    "execute_command": OpKind(ExecuteCommand, True, "shell", _command),
    "close_session": OpKind(CloseSession, True, "shell", lambda a: f"close session {_cut(a.get('session'))}"),
    "read_file": OpKind(ReadFile, False, None, _path("read")),
    "write_file": OpKind(WriteFile, True, "files", _path("write")),
    "str_replace": OpKind(StrReplace, True, "files", _path("replace in")),
    "list_dir": OpKind(ListDir, False, None, _path("ls")),
    "glob": OpKind(Glob, False, None, _search("glob")),
    "grep": OpKind(Grep, False, None, _search("grep")),
    "stat": OpKind(Stat, False, None, _path("stat")),
    "make_link": OpKind(MakeLink, True, "files", lambda a: f"ln: {_cut(a.get('path'))}"),
    "make_dir": OpKind(MakeDir, True, "files", _path("mkdir")),
    "remove": OpKind(Remove, True, "files", _path("rm")),
    "move": OpKind(Move, True, "files", _path("mv")),
    "cancel": OpKind(Cancel, False, None, lambda a: f"cancel {_cut(a.get('op_id'), 40)}"),
    "health": OpKind(Nothing, False, None, lambda _: "health"),
    "metrics": OpKind(Nothing, False, None, lambda _: "metrics"),
    "noop": OpKind(Nothing, False, None, lambda _: "noop"),
    "batch": OpKind(Batch, True, None, lambda a: f"batch of {len(a.get('ops') or ())}"),
}

#: Kinds that carry bytes beside their arguments.
CONTENT_KINDS = frozenset({"execute_command", "write_file"})


def task_name(kind: str) -> str:
    """The fixed Celery task name of an operation kind."""
    return f"sandbox.{kind}"


def parse_args(kind: str, args: Mapping[str, Any]) -> Args:
    """The validated arguments.

    Raises:
        UnknownOperation: No such kind.
        InvalidArgument: Names the first wrong argument and what is allowed.
    """
    op = OPS.get(kind)
    if op is None:
        raise UnknownOperation(f"unknown operation {kind[:60]!r}; known: {', '.join(sorted(OPS))}")
    try:
        parsed = op.args.model_validate(args)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "arguments"
        raise InvalidArgument(f"{kind}: {where}: {first['msg']}", operation=kind, argument=where) from None
    if isinstance(parsed, Batch):
        for item in parsed.ops:
            inner = str(item.get("kind", ""))
            if inner == "batch":
                raise InvalidArgument("batch: a batch cannot hold a batch", operation=kind, argument="ops")
            parse_args(inner, item.get("args") or {})
    return parsed


def describe(kind: str, args: Mapping[str, Any], sandbox_id: str) -> str:
    """One line for Flower, logs and ``sandfleet ops``: ``bash: ls -la · 3f9a1c22``."""
    op = OPS.get(kind)
    return f"{op.describe(args) if op else kind} · {sandbox_id[:12]}"


def lanes_of(kind: str, args: Mapping[str, Any], sandbox_id: str, caller: str) -> tuple[str, ...]:
    """The lanes the operation must hold, sorted.

    A one-shot command shares ``<sandbox>/shell/<caller>``, a session has its own lane, every
    mutation of files shares ``<sandbox>/files``; reads have none. A batch takes the lanes of all
    its items at once.
    """
    if kind == "batch":
        lanes = {
            lane
            for item in args.get("ops") or ()
            for lane in lanes_of(str(item.get("kind", "")), item.get("args") or {}, sandbox_id, caller)
        }
        return tuple(sorted(lanes))
    op = OPS.get(kind)
    if op is None or op.lane is None:
        return ()
    if op.lane == "files":
        return (f"{sandbox_id}/files",)
    session = args.get("session")
    return (f"{sandbox_id}/session/{session}",) if session else (f"{sandbox_id}/shell/{caller}",)
