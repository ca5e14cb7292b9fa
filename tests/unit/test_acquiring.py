"""The client's side of an acquire: how it waits in line, what it is told when it waited too long, how it leaves.

Over the memory store and without a scheduler: a test says what happens while the client waits. Waits are short because
the steps are driven by hand: what they want to wait for is looked at, not waited for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest

from sandfleet.acquiring import Asking, StandsInLine, acquire_steps, wanted_spec
from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import HomeUnavailable, NoCapacity, QuotaExceeded, ReplyTimeout, SandfleetError, StartFailed
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.replies import Pending
from sandfleet.steps import Do, Sleep, Steps, Wait, drive, drive_async
from sandfleet.store.base import NodeRecord, Push, Route
from sandfleet.store.memory import MemoryStore
from tests.services import wait_until_async

ALICE, BOB = Identity("alice"), Identity("bob")
SPEC = SandboxSpec("mock")
SERVE = Push("serve", "serve")
LONG_S = 3600.0


class World:
    """A client, and one node with one place."""

    def __init__(self, **settings: Any) -> None:
        self.store = MemoryStore()
        self.client = Client(Settings.load({}, backend="mock", **settings), self.store)
        self.store.announce(NodeRecord("n1", "i1", 1, "d", ("mock",)), lease_s=LONG_S)

    def asking(self, identity: Identity = ALICE, *, within_s: float = LONG_S, **options: Any) -> Asking:
        return Asking(identity, SPEC, self.client.id, within_s, **options)

    def take(self, identity: Identity, *, from_line: bool = False) -> Route:
        told = self.store.reserve(
            identity, SPEC, node_id="n1", incarnation="i1", data_id="d", expires_s=60, from_line=from_line
        )
        assert told.route is not None, told
        return told.route

    def make(self, identity: Identity, *, from_line: bool = False) -> Route:
        route = self.take(identity, from_line=from_line)
        assert self.store.created(route)
        return route

    def requests(self) -> list[dict[str, Any]]:
        """What was sent to the schedulers."""
        return [json.loads(json.loads(text)["body"])[0][0] for text in self.store.queues["sandfleet.scheduler"][::-1]]

    def state(self, identity: Identity) -> tuple[str, int]:
        info = self.store.sandbox(identity.digest[:8])
        return (str(info.state), info.agents) if info is not None else ("none", 0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    read = world.store.read_replies
    monkeypatch.setattr(world.store, "read_replies", lambda client, cursor, block_s: read(client, cursor, block_s=0.02))
    yield world
    world.client.close()


def until_wait(steps: Steps[Route], send: Any = None) -> Wait | Sleep:
    """Go on up to the next pause, and give it."""
    step = steps.send(send)
    while isinstance(step, Do):
        step = steps.send(step.run())
    return step


def time_out(steps: Steps[Route]) -> Wait | Sleep:
    """Nothing came: go on up to the next pause."""
    step = steps.throw(TimeoutError())
    while isinstance(step, Do):
        try:
            value = step.run()
        except SandfleetError as exc:
            step = steps.throw(exc)
        else:
            step = steps.send(value)
    return step


def test_the_request_says_what_the_caller_wants_and_when_it_began_to(world: World) -> None:
    before = world.store.now_ms()
    steps = acquire_steps(world.client, world.asking(on_lost="fresh", within_s=12.0))
    assert until_wait(steps).timeout_s == 2.0  # type: ignore[union-attr]
    [request] = world.requests()
    assert (request["overflow"], request["on_lost"]) == ("wait", "fresh")
    assert before - 5 <= request["asked_at_ms"] <= world.store.now_ms() + 5
    steps.close()


def test_in_line_it_asks_again_only_now_and_then_and_keeps_its_turn(world: World) -> None:
    steps = acquire_steps(world.client, world.asking())
    until_wait(steps)
    assert world.store.park(ALICE, "{}", push=SERVE) == 1
    pause = time_out(steps)
    assert isinstance(pause, Wait)
    assert 9 < pause.timeout_s <= 10
    before = world.store.parked()
    time_out(steps)
    assert world.store.parked() == before
    assert len(world.requests()) == 1
    steps.close()


def test_whoever_stood_in_line_too_long_is_told_the_position_and_leaves(world: World) -> None:
    others = {identity: acquire_steps(world.client, world.asking(identity)) for identity in (BOB, Identity("carol"))}
    for identity, other in others.items():
        until_wait(other)
        world.store.park(identity, "{}", push=SERVE)
    steps = acquire_steps(world.client, world.asking(within_s=0.05))
    until_wait(steps)
    world.store.park(ALICE, "{}", push=SERVE)
    time.sleep(0.05)
    with pytest.raises(NoCapacity, match="number 3 in line") as told:
        time_out(steps)
    assert (told.value.facts["position"], told.value.facts["reason"]) == (3, "in_line")
    assert told.value.facts["waited_s"] >= 0.05
    assert told.value.retry_after_s is not None
    assert world.store.line_length() == 2


def test_without_a_scheduler_it_is_told_that_nobody_answers(world: World) -> None:
    steps = acquire_steps(world.client, world.asking(within_s=0.01))
    until_wait(steps)
    time.sleep(0.01)
    with pytest.raises(ReplyTimeout, match="is a scheduler running"):
        time_out(steps)
    assert world.make(ALICE).sandbox_id
    assert world.state(ALICE) == ("warm", 0), "it does not wait any more"


def test_when_the_time_is_up_it_is_told_what_the_fleet_said_last(world: World) -> None:
    steps = acquire_steps(world.client, world.asking(within_s=0.2))
    until_wait(steps)
    away = HomeUnavailable("its machine is away", retry_after_s=0.01)
    assert isinstance(until_wait(steps, json.dumps({"error": away.to_wire()})), Sleep)
    until_wait(steps)
    time.sleep(0.2)
    with pytest.raises(HomeUnavailable, match="its machine is away"):
        time_out(steps)


def test_a_sandbox_that_is_granted_at_the_last_moment_counts(world: World) -> None:
    steps = acquire_steps(world.client, world.asking(within_s=0.01))
    until_wait(steps)
    time.sleep(0.01)
    route = world.make(ALICE)
    with pytest.raises(StopIteration) as done:
        time_out(steps)
    assert done.value.value == route
    assert world.state(ALICE) == ("live", 1)


def test_a_caller_who_is_interrupted_leaves_the_line(world: World) -> None:
    steps = acquire_steps(world.client, world.asking())
    until_wait(steps)
    world.store.park(ALICE, "{}", push=SERVE)
    steps.close()
    assert world.store.line_length() == 0


def test_a_caller_who_is_interrupted_does_not_hold_what_was_just_granted(world: World) -> None:
    steps = acquire_steps(world.client, world.asking())
    until_wait(steps)
    world.make(ALICE)
    assert world.state(ALICE) == ("live", 1)
    steps.close()
    assert world.state(ALICE) == ("warm", 0)


def test_a_caller_who_is_interrupted_does_not_release_it_under_another_thread_of_the_process(world: World) -> None:
    steps = acquire_steps(world.client, world.asking())
    until_wait(steps)
    world.client.holds.add(world.make(ALICE), ALICE.digest)
    steps.close()
    assert world.state(ALICE) == ("live", 1)


async def test_a_cancelled_coroutine_leaves_the_line_and_does_not_block_the_loop(world: World) -> None:
    task = asyncio.create_task(drive_async(acquire_steps(world.client, world.asking())))
    await wait_until_async(lambda: world.store._waiting, 5)
    world.store.park(ALICE, "{}", push=SERVE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(lambda: not world.store.line_length(), 5)


def test_a_program_that_is_interrupted_leaves_the_line_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_pending: Pending, _timeout_s: float) -> None:
        assert world.store.park(ALICE, "{}", push=SERVE) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Pending, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        drive(acquire_steps(world.client, world.asking()))
    assert kept.tb is not None, "the traceback would keep the steps alive"
    assert world.store.line_length() == 0


def test_who_comes_again_is_left_in_line(world: World) -> None:
    def place() -> bool:
        return bool(world.store.park(ALICE, "{}", push=SERVE))

    asking = world.asking(waiter_id="w1", line_patience_s=0.01, place=place)
    for _ in range(2):
        with pytest.raises(StandsInLine):
            drive(acquire_steps(world.client, asking))
        assert world.store.line_length() == 1
    world.make(ALICE, from_line=True)
    assert drive(acquire_steps(world.client, asking)).sandbox_id == ALICE.digest[:8]


def policy(world: World, overflow: str) -> None:
    world.client.settings = world.client.settings.model_copy(update={"overflow_policy": overflow})


REFUSALS = {"full": NoCapacity, "quota": QuotaExceeded}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_rejection_is_raised_at_once(world: World, reason: str) -> None:
    policy(world, "reject")
    steps = acquire_steps(world.client, world.asking())
    wait = until_wait(steps)
    assert isinstance(wait, Wait)
    refused = REFUSALS[reason]("full", retry_after_s=0.001, reason=reason, overflow="reject").to_wire()
    assert world.store.answer_waiters(ALICE, refused) == 1
    with pytest.raises(REFUSALS[reason], match="full"):
        steps.send(wait.pending.wait(5))


@pytest.mark.parametrize("reason", REFUSALS)
def test_whoever_waits_is_not_refused_because_another_caller_of_the_thread_would_rather_be(
    world: World, reason: str
) -> None:
    steps = acquire_steps(world.client, world.asking())
    wait = until_wait(steps)
    assert isinstance(wait, Wait)
    refused = REFUSALS[reason]("full", retry_after_s=5.0, reason=reason, overflow="reject").to_wire()
    assert world.store.answer_waiters(ALICE, refused) == 1
    pause = steps.send(wait.pending.wait(5))
    assert isinstance(pause, Sleep)
    assert pause.seconds < 1
    assert isinstance(until_wait(steps), Wait)
    assert len(world.requests()) == 2
    steps.close()


def test_whoever_would_rather_be_refused_does_not_wait_in_line_with_another_caller_of_the_thread(world: World) -> None:
    other = acquire_steps(world.client, world.asking())
    until_wait(other)
    world.store.park(ALICE, "{}", push=SERVE)
    policy(world, "reject")
    steps = acquire_steps(world.client, world.asking())
    assert until_wait(steps) == Wait(ANY, 2.0)
    with pytest.raises(NoCapacity) as told:
        time_out(steps)
    assert told.value.facts["position"] == 1
    assert world.store.line_length() == 1, "the other one still waits"
    other.close()


def test_a_waiter_whose_client_died_is_not_kept_for_as_long_as_it_would_have_waited(world: World) -> None:
    clock = [world.store.now_ms()]
    world.store._clock = lambda: clock[0]
    steps = acquire_steps(world.client, world.asking())
    until_wait(steps)
    world.store.park(ALICE, "{}", push=SERVE)
    clock[0] += 12_000  # it asks again every ten seconds
    time_out(steps)
    clock[0] += 20_000
    assert [entry.digest for entry in world.store.parked()] == [ALICE.digest]
    clock[0] += 20_000
    assert world.store.parked() == []
    steps.close()


def test_want_of_a_node_is_asked_about_again(world: World) -> None:
    steps = acquire_steps(world.client, world.asking())
    wait = until_wait(steps)
    assert isinstance(wait, Wait)
    world.store.answer_waiters(ALICE, NoCapacity("no node", retry_after_s=0.5, reason="no_node").to_wire())
    pause = steps.send(wait.pending.wait(5))
    assert pause == Sleep(0.5)
    steps.close()


def fail(world: World, times: int) -> None:
    for _ in range(times):
        assert world.store.create_failed(world.take(ALICE), StartFailed("no such image", reason="image").to_wire())


def test_a_thread_that_backs_off_is_told_why_at_once_when_there_is_no_time_for_it(world: World) -> None:
    fail(world, 3)
    with pytest.raises(StartFailed, match="no such image") as told:
        drive(acquire_steps(world.client, world.asking(within_s=0.5)))
    assert told.value.facts["reason"] == "backing_off"
    assert told.value.retry_after_s == pytest.approx(2.0, abs=0.5)
    assert world.requests() == []


def test_a_thread_that_backs_off_is_tried_again_when_there_is_time_for_it(world: World) -> None:
    fail(world, 2)
    steps = acquire_steps(world.client, world.asking())
    pause = until_wait(steps)
    assert isinstance(pause, Sleep)
    assert pause.seconds == pytest.approx(1.0, abs=0.3)
    steps.close()


def test_the_environment_of_the_settings_is_under_that_of_the_spec() -> None:
    settings = Settings.load({}, backend="mock", environment={"A": "1", "B": "2"})
    assert wanted_spec(settings).env == {"A": "1", "B": "2"}
    assert wanted_spec(settings, SandboxSpec("mock", env={"B": "3"})).env == {"A": "1", "B": "3"}
    assert wanted_spec(Settings.load({}, backend="mock"), SPEC) is SPEC
