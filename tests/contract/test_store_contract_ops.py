"""What both stores promise about operations: recorded once, begun once, answered once."""

from __future__ import annotations

import pytest

from sandfleet.errors import PayloadTooLarge
from sandfleet.model import NodeState
from sandfleet.store.base import Route, wants_errors_only
from tests.contract.store_fixtures import ALICE, BOB, World

OK = '{"ok":{"value":1}}'


def test_an_operation_is_recorded_and_published_together(world: World) -> None:
    world.announce()
    route = world.live()
    recorded = world.record(route)
    assert recorded.status == "recorded"
    assert abs(recorded.now_ms - world.store.now_ms()) < 5000
    assert world.pushed("queue") == ["message o1"]
    assert world.store.queue_length("queue") == 1
    view = world.store.op("o1")
    assert view is not None
    assert (view.kind, view.state, view.outcome, view.describe) == ("execute_command", "recorded", "", "bash: ls")
    assert (view.sandbox_id, view.node_id, view.incarnation) == (route.sandbox_id, "n1", "i1")
    assert (view.claimed_at_ms, view.finished_at_ms, view.reply, view.reply_to) == (None, None, None, "c1")
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.ops == 1


def test_a_message_that_is_not_pushed_here_is_left_to_the_caller(world: World) -> None:
    world.announce()
    assert world.store.record(world.op(world.live()), None).status == "recorded"
    assert world.store.queue_length("queue") == 0


