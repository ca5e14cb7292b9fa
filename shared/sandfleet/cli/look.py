"""Looking at a fleet: ``ls``, ``nodes``, ``ops``, ``story``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from sandfleet.backends import shown_backend
from sandfleet.cli.completing import complete_nodes, complete_stories, complete_threads
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import age, printable, table
from sandfleet.errors import SandboxNotFound
from sandfleet.fleet_facts import shown_state
from sandfleet.model import NodeView, SandboxInfo
from sandfleet.store.base import OpView, Store

__all__ = ["COMMANDS", "op_document", "story_of"]


@fleet_command("ls", short_help="List the sandboxes.")
@click.option("--thread", "-t", metavar="T", help="Only this thread's.", shell_complete=complete_threads)
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="Only this user's.")
@click.option("--node", metavar="ID", help="Only on this node.", shell_complete=complete_nodes)
@pass_cli
def ls(cli: Cli, thread: str | None, user: str | None, node: str | None) -> None:
    """List the sandboxes: whose they are, where they live, what state they are in.

    A warm one runs with nobody in it, ready for its thread. A lost one died by itself or with its node. AGENTS counts
    the processes that hold it, OPS what waits or runs in it.

    \b
    Examples:
      sandfleet ls
      sandfleet ls --user 42
      sandfleet ls --node node-1 --json
    """
    with cli.store() as store:
        found = store.sandboxes(thread_id=thread, user_id=user)
        # Asked for by node, the store gives what takes a place there; the lost are worth seeing too.
        found = [info for info in found if node is None or info.node_id == node]
        now_s = store.now_ms() / 1000
    all_of_them = thread is None and user is None and node is None
    cli.show({"sandboxes": [asdict(info) for info in found]}, lambda: _show_sandboxes(found, now_s, all_of_them))


@fleet_command("nodes", short_help="List the nodes.")
@pass_cli
def nodes(cli: Cli) -> None:
    """List the nodes: whether they live, how full they are, what they offer, and why one is cordoned.

    SANDBOXES are the places taken, of those the node has: WARM ones run with nobody in them, BLANK ones were started
    ahead and belong to nobody yet. Threads that wait for a place are counted below.

    \b
    Examples:
      sandfleet nodes
      sandfleet nodes --json
    """
    with cli.store() as store:
        found, line, now_s = store.nodes(), store.line_length(), store.now_ms() / 1000
    cli.show({"nodes": [asdict(node) for node in found], "line": line}, lambda: _show_nodes(found, line, now_s))


@fleet_command("ops", short_help="List the operations that wait or run.")
@click.option("--node", metavar="ID", help="Only on this node.", shell_complete=complete_nodes)
@click.option("--limit", type=click.IntRange(1, 10_000), default=200, show_default=True)
@pass_cli
def ops(cli: Cli, node: str | None, limit: int) -> None:
    """List the operations that wait or run, oldest first. `sandfleet cancel OP` ends one.

    \b
    Examples:
      sandfleet ops
      sandfleet ops --node node-1 --limit 20
    """
    with cli.store() as store:
        found, now_ms = store.ops(node_id=node, limit=limit), store.now_ms()
    cli.show({"ops": [op_document(view) for view in found]}, lambda: _show_ops(found, now_ms))


@fleet_command("story", short_help="Tell what happened to a sandbox, node or op.")
@click.argument("key", metavar="ID", shell_complete=complete_stories)
@pass_cli
def story(cli: Cli, key: str) -> None:
    """Tell what happened to a sandbox, a node or an operation, as a time line. Stories are kept a day.

    \b
    Examples:
      sandfleet story 3f9a1c22
      sandfleet story node-1
    """
    with cli.store() as store:
        told = story_of(store, key)
    cli.show(told, lambda: _show_story(told))


# --- tables ------------------------------------------------------------------------------------


def _show_sandboxes(found: list[SandboxInfo], now_s: float, all_of_them: bool) -> None:
    rows = [
        (
            info.sandbox_id,
            info.thread_id,
            info.user_id,
            info.state,
            info.node_id,
            shown_backend(info.backend),
            age(now_s - info.created_at),
            age(now_s - info.used_at),
            info.agents,
            info.ops,
        )
        for info in found
    ]
    columns = ("sandbox", "thread", "user", "state", "node", "backend", "age", "idle", "agents", "ops")
    none = "No sandboxes. Make one: sandfleet exec --thread alice -- uname -a"
    table(columns, rows, empty=none if all_of_them else "No such sandboxes; `sandfleet ls` lists all there are.")


def _show_nodes(found: list[NodeView], line: int, now_s: float) -> None:
    rows: list[tuple[object, ...]] = [
        (
            node.node_id,
            shown_state(node),
            f"{node.places}/{node.replicas}",
            node.warm,
            sum(node.blanks.values()),
            node.inflight,
            ",".join(map(shown_backend, node.backends)),
            ",".join(f"{k}={v}" for k, v in node.labels.items()),
            node.host,
            node.pid,
            age(now_s - node.started_at),
        )
        for node in found
    ]
    columns: tuple[str, ...] = (
        "node", "state", "sandboxes", "warm", "blank", "ops", "backends", "labels", "host", "pid", "since"
    )  # fmt: skip
    if any(node.reason for node in found):
        columns = (*columns, "reason")
        rows = [(*row, node.reason) for row, node in zip(rows, found, strict=True)]
    table(columns, rows, empty="No nodes. Start one: sandfleet worker   (or a whole fleet: sandfleet up)")
    if line:
        click.echo(f"{line} {'thread waits' if line == 1 else 'threads wait'} in line for a place")


def _show_ops(found: list[OpView], now_ms: int) -> None:
    rows = [
        (
            view.op_id,
            "running" if view.state == "claimed" else "waiting" if view.state == "recorded" else view.state,
            age((now_ms - view.recorded_at_ms) / 1000),
            view.node_id,
            view.describe,
        )
        for view in found
    ]
    table(("op", "state", "age", "node", "what"), rows, empty="Nothing waits or runs.")


def op_document(view: OpView) -> dict[str, Any]:
    """An operation as JSON, without its reply: that may be large, and is its caller's."""
    document = asdict(view)
    del document["reply"]
    return document


