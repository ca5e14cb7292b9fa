"""What a backend without jobs and terminals says to whoever asks for one."""

from __future__ import annotations

from sandfleet.backends import Operation
from sandfleet.errors import NotSupported

__all__ = ["refuse_jobs"]

_KINDS = frozenset({"job_output", "kill_job", "write_stdin", "resize_job", "poll_job", "list_jobs", "list_processes"})


def refuse_jobs(op: Operation, where: str) -> None:
    """Let every operation pass that has nothing to do with jobs.

    Args:
        op: What is asked for.
        where: What kind of sandbox cannot do it, for the message.

    Raises:
        NotSupported: It is a job, wants a terminal or an open stdin, or asks about such a command.
    """
    wanted = [name for name in ("background", "stdin_open", "pty") if op.args.get(name)]
    if op.args.get("pty") is not None and "pty" not in wanted:
        wanted.append("pty")
    if op.kind == "execute_command" and wanted:
        raise NotSupported(
            f"{wanted[0]}= needs sandboxd, and {where}; run the command in the foreground", argument=wanted[0]
        )
    if op.kind in _KINDS:
        raise NotSupported(f"{op.kind} needs sandboxd, and {where}", operation=op.kind)
