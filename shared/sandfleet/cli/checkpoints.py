"""A thread's data as it was: ``snapshot``, ``checkpoints``, ``restore``, ``fork``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from sandfleet.checkpoints import Checkpoint, Restoration
from sandfleet.cli.completing import complete_threads
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import age, note, printable, show_size, table
from sandfleet.model import SandboxInfo
from sandfleet.provider import SandboxProvider

__all__ = ["COMMANDS", "acquired", "described"]

_thread = click.option(
    "--thread", "-t", required=True, metavar="T", help="Whose data.", shell_complete=complete_threads
)
_user = click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
_which = click.option("--checkpoint", "-c", "checkpoint_id", metavar="ID", help="Which one.  [the newest]")


@fleet_command("snapshot", short_help="Save a thread's data as a checkpoint.")
@_thread
@_user
@click.option("--name", metavar="TEXT", help="What you want to call it.")
@pass_cli
def snapshot(cli: Cli, thread: str, user: str | None, name: str | None) -> None:
    """Save the files of a thread as a checkpoint, to the place that `checkpoint_url` names.

    Only what changed since the last one is sent. Operations of the sandbox wait meanwhile; what a command or job
    that is running writes while it is saved may be half in it, and then it says so.

    \b
    Examples:
      sandfleet snapshot --thread alice
      sandfleet snapshot --thread alice --user acme --name 'before the big change'
    """
    with cli.provider() as provider:
        made = provider.snapshot(thread_id=thread, user_id=user, name=name)
    cli.show(asdict(made), lambda: _tell_saved(made))


@fleet_command("checkpoints", short_help="List a thread's checkpoints.")
@_thread
@_user
@pass_cli
def checkpoints(cli: Cli, thread: str, user: str | None) -> None:
    """List the checkpoints of a thread, the newest first: when, how much, and whether nothing moved meanwhile.

    \b
    Examples:
      sandfleet checkpoints --thread alice
      sandfleet checkpoints --thread alice --json
    """
    with cli.provider() as provider:
        found = provider.checkpoints(thread, user_id=user)
        with cli.store() as store:
            now_s = store.now_ms() / 1000
    found = sorted(found, key=lambda one: one.saved_at, reverse=True)
    cli.show({"checkpoints": [asdict(one) for one in found]}, lambda: _show_checkpoints(found, now_s, thread))


@fleet_command("restore", short_help="Put a thread's data back as it was.")
@_thread
@_user
@_which
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@pass_cli
def restore(cli: Cli, thread: str, user: str | None, checkpoint_id: str | None, yes: bool) -> None:
    """Put a thread's files back as they were saved, in a new sandbox, and say what came back and what did not.

    The sandbox that the thread has now is ended. The files it has now are saved first, if that can be done, and then
    replaced. Processes and memory are in no checkpoint. It works as well when the thread's machine is gone.

    \b
    Examples:
      sandfleet restore --thread alice
      sandfleet checkpoints --thread alice
      sandfleet restore --thread alice --checkpoint 9f3c6d1e5a7b2c40 --yes
    """
    if not yes and not cli.json:
        which = f"checkpoint {checkpoint_id}" if checkpoint_id else "its newest checkpoint"
        click.confirm(f"Replace the files of thread {thread} by {which}?", abort=True, err=True)
    with cli.provider() as provider:
        sandbox_id = provider.restore(thread, checkpoint_id, user_id=user)
        info = _info(cli, sandbox_id)
        provider.release(sandbox_id)
    _show_restored(cli, sandbox_id, thread, user, info)


@fleet_command("fork", short_help="Begin a new thread with a copy of another's data.")
@_thread
@_user
@click.option("--to", "new_thread", required=True, metavar="T", help="The new thread's id; it has no data yet.")
@_which
@pass_cli
def fork(cli: Cli, thread: str, user: str | None, new_thread: str, checkpoint_id: str | None) -> None:
    """Begin a new thread with a copy of another thread's saved files. The two share nothing from then on.

    Without --checkpoint it is the newest one: `sandfleet snapshot` makes one of this moment.

    \b
    Examples:
      sandfleet snapshot --thread alice
      sandfleet fork --thread alice --to alice-2
    """
    with cli.provider() as provider:
        sandbox_id = provider.fork(thread, new_thread, checkpoint_id, user_id=user)
        info = _info(cli, sandbox_id)
        provider.release(sandbox_id)
    _show_restored(cli, sandbox_id, new_thread, user, info)


def _info(cli: Cli, sandbox_id: str) -> SandboxInfo | None:
    with cli.store() as store:
        return store.sandbox(sandbox_id)


def acquired(cli: Cli, provider: SandboxProvider, thread: str, user: str | None, on_lost: str | None) -> str:
    """The id of the thread's sandbox; if it begins with a checkpoint now, people are told."""
    if (on_lost or provider.settings.on_lost) != "restore":
        return provider.acquire(thread, user_id=user, on_lost=on_lost)
    with cli.store() as store:
        since = store.now_ms() / 1000
        sandbox_id = provider.acquire(thread, user_id=user, on_lost=on_lost)
        info = store.sandbox(sandbox_id)
    if info is not None and info.restored is not None and info.created_at >= since:
        note(f"thread {printable(thread)} begins with {described(info.restored)}")
    return sandbox_id


