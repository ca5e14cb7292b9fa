"""The one loop that waits for every running operation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from sandfleet_workers.waiter import READ, WRITE, Waiter, shared_waiter
from tests.services import wait_until


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter("test-waiter")
    yield made
    made.close()
    assert not made.is_alive()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_ready_descriptor_is_told_on_the_waiters_thread(waiter: Waiter, pipe: tuple[int, int]) -> None:
    heard: list[tuple[bytes, str]] = []
    waiter.register(pipe[0], lambda _: heard.append((os.read(pipe[0], 10), threading.current_thread().name)))
    os.write(pipe[1], b"x")
    wait_until(lambda: heard == [(b"x", "test-waiter")], 5)
    os.write(pipe[1], b"y")
    wait_until(lambda: len(heard) == 2, 5)


def test_an_unregistered_descriptor_is_not_told(waiter: Waiter, pipe: tuple[int, int]) -> None:
    heard: list[int] = []
    waiter.register(pipe[0], heard.append)
    waiter.unregister(pipe[0])
    waiter.unregister(pipe[0])
    os.write(pipe[1], b"x")
    flushed = threading.Event()
    waiter.call_soon(flushed.set)
    assert flushed.wait(5)
    assert heard == []


def test_events_can_be_changed(waiter: Waiter, pipe: tuple[int, int]) -> None:
    heard: list[int] = []

    def ready(events: int) -> None:
        heard.append(events)
        waiter.modify(pipe[1], 0)

    waiter.register(pipe[1], ready, READ)
    waiter.modify(pipe[1], WRITE)
    wait_until(lambda: heard == [WRITE], 5)


def test_timers_come_in_the_order_of_their_time(waiter: Waiter) -> None:
    heard: list[str] = []
    waiter.call_later(0.04, lambda: heard.append("late"))
    waiter.call_later(0.01, lambda: heard.append("early"))
    waiter.call_later(0.02, lambda: heard.append("never")).cancel()
    wait_until(lambda: heard == ["early", "late"], 5)


def test_a_near_timer_wakes_a_loop_that_sleeps(waiter: Waiter) -> None:
    settled = threading.Event()
    waiter.call_soon(settled.set)
    assert settled.wait(5)
    rang, began = threading.Event(), time.monotonic()
    waiter.call_later(0.01, rang.set)
    assert rang.wait(5)
    assert time.monotonic() - began < 0.5


def test_a_callback_that_fails_does_not_end_the_loop(waiter: Waiter, caplog: pytest.LogCaptureFixture) -> None:
    went_on = threading.Event()
    waiter.call_soon(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    waiter.call_soon(went_on.set)
    assert went_on.wait(5)
    assert "waiter.callback_failed" in caplog.text


def test_a_callback_may_add_callbacks_without_starving_descriptors(waiter: Waiter, pipe: tuple[int, int]) -> None:
    heard, stop = threading.Event(), threading.Event()

    def again() -> None:
        if not stop.is_set():
            waiter.call_soon(again)

    waiter.call_soon(again)
    waiter.register(pipe[0], lambda _: (os.read(pipe[0], 1), heard.set())[0])
    os.write(pipe[1], b"x")
    assert heard.wait(5)
    stop.set()


def test_calls_from_many_threads_all_come(waiter: Waiter) -> None:
    heard: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: [waiter.call_soon(lambda: heard.append(n)) for _ in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(heard) == 800, 5)


def test_a_process_has_one() -> None:
    assert shared_waiter() is shared_waiter()
