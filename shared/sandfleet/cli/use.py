"""Using a sandbox: ``exec``."""

from __future__ import annotations

import os
import signal
import stat
import sys
from typing import Any

import click

from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import note
from sandfleet.ids import new_op_id
from sandfleet.model import CommandResult
from sandfleet.sandbox import Sandbox

__all__ = ["COMMANDS", "command_of", "exit_code_of"]

_TIMED_OUT = 124
_SHELL_WORDS = frozenset("|&;<>()$`\\\"' \t\n*?[]#~={}!")


@fleet_command(
    "exec", short_help="Run a command in a thread's sandbox.", context_settings={"allow_interspersed_args": False}
)
@click.option("--thread", "-t", required=True, metavar="T", help="Whose sandbox: it is made if there is none.")
@click.option("--user", "-u", metavar="U", help="The thread's user.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), metavar="S", help="End it after S s.")
@click.option("--cwd", metavar="DIR", help="Where it starts.  [/mnt/user-data/workspace]")
@click.option("--env", "-e", multiple=True, metavar="K=V", help="A further environment variable; may be repeated.")
@click.option("--no-stdin", "-n", is_flag=True, help="Do not pass on what is piped in.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_cli
def execute(cli: Cli, /, thread: str, user: str | None, no_stdin: bool, command: tuple[str, ...], **how: Any) -> int:
    """Run a command in a thread's sandbox and exit with its exit code.

    One argument is a shell line, several are a program and its arguments. Output and errors arrive on their own
    streams. 124 is a timeout, 128+N the end by signal N.

    \b
    Examples:
      sandfleet exec --thread alice -- python3 -c 'print(6 * 7)'
      sandfleet exec --thread alice -- 'ls -la | wc -l'
      cat data.csv | sandfleet exec --thread alice -- 'cat > data.csv'
    """
    how["env"] = _environment(how["env"])
    stdin = None if no_stdin else _piped_in()
    with cli.provider() as provider:
        sandbox_id = provider.acquire(thread, user_id=user)
        sandbox = provider.get(sandbox_id)
        assert sandbox is not None  # the id was just given
        try:
            result = _run(sandbox, command_of(command), stdin, how)
        finally:
            provider.release(sandbox_id)
    code = exit_code_of(result)
    document = {**result, "sandbox_id": sandbox_id, "thread_id": thread, "user_id": user, "exit_status": code}
    cli.show(document, lambda: _pass_on(result))
    return code


def command_of(words: tuple[str, ...]) -> str | list[str]:
    """What to run: one argument that a shell must read is a command line, everything else an argv."""
    if len(words) == 1 and _SHELL_WORDS & set(words[0]):
        return words[0]
    return list(words)


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


def _run(sandbox: Sandbox, command: str | list[str], stdin: bytes | None, how: dict[str, Any]) -> CommandResult:
    op_id = new_op_id()
    try:
        return sandbox.run(command, stdin=stdin, op_id=op_id, **how)
    except KeyboardInterrupt:
        note("cancelling …")
        sandbox.cancel(op_id)
        raise


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env")
    return dict(pair.split("=", 1) for pair in pairs)


def _piped_in() -> bytes | None:
    """What a pipe, a socket or a file feeds us; None from a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode):
        return sys.stdin.buffer.read()
    return None


def _pass_on(result: CommandResult) -> None:
    click.echo(result.stdout, nl=False)
    click.echo(result.stderr, nl=False, err=True)
    if result.truncated:
        note("sandfleet: the output was longer than what is kept (1 MiB a stream)")
    if result.cancelled:
        note("sandfleet: somebody cancelled it")
    if result.timed_out:
        note(f"sandfleet: ended by its timeout after {result.duration_s:.1f} s")


COMMANDS = (execute,)
