"""``python -m tests.bench``: measure, print a table, write ``build/bench.json``. Nothing here passes or fails."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import spine

#: What issue 2 asks of each figure: (comparison, goal).
GOALS = {
    "spine.true_vs_celery_noop": ("<=", 1.2),
    "spine.noop_vs_celery_noop": ("<=", 0.65),
    "spine.noop_throughput_ratio": (">=", 1.5),
    "spine.true_throughput_ratio": (">=", 1.0),
    "spine.acquire_live_round_trips": ("<=", 2.0),
    "spine.redis_calls_per_op": ("<=", 8.0),
    "spine.fleet_lost": ("<=", 0.0),
}


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--only", choices=["latency", "events", "calls", "fleet", "growth"], action="append")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    blocks, seconds = (4, 2.0) if options.quick else (16, 5.0)
    with tempfile.TemporaryDirectory(prefix="sandfleet-bench-") as tmp:
        parts = {
            "latency": lambda: spine.latency(Path(tmp), events=False, blocks=blocks, seconds=seconds),
            "events": lambda: spine.latency(Path(tmp), events=True, blocks=max(4, blocks // 2), seconds=seconds / 2),
            "calls": spine.round_trips,
            "fleet": lambda: spine.fleet(operations=4 if options.quick else 10),
            "growth": lambda: spine.growth(operations=5_000 if options.quick else 50_000),
        }
        found: dict[str, float] = {}
        for name, part in parts.items():
            if options.only and name not in options.only:
                continue
            began = time.monotonic()
            for key, value in part().items():
                found[f"spine.{key}"] = round(float(value), 4)
            sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    _show(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"python": platform.python_version(), "machine": platform.machine(), "quick": options.quick}
    options.out.write_text(json.dumps({**found, "run": facts}, indent=2) + "\n")
    return 0


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
