"""Intervening, in any owner's name: ``cancel``, ``release``, ``destroy``, ``cordon``, ``uncordon``, ``drain``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import click

from sandfleet import control
from sandfleet.cli.completing import complete_nodes, complete_ops, complete_sandboxes
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.look import op_document
from sandfleet.cli.output import note, printable
from sandfleet.config import Settings
from sandfleet.errors import InvalidArgument, SandboxLost, SandboxNotFound, Unavailable
from sandfleet.fleet_facts import shown_state
from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView, SandboxInfo, SandboxState
from sandfleet.store.base import OpView, Store

__all__ = ["COMMANDS", "cancel_op"]

_CANCEL_S = 10.0
_POLL_S = 0.05


@fleet_command("cancel", short_help="End an operation, waiting or running.")
@click.argument("op_id", metavar="OP", shell_complete=complete_ops)
@pass_cli
def cancel(cli: Cli, op_id: str) -> None:
    """End an operation: what has not begun never will, a running command's process group is killed.

    Its caller gets `Cancelled`, or a result that says so. `sandfleet ops` shows the ids.

    \b
    Examples:
      sandfleet ops
      sandfleet cancel 5d0c9f0e8c6a4d1b
    """
    with cli.store() as store:
        told = cancel_op(store, cli.settings(), op_id)
    cli.show(told, lambda: click.echo(told["told"]))


@fleet_command("release", short_help="Turn a sandbox warm if nobody is in it.")
@click.argument("sandbox_id", metavar="ID", shell_complete=complete_sandboxes)
@pass_cli
def release(cli: Cli, sandbox_id: str) -> int:
    """Turn a sandbox warm if nobody is in it any more: it keeps running, ready for its thread.

    A process that still holds it keeps it in use. `sandfleet destroy` ends it whoever is in it.

    \b
    Examples:
      sandfleet release 3f9a1c22
    """
    with cli.store() as store:
        info = _known(store, sandbox_id)
        owner = Identity(info.thread_id, info.user_id).digest
        store.release(sandbox_id, owner, "")
        info = _known(store, sandbox_id)
    warm = info.state is SandboxState.WARM
    told = f"sandbox {sandbox_id} is warm" if warm else _still_in_use(info)
    cli.show({"sandbox_id": sandbox_id, "state": info.state, "warm": warm}, lambda: click.echo(told))
    return 0 if warm else 3


@fleet_command("destroy", short_help="End a sandbox, whatever runs in it.")
@click.argument("sandbox_id", metavar="ID", shell_complete=complete_sandboxes)
@click.option("--delete-data", is_flag=True, help="Delete the thread's files too.")
@pass_cli
def destroy(cli: Cli, sandbox_id: str, delete_data: bool) -> None:
    """End a sandbox, whatever runs in it. The thread's files stay, unless told otherwise.

    The record of a lost sandbox is dropped. The thread's next acquire makes a new one.

    \b
    Examples:
      sandfleet destroy 3f9a1c22
      sandfleet destroy 3f9a1c22 --delete-data
    """
    with cli.provider() as provider:
        with cli.store() as store:
            info = _known(store, sandbox_id)
        if delete_data and info.state is SandboxState.LOST:
            raise _cannot_delete(info)
        provider.destroy(sandbox_id, delete_data=delete_data)
    was_lost = info.state is SandboxState.LOST
    told = f"sandbox {sandbox_id} of thread {info.thread_id} is {'forgotten' if was_lost else 'gone'}"
    told += f", {'its files too' if delete_data else 'its files are kept'}"
    document = {
        "sandbox_id": sandbox_id,
        "thread_id": info.thread_id,
        "destroyed": True,
        "data_deleted": delete_data,
    }
    cli.show(document, lambda: click.echo(told))


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
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              metavar="S", help="How long to wait until it left.")  # fmt: skip
@pass_cli
def drain(cli: Cli, node_id: str, timeout_s: float) -> None:
    """Take a node out of the fleet: it takes nothing new, answers what has not begun, ends its sandboxes, leaves.

    Its sandboxes' files stay on its data root; their threads go on where that root is served.

    \b
    Examples:
      sandfleet drain node-1
      sandfleet drain node-1 --timeout 300
    """
    with cli.store() as store:
        told = _drain(store, cli.settings(), node_id, timeout_s)
    cli.show(told, lambda: click.echo(told["told"]))


# --- cancel ------------------------------------------------------------------------------------


def cancel_op(store: Store, settings: Settings, op_id: str, *, within_s: float = _CANCEL_S) -> dict[str, Any]:
    """End an operation and wait until it did: its record as JSON, and ``told`` in words.

    Raises:
        SandboxNotFound: No such operation, or its record is gone.
        Unavailable: Its node did not end it in time.
    """
    before = store.op(op_id)
    view = store.cancel(op_id) if before is not None else None
    if before is None or view is None:
        raise SandboxNotFound(
            f"no operation {op_id}; `sandfleet ops` lists what waits or runs "
            "(records are dropped a minute after the answer)",
            op_id=op_id,
        )
    if before.state in ("done", "closed"):
        return {**op_document(view), "told": f"operation {op_id} had already ended ({view.outcome})"}
    if view.state == "closed":
        return {**op_document(view), "told": f"operation {op_id} was cancelled before it began"}
    until = time.monotonic() + within_s
    ended = _end_running(store, settings, view, until)
    return {**op_document(ended), "told": f"operation {op_id} was running on {view.node_id} and was ended"}


def _end_running(store: Store, settings: Settings, view: OpView, until: float) -> OpView:
    hosts = [node.host for node in store.nodes() if node.node_id == view.node_id]
    names = [control.worker_name(view.node_id, host) for host in hosts] or None
    while True:
        # Repeated: the message goes past a worker whose broker connection is just being made anew.
        control.revoke(settings, view.op_id, names, timeout_s=1.0)
        asked_at = time.monotonic()
        while time.monotonic() < min(until, asked_at + 2.0):
            now = store.op(view.op_id)
            if now is None or now.state in ("done", "closed"):
                return now or view
            time.sleep(_POLL_S)
        if time.monotonic() >= until:
            raise Unavailable(
                f"node {view.node_id} did not end operation {view.op_id} in time; `sandfleet story {view.op_id}` tells",
                op_id=view.op_id,
            )


# --- sandboxes ---------------------------------------------------------------------------------


def _known(store: Store, sandbox_id: str) -> SandboxInfo:
    info = store.sandbox(sandbox_id)
    if info is None:
        raise SandboxNotFound(f"no sandbox {sandbox_id}; `sandfleet ls` lists those there are", sandbox_id=sandbox_id)
    return info


def _cannot_delete(info: SandboxInfo) -> SandboxLost:
    whose = f"--thread {info.thread_id}" + (f" --user {info.user_id}" if info.user_id else "")
    return SandboxLost(
        f"sandbox {info.sandbox_id} died with its node, and only a node that holds it can delete its files; "
        f"`sandfleet exec {whose} -- true` makes it anew, then destroy that",
        sandbox_id=info.sandbox_id,
    )


def _still_in_use(info: SandboxInfo) -> str:
    if info.state is not SandboxState.LIVE:
        return f"sandbox {info.sandbox_id} is {info.state}; there is nothing to release"
    return (
        f"sandbox {info.sandbox_id} is still in use by {info.agents} process(es) and {info.ops} operation(s); "
        f"`sandfleet destroy {info.sandbox_id}` ends it all the same"
    )


# --- drain -------------------------------------------------------------------------------------


def _living(store: Store, node_id: str) -> NodeView:
    found = [node for node in store.nodes() if node.node_id == node_id]
    if not found:
        raise InvalidArgument(f"no node {node_id}; `sandfleet nodes` lists those there are", node_id=node_id)
    if not found[0].alive or found[0].state is NodeState.GONE:
        raise InvalidArgument(
            f"node {node_id} is {shown_state(found[0])}; it takes nothing, and what it held was answered for",
            node_id=node_id,
        )
    return found[0]


def _drain(store: Store, settings: Settings, node_id: str, timeout_s: float) -> dict[str, Any]:
    node = _living(store, node_id)
    store.set_node_state(node_id, NodeState.DRAINING)
    pending = {view.op_id for view in store.ops(node_id=node_id, limit=5000)}
    name = control.worker_name(node_id, node.host)
    until = time.monotonic() + timeout_s
    if not control.tell_to_drain(settings, name):
        note(f"node {node_id} did not confirm; waiting for it all the same")
    while True:
        left = _still_there(store, node)
        if left is None:
            break
        if time.monotonic() >= until:
            raise Unavailable(
                f"node {node_id} is draining but has not left within {timeout_s:.0f} s; {left.inflight} operations are "
                f"in flight: `sandfleet ops --node {node_id}` shows them",
                node_id=node_id,
            )
        _progress(f"{node_id}: {left.inflight} operations, {left.places} sandboxes left")
        time.sleep(_POLL_S)
    _progress("")
    outcomes = Counter(_outcome(store.op(op_id)) for op_id in sorted(pending))
    shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "nothing was in flight"
    return {
        "node_id": node_id,
        "left": True,
        "answered": dict(outcomes),
        "told": f"node {node_id} left; answered: {shown}",
    }


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


COMMANDS = (cancel, release, destroy, cordon, uncordon, drain)
