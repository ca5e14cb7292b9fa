"""``python -m sandfleet_workers``: run one node. `sandfleet worker` does the same with friendlier options."""

from __future__ import annotations

import argparse
import sys

from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from sandfleet.logs import setup_logging
from sandfleet_workers.worker import run_node


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and run until stopped."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet_workers", description="Run one sandfleet node.")
    parser.add_argument("--node-id", help="id of this node; the first free <host>-<n> by default")
    parser.add_argument("--loglevel", default="INFO")
    options = parser.parse_args(argv)
    setup_logging(options.loglevel)
    try:
        return run_node(Settings.load(node_id=options.node_id), loglevel=options.loglevel)
    except SandfleetError as exc:
        sys.stderr.write(f"sandfleet worker: {exc}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
