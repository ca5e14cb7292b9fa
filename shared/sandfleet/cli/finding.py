"""What a person names by an id alone: a thread's sandbox as it is, and a job."""

from __future__ import annotations

from sandfleet.cli.context import Cli
from sandfleet.errors import JobNotFound, SandboxNotFound
from sandfleet.jobs import Job
from sandfleet.model import SandboxInfo
from sandfleet.provider import SandboxProvider
from sandfleet.sandbox import Sandbox

__all__ = ["job_of", "running_sandbox", "sandbox_of"]


def job_of(cli: Cli, provider: SandboxProvider, job_id: str) -> Job:
    """The job (or command) of that id, wherever it runs.

    Raises:
        JobNotFound: Its record is gone, or there never was one.
    """
    with cli.store() as store:
        view = store.op(job_id)
    sandbox = provider.get(view.sandbox_id) if view is not None else None
    if sandbox is None:
        raise JobNotFound(
            f"no job {job_id}; `sandfleet jobs` lists those that run, with --thread T also those that have ended",
            op_id=job_id,
        )
    return sandbox.job(job_id)


def running_sandbox(cli: Cli, thread: str, user: str | None) -> SandboxInfo:
    """The sandbox that the thread has; none is made.

    Raises:
        SandboxNotFound: It has none.
    """
    with cli.store() as store:
        # Without a user the store gives every user's thread of that name.
        found = [info for info in store.sandboxes(thread_id=thread, user_id=user) if info.user_id == user]
    if not found:
        whose = f"--thread {thread}" + (f" --user {user}" if user else "")
        raise SandboxNotFound(
            f"thread {thread} has no sandbox; `sandfleet exec {whose} -- true` makes one", thread_id=thread
        )
    return found[0]


def sandbox_of(cli: Cli, provider: SandboxProvider, thread: str, user: str | None) -> Sandbox:
    """A handle on the sandbox that the thread has; none is made.

    Raises:
        SandboxNotFound: It has none.
    """
    info = running_sandbox(cli, thread, user)
    sandbox = provider.get(info.sandbox_id, thread_id=thread, user_id=user)
    assert sandbox is not None  # the store's ids are well-formed
    return sandbox
