"""Our hand-made Celery message beside the one that kombu itself pushes: any Celery worker must take it for its own."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import before_task_publish
from kombu.serialization import prepare_accept_content
from kombu.transport.virtual import Message

from sandfleet.celery_app import celery_app, queue_of
from sandfleet.config import Settings
from sandfleet.ids import Identity
from sandfleet.publish import publisher
from sandfleet.store.base import OpRecord, Route
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OPS_QUEUE, celery_message
from tests.services import wait_until

TASK, QUEUE = "sandbox.execute_command", "sandfleet.node.n1"
ARGUMENT = {"v": 1, "op": "op-1", "args": {"command": "echo 'é \"quoted\"'"}, "content": None}
SHOWN = "bash: echo · 3f9a1c22"

#: Our body is plain JSON text where kombu writes base64: a third less bytes, and kombu reads both. The other two are
#: options that Celery hands on to kombu by accident; what is read are the headers of the same names.
ONLY_KOMBU_WRITES = {"body_encoding", "argsrepr", "kwargsrepr"}
#: Values that are each message's own.
VARY = {"origin", "delivery_tag"}


@pytest.fixture
def app(fresh_redis_url: str) -> Iterator[Celery]:
    made = celery_app(Settings.load({}, redis_url=fresh_redis_url))
    yield made
    made.close()


@pytest.fixture
def server(fresh_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(fresh_redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def ours() -> dict[str, Any]:
    message: dict[str, Any] = json.loads(celery_message(TASK, "op-1", ARGUMENT, queue=QUEUE, describe=SHOWN))
    return message


@pytest.fixture
def theirs(app: Celery, server: redis.Redis) -> dict[str, Any]:
    app.send_task(
        TASK,
        args=[ARGUMENT],
        task_id="op-1",
        queue=queue_of(QUEUE),
        ignore_result=True,
        argsrepr=SHOWN,
        kwargsrepr="{}",
    )
    [raw] = server.lrange(QUEUE, 0, -1)
    message: dict[str, Any] = json.loads(raw)
    return message


def test_a_publish_of_kombu_s_is_one_push_and_leaves_no_binding_behind(app: Celery, server: redis.Redis) -> None:
    app.send_task(TASK, kwargs={"thread_id": "t", "command": "ls"}, ignore_result=True)
    app.send_task(TASK, args=[ARGUMENT], queue=queue_of(QUEUE), ignore_result=True)
    assert sorted(server.keys()) == [QUEUE, OPS_QUEUE]


def test_the_envelope_has_the_same_fields(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    assert ours["content-type"] == theirs["content-type"] == "application/json"
    assert ours["content-encoding"] == theirs["content-encoding"] == "utf-8"


def test_the_headers_are_the_same_key_by_key_and_value_by_value(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours["headers"]) == set(theirs["headers"])
    for name, value in theirs["headers"].items():
        assert type(ours["headers"][name]) is type(value), name
        if name not in VARY:
            assert ours["headers"][name] == value, name


def test_the_origin_is_a_process_at_a_host(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for message in (ours, theirs):
        assert "@" in message["headers"]["origin"]


def test_the_properties_are_the_same_but_for_the_encoding_of_the_body(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert set(theirs["properties"]) - set(ours["properties"]) == ONLY_KOMBU_WRITES
    for name, value in ours["properties"].items():
        if name == "reply_to":
            continue  # kombu names a result queue that ignore_result never uses
        assert type(value) is type(theirs["properties"][name]), name
        if name not in VARY:
            assert value == theirs["properties"][name], name


def test_the_body_is_the_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert json.loads(ours["body"]) == json.loads(base64.b64decode(theirs["body"]))


def test_kombu_s_own_channel_reads_both_alike(app: Celery, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    with app.connection_for_read() as connection, connection.channel() as channel:
        read = []
        for raw in (ours, theirs):
            message = Message(raw, channel=channel, accept=prepare_accept_content(["json"]))
            read.append((message.decode(), message.headers["id"], message.content_type, message.delivery_info))
        assert read[0] == read[1]


def test_tracing_libraries_see_the_same_publish(app: Celery) -> None:
    """What `before_task_publish` receivers read (OpenTelemetry: ``headers["id"]``) and what they add."""
    seen: list[dict[str, Any]] = []

    def receiver(sender: str, headers: dict[str, Any], **facts: Any) -> None:
        seen.append({"sender": sender, "id": headers.get("id"), "task": headers.get("task"), **facts})
        headers["traceparent"] = "00-1-2-01"

    store = MemoryStore()
    route = Route("3f9a1c22", "n1", "i1", 7)
    record = OpRecord("op-1", "execute_command", route, Identity("t").digest, 0, 0, "client", SHOWN)
    pushed: list[str] = []
    store.record = lambda op, push, max_inflight: pushed.append(push.message)  # type: ignore[method-assign,assignment,union-attr]
    before_task_publish.connect(receiver)
    try:
        publisher(Settings.load({}), store)(record, TASK, ARGUMENT, QUEUE, 10)
        app.send_task(TASK, args=[ARGUMENT], task_id="op-1", queue=queue_of(QUEUE), ignore_result=True)
    finally:
        before_task_publish.disconnect(receiver)
    ours, theirs = seen
    assert json.loads(pushed[0])["headers"]["traceparent"] == "00-1-2-01"
    assert set(theirs) - {"signal"} <= set(ours) | {"signal"}
    assert (ours["sender"], ours["id"], ours["task"]) == (theirs["sender"], theirs["id"], theirs["task"])
    assert ours["routing_key"] == theirs["routing_key"]
    assert ours["properties"]["correlation_id"] == theirs["properties"]["correlation_id"]


# --- a stock Celery worker -------------------------------------------------------------------------------


@pytest.fixture
def taken(app: Celery, server: redis.Redis) -> Iterator[list[Any]]:
    """What a stock Celery worker on our queue was called with."""
    calls: list[Any] = []

    @app.task(name=TASK, bind=True, shared=False)
    def execute(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((self.request.id, args, kwargs, self.request.argsrepr, threading.current_thread().name))
        return "done"

    app.conf.task_queues = [queue_of(QUEUE)]
    with start_worker(
        app,
        pool="solo",
        loglevel="CRITICAL",
        perform_ping_check=False,
        queues=[QUEUE],
        shutdown_timeout=10,
    ):
        yield calls


def test_a_stock_celery_worker_executes_our_message(taken: list[Any], server: redis.Redis) -> None:
    server.lpush(QUEUE, celery_message(TASK, "op-1", ARGUMENT, queue=QUEUE, describe=SHOWN))
    wait_until(lambda: taken, 10.0)
    [(task_id, args, kwargs, shown, _thread)] = taken
    assert (task_id, args, kwargs, shown) == ("op-1", (ARGUMENT,), {}, SHOWN)
    wait_until(lambda: server.llen(QUEUE) == 0, 5.0)
    assert not [key for key in sorted(server.keys()) if "unacked" in key or "celery-task-meta" in key]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        # Were it unpickled, it would run; the body here is a harmless pickled tuple.
        ("application/x-python-serialize", base64.b64encode(b"\x80\x04]\x94}\x94}\x94\x87\x94.").decode()),
        ("application/x-yaml", base64.b64encode(b"[[], {}, {}]").decode()),
    ],
    ids=["pickle", "yaml"],
)
def test_a_message_that_is_not_json_is_refused_and_the_next_one_runs(
    taken: list[Any], server: redis.Redis, content_type: str, body: str
) -> None:
    evil = json.loads(celery_message(TASK, "evil", ARGUMENT, queue=QUEUE, describe=SHOWN))
    evil.update({"content-type": content_type, "content-encoding": "binary", "body": body})
    evil["properties"]["body_encoding"] = "base64"
    server.lpush(QUEUE, json.dumps(evil))
    server.lpush(QUEUE, celery_message(TASK, "good", ARGUMENT, queue=QUEUE, describe=SHOWN))
    wait_until(lambda: taken, 10.0)
    assert [call[0] for call in taken] == ["good"]


def test_our_apps_accept_json_alone(app: Celery) -> None:
    assert set(app.conf.accept_content) == set(app.conf.result_accept_content) == {"json"}
    assert app.conf.task_serializer == app.conf.result_serializer == "json"
