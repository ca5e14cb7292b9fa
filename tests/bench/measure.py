"""How the bench measures: interleaved blocks, medians, throughput by threads, Redis calls by MONITOR."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

__all__ = ["Memory", "RedisCalls", "cgroup_mib", "interleaved", "memory_mib", "p50", "rss_mib", "throughput"]


def p50(samples: list[float]) -> float:
    """The median."""
    return statistics.median(samples)


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, blocks: int, per_block: int, warm_up: int = 30
) -> dict[str, list[float]]:
    """Milliseconds per call of each function, measured in alternating blocks so that noise hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warm_up):
            call()
    for _ in range(blocks):
        for name, call in calls.items():
            for _ in range(per_block):
                began = time.perf_counter()
                call()
                samples[name].append((time.perf_counter() - began) * 1000)
    return samples


def throughput(call: Callable[[int], object], *, threads: int, seconds: float) -> float:
    """Calls per second of ``threads`` threads that each call ``call(number)`` in a loop."""
    done = [0] * threads
    failures: list[BaseException] = []
    until = time.monotonic() + seconds

    def loop(number: int) -> None:
        try:
            while time.monotonic() < until:
                call(number)
                done[number] += 1
        except BaseException as exc:  # noqa: BLE001  (raised again by the caller's thread)
            failures.append(exc)

    workers = [threading.Thread(target=loop, args=(number,)) for number in range(threads)]
    began = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(done) / (time.monotonic() - began)


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no VmRSS for {pid}")


@dataclass(frozen=True, slots=True)
class Memory:
    """A process' memory in MiB: all of it (its PSS if nobody shared anything with it), its share of it, its own."""

    rss: float
    pss: float
    private: float


def memory_mib(pid: int) -> Memory:
    """What a process has now."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) / 1024
    return Memory(fields["Rss"], fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"])


def cgroup_mib(pid: int) -> float:
    """What is charged to a process' cgroup: its memory, its page cache and the kernel's for it."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes").read_text()) / 1024**2
        if number == "0" and (file := Path(f"/sys/fs/cgroup{path}/memory.current")).exists():
            return int(file.read_text()) / 1024**2
    raise ValueError(f"no memory cgroup for {pid}")


class RedisCalls:
    """Counts what reaches a Redis server, from its own MONITOR: calls of clients, and calls inside scripts."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, socket_timeout=None)
        self._probe = redis.Redis.from_url(url)
        self._lines: list[tuple[str, bool]] = []
        self._ready = threading.Event()
        self._end = ""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        with self._redis.monitor() as monitor:
            self._ready.set()
            for command in monitor.listen():
                text = str(command["command"])
                if self._end and self._end in text:
                    return
                self._lines.append((text, command["client_type"] == "lua"))

    def __enter__(self) -> RedisCalls:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._end = f"sandfleet-bench-end-{time.monotonic_ns()}"
        self._probe.echo(self._end)
        self._thread.join(timeout=10)
        self._probe.close()
        self._redis.close()

    def counts(self) -> tuple[int, int]:
        """(calls of clients, calls inside scripts) so far."""
        inside = sum(1 for _, lua in self._lines if lua)
        return len(self._lines) - inside, inside
