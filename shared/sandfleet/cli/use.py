"""Using a sandbox: ``exec``."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click

from sandfleet.cli.checkpoints import acquired
from sandfleet.cli.completing import complete_threads
from sandfleet.cli.context import Cli, fleet_command, on_lost_option, pass_cli, signals_as_interrupt
from sandfleet.cli.output import note
from sandfleet.cli.streams import LiveOutput, environment, pipe_may_close, piped_in, read_stdin, size
from sandfleet.errors import SandfleetError
from sandfleet.ids import new_op_id
from sandfleet.model import CommandResult
from sandfleet.sandbox import Sandbox

__all__ = ["COMMANDS", "command_of", "exit_code_of"]

_TIMED_OUT = 124
_MOST_OUTPUT = 32 * 1024**2
_SHELL_WORDS = frozenset("|&;<>()$`\\\"' \t\n*?[]#~={}!")


@fleet_command(
    "exec", short_help="Run a command in a thread's sandbox.", context_settings={"allow_interspersed_args": False}
)
@click.option("--thread", "-t", required=True, metavar="T", help="Whose sandbox: it is made if there is none.",
              shell_complete=complete_threads)  # fmt: skip
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
@on_lost_option
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), metavar="S", help="End it after S s.")
@click.option("--cwd", metavar="DIR", help="Where it starts.  [/mnt/user-data/workspace]")
@click.option("--session", metavar="NAME", help="Run in the persistent shell NAME: cd and exports stay for the next.")
@click.option("--env", "-e", multiple=True, metavar="K[=V]", help="A variable; K alone takes its value from here.")
@click.option(
    "--env-file", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Variables, K=V lines."
)
@click.option("--stdin", "-i", "stdin", is_flag=True, help="Pass standard input on, even from a terminal.")
@click.option("--no-stdin", "-n", is_flag=True, help="Leave standard input alone.")
@click.option("--background", "-b", is_flag=True, help="Do not wait for it: print the id of the job it becomes.")
@click.option("--max-output", "max_output_bytes", callback=size(_MOST_OUTPUT), default="8M", show_default=True,
              metavar="SIZE", help="Kept of what comes faster than it is read; more is dropped.")  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_cli
def execute(
    cli: Cli, /, thread: str, user: str | None, stdin: bool, no_stdin: bool, background: bool,
    command: tuple[str, ...], **how: Any,
) -> int:  # fmt: skip
    """Run a command in a thread's sandbox and exit with its exit code.

    One argument is a shell line, several are a program and its arguments; options of sandfleet stand before the
    command. What the command writes comes as it writes it, each stream on its own, as the bytes it wrote.

    A pipe or a file on standard input is passed on by itself, as ssh does (docker and kubectl want -i, which is
    understood and also reads a terminal until Ctrl-D). In a loop that reads lines, and under cron, say -n, or the
    command swallows the rest.

    With --background it prints the id of a job that goes on by itself: see `sandfleet logs`, `jobs` and `kill`.

    Exits with the command's code, 124 when the timeout ended it, 128+N when signal N did, 130 after Ctrl-C (which
    cancels the command); 2, 3 and 4 also tell that the call was wrong, the fleet away or full, the sandbox gone.

    \b
    Examples:
      sandfleet exec --thread alice -- python3 -c 'print(6 * 7)'
      sandfleet exec --thread alice -- 'ls -la | wc -l'
      cat data.csv | sandfleet exec --thread alice -- 'cat > data.csv'
      sandfleet exec --thread alice --background -- make all
      sandfleet exec --thread alice --session build -- 'cd src && export MODE=debug'
      sandfleet exec --thread alice --timeout 60 --env-file job.env --env TOKEN -- ./job.sh
    """
    if stdin and no_stdin:
        raise click.UsageError("--stdin and --no-stdin contradict each other")
    how["env"] = environment(how["env"], how.pop("env_file"))
    how["errors"] = "replace" if cli.json else "surrogateescape"
    # A session is one shell that goes on; its commands have no standard input of their own.
    wants_stdin = stdin or (not no_stdin and how["session"] is None and piped_in())
    with signals_as_interrupt():
        given = read_stdin() if wants_stdin else None
        with cli.provider() as provider:
            sandbox_id = acquired(cli, provider, thread, user, how.pop("on_lost"))
            sandbox = provider.get(sandbox_id)
            assert sandbox is not None  # the id was just given
            line = command_of(command, as_line=how["session"] is not None)
            live = LiveOutput()
            whose = {"sandbox_id": sandbox_id, "thread_id": thread, "user_id": user}
            try:
                if background:
                    return _begin(cli, sandbox, line, given, how, whose)
                with pipe_may_close():
                    result = _run(sandbox, line, given, how, None if cli.json else live)
            finally:
                provider.release(sandbox_id)
    code = exit_code_of(result)
    with pipe_may_close():
        cli.show({**result, **whose, "exit_status": code}, lambda: live.finish(result, how["max_output_bytes"]))
    _remark(result, how["max_output_bytes"], complete=not result.truncated if cli.json else live.complete)
    return code


def _begin(
    cli: Cli, sandbox: Sandbox, line: str | list[str], stdin: bytes | None, how: dict[str, Any], whose: dict[str, Any]
) -> int:
    """Start a job and say its id."""
    job = sandbox.run(line, stdin=stdin, background=True, **how)
    cli.show({"job_id": job.id, **whose}, lambda: click.echo(job.id))
    if not cli.json and sys.stderr.isatty():
        note(f"it runs; `sandfleet logs -f {job.id}` follows it, `sandfleet kill {job.id}` ends it")
    return 0


def command_of(words: tuple[str, ...], *, as_line: bool = False) -> str | list[str]:
    """What to run: one argument that a shell must read is a command line, everything else an argv.

    With ``as_line`` always a command line: a persistent shell reads nothing else.
    """
    if len(words) == 1 and (as_line or _SHELL_WORDS & set(words[0])):
        return words[0]
    return shlex.join(words) if as_line else list(words)


def exit_code_of(result: CommandResult) -> int:
    """The exit code a shell would give."""
    if result.timed_out:
        return _TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    try:
        return 128 + signal.Signals[result.signal or ""].value
    except KeyError:
        return 1


def _run(
    sandbox: Sandbox, command: str | list[str], stdin: bytes | None, how: dict[str, Any], live: LiveOutput | None
) -> CommandResult:
    op_id = new_op_id()
    told: dict[str, Any] = {} if live is None else {"on_stdout": live.out, "on_stderr": live.err, "on_gap": live.gap}
    try:
        result: CommandResult = sandbox.run(command, stdin=stdin, op_id=op_id, **how, **told)
        return result
    except KeyboardInterrupt:
        failed = live.failure if live is not None else None
        if failed is None:
            note("cancelling …")
        try:
            sandbox.cancel(op_id)
        except SandfleetError as exc:
            note(f"sandfleet: it may still run ({exc}); `sandfleet cancel {op_id}` ends it")
        if failed is not None:
            raise failed from None
        raise


def _remark(result: CommandResult, max_output_bytes: int, *, complete: bool) -> None:
    if not complete:
        note(
            f"sandfleet: the output was longer than the {max_output_bytes} bytes kept of a stream, and is not complete "
            "(--max-output, at most 32M; beyond that write to a file and `sandfleet cp` it)"
        )
    if result.cancelled:
        note("sandfleet: somebody cancelled it")
    if result.out_of_memory:
        note("sandfleet: killed because it took all the memory that the sandbox may have")
    if result.timed_out:
        note(f"sandfleet: ended by its timeout after {result.duration_s:.1f} s")


COMMANDS = (execute,)
