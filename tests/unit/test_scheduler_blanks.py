"""The scheduler and blank sandboxes: who gets one, what its node is told, what is given up before anybody's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet_scheduler.asking import AcquireRequest
from sandfleet_scheduler.service import IN_LINE
from tests.unit.capacity_world import argument_of
from tests.unit.test_scheduler import ALICE, BOB, CAROL, LONG_S, SPEC, World

OTHER = SandboxSpec("mock", env={"KIND": "other"})


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def blank(world: World, slot: str, spec: SandboxSpec = SPEC, node_id: str = "n1") -> None:
    world.blank(slot, spec.digest, node_id, f"{node_id}-1")


def told(world: World, node_id: str = "n1") -> list[dict[str, Any]]:
    """The arguments of each node.create that the node was sent, oldest first."""
    messages = world.pushed(f"sandfleet.node.{node_id}")
    return [argument["args"] for task, argument in map(argument_of, messages) if task == "node.create"]


def test_the_node_is_told_which_blank_sandbox_it_is_to_give(world: World) -> None:
    world.node(replicas=3)
    blank(world, "s1")
    assert world.place(ALICE) == "placed on n1"
    assert world.place(BOB) == "placed on n1"
    given, cold = told(world)
    assert given["blank"] == "s1"
    assert given["spec"] == SPEC.to_wire()
    assert "blank" not in cold


def test_a_thread_goes_where_a_blank_sandbox_of_its_spec_is_ready(world: World) -> None:
    world.node("n1", replicas=9)
    world.node("n2", replicas=2)
    blank(world, "s1", OTHER, "n1")
    blank(world, "s2", SPEC, "n2")
    assert world.place(ALICE) == "placed on n2"
    assert world.place(BOB, OTHER) == "placed on n1"
    assert world.place(CAROL) == "placed on n1", "no other is ready, so where most is free"
    assert [args.get("blank") for args in told(world, "n1")] == ["s1", None]


def test_labels_of_the_request_do_not_make_another_spec_of_it(world: World) -> None:
    world.node(labels={"zone": "a"}, replicas=2)
    blank(world, "s1")
    assert world.place(ALICE, SandboxSpec("mock", labels={"zone": "a"})) == "placed on n1"
    assert told(world)[0]["blank"] == "s1"


def test_a_blank_sandbox_of_another_spec_is_given_up_before_anybodys_warm_one(world: World) -> None:
    world.node(replicas=2)
    warm = world.warm(BOB)
    blank(world, "s1", OTHER)
    assert world.want(ALICE) == "placed on n1"
    assert (told(world)[0]["blank"], world.evicted()) == ("s1", [])
    assert world.want(CAROL) == IN_LINE
    world.line.serve()
    assert world.evicted() == [warm.sandbox_id]


def test_nobody_is_refused_while_a_blank_sandbox_can_be_given_up(world: World) -> None:
    world.node(replicas=1)
    blank(world, "s1", OTHER)
    assert world.place(ALICE, overflow="reject") == "placed on n1"


def test_who_is_refused_is_told_of_the_blank_sandboxes_on_their_way(world: World) -> None:
    world.node(replicas=2)
    world.warm(BOB)
    world.acquire(BOB)
    assert world.begin_blank("s1", incarnation="n1-1")
    assert world.want(ALICE, overflow="reject") == "no_capacity"
    facts = world.error(ALICE)["facts"]
    assert [facts[name] for name in ("active", "warm", "creating", "blank")] == [1, 0, 0, 1]


def test_a_burst_takes_the_blank_sandbox_first(world: World) -> None:
    world.node(replicas=1, burst_limit=1)
    blank(world, "s1", OTHER)
    assert world.place(ALICE, overflow="burst") == "placed on n1"
    assert world.places() == 1
    assert world.place(BOB, overflow="burst") == "placed on n1, above its replicas"


def test_whoever_stands_in_line_gets_the_blank_sandbox_that_becomes_ready(world: World) -> None:
    world.node(replicas=1)
    assert world.begin_blank("s1", incarnation="n1-1")
    assert world.want(ALICE) == IN_LINE
    assert world.wake_ups() == 1
    assert world.line.serve() == "served 0"
    assert world.store.blank_ready("n1", "n1-1", "s1", spec_digest=OTHER.digest)
    assert world.want(BOB) == IN_LINE, "it is not for newcomers"
    assert world.wake_ups() == 1
    assert world.line.serve() == "served 1"
    assert world.in_line() == ["bob"]
    assert told(world)[0]["blank"] == "s1"


def test_the_line_is_served_with_blank_sandboxes_of_each_ones_own_spec(world: World) -> None:
    world.node(replicas=4)
    for number in range(4):
        assert world.begin_blank(f"s{number}", incarnation="n1-1")
    specs = [OTHER, SPEC, SPEC, OTHER]
    for number, spec in enumerate(specs):
        assert world.want(Identity(f"t{number}"), spec) == IN_LINE
    for number, spec in enumerate(reversed(specs[1:])):
        assert world.store.blank_ready("n1", "n1-1", f"s{number}", spec_digest=spec.digest)
    world.line.serve()
    assert [(args["blank"], args["spec"]["env"]) for args in told(world)] == [
        ("s0", OTHER.env),
        ("s1", {}),
        ("s2", {}),
    ]
    assert world.in_line() == ["t3"]
    assert world.store.blank_gone("n1", "n1-1", "s3")
    world.line.serve()
    assert world.in_line() == []
    assert "blank" not in told(world)[-1]


def test_a_creation_that_the_node_does_not_take_gives_the_place_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.node(replicas=1)
    blank(world, "s1")
    monkeypatch.setattr(world.scheduler, "send", lambda *_: "busy")
    assert world.place(ALICE) == "placed on n1"
    assert (world.places(), world.store.blanks("n1")) == (0, {}), "the node finds out that nobody knows it any more"


def test_what_stands_in_line_keeps_its_spec() -> None:
    request = AcquireRequest(ALICE, OTHER)
    again, _ = AcquireRequest.from_line(request.for_line(None))
    assert again.wanted(None).spec_digest == request.wanted(None).spec_digest == OTHER.digest
    assert json.loads(request.for_line(None))["spec"]["env"] == OTHER.env


def test_a_dead_nodes_blank_sandboxes_are_closed_with_it(world: World) -> None:
    world.node(replicas=2)
    blank(world, "s1")
    world.clock.ms += int(LONG_S * 1000) + 1
    assert world.scheduler.reconcile() == ["n1"]
    assert (world.places(), world.store.blanks("n1")) == (0, {})
    world.clock.ms += 6000
    assert world.scheduler.reconcile() == [], "nothing is left of it"
