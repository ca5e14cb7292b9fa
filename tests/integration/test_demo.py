"""``make demo`` does what it promises, on this machine, as whoever runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sandfleet.cli.demo_play import STEPS
from tests.services import require


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_demo_does_every_step_and_leaves_nothing_behind() -> None:
    require("redis")
    require("bwrap")
    command = [sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "demo", "--backend", "local", "--json"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    wrong = [step for step in told["steps"] if not step["ok"]]
    assert (done.returncode, wrong) == (0, []), done.stderr
    assert (told["ok"], told["nodes"], told["threads"], len(told["steps"])) == (True, 2, 3, STEPS)
    assert told["operations"] > 100
    assert all(told[key] > 0 for key in ("p50_ms", "noop_p50_ms", "acquire_new_p50_ms", "acquire_warm_p50_ms"))
    assert told["acquire_warm_p50_ms"] < told["acquire_new_p50_ms"]
    assert {step["node"] for step in told["steps"]} >= {"node-1", "node-2"}
    assert "kernel" in told["isolation"]
