"""The lock around one file: exclusive, renewed, given back, and lost only loudly."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.errors import Busy, StoreUnavailable
from sandfleet.testing import ManualClock, MemoryStore, MockSandboxProvider
from sandfleet.tools import FileOperationLock, Tool, get_file_operation_lock, str_replace_tool, write_file_tool
from sandfleet.tools.runtime import ToolRuntime
from tests.services import wait_until, wait_until_async


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(lambda: int(clock.now() * 1000))


def _lock(store: Any, timeout_s: float = 5.0) -> FileOperationLock:
    return FileOperationLock(store, "file:1:2", timeout_s=timeout_s)


def test_one_holds_it_and_the_next_gets_it_after(store: MemoryStore) -> None:
    first, second, order = _lock(store), _lock(store), list[str]()

    def wait_for_it() -> None:
        with second:
            order.append("second")

    with first:
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]


async def test_threads_and_event_loops_wait_for_the_same_lock(store: MemoryStore) -> None:
    first, second = _lock(store), _lock(store)
    async with first:
        taken = asyncio.create_task(second.acquire_async())
        await asyncio.sleep(0.01)
        assert not taken.done()
    assert await taken
    with pytest.raises(Busy):
        _lock(store, timeout_s=0.01).acquire()
    second.release()


def test_whoever_waits_too_long_is_told_when_to_come_back(store: MemoryStore) -> None:
    with _lock(store), pytest.raises(Busy) as caught:
        _lock(store, timeout_s=0.01).acquire()
    assert caught.value.retry_after_s == 5.0


def test_it_is_not_re_entrant_and_says_so(store: MemoryStore) -> None:
    lock = _lock(store)
    with lock, pytest.raises(RuntimeError, match="not re-entrant"):
        lock.acquire()
    with lock:  # but it may be used again
        pass


def test_a_dead_holders_lock_expires_and_a_live_holders_is_renewed(store: MemoryStore, clock: ManualClock) -> None:
    dead, alive = _lock(store), _lock(store, timeout_s=0.01)
    dead.acquire()
    clock.advance(16)
    alive.acquire()
    for _ in range(4):
        clock.advance(10)
        alive.renew()
    with pytest.raises(Busy):
        _lock(store, timeout_s=0.01).acquire()
    assert not alive.lost
    alive.release()


def test_a_lock_taken_over_by_somebody_else_is_lost_and_that_is_logged(
    store: MemoryStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = _lock(store), _lock(store)
    first.acquire()
    clock.advance(16)
    second.acquire()
    with caplog.at_level(logging.WARNING):
        first.renew()
    assert first.lost
    assert "file_lock.lost" in caplog.text
    first.release()
    with pytest.raises(Busy):  # the release of what was lost takes nothing from its new holder
        _lock(store, timeout_s=0.01).acquire()
    second.release()


def test_a_renewal_that_comes_after_the_release_does_not_bring_the_lock_back(store: MemoryStore) -> None:
    lock = _lock(store)
    with lock:
        pass
    lock.renew()
    with _lock(store, timeout_s=0.01):
        pass


def test_the_process_renews_what_it_holds(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandfleet.tools.locks._TTL_S", 0.04)
    renewed = threading.Event()

    class Told(FileOperationLock):
        def renew(self) -> None:
            super().renew()
            renewed.set()

    from sandfleet.tools import locks  # noqa: PLC0415  (its renewer is made anew below)

    monkeypatch.setattr(locks, "_renewer", locks._Renewer())
    with Told(store, "file:1:2") as lock:
        assert renewed.wait(5)
        assert not lock.lost
    renewer = locks._renewer
    wait_until(lambda: not renewer._running, 5)


def test_a_store_that_fails_at_the_end_does_not_fail_what_was_done_under_the_lock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise StoreUnavailable("gone")

    with _lock(SimpleNamespace(lock=lambda *_a, **_k: True, unlock=fail)) as lock:
        lock._locks = SimpleNamespace(lock=fail, unlock=fail)
        lock.renew()
        assert not lock.lost
    assert "file_lock.not_renewed" in caplog.text
    assert "file_lock.release_failed" in caplog.text


async def test_a_cancelled_waiter_leaves_no_lock_behind() -> None:
    entered, let_go, released = threading.Event(), threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
            entered.set()
            let_go.wait(5)
            return super().lock(name, token, ttl_s=ttl_s)

        def unlock(self, name: str, token: str) -> None:
            super().unlock(name, token)
            released.set()

    store = Slow()
    waiter = asyncio.create_task(_lock(store).acquire_async())
    await wait_until_async(entered.is_set, 5)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await wait_until_async(released.is_set, 5)  # too early: it is taken only now
    let_go.set()

    def is_free() -> bool:
        try:
            with _lock(store, timeout_s=0.01):
                return True
        except Busy:
            return False

    await asyncio.to_thread(wait_until, is_free, 5)


def test_every_spelling_of_a_path_is_one_lock_and_another_file_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandfleet.tools.locks._WAIT_S", 0.01)
    with MockSandboxProvider() as provider:
        sandbox = provider.get(provider.acquire("t1"))
        names = {get_file_operation_lock(sandbox, path)._name for path in ("a", "./a", "/workspace/a")}
        assert len(names) == 1
        other = provider.get(provider.acquire("t2"))
        assert get_file_operation_lock(other, "a")._name not in names
        assert get_file_operation_lock(sandbox, "b")._name not in names


@pytest.mark.parametrize(
    ("tool", "args"), [(write_file_tool, ("tool",)), (str_replace_tool, ("mine", "tool"))], ids=["write", "replace"]
)
def test_a_change_waits_for_whoever_holds_the_files_lock(
    tool: Tool, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(FileOperationLock, "_check", lambda _self, _until: waits.set())
    with MockSandboxProvider() as provider:
        runtime = ToolRuntime(context={"thread_id": "t1"})
        sandbox = provider.get(provider.acquire("t1"))
        assert sandbox is not None
        answers: list[str] = []
        bound = tool.bound(provider=provider)
        thread = threading.Thread(target=lambda: answers.append(bound(runtime, "t", "a", *args)))
        with get_file_operation_lock(sandbox, "/mnt/user-data/workspace/a"):
            sandbox.write_file("a", "mine")
            thread.start()
            wait_until(waits.is_set, 5)
            assert sandbox.read_file("a") == "mine"
            assert answers == []
        thread.join(5)
        assert answers == ["OK"]
        assert sandbox.read_file("a") == "tool"
