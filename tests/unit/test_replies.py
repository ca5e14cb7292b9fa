"""The client's end of the reply stream: exactly one payload for each reply that is awaited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet import replies
from sandfleet.errors import StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.replies import Pending, ReplyReader
from sandfleet.store.base import NodeRecord, OpRecord, Reply, Route, Waiter
from sandfleet.store.memory import MemoryStore
from tests.services import wait_until

ALICE = Identity("alice")
SOON_S = 5.0


class World:
    """A store with one live sandbox, and a reader of the stream ``me``."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.store.announce(NodeRecord("n1", "i1", 4, "d", ("mock",)), lease_s=600)
        reserved = self.store.reserve(
            ALICE, SandboxSpec("mock"), node_id="n1", incarnation="i1", data_id="d", expires_s=60
        )
        assert reserved.route is not None
        self.route: Route = reserved.route
        assert self.store.created(self.route)
        self.ticks = 0
        self.reader = ReplyReader(self.store, "me", on_tick=self.tick)

    def tick(self) -> None:
        self.ticks += 1

    def record(self, op_id: str, *, reply_to: str = "me") -> None:
        until = self.store.now_ms() + 60_000
        op = OpRecord(op_id, "execute_command", self.route, ALICE.digest, until, until, reply_to, "bash: x")
        assert self.store.record(op, None).status == "recorded"

    def finish(self, op_id: str, reply: str = '{"ok":1}') -> None:
        self.store.claim(op_id, self.route)
        assert self.store.finish(op_id, self.route, outcome="ok", reply=reply)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # A reply that the stream does not bring is looked up in its record after this long.
    monkeypatch.setattr(replies, "_CHECK_AFTER_S", 0.05)
    world = World()
    read = world.store.read_replies
    # Never blocks long, so that the reader's rounds (and its end) come at once.
    monkeypatch.setattr(world.store, "read_replies", lambda client, cursor, block_s: read(client, cursor, block_s=0.02))
    yield world
    if world.reader._thread.is_alive():
        world.reader.close()


# --- one awaited reply -----------------------------------------------------------------------------------


def test_a_payload_that_came_before_anybody_waited_is_kept() -> None:
    pending = Pending("op")
    pending.deliver("payload")
    assert pending.wait(0) == "payload"


def test_only_the_first_payload_counts() -> None:
    pending = Pending("op")
    pending.deliver("first")
    pending.deliver("second")
    assert pending.wait(0) == "first"
    with pytest.raises(TimeoutError):
        pending.wait(0)


def test_waiting_ends_with_a_timeout_and_a_negative_wait_is_none() -> None:
    with pytest.raises(TimeoutError, match="op"):
        Pending("op").wait(-5)


def test_a_payload_is_forwarded_whether_it_came_before_or_comes_after() -> None:
    got: list[str | None] = []
    early, late = Pending("early"), Pending("late")
    early.deliver("a")
    early.forward(got.append)
    late.forward(got.append)
    late.deliver("b")
    late.deliver("c")
    assert got == ["a", "b"]


# --- the reader ------------------------------------------------------------------------------------------


def test_each_reply_reaches_the_one_who_awaits_it(world: World) -> None:
    world.reader.start()
    pending = {op_id: world.reader.expect(op_id) for op_id in ("a", "b", "c")}
    for op_id in pending:
        world.record(op_id)
    for op_id in ("c", "a", "b"):
        world.finish(op_id, f'"{op_id}"')
    assert [pending[op_id].wait(SOON_S) for op_id in "abc"] == ['"a"', '"b"', '"c"']


def test_many_threads_wait_at_once(world: World) -> None:
    world.reader.start()
    got: dict[str, str | None] = {}

    def one(op_id: str) -> None:
        pending = world.reader.expect(op_id)
        world.record(op_id)
        got[op_id] = pending.wait(SOON_S)

    threads = [threading.Thread(target=one, args=(f"op-{n}",)) for n in range(20)]
    for thread in threads:
        thread.start()
    for n in range(20):
        wait_until(lambda n=n: world.store.op(f"op-{n}"), SOON_S)
        world.finish(f"op-{n}", f'"op-{n}"')
    for thread in threads:
        thread.join(SOON_S)
    assert got == {f"op-{n}": f'"op-{n}"' for n in range(20)}


def test_two_who_await_the_same_operation_both_get_its_reply(world: World) -> None:
    # Two threads repeat one op_id: the store runs it once, and both callers wait for it.
    world.reader.start()
    first = world.reader.expect("op")
    world.record("op")
    second = world.reader.expect("op")
    world.finish("op", '"once"')
    assert second.wait(SOON_S) == '"once"'
    assert first.wait(1.0) == '"once"'


