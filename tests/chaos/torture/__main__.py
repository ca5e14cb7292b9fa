"""``python -m tests.chaos.torture --seconds 600``: torture a fleet, print a table, write ``build/chaos.json``."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.chaos.torture.run import torture, write_report
from tests.chaos.torture.world import Options


def main() -> int:
    """The exit code: 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--backend", choices=("docker", "local"), default="docker")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--roaming", type=int, default=2, help="conversations that go on from a checkpoint elsewhere")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--think-s", type=float, default=0.3, help="most that a client's thread waits between calls")
    parser.add_argument("--sabotage", action="store_true", help="run one effect twice by hand: the judge must see it")
    parser.add_argument(
        "--faults", type=lambda text: tuple(text.split(",")), default=(), help="only these, as the table names them"
    )
    parser.add_argument("--json", type=Path, default=Path("build/chaos.json"))
    given = vars(parser.parse_args())
    path = given.pop("json")
    options = Options(**given)
    print(f"torture of {options.seconds:g} s, seed {options.seed}", flush=True)
    report = torture(options)
    write_report(report, path)
    print(report.table())
    return 0 if report.kept_every_promise else 1


if __name__ == "__main__":
    sys.exit(main())
