"""``sandfleet inspect``: everything that is known of one sandbox."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from sandfleet.backends import shown_backend
from sandfleet.cli.checkpoints import described
from sandfleet.cli.completing import complete_sandboxes
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import age, printable
from sandfleet.errors import SandboxNotFound, SandfleetError
from sandfleet.fleet_facts import shown_state
from sandfleet.model import Health, SandboxInfo, SandboxMetrics, SandboxState
from sandfleet.provider import SandboxProvider

__all__ = ["COMMANDS"]

_RUNNING = (SandboxState.LIVE, SandboxState.WARM)
_MIB = 1024**2


@fleet_command("inspect", short_help="Tell everything about one sandbox.")
@click.argument("sandbox_id", metavar="ID", shell_complete=complete_sandboxes)
@pass_cli
def inspect(cli: Cli, sandbox_id: str) -> int:
    """Tell everything about one sandbox: whose it is, where and how it runs, what it uses, whether it answers.

    A running one is asked, which counts as use of it. Exits with 1 when it does not answer.

    \b
    Examples:
      sandfleet inspect 3f9a1c22
      sandfleet inspect 3f9a1c22 --json
    """
    with cli.store() as store:
        info = store.sandbox(sandbox_id)
        if info is None:
            raise SandboxNotFound(
                f"no sandbox {sandbox_id}; `sandfleet ls` lists those there are", sandbox_id=sandbox_id
            )
        node = next((node for node in store.nodes() if node.node_id == info.node_id), None)
        running, now_s = store.ops(node_id=info.node_id, limit=2000), store.now_ms() / 1000
    health, uses = Health("unknown", sandbox_id), SandboxMetrics()
    if info.state in _RUNNING:
        with cli.provider() as provider:
            health, uses = _asked(provider, info)
    document: dict[str, Any] = {
        "sandbox": asdict(info),
        "shown_backend": shown_backend(info.backend),
        "node": {"state": shown_state(node), "host": node.host, "version": node.version} if node else None,
        "health": asdict(health),
        "metrics": asdict(uses),
        "ops": [op.describe for op in running if op.sandbox_id == sandbox_id],
    }
    cli.show(document, lambda: _show(info, document, health, uses, now_s))
    return 0 if health.ok or info.state not in _RUNNING else 1


def _asked(provider: SandboxProvider, info: SandboxInfo) -> tuple[Health, SandboxMetrics]:
    """What the sandbox says of itself. That it does not answer is an answer too; what it uses not every one tells."""
    sandbox = provider.get(info.sandbox_id, thread_id=info.thread_id, user_id=info.user_id)
    assert sandbox is not None  # the registry knows the id
    try:
        health = sandbox.health()
    except SandfleetError as exc:
        return Health("unknown", info.sandbox_id, info.node_id, info.backend, exc.message), SandboxMetrics()
    try:
        return health, sandbox.metrics()
    except SandfleetError:
        return health, SandboxMetrics()


def _show(info: SandboxInfo, document: dict[str, Any], health: Health, uses: SandboxMetrics, now_s: float) -> None:
    node = document["node"]
    where = f"{info.node_id} ({node['state']}, on {node['host']})" if node else f"{info.node_id} (not known any more)"
    facts: dict[str, object] = {
        "sandbox": info.sandbox_id,
        "thread": info.thread_id,
        "user": info.user_id,
        "state": f"{info.state}, {info.agents} agents, {info.ops} operations",
        "node": where,
        "backend": document["shown_backend"],
        "epoch": info.epoch,
        "made": f"{age(now_s - info.created_at)} ago",
        "used": f"{age(now_s - info.used_at)} ago",
        "health": f"{health.status}: {health.detail}" if health.detail else health.status,
        "uses": _uses(uses),
        **({"began with": described(info.restored)} if info.restored is not None else {}),
    }
    for name, value in facts.items():
        click.echo(f"{name:<10} {printable(value)}")
    for operation in document["ops"]:
        click.echo(f"{'runs':<10} {printable(operation)}")


def _uses(uses: SandboxMetrics) -> str:
    told = {
        "CPU s": None if uses.cpu_s is None else f"{uses.cpu_s:.2f}",
        "MiB of memory": None if uses.memory_bytes is None else f"{uses.memory_bytes / _MIB:.1f}",
        "processes": uses.pids,
        "MiB of disk": None if uses.disk_bytes is None else f"{uses.disk_bytes / _MIB:.1f}",
    }
    return ", ".join(f"{value} {unit}" for unit, value in told.items() if value is not None)


COMMANDS = (inspect,)
