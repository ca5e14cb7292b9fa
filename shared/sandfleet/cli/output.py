"""How the command line speaks: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TextIO

import click

__all__ = ["age", "as_json", "note", "printable", "show", "show_size", "table"]

_STYLES = {
    "ok": "green", "ready": "green", "live": "green", "✓": "green",
    "warn": "yellow", "warm": "cyan", "creating": "yellow", "stopping": "yellow", "cordoned": "yellow",
    "draining": "yellow", "away": "yellow", "starting": "yellow", "claimed": "green", "running": "green",
    "fail": "bold red", "dead": "bold red", "lost": "bold red", "failed": "bold red", "gone": "dim", "✗": "bold red",
}  # fmt: skip


def show(document: Mapping[str, Any], text: Callable[[], None], *, as_json_document: bool) -> None:
    """Print ``document`` as JSON, or let ``text`` print what a person wants to read."""
    if as_json_document:
        click.echo(json.dumps(document, indent=2, default=as_json, ensure_ascii=False))
    else:
        text()


def as_json(value: object) -> Any:
    """The JSON form of what the API gives: dataclasses as objects, the rest by its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str, out: TextIO | None = None) -> None:
    """Print rows under their columns: by rich on a terminal that has it, else aligned plain text.

    Args:
        empty: Said instead of a table without rows: what would bring one.
        out: Where to; standard output by default.
    """
    out = out or sys.stdout
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        click.echo(empty, file=out)
    elif not (out.isatty() and _rich_table(columns, cells, out)):
        for line in plain_lines(columns, cells):
            click.echo(line, file=out)


def plain_lines(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces apart, nothing after the last."""
    all_rows = [[name.upper() for name in columns], *cells]
    widths = [max(len(row[n]) for row in all_rows) for n in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], out: TextIO) -> bool:
    try:
        from rich.console import Console  # noqa: PLC0415  (an extra)
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        return False
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        drawn.add_column(name, overflow="fold")
    for row in cells:
        # `Text`, not markup: what a sandbox's owner typed must stay what it is.
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console(file=out).print(drawn)
    return True


def printable(value: object) -> str:
    """One line of text that cannot move the cursor or colour the terminal, whoever wrote it."""
    if value is None or value == "":
        return "-"
    text = str(value)
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def age(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 m 20 s``, ``2 h 5 m``, ``4 d 1 h``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def show_size(size_bytes: float) -> str:
    """``512 B``, ``1.5 KiB``, ``80 MiB``, ``2.0 GiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            break
        size_bytes, unit = size_bytes / 1024, larger
    return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 10 else f"{size_bytes:.1f} {unit}"


def note(text: str) -> None:
    """Progress and advice: on stderr, so that piped output stays what was asked for."""
    click.echo(text, err=True)
