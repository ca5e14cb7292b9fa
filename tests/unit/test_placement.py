"""Where a new sandbox goes: a request and a list of nodes in, a decision out."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.model import NodeState, NodeView
from sandfleet_scheduler.placement import PlacementRequest, choose_node

NODE = NodeView("a", "i", NodeState.READY, True, replicas=4, places=0, warm=0, data_id="d", backends=("mock",))
REQUEST = PlacementRequest(digest="0" * 64, backend="mock")


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def ids(nodes: tuple[NodeView, ...]) -> list[str]:
    return [node.node_id for node in nodes]


def test_the_emptier_node_comes_first() -> None:
    half, empty = replace(NODE, node_id="half", places=2), replace(NODE, node_id="empty")
    assert ids(choose_node(REQUEST, [half, empty]).place) == ["empty", "half"]


def test_emptiness_is_a_share_so_that_big_nodes_do_not_take_everything() -> None:
    big, small = (
        replace(NODE, node_id="big", replicas=100, places=50),
        replace(NODE, node_id="small", replicas=4, places=1),
    )
    assert ids(choose_node(REQUEST, [big, small]).place) == ["small", "big"]


def test_of_equally_empty_nodes_the_less_busy_comes_first() -> None:
    busy, idle = replace(NODE, node_id="busy", inflight=9), replace(NODE, node_id="idle")
    assert ids(choose_node(REQUEST, [busy, idle]).place) == ["idle", "busy"]


def test_a_node_with_a_blank_sandbox_of_the_spec_comes_before_an_emptier_one() -> None:
    warm, other = (
        replace(NODE, node_id="warm", places=3, blanks={"spec": 1}),
        replace(NODE, node_id="other", places=1, blanks={"another": 1}),
    )
    request = replace(REQUEST, spec_digest="spec")
    assert ids(choose_node(request, [other, warm]).place) == ["warm", "other"]
    assert ids(choose_node(REQUEST, [other, warm]).place) == ["other", "warm"], "a request that names no spec"
    fuller = replace(warm, node_id="fuller", places=4)
    assert ids(choose_node(request, [fuller, other, warm]).place) == ["warm", "fuller", "other"]


def test_a_node_whose_last_places_are_blank_sandboxes_of_any_spec_is_not_full() -> None:
    full = replace(NODE, node_id="full", places=4)
    blank = replace(NODE, node_id="blank", places=4, blanks={"another": 1})
    above = replace(NODE, node_id="above", places=6, blanks={"another": 1})
    decision = choose_node(replace(REQUEST, spec_digest="spec"), [full, above, blank, replace(NODE, places=3)])
    assert ids(decision.place) == ["a", "blank", "above"], "a free place comes first"


def test_a_thread_goes_to_its_data_rather_than_to_a_blank_sandbox() -> None:
    home, blank = replace(NODE, node_id="home", data_id="h"), replace(NODE, node_id="blank", blanks={"spec": 2})
    assert ids(choose_node(replace(REQUEST, spec_digest="spec", home="h"), [home, blank]).place) == ["home"]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([], "no_node"),
        ([replace(NODE, alive=False)], "no_node"),
        ([replace(NODE, state=NodeState.CORDONED)], "no_node"),
        ([replace(NODE, state=NodeState.DRAINING)], "no_node"),
        ([replace(NODE, state=NodeState.GONE)], "no_node"),
        ([replace(NODE, backends=("local",))], "no_backend"),
        ([replace(NODE, labels={"zone": "b"})], "no_label"),
        ([replace(NODE, data_id="elsewhere", labels={"zone": "a"})], "home_away"),
        ([replace(NODE, places=4, labels={"zone": "a"})], "full"),
    ],
)
def test_the_reason_names_the_first_thing_that_is_missing(nodes: list[NodeView], reason: str) -> None:
    decision = choose_node(replace(REQUEST, labels={"zone": "a"}, home="d"), nodes)
    assert (decision.place, decision.reason) == ((), reason)
    assert ids(decision.fitting) == (["a"] if reason == "full" else [])


def test_full_nodes_that_would_do_are_told_apart_from_those_that_never_do() -> None:
    full, other = replace(NODE, node_id="full", places=4), replace(NODE, node_id="other", backends=("local",))
    decision = choose_node(REQUEST, [full, other, NODE])
    assert (ids(decision.place), ids(decision.fitting), decision.reason) == (["a"], ["a", "full"], "")


def test_a_thread_goes_where_its_data_lies_even_if_that_is_fuller() -> None:
    home, empty = replace(NODE, node_id="home", data_id="h", places=3), replace(NODE, node_id="empty")
    assert ids(choose_node(replace(REQUEST, home="h"), [home, empty]).place) == ["home"]


def test_a_thread_whose_home_is_full_waits_there_instead_of_losing_its_data() -> None:
    home, empty = replace(NODE, node_id="home", data_id="h", places=4), replace(NODE, node_id="empty")
    assert choose_node(replace(REQUEST, home="h"), [home, empty]).reason == "full"
    assert choose_node(replace(REQUEST, home="h", fresh=True), [home, empty]).reason == "full"


def test_only_a_fresh_request_goes_elsewhere_when_its_home_is_away() -> None:
    away, empty = replace(NODE, node_id="away", data_id="h", alive=False), replace(NODE, node_id="empty")
    assert choose_node(replace(REQUEST, home="h"), [away, empty]).reason == "home_away"
    assert ids(choose_node(replace(REQUEST, home="h", fresh=True), [away, empty]).place) == ["empty"]


def test_threads_are_shared_out_evenly_while_nodes_fill() -> None:
    nodes = {name: replace(NODE, node_id=name, replicas=100) for name in "abcd"}
    for number in range(200):
        chosen = choose_node(replace(REQUEST, digest=digest(number)), nodes.values()).place[0]
        nodes[chosen.node_id] = replace(chosen, places=chosen.places + 1)
    assert {node.places for node in nodes.values()} == {50}


def test_nodes_that_fill_fill_in_proportion_to_their_size() -> None:
    nodes = {name: replace(NODE, node_id=name, replicas=size) for name, size in (("s", 10), ("m", 20), ("l", 70))}
    for number in range(50):
        chosen = choose_node(replace(REQUEST, digest=digest(number)), nodes.values()).place[0]
        nodes[chosen.node_id] = replace(chosen, places=chosen.places + 1)
    assert {name: node.places for name, node in nodes.items()} == {"s": 5, "m": 10, "l": 35}


def test_a_burst_that_sees_the_same_nodes_is_spread_over_them() -> None:
    # Schedulers that decide at the same moment see the same counts.
    nodes = [replace(NODE, node_id=name) for name in "abcd"]
    chosen = Counter(choose_node(replace(REQUEST, digest=digest(n)), nodes).place[0].node_id for n in range(400))
    assert set(chosen) == set("abcd")
    assert min(chosen.values()) > 60, chosen


def test_one_thread_always_prefers_the_same_of_equal_nodes() -> None:
    nodes = [replace(NODE, node_id=name) for name in "abcd"]
    for number in range(20):
        request = replace(REQUEST, digest=digest(number))
        assert choose_node(request, nodes) == choose_node(request, reversed(nodes))


states = st.sampled_from(NodeState)
node_lists = st.lists(
    st.builds(
        NodeView,
        node_id=st.text("abcdefgh", min_size=1, max_size=3),
        incarnation=st.just("i"),
        state=states,
        alive=st.booleans(),
        replicas=st.integers(1, 5),
        places=st.integers(0, 7),
        warm=st.integers(0, 2),
        data_id=st.sampled_from(["d", "e"]),
        backends=st.sampled_from([("mock",), ("local",), ("local", "mock")]),
        labels=st.sampled_from([{}, {"zone": "a"}, {"zone": "b", "gpu": "1"}]),
        inflight=st.integers(0, 3),
        blanks=st.sampled_from([{}, {}, {"spec": 1}, {"spec": 2, "another": 1}, {"another": 1}]),
    ),
    max_size=8,
    unique_by=lambda node: node.node_id,
)
requests = st.builds(
    PlacementRequest,
    digest=st.integers(0, 50).map(digest),
    backend=st.sampled_from(["mock", "local", "docker"]),
    labels=st.sampled_from([{}, {"zone": "a"}]),
    home=st.sampled_from([None, "d", "e", "gone"]),
    fresh=st.booleans(),
    spec_digest=st.sampled_from(["", "spec"]),
)


@settings(deadline=None)
@given(request=requests, nodes=node_lists)
def test_no_node_is_ever_chosen_that_may_not_be(request: PlacementRequest, nodes: list[NodeView]) -> None:
    decision = choose_node(request, nodes)
    assert set(ids(decision.place)) <= set(ids(decision.fitting))
    for node in decision.fitting:
        assert node.alive
        assert node.state is NodeState.READY
        assert request.backend in node.backends
        assert request.labels.items() <= node.labels.items()
        assert request.home in (None, node.data_id) or (
            request.fresh and not any(n.data_id == request.home for n in decision.fitting)
        )
    assert all(node.places < node.replicas or node.blanks for node in decision.place)
    order = [
        (alike > 0, (node.replicas - node.places + alike) / node.replicas)
        for node in decision.place
        for alike in [node.blanks.get(request.spec_digest, 0)]
    ]
    assert order == sorted(order, reverse=True)
    assert bool(decision.reason) == (not decision.place)
    assert len(set(ids(decision.fitting))) == len(decision.fitting)


def test_threads_spread_over_nodes_that_have_blank_sandboxes_for_them() -> None:
    # One took a blank sandbox of the first node: its place count is the same, and somebody is there all the same.
    one = replace(NODE, node_id="one", places=2, blanks={"kind": 1})
    two = replace(NODE, node_id="two", places=2, blanks={"kind": 2})
    for number in range(20):
        request = PlacementRequest(digest(number), "mock", spec_digest="kind")
        assert ids(choose_node(request, [one, two]).place) == ["two", "one"]
