"""When an image is replaced under its name, what nobody uses is rolled, and what is in use keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandfleet.backends import Capability
from sandfleet.errors import InternalError
from sandfleet.ids import Identity
from sandfleet.testing import ManualClock
from sandfleet.testing.backend import MockBackend
from sandfleet_workers import blanks as blanks_module
from sandfleet_workers import lifecycle as lifecycle_module
from sandfleet_workers import rolling as rolling_module
from tests.services import wait_until
from tests.unit.node_world import World


class Moving(MockBackend):
    """A mock whose image can be replaced."""

    capabilities: ClassVar[frozenset[Capability]] = MockBackend.capabilities | {Capability.BLANKS}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replaced: set[str] = set()
        self.away = False

    def outdated(self) -> list[str]:
        if self.away:
            raise InternalError("no daemon", reason="no_daemon")
        return [name for name in self.running() if name in self.replaced]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(rolling_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(blanks_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(lifecycle_module, "load_backend", lambda name: Moving)
    return clock


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    world = World(tmp_path, clock, blank_pool=1)
    yield world
    world.life.close()


def backend_of(world: World) -> Moving:
    assert isinstance(world.backend, Moving)
    return world.backend


def blank_of(world: World) -> str:
    """The blank sandbox, once there is one."""
    world.life.blanks.tick()
    wait_until(lambda: not world.life.blanks._starting, 5)
    (slot,) = world.store.blanks("n1")
    return slot


def test_warm_ones_end_and_those_in_use_stay_until_they_are_released(world: World) -> None:
    warm, used = world.live(agent=""), world.live(Identity("bob"))
    world.clock.advance(1)
    backend_of(world).replaced = {warm.sandbox_id, used.sandbox_id}
    world.life.rolling.look()
    world.work()
    assert (world.state(warm), world.state(used)) == (None, "live")
    world.store.release(used.sandbox_id, Identity("bob").digest, "agent")
    world.clock.advance(1)
    world.life.rolling.look()
    world.work()
    assert world.state(used) is None
    assert backend_of(world).running() == []


def test_blank_ones_are_replaced(world: World) -> None:
    old = blank_of(world)
    backend_of(world).replaced = {old}
    world.life.rolling.look()
    assert world.store.blanks("n1") == {}, "no thread is given it any more"
    world.work()
    assert backend_of(world).running() == []
    assert blank_of(world) != old


def test_it_looks_once_a_minute_and_an_engine_that_is_away_is_asked_again(world: World) -> None:
    old = blank_of(world)
    backend_of(world).replaced, backend_of(world).away = {old}, True
    for after_s, away, left in ((59.0, False, [old]), (2.0, True, [old]), (30.0, False, [old]), (31.0, False, [])):
        backend_of(world).away = away
        world.clock.advance(after_s)
        world.life.rolling.tick()
        world.work()
        assert backend_of(world).running() == left
