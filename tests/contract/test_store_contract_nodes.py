"""What both stores promise about nodes, leases, and answering for the dead."""

from __future__ import annotations

import pytest

from sandfleet.errors import LeaseLost, NodeIdInUse
from sandfleet.model import NodeState
from sandfleet.store.base import Push
from tests.contract.store_fixtures import ALICE, BOB, World


def test_an_announced_node_is_seen_with_everything_it_said(world: World) -> None:
    world.announce(replicas=3)
    assert world.store.renew("n1", "i1", lease_s=60, load={"cpu": 0.5}).known
    (node,) = world.store.nodes()
    assert (node.node_id, node.incarnation, node.state, node.alive) == ("n1", "i1", NodeState.READY, True)
    assert (node.replicas, node.places, node.warm, node.inflight, node.free) == (3, 0, 0, 0, 3)
    assert (node.data_id, node.backends, node.labels) == ("data-1", ("mock",), {"zone": "a"})
    assert (node.host, node.pid, node.version, node.load) == ("host", 7, "0.1", {"cpu": 0.5})
    assert abs(node.started_at * 1000 - world.store.now_ms()) < 5000


def test_nodes_are_sorted_by_id(world: World) -> None:
    for node_id in ("n2", "n10", "n1"):
        world.announce(node_id)
    assert [n.node_id for n in world.store.nodes()] == ["n1", "n10", "n2"]


def test_a_second_live_holder_of_a_node_id_is_refused(world: World) -> None:
    world.announce("n1", "i1")
    with pytest.raises(NodeIdInUse):
        world.announce("n1", "i2")
    assert world.store.nodes()[0].incarnation == "i1"


def test_a_new_incarnation_takes_over_a_lapsed_lease_and_is_ready(world: World) -> None:
    world.announce("n1", "i1")
    world.store.set_node_state("n1", NodeState.CORDONED)
    world.lapse_lease()
    world.announce("n1", "i2")
    (node,) = world.store.nodes()
    assert (node.incarnation, node.state, node.alive) == ("i2", NodeState.READY, True)


def test_announcing_again_keeps_a_cordon(world: World) -> None:
    world.announce()
    assert world.store.set_node_state("n1", NodeState.CORDONED)
    world.announce()
    assert world.store.nodes()[0].state == NodeState.CORDONED


def test_a_lapsed_lease_that_nobody_took_is_taken_again(world: World) -> None:
    world.announce()
    world.lapse_lease()
    assert not world.store.nodes()[0].alive
    assert world.store.renew("n1", "i1", lease_s=60).known
    assert world.store.nodes()[0].alive


def test_a_renewal_tells_the_state_an_operator_set(world: World) -> None:
    world.announce()
    world.store.set_node_state("n1", NodeState.DRAINING)
    renewal = world.store.renew("n1", "i1", lease_s=60)
    assert (renewal.state, renewal.known) == (NodeState.DRAINING, True)
    assert abs(renewal.now_ms - world.store.now_ms()) < 5000


def test_a_renewal_after_the_store_lost_its_data_asks_for_an_announcement(world: World) -> None:
    world.announce()
    world.flush()
    assert not world.store.renew("n1", "i1", lease_s=60).known
    assert world.store.nodes() == []


def test_an_overtaken_incarnation_loses_its_lease_even_when_the_new_one_died_too(world: World) -> None:
    world.announce("n1", "i1")
    world.lapse_lease()
    world.announce("n1", "i2")
    with pytest.raises(LeaseLost):
        world.store.renew("n1", "i1", lease_s=60)
    world.lapse_lease()
    with pytest.raises(LeaseLost):
        world.store.renew("n1", "i1", lease_s=60)


def test_no_state_is_set_on_an_unknown_node(world: World) -> None:
    assert not world.store.set_node_state("nobody", NodeState.CORDONED)


