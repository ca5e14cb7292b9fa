"""``python -m sandfleet_scheduler``: run one scheduler. `sandfleet scheduler` does the same."""

from __future__ import annotations

import argparse
import sys

from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from sandfleet.logs import setup_logging
from sandfleet_scheduler.tasks import run_scheduler


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and run until stopped."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet_scheduler", description="Run one sandfleet scheduler.")
    parser.add_argument("--loglevel", default="INFO")
    options = parser.parse_args(argv)
    setup_logging(options.loglevel)
    try:
        return run_scheduler(Settings.load(), loglevel=options.loglevel)
    except SandfleetError as exc:
        sys.stderr.write(f"sandfleet scheduler: {exc}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
