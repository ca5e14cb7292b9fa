"""The blank pool of a node: started ahead, given to one thread each, accounted for in the store, never used twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandfleet.acquiring import wanted_spec
from sandfleet.backends import Capability, Connection, SandboxPlan
from sandfleet.errors import InternalError, StartFailed, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.store.base import Reserved
from sandfleet.testing import ManualClock
from sandfleet.testing.backend import MockBackend, MockConnection
from sandfleet_workers import blanks as blanks_module
from sandfleet_workers import lease as lease_module
from sandfleet_workers import lifecycle as lifecycle_module
from sandfleet_workers import upkeep as upkeep_module
from tests.services import wait_until
from tests.unit.node_world import ALICE, LONG_S, World

BOB = Identity("bob")


class AheadBackend(MockBackend):
    """A mock that can be started ahead. Remembers the plans; starts fail while ``broken`` is set."""

    capabilities: ClassVar[frozenset[Capability]] = MockBackend.capabilities | {Capability.BLANKS}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: list[SandboxPlan] = []
        self.names: dict[str, str] = {}
        self.ended: list[str] = []
        self.broken = ""
        #: Nothing can be ended.
        self.away = False
        #: The image that the engine has; the first start pulls one.
        self.image = ""
        self.pulls = ""

    def digest(self, spec: SandboxSpec) -> str:
        return f"{spec.digest}{self.image}"

    def create(self, plan: SandboxPlan) -> MockConnection:
        if self.broken:
            raise StartFailed(self.broken, reason="test")
        self.plans.append(plan)
        self.image = self.pulls or self.image
        return super().create(plan)

    def claim(self, blank_id: str, sandbox_id: str) -> Connection:
        if blank_id not in self.running():
            raise StartFailed("gone", reason="blank_gone")
        self._connections[sandbox_id] = self._connections.pop(blank_id)
        self.names[sandbox_id] = blank_id
        return self._connections[sandbox_id]

    def destroy(self, sandbox_id: str) -> None:
        if self.away:
            raise InternalError("no daemon", reason="no_daemon")
        self.ended.append(sandbox_id)
        super().destroy(sandbox_id)


class Ahead(World):
    """A node with a blank pool."""

    @property
    def backend(self) -> AheadBackend:
        backend = self.life._backends["mock"]
        assert isinstance(backend, AheadBackend)
        return backend

    @property
    def spec(self) -> SandboxSpec:
        """What callers with the node's own configuration ask for."""
        return wanted_spec(self.node.settings)

    def fill(self, count: int = 2) -> None:
        """Let the pool start until it has so many."""
        for _ in range(count):
            self.life.blanks.tick()
            wait_until(lambda: not self.life.blanks._starting, 5)
        assert len(self.blanks()) == count

    def blanks(self) -> dict[str, str]:
        return self.store.blanks("n1")

    def places(self) -> int:
        (view,) = self.store.nodes()
        return view.places

    def reserve(self, identity: Identity = ALICE, spec: SandboxSpec | None = None) -> Reserved:
        spec = spec or self.spec
        told = self.store.reserve(
            identity,
            spec,
            node_id="n1",
            incarnation=self.node.incarnation,
            data_id=self.life.data_id,
            expires_s=LONG_S,
            spec_digest=spec.digest,
        )
        assert told.status == "reserved", told
        return told

    def acquire(self, identity: Identity = ALICE, spec: SandboxSpec | None = None, **args: Any) -> Reserved:
        """What scheduler and node do together."""
        told = self.reserve(identity, spec)
        assert told.route is not None
        named = {"blank": told.blank} if told.blank else {}
        completion = self.run("node.create", told.route, identity, spec=(spec or self.spec).to_wire(), **named, **args)
        assert completion.error is None, completion.error
        return told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(lease_module, "boot_s", clock.boottime)
    monkeypatch.setattr(upkeep_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(blanks_module, "monotonic", clock.monotonic)
    monkeypatch.setattr(lifecycle_module, "load_backend", lambda name: AheadBackend)
    return clock


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[Ahead]:
    world = Ahead(tmp_path, clock, blank_pool=2, reserve_free=1)
    yield world
    world.life.close()
    assert world.backend.running() == []
    assert world.blanks() == {}
    assert list((tmp_path / "data" / "nodes" / "n1" / "slots").iterdir()) == []
    assert list((tmp_path / "data" / "nodes" / "n1" / "sandboxes").iterdir()) == []


def data_of(world: Ahead, identity: Identity) -> Path:
    return world.node.settings.data_root / "threads" / identity.thread_id / "user-data"


def test_the_pool_fills_and_takes_places(world: Ahead) -> None:
    world.fill()
    assert world.places() == 2
    assert set(world.blanks()) == set(world.backend.running())
    assert set(world.blanks().values()) == {world.spec.digest}
    assert {plan.identity for plan in world.backend.plans} == {None}
    world.life.blanks.tick()
    assert not world.life.blanks._starting, "nothing is missing"


def test_a_thread_gets_a_blank_sandbox_and_its_place(world: Ahead) -> None:
    world.fill()
    told = world.acquire()
    assert told.blank
    assert told.route is not None
    assert world.backend.names == {told.route.sandbox_id: told.blank}
    assert len(world.backend.plans) == 2, "nothing was started for it"
    assert world.places() == 2
    assert told.blank not in world.blanks()
    assert world.state(told.route) in ("live", "warm")


def test_the_slots_directory_becomes_the_threads(world: Ahead) -> None:
    world.fill()
    told = world.acquire()
    slot = next(plan.user_data for plan in world.backend.plans if plan.sandbox_id == told.blank)
    assert slot.is_symlink()
    assert slot.resolve() == data_of(world, ALICE)
    assert (data_of(world, ALICE) / "workspace").is_dir()


def test_the_data_of_a_returning_thread_moves_in(world: Ahead) -> None:
    workspace = data_of(world, ALICE) / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "kept").write_text("mine")
    world.fill()
    told = world.acquire()
    slot = next(plan.user_data for plan in world.backend.plans if plan.sandbox_id == told.blank)
    assert (slot / "workspace" / "kept").read_text() == "mine"
    assert (workspace / "kept").read_text() == "mine"


