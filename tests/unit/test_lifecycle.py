"""The node's sandboxes from creation to removal, and what its upkeep makes of a registry that says otherwise.

Clocks are turned by hand, lifecycle work that is queued runs when the test says so, and a store or a backend
that is slow at the worst moment is one whose method was wrapped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.errors import InternalError, LeaseLost, NotStarted, SandfleetError, StartFailed, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import NodeState
from sandfleet.store.base import Route
from sandfleet.testing import ManualClock
from sandfleet_workers import lease as lease_module
from sandfleet_workers import lifecycle as lifecycle_module
from sandfleet_workers import upkeep as upkeep_module
from tests.unit.node_world import ALICE, LONG_S, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    clock = ManualClock()
    monkeypatch.setattr(lease_module, "boot_s", clock.boottime)
    monkeypatch.setattr(upkeep_module, "boot_s", clock.boottime)
    monkeypatch.setattr(upkeep_module, "monotonic", clock.monotonic)
    return World(tmp_path, clock)


class Door:
    """Wraps a method so that calls wait in it until the door is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def wait(*args: Any, **kwargs: Any) -> Any:
            self.entered.set()
            assert self._open.wait(10)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wait)

    def open(self) -> None:
        self._open.set()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def waits(thread: threading.Thread) -> bool:
    """Whether the thread does not go on by itself."""
    thread.join(0.2)
    return thread.is_alive()


# --- directories -----------------------------------------------------------------------------


def test_two_data_roots_that_number_their_nodes_alike_do_not_share_a_directory(world: World) -> None:
    mine = world.life.run_dir
    world.life.data_id = "f" * 32
    assert world.life.run_dir != mine
    assert world.life.run_dir.parent == mine.parent


def test_each_ownership_of_a_sandbox_has_a_directory_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    create = world.backend.create
    monkeypatch.setattr(world.backend, "create", lambda plan: plans.append(plan) or create(plan))
    route = world.live()
    assert world.run("node.destroy", route).error is None
    again = world.live()
    assert again.sandbox_id == route.sandbox_id
    assert plans[0].run_dir != plans[1].run_dir
    assert plans[0].run_dir.parent == plans[1].run_dir.parent == world.life.run_dir


def test_opening_clears_what_an_earlier_run_left(world: World) -> None:
    (world.life.run_dir / "left").mkdir()
    world.life.open()
    assert list(world.life.run_dir.iterdir()) == []


# --- ending, and who is told -----------------------------------------------------------------


def test_a_removal_waits_for_an_end_that_is_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.stopping()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    idle = in_thread(lambda: world.life.end_and_tell(route))
    assert door.entered.wait(5)
    destroyer = in_thread(lambda: world.completions.append(world.run("node.destroy", route)))
    assert waits(destroyer), "it found nothing held and said that all is gone"
    assert world.state(route) == "stopping"
    door.open()
    destroyer.join(5)
    idle.join(5)
    assert world.completions[0].error is None
    assert world.state(route) is None


def test_two_that_end_the_same_sandbox_both_return_when_it_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.stopping()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    one = in_thread(lambda: world.life.end_and_tell(route))
    assert door.entered.wait(5)
    other = in_thread(lambda: world.life.end_and_tell(route))
    assert waits(other)
    assert world.state(route) == "stopping"
    door.open()
    one.join(5)
    other.join(5)
    assert world.state(route) is None


def test_a_removal_that_does_not_come_to_an_end_frees_no_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_module, "_GONE_WITHIN_S", 0.01)
    route = world.stopping()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    stuck = in_thread(lambda: world.life.end(route))
    assert door.entered.wait(5)
    error = world.run("node.destroy", route).error
    assert error is not None
    assert error.code == "busy"
    assert world.state(route) == "stopping"
    door.open()
    stuck.join(5)


def test_a_new_owner_s_sandbox_waits_for_the_end_of_the_last_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.stopping()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    idle = in_thread(lambda: world.life.end(route))
    assert door.entered.wait(5)
    world.store.stopped(route)
    newer = world.reserved()
    creator = in_thread(lambda: world.completions.append(world.run("node.create", newer)))
    assert waits(creator)
    door.open()
    creator.join(5)
    idle.join(5)
    assert world.completions[0].error is None
    assert world.backend.running() == [newer.sandbox_id]
    assert world.node.held[newer.sandbox_id].route == newer


