"""Taking a node out of the fleet: ``cordon``, ``uncordon``, ``drain``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import click

from sandfleet import control
from sandfleet.cli.completing import complete_nodes
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import printable
from sandfleet.config import Settings
from sandfleet.errors import InvalidArgument, Unavailable
from sandfleet.fleet_facts import shown_state
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import OpView, Store

__all__ = ["COMMANDS"]

_POLL_S = 0.1
#: After what runs had its time, sandboxes are ended and their threads' data is saved.
_ENDING_S = 120.0
_CONFIRM_S = 15.0


@fleet_command("cordon", short_help="Put no new sandboxes on a node.")
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.option("--reason", default="", metavar="TEXT", help="Why: `sandfleet nodes` shows it to the others.")
@click.option("--undo", is_flag=True, help="The same as `sandfleet uncordon`.")
@pass_cli
def cordon(cli: Cli, node_id: str, reason: str, undo: bool) -> None:
    """Put no new sandboxes on a node. Those it holds go on, and their threads are still served.

    A node also cordons itself when the creates of several threads in a row failed.

    \b
    Examples:
      sandfleet cordon node-1 --reason 'new disk at noon'
      sandfleet uncordon node-1
    """
    _set_cordon(cli, node_id, NodeState.READY if undo else NodeState.CORDONED, "" if undo else reason)


@fleet_command("uncordon", short_help="Let a node take new sandboxes again.")
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@pass_cli
def uncordon(cli: Cli, node_id: str) -> None:
    """Let a node that was cordoned, by a person or by itself, take new sandboxes again.

    \b
    Examples:
      sandfleet uncordon node-1
    """
    _set_cordon(cli, node_id, NodeState.READY, "")


def _set_cordon(cli: Cli, node_id: str, state: NodeState, reason: str) -> None:
    with cli.store() as store:
        if _living(store, node_id).state is NodeState.DRAINING:
            raise InvalidArgument(f"node {node_id} is draining and will leave; start it again instead", node_id=node_id)
        store.set_node_state(node_id, state, reason=reason)
    told = f"node {node_id} is {state}" + (f": {printable(reason)}" if reason else "")
    cli.show({"node_id": node_id, "state": state, "reason": reason}, lambda: click.echo(told))


@fleet_command("drain", short_help="Take a node out of the fleet, in order.")
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), metavar="S",
              help="What runs gets this long, then it is ended.  [the node's drain_timeout_s]")  # fmt: skip
@click.option("--wait", "wait_s", type=click.FloatRange(0), metavar="S",
              help="Wait this long until it left; 0 does not wait.  [the timeout and two minutes]")  # fmt: skip
@pass_cli
def drain(cli: Cli, node_id: str, timeout_s: float | None, wait_s: float | None) -> None:
    """Take a node out of the fleet: it takes nothing new, answers what has not begun, lets what runs finish for a
    while, ends its sandboxes, leaves.

    What had not begun is sent again by its callers, to where its thread lives next. Threads' files stay on the node's
    data root, and are saved first where checkpoints are configured.

    To start a node again (a new version, say) it need not be drained: see docs/operator.md.

    \b
    Examples:
      sandfleet drain node-1
      sandfleet drain node-1 --timeout 600
      sandfleet drain node-1 --wait 0; sandfleet nodes
    """
    settings = cli.settings()
    with cli.store() as store:
        told = _drain(store, settings, node_id, timeout_s, wait_s)
    cli.show(told, lambda: click.echo(told["told"]))


def _living(store: Store, node_id: str) -> NodeView:
    found = [node for node in store.nodes() if node.node_id == node_id]
    if not found:
        raise InvalidArgument(f"no node {node_id}; `sandfleet nodes` lists those there are", node_id=node_id)
    if not found[0].alive or found[0].state is NodeState.GONE:
        raise InvalidArgument(
            f"node {node_id} is {shown_state(found[0])}; it takes nothing, and what it held was answered for",
            node_id=node_id,
        )
    if found[0].state is NodeState.AWAY:
        raise InvalidArgument(
            f"node {node_id} is away: it was stopped and keeps its sandboxes for its next start; start it first, or "
            "wait: it counts as dead when it does not come back",
            node_id=node_id,
        )
    return found[0]


def _drain(
    store: Store, settings: Settings, node_id: str, timeout_s: float | None, wait_s: float | None
) -> dict[str, Any]:
    node = _living(store, node_id)
    store.set_node_state(node_id, NodeState.DRAINING)
    pending = {view.op_id for view in store.ops(node_id=node_id, limit=5000)}
    _tell(store, settings, node, timeout_s)
    if wait_s == 0:
        told = f"node {node_id} drains; `sandfleet nodes` shows when it has left"
        return {"node_id": node_id, "left": False, "told": told}
    runs_s = settings.drain_timeout_s if timeout_s is None else timeout_s
    _wait_until_left(store, node, runs_s + _ENDING_S if wait_s is None else wait_s)
    outcomes = Counter(_outcome(store.op(op_id)) for op_id in sorted(pending))
    shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "nothing was in flight"
    # What it says last of itself: how much data it saved.
    said = next((now.reason for now in store.nodes() if now.node_id == node_id and not now.alive), "")
    return {
        "node_id": node_id,
        "left": True,
        "answered": dict(outcomes),
        "said": said,
        "told": f"node {node_id} left; answered: {shown}" + (f"; it {printable(said)}" if said else ""),
    }


def _tell(store: Store, settings: Settings, node: NodeView, timeout_s: float | None) -> None:
    """Have the node confirm. The message goes past one that is just connecting to Redis, so it is repeated.

    Raises:
        Unavailable: It did not.
    """
    until = time.monotonic() + _CONFIRM_S
    name = control.worker_name(node.node_id, node.host)
    while not control.tell_to_drain(settings, name, within_s=timeout_s):
        if _still_there(store, node) is None:
            return
        if time.monotonic() >= until:
            raise Unavailable(
                f"node {node.node_id} takes nothing new, but did not confirm that it leaves; type it again, or look "
                "into its log",
                node_id=node.node_id,
            )


def _wait_until_left(store: Store, node: NodeView, wait_s: float) -> None:
    """Show how far it is until the node has left.

    Raises:
        Unavailable: It has not, within ``wait_s``.
    """
    until = time.monotonic() + wait_s
    try:
        while (left := _still_there(store, node)) is not None:
            if time.monotonic() >= until:
                raise Unavailable(
                    f"node {node.node_id} is draining but has not left within {wait_s:.0f} s; {_left(left)}: "
                    f"`sandfleet ops --node {node.node_id}` shows what runs there, and it goes on leaving",
                    node_id=node.node_id,
                )
            _progress(f"{node.node_id}: {_left(left)}")
            time.sleep(_POLL_S)
    finally:
        _progress("")


def _left(node: NodeView) -> str:
    told = f"{node.inflight} operations and {node.places} sandboxes left"
    return f"{told} ({printable(node.reason)})" if node.reason else told


def _still_there(store: Store, node: NodeView) -> NodeView | None:
    for now in store.nodes():
        if now.node_id == node.node_id and now.alive and now.incarnation == node.incarnation:
            return now if now.state is not NodeState.GONE else None
    return None


def _outcome(view: OpView | None) -> str:
    if view is None:
        return "answered and forgotten"
    return view.outcome or view.state


def _progress(text: str) -> None:
    """One line that is written over, for people only."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


COMMANDS = (cordon, uncordon, drain)
