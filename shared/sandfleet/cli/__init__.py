"""The command line: ``sandfleet``. `main` is its entry point; nothing imports this package."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence

import click

import sandfleet
from sandfleet.cli import (
    admin,
    checkpoints,
    collecting,
    completing,
    config,
    copying,
    demo,
    doctor,
    draining,
    fleet,
    inspecting,
    jobs,
    look,
    shell,
    top,
    use,
)
from sandfleet.cli.context import Cli, advice, exit_code, global_options
from sandfleet.cli.output import printable
from sandfleet.cli.sections import Sections
from sandfleet.errors import FileError, SandfleetError

__all__ = ["main"]

_INTERRUPTED = 130
_OUTPUT_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(sandfleet.__version__, prog_name="sandfleet", message="%(prog)s %(version)s")
def cli() -> None:
    """Sandboxes for AI agents on a fleet of ordinary machines.

    Every command finds the fleet of your running `sandfleet up` by itself; --redis-url or SANDFLEET_REDIS_URL names
    another. Each speaks to people, and with --json to programs. `sandfleet COMMAND --help` shows examples.

    \b
    Examples:
      sandfleet demo                                                  # see what it does
      sandfleet up --nodes 2                                          # start a fleet here
      sandfleet exec --thread alice -- python3 -c 'print(6 * 7)'      # use it
      sandfleet nodes; sandfleet ls; sandfleet ops                    # look at it
    """


cli.params.extend(global_options())
for module in (
    fleet,
    demo,
    use,
    shell,
    copying,
    jobs,
    checkpoints,
    look,
    inspecting,
    top,
    admin,
    draining,
    collecting,
    doctor,
    completing,
    config,
):
    for command in module.COMMANDS:
        cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    0 done · 1 a check or the demo failed · 2 the call or the configuration is wrong · 3 the fleet is away or full ·
    4 the sandbox or file is not there · ``exec``, ``shell`` and ``logs -f`` exit with their command's code.
    """
    _open_closed_streams()
    state = Cli()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(args=words, prog_name="sandfleet", standalone_mode=False, obj=state)
        return code if isinstance(code, int) else 0
    except SandfleetError as error:
        return _tell(error, as_json=state.json)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as wrong:
        # Options are not taken in when one of them is wrong.
        if state.json or "--json" in words[: words.index("--") if "--" in words else None]:
            wire = {"code": "invalid_argument", "message": wrong.format_message(), "facts": {}}
            click.echo(json.dumps({"error": wire}))
        else:
            wrong.show()
        return wrong.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except OSError as full:
        if full.errno not in _OUTPUT_FAILS or full.filename is not None:
            raise
        click.echo(f"sandfleet: standard output cannot be written: {full.strerror}", err=True)
        return 1


def _open_closed_streams() -> None:
    """A stream that the caller closed (``>&-``) reads as empty and takes everything, as for most programs."""
    if sys.stdout is None or sys.stderr is None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for as long as the process lives)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere


def _tell(error: SandfleetError, *, as_json: bool) -> int:
    next_step = advice(error)
    if as_json:
        wire = error.to_wire()
        if next_step:
            wire["advice"] = next_step
        click.echo(json.dumps({"error": wire}, default=str))
    else:
        first, *rest = error.message.splitlines() or [error.code]
        path = error.facts.get("path")
        if isinstance(error, FileError) and path and str(path) not in error.message:
            first = f"{first}: {path}"
        click.echo(f"sandfleet: {printable(first)}", err=True)
        for line in rest:
            click.echo(f"  {printable(line)}", err=True)
        if next_step:
            click.echo(f"  {next_step}", err=True)
    return exit_code(error)