def test_ending_an_earlier_owner_s_sandbox_leaves_the_newer_one_alone(world: World) -> None:
    earlier = world.stopping()
    world.life.end_and_tell(earlier)
    newer = world.live()
    world.life.end(earlier)
    world.life.end_and_tell(earlier)
    assert world.node.held[newer.sandbox_id].route == newer
    assert world.backend.running() == [newer.sandbox_id]
    assert world.state(newer) == "live"


def test_a_message_of_an_earlier_owner_does_not_touch_the_newer_one(world: World) -> None:
    earlier = world.stopping()
    world.life.end_and_tell(earlier)
    newer = world.live()
    for kind in ("node.destroy", "node.create"):
        error = world.run(kind, earlier, delete_data=True).error
        assert error is not None
        assert error.facts["reason"] == "stale_route"
    assert world.backend.running() == [newer.sandbox_id]
    assert (world.node.settings.data_root / "threads" / "alice").exists()


def test_a_new_owner_s_sandbox_takes_the_place_of_one_that_is_left(world: World) -> None:
    left = world.live()
    world.store.lost(left, reason="test")
    newer = world.live()
    assert newer.epoch > left.epoch
    assert world.node.held[newer.sandbox_id].route == newer
    assert world.backend.running() == [newer.sandbox_id]


def test_late_news_of_a_death_is_not_taken_for_the_next_sandbox_s(world: World) -> None:
    world.store.lost(world.live(), reason="test")
    newer = world.live()
    world.life._died(newer.sandbox_id, "late")
    assert world.node.held[newer.sandbox_id].route == newer
    assert world.state(newer) == "live"


def test_a_death_is_recorded_at_once(world: World) -> None:
    route = world.live()
    world.backend.kill(route.sandbox_id)
    assert world.node.held == {}
    assert world.state(route) == "lost"


def test_a_sandbox_that_dies_before_it_is_held_is_not_said_to_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = world.backend.create

    def stillborn(plan: Any) -> Any:
        connection = create(plan)
        world.backend.kill(plan.sandbox_id)
        return connection

    monkeypatch.setattr(world.backend, "create", stillborn)
    route = world.reserved()
    error = world.run("node.create", route).error
    assert error is not None
    assert error.facts["reason"] == "died"
    assert world.node.held == {}
    assert world.state(route) is None, "its place is free"


def test_what_is_being_ended_is_not_settled_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.stopping()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    ending = in_thread(lambda: world.life.end(route))
    assert door.entered.wait(5)
    world.tick(60)
    assert world.state(route) == "stopping"
    door.open()
    ending.join(5)
    world.tick(60)
    assert world.state(route) is None


def test_an_idle_sandbox_is_ended_and_its_place_is_free(world: World) -> None:
    route = world.live(agent="")
    world.tick(30)
    assert world.work() == 0
    world.tick(31)
    assert world.work() == 1
    assert world.state(route) is None
    assert world.backend.running() == []


def used_again(world: World, route: Route) -> None:
    world.record(route, f"use-{world.store.now_ms()}", "noop")
    op_id = f"use-{world.store.now_ms()}"
    world.store.claim(op_id, route)
    world.store.finish(op_id, route, outcome="ok", reply="{}")


def test_a_held_sandbox_that_nobody_uses_is_ended_and_one_in_use_is_not(world: World) -> None:
    world.node.settings = world.node.settings.model_copy(update={"active_idle_timeout_s": 100.0})
    route = world.live()
    world.tick(90)
    used_again(world, route)
    world.tick(90)
    assert world.work() == 0
    world.record(route, "runs")
    world.tick(200)
    assert world.work() == 0, "an operation runs in it"
    world.store.claim("runs", route)
    world.store.finish("runs", route, outcome="ok", reply="{}")
    world.tick(101)
    assert world.work() == 1
    assert world.state(route) is None
    assert world.store.story(route.sandbox_id)[-2]["reason"] == "held but not used"


def test_a_sandbox_of_the_maximum_age_is_ended_as_soon_as_no_operation_runs_in_it(world: World) -> None:
    world.node.settings = world.node.settings.model_copy(update={"max_age_s": 100.0})
    route = world.live()
    world.record(route, "runs")
    world.tick(101)
    assert world.work() == 0
    world.store.claim("runs", route)
    world.store.finish("runs", route, outcome="ok", reply="{}")
    world.tick(0.001)
    assert world.work() == 1
    assert world.state(route) is None


