"""How the processes of the fleet meet their broker again."""

from __future__ import annotations

import json
import logging
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


SECRET = "hunter2-of-the-test"


@pytest.mark.parametrize("refused", ["on_unknown_task", "on_invalid_task", "on_unknown_message", "on_decode_error"])
def test_a_message_that_is_none_of_ours_is_refused_without_telling_what_is_in_it(
    refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery logs the body with its headers: a misspelt task of a plain caller has the environment of a command."""
    consumer, told = QuickConsumer.__new__(QuickConsumer), Mock()
    consumer.app, consumer.event_dispatcher, consumer.connection_errors = told, told, ()
    body = json.dumps([[], {"env": {"K": SECRET}}, {}]).encode()
    headers = {"id": "o1", "task": "sandbox.exec_command", "kwargsrepr": SECRET}
    message = Mock(headers=headers, body=body, payload=[[], {"env": SECRET}, {}], delivery_info={}, properties={})
    problem = ValueError("no")
    arguments = {"on_unknown_message": (body, message), "on_decode_error": (message, problem)}
    getattr(consumer, refused)(*arguments.get(refused, (body, message, problem)))
    [line] = caplog.records
    assert (line.getMessage(), line.__dict__["task"], line.__dict__["op_id"]) == (
        "message.refused", "sandbox.exec_command", "o1",
    )  # fmt: skip
    assert SECRET not in caplog.text
    assert message.reject_log_error.called or message.ack.called, "it would come again"
    logging.getLogger("celery.worker.consumer.consumer").error("the next one")
    assert "the next one" in caplog.text
