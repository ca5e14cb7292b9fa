"""What a process holds while its threads come and go at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.holds import Holds
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import NodeRecord, Route
from sandfleet.store.memory import MemoryStore
from tests.services import wait_until

ALICE, SPEC = Identity("alice"), SandboxSpec("mock")
LONG_S = 3600.0


class World:
    """A provider over the memory store, and a node with a sandbox of alice's."""

    def __init__(self, **settings: Any) -> None:
        self.store = MemoryStore()
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=LONG_S)
        self.provider = SandboxProvider(Settings.load({}, backend="mock", **settings))
        self.provider._connected = self.client = Client(self.provider.settings, self.store)
        self.route = self.make()

    def make(self) -> Route:
        told = self.store.reserve(ALICE, SPEC, node_id="n1", incarnation="i1", data_id="d", expires_s=60)
        assert told.route is not None
        assert self.store.created(told.route)
        return told.route

    def state(self) -> tuple[str, int]:
        info = self.store.sandbox(self.route.sandbox_id)
        return (str(info.state), info.agents) if info is not None else ("none", 0)


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**settings: Any) -> World:
        made.append(World(**settings))
        return made[-1]

    yield make
    for world in made:
        world.client.close()


def meanwhile(monkeypatch: pytest.MonkeyPatch, world: World, happens: Callable[[], object]) -> None:
    """Once, right after the store answered an acquire and before the provider has counted it."""
    acquire, todo = world.store.acquire, [happens]

    def acquire_and_more(*args: Any, **options: Any) -> Any:
        found = acquire(*args, **options)
        if todo:
            todo.pop()()
        return found

    monkeypatch.setattr(world.store, "acquire", acquire_and_more)


@pytest.mark.parametrize("destroy_on_release", [False, True])
def test_who_comes_while_another_thread_of_the_process_leaves_holds_the_sandbox(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, destroy_on_release: bool
) -> None:
    world = worlds(destroy_on_release=destroy_on_release)
    sandbox_id = world.provider.acquire("alice")
    meanwhile(monkeypatch, world, lambda: world.provider.release(sandbox_id))
    assert world.provider.acquire("alice") == sandbox_id
    assert world.state() == ("live", 1)
    assert world.provider.get(sandbox_id) is not None
    world.provider.release(sandbox_id)
    assert world.state() == (("stopping", 0) if destroy_on_release else ("warm", 0))


def test_who_came_before_another_thread_s_release_reached_the_store_waits_for_that_and_holds_it(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    sandbox_id = world.provider.acquire("alice")
    release, begun, go_on = world.store.release, threading.Event(), threading.Event()

    def slow_release(*args: Any) -> bool:
        begun.set()
        assert go_on.wait(10)
        return release(*args)

    monkeypatch.setattr(world.store, "release", slow_release)
    seen: list[tuple[str, int]] = []

    def come() -> None:
        world.provider.acquire("alice")
        seen.append(world.state())

    leaving = threading.Thread(target=world.provider.release, args=(sandbox_id,))
    coming = threading.Thread(target=come)
    leaving.start()
    assert begun.wait(10)
    coming.start()
    wait_until(lambda: sandbox_id in world.client.holds, 10)
    assert seen == []
    go_on.set()
    leaving.join()
    coming.join()
    assert seen == [("live", 1)]


def test_a_sandbox_that_ended_between_one_thread_s_leaving_and_the_other_s_coming_is_acquired_anew(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    sandbox_id = world.provider.acquire("alice")

    def leaves_and_is_evicted() -> None:
        world.provider.release(sandbox_id)
        stop = world.store.begin_stop(sandbox_id, owner=None, force=False, reason="evicted")
        assert stop.route is not None
        assert world.store.stopped(stop.route)
        world.route = world.make()

    meanwhile(monkeypatch, world, leaves_and_is_evicted)
    assert world.provider.acquire("alice") == sandbox_id
    assert world.state() == ("live", 1)
    assert list(world.client.holds) == [sandbox_id]


def test_what_is_held_is_released_although_the_handles_were_forgotten(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.provider.acquire("alice")
    world.provider.reset()
    world.provider.shutdown()
    assert world.state() == ("warm", 0)


def test_a_renewal_that_finds_the_old_sandbox_gone_does_not_forget_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    holds = Holds(store, "agent", ttl_s=0.0)
    holds.add(Route("ab12cd34", "n1", "i1", 1), ALICE.digest)

    def gone_and_back(*_: Any, **__: Any) -> list[str]:
        holds.add(Route("ab12cd34", "n1", "i1", 2), ALICE.digest)
        return ["ab12cd34"]

    monkeypatch.setattr(store, "renew_agents", gone_and_back)
    holds.renew()
    assert list(holds) == ["ab12cd34"]