def test_somebody_who_comes_while_an_idle_sandbox_is_looked_at_keeps_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, begin_stop = world.live(agent=""), world.store.begin_stop

    def too_late(sandbox_id: str, **options: Any) -> Any:
        world.store.renew_agents("agent", {sandbox_id: ALICE.digest}, ttl_s=LONG_S)
        return begin_stop(sandbox_id, **options)

    monkeypatch.setattr(world.store, "begin_stop", too_late)
    world.tick(61)
    assert world.work() == 0
    assert world.state(route) == "live"


# --- a node whose creations fail ------------------------------------------------------------


def fail_to_start(world: World, *names: str, error: SandfleetError | None = None) -> None:
    world.backend.fail_create = error or StartFailed("no space left", reason="disk")
    for name in names:
        identity = Identity(name)
        route = world.reserved(identity)
        assert world.run("node.create", route, identity).error is world.backend.fail_create
    world.backend.fail_create = None


def node_state(world: World) -> tuple[str, str]:
    [node] = world.store.nodes()
    return str(node.state), node.reason


def test_a_node_cordons_itself_when_the_creations_of_three_threads_in_a_row_fail(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    route = world.live()
    fail_to_start(world, "a", "b")
    assert node_state(world) == ("ready", "")
    fail_to_start(world, "c")
    assert node_state(world) == ("cordoned", "creates of 3 threads in a row failed: no space left")
    assert "node.cordoned_itself" in caplog.text
    assert world.state(route) == "live", "it keeps what it holds"


def test_one_success_between_or_one_thread_alone_cordons_nothing(world: World) -> None:
    fail_to_start(world, "a", "b")
    world.live(Identity("fine"))
    fail_to_start(world, "c", "d")
    for _ in range(5):
        fail_to_start(world, "d")
        world.clock.advance(120)
    assert node_state(world) == ("ready", "")


def test_creations_that_were_never_tried_say_nothing_about_the_node(world: World) -> None:
    fail_to_start(world, "a", "b", "c", "d", error=NotStarted("too late"))
    assert node_state(world) == ("ready", "")


def test_a_node_that_drains_is_not_cordoned_instead(world: World) -> None:
    world.store.set_node_state("n1", NodeState.DRAINING)
    world.tick()
    for name in "abc":
        world.life._judge(Identity(name), StartFailed("no"))
    assert node_state(world)[0] == "draining"


# --- operations that were lost on their way --------------------------------------------------


def test_an_operation_that_two_looks_miss_is_told_not_to_have_started(world: World) -> None:
    world.record(world.live(), "o1")
    world.tick(4)
    assert world.outcome("o1") == ("recorded", "")
    world.tick(0.5)
    assert world.outcome("o1") == ("recorded", ""), "too soon for a second look"
    world.tick(0.5)
    assert world.outcome("o1") == ("done", "not_started")


def test_an_operation_that_comes_after_one_look_is_left_alone(world: World) -> None:
    world.record(world.live(), "o1")
    world.tick(4)
    world.pool._jobs["o1"] = SimpleNamespace(begun=True)  # type: ignore[assignment]
    world.tick(1)
    del world.pool._jobs["o1"]
    world.tick(1)
    assert world.outcome("o1") == ("recorded", ""), "the two looks were not in a row"


def test_an_operation_that_is_claimed_while_it_is_looked_for_is_not_told_to_be_repeatable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.live()
    world.record(route, "o1")
    world.tick(4)
    holds = world.pool.holds

    def claimed_meanwhile(op_id: str) -> bool:
        assert world.store.claim(op_id, route).status == "claimed"
        return holds(op_id)

    monkeypatch.setattr(world.pool, "holds", claimed_meanwhile)
    world.tick(1)
    assert world.outcome("o1") == ("claimed", "")


def test_a_lost_creation_gives_its_reservation_back(world: World) -> None:
    route = world.reserved()
    world.record(route, "c1", "node.create", "creating")
    world.tick(4)
    world.tick(1)
    assert world.outcome("c1") == ("done", "not_started")
    assert world.state(route) is None


def test_a_creation_that_is_claimed_at_that_moment_keeps_its_reservation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.reserved()
    world.record(route, "c1", "node.create", "creating")
    world.tick(4)
    monkeypatch.setattr(world.pool, "holds", lambda op_id: world.store.claim(op_id, route).status != "claimed")
    world.tick(1)
    assert world.outcome("c1") == ("claimed", "")
    assert world.state(route) == "creating"


def test_a_lost_creation_leaves_a_later_one_of_the_same_sandbox_alone(world: World) -> None:
    earlier = world.reserved()
    world.record(earlier, "c1", "node.create", "creating")
    world.store.create_failed(earlier, StoreUnavailable("test").to_wire())
    world.clock.advance(3)
    later = world.reserved()
    world.record(later, "c2", "node.create", "creating")
    world.tick(1)
    world.tick(1)
    assert world.outcome("c1") == ("done", "not_started")
    assert world.state(later) == "creating"


# --- a registry that forgot ------------------------------------------------------------------


def away(*_args: Any, **_kwargs: Any) -> Any:
    raise StoreUnavailable("gone")


def not_yet(*_args: Any, **_kwargs: Any) -> Any:
    raise LeaseLost("who are you?")


@pytest.mark.parametrize("trouble", [away, not_yet], ids=["the store goes away", "it loses its data again"])
def test_a_sandbox_that_could_not_be_told_of_is_told_of_with_the_next_tick(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., Any]
) -> None:
    route = world.live()
    world.store.forget_everything()
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "adopt", trouble)
        for _ in range(3):
            try:
                world.tick(10)
            except StoreUnavailable:
                pass
        assert world.state(route) is None
    assert world.work() == 0, "nothing was ended meanwhile"
    world.tick()
    assert world.state(route) in ("live", "warm")
    assert world.backend.running() == [route.sandbox_id]


