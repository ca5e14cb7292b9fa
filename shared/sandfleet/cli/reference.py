"""``docs/cli.md``, generated from the commands themselves: ``python -m sandfleet.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from sandfleet.cli import cli
from sandfleet.cli.context import global_options
from sandfleet.cli.sections import by_section

__all__ = ["commands", "examples_of", "page"]

_HEAD = """# The command line

Generated from the commands themselves by `make docs`; `sandfleet COMMAND --help` shows the same.
"""
_EXITS = """## Exit codes

| code | means |
|---|---|
| 0 | done |
| 1 | a check of `doctor`, or a step of `demo`, went wrong |
| 2 | the call or the configuration is wrong; the message names what |
| 3 | the fleet is away or full; repeat later |
| 4 | the sandbox, file or operation is not there, or failed |
| 130 | Ctrl-C |

`exec` exits with the code of its command: 124 is its timeout, 128+N the end by signal N.
"""
_GLOBAL = """## Options of every command

They may stand before or after the command's name.
"""


def commands(
    group: click.Group = cli, path: tuple[str, ...] = ("sandfleet",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its full name, groups before what is in them."""
    listed = by_section(sorted(group.commands)) if group is cli else {"": sorted(group.commands)}
    for names in listed.values():
        for name in names:
            command = group.commands[name]
            yield (*path, name), command
            if isinstance(command, click.Group):
                yield from commands(command, (*path, name))


def examples_of(command: click.Command) -> list[str]:
    """The lines below ``Examples:`` in a command's help."""
    found = re.search(r"\n\s*\x08\n\s*Examples:\n((?:.+\n?)+)", _help(command) + "\n")
    return [line.strip() for line in found[1].splitlines()] if found else []


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _overview(), _GLOBAL, _options(global_options()), _EXITS]
    parts += [_section(path, command) for path, command in commands()]
    return "\n".join(parts)


def _overview() -> str:
    lines = []
    for title, names in by_section(sorted(cli.commands)).items():
        lines.append(f"**{title}**\n")
        for name in names:
            lines.append(f"- [`{name}`](#sandfleet-{name}): {cli.commands[name].get_short_help_str(200)}")
        lines.append("")
    return "\n".join(lines)


def _section(path: tuple[str, ...], command: click.Command) -> str:
    name = " ".join(path)
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * len(path)} {name}\n", f"```\n{usage}\n```\n", *_paragraphs(command)]
    own = {param.name for param in global_options()}
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in own]
    if options:
        parts.append(_options(options))
    if lines := examples_of(command):
        parts.append("```sh\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def _paragraphs(command: click.Command) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", _help(command)):
        if not paragraph.startswith("\x08"):
            yield _escaped(" ".join(paragraph.split())) + "\n"
        elif not re.match(r"\x08\n\s*Examples:\n", paragraph):
            yield "```\n" + inspect.cleandoc(paragraph.removeprefix("\x08\n")) + "\n```\n"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _options(options: list[click.Option]) -> str:
    rows = ["| option | |", "|---|---|"]
    context = click.Context(click.Command("sandfleet"))
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            names, told = (" ".join(part.split()).replace("|", "\\|") for part in record)
            rows.append(f"| `{names}` | {_escaped(told)} |")
    return "\n".join([*rows, ""])


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


if __name__ == "__main__":
    click.echo(page(), nl=False)
