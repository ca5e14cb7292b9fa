"""The part of `tests.contract.store_machine` about blank sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandfleet.model import NodeState
from tests.contract.store_fixtures import World

DIGESTS = ("d1", "d2", "")
NODES = ("n1", "n2")

nodes = st.sampled_from(NODES)
back = st.integers(0, 2)


class BlankRules(RuleBasedStateMachine):
    """What nodes do with blank sandboxes; the rest of the machine gives them to threads."""

    worlds: tuple[World, World]
    overbooked: set[str]
    both: Callable[[Callable[[World, int], Any]], Any]
    incarnation: Callable[[str], str]

    def __init__(self) -> None:
        super().__init__()
        #: (slot, node, incarnation) of all that were begun.
        self.slots: list[tuple[str, str, str]] = []
        self.given: set[str] = set()

    @rule(node=nodes, free=st.integers(0, 1), stale=st.booleans())
    def begin_blank(self, node: str, free: int, stale: bool) -> None:
        slot, name = f"s{len(self.slots)}", "another" if stale else self.incarnation(node)
        line = self.worlds[0].store.parked()
        answers = self.both(lambda w, _: w.begin_blank(slot, node, name, reserve_free=free))
        self.slots.append((slot, node, name))
        if answers[0]:
            assert not line
            for world in self.worlds:
                view = next(view for view in world.store.nodes() if view.node_id == node)
                assert view.alive
                assert view.places <= view.replicas - free

    @precondition(lambda self: self.slots)
    @rule(ago=back, digest=st.sampled_from(DIGESTS[:2]), again=st.booleans())
    def blank_ready(self, ago: int, digest: str, again: bool) -> None:
        slot, node, name = self.slots[-1 - ago % len(self.slots)]
        again = again and slot not in self.given
        answers = self.both(lambda w, _: w.store.blank_ready(node, name, slot, spec_digest=digest, again=again))
        if answers[0]:
            assert slot not in self.given, "a thread has it"
            if again:
                self.overbooked.add(node)

    @precondition(lambda self: self.slots)
    @rule(ago=back)
    def blank_gone(self, ago: int) -> None:
        slot, node, name = self.slots[-1 - ago % len(self.slots)]
        answers = self.both(lambda w, _: w.store.blank_gone(node, name, slot))
        assert not (answers[0] and slot in self.given), "a thread has it"

    @precondition(lambda self: self.slots)
    @rule(ago=back)
    def start_takes_too_long(self, ago: int) -> None:
        slot, node, _ = self.slots[-1 - ago % len(self.slots)]

        def act(world: World, _: int) -> None:
            if slot not in world.store.blanks(node) and f"~{slot}" in world.counted_on(node):
                world.expire_place(f"~{slot}", node)

        self.both(act)

    def given_once(self, node: str, slot: str, ready: dict[str, str], digest: str) -> None:
        """A thread got a place on the node where these were ready: that of the right blank, or of none."""
        same = [one for one, spec in ready.items() if spec == digest]
        assert slot in (same or [*ready, ""])
        if slot:
            assert slot not in self.given
            self.given.add(slot)
            for world in self.worlds:
                assert slot not in world.store.blanks(node)
                assert f"~{slot}" not in world.counted_on(node)

    def blank_places(self, world: World, node: str) -> set[str]:
        return {member for member in world.counted_on(node) if member.startswith("~")}

    @invariant()
    def blanks_are_their_nodes_own(self) -> None:
        begun_by = {slot: (node, name) for slot, node, name in self.slots}
        for world in self.worlds:
            for view in world.store.nodes():
                ready = world.store.blanks(view.node_id)
                held = {member[1:] for member in self.blank_places(world, view.node_id)}
                assert set(ready) <= held, "ready without a place"
                assert sum(view.blanks.values()) == len(ready)
                assert view.starting <= len(held) - len(ready)
                assert all(begun_by[slot] == (view.node_id, view.incarnation) for slot in held)
                assert not held or view.state is not NodeState.GONE
