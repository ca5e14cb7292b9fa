"""The yardstick: a bare Celery app as anybody would set it up, and its worker (stock threads pool of eight)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery

app = Celery("stock")
app.conf.update(task_default_queue="stock", broker_connection_retry_on_startup=True, worker_send_task_events=False)
if url := os.environ.get("SANDFLEET_BENCH_REDIS"):
    app.conf.update(broker_url=url, result_backend=url)


@app.task(name="stock.noop")
def noop() -> None:
    """Do nothing."""


@contextmanager
def stock_worker(url: str, log: Path, *, events: bool) -> Iterator[Celery]:
    """A stock worker process on ``url``; gives an app that sends to it."""
    flags = ["-E"] if events else ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    worker = ["-A", "tests.bench.stock", "worker", "-P", "threads", "-c", "8", "-l", "ERROR"]
    argv = [sys.executable, "-m", "celery", *worker]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*argv, *flags],
            env={**os.environ, "SANDFLEET_BENCH_REDIS": url},
            cwd=Path(__file__).resolve().parents[2],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            sender = Celery("stock", broker=url, backend=url, set_as_current=False)
            sender.conf.update(task_default_queue="stock")
            sender.send_task("stock.noop").get(timeout=30)
            yield sender
        finally:
            process.terminate()
            process.wait(timeout=20)
