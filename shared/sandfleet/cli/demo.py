"""``demo``: the main job, shown on this machine in a few seconds."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import click

from sandfleet.backends import Capability, SandboxBackend
from sandfleet.cli.context import Cli, fleet_command, pass_cli, signals_as_interrupt
from sandfleet.cli.demo_journal import Journal, Step
from sandfleet.cli.demo_play import STEPS, THREADS, play
from sandfleet.cli.output import note, printable, table
from sandfleet.config import Settings
from sandfleet.errors import ConfigError
from sandfleet.installed_backends import backend_class
from sandfleet.stack import Stack

__all__ = ["COMMANDS", "report"]

#: Short, so that a dead node is noticed while one watches.
_LEASE_S = 3.0
_BLANKS_S = 30.0
_PREFERRED = ("docker", "local")


@fleet_command("demo", short_help="Show it all on this machine, and kill a node.")
@click.option("--nodes", type=click.IntRange(2, 16), default=2, show_default=True, help="Node processes to run.")
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    help="What a sandbox is: docker, local (bubblewrap), or auto: the first of them that can run here.",
)
@pass_cli
def demo(cli: Cli, nodes: int, backend: str) -> int:
    """Start a fleet of its own, let three threads do real work in it at once, kill a node, and say what happened.

    Everything it starts is gone afterwards, and no other fleet is touched. Exits with 1 when a step did not do
    what it should.

    \b
    Examples:
      sandfleet demo
      sandfleet demo --backend local
      sandfleet demo --json
    """
    kind, passed_over = choose(backend)
    journal = Journal(on_step=_progress(quiet=cli.json))
    began = time.monotonic()
    if not cli.json:
        note(f"starting Redis, a scheduler and {nodes} nodes with sandboxes of the backend {kind.name} …")
    with signals_as_interrupt(), Stack(nodes, backend=kind.name, lease_s=_LEASE_S, idle_timeout_s=600.0) as stack:
        if Capability.BLANKS in kind.capabilities:
            _await_blanks(stack)
        ready_s = time.monotonic() - began
        play(stack, journal)
    document = report(journal, kind, nodes=nodes)
    document["passed_over"] = passed_over
    document["ready_s"], document["took_s"] = round(ready_s, 2), round(time.monotonic() - began, 2)
    cli.show(document, lambda: _tell(document, journal.steps))
    return 0 if document["ok"] else 1


def choose(backend: str) -> tuple[type[SandboxBackend], dict[str, str]]:
    """The backend to show, and why the others that were thought of are not: name → reason.

    Raises:
        ConfigError: It (or, for auto, any) cannot run here; the message says what each wants.
    """
    passed_over: dict[str, str] = {}
    names = _PREFERRED if backend == "auto" else (backend,)
    for name in names:
        kind, problem = _looked_at(name)
        if kind is not None and not problem:
            return kind, passed_over | dict.fromkeys(names[len(passed_over) + 1 :], f"{name} isolates better")
        passed_over[name] = problem
    told = "; ".join(f"{name}: {problem}" for name, problem in passed_over.items())
    raise ConfigError(f"the demo's sandboxes cannot run here: {told}", key="backend")


def _looked_at(name: str) -> tuple[type[SandboxBackend] | None, str]:
    """The backend, and why it cannot show anything here; "" when it can."""
    try:
        kind = backend_class(name)
    except (ImportError, ConfigError) as exc:
        return None, f"it is not installed ({exc})"
    if Capability.PROCESS_ISOLATION not in kind.capabilities:
        return kind, "it does not run the programs that the demo shows"
    problems = list(kind.check())
    if not problems:
        missing = [finding for finding in kind.examine(Settings.load(backend=name)) if not finding.ready]
        problems = [f"{finding.found}: {finding.advice}" for finding in missing]
    return kind, "; ".join(problems)


def _await_blanks(stack: Stack) -> None:
    """Let every node fill its pool, as in a fleet that runs for a while: one that is still starting some has less room
    than the others, and would be given no thread."""
    until = time.monotonic() + _BLANKS_S
    wanted = min(stack.settings.blank_pool, stack.settings.replicas - stack.settings.reserve_free)
    while any(sum(node.blanks.values()) < wanted for node in stack.store.nodes()):
        if time.monotonic() > until:
            note("the nodes have not started sandboxes ahead in time; threads wait for theirs")
            return
        time.sleep(0.05)


def report(journal: Journal, kind: type[SandboxBackend], *, nodes: int) -> dict[str, Any]:
    """The demo's result as JSON. ``ok`` only if every step was right and none is missing."""
    return {
        "ok": journal.ok(steps=STEPS),
        "nodes": nodes,
        "threads": len(THREADS),
        "operations": len(journal.samples.get("op", ())) + len(journal.samples.get("noop", ())),
        "p50_ms": journal.p50("op"),
        "noop_p50_ms": journal.p50("noop"),
        "acquire_new_p50_ms": journal.p50("acquire_new"),
        "acquire_warm_p50_ms": journal.p50("acquire_warm"),
        "backend": kind.name,
        "isolation": kind.isolation,
        "steps": [{**asdict(step), "took_ms": round(step.took_ms, 2)} for step in journal.steps],
    }


def _progress(*, quiet: bool) -> Any:
    """Live lines on a terminal; nothing where they would only repeat the table."""
    if quiet or not sys.stderr.isatty():
        return lambda step: None
    return lambda step: note(
        f"  {'✓' if step.ok else '✗'} {step.thread:<12} {step.step:<28} {step.took_ms:7.0f} ms  {printable(step.told)}"
    )


def _tell(document: dict[str, Any], steps: list[Step]) -> None:
    rows = [
        (
            "✓" if step.ok else "✗",
            step.step,
            step.thread,
            step.node,
            step.sandbox,
            f"{step.took_ms:.0f}",
            step.told,
        )
        for step in sorted(steps, key=_as_told(steps))
    ]
    click.echo("")
    table(("", "step", "thread", "node", "sandbox", "ms", "what happened"), rows, empty="nothing happened")
    click.echo("")
    click.echo(
        f"{document['threads']} threads, {document['nodes']} nodes, {document['operations']} operations in "
        f"{document['took_s']:.1f} s (of which {document['ready_s']:.1f} s to start the fleet)"
    )
    click.echo(f"backend    {document['backend']}, isolation: {document['isolation']}")
    for name, reason in document["passed_over"].items():
        click.echo(f"           not {name}: {printable(reason)}")
    click.echo(
        f"median     operation {document['p50_ms']} ms, no-op {document['noop_p50_ms']} ms, acquire new "
        f"{document['acquire_new_p50_ms']} ms, acquire warm {document['acquire_warm_p50_ms']} ms"
    )
    if document["ok"]:
        click.echo("Every step did what it should.")
        click.echo(f"Next: sandfleet up --nodes 2 --backend {document['backend']}")
    else:
        wrong = sum(not step.ok for step in steps)
        click.echo(f"NOT OK: {wrong} step(s) went wrong, {STEPS - len(steps)} were not reached.")


def _as_told(steps: list[Step]) -> Any:
    """Thread by thread, as they came; what concerns the whole fleet last."""
    order = {name: n for n, name in enumerate(THREADS)}
    last = next((n for n, step in enumerate(steps) if step.thread == "all"), len(steps))
    position = {id(step): n for n, step in enumerate(steps)}
    return lambda step: (
        (0, order.get(step.thread, 9), position[id(step)]) if position[id(step)] < last else (1, 0, position[id(step)])
    )


COMMANDS = (demo,)
