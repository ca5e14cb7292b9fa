"""``python -m tests.bench``: measure, print a table, write ``build/bench.json``. Nothing here passes or fails."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import container_load, containers, engine, spine, streams

#: What the issues ask of each figure: (comparison, goal).
GOALS = {
    "spine.true_vs_celery_noop": ("<=", 1.2),
    "spine.noop_vs_celery_noop": ("<=", 0.65),
    "spine.noop_throughput_ratio": (">=", 1.5),
    "spine.true_throughput_ratio": (">=", 1.0),
    "spine.acquire_live_round_trips": ("<=", 2.0),
    "spine.redis_calls_per_op": ("<=", 8.0),
    "spine.fleet_lost": ("<=", 0.0),
    "containers.true_speedup_vs_docker_exec": (">=", 10.0),
    "containers.true_vs_celery_noop": ("<=", 1.3),
    "containers.true_vs_host_subprocess": ("<=", 2.0),
    "containers.new_thread_speedup_vs_cold": (">=", 15.0),
    "containers.acquire_blank_vs_celery_noop": ("<=", 3.0),
    "containers.file_1mib_speedup_min": (">=", 8.0),
    "containers.file_1mib_e2e_speedup_min": (">=", 4.0),
    "containers.sandboxd_pss_mib": ("<=", 10.0),
    "containers.load_lost": ("<=", 0.0),
    "containers.load_wrong": ("<=", 0.0),
    "containers.load_leaked": ("<=", 0.0),
}


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument(
        "--only", choices=["latency", "events", "calls", "streams", "fleet", "growth", "containers"], action="append"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sandfleet-bench-") as tmp:
        found: dict[str, float] = {}
        for name, group, part in _parts(Path(tmp), quick=options.quick):
            if options.only and name not in options.only:
                continue
            if name == "containers" and not engine.engine_there():
                sys.stderr.write("containers: left out, no Docker engine answers here\n")
                continue
            began = time.monotonic()
            for key, value in part().items():
                found[f"{group}.{key}"] = round(float(value), 4)
            sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    _show(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"python": platform.python_version(), "machine": platform.machine(), "quick": options.quick}
    options.out.write_text(json.dumps({**found, "run": facts}, indent=2) + "\n")
    return 0


def _parts(tmp: Path, *, quick: bool) -> list[tuple[str, str, Callable[[], dict[str, float]]]]:
    """What is measured: its name for ``--only``, the group of its figures, and how."""
    blocks, seconds = (4, 2.0) if quick else (16, 5.0)
    return [
        ("latency", "spine", lambda: spine.latency(tmp, events=False, blocks=blocks, seconds=seconds)),
        ("events", "spine", lambda: spine.latency(tmp, events=True, blocks=max(4, blocks // 2), seconds=seconds / 2)),
        ("calls", "spine", spine.round_trips),
        ("streams", "streams", lambda: streams.first_byte(rounds=20 if quick else 100)),
        ("fleet", "spine", lambda: spine.fleet(operations=4 if quick else 10)),
        ("growth", "spine", lambda: spine.growth(operations=5_000 if quick else 50_000)),
        ("containers", "containers", lambda: containers.speed(tmp, blocks=blocks)),
        ("containers", "containers", lambda: containers.new_threads(tmp, rounds=4 if quick else 12)),
        ("containers", "containers", lambda: container_load.load(tmp, seconds=15.0 if quick else 60.0)),
    ]


def _show(found: dict[str, float]) -> None:
    width = max(map(len, found), default=0)
    for key, value in found.items():
        goal = GOALS.get(key)
        verdict = ""
        if goal is not None:
            met = value <= goal[1] if goal[0] == "<=" else value >= goal[1]
            verdict = f"goal {goal[0]} {goal[1]:g}   {'met' if met else 'MISSED'}"
        print(f"{key:<{width}}  {value:>12.4g}   {verdict}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
