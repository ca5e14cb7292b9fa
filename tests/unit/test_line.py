"""What becomes of those who stand in line, verdict by verdict."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.model import NodeState, NodeView
from sandfleet_scheduler.line import Room, Turn, Verdict
from sandfleet_scheduler.placement import PlacementRequest

NODE = NodeView("a", "i", NodeState.READY, True, replicas=2, places=2, warm=0, data_id="d", backends=("mock",))
REQUEST = PlacementRequest(digest="0" * 64, backend="mock")


def request(number: int, **facts: object) -> PlacementRequest:
    return replace(REQUEST, digest=hashlib.sha256(str(number).encode()).hexdigest(), **facts)  # type: ignore[arg-type]


def told(turn: Turn) -> tuple[str, str]:
    return str(turn.verdict), turn.node.node_id if turn.node else turn.reason


def turns(nodes: list[NodeView], count: int, *, burst: bool = False) -> list[tuple[str, str]]:
    room = Room(nodes)
    return [told(room.turn(request(number), burst=burst)) for number in range(count)]


def test_a_free_place_is_taken_once() -> None:
    assert turns([replace(NODE, places=1)], 3) == [("place", "a"), ("wait", ""), ("wait", "")]


def test_the_emptiest_fitting_node_is_taken_and_counted_down() -> None:
    half, empty = replace(NODE, node_id="half", places=1), replace(NODE, node_id="empty", places=0)
    got = turns([half, empty], 4)
    assert got[0] == ("place", "empty")
    assert Counter(node for _, node in got[:3]) == {"empty": 2, "half": 1}
    assert got[3] == ("wait", "")


def test_a_place_that_is_about_to_be_free_is_waited_for_before_anything_is_evicted() -> None:
    node = replace(NODE, stopping=1, idlest=(("s1", 10),), warm=1)
    assert turns([node], 3) == [("soon", "a"), ("evict", "a"), ("wait", "")]


def test_whoever_was_promised_a_place_is_promised_it_again_when_the_line_is_looked_at_once_more() -> None:
    room = Room([replace(NODE, idlest=(("s1", 10),), warm=1)])
    assert room.turn(REQUEST).sandboxes == ("s1",)
    # The next pass finds the removal under way.
    assert turns([replace(NODE, stopping=1)], 2) == [("soon", "a"), ("wait", "")]


def test_the_longest_idle_sandbox_of_all_fitting_nodes_goes_first() -> None:
    one = replace(NODE, node_id="one", warm=2, idlest=(("one-20", 20), ("one-40", 40)))
    two = replace(NODE, node_id="two", warm=2, idlest=(("two-10", 10), ("two-30", 30)))
    other = replace(NODE, node_id="other", backends=("local",), idlest=(("other-1", 1),), warm=1)
    room = Room([one, two, other])
    evicted = [room.turn(request(number)).sandboxes for number in range(4)]
    assert evicted == [("two-10",), ("one-20",), ("two-30",), ("one-40",)]
    assert room.turn(request(5)).verdict is Verdict.WAIT


def test_nobody_is_kept_waiting_by_somebody_who_waits_for_something_else() -> None:
    full, other = replace(NODE, labels={"gpu": "1"}), replace(NODE, node_id="b", places=1)
    room = Room([full, other])
    assert told(room.turn(request(1, labels={"gpu": "1"}))) == ("wait", "")
    assert told(room.turn(request(2, home="d", labels={}))) == ("place", "b")
    assert told(room.turn(request(3, labels={"gpu": "1"}))) == ("wait", "")


def test_a_thread_waits_for_its_home_rather_than_lose_its_data() -> None:
    home, empty = replace(NODE, node_id="home", data_id="h"), replace(NODE, node_id="empty", places=0)
    assert told(Room([home, empty]).turn(request(1, home="h"))) == ("wait", "")


@pytest.mark.parametrize(
    ("nodes", "facts", "reason"),
    [
        ([], {}, "no_node"),
        ([replace(NODE, places=0, state=NodeState.CORDONED)], {}, "no_node"),
        ([replace(NODE, places=0)], {"backend": "local"}, "no_backend"),
        ([replace(NODE, places=0)], {"labels": {"gpu": "1"}}, "no_label"),
        ([replace(NODE, places=0)], {"home": "elsewhere"}, "home_away"),
    ],
)
def test_who_could_never_be_placed_now_is_told_so(nodes: list[NodeView], facts: dict[str, object], reason: str) -> None:
    assert told(Room(nodes).turn(request(1, **facts))) == ("refuse", reason)


def test_burst_places_are_for_those_who_ask_for_them_and_only_when_nothing_can_be_evicted() -> None:
    node = replace(NODE, burst_limit=1, warm=1, idlest=(("s1", 10),))
    assert turns([node], 2) == [("evict", "a"), ("wait", "")]
    assert turns([replace(node, idlest=())], 2, burst=True) == [("burst", "a"), ("wait", "")]
    assert turns([replace(node, burst_limit=9)], 2, burst=True) == [("evict", "a"), ("wait", "")], "not in its way"
    assert turns([replace(NODE, burst_limit=1, places=3)], 1, burst=True) == [("wait", "")]


def test_a_node_above_its_replicas_has_to_lose_more_than_one_before_a_place_is_free() -> None:
    above = replace(NODE, places=4, burst_limit=2, warm=3, idlest=(("s1", 1), ("s2", 2), ("s3", 3)))
    assert Room([above]).turn(REQUEST).sandboxes == ("s1", "s2", "s3")
    assert turns([replace(above, idlest=(("s1", 1),))], 1) == [("wait", "")]
    assert turns([replace(above, stopping=2, idlest=())], 1) == [("wait", "")]
    assert turns([replace(above, stopping=3, idlest=())], 2) == [("soon", "a"), ("wait", "")]


def test_where_one_eviction_is_enough_it_is_preferred_to_a_longer_idle_pair() -> None:
    above = replace(NODE, node_id="above", places=3, burst_limit=1, warm=2, idlest=(("old-1", 1), ("old-2", 2)))
    full = replace(NODE, node_id="full", warm=1, idlest=(("young", 9),))
    assert Room([above, full]).turn(REQUEST).sandboxes == ("young",)


def test_a_place_that_was_taken_by_another_is_not_given_again() -> None:
    room = Room([replace(NODE, places=0), replace(NODE, node_id="b", places=1, replicas=4)])
    first = room.turn(REQUEST)
    assert told(first) == ("place", "a")
    room.give_back(first)
    room.filled(NODE)
    assert {told(room.turn(request(n))) for n in range(3)} == {("place", "b")}
    assert told(room.turn(REQUEST)) == ("wait", "")


def test_a_node_that_went_away_is_not_asked_again_and_leaves_a_reason() -> None:
    room = Room([replace(NODE, places=0)])
    assert room.turn(REQUEST).verdict is Verdict.PLACE
    room.gone(NODE)
    assert told(room.turn(REQUEST)) == ("refuse", "no_node")
    assert room.left == 0


def test_an_eviction_that_failed_is_made_up_for_by_the_next_one() -> None:
    room = Room([replace(NODE, warm=2, idlest=(("s1", 1), ("s2", 2)))])
    turn = room.turn(REQUEST)
    assert turn.sandboxes == ("s1",)
    room.kept(turn, 1)
    room.give_back(turn)
    assert room.turn(REQUEST).sandboxes == ("s2",)
    assert room.turn(REQUEST).verdict is Verdict.WAIT


def test_a_blank_sandbox_of_the_spec_comes_first_then_a_free_place_then_any_blank() -> None:
    node = replace(NODE, replicas=4, places=3, blanks={"spec": 1, "another": 1}, warm=1, idlest=(("s1", 1),))
    room = Room([node])
    assert room.left == 3 + 1
    got = [room.turn(request(number, spec_digest="spec")) for number in range(5)]
    assert [(turn.verdict, turn.blank) for turn in got] == [
        (Verdict.PLACE, "spec"),
        (Verdict.PLACE, None),
        (Verdict.PLACE, "another"),
        (Verdict.EVICT, None),
        (Verdict.WAIT, None),
    ]
    assert room.left == 0


def test_each_node_is_asked_for_its_own_blank_sandboxes_and_for_no_more() -> None:
    one, two = (
        replace(NODE, node_id="one", replicas=9, blanks={"spec": 1}),
        replace(NODE, node_id="two", replicas=3, blanks={"spec": 1}),
    )
    room = Room([one, two])
    got = [room.turn(request(number, spec_digest="spec")) for number in range(3)]
    assert [turn.node and turn.node.node_id for turn in got] == ["one", "two", "one"]
    assert [turn.blank for turn in got] == ["spec", "spec", None]


def test_on_a_node_above_its_replicas_a_blank_sandbox_is_room_and_warm_ones_are_kept() -> None:
    above = replace(NODE, places=3, burst_limit=1, blanks={"another": 1}, warm=1, idlest=(("s1", 1),))
    room = Room([above])
    turn = room.turn(REQUEST)
    assert (turn.verdict, turn.blank) == (Verdict.PLACE, "another")
    room.give_back(turn)
    assert room.turn(REQUEST).blank == "another"
    assert room.turn(REQUEST).verdict is Verdict.WAIT, "one eviction is not enough here"


def test_blank_sandboxes_that_others_took_are_not_counted_on() -> None:
    node = replace(NODE, blanks={"spec": 1, "another": 1}, warm=1, idlest=(("s1", 1),))
    room = Room([node])
    turn = room.turn(replace(REQUEST, spec_digest="spec"))
    room.give_back(turn)
    room.filled(node)
    assert room.turn(REQUEST).verdict is Verdict.EVICT
    assert room.turn(REQUEST).verdict is Verdict.WAIT


def test_what_is_given_back_is_given_to_the_next_who_waits() -> None:
    room = Room([replace(NODE, places=1)])
    turn = room.turn(request(1))
    assert turn.verdict is Verdict.PLACE
    assert room.turn(request(2)).verdict is Verdict.WAIT
    room.give_back(turn)
    assert room.turn(request(3)).verdict is Verdict.PLACE


def test_nothing_is_left_where_nodes_take_nothing() -> None:
    assert Room([replace(NODE, places=0, state=NodeState.CORDONED), replace(NODE, places=0, alive=False)]).left == 0
    assert Room([replace(NODE, places=0)]).left == 2


views = st.builds(
    NodeView,
    node_id=st.text("abcdefgh", min_size=1, max_size=2),
    incarnation=st.just("i"),
    state=st.sampled_from([NodeState.READY, NodeState.READY, NodeState.CORDONED]),
    alive=st.booleans(),
    replicas=st.integers(1, 5),
    places=st.integers(0, 8),
    warm=st.just(0),
    data_id=st.sampled_from(["d", "e"]),
    backends=st.just(("mock",)),
    labels=st.sampled_from([{}, {"zone": "a"}]),
    burst_limit=st.integers(0, 2),
    stopping=st.integers(0, 2),
    idlest=st.lists(st.integers(0, 99), max_size=4).map(lambda since: tuple((f"s{n}", n) for n in sorted(since))),
    blanks=st.dictionaries(st.sampled_from(["spec", "another"]), st.integers(1, 2)),
)
wishes = st.tuples(
    st.builds(
        PlacementRequest,
        digest=st.integers(0, 50).map(str),
        backend=st.just("mock"),
        labels=st.sampled_from([{}, {"zone": "a"}]),
        home=st.sampled_from([None, "d"]),
        spec_digest=st.sampled_from(["spec", "rare"]),
    ),
    st.booleans(),
)


@settings(deadline=None)
@given(nodes=st.lists(views, max_size=5, unique_by=lambda node: node.node_id), line=st.lists(wishes, max_size=25))
def test_nothing_is_given_twice_and_nothing_more_is_evicted_than_is_needed(
    nodes: list[NodeView], line: list[tuple[PlacementRequest, bool]]
) -> None:
    room, placed, promised, burst_taken, evicted = Room(nodes), Counter[str](), Counter[str](), Counter[str](), []
    blanks = {node.node_id: Counter(node.blanks) for node in nodes}
    for wish, burst in line:
        possible, turn = room.left, room.turn(wish, burst=burst)
        if turn.node is None:
            continue
        assert possible > 0
        name = turn.node.node_id
        assert turn.node.alive
        assert turn.node.state is NodeState.READY
        if turn.blank is not None:
            assert turn.verdict is Verdict.PLACE
            blanks[name][turn.blank] -= 1
        elif turn.verdict is Verdict.PLACE:
            placed[name] += 1
        elif turn.verdict is Verdict.BURST:
            assert burst
            burst_taken[name] += 1
        else:
            promised[name] += 1
        if turn.verdict is not Verdict.PLACE:
            assert not blanks[name].total(), "a blank sandbox is given up before anything else"
        evicted += [(name, sandbox_id) for sandbox_id in turn.sandboxes]
    for node in nodes:
        name = node.node_id
        assert min(blanks[name].values(), default=0) >= 0
        assert node.places + placed[name] <= max(node.replicas, node.places)
        assert node.places + placed[name] + burst_taken[name] <= max(node.replicas + node.burst_limit, node.places)
        ended = [sandbox_id for where, sandbox_id in evicted if where == name]
        assert ended == [sandbox_id for sandbox_id, _ in node.idlest[: len(ended)]]
        if promised[name]:
            after = node.places - node.stopping - len(ended) + placed[name] + burst_taken[name] + promised[name]
            assert after <= node.replicas
            if ended:
                assert after == node.replicas, "one less would have been enough"