def test_a_sandbox_does_not_get_younger_with_a_registry_that_forgot_it(world: World) -> None:
    route = world.live()
    world.node.settings = world.node.settings.model_copy(update={"max_age_s": 100.0})
    world.node.held[route.sandbox_id].made_at -= 90
    world.store.forget_everything()
    world.tick(5)
    assert world.work() == 0
    world.tick(11)
    assert world.work() == 1
    assert world.state(route) is None


def test_a_sandbox_that_has_a_newer_owner_elsewhere_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.live()
    world.store.forget_everything()
    monkeypatch.setattr(world.store, "adopt", lambda *_a, **_k: False)
    world.tick()
    assert world.work() == 1
    assert world.backend.running() == []


def test_what_the_registry_has_forgotten_is_told_again_after_two_looks(world: World) -> None:
    route = world.live()
    world.store.lost(route, reason="test")
    world.store._sandboxes.drop(route.sandbox_id)
    world.tick(5)
    world.tick(1)
    assert world.state(route) is None, "too soon for a second look"
    world.tick(4)
    assert world.work() == 0
    assert world.state(route) == "warm"
    assert world.backend.running() == [route.sandbox_id]


def test_what_the_registry_gave_to_another_owner_is_ended_after_two_looks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.live()
    world.store.lost(route, reason="test")
    world.store._sandboxes.drop(route.sandbox_id)
    monkeypatch.setattr(world.store, "adopt", lambda *_a, **_k: False)
    world.tick(5)
    assert world.work() == 0
    world.tick(1)
    assert world.work() == 0, "too soon for a second look"
    world.tick(4)
    assert world.work() == 1
    assert world.backend.running() == []


def test_an_answer_that_redis_has_forgotten_is_given_once_more_and_nothing_else_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.live()
    for op_id in ("op-1", "op-2"):
        world.record(route, op_id)
    reply = json.dumps({"ok": {"exit_code": 3}})
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "finish", lambda *_a, **_k: True)  # by a server that was lost a moment later
        world.node.outbox.send("op-1", route, "ok", reply)
    for _ in range(3):
        world.tick(4)
    assert world.outcome("op-1") == ("done", "ok")
    assert world.outcome("op-2") == ("done", "not_started")


def test_a_registry_that_was_emptied_a_moment_ago_ends_nothing(world: World) -> None:
    route = world.live()
    for _ in range(3):
        # Between a renewal and the comparison, each time.
        world.clock.advance(5)
        world.lease._renew()
        world.life.upkeep.to_readopt = False
        world.store.forget_everything()
        world.life.tick(world.store.now_ms())
    assert world.work() == 0
    world.tick(5)
    assert world.state(route) in ("live", "warm")


def test_two_looks_without_a_renewal_between_them_end_nothing(world: World) -> None:
    world.live()
    world.store.forget_everything()
    for _ in range(3):
        world.clock.advance(5)
        world.life.tick(world.store.now_ms())
    assert world.work() == 0


# --- leaving ---------------------------------------------------------------------------------


def test_a_node_that_closes_waits_for_what_is_being_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.live()
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    ending = in_thread(lambda: world.life.end(route))
    assert door.entered.wait(5)
    closing = in_thread(world.life.close)
    assert waits(closing)
    door.open()
    closing.join(5)
    ending.join(5)
    assert not world.life.run_dir.exists()


