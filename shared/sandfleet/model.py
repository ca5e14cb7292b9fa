"""The values that cross sandfleet's seams. Plain frozen dataclasses, no behaviour that does I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sandfleet.checkpoints import Restoration
from sandfleet.errors import CommandFailed, CommandTimeout, ResourceLimitExceeded
from sandfleet.job_values import JobState, JobStatus, OutputChunk, OutputEnd, OutputGap, OutputRecord, Process

__all__ = [
    "CommandResult",
    "FileInfo",
    "GrepMatch",
    "Health",
    "JobState",
    "JobStatus",
    "NodeState",
    "NodeView",
    "OutputChunk",
    "OutputEnd",
    "OutputGap",
    "OutputRecord",
    "Process",
    "SandboxInfo",
    "SandboxMetrics",
    "SandboxSpec",
    "SandboxState",
    "TextRead",
    "Timings",
]


class SandboxState(StrEnum):
    """Where a sandbox is in its life. ``warm`` is ``live`` with nobody in it."""

    CREATING = "creating"
    LIVE = "live"
    WARM = "warm"
    STOPPING = "stopping"
    LOST = "lost"


class NodeState(StrEnum):
    """What a node accepts: everything, nothing new, nothing at all.

    ``away``: it has stopped, its sandboxes run on, and it is expected back before its lease lapses.
    """

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    AWAY = "away"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Timings:
    """Where an operation's time went, in milliseconds; None where a clock was not read.

    ``queued_ms``: published → taken from the queue (two machines' clocks, corrected by Redis time);
    ``lane_ms``: taken → started; ``run_ms``: started → finished in the sandbox;
    ``total_ms``: as the caller saw it.
    """

    queued_ms: float | None = None
    lane_ms: float | None = None
    run_ms: float | None = None
    total_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CommandResult(Mapping[str, Any]):
    """How a command ended. A non-zero exit is a result, not an error; `check` makes it one.

    Attributes:
        stdout: Standard output, decoded as UTF-8 with replacement, up to the output limit.
        stderr: Standard error, likewise.
        exit_code: The exit code; None when a signal or the deadline ended the command.
        duration_s: Wall-clock seconds in the sandbox.
        timed_out: The deadline ended it; the output up to then is kept.
        truncated: More output was produced than kept.
        signal: Name of the signal that ended it, such as ``SIGKILL``, or None.
        cancelled: Somebody cancelled it while it ran.
        out_of_memory: It was killed because the sandbox's memory was used up (where the sandbox can tell).
        op_id: The operation, for `cancel`, ``sandfleet story`` and logs.
        timings: Where the time went.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    duration_s: float
    timed_out: bool = False
    truncated: bool = False
    signal: str | None = None
    cancelled: bool = False
    out_of_memory: bool = False
    op_id: str = ""
    timings: Timings = field(default_factory=Timings)

    @property
    def ok(self) -> bool:
        """Whether the command exited with 0."""
        return self.exit_code == 0

    def check(self) -> CommandResult:
        """This result if the command exited with 0.

        Raises:
            CommandTimeout: The deadline ended it.
            ResourceLimitExceeded: It took all the memory that the sandbox may have.
            CommandFailed: It exited with another code or by a signal.
        """
        if self.timed_out:
            timeout = CommandTimeout(
                f"the command was ended by its deadline after {self.duration_s:.3g} s",
                op_id=self.op_id,
                stdout=self.stdout[-2000:],
                stderr=self.stderr[-2000:],
            )
            timeout.result = self
            raise timeout
        if self.out_of_memory:
            exceeded = ResourceLimitExceeded(
                "the command was killed because it took all the memory that the sandbox may have; give it less to do, "
                "or the sandbox more (memory_bytes)",
                op_id=self.op_id,
                resource="memory",
                stdout=self.stdout[-2000:],
                stderr=self.stderr[-2000:],
            )
            exceeded.result = self
            raise exceeded
        if self.exit_code != 0:
            how = f"exit code {self.exit_code}" if self.exit_code is not None else f"signal {self.signal}"
            tail = self.stderr.strip()[-500:]
            failed = CommandFailed(
                f"the command ended with {how}" + (f": {tail}" if tail else ""),
                op_id=self.op_id,
                exit_code=self.exit_code,
                stdout=self.stdout[-2000:],
                stderr=self.stderr[-2000:],
            )
            failed.result = self
            raise failed
        return self

    # The seeds write result["exit_code"].
    def __getitem__(self, key: str) -> Any:
        if key in self.__dataclass_fields__:
            return getattr(self, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """One matching line: absolute path in the sandbox, 1-based line number, the line (cut at 200 characters)."""

    path: str
    line_number: int
    line: str


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One directory entry or `stat` answer. ``type`` is file, dir, symlink or other; ``modified_at`` unix seconds."""

    path: str
    name: str
    type: str
    size: int
    mode: int
    modified_at: float
    target: str | None = None


@dataclass(frozen=True, slots=True)
class TextRead:
    """A part of a text file, in whole lines where a line fits.

    Attributes:
        text: The lines read, with their ends, decoded; without a byte order mark.
        start_line: Number of the first line in ``text`` (1-based).
        end_line: Number of the last line in ``text``; ``start_line - 1`` when there is none.
        total_lines: Lines of the whole file; None when it was too big to count within the time.
        total_chars: Characters of what was asked for (the range, or the file); None likewise.
        truncated: ``max_chars`` left something of what was asked for out.
        cut_line: The first line alone is longer than ``max_chars``: ``text`` is its beginning.
        encoding: ``utf-8``, ``utf-8-sig``, ``utf-16-le``, ``utf-16-be``, ``utf-32-le`` or ``utf-32-be``.
        size_bytes: Size of the file.
        digest: sha256 (hex) of the whole file's bytes, as `Sandbox.write_file`'s ``if_digest`` takes it; None when
            it was too big to hash within the time.
    """

    text: str
    start_line: int
    end_line: int
    total_lines: int | None
    total_chars: int | None
    truncated: bool
    cut_line: bool
    encoding: str
    size_bytes: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a sandbox answers: ``status`` is alive, dead or unknown; unknown must not be treated as dead."""

    status: str
    sandbox_id: str
    node_id: str | None = None
    backend: str | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the sandbox answered."""
        return self.status == "alive"


@dataclass(frozen=True, slots=True)
class SandboxMetrics:
    """What a sandbox uses; None for what its backend cannot tell.

    Attributes:
        cpu_s: Processor seconds of all its processes so far, those that ended included.
        cpu_percent: Of one processor, since the last time somebody asked (or since it started).
        memory_bytes: Resident memory of its processes; what they share counts for each.
        pids: Processes, the sandbox' own included.
        disk_bytes: What the thread's files occupy.
        network_in_bytes, network_out_bytes: 0 where there is no network.
        uptime_s: Since the sandbox started.
    """

    cpu_s: float | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    network_in_bytes: int | None = None
    network_out_bytes: int | None = None
    uptime_s: float | None = None


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What kind of sandbox is wanted. Equal specs have equal digests, so sandboxes of one spec are interchangeable.

    Attributes:
        backend: Name of the node-side technology (local, mock, docker…).
        image: Container image; empty where the backend has none, else the node's own.
        env: Environment of every command; values may be secrets and are never logged.
        labels: A node must carry all of these to be chosen.
        options: What else the caller asks of a container (``memory_bytes``, ``cpus``, ``network_mode``…), JSON values.
            The node checks them against what its operator allows; what is absent is the node's own.
    """

    backend: str = "local"
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """32 hex digits that equal specs share, whatever their labels: those choose a node, not what runs there."""
        wire = {key: value for key, value in self.to_wire().items() if key != "labels"}
        text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        # Written out: a scheduler does this for everybody who stands in line, and asdict is slow.
        return {
            "backend": self.backend,
            "image": self.image,
            "env": dict(self.env),
            "labels": dict(self.labels),
            "options": dict(self.options),
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> SandboxSpec:
        """The spec of its JSON form; unknown keys are ignored so that N/N-1 versions talk."""
        return cls(
            backend=str(data.get("backend", "local")),
            image=str(data.get("image", "")),
            env=_texts(data.get("env")),
            labels=_texts(data.get("labels")),
            options=dict(options) if isinstance(options := data.get("options"), Mapping) else {},
        )


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What the registry knows of a sandbox. Points in time are unix seconds of Redis' clock.

    ``restored``: what it began with, if that was a checkpoint.
    """

    sandbox_id: str
    thread_id: str
    user_id: str | None
    state: SandboxState
    node_id: str
    incarnation: str
    epoch: int
    backend: str
    created_at: float
    used_at: float
    agents: int = 0
    ops: int = 0
    restored: Restoration | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it. ``data_id`` names the data root: nodes with one data_id share thread data.

    ``places`` counts everything that takes one: ``creating``, ``stopping``, warm, live and blank. ``stopping`` counts
    only removals younger than 30 s: these places are about to be free. ``idlest`` names up to 32 of its warm sandboxes
    as (sandbox id, warm since ms), longest idle first. ``reason`` says why it is cordoned, where that was told.
    ``blanks`` counts its blank sandboxes that are ready, by the digest of their spec; ``starting`` those that are not
    yet, which ``creating`` leaves out.
    """

    node_id: str
    incarnation: str
    state: NodeState
    alive: bool
    replicas: int
    places: int
    warm: int
    data_id: str
    backends: tuple[str, ...] = ("local",)
    labels: Mapping[str, str] = field(default_factory=dict)
    inflight: int = 0
    started_at: float = 0.0
    host: str = ""
    pid: int = 0
    version: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)
    burst_limit: int = 0
    creating: int = 0
    stopping: int = 0
    reason: str = ""
    idlest: tuple[tuple[str, int], ...] = ()
    blanks: Mapping[str, int] = field(default_factory=dict)
    starting: int = 0

    @property
    def free(self) -> int:
        """Places that a thread can have at once: those that nothing occupies or has reserved, and those of blanks."""
        return max(0, self.replicas - self.places) + sum(self.blanks.values())
