"""The yardstick: a bare Celery app as anybody would set it up, with a no-op task."""

from __future__ import annotations

import os

from celery import Celery

URL = os.environ["SANDFLEET_BENCH_REDIS"]

app = Celery("stock", broker=URL, backend=URL)
app.conf.update(task_default_queue="stock", worker_send_task_events=False, broker_connection_retry_on_startup=True)


@app.task(name="stock.noop")
def noop() -> None:
    """Do nothing."""
