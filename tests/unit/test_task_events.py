"""Task events are sent together, from a timer, and none is left behind when the worker ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery.events.dispatcher import EventDispatcher

from sandfleet.task_events import EventFlush


class Dispatcher(EventDispatcher):
    """Celery's, with a broker that only remembers."""

    def __init__(self, *, enabled: bool = True) -> None:
        connection = SimpleNamespace(transport=SimpleNamespace(driver_type="redis"))
        app = SimpleNamespace(
            conf=SimpleNamespace(event_serializer="json", event_exchange="celeryev"),
            clock=SimpleNamespace(forward=lambda: 1),
        )
        self.sent: list[list[str]] = []
        self.away = False
        self.woken = 0
        super().__init__(
            connection, enabled=False, app=app, buffer_group=["task"], on_send_buffered=self._wake,
            buffer_while_offline=False,
        )  # fmt: skip
        self.enabled = enabled

    def _wake(self) -> None:
        self.woken += 1

    def _publish(self, events: Any, *_args: Any, **_kwargs: Any) -> None:
        if self.away:
            raise ConnectionError("Redis is away")
        self.sent.append([event["type"] for event in events])


class Parent:
    """A consumer whose timer is turned by hand."""

    def __init__(self, dispatcher: Dispatcher | None) -> None:
        self.event_dispatcher = dispatcher
        self.repeated: list[Callable[[], object]] = []
        self.timer = SimpleNamespace(call_repeatedly=self._repeat)

    def _repeat(self, _every_s: float, call: Callable[[], object]) -> Any:
        self.repeated.append(call)
        return SimpleNamespace(cancel=lambda: self.repeated.remove(call))


def begun(dispatcher: Dispatcher | None) -> tuple[Parent, EventFlush]:
    parent = Parent(dispatcher)
    step = EventFlush(parent)
    step.start(parent)
    return parent, step


def test_events_of_a_moment_travel_in_one_message() -> None:
    dispatcher = Dispatcher()
    parent, _ = begun(dispatcher)
    for kind in ("task-received", "task-started", "task-succeeded") * 20:
        dispatcher.send(kind)
    assert (dispatcher.sent, dispatcher.woken) == ([], 0)
    [flush] = parent.repeated
    flush()
    assert [len(events) for events in dispatcher.sent] == [60]
    flush()
    assert len(dispatcher.sent) == 1, "with nothing to tell nothing is sent"


def test_a_main_loop_that_stands_still_does_not_let_them_pile_up() -> None:
    dispatcher = Dispatcher()
    begun(dispatcher)
    for _ in range(1200):
        dispatcher.send("task-started")
    assert [len(events) for events in dispatcher.sent] == [500, 500]


def test_the_last_events_are_sent_when_the_worker_ends() -> None:
    dispatcher = Dispatcher()
    parent, step = begun(dispatcher)
    dispatcher.send("task-succeeded")
    step.shutdown(parent)
    assert dispatcher.sent == [["task-succeeded"]]
    assert parent.repeated == []


def test_a_broker_that_is_away_does_not_keep_the_worker_from_ending() -> None:
    dispatcher = Dispatcher()
    parent, step = begun(dispatcher)
    dispatcher.send("task-succeeded")
    dispatcher.away = True
    step.shutdown(parent)
    assert dispatcher.sent == []


def test_a_new_connection_gets_a_timer_of_its_own_and_the_old_one_ends() -> None:
    parent, step = begun(Dispatcher())
    step.stop(parent)
    assert parent.repeated == []
    step.start(parent)
    assert len(parent.repeated) == 1


def test_without_events_nothing_is_timed() -> None:
    for dispatcher in (None, Dispatcher(enabled=False)):
        parent, step = begun(dispatcher)
        assert parent.repeated == []
        step.stop(parent)
        step.shutdown(parent)
