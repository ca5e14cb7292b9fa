"""Live output: how soon the first byte of a running command is with its caller, against a plain run in the same run."""

from __future__ import annotations

import time

from sandfleet import Sandbox, SandboxProvider
from sandfleet.jobs import OutputChunk
from sandfleet.stack import Stack
from tests.bench.measure import p50

__all__ = ["first_byte"]

#: It goes on after its first byte, as a build does.
_TALKS = "echo first; sleep 0.1"
_WARM_UP = 5


def first_byte(*, rounds: int) -> dict[str, float]:
    """Milliseconds from the call to the first byte: by callback, and from a job's stream; and what a call costs that is
    followed but writes once."""
    samples: dict[str, list[float]] = {name: [] for name in ("plain", "callback", "job", "followed")}
    with Stack(["bench"], backend="local") as stack, SandboxProvider(stack.settings) as provider:
        sandbox = provider.get(provider.acquire("bench-streams"))
        assert sandbox is not None
        for number in range(_WARM_UP + rounds):
            found = _round(sandbox)
            if number >= _WARM_UP:
                for name, took_ms in found.items():
                    samples[name].append(took_ms)
    plain = p50(samples["plain"])
    return {
        "plain_run_p50_ms": plain,
        "first_byte_p50_ms": p50(samples["callback"]),
        "first_byte_vs_plain_run": p50(samples["callback"]) / plain,
        "job_first_byte_vs_plain_run": p50(samples["job"]) / plain,
        "followed_run_vs_plain_run": p50(samples["followed"]) / plain,
    }


def _round(sandbox: Sandbox) -> dict[str, float]:
    first, found = list[float](), dict[str, float]()
    began = time.perf_counter()
    sandbox.run("echo first")
    found["plain"] = _ms(began, time.perf_counter())
    began = time.perf_counter()
    sandbox.run(_TALKS, on_stdout=lambda _: first.append(time.perf_counter()))
    found["callback"] = _ms(began, first[0])
    began = time.perf_counter()
    job = sandbox.run(_TALKS, background=True)
    next(record for record in job.output() if isinstance(record, OutputChunk))
    found["job"] = _ms(began, time.perf_counter())
    job.wait(10)
    began = time.perf_counter()
    sandbox.run("echo first", on_stdout=lambda _: None)
    found["followed"] = _ms(began, time.perf_counter())
    return found


def _ms(began: float, ended: float) -> float:
    return (ended - began) * 1000
