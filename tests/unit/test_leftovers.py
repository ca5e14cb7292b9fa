"""Who removes what dead nodes left: its own node at once, another one after a lease of silence and under its lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet.errors import InternalError, StartFailed
from sandfleet.store.base import NodeRecord
from sandfleet.testing import ManualClock
from sandfleet.testing.backend import MockBackend
from sandfleet_workers import leftovers as leftovers_module
from sandfleet_workers import lifecycle as lifecycle_module
from sandfleet_workers.node_identity import hold_node_id
from tests.unit.node_world import World

LEASE_S = 10.0


class Engine(MockBackend):
    """Leftovers by node, as an engine would list them."""

    there: dict[str, list[str]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.there = dict(AT_START)
        self.away = False

    def leftovers(self) -> dict[str, list[str]]:
        if self.away:
            raise StartFailed("no daemon", reason="no_daemon")
        return {node: list(names) for node, names in self.there.items() if names}

    def remove_leftover(self, name: str) -> None:
        if name.startswith("stuck"):
            raise InternalError("still there", reason="not_gone")
        for names in self.there.values():
            if name in names:
                names.remove(name)


AT_START: dict[str, list[str]] = {}


class Watched(World):
    @property
    def engine(self) -> Engine:
        engine = self.life._backends["mock"]
        assert isinstance(engine, Engine)
        return engine

    def look(self, after_s: float = 0.0) -> dict[str, list[str]]:
        self.clock.advance(after_s)
        self.life.leftovers.look()
        return self.engine.leftovers()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(leftovers_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(lifecycle_module, "load_backend", lambda name: Engine)
    return clock


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[Watched]:
    world = Watched(tmp_path, clock, lease_s=LEASE_S)
    yield world
    world.life.close()


def neighbour(world: World, incarnation: str = "i2") -> NodeRecord:
    return NodeRecord("n2", incarnation, 4, world.life.data_id, ("mock",))


def test_a_node_removes_its_own_at_its_start(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_START, "n1", ["old-1", "old-2"])
    monkeypatch.setitem(AT_START, "n2", ["theirs"])
    world = Watched(tmp_path, clock, lease_s=LEASE_S)
    assert world.engine.leftovers() == {"n2": ["theirs"]}
    world.life.close()


def test_its_own_found_later_go_after_two_looks(world: Watched) -> None:
    world.engine.there["n1"] = ["stray"]
    assert world.look() == {"n1": ["stray"]}
    assert world.look(LEASE_S / 2) == {"n1": ["stray"]}
    assert world.look(LEASE_S) == {}


def test_those_of_a_dead_node_go_after_a_lease_of_silence(world: Watched) -> None:
    world.engine.there["n2"] = ["theirs"]
    assert world.look() == {"n2": ["theirs"]}
    assert world.look(LEASE_S - 1) == {"n2": ["theirs"]}
    assert world.look(2.0) == {}


def test_those_of_a_living_node_are_never_touched(world: Watched) -> None:
    world.store.announce(neighbour(world), lease_s=10 * LEASE_S)
    world.engine.there["n2"] = ["theirs"]
    for _ in range(4):
        assert world.look(LEASE_S) == {"n2": ["theirs"]}


def test_a_node_that_comes_back_starts_its_silence_anew(world: Watched) -> None:
    world.engine.there["n2"] = ["theirs"]
    world.look()
    world.store.announce(neighbour(world), lease_s=LEASE_S)
    world.look(LEASE_S / 2)
    world.look(LEASE_S)
    assert world.look(LEASE_S / 2) == {"n2": ["theirs"]}
    assert world.look(LEASE_S) == {}


def test_a_node_whose_process_lives_keeps_its_own_whatever_redis_says(world: Watched) -> None:
    held = hold_node_id(world.node.settings.data_root, "n2")
    world.engine.there["n2"] = ["theirs"]
    for _ in range(3):
        assert world.look(LEASE_S + 1) == {"n2": ["theirs"]}
    held.release()
    assert world.look(LEASE_S) == {}


def test_the_slots_of_a_dead_node_go_with_its_containers(world: Watched) -> None:
    slot = world.node.settings.data_root / "nodes" / "n2" / "slots" / ("f" * 16)
    (slot / "user-data").mkdir(parents=True)
    world.engine.there["n2"] = ["theirs"]
    world.look()
    world.look(LEASE_S)
    assert not slot.exists()


def test_an_engine_that_is_away_ends_nothing_and_the_look_is_repeated(
    world: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.there["n2"] = ["theirs"]
    world.look()
    world.engine.away = True
    world.life.leftovers.look()
    assert "leftovers.not_listed" in caplog.text
    world.engine.away = False
    assert world.look(LEASE_S) == {}


def test_the_next_look_comes_when_the_silence_is_a_lease_long(world: Watched) -> None:
    world.engine.there["n2"] = ["theirs"]
    world.clock.advance(61.0)
    world.life.leftovers.tick()
    assert world.work() == 1
    world.life.leftovers.tick()
    assert world.work() == 0
    world.clock.advance(LEASE_S + 2.0)
    world.life.leftovers.tick()
    assert world.work() == 1
    assert world.engine.leftovers() == {}


def test_one_that_cannot_be_removed_keeps_none_of_the_others_and_its_directories(world: Watched) -> None:
    slot = world.node.settings.data_root / "nodes" / "n2" / "slots" / ("f" * 16)
    (slot / "user-data").mkdir(parents=True)
    world.engine.there = {"n1": ["stuck-1", "own"], "n2": ["stuck-2", "theirs"]}
    world.look()
    assert world.look(LEASE_S) == {"n1": ["stuck-1"], "n2": ["stuck-2"]}
    assert slot.exists(), "a container that runs still uses it"


def test_one_of_its_own_that_cannot_be_removed_does_not_stop_a_node_s_start(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_START, "n1", ["stuck", "old"])
    world = Watched(tmp_path, clock, lease_s=LEASE_S)
    assert world.engine.leftovers() == {"n1": ["stuck"]}
    world.life.close()


def test_those_of_a_node_that_is_lost_are_looked_for_at_once(world: Watched) -> None:
    world.store.announce(neighbour(world), lease_s=LEASE_S)
    world.engine.there["n2"] = ["theirs"]
    world.life.leftovers.tick()
    assert world.work() == 0
    world.clock.advance(LEASE_S + 1.0)
    world.life.leftovers.tick()
    assert world.work() == 1
    world.clock.advance(LEASE_S + 1.0)
    world.life.leftovers.tick()
    assert world.work() == 1
    assert world.engine.leftovers() == {}
