"""The list of commands as ``sandfleet --help`` tells it: by what a person wants to do."""

from __future__ import annotations

import click

__all__ = ["SECTIONS", "Sections", "by_section"]

SECTIONS: dict[str, tuple[str, ...]] = {
    "Run a fleet": ("demo", "up", "scheduler", "worker", "flower"),
    "Use sandboxes": ("exec", "shell", "cp"),
    "Long commands": ("jobs", "logs", "kill", "ps"),
    "Saved data": ("snapshot", "checkpoints", "restore", "fork"),
    "Look": ("ls", "nodes", "ops", "inspect", "story", "top"),
    "Intervene": ("cancel", "release", "destroy", "cordon", "uncordon", "drain", "gc"),
    "Set up": ("config", "doctor", "completion"),
}
_REST = "Further"


def by_section(names: list[str]) -> dict[str, list[str]]:
    """The command names under their headings; what has none comes last."""
    found = {title: [name for name in wanted if name in names] for title, wanted in SECTIONS.items()}
    known = {name for wanted in SECTIONS.values() for name in wanted}
    found[_REST] = [name for name in names if name not in known]
    return {title: listed for title, listed in found.items() if listed}


class Sections(click.Group):
    """A group whose help lists its commands under headings."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands) + 2
        for title, names in by_section(self.list_commands(ctx)).items():
            with formatter.section(title):
                # One width for all, so that the summaries stand in one column.
                rows = [
                    (name.ljust(width - 2), self.commands[name].get_short_help_str(formatter.width)) for name in names
                ]
                formatter.write_dl(rows)
