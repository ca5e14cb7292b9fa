"""What every handle on a sandbox is, and how it runs commands; `sandfleet.sandbox.Sandbox` is the whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Unpack, overload

from sandfleet import calls
from sandfleet.client import Answer, Call, Target
from sandfleet.errors import NotSupported
from sandfleet.job_steps import job_statuses, processes
from sandfleet.jobs import Job
from sandfleet.live import Callbacks, OnGap, OnOutput, followed
from sandfleet.model import CommandResult, JobStatus, Process
from sandfleet.steps import Steps, drive

if TYPE_CHECKING:
    from sandfleet.provider import SandboxProvider

__all__ = ["SandboxHandle", "next_handle"]


_handles = itertools.count(1)


def next_handle() -> int:
    """A number for a new handle; with the client's id it names the handle's shell lane."""
    return next(_handles)


class SandboxHandle:
    """A handle on one sandbox, as far as its commands: see `sandfleet.Sandbox`."""

    _bound: tuple[SandboxProvider, Target] | None = None
    _id: str

    def __init__(self, provider: SandboxProvider | str, target: Target | None = None) -> None:
        if isinstance(provider, str):
            self._id = provider
        else:
            assert target is not None
            self._bound = (provider, target)
        self._handle = next_handle()

    @property
    def id(self) -> str:
        """The sandbox id."""
        return self._id if self._bound is None else self._bound[1].sandbox_id

    @property
    def _provider(self) -> SandboxProvider:
        return self._ours()[0]

    @property
    def _target(self) -> Target:
        return self._ours()[1]

    def _ours(self) -> tuple[SandboxProvider, Target]:
        if self._bound is None:
            raise NotSupported(f"{type(self).__name__} has operations of its own, and this is not one of them")
        return self._bound

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def _call(self, call: Call) -> Answer:
        return drive(self._steps(call))

    def _steps(self, call: Call) -> Steps[Answer]:
        client = self._provider._client()
        return client.call(self._target, replace(call, caller=f"{client.id}.{self._handle}"))

    # --- commands ----------------------------------------------------------------------------

    def execute_command(self, command: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
        """Run a command line in a fresh process group and give its output as one text.

        ``cd`` and exports do not persist. stdout comes first, then ``Std Error:`` and, when it is not 0,
        ``Exit Code:``; ``(no output)`` when there is nothing. A timeout is told in the text, with the partial output.

        Args:
            command: A shell command line; starts in ``/mnt/user-data/workspace``.
            env: Further environment variables.
            timeout: Seconds the command may run; the default is the fleet's ``command_timeout_s``.
        """
        return calls.shown(self.run(command, env=env, timeout_s=timeout), timeout)

    @overload
    def run(
        self, command: str | Sequence[str], *, background: Literal[True], **options: Unpack[calls.RunOptions]
    ) -> Job: ...

    @overload
    def run(
        self, command: str | Sequence[str], *, background: Literal[False] = False, **options: Unpack[calls.RunOptions]
    ) -> CommandResult: ...

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        session: str | None = None,
        max_output_bytes: int | None = None,
        queue_timeout_s: float | None = None,
        op_id: str | None = None,
        errors: str = "replace",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        on_gap: OnGap | None = None,
        background: bool = False,
        stdin_open: bool = False,
        pty: bool | tuple[int, int] = False,
    ) -> CommandResult | Job:
        """Run a command line (text) or an argv (sequence) and give everything there is to know of it.

        Args:
            cwd: Working directory; ``/mnt/user-data/workspace`` by default.
            env: Further environment variables.
            user: Only backends with several users take one.
            stdin: Fed to the command, then closed. Without it stdin is empty.
            timeout_s: Seconds it may run; then its process group is killed, the partial output kept, ``timed_out`` set.
            session: Run in the persistent shell of this name (made on first use): ``cd`` and exports persist.
            max_output_bytes: Kept per stream; 1 MiB by default. More is read and dropped, ``truncated`` set.
            queue_timeout_s: Seconds it may wait to be started.
            op_id: Your own id for it: the same id never starts a second effect; asking again gives the first answer.
            errors: What becomes of output that is not UTF-8: ``replace``, or ``surrogateescape``, which loses nothing
                (``result.stdout.encode("utf-8", "surrogateescape")`` gives the bytes).
            on_stdout, on_stderr: Called with each piece of output (bytes) while it runs, in order, from a thread of
                their own; all of it is told before this returns. What they raise is logged.
            on_gap: Called, in its place among these, with an `OutputGap` where output was written faster than it is
                kept for readers; without it that is logged. The result has it, as far as ``max_output_bytes`` goes.
            background: Give a `Job` as soon as it runs, which goes on by itself. ``timeout_s`` is ``max_job_s`` then.
            stdin_open: Leave stdin open for `Job.send_stdin`.
            pty: Run it on a terminal of this size (rows, columns), or of the usual one: stdin is open, and all output
                is stdout.

        Raises:
            QueueTimeout: It waited longer than ``queue_timeout_s`` and never began.
            OutcomeUnknown: It began and nobody can tell how it ended.
        """
        call = calls.execute(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            session=session,
            max_output_bytes=max_output_bytes,
            queue_timeout_s=queue_timeout_s,
            op_id=op_id,
            errors=errors,
            background=background,
            stdin_open=stdin_open,
            pty=pty,
            on_output=on_stdout is not None or on_stderr is not None,
        )
        if background:
            return Job(self._provider, self._target, self._call(call).op_id, seen=True)
        if on_stdout is None and on_stderr is None:
            return calls.command_result(self._call(call))
        callbacks = Callbacks(on_stdout, on_stderr, on_gap)
        return calls.command_result(followed(self._provider._client(), self._steps, call, callbacks))

    def job(self, job_id: str) -> Job:
        """The handle of a job of this sandbox, whoever started it; no I/O. A command's op id will do, too."""
        return Job(self._provider, self._target, job_id)

    def jobs(self) -> list[JobStatus]:
        """The background jobs that the sandbox remembers: those that run, and the last ones that ended."""
        return job_statuses(self._call(Call("list_jobs", {})))

    def processes(self) -> list[Process]:
        """What runs in the sandbox right now."""
        return processes(self._call(Call("list_processes", {})))

    def close_session(self, session: str) -> None:
        """End a persistent shell session; one that is not open is fine."""
        self._call(Call("close_session", {"session": session}))

    def cancel(self, op_id: str) -> bool:
        """End an operation of this sandbox: unstarted ones never start, a running command's process group is killed.

        True if it was still open. The caller of that operation gets `Cancelled`, or a result with ``cancelled`` set.
        """
        return drive(self._provider._cancel(self._target, op_id))
