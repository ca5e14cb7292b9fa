"""Promises about messages that somebody hostile, or of another version, wrote straight onto a queue."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sandfleet.ids import new_op_id
from sandfleet.store.base import Push
from sandfleet.wire import OPS_QUEUE, SCHEDULER_QUEUE, node_queue
from tests.chaos.fleet import (
    Fleet,
    Process,
    node_of,
    node_took_all,
    note,
    unique,
)
from tests.chaos.forging import N1, a_command, envelope, record_of, route_of
from tests.services import wait_until


class Payload:
    """Unpickling it runs a command on the node."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def hostile_messages(good: str, marker: Path) -> Iterator[tuple[str, str | bytes]]:
    """Messages by name, none of which may run anything or end the worker. ``good`` is a well-formed one."""
    whole = json.loads(good)

    def changed(**parts: Any) -> str:
        return json.dumps({**whole, **parts})

    def headers(**fields: Any) -> str:
        return changed(headers={**whole["headers"], **fields})

    def body(*args: Any) -> str:
        return changed(body=json.dumps([list(args), {}, {}]))

    (operation,), _, _ = json.loads(whole["body"])
    pickled = base64.b64encode(pickle.dumps(((Payload(marker),), {}, {}))).decode()
    properties = whole["properties"]
    yield "empty", b""
    yield "not json", b"{"
    yield "binary", bytes(range(256))
    yield "a number", b"5"
    yield "null", b"null"
    yield "a list", b"[]"
    yield "an empty object", b"{}"
    yield "deeply nested", b"[" * 100_000 + b"]" * 100_000
    yield "no properties", json.dumps({key: value for key, value in whole.items() if key != "properties"})
    yield "no delivery tag", changed(properties={k: v for k, v in properties.items() if k != "delivery_tag"})
    yield "properties of the wrong type", changed(properties="x")
    yield "no headers", changed(headers={})
    yield "headers of the wrong type", changed(headers=[1])
    yield "a body that is a number", changed(body=5)
    yield "a body that is no json", changed(body="{")
    yield "a body that is an object", changed(body="{}")
    yield "a body of too few parts", changed(body="[[]]")
    yield "no arguments", body()
    yield "two arguments", body(operation, operation)
    yield "an argument that is a list", body([1, 2])
    yield "an argument that is null", body(None)
    yield "arguments of the wrong type", body({**operation, "args": "x"})
    yield "numbers of the wrong type", body({**operation, "epoch": "1e9", "start_by": None})
    yield (
        "pickle declared",
        changed(
            **{"content-type": "application/x-python-serialize", "content-encoding": "binary"},
            body=pickled,
            properties={**properties, "body_encoding": "base64"},
        ),
    )
    yield "pickle disguised", changed(body=pickled, properties={**properties, "body_encoding": "base64"})
    yield (
        "yaml declared",
        changed(**{"content-type": "application/x-yaml"}, body="!!python/object/apply:os.system [ls]"),
    )
    yield "an unknown content type", changed(**{"content-type": "application/x-nonsense"})
    yield "an unknown encoding", changed(**{"content-encoding": "nonsense"})
    yield "an unknown task", headers(task="os.system")
    yield "a celery task", headers(task="celery.backend_cleanup")
    yield "a task that is no text", headers(task=None)
    yield "an id that is no text", headers(id=None)
    yield "an id that is a list", headers(id=["x"])
    yield "an id of 100 000 characters", headers(id="x" * 100_000)
    yield "another task than the body's", headers(task="sandbox.read_file")
    yield "another id than the body's", headers(id=new_op_id())
    yield "an eta far away", headers(eta="2999-01-01T00:00:00")
    yield "an eta that is none", headers(eta="never")
    yield "expired long ago", headers(expires="2001-01-01T00:00:00")
    yield "a time limit that is none", headers(timelimit=["x", "y"])
    yield "a wrong version", body({**operation, "v": 99})
    yield "no version", body({key: value for key, value in operation.items() if key != "v"})
    yield "a forged owner", body({**operation, "owner": ["mallory", "thread"]})
    yield "an owner that is a path", body({**operation, "owner": ["../..", "../../etc"]})
    yield "a sandbox that is a path", body({**operation, "sid": "../../etc"})
    yield (
        "a lifecycle task for a foreign path",
        changed(
            headers={**whole["headers"], "task": "node.destroy"},
            body=json.dumps([[{**operation, "kind": "node.destroy", "args": {"delete_data": True}}], {}, {}]),
        ),
    )
    yield "twenty megabytes", body({**operation, "args": {"command": "x" * 20_000_000}})


