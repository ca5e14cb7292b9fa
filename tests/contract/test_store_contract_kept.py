"""What both stores promise about how long an operation is remembered."""

from __future__ import annotations

import pytest

from tests.contract.store_fixtures import World

OK = '{"ok":{"value":1}}'


def test_an_effects_op_id_is_protected_for_an_hour_past_its_deadline(world: World) -> None:
    world.announce()
    route = world.live()
    now = world.store.now_ms()
    for op_id, deadline_s in (("short", 60), ("long", 7200), ("past", -60)):
        world.record(route, op_id, deadline_ms=now + deadline_s * 1000)
        world.store.claim(op_id, route)
        assert world.store.finish(op_id, route, outcome="ok", reply=OK, keep_s=1)
        assert world.kept_s(op_id) == pytest.approx(max(deadline_s, 0) + 3600, abs=5)
        again = world.record(route, op_id)
        assert (again.status, again.state, again.reply) == ("duplicate", "done", OK)
    world.record(route, "unknown", deadline_ms=now + 60_000)
    world.store.claim("unknown", route)
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="dead")
    assert world.kept_s("unknown") == pytest.approx(3660, abs=5)


def test_a_big_reply_goes_before_the_record_that_protects_its_op_id(world: World) -> None:
    world.announce()
    route = world.live()
    world.listen()
    big = '{"ok":"' + "ü" * 2048 + '"}'
    world.record(route)
    world.store.claim("o1", route)
    assert world.store.finish("o1", route, outcome="ok", reply=big)
    again, view = world.record(route), world.store.op("o1")
    assert view is not None
    cancelled = world.store.cancel("o1")
    assert cancelled is not None
    assert again.reply == view.reply == cancelled.reply == big
    assert len(world.replies()) == 1
    world.expire_answer("o1")
    again, view = world.record(route), world.store.op("o1")
    assert view is not None
    assert (again.status, again.state, again.reply) == ("duplicate", "done", None)
    assert (view.state, view.outcome, view.reply) == ("done", "ok", None)
    assert world.store.claim("o1", route).status == "closed"
    assert world.pushed("queue") == ["message o1"]


def test_what_had_no_effect_is_soon_forgotten_whole(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route, effect=False)
    assert world.store.finish("o1", route, outcome="ok", reply="x" * 100_000, keep_s=60)
    assert world.kept_s("o1") == pytest.approx(60, abs=5)
    view = world.store.op("o1")
    assert view is not None
    assert view.reply == "x" * 100_000
    assert not [key for key in world.key_names() if "answer:" in key]


@pytest.mark.parametrize("deadline_ms", [10**15, 10**30, -(10**15)])
def test_an_absurd_deadline_is_taken_as_two_days(world: World, deadline_ms: int) -> None:
    world.announce()
    route = world.live(agent="")
    assert world.record(route, deadline_ms=deadline_ms).status == "recorded"
    assert world.kept_s("o1") <= 2 * 86400 + 3600
    view = world.store.op("o1")
    assert view is not None
    assert view.deadline_ms <= world.store.now_ms() + 2 * 86_400_000
    assert world.store.claim("o1", route).status == "claimed"
    assert world.store.finish("o1", route, outcome="ok", reply=OK)
    assert world.state(route) == "warm"
