"""Long commands: ``jobs``, ``logs``, ``kill``, ``ps``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click

from sandfleet.cli.completing import complete_jobs, complete_nodes, complete_threads
from sandfleet.cli.context import Cli, fleet_command, pass_cli, signals_as_interrupt
from sandfleet.cli.finding import job_of, sandbox_of
from sandfleet.cli.output import age, note, show_size, table
from sandfleet.cli.streams import pipe_may_close, write_bytes
from sandfleet.cli.use import exit_code_of
from sandfleet.job_values import JobStatus, OutputChunk, OutputGap, Process

__all__ = ["COMMANDS"]

_job = click.argument("job_id", metavar="JOB", shell_complete=complete_jobs)
_MOST_JOBS = 10_000


@fleet_command("jobs", short_help="List the background jobs.")
@click.option("--thread", "-t", metavar="T", help="Only this thread's; ended ones too.",
              shell_complete=complete_threads)  # fmt: skip
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
@click.option("--node", metavar="ID", help="Only on this node.", shell_complete=complete_nodes)
@pass_cli
def jobs(cli: Cli, thread: str | None, user: str | None, node: str | None) -> None:
    """List the background jobs that run, oldest first. With --thread, those that its sandbox remembers, ended ones too.

    \b
    Examples:
      sandfleet jobs
      sandfleet jobs --thread alice
      sandfleet logs -f 5d0c9f0e8c6a4d1b
    """
    if thread is None:
        found = _running(cli, node)
        cli.show({"jobs": found}, lambda: _show_running(found))
        return
    with cli.provider() as provider:
        remembered = sandbox_of(cli, provider, thread, user).jobs()
    cli.show({"jobs": [asdict(one) for one in remembered]}, lambda: _show_remembered(remembered, thread))


def _running(cli: Cli, node: str | None) -> list[dict[str, Any]]:
    with cli.store() as store:
        views = [view for view in store.ops(node_id=node, limit=_MOST_JOBS) if view.job]
        threads = {info.sandbox_id: info for info in store.sandboxes()}
        now_ms = store.now_ms()
    found = []
    for view in views:
        info = threads.get(view.sandbox_id)
        found.append(
            {
                "job_id": view.op_id,
                "sandbox_id": view.sandbox_id,
                "thread_id": info.thread_id if info else None,
                "user_id": info.user_id if info else None,
                "node_id": view.node_id,
                "age_s": round((now_ms - (view.claimed_at_ms or view.recorded_at_ms)) / 1000, 1),
                "what": view.describe,
            }
        )
    return found


@fleet_command("logs", short_help="Print the output of a job.")
@_job
@click.option("--follow", "-f", is_flag=True, help="Go on until it ends, and exit with its exit code.")
@click.option("--after", "cursor", metavar="CURSOR", help="Begin behind this place, as an earlier `logs` told it.")
@pass_cli
def logs(cli: Cli, job_id: str, follow: bool, cursor: str | None) -> int:
    """Print what a job has written, each stream on its own, as the bytes it wrote; with -f also what it goes on to
    write. Any number of people may look on.

    Redis keeps the last `output_bytes` of it; what is missing is told on stderr. Ctrl-C leaves the job running, and
    says where to go on. With --json each piece is an object on a line of its own, with its cursor.

    \b
    Examples:
      sandfleet exec --thread alice --background -- make all
      sandfleet logs 5d0c9f0e8c6a4d1b
      sandfleet logs -f 5d0c9f0e8c6a4d1b
    """
    with cli.provider() as provider, signals_as_interrupt(), pipe_may_close():
        job = job_of(cli, provider, job_id)
        reading = _Reading(cli, cursor)
        try:
            reading.print_all(job.output(after=cursor, follow=follow))
        except KeyboardInterrupt:
            if reading.cursor:
                note(f"go on: sandfleet logs {'-f ' if follow else ''}--after {reading.cursor} {job_id}")
            raise
        return exit_code_of(job.wait(10.0)) if follow else 0


class _Reading:
    """Prints a stream of output and knows how far it came."""

    def __init__(self, cli: Cli, cursor: str | None) -> None:
        self._json = cli.json
        self.cursor = cursor

    def print_all(self, records: Iterable[Any]) -> None:
        for record in records:
            if isinstance(record, OutputChunk):
                self._print(record)
                self.cursor = record.cursor
            elif isinstance(record, OutputGap):
                self._tell_gap(record)

    def _print(self, chunk: OutputChunk) -> None:
        if self._json:
            told = {"stream": chunk.stream, "data": chunk.text, "cursor": chunk.cursor}
            click.echo(json.dumps(told, ensure_ascii=False))
        else:
            write_bytes(sys.stdout if chunk.stream == "stdout" else sys.stderr, chunk.data)

    def _tell_gap(self, gap: OutputGap) -> None:
        if self._json:
            click.echo(json.dumps({"gap": asdict(gap)}))
        else:
            note(f"sandfleet: {show_size(gap.missing)} of {gap.stream} are missing here: they are not kept any more")


@fleet_command("kill", short_help="Send a signal to a job.")
@_job
@click.option("--signal", "-s", "signal_name", default="TERM", show_default=True, metavar="NAME",
              help="TERM, KILL, INT, HUP, USR1… or a number.")  # fmt: skip
@pass_cli
def kill(cli: Cli, job_id: str, signal_name: str) -> None:
    """Send a signal to a job's processes. KILL ends it, whatever it does.

    \b
    Examples:
      sandfleet kill 5d0c9f0e8c6a4d1b
      sandfleet kill --signal INT 5d0c9f0e8c6a4d1b
    """
    name = _signal(signal_name)
    with cli.provider() as provider:
        sent = job_of(cli, provider, job_id).kill(name)
    told = f"{name} was sent to job {job_id}" if sent else f"job {job_id} had ended already"
    cli.show({"job_id": job_id, "signal": name, "sent": sent}, lambda: click.echo(told))


def _signal(name: str) -> str:
    try:
        if name.isdigit():
            return signal.Signals(int(name)).name
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"].name
    except (KeyError, ValueError):
        raise click.BadParameter(f"{name!r} is no signal; say TERM, KILL, INT, HUP…", param_hint="--signal") from None


@fleet_command("ps", short_help="List the processes in a thread's sandbox.")
@click.option("--thread", "-t", required=True, metavar="T", help="Whose sandbox; none is made for it.",
              shell_complete=complete_threads)  # fmt: skip
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
@pass_cli
def ps(cli: Cli, thread: str, user: str | None) -> None:
    """List the processes in a thread's sandbox: what they are, for how long they run, and what they use.

    \b
    Examples:
      sandfleet ps --thread alice
      sandfleet ps --thread alice --json
    """
    with cli.provider() as provider:
        found = sandbox_of(cli, provider, thread, user).processes()
    cli.show({"processes": [asdict(one) for one in found]}, lambda: _show_processes(found))


# --- tables ------------------------------------------------------------------------------------


def _show_running(found: Sequence[dict[str, Any]]) -> None:
    rows = [
        (one["job_id"], one["thread_id"], one["user_id"], one["node_id"], age(one["age_s"]), one["what"])
        for one in found
    ]
    table(
        ("job", "thread", "user", "node", "age", "what"),
        rows,
        empty="No jobs run. Start one: sandfleet exec --thread alice --background -- make all",
    )


def _show_remembered(found: Sequence[JobStatus], thread: str) -> None:
    rows = [
        (
            one.job_id,
            one.state,
            one.signal if one.signal else one.exit_code,
            "" if one.duration_s is None else age(one.duration_s),
            one.command,
        )
        for one in found
    ]
    empty = f"No jobs. Start one: sandfleet exec --thread {thread} --background -- make all"
    table(("job", "state", "exit", "ran", "what"), rows, empty=empty)


def _show_processes(found: Sequence[Process]) -> None:
    rows = [
        (one.pid, one.ppid, one.user, one.state, age(one.cpu_s), show_size(one.memory_bytes), one.command)
        for one in found
    ]
    table(("pid", "parent", "user", "state", "cpu", "memory", "command"), rows, empty="No processes.")


COMMANDS = (jobs, logs, kill, ps)
