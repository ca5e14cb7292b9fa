"""A node's bootsteps: joining, telling the lease how the consumer does, draining."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import bootsteps

from sandfleet.config import Settings
from sandfleet.errors import ConfigError, NodeIdInUse, StoreUnavailable
from sandfleet.model import NodeState
from sandfleet.store.base import NodeRecord
from sandfleet.store.memory import MemoryStore
from sandfleet_workers import worker as worker_module
from sandfleet_workers.lifecycle import Lifecycle
from sandfleet_workers.node_identity import data_id
from sandfleet_workers.pool import LanePool
from sandfleet_workers.worker import LoopTick, NodeStep
from tests.services import wait_until


class Clock:
    """Stands in for the module `time`: pausing takes no time, asking for it does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses = 0

    def monotonic(self) -> float:
        self.now += 0.1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(worker_module, "time", made)
    return made


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(worker_module, "open_store", lambda *_args, **_kwargs: made)
    return made


def join(root: Path, **settings: Any) -> SimpleNamespace:
    """Let a node join; gives its worker."""
    given = Settings.load({}, **{"backend": "mock", "data_root": root, "run_root": root / "run", **settings})
    held = SimpleNamespace(node_id="n1", release=lambda: None)
    app = SimpleNamespace(sandfleet_settings=given, sandfleet_held=held)
    parent = SimpleNamespace(app=app, pool=LanePool(limit=1))
    NodeStep(parent)._join(parent)
    return parent


def run_directory(root: Path) -> Path:
    return root / "run" / f"n1-{data_id(root)[:8]}"


# --- joining ---------------------------------------------------------------------------------


def test_a_node_that_joins_holds_its_lease_before_its_first_connection(store: MemoryStore, tmp_path: Path) -> None:
    node = join(tmp_path).app.sandfleet_node
    try:
        assert [view.alive for view in store.nodes()] == [True]
        assert node.lease.reconnecting, "the consumer is still on its way"
        assert run_directory(tmp_path).is_dir()
    finally:
        node.stop()


@pytest.mark.usefixtures("clock")
def test_a_node_whose_id_is_taken_removes_nothing_of_the_other_s(store: MemoryStore, tmp_path: Path) -> None:
    store.announce(NodeRecord("n1", "theirs", 4, "data", ("mock",)), lease_s=60)
    (run_directory(tmp_path) / "socket").mkdir(parents=True)
    with pytest.raises(NodeIdInUse):
        join(tmp_path)
    assert (run_directory(tmp_path) / "socket").exists()
    assert store.nodes()[0].incarnation == "theirs"
    assert store.nodes()[0].alive