@pytest.mark.chaos
def test_no_message_written_by_an_enemy_runs_anything_or_ends_the_worker(
    fleet: Fleet, broker: redis.Redis, tmp_path: Path, spare: Process
) -> None:
    thread = unique("hostile")
    queue = node_queue("spare")
    marker = tmp_path / "ran"
    with fleet.provider(label="spare") as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        route = route_of(fleet, sandbox.id)
        (before,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == "spare"]
        for name, message in hostile_messages(envelope(a_command(fleet, thread, route, note(666))), marker):
            broker.lpush(queue, message)
            node_took_all(fleet, "spare")
            assert spare.running, f"{name}: {spare.tail()}"
        # Well-formed, but never recorded: an effect needs its record.
        broker.lpush(queue, envelope(a_command(fleet, thread, route, note(666))))

        assert sandbox.run(note(1), timeout_s=10, queue_timeout_s=20).exit_code == 0, fleet.story()
        assert fleet.numbers(thread) == [1]
        assert not marker.exists()
        assert sorted(path.name for path in fleet.workspace(thread).iterdir()) == ["log"]
        (after,) = [view.incarnation for view in fleet.store.nodes() if view.node_id == "spare"]
        assert (spare.running, after) == (True, before), spare.tail()


@pytest.mark.chaos
def test_no_message_written_by_an_enemy_ends_a_scheduler(fleet: Fleet, broker: redis.Redis, tmp_path: Path) -> None:
    thread = unique("hostile-scheduler")
    marker = tmp_path / "ran"
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        good = envelope(a_command(fleet, thread, route_of(fleet, sandbox.id), note(666)))
        scheduler = fleet.scheduler
        assert scheduler is not None
        for queue in (SCHEDULER_QUEUE, OPS_QUEUE):
            for _name, message in hostile_messages(good, marker):
                broker.lpush(queue, message)
            broker.lpush(queue, good.replace("sandbox.execute_command", "scheduler.acquire"))
            wait_until(lambda q=queue: broker.llen(q) == 0, 30, story=fleet.story)
        assert provider.acquire(unique("after")), fleet.story()
        assert sandbox.run(note(1)).exit_code == 0
        assert fleet.numbers(thread) == [1]
        assert not marker.exists()
        assert scheduler.running, scheduler.tail()


@pytest.mark.parametrize(
    ("flaw", "code"),
    [
        ({"v": 99}, "version_mismatch"),
        ({"args": {"command": 5}}, "invalid_argument"),
        ({"args": {"no such": "argument"}}, "invalid_argument"),
        ({"owner": ["mallory", "somebody"]}, "sandbox_not_found"),
        ({"epoch": 1}, "not_started"),
        ({"args": [], "start_by": "soon"}, "invalid_argument"),
    ],
    ids=["version", "argument", "unknown argument", "owner", "epoch", "shape"],
)
def test_a_recorded_operation_whose_message_is_wrong_is_answered(
    fleet: Fleet, broker: redis.Redis, flaw: dict[str, Any], code: str
) -> None:
    thread = unique("flaw")
    with fleet.provider() as provider:
        sandbox = provider.get(provider.acquire(thread))
        assert sandbox is not None
        message = a_command(fleet, thread, route_of(fleet, sandbox.id), note(666))
        pushed = Push(N1, envelope(message, **flaw))
        assert fleet.store.record(record_of(message), pushed).status == "recorded"

        def outcome() -> str:
            view = fleet.store.op(message.op_id)
            assert view is not None
            return view.outcome

        assert wait_until(outcome, 10, story=fleet.story) == code
        assert fleet.numbers(thread) == []
        assert node_of(fleet, thread) == "n1"
