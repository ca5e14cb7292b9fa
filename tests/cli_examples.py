"""Reading examples of the command line as they stand in its help and in the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from sandfleet.cli import cli
from sandfleet.cli.context import Cli

__all__ = ["parse", "sandfleet_calls"]


def sandfleet_calls(line: str) -> Iterator[list[str]]:
    """The arguments of each ``sandfleet …`` in a line of shell, as far as a person would write one."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();|&<>"):
            if words and words[0] == "sandfleet":
                yield words[1:]
            words = []
        elif words or not re.fullmatch(r"[A-Z_]+=.*|\$", word):  # NAME=value in front of a command
            words.append(word)


def parse(arguments: list[str]) -> click.Context:
    """Everything `main` does with them, but for the command itself."""
    context = cli.make_context("sandfleet", list(arguments), obj=Cli())
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context
