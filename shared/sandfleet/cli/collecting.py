"""``gc``: what nobody will use again, and getting rid of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import table
from sandfleet.cli.retaining import NodeReport, ask_nodes
from sandfleet.config import Settings
from sandfleet.errors import ConfigError, SandfleetError
from sandfleet.leftover_dirs import data_id_of, remove_run_dir, run_dirs
from sandfleet.model import NodeState, NodeView, SandboxInfo
from sandfleet.store import Store
from sandfleet.store.collecting import Leftover

__all__ = ["COMMANDS", "candidates", "seconds"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SILENT_S = 3600.0
_PAGE = 500
_MARKS = re.compile(r"(?:agents|busy):([0-9a-f]+)")
_CHUNK = re.compile(r"blob:([^:]+):([0-9]+)")
_OF_NODE = re.compile(r"(?:node|warm|stopping):(.+)")
_WHY = {
    "lost": "died; its record is kept ten minutes so that callers are told",
    "node": "gone; its record is kept a day",
    "marks": "who was in a sandbox that has no record",
    "chunk": "a piece of a blob that has no head",
}


@dataclass
class Item:
    """One thing that can be collected, and how; what lies on a ``node`` is removed there. ``done`` and ``failed`` say
    what came of it."""

    kind: str
    id: str
    why: str
    remove: Callable[[], bool] | None = field(default=None, repr=False)
    size_bytes: int | None = None
    node: str = ""
    done: bool = False
    failed: str = ""

    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        facts = {"kind": self.kind, "id": self.id, "why": self.why, "size_bytes": self.size_bytes, "done": self.done}
        where = {"node": self.node} if self.node else {}
        return {**facts, **where, **({"failed": self.failed} if self.failed else {})}


@fleet_command("gc", short_help="Find what nobody will use again; --yes removes it.")
@click.option("--yes", is_flag=True, help="Remove what was found. Without it nothing is touched.")
@click.option("--thread-data", "with_data", is_flag=True, help="Also data of threads without a sandbox, on all nodes.")
@click.option("--checkpoints", "with_checkpoints", is_flag=True, help="Also checkpoints, from the nodes' storage.")
@click.option("--older-than", metavar="AGE", help="Only what nothing has touched for so long: 12h, 30d.  [nodes: 1h]")
@click.option("--keep-threads", type=click.IntRange(min=0), help="Of each user, keep so many threads' data.")
@click.option("--keep-checkpoints", type=click.IntRange(min=0), help="Of each thread, keep so many checkpoints.  [1]")
@click.option("--user", "user_id", help="Only this user's data and checkpoints.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, help="Wait so long for nodes, s.")
@click.option("--data-root", type=click.Path(file_okay=False, path_type=Path), help="That of this machine's nodes.")
@click.option("--run-root", type=click.Path(file_okay=False, path_type=Path), help="Likewise: where sockets lie.")
@pass_cli
def collect(cli: Cli, /, yes: bool, older_than: str | None, timeout_s: float, **given: Any) -> int:
    """Find what nobody will use again: records of lost sandboxes and of nodes that are gone, what dead nodes left
    unanswered, pieces without owner; on data roots what dead nodes wrote down; on this machine their run directories.

    Nothing that is in use is touched: each thing is judged once more in the step that removes it. A fleet needs no gc
    to be in order, but for data: that of threads and their checkpoints stays until somebody says how long.

    --thread-data also removes files of people: those of threads that have no sandbox, by --older-than and
    --keep-threads. What one of them keeps, stays. One node of each data root looks, and removes.

    \b
    Examples:
      sandfleet gc
      sandfleet gc --yes
      sandfleet gc --thread-data --older-than 30d
      sandfleet gc --thread-data --keep-threads 20 --older-than 7d --yes
      sandfleet gc --checkpoints --older-than 90d --keep-checkpoints 1
    """
    older_than_s = seconds(older_than) if older_than is not None else None
    rules = _rules(given, older_than_s, remove=yes)
    settings = cli.settings(data_root=given["data_root"], run_root=given["run_root"])
    with cli.store() as store:
        items = [*_in_store(store, settings.prefix, _SILENT_S if older_than_s is None else older_than_s)]
        if _is_ours(settings, store.nodes()):
            items += _run_dirs(settings)
        if yes:
            _remove(items)
        reports = list(ask_nodes(settings, store, rules, timeout_s=timeout_s))
    for report in reports:
        items += _of_node(report)
    done = sum(item.done for item in items)
    document = {
        "found": [item.document() for item in items],
        "removed": done,
        "nodes": [_summary(report) for report in reports],
    }
    cli.show(document, lambda: _show(items, reports, removed=yes))
    return 1 if any(item.failed for item in items) or any(report.error for report in reports) else 0


def _rules(given: Mapping[str, Any], older_than_s: float | None, *, remove: bool) -> dict[str, Any]:
    """What nodes are asked for.

    Raises:
        click.UsageError: It would take the data or the checkpoints of everybody.
    """
    keep_threads, keep_checkpoints = given["keep_threads"], given["keep_checkpoints"]
    if given["with_data"] and older_than_s is None and keep_threads is None:
        raise click.UsageError(
            "--thread-data removes people's files; say how old they must be (--older-than 30d), how many threads of "
            "each user to keep (--keep-threads 20), or both"
        )
    if given["with_checkpoints"] and older_than_s is None and keep_checkpoints is None:
        raise click.UsageError("--checkpoints: say --older-than 90d, --keep-checkpoints 1, or both")
    return {
        "older_than_s": older_than_s,
        "keep_threads": keep_threads,
        "user_id": given["user_id"],
        "thread_data": given["with_data"],
        "checkpoints": given["with_checkpoints"],
        "keep_checkpoints": 1 if keep_checkpoints is None else keep_checkpoints,
        "remove": remove,
    }


def seconds(text: str) -> float:
    """An age such as ``90``, ``15m``, ``12h`` or ``30d``, in seconds.

    Raises:
        click.BadParameter: It is none.
    """
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text.strip().lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no age; write 12h or 30d", param_hint="--older-than")
    return float(int(found[1]) * _UNITS[found[2] or "s"])


def candidates(
    keys: Iterable[str], prefix: str, sandboxes: Sequence[SandboxInfo], nodes: Sequence[NodeView]
) -> list[Leftover]:
    """What in the store may be nobody's, by its name alone; the store judges each."""
    names = {key.removeprefix(prefix) for key in keys}
    known = {info.sandbox_id for info in sandboxes}
    serving = {node.node_id for node in nodes if node.alive or node.state is not NodeState.GONE}
    found = {Leftover("lost", info.sandbox_id) for info in sandboxes if info.state == "lost"}
    found |= {Leftover("node", node.node_id) for node in nodes if node.node_id not in serving}
    for name in names:
        if (marks := _MARKS.fullmatch(name)) and marks[1] not in known:
            found.add(Leftover("marks", marks[1]))
        elif (chunk := _CHUNK.fullmatch(name)) and f"blob:{chunk[1]}" not in names:
            found.add(Leftover("chunk", f"{chunk[1]}:{chunk[2]}"))
        elif (node := _OF_NODE.fullmatch(name)) and node[1] not in serving:
            found.add(Leftover("node", node[1]))
    return sorted(found, key=lambda leftover: (leftover.kind, leftover.id))


