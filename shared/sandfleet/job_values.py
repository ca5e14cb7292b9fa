"""What is told of long commands: states, pieces of output, processes. Plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["JobState", "JobStatus", "OutputChunk", "OutputEnd", "OutputGap", "OutputRecord", "Process"]


class JobState(StrEnum):
    """Where a job is: not yet running · running · ended by itself or by a signal · never ran, or ended by a limit
    (deadline, memory) · nobody can know any more how it ended, because its sandbox or node is gone."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    LOST = "lost"

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self not in (JobState.STARTING, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands.

    Attributes:
        job_id: Its id, which is that of its operation.
        state: See `JobState`.
        exit_code: None while it runs, and when a signal ended it.
        signal: The name of the signal that ended it.
        timed_out: Its deadline ended it.
        out_of_memory: It was killed because the sandbox's memory was used up.
        duration_s: For how long it ran, or has run so far; None where that is not known.
        command: What it is, as logs and Flower show it.
        code: Of the error, when it failed or was lost by one.
        error: What that error says.
    """

    job_id: str
    state: JobState
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    duration_s: float | None = None
    command: str = ""
    code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Some output: ``stream`` is stdout or stderr, ``data`` the bytes as they were written.

    ``cursor`` is where to read on behind it (`Job.output`'s ``after``), from any process.
    """

    stream: str
    data: bytes
    cursor: str

    @property
    def text(self) -> str:
        """The bytes as UTF-8 with replacement. A character may lie across two chunks: decode the bytes of
        several together, or incrementally, where that matters."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class OutputGap:
    """Output that is not kept any more: bytes ``start`` up to ``end`` (exclusive) of ``stream``."""

    stream: str
    start: int
    end: int
    cursor: str

    @property
    def missing(self) -> int:
        """How many bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """Nothing comes any more. ``outcome``: ``ok`` (it has ended, `Job.wait` tells how) or the code of an error."""

    outcome: str
    cursor: str


OutputRecord = OutputChunk | OutputGap | OutputEnd


@dataclass(frozen=True, slots=True)
class Process:
    """A process in a sandbox. ``user`` is its name or number, None where it cannot be told; ``state`` a letter as
    ``ps`` shows it; ``started_s`` the seconds since it started."""

    pid: int
    ppid: int
    user: str | None
    state: str
    command: str
    cpu_s: float
    memory_bytes: int
    started_s: float
