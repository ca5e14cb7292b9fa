"""The async twins: the same names, the same arguments, the same errors, on any event loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from sandfleet import calls
from sandfleet.checkpointing import AsyncCheckpointing
from sandfleet.client import Answer, Call, Target
from sandfleet.config import Settings
from sandfleet.download import download
from sandfleet.errors import PathNotFound
from sandfleet.ids import Identity, is_sandbox_id
from sandfleet.job_steps import job_statuses, processes
from sandfleet.jobs import AsyncJob
from sandfleet.live import Callbacks, OnGap, OnOutput, followed_async
from sandfleet.model import (
    CommandResult,
    FileInfo,
    GrepMatch,
    Health,
    JobStatus,
    Process,
    SandboxInfo,
    SandboxMetrics,
    SandboxSpec,
    TextRead,
)
from sandfleet.provider import SandboxProvider, list_type
from sandfleet.sandbox import Batch, next_handle
from sandfleet.standing import list_outputs, start, stop, upload_to_thread
from sandfleet.steps import Steps, drive_async
from sandfleet.transfer import Progress, Transfer, upload

__all__ = ["AsyncSandbox", "AsyncSandboxProvider"]


class AsyncSandboxProvider(AsyncCheckpointing):
    """`SandboxProvider` for event loops. One instance serves several loops at once.

    Args:
        settings, spec, overrides: As for `SandboxProvider`.
    """

    def __init__(self, settings: Settings | None = None, *, spec: SandboxSpec | None = None, **overrides: Any) -> None:
        self._sync = SandboxProvider(settings, spec=spec, **overrides)

    @classmethod
    def over(cls, provider: SandboxProvider) -> AsyncSandboxProvider:
        """The async side of a provider that exists (a `MockSandboxProvider`, or one shared with threads)."""
        twin = cls.__new__(cls)
        twin._sync = provider
        return twin

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._sync.settings

    async def acquire(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float | None = None,
        on_lost: str | None = None,
    ) -> str:
        """See `SandboxProvider.acquire`."""
        return await drive_async(self._sync._acquire(thread_id, user_id, timeout_s, on_lost))

    def get(self, sandbox_id: str, *, thread_id: str | None = None, user_id: str | None = None) -> AsyncSandbox | None:
        """See `SandboxProvider.get`; no I/O, hence no await."""
        if not is_sandbox_id(sandbox_id) or self._sync._was_released(sandbox_id):
            return None
        if thread_id is not None:
            return AsyncSandbox(self, Target(sandbox_id, Identity(thread_id, user_id)))
        return AsyncSandbox(self, self._sync._target(sandbox_id))

    async def release(self, sandbox_id: str) -> None:
        """See `SandboxProvider.release`."""
        await drive_async(self._sync._release(sandbox_id, all_of_them=False))

    async def destroy(self, sandbox_id: str, delete_data: bool = False) -> None:
        """See `SandboxProvider.destroy`."""
        await drive_async(self._sync._destroy(sandbox_id, delete_data))

    async def upload_to_thread(
        self, thread_id: str, name: str, data: bytes | str | os.PathLike[str], *, user_id: str | None = None
    ) -> str:
        """See `SandboxProvider.upload_to_thread`."""
        return await drive_async(upload_to_thread(self._sync, thread_id, name, data, user_id=user_id))

    async def list_outputs(self, thread_id: str, *, user_id: str | None = None) -> list_type[FileInfo]:
        """See `SandboxProvider.list_outputs`."""
        return await drive_async(list_outputs(self._sync, thread_id, user_id=user_id))

    async def list(self) -> list_type[SandboxInfo]:
        """See `SandboxProvider.list`."""
        return await drive_async(self._sync._list())

    def reset(self) -> None:
        """See `SandboxProvider.reset`; no I/O, hence no await."""
        self._sync.reset()

    async def shutdown(self) -> None:
        """See `SandboxProvider.shutdown`."""
        await drive_async(self._sync._shutdown())

    async def __aenter__(self) -> AsyncSandboxProvider:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.shutdown()


class AsyncSandbox:
    """`Sandbox` for event loops: every method is documented there."""

    def __init__(self, provider: AsyncSandboxProvider, target: Target) -> None:
        self._provider = provider
        self._target = target
        self._handle = next_handle()

    @property
    def id(self) -> str:
        """The sandbox id."""
        return self._target.sandbox_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def _call(self, call: Call) -> Answer:
        return await drive_async(self._steps(call))

    def _steps(self, call: Call) -> Steps[Answer]:
        client = self._provider._sync._client()
        return client.call(self._target, replace(call, caller=f"{client.id}.{self._handle}"))

    async def execute_command(
        self,
        command: str,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  (the seeds' name; enforced in the sandbox)
    ) -> str:
        """See `Sandbox.execute_command`."""
        return calls.shown(await self.run(command, env=env, timeout_s=timeout), timeout)

    @overload
    async def run(
        self, command: str | Sequence[str], *, background: Literal[True], **options: Unpack[calls.RunOptions]
    ) -> AsyncJob: ...

    @overload
    async def run(
        self, command: str | Sequence[str], *, background: Literal[False] = False, **options: Unpack[calls.RunOptions]
    ) -> CommandResult: ...

    async def run(
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
    ) -> CommandResult | AsyncJob:
        """See `Sandbox.run`; the callbacks are called on the event loop, and may be coroutine functions."""
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
            return AsyncJob(self._provider._sync, self._target, (await self._call(call)).op_id, seen=True)
        if on_stdout is None and on_stderr is None:
            return calls.command_result(await self._call(call))
        client, callbacks = self._provider._sync._client(), Callbacks(on_stdout, on_stderr, on_gap)
        return calls.command_result(await followed_async(client, self._steps, call, callbacks))

    def job(self, job_id: str) -> AsyncJob:
        """See `Sandbox.job`; no I/O, hence no await."""
        return AsyncJob(self._provider._sync, self._target, job_id)

    async def jobs(self) -> list[JobStatus]:
        """See `Sandbox.jobs`."""
        return job_statuses(await self._call(Call("list_jobs", {})))

    async def processes(self) -> list[Process]:
        """See `Sandbox.processes`."""
        return processes(await self._call(Call("list_processes", {})))

    async def close_session(self, session: str) -> None:
        """See `Sandbox.close_session`."""
        await self._call(Call("close_session", {"session": session}))

    async def cancel(self, op_id: str) -> bool:
        """See `Sandbox.cancel`."""
        return await drive_async(self._provider._sync._cancel(self._target, op_id))

    async def read_file(self, path: str, start_line: int | None = None, end_line: int | None = None) -> str:
        """See `Sandbox.read_file`."""
        return calls.text_of(await self._call(calls.read_file(path, start_line, end_line)), path)

    async def read_text(
        self,
        path: str,
        start_line: int | None = None,
        end_line: int | None = None,
        *,
        max_chars: int | None = None,
    ) -> TextRead:
        """See `Sandbox.read_text`."""
        return calls.text_read(await self._call(calls.read_text(path, start_line, end_line, max_chars)))

    async def download_file(self, path: str) -> bytes:
        """See `Sandbox.download_file`."""
        return (await self._call(calls.read(path))).content or b""

    async def write_file(self, path: str, content: str, append: bool = False, *, if_digest: str | None = None) -> None:
        """See `Sandbox.write_file`."""
        await self._call(calls.write(path, content, append, if_digest))

    async def update_file(self, path: str, content: bytes) -> None:
        """See `Sandbox.update_file`."""
        await self._call(calls.write(path, content))

    async def str_replace(
        self, path: str, old_str: str, new_str: str, *, replace_all: bool = False, if_digest: str | None = None
    ) -> int:
        """See `Sandbox.str_replace`."""
        return int(
            (await self._call(calls.replace_text(path, old_str, new_str, replace_all, if_digest))).value["count"]
        )

    async def list_dir(self, path: str, max_depth: int = 2) -> list[str]:
        """See `Sandbox.list_dir`."""
        return calls.names(await self.list_files(path, max_depth=max_depth))

    async def list_files(self, path: str, *, max_depth: int = 1) -> list[FileInfo]:
        """See `Sandbox.list_files`."""
        return calls.entries(await self._call(calls.list_call(path, max_depth)), path, max_depth)

    async def glob(
        self, path: str, pattern: str, *, include_dirs: bool = False, max_results: int = 200
    ) -> tuple[list[str], bool]:
        """See `Sandbox.glob`."""
        return calls.glob_answer(await self._call(calls.glob(path, pattern, include_dirs, max_results)))

    async def grep(
        self,
        path: str,
        pattern: str,
        *,
        glob: str | None = None,
        literal: bool = False,
        case_sensitive: bool = False,
        max_results: int = 100,
    ) -> tuple[list[GrepMatch], bool]:
        """See `Sandbox.grep`."""
        call = calls.grep(path, pattern, glob, literal, case_sensitive, max_results)
        return calls.grep_answer(await self._call(call))

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """See `Sandbox.stat`."""
        return calls.info((await self._call(Call("stat", {"path": path, "follow": follow}))).value)

    async def exists(self, path: str) -> bool:
        """See `Sandbox.exists`."""
        try:
            await self.stat(path)
        except PathNotFound:
            return False
        return True

    async def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """See `Sandbox.make_dir`."""
        await self._call(Call("make_dir", {"path": path, "parents": parents, "exist_ok": exist_ok}))

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """See `Sandbox.remove`."""
        await self._call(Call("remove", {"path": path, "recursive": recursive, "missing_ok": missing_ok}))

    async def move(self, path: str, new_path: str, *, overwrite: bool = False) -> None:
        """See `Sandbox.move`."""
        await self._call(Call("move", {"path": path, "new_path": new_path, "overwrite": overwrite}))

    async def make_link(self, path: str, target: str, *, overwrite: bool = False) -> None:
        """See `Sandbox.make_link`."""
        await self._call(Call("make_link", {"path": path, "target": target, "overwrite": overwrite}))

    async def upload(
        self, local_path: str | os.PathLike[str], path: str, *, on_progress: Progress | None = None
    ) -> Transfer:
        """See `Sandbox.upload`; local files are read in the loop's executor."""
        return await drive_async(upload(self._steps, local_path, path, on_progress=on_progress))

    async def download(
        self, path: str, local_path: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Transfer:
        """See `Sandbox.download`; local files are written in the loop's executor."""
        return await drive_async(download(self._steps, path, local_path, on_progress=on_progress))

    async def batch(self, batch: Batch, *, stop_on_error: bool = True, timeout_s: float | None = None) -> list[Any]:
        """See `Sandbox.batch`."""
        call = calls.batch(batch.calls, stop_on_error=stop_on_error, timeout_s=timeout_s)
        return calls.batch_results(await self._call(call))

    async def health(self) -> Health:
        """See `Sandbox.health`."""
        return calls.health(await self._call(Call("health", {}, timeout_s=10.0)), self._target)

    async def metrics(self) -> SandboxMetrics:
        """See `Sandbox.metrics`."""
        return calls.metrics(await self._call(Call("metrics", {}, timeout_s=20.0)))

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        await drive_async(stop(self._provider._sync, self._target))

    async def start(self) -> None:
        """See `Sandbox.start`."""
        await drive_async(start(self._provider._sync, self._target))

    async def noop(self) -> None:
        """See `Sandbox.noop`."""
        await self._call(Call("noop", {}))