# --- telling -----------------------------------------------------------------------------------


def _tell_saved(made: Checkpoint) -> None:
    click.echo(f"checkpoint {printable(made.id)}: {made.files} files, {show_size(made.size_bytes)}")
    if not made.consistent:
        click.echo("Something was written while it was saved: files may be from different moments.")
    for line in made.skipped:
        note(f"left away: {printable(line)}")


def _show_checkpoints(found: Sequence[Checkpoint], now_s: float, thread: str) -> None:
    rows = [
        (
            one.id,
            _moment(one.saved_at),
            age(now_s - one.saved_at),
            one.files,
            show_size(one.size_bytes),
            "yes" if one.consistent else "no",
            one.name,
        )
        for one in found
    ]
    empty = f"No checkpoints. Make one: sandfleet snapshot --thread {thread}"
    table(("checkpoint", "saved", "ago", "files", "size", "consistent", "name"), rows, empty=empty)


def _show_restored(cli: Cli, sandbox_id: str, thread: str, user: str | None, info: SandboxInfo | None) -> None:
    restored = info.restored if info is not None else None
    document: dict[str, Any] = {
        "sandbox_id": sandbox_id,
        "thread_id": thread,
        "user_id": user,
        "restored": asdict(restored) if restored is not None else None,
    }

    def tell() -> None:
        if restored is None:
            click.echo(f"thread {thread} has sandbox {sandbox_id}")
            return
        click.echo(f"thread {thread} has sandbox {sandbox_id}, with its files as of {_moment(restored.saved_at)}")
        click.echo(f"came back: {restored.files} files, {show_size(restored.size_bytes)}")
        click.echo(f"did not:   {', '.join(map(printable, restored.missing))}")
        for line in _doubts(restored):
            click.echo(printable(line))

    cli.show(document, tell)


def described(restored: Restoration) -> str:
    """In one line what came back and what did not."""
    what = f"{restored.files} files, {show_size(restored.size_bytes)}; without {', '.join(restored.missing)}"
    told = "; ".join((what, *_doubts(restored)))
    return printable(f"checkpoint {restored.checkpoint_id} as of {_moment(restored.saved_at)}: {told}")


def _doubts(restored: Restoration) -> list[str]:
    told = [f"left away when it was saved: {line}" for line in restored.skipped]
    if not restored.consistent:
        told.insert(0, "something was written while it was saved: files may be from different moments")
    if restored.passed_over:
        told.insert(0, f"newer, but of no use: {', '.join(restored.passed_over)}")
    return told


def _moment(saved_at: float) -> str:
    return datetime.fromtimestamp(saved_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


COMMANDS = (snapshot, checkpoints, restore, fork)