def test_a_repeated_op_id_is_a_duplicate_and_not_published_again(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    again = world.record(route)
    assert (again.status, again.state, again.reply) == ("duplicate", "recorded", None)
    world.store.claim("o1", route)
    world.store.finish("o1", route, outcome="ok", reply=OK)
    done = world.record(route)
    assert (done.status, done.state, done.reply) == ("duplicate", "done", OK)
    assert world.pushed("queue") == ["message o1"]


def test_an_op_id_of_another_operation_is_a_conflict(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    other = world.live(BOB)
    world.record(route)
    assert world.record(route, kind="read_file").status == "conflict"
    assert world.record(other, identity=BOB).status == "conflict"


def test_a_stale_route_is_told_the_current_one(world: World) -> None:
    world.announce()
    route = world.live()
    moved = world.record(Route(route.sandbox_id, "n1", "i1", route.epoch - 1))
    assert (moved.status, moved.route) == ("moved", route)
    moved = world.record(Route(route.sandbox_id, "n9", "i1", route.epoch))
    assert (moved.status, moved.route) == ("moved", route)


def test_another_owners_sandbox_is_not_found(world: World) -> None:
    world.announce()
    route = world.live(ALICE)
    assert world.record(route, identity=BOB).status == "not_found"
    assert world.record(Route("0" * 8, "n1", "i1", 1)).status == "not_found"
    assert world.store.ops() == []


def test_each_state_says_why_it_does_not_serve(world: World) -> None:
    world.announce()
    route = world.reserved()
    assert world.record(route).status == "creating"
    world.store.created(route)
    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    assert world.record(route).status == "stopping"
    world.store.stopped(route)
    lost = world.live()
    world.store.lost(lost, reason="killed")
    assert world.record(lost).status == "lost"


def test_creations_and_removals_are_operations_too(world: World) -> None:
    world.announce()
    route = world.reserved()
    assert world.record(route, "create", expect="creating", kind="node.create").status == "recorded"
    assert world.store.claim("create", route).status == "claimed"
    assert world.store.created(route)
    assert world.state(route) == "warm", "its own creation does not keep it busy"
    assert world.store.finish("create", route, outcome="ok", reply=OK)
    assert world.record(route, "again", expect="creating", kind="node.create").status == "live"
    world.store.begin_stop(route.sandbox_id, owner=None, force=False, reason="idle")
    world.store.set_node_state("n1", NodeState.DRAINING)
    assert world.record(route, "stop", expect="stopping", kind="node.destroy").status == "recorded"
    assert world.store.claim("stop", route).status == "claimed"
    assert world.store.stopped(route)
    assert world.store.finish("stop", route, outcome="ok", reply=OK)


def test_nothing_is_recorded_for_a_dead_or_draining_node(world: World) -> None:
    world.announce()
    route = world.live()
    world.store.set_node_state("n1", NodeState.DRAINING)
    assert world.record(route).status == "draining"
    world.store.set_node_state("n1", NodeState.CORDONED)
    assert world.record(route).status == "recorded"
    world.lapse_lease()
    assert world.record(route, "o2").status == "node_down"
    world.announce("n1", "i2")
    assert world.record(route, "o2").status == "node_down"


def test_a_nodes_inflight_operations_are_bounded(world: World) -> None:
    world.announce()
    route = world.live()
    assert world.store.record(world.op(route, "o1"), None, max_inflight=1).status == "recorded"
    assert world.store.record(world.op(route, "o2"), None, max_inflight=1).status == "busy"
    world.store.finish("o1", route, outcome="ok", reply=OK)
    assert world.store.record(world.op(route, "o2"), None, max_inflight=1).status == "recorded"


def test_an_effect_is_begun_once(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    assert world.store.claim("o1", route).status == "claimed"
    assert world.store.claim("o1", route).status == "already"
    view = world.store.op("o1")
    assert view is not None
    assert view.state == "claimed"
    assert view.claimed_at_ms is not None
    world.store.finish("o1", route, outcome="ok", reply=OK)
    assert world.store.claim("o1", route).status == "closed"
    assert world.store.claim("never recorded", route).status == "gone"


def test_only_the_current_owner_begins_an_effect(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    for stale in (
        Route(route.sandbox_id, "n1", "i1", route.epoch + 1),
        Route(route.sandbox_id, "n1", "i2", route.epoch),
        Route(route.sandbox_id, "n2", "i1", route.epoch),
    ):
        assert world.store.claim("o1", stale).status == "stale"
    world.lapse_lease()
    assert world.store.claim("o1", route).status == "stale"
    world.announce()
    assert world.store.claim("o1", route).status == "claimed"


def test_no_effect_begins_in_a_sandbox_that_stops_or_is_gone(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route, "o1")
    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
    assert world.store.claim("o1", route).status == "stale"
    world.store.stopped(route)
    assert world.store.claim("o1", route).status == "stale"
    assert world.store.finish("o1", route, outcome="sandbox_stopping", reply=OK), "the node can still answer it"


def test_an_operation_that_waited_too_long_is_late_and_then_answered(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route, start_by_ms=world.store.now_ms() - 1)
    assert world.store.claim("o1", route).status == "late"
    assert world.store.finish("o1", route, outcome="queue_timeout", reply='{"error":{}}')
    assert world.replies() == [("o1", {"error": {}})]


def test_an_operation_is_answered_once(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route)
    world.store.claim("o1", route)
    assert world.store.finish("o1", route, outcome="ok", reply=OK)
    assert not world.store.finish("o1", route, outcome="ok", reply=OK)
    assert not world.store.finish("unknown", route, outcome="ok", reply=OK)
    assert world.replies() == [("o1", {"ok": {"value": 1}})]
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.outcome, view.reply) == ("done", "ok", OK)
    assert view.finished_at_ms is not None
    assert world.store.ops() == []
    assert world.store.nodes()[0].inflight == 0


def test_only_what_nobody_claimed_is_answered_when_that_is_asked(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route, "waits")
    world.record(route, "runs")
    world.store.claim("runs", route)
    assert not world.store.finish("runs", route, outcome="not_started", reply='{"error":{}}', only_recorded=True)
    assert world.store.finish("waits", route, outcome="not_started", reply='{"error":{}}', only_recorded=True)
    assert [op_id for op_id, _ in world.replies()] == ["waits"]
    view = world.store.op("runs")
    assert view is not None
    assert view.state == "claimed"
    assert world.store.finish("runs", route, outcome="ok", reply=OK)


def test_a_client_that_wants_errors_only_is_not_sent_successes(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen("!plain")
    for op_id in ("fine", "wrong", "cancelled", "died"):
        world.record(route, op_id, reply_to="!plain")
    world.store.finish("fine", route, outcome="ok", reply=OK)
    world.store.finish("wrong", route, outcome="path_not_found", reply='{"error":{"code":"path_not_found"}}')
    world.store.cancel("cancelled")
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert [op_id for op_id, _ in world.replies("!plain")] == ["wrong", "cancelled", "died"]
    view = world.store.op("fine")
    assert view is not None
    assert (view.state, view.reply) == ("done", OK)
    assert wants_errors_only("!plain")
    assert not wants_errors_only("c1")


def test_a_read_is_answered_without_a_claim(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route, effect=False)
    assert world.store.finish("o1", route, outcome="ok", reply=OK)


def test_another_incarnation_does_not_answer_a_claimed_operation(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    world.store.claim("o1", route)
    assert not world.store.finish("o1", Route(route.sandbox_id, "n1", "i2", route.epoch), outcome="ok", reply=OK)
    assert not world.store.finish("o1", Route(route.sandbox_id, "n2", "i1", route.epoch), outcome="ok", reply=OK)


def test_nobody_listening_does_not_keep_an_answer_from_being_kept(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route, reply_to="gone")
    assert world.store.finish("o1", route, outcome="ok", reply=OK)
    assert world.replies("gone") == []
    view = world.store.op("o1")
    assert view is not None
    assert view.reply == OK


def test_an_answer_above_half_a_megabyte_is_refused(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    with pytest.raises(PayloadTooLarge):
        world.store.finish("o1", route, outcome="ok", reply="x" * (512 * 1024 + 1))
    with pytest.raises(PayloadTooLarge):
        world.store.finish("o1", route, outcome="ok", reply="ü" * (256 * 1024 + 1))
    assert world.store.finish("o1", route, outcome="ok", reply="x" * 512 * 1024)


def test_an_unclaimed_operation_is_cancelled_and_its_client_told(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route)
    view = world.store.cancel("o1")
    assert view is not None
    assert (view.state, view.outcome) == ("closed", "cancelled")
    ((op_id, payload),) = world.replies()
    assert (op_id, payload["error"]["code"]) == ("o1", "cancelled")
    assert world.store.claim("o1", route).status == "closed"
    assert world.store.ops() == []
    again = world.store.cancel("o1")
    assert again is not None
    assert again.state == "closed"
    assert len(world.replies()) == 1


def test_cancelling_the_last_operation_leaves_a_warm_sandbox(world: World) -> None:
    world.announce()
    route = world.live(agent="")
    world.record(route)
    world.store.cancel("o1")
    assert world.state(route) == "warm"


def test_a_claimed_operation_is_left_to_its_node(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route)
    world.store.claim("o1", route)
    view = world.store.cancel("o1")
    assert view is not None
    assert (view.state, view.node_id) == ("claimed", "n1")
    assert world.replies() == []
    world.store.finish("o1", route, outcome="cancelled", reply=OK)
    done = world.store.cancel("o1")
    assert done is not None
    assert done.state == "done"
    assert world.store.cancel("unknown") is None


def test_inflight_operations_are_listed_oldest_first(world: World) -> None:
    world.announce()
    world.announce("n2", "j1")
    one = world.live(ALICE)
    two = world.live(BOB, node_id="n2")
    world.record(one, "z")
    world.record(one, "a")
    world.record(two, "m", BOB)
    assert [op.op_id for op in world.store.ops(node_id="n1")] == ["z", "a"]
    assert [op.op_id for op in world.store.ops(node_id="n1", limit=1)] == ["z"]
    assert [op.op_id for op in world.store.ops(node_id="n2")] == ["m"]
    assert {op.op_id for op in world.store.ops()} == {"z", "a", "m"}
    world.expire_op("z")
    assert [op.op_id for op in world.store.ops(node_id="n1")] == ["a"]
    assert world.store.op("z") is None


def test_text_passes_through_untouched(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    odd = '{"ok":{"text":"ünïcode \\u0000 \\" | \\\\ 💥","n":1795253500890428}}'
    world.record(route, describe="bash: echo 'a|b' · 💥")
    world.store.finish("o1", route, outcome="ok", reply=odd)
    view = world.store.op("o1")
    assert view is not None
    assert (view.describe, view.reply) == ("bash: echo 'a|b' · 💥", odd)
    assert world.replies()[0][1]["ok"]["n"] == 1795253500890428