def test_an_old_process_does_not_retire_its_successor(world: World) -> None:
    world.announce("n1", "i1")
    world.lapse_lease()
    world.announce("n1", "i2")
    assert not world.store.set_node_state("n1", NodeState.GONE, incarnation="i1")
    assert not world.store.set_node_state("nobody", NodeState.GONE, incarnation="i1")
    (node,) = world.store.nodes()
    assert (node.incarnation, node.state, node.alive) == ("i2", NodeState.READY, True)
    assert world.store.renew("n1", "i2", lease_s=60).known
    assert world.store.set_node_state("n1", NodeState.GONE, incarnation="i2")
    assert world.store.nodes()[0].state == NodeState.GONE


def test_a_retired_incarnation_can_neither_renew_nor_announce(world: World) -> None:
    world.announce()
    world.lapse_lease()
    assert not world.store.close_incarnation("n1", None, reason="dead").more
    assert world.store.nodes()[0].state == NodeState.GONE
    assert not world.store.set_node_state("n1", NodeState.READY)
    with pytest.raises(LeaseLost):
        world.store.renew("n1", "i1", lease_s=60)
    with pytest.raises(LeaseLost):
        world.announce("n1", "i1")
    world.announce("n1", "i2")
    assert world.store.nodes()[0].state == NodeState.READY


def test_a_node_that_says_it_is_gone_can_be_closed_at_once_and_comes_back_as_another(world: World) -> None:
    world.announce()
    route = world.live()
    assert world.store.set_node_state("n1", NodeState.GONE)
    assert not world.store.nodes()[0].alive
    assert world.store.close_incarnation("n1", None, reason="left").sandboxes == (route.sandbox_id,)
    with pytest.raises(LeaseLost):
        world.store.renew("n1", "i1", lease_s=60)
    with pytest.raises(LeaseLost):
        world.announce("n1", "i1")
    world.announce("n1", "i2")