def test_one_blank_sandbox_is_given_to_one_thread(world: Ahead) -> None:
    world.fill()
    told = world.acquire(ALICE)
    route = world.reserved(BOB)
    # A message that names one that is taken (a bug, or an old one): it gets another one, or one of its own.
    completion = world.run("node.create", route, BOB, spec=world.spec.to_wire(), blank=told.blank)
    assert completion.error is None
    assert len(set(world.backend.names.values())) == len(world.backend.names)
    assert data_of(world, BOB) != data_of(world, ALICE)


def test_without_a_name_any_that_is_alike_is_taken_and_its_own_place_is_free(world: Ahead) -> None:
    world.fill()
    route = world.reserved(BOB)  # of a scheduler that knows nothing of blank sandboxes
    assert world.places() == 3
    assert world.run("node.create", route, BOB, spec=world.spec.to_wire()).error is None
    assert world.places() == 2
    assert len(world.backend.plans) == 2


def test_one_of_another_kind_makes_room(tmp_path: Path, clock: ManualClock) -> None:
    world = Ahead(tmp_path, clock, blank_pool=2, reserve_free=0, replicas=2)
    world.fill()
    other = SandboxSpec(backend="mock", env={"KIND": "other"})
    told = world.acquire(ALICE, other)
    assert told.blank in world.backend.ended
    assert len(world.backend.plans) == 3, "its own was started"
    assert world.places() == 2
    assert world.store.route(told.route.sandbox_id) == told.route  # type: ignore[union-attr]
    world.life.close()


def test_what_is_asked_for_is_what_is_kept_ready(world: Ahead) -> None:
    other = SandboxSpec(backend="mock", env={"KIND": "other"})
    for name in ("a", "b"):
        identity = Identity(name)
        told = world.acquire(identity, other)
        world.store.begin_stop(told.route.sandbox_id, owner=None, force=True, reason="test")  # type: ignore[union-attr]
        world.run("node.destroy", told.route, identity)  # type: ignore[arg-type]
    world.fill()
    assert sorted(world.blanks().values()) == sorted([other.digest, world.spec.digest])
    world.clock.advance(601.0)
    world.life.blanks.tick()
    world.work()
    world.fill()
    assert set(world.blanks().values()) == {world.spec.digest}, "nobody wants the other kind any more"


def test_places_are_left_free_and_nobody_is_evicted_for_one(tmp_path: Path, clock: ManualClock) -> None:
    world = Ahead(tmp_path, clock, blank_pool=3, reserve_free=2, replicas=4)
    world.live(ALICE, agent="")
    world.life.blanks.tick()
    wait_until(lambda: not world.life.blanks._starting, 5)
    world.life.blanks.tick()
    wait_until(lambda: not world.life.blanks._starting, 5)
    assert (len(world.blanks()), world.places()) == (1, 2)
    world.life.close()


def test_a_death_frees_the_place_and_is_made_good(world: Ahead) -> None:
    world.fill()
    slot = next(iter(world.blanks()))
    world.backend.kill(slot)
    world.work()
    assert slot not in world.blanks()
    assert world.places() == 1
    world.fill()


def test_failing_starts_are_spread_out_and_leave_nothing(world: Ahead, tmp_path: Path) -> None:
    world.backend.broken = "no image"
    for _ in range(5):
        world.life.blanks.tick()
        wait_until(lambda: not world.life.blanks._starting, 5)
    assert world.places() == 0
    slots = tmp_path / "data" / "nodes" / "n1" / "slots"
    assert not slots.exists() or list(slots.iterdir()) == []
    world.backend.broken = ""
    world.life.blanks.tick()
    assert not world.life.blanks._starting, "too soon"
    world.clock.advance(61.0)
    world.fill()


