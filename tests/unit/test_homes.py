"""Whose data lies here, told to a registry that does not know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandfleet.errors import StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.testing import ManualClock
from sandfleet_workers.holders import Holder, give_up_thread, hold_thread, last_epoch
from sandfleet_workers.sandbox_dirs import thread_directory
from tests.services import wait_until
from tests.unit.node_world import DATA_ID, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, ManualClock())


def has_data(world: World, thread: str, user: str | None = None, *, epoch: int = 0) -> Identity:
    identity = Identity(thread, user)
    path = thread_directory(world.node.settings.data_root, identity)
    path.mkdir(parents=True)
    if epoch:
        hold_thread(path.parent, Holder("n1", "mock", epoch, "box"), lambda _: None)
        give_up_thread(path.parent, epoch)
        assert last_epoch(path.parent) == epoch
    return identity


def test_threads_that_have_data_here_have_their_home_here(world: World) -> None:
    threads = [has_data(world, "one"), has_data(world, "two", "acme", epoch=7)]
    (world.node.settings.data_root / "threads" / "not a thread!" / "user-data").mkdir(parents=True)
    (world.node.settings.data_root / "threads" / "empty").mkdir()
    assert world.life.homes.tell() == 2
    assert [world.store.thread_home(identity) for identity in threads] == [DATA_ID, DATA_ID]
    assert world.store.thread_home(Identity("empty")) is None
    assert world.life.homes.tell() == 0


def test_an_older_copy_on_another_data_root_does_not_take_a_thread_home(world: World) -> None:
    identity = has_data(world, "two", epoch=7)
    world.store.tell_homes("another", [(identity.digest, 9)])
    world.life.homes.tell()
    assert world.store.thread_home(identity) == "another"


def test_a_registry_that_lost_its_data_is_told_and_one_that_is_away_is_told_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = has_data(world, "one")
    tell, failures = world.store.tell_homes, [StoreUnavailable("away")]

    def sometimes(data_id: str, threads: list[tuple[str, int]]) -> int:
        if failures:
            raise failures.pop()
        return tell(data_id, threads)

    monkeypatch.setattr(world.store, "tell_homes", sometimes)
    monkeypatch.setattr("sandfleet_workers.homes._AGAIN_S", 0.01)
    world.store.forget_everything()
    world.tick()
    wait_until(lambda: world.store.thread_home(identity) == DATA_ID, 10)