def test_a_living_node_is_not_closed(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    closed = world.store.close_incarnation("n1", None, reason="dead")
    assert (closed.not_started, closed.unknown, closed.sandboxes, closed.more) == (0, 0, (), False)
    assert world.state(route) == "live"
    assert world.store.nodes()[0].state == NodeState.READY


def test_the_dead_are_answered_for_by_what_had_happened(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route, "waiting")
    world.record(route, "begun")
    world.record(route, "looked", effect=False)
    assert world.store.claim("begun", route).status == "claimed"
    assert world.store.claim("looked", route).status == "claimed"
    world.lapse_lease()
    closed = world.store.close_incarnation("n1", None, reason="its lease lapsed")
    assert (closed.not_started, closed.unknown, closed.sandboxes) == (2, 1, (route.sandbox_id,))
    answers = {op_id: payload["error"] for op_id, payload in world.replies()}
    assert {op_id: error["code"] for op_id, error in answers.items()} == {
        "waiting": "not_started",
        "begun": "outcome_unknown",
        "looked": "not_started",
    }
    assert "its lease lapsed" in answers["begun"]["message"]
    assert answers["begun"]["facts"]["op_id"] == "begun"
    assert world.store.claim("waiting", route).status == "closed"
    assert not world.store.finish("begun", route, outcome="ok", reply='{"ok":{}}')
    assert len(world.replies()) == 3
    view = world.store.op("begun")
    assert view is not None
    assert (view.state, view.outcome) == ("closed", "outcome_unknown")


def test_closing_answers_in_recorded_order_page_by_page(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    names = [f"op-{i}" for i in range(10)]
    for name in names:
        world.record(route, name)
    world.lapse_lease()
    pages = []
    while True:
        closed = world.store.close_incarnation("n1", None, reason="dead", limit=4)
        pages.append(closed.not_started)
        if not closed.more:
            break
    assert pages == [4, 4, 2]
    assert [op_id for op_id, _ in world.replies()] == names


def test_a_close_out_that_was_interrupted_can_be_seen_and_goes_on(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    for i in range(3):
        world.record(route, f"op-{i}")
    world.lapse_lease()
    assert world.store.close_incarnation("n1", None, reason="dead", limit=2).more
    (node,) = world.store.nodes()
    assert (node.state, node.inflight) == (NodeState.GONE, 1)
    assert not world.store.close_incarnation("n1", None, reason="dead", limit=2).more
    (node,) = world.store.nodes()
    assert (node.inflight, node.places) == (0, 0)
    assert len(world.replies()) == 3


def test_only_a_dead_node_s_queue_is_dropped(world: World) -> None:
    world.announce("n1", "i1")
    route = world.live()
    for i in range(3):
        world.store.record(world.op(route, f"op-{i}"), Push("sandfleet.node.n1", f"op-{i}"))
    world.store.close_incarnation("n1", None, reason="alive after all")
    world.lapse_lease()
    world.announce("n1", "i2")
    world.store.close_incarnation("n1", "i2", reason="restarted")
    world.store.close_incarnation("n1", "i1", reason="confused")
    assert world.store.queue_length("sandfleet.node.n1") == 3
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert world.store.queue_length("sandfleet.node.n1") == 0


def test_a_returning_node_closes_only_what_earlier_incarnations_left(world: World) -> None:
    world.announce("n1", "i1")
    old = world.live(ALICE)
    world.record(old, "old")
    world.lapse_lease()
    world.announce("n1", "i2")
    new = world.live(BOB)
    world.listen()
    world.record(new, "new", BOB)
    closed = world.store.close_incarnation("n1", "i2", reason="restarted")
    assert (closed.not_started, closed.unknown, closed.sandboxes) == (1, 0, (old.sandbox_id,))
    assert [op_id for op_id, _ in world.replies()] == ["old"]
    assert (world.state(old), world.state(new)) == ("lost", "live")
    assert world.store.claim("new", new).status == "claimed"
    assert world.places() == 1


def test_an_overtaken_incarnation_cannot_close_its_successor(world: World) -> None:
    world.announce("n1", "i1")
    world.lapse_lease()
    world.announce("n1", "i2")
    route = world.live()
    world.record(route)
    closed = world.store.close_incarnation("n1", "i1", reason="confused")
    assert (closed.not_started, closed.sandboxes) == (0, ())
    assert world.state(route) == "live"


def test_those_who_wait_for_a_creation_on_a_dead_node_are_told(world: World) -> None:
    world.announce()
    world.listen()
    world.acquire(op_id="a1")
    route = world.reserved()
    world.lapse_lease()
    closed = world.store.close_incarnation("n1", None, reason="dead")
    assert closed.sandboxes == (route.sandbox_id,)
    ((op_id, payload),) = world.replies()
    assert (op_id, payload["error"]["code"]) == ("a1", "not_started")


def test_whoever_waited_for_a_stop_on_a_dead_node_is_requested_again(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.store.begin_stop(route.sandbox_id, owner=None, force=False, reason="idle")
    assert world.acquire().status == "creating"
    assert world.pushed("scheduler") == []
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert world.pushed("scheduler") == ["acquire alice"]


def test_a_lost_sandbox_gives_a_clear_answer_and_keeps_its_epoch(world: World) -> None:
    world.announce()
    route = world.live()
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert world.record(route).status == "lost"
    assert world.store.route(route.sandbox_id) is None
    world.announce("n1", "i2")
    again = world.reserved(incarnation="i2")
    assert again.sandbox_id == route.sandbox_id
    assert again.epoch > route.epoch


def test_a_draining_node_answers_what_it_has_not_begun_in_order(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    for i in range(5):
        world.record(route, f"op-{i}")
    world.store.claim("op-0", route)
    first = world.store.drain_inflight("n1", "i1", limit=3)
    second = world.store.drain_inflight("n1", "i1", limit=3)
    assert (first.not_started, first.more, second.not_started, second.more) == (3, True, 1, False)
    assert [(op_id, p["error"]["code"]) for op_id, p in world.replies()] == [
        (f"op-{i}", "not_started") for i in range(1, 5)
    ]
    assert world.store.finish("op-0", route, outcome="ok", reply='{"ok":{}}')


def test_a_drain_touches_no_other_incarnation(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    assert world.store.drain_inflight("n1", "i0").not_started == 0
    assert world.store.claim("o1", route).status == "claimed"


def test_closing_tells_the_story(world: World) -> None:
    world.announce()
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert [entry["event"] for entry in world.store.story("n1")] == ["announced", "closed"]