def test_a_cordoned_node_starts_none_and_gives_what_it_has(world: Ahead) -> None:
    world.store.set_node_state("n1", NodeState.CORDONED)
    world.tick()
    assert not world.life.blanks._starting
    assert world.blanks() == {}


def test_a_store_that_lost_its_data_is_told_again(world: Ahead) -> None:
    world.fill()
    ready = set(world.blanks())
    world.store.__init__(now_ms=lambda: int(world.clock.now() * 1000))  # type: ignore[misc]
    world.tick()
    world.tick()
    assert set(world.blanks()) == ready
    assert world.places() == 2


def test_one_whose_place_was_given_away_is_ended_when_nobody_comes(world: Ahead) -> None:
    world.fill()
    told = world.reserve()
    world.clock.advance(6.0)
    world.life.blanks.tick()
    assert told.blank in world.backend.running(), "its creation may be on its way"
    world.clock.advance(6.0)
    world.life.blanks.tick()
    assert told.blank in world.backend.running(), "an engine that is slow would keep the lease from being renewed"
    world.work()
    assert told.blank not in world.backend.running()


def test_one_that_only_the_store_has_is_forgotten_there(world: Ahead) -> None:
    world.store.begin_blank("n1", world.node.incarnation, "feed", expires_s=LONG_S, reserve_free=0)
    world.store.blank_ready("n1", world.node.incarnation, "feed", spec_digest="x")
    world.clock.advance(6.0)
    world.life.blanks.tick()
    assert "feed" not in world.blanks()


def test_a_node_that_cannot_rename_says_so_and_keeps_none(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sandfleet_workers.sandbox_dirs.rename_problem", lambda *_: "two mounts")
    world = Ahead(tmp_path, clock, blank_pool=2)
    assert not world.life.blanks.on
    assert "blanks.off" in caplog.text
    world.acquire()
    world.life.close()


def test_a_claim_that_fails_half_way_is_completed_by_the_cold_start(
    world: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data_of(world, ALICE) / "workspace").mkdir(parents=True)
    (data_of(world, ALICE) / "workspace" / "kept").write_text("mine")
    world.fill()
    monkeypatch.setattr(
        world.backend, "claim", lambda *_: (_ for _ in ()).throw(StartFailed("gone", reason="blank_gone"))
    )
    world.acquire()
    assert len(world.backend.plans) == 3
    assert (data_of(world, ALICE) / "workspace" / "kept").read_text() == "mine"
    assert not data_of(world, ALICE).is_symlink()


def test_redis_away_while_one_starts_leaves_none_behind(world: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "blank_ready", away)
        world.life.blanks.tick()
        wait_until(lambda: not world.life.blanks._starting, 5)
    assert world.backend.running() == []
    assert world.places() == 0
    world.clock.advance(61.0)
    world.fill()


def test_one_that_cannot_be_ended_is_ended_when_the_engine_is_back(world: Ahead) -> None:
    world.fill()
    slot = next(iter(world.blanks()))
    world.backend.away = True
    world.life.blanks._withdraw(slot, "test")
    world.clock.advance(6.0)
    world.life.blanks.tick()
    world.work()
    assert slot in world.backend.running()
    world.backend.away = False
    world.clock.advance(6.0)
    world.life.blanks.tick()
    world.work()
    assert slot not in world.backend.running()


def test_a_node_that_closes_ends_what_could_not_be_ended_before(world: Ahead) -> None:
    world.fill()
    world.backend.away = True
    for slot in world.blanks():
        world.life.blanks._withdraw(slot, "test")
    assert len(world.backend.running()) == 2
    world.backend.away = False


def test_an_image_that_the_first_start_pulls_makes_the_others_no_other_kind(world: Ahead) -> None:
    world.backend.pulls = "pulled"
    world.fill()
    told = world.acquire()
    assert told.route is not None
    assert world.backend.names == {told.route.sandbox_id: told.blank}
    assert set(world.life.blanks._kinds) == {world.backend.digest(world.spec)}


def test_a_newer_image_under_the_same_name_replaces_what_is_ready(world: Ahead) -> None:
    world.fill()
    old = set(world.blanks())
    world.backend.image = "newer"
    world.acquire(ALICE)
    assert world.backend.names == {}, "it would have got the image of yesterday"
    for _ in range(3):
        world.life.blanks.tick()
        wait_until(lambda: not world.life.blanks._starting, 5)
        world.work()
    assert not old & set(world.backend.running())
    told = world.acquire(BOB)
    assert told.route is not None
    assert world.backend.names == {told.route.sandbox_id: told.blank}
