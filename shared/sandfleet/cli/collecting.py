"""``gc``: what nobody will use again, and getting rid of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.leftover_files import (
    ThreadData,
    data_id_of,
    remove_run_dir,
    remove_thread_data,
    run_dirs,
    thread_data,
)
from sandfleet.cli.output import age, table
from sandfleet.config import Settings
from sandfleet.errors import ConfigError, SandfleetError
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
    """One thing that can be collected, and how. ``done`` and ``failed`` say what came of it."""

    kind: str
    id: str
    why: str
    remove: Callable[[], bool] = field(repr=False)
    size_bytes: int | None = None
    done: bool = False
    failed: str = ""

    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        facts = {"kind": self.kind, "id": self.id, "why": self.why, "size_bytes": self.size_bytes, "done": self.done}
        return {**facts, "failed": self.failed} if self.failed else facts


@fleet_command("gc", short_help="Find what nobody will use again; --yes removes it.")
@click.option("--yes", is_flag=True, help="Remove what was found. Without it nothing is touched.")
@click.option(
    "--thread-data", "with_data", is_flag=True, help="Also data of threads without a sandbox, on this machine."
)
@click.option("--older-than", metavar="AGE", help="Only what nothing has touched for so long: 12h, 30d.  [nodes: 1h]")
@click.option("--data-root", type=click.Path(file_okay=False, path_type=Path), help="That of this machine's nodes.")
@click.option("--run-root", type=click.Path(file_okay=False, path_type=Path), help="Likewise: where sockets lie.")
@pass_cli
def collect(cli: Cli, /, yes: bool, with_data: bool, older_than: str | None, **roots: Path | None) -> int:
    """Find what nobody will use again: records of lost sandboxes and of nodes that are gone, what dead nodes left
    unanswered, pieces without owner; on a node's machine also the run directories of nodes that ended.

    Nothing that is in use is touched: each thing is judged once more in the step that removes it. All of it but
    directories goes by itself, later; a fleet needs no gc to be in order.

    --thread-data also removes files of people: the data on this machine's data root of threads that have no sandbox,
    and in which nothing changed for --older-than. It must be run as the nodes' user.

    \b
    Examples:
      sandfleet gc
      sandfleet gc --yes
      sandfleet gc --thread-data --older-than 30d
    """
    if with_data and older_than is None:
        raise click.UsageError("--thread-data removes people's files; say how old they must be: --older-than 30d")
    older_than_s = seconds(older_than) if older_than is not None else _SILENT_S
    settings = cli.settings(**roots)
    with cli.store() as store:
        items = [*_in_store(store, settings.prefix, older_than_s)]
        nodes = store.nodes()
        if _is_ours(settings, nodes):
            items += _run_dirs(settings)
        if with_data:
            items += _thread_data(settings, store, nodes, older_than_s)
        if yes:
            _remove(items)
    left = [item for item in items if not item.done]
    document = {"found": [item.document() for item in items], "removed": len(items) - len(left)}
    cli.show(document, lambda: _show(items, removed=yes))
    return 1 if any(item.failed for item in items) else 0


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
    for found in run_dirs(settings.run_root, data_root, data_id_of(data_root)):
        yield Item(
            "run directory",
            str(found.path),
            "its node does not run",
            lambda found=found: remove_run_dir(found, data_root),  # type: ignore[misc]
            found.size_bytes,
        )


def _thread_data(settings: Settings, store: Store, nodes: Sequence[NodeView], older_than_s: float) -> Iterator[Item]:
    data_root = settings.data_root
    data_id_of(data_root)
    if not _is_ours(settings, nodes):
        raise ConfigError(
            f"no node of this fleet has served {data_root} within a day, so nobody can tell whose data it is; "
            "start its node first",
            key="data_root",
        )
    for found in thread_data(data_root):
        in_use = _has_sandbox(store, found)
        if found.idle_s >= older_than_s and not in_use():
            whose = found.thread_id if found.user_id is None else f"{found.user_id}/{found.thread_id}"
            yield Item(
                "thread data",
                whose,
                f"no sandbox, nothing changed for {age(found.idle_s)}",
                lambda found=found, in_use=in_use: remove_thread_data(found, data_root, in_use=in_use),  # type: ignore[misc]
                found.size_bytes,
            )


def _has_sandbox(store: Store, data: ThreadData) -> Callable[[], bool]:
    def look() -> bool:
        found = store.sandboxes(thread_id=data.thread_id, user_id=data.user_id)
        # Without a user the filter lets every user's thread of that name through.
        return any(info.user_id == data.user_id and info.state != "lost" for info in found)

    return look


# --- doing it ----------------------------------------------------------------------------------


def _remove(items: Sequence[Item]) -> None:
    for item in items:
        try:
            item.done = item.remove()
        except SandfleetError as exc:
            item.failed = exc.message


def _show(items: Sequence[Item], *, removed: bool) -> None:
    columns: tuple[str, ...] = ("kind", "id", "size", "why", *(("outcome",) if removed else ()))
    rows = [
        (item.kind, item.id, _size(item.size_bytes), item.failed or item.why, _outcome(item))[: len(columns)]
        for item in items
    ]
    table(columns, rows, empty="Nothing to collect.")
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
