"""``sandfleet top``: the fleet at this moment, again and again."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from sandfleet.backends import shown_backend
from sandfleet.cli.context import Cli, fleet_command, pass_cli, signals_as_interrupt
from sandfleet.cli.output import age, plain_lines, printable
from sandfleet.cli.top_facts import SORTS, Rates, read_fleet, snapshot
from sandfleet.errors import StoreUnavailable
from sandfleet.store import Store

__all__ = ["COMMANDS"]

#: A node tells its load with each renewal of its lease, about once a second.
_RATE_S = 2.5
_LOOK_S = 0.2
_NODE_COLUMNS = ("node", "state", "used", "live", "warm", "blank", "free", "run", "wait", "ops/s", "load", "backends")
_OP_COLUMNS = ("for", "node", "state", "what")
#: Lines that are neither a node nor an operation: head, queues, two blanks, two headings, "… and more" twice.
_OTHER_LINES = 8
_Draw = Callable[[Mapping[str, Any] | None, str], None]


@fleet_command("top", short_help="Watch the fleet: nodes, operations, queues.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, metavar="S")
@click.option("--sort", type=click.Choice(sorted(SORTS)), default="node", show_default=True, help="Order of the nodes.")
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Operations to show at most.")
@click.option("--once", is_flag=True, help="Print it once. It takes a second or two, in which rates are measured.")
@pass_cli
def top(cli: Cli, interval_s: float, sort: str, limit: int, once: bool) -> None:
    """Watch the fleet: how full and busy each node is, what has been running longest, who waits.

    On a terminal it is drawn anew every --interval seconds; q or Ctrl-C ends it. Piped, or with --json, it is told
    once. `used` counts places taken, `blank` those of sandboxes started ahead, `run` and `wait` operations on the
    node; `load` is the machine's.

    \b
    Examples:
      sandfleet top
      sandfleet top --sort ops --interval 2
      sandfleet top --once --json
    """
    with cli.store() as store:
        if once or cli.json or not sys.stdout.isatty():
            document = _measured(store, sort=sort, limit=limit)
            cli.show(document, lambda: click.echo("\n".join(_plain(document, 200))))
            return
        store.now_ms()  # a Redis that is away is told in the ordinary way
        with signals_as_interrupt(), _screen() as draw:
            try:
                _watch(store, draw, interval_s=interval_s, sort=sort, limit=limit)
            except KeyboardInterrupt:
                return


def _measured(store: Store, *, sort: str, limit: int) -> dict[str, Any]:
    """One snapshot with rates: as soon as every live node has told its load twice, or after a while without."""
    rates, until = Rates(), time.monotonic() + _RATE_S
    while True:
        now = read_fleet(store, limit)
        known = rates.learn(now.nodes)
        unknown = any(known[node.node_id] is None for node in now.nodes if node.alive)
        if not unknown or time.monotonic() > until:
            return snapshot(now, known, sort=sort)
        time.sleep(_LOOK_S)


def _watch(store: Store, draw: _Draw, *, interval_s: float, sort: str, limit: int) -> None:
    """Draw until q is pressed. A Redis that goes away is told, and asked again."""
    rates = Rates()
    while True:
        try:
            now = read_fleet(store, limit)
            draw(snapshot(now, rates.learn(now.nodes), sort=sort), "")
        except StoreUnavailable as exc:
            draw(None, f"Redis does not answer: {exc.message}")
        if _pressed(interval_s) in ("q", "Q"):
            return


# --- the terminal ------------------------------------------------------------------------------


@contextmanager
def _screen() -> Iterator[_Draw]:
    """A screen of its own; the terminal is as before when it ends, however it ends."""
    try:
        from rich.console import Console  # noqa: PLC0415  (an extra)
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        with _keys():
            yield _scrolling
        return
    console = Console(highlight=False)
    shown: Mapping[str, Any] | None = None
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(document: Mapping[str, Any] | None, trouble: str) -> None:
            nonlocal shown
            shown = document or shown
            width, height = console.size
            lines = _plain(shown, width, height - 1 - bool(trouble)) if shown is not None else []
            drawn = Text(no_wrap=True, overflow="ellipsis")
            for number, line in enumerate([printable(trouble)[:width], *lines] if trouble else lines):
                drawn.append(line + "\n", style="bold red" if trouble and not number else _style(line))
            live.update(drawn, refresh=True)

        yield draw


def _style(line: str) -> str:
    """Headings stand out, and so does a node that is not well."""
    words = line.split()
    if line.startswith(("NODE ", "FOR ", "sandfleet ")):
        return "bold"
    if len(words) > 1 and words[1] in ("dead", "cordoned", "draining"):
        return "red" if words[1] == "dead" else "yellow"
    return ""


def _scrolling(document: Mapping[str, Any] | None, trouble: str) -> None:
    """Without rich: one below the other."""
    click.echo(printable(trouble) if document is None else "\n".join([*_plain(document, 80), ""]))


@contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(within_s: float) -> str:
    """The key pressed within that time; empty when there was none."""
    if not sys.stdin.isatty():
        time.sleep(within_s)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return os.read(sys.stdin.fileno(), 1).decode("utf-8", "replace") if ready else ""


# --- the text ----------------------------------------------------------------------------------


def _plain(document: Mapping[str, Any], width: int, height: int = 1000) -> list[str]:
    """The snapshot as lines of at most ``width`` columns, and of at most ``height`` lines where that is possible."""
    nodes, ops = document["nodes"], document["ops"]
    room = max(4, height - _OTHER_LINES)
    node_rows = min(len(nodes), max(room - min(len(ops), room // 2), 1))
    lines = [*_head(document), ""]
    if nodes:
        lines += plain_lines(_NODE_COLUMNS, [_node_cells(node) for node in nodes[:node_rows]])
    else:
        lines.append("No nodes. Start one: sandfleet worker   (or a whole fleet: sandfleet up)")
    if node_rows < len(nodes):
        lines.append(f"… and {len(nodes) - node_rows} more nodes")
    lines.append("")
    op_rows = max(1, room - node_rows)
    if ops:
        lines += plain_lines(_OP_COLUMNS, [_op_cells(op) for op in ops[:op_rows]])
    else:
        lines.append("Nothing waits or runs.")
    if op_rows < len(ops):
        lines.append(f"… and {len(ops) - op_rows} more operations")
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def _head(document: Mapping[str, Any]) -> list[str]:
    totals = document["totals"]
    clock = datetime.fromtimestamp(document["at_ms"] / 1000).astimezone().strftime("%H:%M:%S")
    rate = "-" if totals["ops_per_s"] is None else f"{totals['ops_per_s']:.1f}"
    first = (
        f"sandfleet {clock} · {totals['alive']}/{totals['nodes']} nodes · {totals['used']}/{totals['replicas']} places"
        f" · {document['line_length']} in line · {rate} ops/s"
    )
    waiting = [f"{name.removeprefix('sandfleet.')} {depth}" for name, depth in document["queues"].items() if depth]
    return [first, "queues: " + (" · ".join(waiting) or "empty")]


def _node_cells(node: Mapping[str, Any]) -> list[str]:
    rate = node["ops_per_s"]
    name = str(node["node_id"])
    cells = [
        name if len(name) <= 20 else name[:19] + "…",
        node["state"],
        f"{node['used']}/{node['replicas']}",
        node["live"],
        node["warm"],
        node["blank"],
        node["free"],
        node["running"],
        node["waiting"],
        "-" if rate is None else f"{rate:.1f}",
        "-" if node["load_1m"] is None else f"{node['load_1m']:.1f}/{node['cpus']}",
        ",".join(map(shown_backend, node["backends"])),
    ]
    return [printable(cell) for cell in cells]


def _op_cells(op: Mapping[str, Any]) -> list[str]:
    return [printable(cell) for cell in (age(op["age_s"]), op["node_id"], op["state"], op["describe"])]


COMMANDS = (top,)
