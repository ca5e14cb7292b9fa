"""Publishing: with a script record and message are one; with kombu a message that may be lost is made harmless."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from sandfleet.config import Settings
from sandfleet.errors import NotStarted
from sandfleet.publish import publisher
from sandfleet.store.base import OpRecord, Route
from tests.contract.store_fixtures import MemoryWorld

QUEUE = "sandfleet.node.n1"


class Broker:
    """Stands in for the network: what `send_task` does here is said by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self.when_sending = lambda: None
        monkeypatch.setattr(Celery, "send_task", self.send_task)

    def send_task(self, name: str, **options: Any) -> None:
        self.when_sending()
        self.sent.append({"name": name, **options})


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


def _publish(world: MemoryWorld, record: OpRecord) -> Any:
    publish = publisher(Settings(publish="kombu"), world.store)
    return publish(record, "sandbox.noop", {"v": 1}, QUEUE, 100)


def _live(world: MemoryWorld) -> Route:
    world.announce()
    world.listen()
    return world.live()


def test_kombu_s_publish_carries_the_op_id_and_a_line_for_flower(world: MemoryWorld, broker: Broker) -> None:
    route = _live(world)
    assert _publish(world, world.op(route, describe="noop · 123")).status == "recorded"
    (sent,) = broker.sent
    assert (sent["name"], sent["task_id"], sent["argsrepr"], sent["kwargsrepr"]) == (
        "sandbox.noop",
        "o1",
        "noop · 123",
        "{}",
    )
    assert sent["queue"].name == QUEUE


def test_what_the_store_does_not_take_is_not_published(world: MemoryWorld, broker: Broker) -> None:
    route = _live(world)
    stale = Route(route.sandbox_id, route.node_id, route.incarnation, route.epoch - 1)
    assert _publish(world, world.op(stale)).status == "moved"
    assert broker.sent == []


def test_a_publish_that_fails_half_way_leaves_an_operation_that_can_never_begin(
    world: MemoryWorld, broker: Broker
) -> None:
    route = _live(world)

    def fail() -> None:
        raise ConnectionError("reset by peer")

    broker.when_sending = fail
    with pytest.raises(NotStarted, match="reset by peer") as told:
        _publish(world, world.op(route))
    assert told.value.retryable
    # The broker may have got it all the same: its delivery finds the tombstone.
    assert world.store.claim("o1", route).status == "closed"
    assert world.store.ops(node_id="n1") == []


def test_a_publish_that_failed_after_the_node_had_begun_is_no_failure(world: MemoryWorld, broker: Broker) -> None:
    route = _live(world)

    def begun_and_then_fail() -> None:
        assert world.store.claim("o1", route).status == "claimed"
        raise ConnectionError("the answer was lost")

    broker.when_sending = begun_and_then_fail
    assert _publish(world, world.op(route)).status == "recorded"
    view = world.store.op("o1")
    assert view is not None
    assert view.state == "claimed"
