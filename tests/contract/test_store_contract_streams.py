"""What both stores promise about output streams and background jobs."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.model import SandboxSpec
from sandfleet.store.base import Output, Pushed, Route
from tests.contract.store_fixtures import ALICE, LONG_S, MemoryWorld, World

OK = '{"ok":{"value":1}}'
RUNS = '{"ok":{"job_id":"o1","pid":7}}'
MUCH = 1024 * 1024


def push(world: World, output: Output, *, keep_bytes: int = MUCH, anew: bool = False) -> Pushed:
    return world.store.push_output("o1", output, keep_bytes=keep_bytes, ttl_s=LONG_S, anew=anew)


def read(
    world: World, out_at: int = 0, err_at: int = 0, *, block_s: float = 0.0, only_end: bool = False
) -> list[Output]:
    return world.store.read_output("o1", out_at, err_at, block_s=block_s, reader="r1", only_end=only_end)


def job(world: World, *, client: str = "c1") -> Route:
    world.announce()
    route = world.live()
    world.listen()
    world.record(route, reply_to=client)
    assert world.store.claim("o1", route).status == "claimed"
    return route


# --- streams -------------------------------------------------------------------------------------------------


def test_what_is_pushed_is_read_from_any_position(world: World) -> None:
    first, second = Output(0, 0, b"abc", b"\xff"), Output(3, 1, b"", b"de")
    assert push(world, first) == Pushed("ok", 3, 1)
    assert push(world, second) == Pushed("ok", 3, 3)
    assert read(world) == [first, second]
    assert read(world, 3, 1) == [second]
    assert read(world, 3, 0) == [first, second], "an entry that was read half is given whole"
    assert read(world, 3, 3) == []


def test_what_is_pushed_twice_is_there_once(world: World) -> None:
    entry = Output(0, 0, b"abc")
    for _ in range(3):
        assert push(world, entry) == Pushed("ok", 3, 0)
    assert read(world) == [entry]


def test_an_empty_push_asks_how_far_the_stream_goes(world: World) -> None:
    assert push(world, Output(0, 0)) == Pushed("ok", 0, 0)
    push(world, Output(0, 0, b"abc", b"d"))
    assert push(world, Output(0, 0)) == Pushed("ok", 3, 1)
    assert read(world) == [Output(0, 0, b"abc", b"d")]


def test_what_does_not_begin_where_the_stream_ends_is_left_away(world: World) -> None:
    """Redis may have lost its last entries, which the sandbox still has."""
    push(world, Output(0, 0, b"abc", b"d"))
    for beyond in (Output(4, 1, b"x"), Output(3, 2, b"xx"), Output(2, 9, b"xxx")):
        assert push(world, beyond) == Pushed("ok", 3, 1)
    assert read(world) == [Output(0, 0, b"abc", b"d")]
    assert push(world, Output(4, 1, b"x"), anew=True) == Pushed("ok", 5, 1)


def test_what_is_missing_at_the_end_can_be_told(world: World) -> None:
    push(world, Output(0, 0, b"abc", b"d"))
    assert push(world, Output(5, 2), anew=True) == Pushed("ok", 5, 2)
    assert push(world, Output(5, 2), anew=True) == Pushed("ok", 5, 2)
    assert read(world, 3, 1) == [Output(5, 2)]


def test_the_output_of_a_call_is_not_kept_for_long(world: World) -> None:
    route = job(world)
    push(world, Output(0, 0, b"abc"))
    world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")
    assert 0 < world.stream_kept_s("o1") <= 60


def test_a_stream_that_was_lost_is_not_begun_in_its_middle_unawares(world: World) -> None:
    push(world, Output(0, 0, b"abc"))
    world.flush()
    assert push(world, Output(3, 0, b"def")) == Pushed("gone", 0, 0)
    assert read(world) == []
    assert push(world, Output(3, 0, b"def"), anew=True) == Pushed("ok", 6, 0)
    assert read(world) == [Output(3, 0, b"def")]


def test_a_stream_keeps_its_newest_bytes(world: World) -> None:
    for at in range(0, 100, 10):
        push(world, Output(at, 0, b"0123456789"), keep_bytes=25)
    kept = read(world)
    assert kept[-1].out_at == 90
    assert 25 <= sum(len(entry.out) for entry in kept) <= 45


def test_nothing_comes_after_the_end(world: World) -> None:
    route = job(world)
    push(world, Output(0, 0, b"abc", b"d"))
    assert read(world, only_end=True) == []
    assert world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")
    assert push(world, Output(3, 1, b"late")) == Pushed("ended", 3, 1)
    assert read(world) == [Output(0, 0, b"abc", b"d"), Output(3, 1, end="ok")]
    assert read(world, 3, 1) == [Output(3, 1, end="ok")]
    assert read(world, only_end=True) == [Output(3, 1, end="ok")]


def test_a_silent_stream_ends_too(world: World) -> None:
    route = job(world)
    world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")
    assert read(world) == [Output(0, 0, end="ok")]


def test_a_stream_ends_though_the_store_lost_the_operation(world: World) -> None:
    route = job(world)
    world.flush()
    push(world, Output(3, 0, b"abc"), anew=True)
    assert not world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")
    assert not world.store.finish("o1", route, outcome="late", reply=OK, stream="o1")
    assert read(world) == [Output(3, 0, b"abc"), Output(6, 0, end="ok")]


def test_a_reader_that_waits_gets_what_comes(world: World) -> None:
    found: list[list[Output]] = []
    thread = threading.Thread(target=lambda: found.append(read(world, block_s=30)))
    thread.start()
    push(world, Output(0, 0, b"abc"))
    thread.join(30)
    assert found == [[Output(0, 0, b"abc")]]


def test_a_reader_that_waits_is_woken_with_nothing(world: World) -> None:
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        while not done.is_set():
            read(world, block_s=30)

    done = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    done.set()
    while thread.is_alive():
        world.store.drop_reader("r1")
        thread.join(0.05)


# --- jobs ------------------------------------------------------------------------------------------------------


def test_a_job_that_started_is_told_and_keeps_its_sandbox(world: World) -> None:
    route = job(world)
    assert world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)
    assert world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S), "a repeated call is harmless"
    assert world.replies() == [("o1", json.loads(RUNS))]
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.job, view.reply_to, view.reply) == ("claimed", True, "", RUNS)
    assert world.record(route).reply == RUNS, "who repeats the call is told that it runs"
    world.store.release(route.sandbox_id, ALICE.digest, "agent-1")
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert (info.state, info.ops) == ("live", 1)
    assert world.kept_s("o1") > LONG_S + 80_000
    assert [view.op_id for view in world.store.ops()] == ["o1"]


def test_a_job_that_the_store_forgot_is_there_again(world: World) -> None:
    route = job(world)
    again = {"reply": RUNS, "describe": "bash: make", "lasts_s": 60.0}
    assert not world.store.job_again("o1", route, **again), "it has a record"
    world.flush()
    assert not world.store.job_again("o1", route, **again), "nobody knows its sandbox"
    world.announce()
    assert world.store.adopt(ALICE, SandboxSpec("mock"), route, data_id="d1", age_s=1.0)
    assert world.store.job_again("o1", route, **again)
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.job, view.describe, view.owner) == ("claimed", True, "bash: make", ALICE.digest)
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert (info.state, info.ops) == ("live", 1)
    assert [view.op_id for view in world.store.ops(node_id="n1")] == ["o1"]
    assert not world.store.started("o1", replace(route, incarnation="i9"), reply=RUNS, lasts_s=60)
    assert world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")


def test_the_end_of_a_job_is_kept_and_sent_to_nobody(world: World) -> None:
    route = job(world)
    world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)
    big = json.dumps({"ok": {"stdout": "x" * 10_000}})
    assert world.store.finish("o1", route, outcome="ok", reply=big, keep_s=80_000, stream="o1")
    assert len(world.replies()) == 1
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.outcome, view.reply) == ("done", "ok", big)
    info = world.store.sandbox(route.sandbox_id)
    assert info is not None
    assert info.ops == 0


def test_the_output_of_a_job_is_kept_for_whoever_comes_back(world: World) -> None:
    route = job(world)
    world.store.started("o1", route, reply=RUNS, lasts_s=60)
    push(world, Output(0, 0, b"abc"))
    world.store.finish("o1", route, outcome="ok", reply=OK, stream="o1")
    assert 3000 < world.stream_kept_s("o1") <= 3600


def test_a_plain_caller_is_not_told_of_a_start(world: World) -> None:
    route = job(world, client="!c1")
    assert world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)
    assert world.replies() == []


def test_only_who_claimed_a_job_starts_it(world: World) -> None:
    world.announce()
    route = world.live()
    world.record(route)
    assert not world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)
    world.store.claim("o1", route)
    other = Route(route.sandbox_id, route.node_id, "i0", route.epoch)
    assert not world.store.started("o1", other, reply=RUNS, lasts_s=LONG_S)
    assert not world.store.started("o9", route, reply=RUNS, lasts_s=LONG_S)
    world.store.finish("o1", route, outcome="ok", reply=OK)
    assert not world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)


def test_the_stream_of_a_job_ends_with_its_node(world: World) -> None:
    route = job(world)
    world.store.started("o1", route, reply=RUNS, lasts_s=LONG_S)
    push(world, Output(0, 0, b"abc"))
    world.lapse_lease()
    world.store.close_incarnation("n1", None, reason="it died")
    assert read(world) == [Output(0, 0, b"abc"), Output(3, 0, end="outcome_unknown")]
    view = world.store.op("o1")
    assert view is not None
    assert (view.state, view.outcome) == ("closed", "outcome_unknown")


# --- both stores alike -------------------------------------------------------------------------------------------

_PIECES = st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6), st.booleans()), max_size=12)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=_PIECES, keep=st.integers(0, 40))
def test_both_stores_keep_the_same_stream(
    redis_world: World, pieces: list[tuple[bytes, bytes, bool]], keep: int
) -> None:
    redis_world.flush()
    worlds = [MemoryWorld(), redis_world]
    answers: list[list[object]] = [[], []]
    out_at = err_at = 0
    for out, err, again in pieces:
        for world, told in zip(worlds, answers, strict=True):
            for _ in range(1 + again):
                told.append(push(world, Output(out_at, err_at, out, err), keep_bytes=keep))
            told.append(read(world))
        out_at, err_at = out_at + len(out), err_at + len(err)
    assert answers[0] == answers[1]
