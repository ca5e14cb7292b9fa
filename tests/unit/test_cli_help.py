"""Help that teaches: every command has a summary, a paragraph, and examples that are right."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from sandfleet.cli import cli, main
from sandfleet.cli.reference import commands, examples_of, page
from sandfleet.cli.sections import SECTIONS
from tests.cli_examples import parse, sandfleet_calls

ROOT = Path(__file__).parents[2]
COMMANDS = {" ".join(path): command for path, command in commands()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_a_paragraph_and_examples_that_parse(name: str) -> None:
    command = COMMANDS[name]
    summary = command.get_short_help_str(200)
    assert summary.endswith(".")
    assert len(summary) <= 60, "it would not fit beside the command's name"
    if isinstance(command, click.Group):
        return
    first = (command.help or "").split("\n\n")[0]
    assert len(first.split()) >= 4
    examples = examples_of(command)
    assert examples, "no section `Examples:` in its help"
    calls = [call for line in examples for call in sandfleet_calls(line)]
    assert any(" ".join(["sandfleet", *call]).startswith(name) for call in calls), "no example of itself"
    for call in calls:
        parse(call)


def test_the_examples_of_the_front_page_parse() -> None:
    calls = [call for line in examples_of(cli) for call in sandfleet_calls(line)]
    assert len(calls) >= 5
    for call in calls:
        parse(call)


def test_a_wrong_example_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["nodes", "--colour"])
    with pytest.raises(click.UsageError):
        parse(["nonsense"])
    assert list(sandfleet_calls("cat x | sandfleet exec -t a -- 'cat > x'; sandfleet ls  # comment")) == [
        ["exec", "-t", "a", "--", "cat > x"],
        ["ls"],
    ]


def test_every_command_stands_under_a_heading() -> None:
    listed = {name for names in SECTIONS.values() for name in names}
    assert set(cli.commands) <= listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    silent = [
        param.name
        for param in COMMANDS[name].params
        if isinstance(param, click.Option) and not param.help and not param.show_default
    ]
    assert not silent


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_narrow_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split()[1:], "--help"]) == 0
    told = capsys.readouterr().out
    prose = [line for line in told.splitlines() if not re.match(r"\s+(sandfleet|cat|eval) ", line)]
    assert [line for line in prose if len(line) > 80] == []


def test_the_reference_page_is_what_the_commands_say_now() -> None:
    kept = (ROOT / "docs" / "cli.md").read_text()
    assert kept == page(), "docs/cli.md is stale; `make docs` writes it anew"
    assert all(f"# {name}\n" in kept for name in COMMANDS)
