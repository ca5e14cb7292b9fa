"""What only a shared server can show: races, forks, restarts, a full Redis, and that every key ends."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import redis

from sandfleet.errors import ByteBudgetExceeded, ConfigError, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.store.redis import RedisStore
from sandfleet.store.scripts import load, names
from tests.contract.store_fixtures import ALICE, BOB, ERROR, RedisWorld, together
from tests.services import RedisServer


def test_twenty_reservations_of_one_thread_take_one_place(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce(replicas=20)
    answers = Counter(r.status for r in together(20, lambda _: world.reserve()))
    assert answers == {"reserved": 1, "creating": 19}
    assert world.places() == 1


def test_reservations_of_many_threads_never_exceed_the_places(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce(replicas=5)
    answers = Counter(r.status for r in together(20, lambda i: world.reserve(Identity(f"t{i}"))))
    assert answers == {"reserved": 5, "full": 15}
    assert world.places() == 5


def test_a_blank_that_many_threads_want_at_once_is_given_to_one(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce(replicas=8)
    slots = {f"s{i}" for i in range(8)}
    for i, slot in enumerate(sorted(slots)):
        world.blank(slot, f"d{i % 2}")
    told = together(20, lambda i: world.reserve(Identity(f"t{i}"), spec_digest=f"d{i % 3}"))
    assert Counter(reserved.status for reserved in told) == {"reserved": 8, "full": 12}
    assert Counter(reserved.blank for reserved in told if reserved.route) == dict.fromkeys(slots, 1)
    assert (world.places(), world.store.blanks("n1")) == (8, {})


def test_two_hundred_threads_record_and_nothing_is_lost(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live()
    answers = together(200, lambda i: world.record(route, f"op-{i}").status)
    assert answers == ["recorded"] * 200
    assert world.store.queue_length("queue") == 200
    assert len(world.store.ops(limit=1000)) == 200


def test_eight_deliveries_of_one_operation_begin_it_once(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live()
    world.record(route)
    answers = Counter(together(8, lambda _: world.store.claim("o1", route).status))
    assert answers == {"claimed": 1, "already": 7}


def test_an_operation_finished_and_closed_at_once_is_answered_once(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live()
    world.listen()
    for i in range(20):
        world.record(route, f"op-{i}")
        world.store.claim(f"op-{i}", route)
    world.lapse_lease()

    def answer(i: int) -> None:
        if i == 0:
            world.store.close_incarnation("n1", None, reason="dead")
        else:
            world.store.finish(f"op-{i - 1}", route, outcome="ok", reply="{}")

    together(21, answer)
    assert Counter(op_id for op_id, _ in world.replies()) == {f"op-{i}": 1 for i in range(20)}


def test_every_script_parses_and_is_described() -> None:
    for name in names():
        script = load(name)
        assert len(script.sha) == 40
        head = (Path(load.__wrapped__.__globals__["__file__"]).parent / f"{name}.lua").read_text()
        assert head.startswith("-- "), name
        assert "-- KEYS  1 prefix" in head, name
        assert "-- Returns" in head, name


def test_a_script_flush_is_healed_without_anybody_noticing(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live()
    world.raw.script_flush()
    assert world.record(route).status == "recorded"
    assert world.store.queue_length("queue") == 1
    world.raw.script_flush()
    assert world.store.claim("o1", route).status == "claimed"


def test_a_restarted_server_is_found_again(private_redis: RedisServer) -> None:
    world = RedisWorld(private_redis.url)
    world.announce()
    private_redis.stop()
    with pytest.raises(StoreUnavailable) as down:
        world.store.renew("n1", "i1", lease_s=60)
    assert down.value.retry_after_s is not None
    assert down.value.facts["reason"] in ("refused", "connection")
    private_redis.start()
    assert not world.store.renew("n1", "i1", lease_s=60).known
    world.announce()
    assert world.store.nodes()[0].alive
    world.close()


def test_killed_connections_are_replaced(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    together(5, lambda _: world.store.now_ms())
    for client in world.raw.client_list():
        if client["name"] == "sandfleet":
            world.raw.client_kill_filter(_id=client["id"])
    time.sleep(0.01)  # a connection used a moment ago is trusted without a look
    for _ in range(5):
        assert world.store.nodes()[0].alive


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_connections_of_its_own(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    route = world.live()
    world.listen("c1")
    world.store.read_replies("c1", "0", block_s=0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            world.store.open_replies("child", ttl_s=60)
            for i in range(200):
                assert world.record(route, f"child-{i}").status == "recorded"
                world.store.reply(world.waiter(client="child"), f"{i}")
            assert len(world.store.read_replies("child", "0", block_s=1)) == 200
            assert world.store.read_replies("c1", "0", block_s=0.01) == []
            status = 0
        finally:
            os._exit(status)
    for i in range(200):
        assert world.record(route, f"parent-{i}").status == "recorded"
    assert world.store.read_replies("c1", "0", block_s=0.01) == []
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(world.store.ops(limit=1000)) == 400


def test_a_full_redis_takes_nothing_new_but_lets_the_old_end(full: RedisWorld) -> None:
    route = full.live()
    full.listen()
    full.blank("s1")
    assert full.begin_blank("s2")
    full.record(route)
    full.record(route, "big")
    full.raw.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable) as refused:
        full.record(route, "o2")
    assert refused.value.facts["reason"] == "full"
    assert refused.value.retry_after_s
    assert full.store.op("o2") is None
    with pytest.raises(StoreUnavailable):
        full.begin_blank("s3")
    with pytest.raises(StoreUnavailable):
        full.store.blank_ready("n1", "i1", "s2", spec_digest="d1")
    with pytest.raises(StoreUnavailable):
        full.reserve(Identity("bob"), spec_digest="d1")
    assert full.store.blanks("n1") == {"s1": "d1"}
    assert (full.places(), full.store.nodes()[0].starting) == (3, 1)
    assert full.store.blank_gone("n1", "i1", "s1")
    assert full.raw.zrange("test:inflight:n1", 0, -1) == ["o1", "big"]
    assert full.store.renew_agents("agent-1", {route.sandbox_id: ALICE.digest}, ttl_s=60) == []
    assert full.store.claim("o1", route).status == "claimed"
    assert full.store.finish("o1", route, outcome="ok", reply='{"ok":{}}')
    assert full.store.finish("big", route, outcome="ok", reply='{"ok":"' + "x" * 9000 + '"}')
    assert [op_id for op_id, _ in full.replies()] == ["o1", "big"]
    full.store.trim_replies("c1", full.store.read_replies("c1", "0", block_s=0)[0].cursor)
    assert [op_id for op_id, _ in full.replies()] == ["big"]
    assert full.store.release(route.sandbox_id, ALICE.digest, "agent-1")
    assert full.store.renew("n1", "i1", lease_s=60).known
    assert full.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="x").status == "recorded"
    assert full.store.stopped(route)


def test_a_nearly_full_redis_refuses_bytes_first(full: RedisWorld) -> None:
    used = int(full.raw.info("memory")["used_memory"])
    full.raw.config_set("maxmemory", int(used / 0.8))
    with pytest.raises(ByteBudgetExceeded) as refused:
        full.store.blob_begin("b", client="c", size=1, ttl_s=60)
    assert refused.value.facts["scope"] == "redis"
    assert full.record(full.live()).status == "recorded"


def test_a_chunk_that_redis_does_not_take_says_so_and_what_follows_gets_its_own_answer(full: RedisWorld) -> None:
    chunk = bytes(range(256)) * 4096
    full.store.blob_begin("b", client="c", size=2 * len(chunk), ttl_s=60)
    full.raw.script_flush()
    full.store.blob_put("b", 0, chunk)
    full.raw.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable) as refused:
        full.store.blob_put("b", 1, chunk)
    assert refused.value.facts["reason"] == "full"
    full.raw.config_set("maxmemory", 0)
    assert [full.store.blob_get("b", index) for index in range(2)] == [chunk, None]
    full.store.blob_put("b", 1, chunk)
    assert full.store.blob_get("b", 1) == chunk
    assert 30_000 < full.raw.pttl(full.store._keys.chunk("b", 1)) <= 60_000


def test_a_wrong_password_says_so(private_redis: RedisServer) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "secret")
    store = RedisStore(private_redis.url)
    with pytest.raises(StoreUnavailable) as refused:
        store.now_ms()
    assert refused.value.facts["reason"] == "auth"
    store = RedisStore(private_redis.url.replace("redis://", "redis://:wrong@"))
    with pytest.raises(StoreUnavailable) as refused:
        store.now_ms()
    assert "wrong" not in str(refused.value).replace("WRONGPASS", "")
    store = RedisStore(private_redis.url.replace("redis://", "redis://:secret@"))
    assert store.now_ms() > 0
    store.close()


def test_a_read_only_replica_says_so(redis_world: RedisWorld, private_redis: RedisServer) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.replicaof("127.0.0.1", "1")
        client.config_set("replica-serve-stale-data", "yes")
    world = RedisWorld(private_redis.url)
    with pytest.raises(StoreUnavailable) as refused:
        world.announce()
    assert refused.value.facts["reason"] == "read_only"
    world.close()


def test_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, redis_world: RedisWorld) -> None:
    monkeypatch.setattr("sandfleet.store.link._parse_info", lambda text: {"cluster_enabled": "1"})
    store = RedisStore(redis_world.url)
    with pytest.raises(ConfigError, match="Cluster"):
        store.now_ms()
    store.close()


def test_every_key_ends_by_itself_after_a_full_life(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    world.announce("n2", "j1")
    world.listen()
    world.acquire()
    world.store.create_failed(world.reserved(), ERROR)
    world.acquire()
    route = world.reserved()
    world.store.created(route)
    world.record(route, "done")
    world.store.claim("done", route)
    world.store.finish("done", route, outcome="ok", reply="x" * 5000)
    world.record(route, "left")
    world.acquire(Identity("waits"))
    world.store.blob_begin("b", client="c1", size=10, ttl_s=60)
    world.store.blob_put("b", 0, b"x")
    world.store.lock("l", "me", ttl_s=60)
    world.store.release(route.sandbox_id, ALICE.digest, "agent-1")
    world.live(Identity("warm"), agent="")
    world.blank("s1", node_id="n2", incarnation="j1")
    world.announce("n3", "k1")
    assert world.begin_blank("s2", "n3", "k1")
    for _ in range(2):
        world.store.create_failed(world.reserved(Identity("fails")), {**ERROR, "code": "start_failed"})
    world.reserved(Identity("of", "user"))
    stopping = world.live(Identity("stops"), agent="")
    world.store.begin_stop(stopping.sandbox_id, owner=None, force=False, reason="x")
    world.park(Identity("parked", "u"))
    assert world.acquire(Identity("parked", "u"), op_id="again").status == "parked"
    assert_all_end(world)
    kinds = {re.sub(r"^test:(\w+).*", r"\1", key) for key in world.key_names()}
    assert kinds >= {"blob", "blobs", "bytes", "busy", "fleet", "id", "inflight", "lease", "lock", "node", "nodes"}
    assert kinds >= {"answer", "op", "places", "reply", "sandbox", "sandboxes", "story", "thread", "waiting", "warm"}
    assert kinds >= {"blanks", "failing", "line", "parked", "stopping", "turns", "user"}

    world.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="x")
    world.store.finish("left", route, outcome="ok", reply="{}")
    world.store.stopped(route)
    world.store.withdraw(Identity("parked", "u"), "a-parked")
    world.store.withdraw(Identity("parked", "u"), "again")
    world.store.blob_drop("b")
    world.store.close_replies("c1")
    for node in ("n1", "n2", "n3"):
        world.lapse_lease(node)
        world.store.close_incarnation(node, None, reason="retired")
    assert_all_end(world)
    left = {re.sub(r"^test:(\w+).*", r"\1", key) for key in world.key_names()}
    assert left.isdisjoint({"blanks", "parked", "turns", "user", "stopping"})
    assert left.isdisjoint({"agents", "busy", "places", "warm", "inflight", "blob", "blobs", "bytes", "reply", "lease"})


def test_the_places_of_a_node_that_lives_are_kept_alive(redis_world: RedisWorld) -> None:
    world = redis_world
    world.announce()
    world.blank("s1")
    keys = ("test:places:n1", "test:blanks:n1")
    for key in keys:
        assert world.raw.expire(key, 60)
    world.store.renew("n1", "i1", lease_s=60)
    assert [world.raw.ttl(key) > 29 * 86400 for key in keys] == [True, True]


def test_a_blank_whose_place_an_older_node_cleared_is_not_given_to_anybody(redis_world: RedisWorld) -> None:
    """A node that is run in the version before again clears the places it does not know and leaves `blanks:{node}`."""
    world = redis_world
    world.announce(replicas=1)
    world.blank("s1")
    world.raw.zrem("test:places:n1", "~s1")
    first = world.reserve(ALICE, spec_digest="d1")
    assert (first.status, first.blank) == ("reserved", "")
    assert world.reserve(BOB, spec_digest="d1").status == "full"
    assert (world.places(), world.store.blanks("n1")) == (1, {})


def assert_all_end(world: RedisWorld) -> None:
    endless = [key for key in world.key_names() if world.raw.ttl(key) < 0]
    assert endless == []
    assert max(world.raw.ttl(key) for key in world.key_names()) <= 30 * 86400


def test_prefixes_keep_deployments_apart(redis_world: RedisWorld) -> None:
    redis_world.announce()
    other = RedisWorld(redis_world.url, "te*t:")
    assert other.store.nodes() == []
    assert other.store.keys() == []
    other.announce()
    assert all(key.startswith("te*t:") for key in other.key_names())
    other.close()


def test_a_reader_notices_a_stream_that_was_lost_and_made_again(redis_world: RedisWorld) -> None:
    world = redis_world
    world.listen()
    world.store.reply(world.waiter("a1"), "{}")
    (first,) = world.store.read_replies("c1", "0", block_s=0)
    world.flush()
    assert world.store.open_replies("c1", ttl_s=60)
    world.store.reply(world.waiter("a2"), "{}")
    assert [r.op_id for r in world.store.read_replies("c1", first.cursor, block_s=1)] == ["a2"]