def test_a_failure_that_cannot_be_recorded_is_answered_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.reserved()
    world.backend.fail_create = SandfleetError("no")
    monkeypatch.setattr(world.store, "create_failed", away)
    error = world.run("node.create", route).error
    assert error is not None
    assert error.message == "no"


# --- an engine that is away when a sandbox is to go ------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, world: World) -> Callable[[], None]:
    """From now on nothing can be ended; what is returned makes it possible again."""
    destroy = world.backend.destroy

    def away(_: str) -> None:
        raise InternalError("no daemon", reason="no_daemon")

    monkeypatch.setattr(world.backend, "destroy", away)
    return lambda: monkeypatch.setattr(world.backend, "destroy", destroy)


def test_what_cannot_be_ended_keeps_its_place_and_is_ended_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.stopping()
    back = refuse(monkeypatch, world)
    assert world.run("node.destroy", route, delete_data=True).error is not None
    for _ in range(3):
        world.tick(10)
        assert world.work() == 1, "it is tried again"
        assert world.state(route) == "stopping", "its place would be given away while it runs"
    assert (world.node.settings.data_root / "threads" / "alice").exists()
    back()
    world.tick(10)
    world.work()
    assert world.backend.running() == []
    assert (world.node.held, world.state(route)) == ({}, None)


def test_a_removal_does_not_take_the_failure_of_another_for_its_success(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = world.stopping()
    back = refuse(monkeypatch, world)
    door = Door(monkeypatch, world.backend.connection(route.sandbox_id), "close")
    one = in_thread(lambda: world.completions.append(world.run("node.destroy", route)))
    assert door.entered.wait(5)
    other = in_thread(lambda: world.completions.append(world.run("node.destroy", route, delete_data=True)))
    assert waits(other)
    door.open()
    one.join(5)
    other.join(5)
    assert [completion.error is None for completion in world.completions] == [False, False]
    assert (world.node.settings.data_root / "threads" / "alice").exists()
    back()


def test_a_node_that_closes_tells_of_an_end_when_it_has_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    route = world.live()
    seen = list[str | None]()
    destroy = world.backend.destroy
    monkeypatch.setattr(world.backend, "destroy", lambda sid: (seen.append(world.state(route)), destroy(sid)))
    world.life.close()
    assert str(seen[0]) == "live", "its thread could have got another one on the same files"
    assert world.state(route) == "lost"


# --- a disk that is nearly full --------------------------------------------------------------

FLOOR = 100 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World) -> SimpleNamespace:
    """The disk of a node with a floor, which has enough."""
    found = SimpleNamespace(free=10 * FLOOR)
    monkeypatch.setattr(upkeep_module.shutil, "disk_usage", lambda _: found)
    world.node.settings = world.node.settings.model_copy(update={"min_free_bytes": FLOOR})
    return found


def test_a_node_without_room_takes_nothing_new_until_it_has_some(world: World, disk: SimpleNamespace) -> None:
    world.tick(10)
    assert node_state(world) == ("ready", "")
    disk.free = FLOOR - 1
    world.tick(10)
    state, reason = node_state(world)
    assert (state, "min_free_bytes" in reason) == ("cordoned", True)
    disk.free = FLOOR + 1
    world.tick(10)
    assert node_state(world)[0] == "cordoned", "it would open and close in turns"
    disk.free = 2 * FLOOR
    world.tick(10)
    assert node_state(world) == ("ready", "")


def test_a_node_that_an_operator_opens_without_room_closes_again(world: World, disk: SimpleNamespace) -> None:
    disk.free = FLOOR - 1
    world.tick(10)
    world.store.set_node_state("n1", NodeState.READY)
    for _ in range(3):
        world.tick(10)
    assert node_state(world)[0] == "cordoned"


def test_a_node_that_an_operator_closes_too_stays_closed(world: World, disk: SimpleNamespace) -> None:
    disk.free = FLOOR - 1
    world.tick(10)
    world.store.set_node_state("n1", NodeState.CORDONED, reason="repairs")
    disk.free = 2 * FLOOR
    for _ in range(3):
        world.tick(10)
    assert node_state(world) == ("cordoned", "repairs")


def test_a_store_that_forgot_it_all_does_not_make_a_node_without_room_take_something(
    world: World, disk: SimpleNamespace
) -> None:
    disk.free = FLOOR - 1
    world.tick(10)
    world.store.__init__(now_ms=lambda: int(world.clock.now() * 1000))  # type: ignore[misc]
    for _ in range(3):
        world.tick(10)
    assert node_state(world)[0] == "cordoned"
