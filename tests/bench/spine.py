"""The spine: what one operation costs against a bare Celery round trip on the same Redis, in the same run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery

from sandfleet import Sandbox, SandboxProvider
from sandfleet.stack import Stack
from tests.bench.measure import RedisCalls, interleaved, p50, rss_mib, throughput
from tests.bench.stock import stock_worker

__all__ = ["fleet", "growth", "latency", "round_trips"]

THREADS = 32


def _handles(provider: SandboxProvider, thread_id: str) -> list[Sandbox]:
    sandbox_id = provider.acquire(thread_id)
    handles = [provider.get(sandbox_id) for _ in range(THREADS)]
    return [handle for handle in handles if handle is not None]


def _stock(app: Celery) -> Callable[[], object]:
    return lambda: app.send_task("stock.noop").get(timeout=30)


def latency(tmp: Path, *, events: bool, blocks: int, seconds: float) -> dict[str, float]:
    """Latency and throughput ratios of one node against a stock worker."""
    suffix = "_events" if events else ""
    with (
        Stack(["bench"], backend="local", backends=("local", "mock"), task_events=events) as stack,
        stock_worker(stack.settings.redis_url, tmp / f"stock{suffix}.log", events=events) as app,
        SandboxProvider(stack.settings) as local,
        SandboxProvider(stack.settings.model_copy(update={"backend": "mock"})) as mock,
    ):
        shells, mocks = _handles(local, "bench-local"), _handles(mock, "bench-mock")
        stock = _stock(app)
        calls: dict[str, Callable[[], object]] = {
            "stock": stock,
            "noop": lambda: mocks[0].stat("/mnt/user-data"),
            "true": lambda: shells[0].run("true").check(),
        }
        samples = interleaved(calls, blocks=blocks, per_block=25)
        base = p50(samples["stock"])
        found = {
            f"celery_noop_p50_ms{suffix}": base,
            f"noop_p50_ms{suffix}": p50(samples["noop"]),
            f"true_p50_ms{suffix}": p50(samples["true"]),
            f"noop_vs_celery_noop{suffix}": p50(samples["noop"]) / base,
            f"true_vs_celery_noop{suffix}": p50(samples["true"]) / base,
        }
        rates = [
            (
                throughput(lambda _: stock(), threads=THREADS, seconds=seconds),
                throughput(lambda n: mocks[n].stat("/mnt/user-data"), threads=THREADS, seconds=seconds),
                throughput(lambda n: shells[n].run("true").check(), threads=THREADS, seconds=seconds),
            )
            for _ in range(2)
        ]
        stock_rate, noop_rate, true_rate = (sum(column) / len(column) for column in zip(*rates, strict=True))
        found[f"celery_noop_per_s{suffix}"] = stock_rate
        found[f"noop_throughput_ratio{suffix}"] = noop_rate / stock_rate
        found[f"true_throughput_ratio{suffix}"] = true_rate / stock_rate
        return found


def round_trips(operations: int = 200) -> dict[str, float]:
    """Redis calls per operation and per acquire of a live or warm sandbox, heartbeats taken off."""
    with Stack(["bench"], backend="local") as stack, SandboxProvider(stack.settings) as provider:
        sandbox_id = provider.acquire("bench-calls")
        sandbox = provider.get(sandbox_id)
        assert sandbox is not None

        def acquire_live() -> None:
            provider.acquire("bench-calls")

        def acquire_warm() -> None:
            provider.release(sandbox_id)
            provider.acquire("bench-calls")

        def true() -> None:
            sandbox.run("true")

        def read() -> None:
            sandbox.stat("/mnt/user-data")

        idle = _calls_of(stack, lambda: time.sleep(3.0))
        found: dict[str, float] = {}
        for name, call in {"live": acquire_live, "true": true, "read": read}.items():
            call()
            outer, inner = _calls_of(stack, lambda call=call: [call() for _ in range(operations)], idle)
            found[name], found[f"{name}_inner"] = outer / operations, inner / operations
        for _ in range(operations + 1):
            provider.release(sandbox_id)
        outer, _ = _calls_of(stack, lambda: [acquire_warm() for _ in range(operations)], idle)
        return {
            "acquire_live_round_trips": round(found["live"], 2),
            "acquire_warm_with_release_round_trips": round(outer / operations, 2),
            "redis_calls_per_op": round(found["true"], 2),
            "redis_calls_per_read": round(found["read"], 2),
            "redis_calls_inside_scripts_per_op": round(found["true_inner"], 2),
        }


def _calls_of(stack: Stack, run: Callable[[], Any], idle: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """(client calls, calls in scripts) during ``run``; with ``idle`` (per second) taken off. Without: per second."""
    began = time.monotonic()
    with RedisCalls(stack.settings.redis_url) as calls:
        run()
    took = time.monotonic() - began
    outer, inner = calls.counts()
    if idle == (0.0, 0.0):
        return outer / took, inner / took
    return outer - idle[0] * took, inner - idle[1] * took


def fleet(*, nodes: int = 10, sandboxes: int = 1000, threads: int = 20, operations: int = 10) -> dict[str, float]:
    """A fleet of mock sandboxes: every operation must come back with its own answer."""
    with (
        Stack(nodes, backend="mock", replicas=sandboxes // nodes + 20, acquire_timeout_s=120) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        lost = [0] * threads
        began = time.monotonic()

        def work(number: int) -> None:
            for index in range(number, sandboxes, threads):
                sandbox = provider.get(provider.acquire(f"fleet-{index}"))
                assert sandbox is not None
                for step in range(operations // 2):
                    text = f"{index}:{step}"
                    sandbox.write_file("/mnt/user-data/workspace/mark", text)
                    lost[number] += sandbox.read_file("/mnt/user-data/workspace/mark") != text

        _on_threads(work, threads)
        took = time.monotonic() - began
        used = {info.node_id for info in provider.list()}
        total = sandboxes * (operations // 2) * 2
        return {
            "fleet_lost": sum(lost) + (sandboxes - len(provider.list())) + (nodes - len(used)),
            "fleet_operations": total,
            "fleet_ops_per_s": total / took,
        }


def growth(*, operations: int = 50_000, threads: int = 20) -> dict[str, float]:
    """Growth of client and node over many operations, after a warm-up of a tenth."""
    with Stack(["bench"], backend="mock", replicas=threads + 1) as stack, SandboxProvider(stack.settings) as provider:
        found = [provider.get(provider.acquire(f"growth-{n}")) for n in range(threads)]
        handles = [handle for handle in found if handle is not None]
        node_pid = stack.nodes["bench"].pid

        def run(count: int) -> None:
            def work(number: int) -> None:
                for step in range(count // threads):
                    if step % 4:
                        handles[number].stat("/mnt/user-data")
                    else:
                        handles[number].write_file("/mnt/user-data/workspace/mark", str(step))

            _on_threads(work, threads)

        run(operations // 5)
        client_before, node_before = rss_mib(os.getpid()), rss_mib(node_pid)
        run(operations)
        return {
            "client_growth_mib": round(rss_mib(os.getpid()) - client_before, 2),
            "node_growth_mib": round(rss_mib(node_pid) - node_before, 2),
            "growth_operations": operations,
        }


def _on_threads(work: Callable[[int], None], threads: int) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:  # noqa: BLE001  (raised again by the caller's thread)
            failures.append(exc)

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
