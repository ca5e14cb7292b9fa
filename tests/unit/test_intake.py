"""How the processes of the fleet meet their broker again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from sandfleet.config import Settings
from sandfleet.intake import CONSUMER, QuickConsumer
from sandfleet_workers.worker import node_app


class _Broken:
    def __init__(self) -> None:
        self.pauses: dict[str, float] = {}

    def ensure_connection(self, *_args: Any, **kwargs: Any) -> _Broken:
        self.pauses.update({key: value for key, value in kwargs.items() if key.startswith("interval")})
        return self


def test_the_broker_is_asked_for_at_least_once_a_second() -> None:
    consumer, broken = QuickConsumer.__new__(QuickConsumer), _Broken()
    consumer.app, consumer.first_connection_attempt = Celery(set_as_current=False), False
    consumer.ensure_connected(broken)
    assert set(broken.pauses) == {"interval_start", "interval_step", "interval_max"}
    assert max(broken.pauses.values()) <= 1.0


def test_nodes_and_schedulers_consume_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandfleet_scheduler import tasks  # noqa: PLC0415  (its client is replaced first)

    settings = Settings.load({}, backend="mock", data_root=tmp_path)
    node = node_app(settings, SimpleNamespace(node_id="n1"))  # type: ignore[arg-type]
    assert node.conf.worker_consumer == CONSUMER
    monkeypatch.setattr(tasks, "Client", Mock())
    assert tasks.scheduler_app(settings).conf.worker_consumer == CONSUMER
