"""Intervening, in any owner's name: ``cancel``, ``release``, ``destroy``."""

from __future__ import annotations

import time
from typing import Any

import click

from sandfleet import control
from sandfleet.cli.completing import complete_ops, complete_sandboxes
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.look import op_document
from sandfleet.config import Settings
from sandfleet.errors import SandboxLost, SandboxNotFound, Unavailable
from sandfleet.ids import Identity
from sandfleet.model import SandboxInfo, SandboxState
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


COMMANDS = (cancel, release, destroy)