# --- what there is -----------------------------------------------------------------------------


def _in_store(store: Store, prefix: str, older_than_s: float) -> Iterator[Item]:
    # The names first: what comes into being after that is not among them.
    keys = store.keys()
    sandboxes, nodes = store.sandboxes(), store.nodes()
    for node in nodes:
        if not node.alive and (node.state is not NodeState.GONE or node.inflight or node.places):
            why = f"no scheduler answered for it: {node.inflight} operations, {node.places} sandboxes"
            yield Item("dead node", node.node_id, why, _close(store, node.node_id))
    guesses = candidates(keys, prefix, sandboxes, nodes)
    for start in range(0, len(guesses), _PAGE):
        page = guesses[start : start + _PAGE]
        for leftover in store.collect(page, remove=False, older_than_s=older_than_s):
            yield Item(leftover.kind, leftover.id, _WHY[leftover.kind], _drop(store, leftover, older_than_s))


def _close(store: Store, node_id: str) -> Callable[[], bool]:
    def close() -> bool:
        while store.close_incarnation(node_id, None, reason=f"node {node_id} died").more:
            pass
        return not any(node.node_id == node_id and node.alive for node in store.nodes())

    return close


def _drop(store: Store, leftover: Leftover, older_than_s: float) -> Callable[[], bool]:
    return lambda: bool(store.collect([leftover], remove=True, older_than_s=older_than_s))


def _is_ours(settings: Settings, nodes: Sequence[NodeView]) -> bool:
    """Whether this machine's data root is one of this fleet's."""
    try:
        data_id = data_id_of(settings.data_root)
    except ConfigError:
        return False
    return any(node.data_id == data_id for node in nodes)


def _run_dirs(settings: Settings) -> Iterator[Item]:
    data_root = settings.data_root
    for found in run_dirs(settings.run_root, data_root, data_id_of(data_root), now_s=time.time()):
        yield Item(
            "run directory",
            str(found.path),
            "its node does not run",
            lambda found=found: remove_run_dir(found, data_root),  # type: ignore[misc]
            found.size_bytes,
        )


def _of_node(report: NodeReport) -> Iterator[Item]:
    for row in report.found:
        facts = {name: row.get(name) for name in ("size_bytes", "node")}
        yield Item(row["kind"], row["id"], row["why"], done=row["done"], failed=row.get("failed", ""), **facts)  # type: ignore[arg-type]


def _summary(report: NodeReport) -> dict[str, Any]:
    counts = {name: report.document.get(name, 0) for name in ("count", "size_bytes", "removed", "removed_bytes")}
    return {"node": report.node_id, **counts, **({"error": report.error.to_wire()} if report.error else {})}


# --- doing it ----------------------------------------------------------------------------------


def _remove(items: Sequence[Item]) -> None:
    for item in items:
        try:
            item.done = item.remove is not None and item.remove()
        except SandfleetError as exc:
            item.failed = exc.message


def _show(items: Sequence[Item], reports: Sequence[NodeReport], *, removed: bool) -> None:
    columns: tuple[str, ...] = ("kind", "id", "node", "size", "why", *(("outcome",) if removed else ()))
    rows = [
        (item.kind, item.id, item.node, _size(item.size_bytes), item.failed or item.why, _outcome(item))[: len(columns)]
        for item in items
    ]
    table(columns, rows, empty="Nothing to collect.")
    for report in reports:
        told = report.document
        if report.error is not None:
            click.echo(f"{report.node_id}: {report.error.message}", err=True)
        elif told.get("count"):
            left_out = told["count"] - len(report.found)
            more = f" ({left_out} of them not shown)" if left_out else ""
            freed = f", {told['removed']} removed, {_size(told['removed_bytes'])}" if removed else ""
            click.echo(f"{report.node_id}: {told['count']} found{more}, {_size(told['size_bytes'])}{freed}")
    if items and not removed:
        click.echo("Nothing was removed. `sandfleet gc --yes` does it.")


def _outcome(item: Item) -> str:
    return "removed" if item.done else "failed" if item.failed else "in use again"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes} {unit}"
        size_bytes //= 1024
    return f"{size_bytes} GiB"


COMMANDS = (collect,)
