"""The argument models of the operations: what each kind takes, checked on both ends. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "MAX_OUTPUT_BYTES",
    "MAX_TIMEOUT_S",
    "Args",
    "Batch",
    "Cancel",
    "CloseSession",
    "ExecuteCommand",
    "Glob",
    "Grep",
    "KillJob",
    "ListDir",
    "MakeDir",
    "MakeLink",
    "Move",
    "Nothing",
    "PollJob",
    "ReadFile",
    "Remove",
    "ResizeJob",
    "Stat",
    "StrReplace",
    "TakeCheckpoint",
    "WriteFile",
    "WriteStdin",
]

MAX_TIMEOUT_S = 24 * 3600.0
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
#: An op id (`sandfleet.ids.check_op_id`), which is what a job's id is.
OP_ID = r"^[A-Za-z0-9_.:-]{1,80}$"
JobId = Annotated[str, Field(pattern=OP_ID)]


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


class Terminal(Args):
    """The size of a terminal, in characters."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class ExecuteCommand(Args):
    """Run a shell command line or an argv. ``timeout_s`` is enforced inside the sandbox.

    ``background`` makes it a job: the answer comes as soon as it runs. ``stdin_open`` keeps its stdin open for
    `WriteStdin`; ``pty`` runs it on a terminal (stdin open, one output stream); ``stream`` names the stream its output
    goes to while it runs (of a job always: the one of its own id).
    """

    command: str | None = None
    argv: list[str] | None = None
    cwd: Path | None = None
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    max_output_bytes: int = Field(default=1024 * 1024, ge=0, le=MAX_OUTPUT_BYTES)
    as_bytes: bool = False  # the streams come back as base64, not decoded with replacement
    background: bool = False
    stdin_open: bool = False
    pty: Terminal | None = None
    stream: Annotated[str, Field(pattern=OP_ID)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> ExecuteCommand:
        if (self.command is None) == (self.argv is None):
            raise ValueError("give either command or argv")
        if self.argv is not None and not self.argv:
            raise ValueError("argv must not be empty")
        for text in (self.command or "", *(self.argv or ())):
            if "\0" in text:
                raise ValueError("a command must not contain NUL")
        if self.session is not None and (self.background or self.stdin_open or self.pty is not None):
            raise ValueError("a session's command cannot be a job, nor have a stdin or a terminal of its own")
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


class TakeCheckpoint(Args):
    """Save the thread's data as it is; ``name`` is what the caller calls that checkpoint."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")] | None = None


class CloseSession(Args):
    """End a persistent shell session."""

    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class KillJob(Args):
    """Send a signal to a job and all that it started."""

    job_id: JobId
    signal: Literal["SIGTERM", "SIGINT", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT"] = (
        "SIGTERM"
    )


class WriteStdin(Args):
    """Write the content to a job's stdin; ``eof`` closes it then."""

    job_id: JobId
    eof: bool = False


class ResizeJob(Args):
    """Give a job's terminal another size."""

    job_id: JobId
    rows: int = Field(ge=1, le=1000)
    cols: int = Field(ge=1, le=1000)


class PollJob(Args):
    """How a job stands, as its sandbox remembers it."""

    job_id: JobId