def test_a_reply_that_nobody_awaits_any_more_is_dropped(world: World) -> None:
    world.reader.start()
    forgotten, other = world.reader.expect("gone"), world.reader.expect("other")
    world.reader.forget("gone")
    for op_id in ("gone", "other"):
        world.record(op_id)
        world.finish(op_id)
    assert other.wait(SOON_S) == '{"ok":1}'
    with pytest.raises(TimeoutError):
        forgotten.wait(0)


def test_a_late_joiner_gets_the_reply_from_the_record(world: World) -> None:
    # The reply went out before this client awaited it: an op_id repeated after a crash.
    world.record("op", reply_to="")
    world.finish("op", '"from the record"')
    world.reader.start()
    assert world.reader.expect("op").wait(SOON_S) == '"from the record"'


def test_a_reply_to_another_client_is_found_in_the_record(world: World) -> None:
    world.record("op", reply_to="somebody-else")
    world.reader.start()
    pending = world.reader.expect("op", foreign=True)
    ticks = world.ticks
    wait_until(lambda: world.ticks > ticks, SOON_S)
    world.finish("op", '"theirs"')
    assert pending.wait(SOON_S) == '"theirs"'


def test_a_record_that_is_gone_is_answered_with_nobody_knows(world: World) -> None:
    world.reader.start()
    assert world.reader.expect("never-recorded").wait(SOON_S) is None


def test_an_acquire_has_no_record_and_is_never_looked_up(world: World) -> None:
    world.reader.start()
    pending = world.reader.expect("acquire", recorded=False)
    ticks = world.ticks
    wait_until(lambda: world.ticks > ticks, SOON_S)
    world.store.reply(Waiter("acquire", "me", "agent", 60.0), '"placed"')
    assert pending.wait(SOON_S) == '"placed"'


def test_an_operation_that_still_runs_is_awaited_however_often_it_is_looked_up(world: World) -> None:
    world.reader.start()
    world.record("op")
    world.store.claim("op", world.route)
    pending = world.reader.expect("op")
    ticks = world.ticks
    wait_until(lambda: world.ticks > ticks, SOON_S)
    with pytest.raises(TimeoutError):
        pending.wait(0)
    world.finish("op")
    assert pending.wait(SOON_S) == '{"ok":1}'


def test_the_reader_survives_a_store_that_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    away, asked = threading.Event(), threading.Event()
    read = world.store.read_replies

    def sometimes(*args: Any, **kwargs: Any) -> list[Reply]:
        if away.is_set():
            asked.set()
            raise StoreUnavailable("gone")
        return read(*args, **kwargs)

    monkeypatch.setattr(world.store, "read_replies", sometimes)
    world.reader.start()
    pending = world.reader.expect("op")
    away.set()
    assert asked.wait(SOON_S)
    world.record("op")
    world.finish("op", '"meanwhile"')
    away.clear()
    assert pending.wait(SOON_S) == '"meanwhile"'


def test_the_reader_survives_a_bug_in_what_it_calls(world: World) -> None:
    world.reader.start()
    broken, sound = world.reader.expect("broken"), world.reader.expect("sound")

    def raises(_payload: str | None) -> None:
        raise RuntimeError("a bug in a callback")

    broken.forward(raises)
    for op_id in ("broken", "sound"):
        world.record(op_id)
        world.finish(op_id)
    assert sound.wait(SOON_S) == '{"ok":1}'


def test_a_stream_that_was_made_anew_is_read_from_its_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock of another server may lie behind: its new ids are smaller than our cursor.
    monkeypatch.setattr(replies, "_STREAM_TTL_S", 0.01)
    world.reader.start()
    world.reader._cursor = "99999999999999-0"
    with world.store._lock:
        world.store._streams.drop("me")
    pending = world.reader.expect("op", recorded=False)
    wait_until(lambda: world.reader._cursor == "0", SOON_S)
    world.store.open_replies("me", ttl_s=60)
    world.store.reply(Waiter("op", "me", "agent", 60.0), '"new"')
    assert pending.wait(SOON_S) == '"new"'


def test_closing_gives_up_what_is_awaited_and_drops_the_stream(world: World) -> None:
    world.reader.start()
    pending = world.reader.expect("op", recorded=False)
    world.reader.close()
    assert pending.wait(0) is None
    assert not world.reader._thread.is_alive()
    assert not any("reply" in key for key in sorted(world.store.keys()))


def test_starting_without_a_store_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: Any, **_kwargs: Any) -> bool:
        raise StoreUnavailable("gone")

    reader = ReplyReader(world.store, "other", on_tick=lambda: None)
    monkeypatch.setattr(world.store, "open_replies", away)
    with pytest.raises(StoreUnavailable):
        reader.start()