def test_a_node_that_cannot_open_gives_its_lease_back(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SANDFLEET_RUN_ROOT"):
        join(tmp_path, run_root=tmp_path / "file")
    assert [(view.alive, view.state) for view in store.nodes()] == [(False, NodeState.GONE)]
    assert not any(thread.name == "sandfleet-lease" for thread in threading.enumerate())


@pytest.mark.parametrize("forgets", [False, True])
def test_a_node_that_takes_long_to_open_keeps_its_lease(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    seen: list[bool] = []

    def slow(lifecycle: Lifecycle) -> None:
        if forgets:
            store.__init__()  # type: ignore[misc]
        lease = lifecycle._node.lease
        first = lease._valid_until
        wait_until(lambda: lease._valid_until > first, 10)
        seen.append(store.nodes()[0].alive)
        opened(lifecycle)

    opened = Lifecycle.open
    monkeypatch.setattr(Lifecycle, "open", slow)
    node = join(tmp_path, lease_s=1.0).app.sandfleet_node
    try:
        assert seen == [True]
        assert node.lease.upkeep
    finally:
        node.stop()


def test_a_node_that_takes_long_to_end_its_sandboxes_keeps_its_lease_meanwhile(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = join(tmp_path, lease_s=1.0).app.sandfleet_node
    node.lease.reconnecting = False
    seen: list[bool] = []

    def slow(**given: Any) -> None:
        until = node.lease._valid_until + 1.5  # longer than the main loop may be silent
        wait_until(lambda: node.lease._valid_until > until, 10)
        seen.append(store.nodes()[0].alive)
        closed(**given)

    closed = node.lifecycle.close
    monkeypatch.setattr(node.lifecycle, "close", slow)
    node.stop()
    assert seen == [True]
    assert not store.nodes()[0].alive
    assert not any(thread.name == "sandfleet-lease" for thread in threading.enumerate())


def test_a_node_that_offers_what_it_cannot_run_takes_no_lease(store: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        join(tmp_path, backend="no-such-thing")
    assert store.nodes() == []


def test_a_node_that_joins_without_room_takes_nothing_from_the_start(store: MemoryStore, tmp_path: Path) -> None:
    node = join(tmp_path, min_free_bytes=2**60).app.sandfleet_node
    try:
        (view,) = store.nodes()
        assert (view.state, "min_free_bytes" in view.reason) == (NodeState.CORDONED, True)
    finally:
        node.stop()


# --- the consumer and the lease --------------------------------------------------------------


class Parent:
    """A consumer with the node's lease."""

    def __init__(self) -> None:
        self.ticks = 0
        self.lease = SimpleNamespace(reconnecting=True, loop_ticked=self._tick)
        self.app = SimpleNamespace(sandfleet_node=SimpleNamespace(lease=self.lease))
        self.blueprint = SimpleNamespace(state=bootsteps.RUN)
        self.timer = SimpleNamespace(call_repeatedly=lambda *_args: SimpleNamespace(cancel=lambda: None))

    def _tick(self) -> None:
        self.ticks += 1


def test_a_consumer_that_lost_its_broker_is_on_its_way_until_it_starts_again() -> None:
    parent = Parent()
    step = LoopTick(parent)
    step.start(parent)
    assert (parent.lease.reconnecting, parent.ticks) == (False, 1)
    step.stop(parent)
    step.stop(parent)
    assert parent.lease.reconnecting
    step.start(parent)
    assert (parent.lease.reconnecting, parent.ticks) == (False, 2)


@pytest.mark.parametrize("state", [bootsteps.CLOSE, bootsteps.TERMINATE])
def test_a_consumer_that_stops_with_its_worker_is_not_on_its_way(state: int) -> None:
    parent = Parent()
    step = LoopTick(parent)
    step.start(parent)
    parent.blueprint.state = state
    step.stop(parent)
    step.shutdown(parent)
    assert not parent.lease.reconnecting


# --- draining --------------------------------------------------------------------------------


class Draining:
    """A node with operations that end one after the other."""

    def __init__(self, running: int, *, ends: bool = True) -> None:
        self.running, self.ends = running, ends
        self.node_id, self.incarnation = "n1", "i1"
        self.settings = Settings.load({}, drain_timeout_s=30.0)
        self.told: list[Any] = []
        self.store = SimpleNamespace(set_node_state=lambda *args, **kwargs: self.told.append((args, kwargs)))
        self.pool = SimpleNamespace(counts=self.counts)
        self.runs = SimpleNamespace(count=self.jobs)

    def drain(self) -> None:
        self.told.append("drained")

    def counts(self) -> tuple[int, int]:
        self.running -= self.ends and self.running > 0
        return self.running // 2, 0

    def jobs(self) -> int:
        return self.running - self.running // 2


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: sent.append(number))
    return sent


def test_a_node_that_drains_ends_when_what_ran_is_finished(clock: Clock, signals: list[int]) -> None:
    node = Draining(5)
    worker_module._drain_and_stop(node)  # type: ignore[arg-type]
    assert node.told == [(("n1", NodeState.DRAINING), {"incarnation": "i1"}), "drained"]
    assert node.running == 0
    assert clock.pauses == 4
    assert signals == [signal.SIGTERM]


def test_a_node_that_drains_waits_for_no_more_than_its_setting_says(clock: Clock, signals: list[int]) -> None:
    worker_module._drain_and_stop(Draining(5, ends=False))  # type: ignore[arg-type]
    assert 29 < clock.now < 32
    assert signals == [signal.SIGTERM]


@pytest.mark.usefixtures("clock")
def test_a_node_that_drains_without_its_store_ends_all_the_same(signals: list[int]) -> None:
    node = Draining(1)

    def away(*_args: Any, **_kwargs: Any) -> None:
        raise StoreUnavailable("gone")

    node.store.set_node_state = away
    worker_module._drain_and_stop(node)  # type: ignore[arg-type]
    assert signals == [signal.SIGTERM]
