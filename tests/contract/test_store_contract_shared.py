"""What both stores promise about replies, blobs and locks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from sandfleet.errors import ByteBudgetExceeded, InvalidArgument, StoreUnavailable
from tests.contract.store_fixtures import MemoryWorld, RedisWorld, World
from tests.services import wait_until

MIB = 1024 * 1024


def test_a_stream_is_made_once_and_made_again_when_it_was_lost(world: World) -> None:
    assert world.store.open_replies("c1", ttl_s=60)
    assert not world.store.open_replies("c1", ttl_s=60)
    world.flush()
    assert world.store.open_replies("c1", ttl_s=60)


def test_replies_are_read_on_from_a_cursor(world: World) -> None:
    world.listen()
    for i in range(5):
        assert world.store.reply(world.waiter(f"a{i}"), f'{{"n":{i}}}')
    first = world.store.read_replies("c1", "0", block_s=0)
    assert [reply.op_id for reply in first] == [f"a{i}" for i in range(5)]
    rest = world.store.read_replies("c1", first[2].cursor, block_s=0)
    assert [reply.op_id for reply in rest] == ["a3", "a4"]
    assert world.store.read_replies("c1", rest[-1].cursor, block_s=0) == []


def test_replies_that_were_handled_are_dropped(world: World) -> None:
    world.listen()
    for i in range(5):
        world.store.reply(world.waiter(f"a{i}"), "{}")
    entries = world.store.read_replies("c1", "0", block_s=0)
    world.store.trim_replies("c1", "0")
    assert len(world.replies()) == 5
    world.store.trim_replies("c1", entries[2].cursor)
    assert [op_id for op_id, _ in world.replies()] == ["a3", "a4"]
    world.store.trim_replies("c1", entries[2].cursor)
    world.store.trim_replies("c1", entries[4].cursor)
    assert world.replies() == []
    assert not world.store.open_replies("c1", ttl_s=60), "an empty stream is still a client that listens"
    world.store.reply(world.waiter("a5"), "{}")
    assert [r.op_id for r in world.store.read_replies("c1", entries[4].cursor, block_s=0)] == ["a5"]
    world.store.trim_replies("nobody", entries[4].cursor)
    assert not [key for key in world.key_names() if "reply:nobody" in key]


def test_nobody_is_answered_who_is_gone(world: World) -> None:
    assert not world.store.reply(world.waiter(), "{}")
    world.listen()
    world.store.close_replies("c1")
    assert not world.store.reply(world.waiter(), "{}")
    assert not world.store.reply(world.waiter(client=""), "{}")
    assert not [key for key in world.key_names() if "reply:" in key]


def test_a_reader_wakes_for_the_first_reply(world: World) -> None:
    world.listen()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(world.store.read_replies("c1", "0", block_s=20)))
    reader.start()
    started = time.monotonic()
    world.store.reply(world.waiter(), "{}")
    reader.join(10)
    assert [reply.op_id for reply in found] == ["a1"]
    assert time.monotonic() - started < 5


def test_a_reader_waits_no_longer_than_it_said(world: World) -> None:
    world.listen()
    started = time.monotonic()
    assert world.store.read_replies("c1", "0", block_s=0.05) == []
    assert 0.04 < time.monotonic() - started < 3


def test_closing_the_store_wakes_its_reader_at_once(world: World) -> None:
    world.listen()
    ended: list[Any] = []

    def read() -> None:
        try:
            ended.append(world.store.read_replies("c1", "0", block_s=30))
        except StoreUnavailable:
            ended.append([])

    reader = threading.Thread(target=read)
    reader.start()
    started = time.monotonic()
    world.store.close()
    reader.join(10)
    assert ended == [[]]
    assert time.monotonic() - started < 1
    with pytest.raises(StoreUnavailable):
        world.store.read_replies("c1", "0", block_s=0)


def test_a_blob_comes_back_in_its_chunks(world: World) -> None:
    chunks = [bytes([i]) * 100 + b"\xff\x00\r\n" for i in range(5)]
    world.store.blob_begin("b", client="c1", size=600, ttl_s=60)
    for index, chunk in enumerate(chunks):
        world.store.blob_put("b", index, chunk)
    assert [world.store.blob_get("b", i) for i in range(6)] == [*chunks, None]
    world.store.blob_drop("b")
    assert world.store.blob_get("b", 0) is None
    world.store.blob_drop("b")
    world.store.blob_drop("unknown")
    assert not [key for key in world.key_names() if "blob" in key or "bytes" in key]


def test_a_chunk_needs_a_begun_blob(world: World) -> None:
    with pytest.raises(InvalidArgument):
        world.store.blob_put("never begun", 0, b"x")
    world.store.blob_begin("b", client="c1", size=1, ttl_s=60)
    world.store.blob_put("b", 0, memoryview(b"x"))
    world.expire_blob("b")
    with pytest.raises(InvalidArgument):
        world.store.blob_put("b", 1, b"x")
    world.store.blob_drop("b")
    assert not [key for key in world.key_names() if "blob:" in key]


def small_budget(world: World) -> World:
    options = {"blob_client_bytes": 100, "blob_fleet_bytes": 150}
    if isinstance(world, RedisWorld):
        return RedisWorld(world.url, **options)
    return MemoryWorld(**options)


def test_bytes_in_flight_are_bounded_per_client_and_for_the_fleet(world: World) -> None:
    small = small_budget(world)
    small.store.blob_begin("b1", client="c1", size=60, ttl_s=60)
    with pytest.raises(ByteBudgetExceeded) as refused:
        small.store.blob_begin("b2", client="c1", size=60, ttl_s=60)
    assert refused.value.facts["scope"] == "client"
    assert refused.value.retry_after_s is not None
    small.store.blob_begin("b2", client="c2", size=60, ttl_s=60)
    with pytest.raises(ByteBudgetExceeded) as refused:
        small.store.blob_begin("b3", client="c3", size=60, ttl_s=60)
    assert refused.value.facts["scope"] == "fleet"
    small.store.blob_drop("b1")
    small.store.blob_begin("b3", client="c3", size=60, ttl_s=60)
    small.close()


def test_a_blob_begun_twice_is_counted_once(world: World) -> None:
    small = small_budget(world)
    for _ in range(5):
        small.store.blob_begin("b", client="c1", size=80, ttl_s=60)
    small.close()


def test_an_expired_blob_gives_its_bytes_back(world: World) -> None:
    small = small_budget(world)
    small.store.blob_begin("b1", client="c1", size=100, ttl_s=60)
    small.store.blob_put("b1", 0, b"x")
    small.expire_blob("b1")
    assert small.store.blob_get("b1", 0) is None
    small.store.blob_begin("b2", client="c1", size=100, ttl_s=60)
    small.store.blob_drop("b1")
    with pytest.raises(ByteBudgetExceeded):
        small.store.blob_begin("b3", client="c1", size=1, ttl_s=60)
    small.close()


def test_a_lock_has_one_holder_who_may_extend_it(world: World) -> None:
    assert world.store.lock("create:x", "me", ttl_s=60)
    assert world.store.lock("create:x", "me", ttl_s=60)
    assert not world.store.lock("create:x", "you", ttl_s=60)
    world.store.unlock("create:x", "you")
    assert not world.store.lock("create:x", "you", ttl_s=60)
    world.store.unlock("create:x", "me")
    assert world.store.lock("create:x", "you", ttl_s=60)
    world.store.unlock("never", "me")


def test_what_has_a_short_life_ends_by_itself(world: World) -> None:
    world.announce("n1", "i1", lease_s=0.05)
    world.listen("lasting")
    world.store.open_replies("brief", ttl_s=0.05)
    world.store.lock("brief", "me", ttl_s=0.05)
    wait_until(lambda: not world.store.nodes()[0].alive, 5)
    wait_until(lambda: world.store.lock("brief", "you", ttl_s=60), 5)
    wait_until(lambda: world.store.open_replies("brief", ttl_s=60), 5)
    assert not world.store.open_replies("lasting", ttl_s=60)


def test_the_clock_is_in_unix_milliseconds(world: World) -> None:
    assert abs(world.store.now_ms() - time.time() * 1000) < 60_000