# --- stories -----------------------------------------------------------------------------------


def story_of(store: Store, key: str) -> dict[str, Any]:
    """``{"id", "kind", "events"}`` of an operation, a node or a sandbox, events oldest first.

    Raises:
        SandboxNotFound: Nothing is known of the id.
    """
    view = store.op(key)
    if view is not None:
        return {"id": key, "kind": "op", "op": op_document(view), "events": _op_events(view)}
    events = store.story(key)
    is_node = any(node.node_id == key for node in store.nodes())
    inflight = [op for op in store.ops(limit=2000) if key in (op.sandbox_id, op.node_id)] if events else []
    if not events and not is_node:
        raise SandboxNotFound(
            f"nothing is known of {key}; `sandfleet ls`, `sandfleet nodes` and `sandfleet ops` list the ids there are "
            "(an operation's record is dropped a minute after its answer)",
            id=key,
        )
    for op in inflight:
        events += _op_events(op)
    events.sort(key=lambda event: int(event.get("at_ms", 0)))
    return {"id": key, "kind": "node" if is_node else "sandbox", "events": events}


def _op_events(view: OpView) -> list[dict[str, Any]]:
    where = {"op_id": view.op_id, "what": view.describe}
    events: list[dict[str, Any]] = [
        {"at_ms": view.recorded_at_ms, "event": "op recorded", **where, "node_id": view.node_id}
    ]
    if view.claimed_at_ms is not None:
        events.append({"at_ms": view.claimed_at_ms, "event": "op started", **where})
    if view.finished_at_ms is not None:
        name = "op answered" if view.state == "done" else "op closed"
        events.append({"at_ms": view.finished_at_ms, "event": name, **where, "outcome": view.outcome})
    return events


def _show_story(told: dict[str, Any]) -> None:
    click.echo(f"{told['kind']} {printable(told['id'])}")
    began = told["events"][0]["at_ms"] if told["events"] else 0
    for event in told["events"]:
        at_ms = int(event["at_ms"])
        clock = datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%H:%M:%S.%f")[:-3]
        facts = "  ".join(
            f"{key}={printable(value if isinstance(value, str) else json.dumps(value))}"
            for key, value in event.items()
            if key not in ("at_ms", "event")
        )
        click.echo(f"{clock}  +{(at_ms - began) / 1000:<8.3f} {printable(event['event']):<14} {facts}".rstrip())


COMMANDS = (ls, nodes, ops, story)
