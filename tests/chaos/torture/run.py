"""One run of the torture from beginning to end, and how it is told."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sandfleet import SandboxProvider
from sandfleet.config import Settings
from tests.chaos.torture.client import effect_command
from tests.chaos.torture.evidence import JOURNAL, read_evidence
from tests.chaos.torture.faults import Faults
from tests.chaos.torture.intents import Intent, IntentLog, read_intents
from tests.chaos.torture.judge import Verdict, judge
from tests.chaos.torture.leaks import Leaks, find_leaks
from tests.chaos.torture.world import Options, World
from tests.services import wait_until

__all__ = ["Report", "torture"]

CLIENTS_END_S = 150.0
EVENTS = (
    "blank=True",
    "checkpoint.restored",
    "checkpoint.saved",
    "node.closed",
    "node.fenced",
    "node.reannounced",
    "node.took_back",
    "op.reattached",
    "op.second_delivery",
    "sandbox.died",
    "sandbox.readopted",
    "sandbox.retired",
    "sandbox.taken_back",
)
"""Words in the logs of nodes and schedulers: a run in which nothing was taken back shows nothing about that."""
FIVE = ("twice", "falsely_ok", "acknowledged_missing", "unanswered", "leaked")


@dataclass
class Report:
    """What one run found."""

    options: Options
    seconds: float
    faults: dict[str, int]
    verdict: Verdict
    leaks: Leaks
    #: Processes that ended without being told to, and the like: to look at, no broken promise.
    remarks: list[str] = field(default_factory=list)
    #: How often the fleet's logs tell of what the faults were to bring about.
    events: dict[str, int] = field(default_factory=dict)
    #: Lines of the fleet's logs about whatever is wrong.
    stories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """What goes into ``build/chaos.json``."""
        verdict, leaked = self.verdict, self.leaks.counts
        return {
            "operations": verdict.operations,
            "seconds": round(self.seconds, 1),
            "faults": {"total": sum(self.faults.values()), **dict(sorted(self.faults.items()))},
            "twice": len(verdict.twice),
            "falsely_ok": len(verdict.falsely_ok),
            "acknowledged_missing": len(verdict.acknowledged_missing),
            "unanswered": len(verdict.unanswered),
            "leaked": {**leaked, "total": sum(leaked.values())},
            "falsely_not_started": len(verdict.falsely_not_started),
            "torn": len(verdict.torn),
            "rolled_back": verdict.rolled_back,
            "answers": dict(verdict.answers.most_common()),
            "kinds": dict(verdict.kinds.most_common()),
            "events": self.events,
            "backend": self.options.backend,
            "nodes": self.options.nodes,
            "seed": self.options.seed,
            "remarks": self.remarks,
            "broken": {**verdict.broken, **{f"leaked_{name}": kept for name, kept in vars(self.leaks).items() if kept}},
            "stories": self.stories,
        }

    @property
    def kept_every_promise(self) -> bool:
        """Whether nothing is wrong."""
        return not self.verdict.broken and not any(self.leaks.counts.values())

    def table(self) -> str:
        """The numbers for people."""
        numbers = self.numbers
        lines = [f"{numbers['operations']} operations in {numbers['seconds']} s, seed {self.options.seed}"]
        lines += [f"  {name:<32}{count:>6}" for name, count in numbers["faults"].items() if name != "total"]
        lines.append(f"  {'faults':<32}{numbers['faults']['total']:>6}")
        lines.append("answers: " + ", ".join(f"{name} {count}" for name, count in numbers["answers"].items()))
        lines.append("events: " + ", ".join(f"{name} {count}" for name, count in numbers["events"].items()))
        for name in (*FIVE[:-1], "falsely_not_started", "torn", "rolled_back"):
            lines.append(f"{name:<34}{numbers[name]:>6}")
        told = ", ".join(f"{name} {count}" for name, count in self.leaks.counts.items())
        lines.append(f"{'leaked':<34}{numbers['leaked']['total']:>6}  ({told})")
        for name, examples in numbers["broken"].items():
            lines += [f"{name}: {example}" for example in examples[:10]]
        for key, story in self.stories.items():
            lines += [f"--- {key}", *story]
        return "\n".join(lines)


def torture(options: Options) -> Report:
    """Start a world, let faults loose on it for ``options.seconds``, heal it, and judge.

    The world's directory is removed when every promise was kept; otherwise it is told among the remarks.
    """
    directory = Path(tempfile.mkdtemp(prefix="sf-torture-", dir="/tmp"))
    world = World(options, directory)
    try:
        report = _torture(world)
    finally:
        world.close()
    if report.kept_every_promise or options.sabotage:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        report.remarks.append(f"logs and data are in {directory}")
    return report


def _torture(world: World) -> Report:
    world.begin()
    faults = Faults(world)
    began = time.monotonic()
    while time.monotonic() < began + world.options.seconds:
        world.supervise()
        _note_fds(world)
        faults.turn()
        time.sleep(0.02)
    faults.settle()
    world.heal()
    world.end_clients(CLIENTS_END_S)
    seconds = time.monotonic() - began
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not world.store.ops(), 60.0)
    if world.options.sabotage:
        _sabotage(world)
    logs = [world.directory / "intents" / f"{run}.jsonl" for run in world.runs]
    intents = read_intents(path for path in logs if path.exists())
    verdict = judge(intents, read_evidence(world.data_roots), killed=world.killed_runs, roaming=world.roaming)
    leaks = find_leaks(world)
    stories = {told: _story(world.directory, told.split()[0]) for each in verdict.broken.values() for told in each[:3]}
    events = _events(world.directory)
    return Report(world.options, seconds, dict(faults.count), verdict, leaks, world.unexpected, events, stories)


def _note_fds(world: World) -> None:
    """Remember how many descriptors each node had when it was ready."""
    for role in world.nodes.values():
        if role.process is not None and role.running and role.process.pid not in role.fds:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(role.process.pid)
                if time.time() - process.create_time() > 5.0:
                    role.fds[role.process.pid] = process.num_fds()


def _sabotage(world: World) -> None:
    """Run one effect twice by hand, as a fleet would that does not keep its word: the judge must see it."""
    settings = Settings.load({}, redis_url=world.redis.url, backend=world.options.backend)
    log = IntentLog(world.directory / "intents", "sabotage")
    world.runs.append(log.run)
    intent = Intent(log.new_id(), "command", "talk-0", JOURNAL, log.run, within_s=60.0, began_s=time.monotonic())
    log.begin(intent)
    with SandboxProvider(settings) as provider:
        sandbox = provider.get(provider.acquire(intent.conversation))
        assert sandbox is not None
        for _ in range(2):
            sandbox.run(effect_command(intent.id)).check()
    log.end(intent, "ok")


def _events(directory: Path) -> dict[str, int]:
    text = "\n".join(path.read_text(errors="replace") for path in directory.glob("logs/*.log"))
    return {name: count for name in EVENTS if (count := text.count(f" {name}"))}


def _story(directory: Path, effect: str, limit: int = 12) -> list[str]:
    """What the logs of the fleet and of the clients say of an effect."""
    found = []
    for path in [*sorted(directory.glob("logs/*.log")), *sorted(directory.glob("intents/*.jsonl"))]:
        lines = path.read_text(errors="replace").splitlines()
        found += [f"{path.name}: {line[:600]}" for line in lines if f"{effect}" in line]
    return found[:limit]


def write_report(report: Report, path: Path) -> None:
    """The numbers as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.numbers, indent=2) + "\n")
