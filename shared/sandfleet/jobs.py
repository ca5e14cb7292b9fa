"""Handles on long commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING

from sandfleet.client import Target
from sandfleet.ids import check_op_id, new_token
from sandfleet.job_steps import JobSteps
from sandfleet.job_values import JobState, JobStatus, OutputChunk, OutputEnd, OutputGap, OutputRecord, Process
from sandfleet.model import CommandResult
from sandfleet.reading import Reading
from sandfleet.steps import drive, drive_async

if TYPE_CHECKING:
    from sandfleet.provider import SandboxProvider

__all__ = [
    "AsyncJob",
    "Job",
    "JobState",
    "JobStatus",
    "OutputChunk",
    "OutputEnd",
    "OutputGap",
    "OutputRecord",
    "Process",
]


class Job:
    """A command that goes on by itself: what `Sandbox.run` with ``background=True`` and `Sandbox.job` give.

    The id is enough to come back to it, from any process, until a day after its end. It runs in its sandbox, keeps that
    from being reaped for up to ``max_job_s``, and ends with it. Thread-safe.

    Every method but `output` is one operation or one look at its record, and raises what those raise:
    `StoreUnavailable` while Redis is away, `SandboxNotFound`, `SandboxLost`.
    """

    def __init__(self, provider: SandboxProvider, target: Target, job_id: str, *, seen: bool = False) -> None:
        self._provider = provider
        self._target = target
        self._id = check_op_id(job_id)
        self._seen = seen

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def sandbox_id(self) -> str:
        """The id of its sandbox."""
        return self._target.sandbox_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in {self.sandbox_id}>"

    def _steps(self) -> JobSteps:
        return JobSteps(self._provider._client(), self._target, self._id, seen=self._seen)

    def poll(self) -> JobStatus:
        """How it stands, right now.

        Raises:
            JobNotFound: Nobody knows that id in this sandbox.
        """
        return drive(self._steps().status())

    def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Wait until it is over; its result, as `Sandbox.run` would have given it.

        Of long output the last part is in it (and ``truncated`` set); `output` gives all, as it comes. Several may
        wait.

        Raises:
            ReplyTimeout: It is not over after ``timeout_s`` seconds, and runs on.
            OutcomeUnknown, SandboxLost: It was lost: nobody knows how it ended.
            SandfleetError: It could not be started: what prevented it.
        """
        return drive(self._steps().wait(timeout_s))

    def output(self, after: str | None = None, *, follow: bool = True) -> Generator[OutputRecord, None, None]:
        """What it writes, as it comes: `OutputChunk`, `OutputGap` where something is missing, at last one `OutputEnd`.

        Any number of readers, each at its own place, from any time on. Each byte comes once and in the order of its
        stream. The last ``output_bytes`` (1 MiB by default) are kept, until an hour after the end; who reads slower
        than it writes gets a gap. An outage of Redis is waited for, up to ``queue_timeout_s``.

        Args:
            after: The cursor of a chunk, to go on behind it; without it from the beginning.
            follow: Wait for what comes, until it ends; False gives what there is.

        Raises:
            InvalidArgument: ``after`` is no cursor.
            JobNotFound: Nobody knows that id in this sandbox.
        """
        return self._records(Reading(after), follow)

    def _records(self, reading: Reading, follow: bool) -> Generator[OutputRecord, None, None]:
        steps, reader = self._steps(), new_token()
        try:
            while records := drive(steps.next_output(reading, reader, follow=follow)):
                yield from records
        finally:
            self._provider._client().store.drop_reader(reader)

    def kill(self, signal: str = "SIGTERM") -> bool:
        """Send a signal to it and all that it started; False if it is over.

        What does not end by SIGTERM ends by SIGKILL.
        """
        return drive(self._steps().kill(signal))

    def send_stdin(self, data: str | bytes) -> None:
        """Write to its stdin (`Sandbox.run` with ``stdin_open`` or ``pty``), in order with all that this handle sent.

        Raises:
            Busy: It has not read what was sent before; nothing of this was taken, try again.
            JobNotFound: It is over, or was started without.
        """
        drive(self._steps().write(data.encode() if isinstance(data, str) else bytes(data), eof=False))

    def close_stdin(self) -> None:
        """Let its stdin end."""
        drive(self._steps().write(b"", eof=True))

    def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size (`Sandbox.run` with ``pty``)."""
        drive(self._steps().resize(rows, cols))


class AsyncJob:
    """`Job` for event loops: every method is documented there."""

    def __init__(self, provider: SandboxProvider, target: Target, job_id: str, *, seen: bool = False) -> None:
        self._provider = provider
        self._target = target
        self._id = check_op_id(job_id)
        self._seen = seen

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def sandbox_id(self) -> str:
        """The id of its sandbox."""
        return self._target.sandbox_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} in {self.sandbox_id}>"

    def _steps(self) -> JobSteps:
        return JobSteps(self._provider._client(), self._target, self._id, seen=self._seen)

    async def poll(self) -> JobStatus:
        """See `Job.poll`."""
        return await drive_async(self._steps().status())

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """See `Job.wait`."""
        return await drive_async(self._steps().wait(timeout_s))

    def output(self, after: str | None = None, *, follow: bool = True) -> AsyncGenerator[OutputRecord, None]:
        """See `Job.output`; for ``async for``."""
        return self._records(Reading(after), follow)

    async def _records(self, reading: Reading, follow: bool) -> AsyncGenerator[OutputRecord, None]:
        steps, reader = self._steps(), new_token()
        try:
            while records := await drive_async(steps.next_output(reading, reader, follow=follow)):
                for record in records:
                    yield record
        finally:
            self._provider._client().store.drop_reader(reader)

    async def kill(self, signal: str = "SIGTERM") -> bool:
        """See `Job.kill`."""
        return await drive_async(self._steps().kill(signal))

    async def send_stdin(self, data: str | bytes) -> None:
        """See `Job.send_stdin`."""
        await drive_async(self._steps().write(data.encode() if isinstance(data, str) else bytes(data), eof=False))

    async def close_stdin(self) -> None:
        """See `Job.close_stdin`."""
        await drive_async(self._steps().write(b"", eof=True))

    async def resize(self, rows: int, cols: int) -> None:
        """See `Job.resize`."""
        await drive_async(self._steps().resize(rows, cols))
