"""One small fleet per test, over either store, with hands on what a test cannot wait for.

Expiry is reached by moving the fact, not by sleeping: `World.lapse_lease` and its like do to the store what
time would do.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import redis

from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import Acquired, NodeRecord, OpRecord, Push, Recorded, Reserved, Route, Store, Waiter
from sandfleet.store.memory import MemoryStore
from sandfleet.store.redis import RedisStore

LONG_S = 36_000.0  # nothing expires in a test unless it is made to
SPEC = SandboxSpec(backend="mock")
ALICE = Identity("alice")
BOB = Identity("bob")
ERROR = {"code": "no_capacity", "message": "no room", "facts": {"retry_after_s": 1}}


class World:
    """A store and the shortest way to each situation."""

    store: Store
    kind: str

    # --- what time would do -------------------------------------------------------------------

    def lapse_lease(self, node_id: str = "n1") -> None:
        raise NotImplementedError

    def expire_place(self, sandbox_id: str, node_id: str = "n1") -> None:
        raise NotImplementedError

    def expire_agent(self, sandbox_id: str, agent: str) -> None:
        raise NotImplementedError

    def expire_busy(self, sandbox_id: str, op_id: str) -> None:
        raise NotImplementedError

    def expire_waiters(self, identity: Identity) -> None:
        raise NotImplementedError

    def end_pause(self, identity: Identity) -> None:
        """The pause after a failed creation is over."""
        raise NotImplementedError

    def forget_failures(self, identity: Identity) -> None:
        """Ten minutes passed since the last failed creation."""
        raise NotImplementedError

    def age_kick(self) -> None:
        """A second passed since the line's message was published."""
        raise NotImplementedError

    def age_stop(self, sandbox_id: str, node_id: str = "n1") -> None:
        """Half a minute passed since the sandbox began to stop."""
        raise NotImplementedError

    def expire_op(self, op_id: str) -> None:
        raise NotImplementedError

    def expire_blob(self, blob_id: str) -> None:
        raise NotImplementedError

    def expire_answer(self, op_id: str) -> None:
        raise NotImplementedError

    def end_recovery(self) -> None:
        raise NotImplementedError

    def kept_s(self, op_id: str) -> float:
        """How long the op record lives from now on."""
        raise NotImplementedError

    def stream_kept_s(self, stream: str) -> float:
        """How long the output stream lives from now on."""
        raise NotImplementedError

    def forge_id(self, sandbox_id: str, digest: str) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError

    def pushed(self, queue: str) -> list[str]:
        """What waits in a queue, oldest first."""
        raise NotImplementedError

    def waiting(self, identity: Identity) -> int:
        """How many wait for the thread's sandbox."""
        raise NotImplementedError

    def counted_for(self, user_id: str) -> set[str]:
        """The sandboxes that take a place of the user."""
        raise NotImplementedError

    def counted_on(self, node_id: str) -> set[str]:
        """The sandboxes that take a place of the node."""
        raise NotImplementedError

    # --- short ways ---------------------------------------------------------------------------

    def announce(
        self,
        node_id: str = "n1",
        incarnation: str = "i1",
        *,
        replicas: int = 4,
        lease_s: float = LONG_S,
        again: bool = False,
        burst_limit: int = 0,
    ) -> int:
        record = NodeRecord(
            node_id, incarnation, replicas, "data-1", ("mock",), {"zone": "a"}, "host", 7, "0.1", burst_limit
        )
        return self.store.announce(record, lease_s=lease_s, again=again)

    def waiter(self, op_id: str = "a1", client: str = "c1", agent: str = "agent-1") -> Waiter:
        return Waiter(op_id, client, agent, LONG_S)

    def acquire(self, identity: Identity = ALICE, **waiter: str) -> Acquired:
        push = Push("scheduler", f"acquire {identity.thread_id}")
        return self.store.acquire(identity, self.waiter(**waiter), wait_s=LONG_S, push=push)

    def park(self, identity: Identity = ALICE, *, op_id: str = "", request: str = "") -> int:
        """Somebody waits for the thread's sandbox, and it stands in line."""
        waiter = self.waiter(op_id or f"a-{identity.thread_id}")
        assert self.store.acquire(identity, waiter, wait_s=LONG_S, push=None).status in ("requested", "parked")
        return self.store.park(identity, request or f"request {identity.thread_id}", push=Push("scheduler", "serve"))

    def line(self) -> list[str]:
        """The requests of those who stand in line, in order."""
        return [parked.request.removeprefix("request ") for parked in self.store.parked()]

    def reserve(
        self,
        identity: Identity = ALICE,
        node_id: str = "n1",
        incarnation: str = "i1",
        *,
        data_id: str = "data-1",
        **options: Any,
    ) -> Reserved:
        return self.store.reserve(
            identity, SPEC, node_id=node_id, incarnation=incarnation, data_id=data_id, expires_s=LONG_S, **options
        )

    def reserved(self, identity: Identity = ALICE, node_id: str = "n1", incarnation: str = "i1") -> Route:
        reserved = self.reserve(identity, node_id, incarnation)
        assert reserved.status == "reserved", reserved
        assert reserved.route is not None
        return reserved.route

    def begin_blank(self, slot: str, node_id: str = "n1", incarnation: str = "i1", *, reserve_free: int = 0) -> bool:
        return self.store.begin_blank(node_id, incarnation, slot, expires_s=LONG_S, reserve_free=reserve_free)

    def blank(self, slot: str, digest: str = "d1", node_id: str = "n1", incarnation: str = "i1") -> None:
        """A blank sandbox that is ready."""
        assert self.begin_blank(slot, node_id, incarnation)
        assert self.store.blank_ready(node_id, incarnation, slot, spec_digest=digest)

    def live(self, identity: Identity = ALICE, *, agent: str = "agent-1", node_id: str = "n1") -> Route:
        """A live sandbox held by ``agent`` (warm with "")."""
        node = next(n for n in self.store.nodes() if n.node_id == node_id)
        route = self.reserved(identity, node_id, node.incarnation)
        assert self.store.created(route)
        if agent:
            assert self.acquire(identity, agent=agent).status == "live"
        return route

    def op(self, route: Route, op_id: str = "o1", identity: Identity = ALICE, **changes: Any) -> OpRecord:
        now = self.store.now_ms()
        facts: dict[str, Any] = {
            "op_id": op_id,
            "kind": "execute_command",
            "route": route,
            "owner": identity.digest,
            "start_by_ms": now + int(LONG_S * 1000),
            "deadline_ms": now + int(LONG_S * 1000),
            "reply_to": "c1",
            "describe": "bash: ls",
        }
        return OpRecord(**{**facts, **changes})

    def record(self, route: Route, op_id: str = "o1", identity: Identity = ALICE, **changes: Any) -> Recorded:
        return self.store.record(self.op(route, op_id, identity, **changes), Push("queue", f"message {op_id}"))

    def listen(self, client: str = "c1") -> None:
        self.store.open_replies(client, ttl_s=LONG_S)

    def replies(self, client: str = "c1") -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        cursor = "0"
        while page := self.store.read_replies(client, cursor, block_s=0):
            found += [(reply.op_id, json.loads(reply.payload)) for reply in page]
            cursor = page[-1].cursor
        return found

    def state(self, route: Route) -> str:
        info = self.store.sandbox(route.sandbox_id)
        return str(info.state) if info else "none"

    def places(self, node_id: str = "n1") -> int:
        return next(n.places for n in self.store.nodes() if n.node_id == node_id)

    def key_names(self) -> list[str]:
        return self.store.keys()

    def close(self) -> None:
        self.store.close()


class MemoryWorld(World):
    kind = "memory"

    def __init__(self, **options: Any) -> None:
        self.memory = MemoryStore(**options)
        self.store = self.memory

    def lapse_lease(self, node_id: str = "n1") -> None:
        self.memory._leases.drop(node_id)

    def expire_place(self, sandbox_id: str, node_id: str = "n1") -> None:
        places = [self.memory._places[node_id], *self.memory._users.values()]
        for held in places:
            if sandbox_id in held:
                held[sandbox_id] = 1

    def expire_agent(self, sandbox_id: str, agent: str) -> None:
        self.memory._agents[sandbox_id][agent] = 1

    def expire_busy(self, sandbox_id: str, op_id: str) -> None:
        self.memory._busy[sandbox_id][op_id] = 1

    def expire_waiters(self, identity: Identity) -> None:
        waiting = self.memory._waiting[identity.digest]
        waiting.parked = {op: (waiter, 1) for op, (waiter, _) in waiting.parked.items()}
        waiting.until_ms = 1

    def end_pause(self, identity: Identity) -> None:
        failing = self.memory._failing.get(identity.digest)
        assert failing is not None
        failing.retry_at_ms = 1

    def forget_failures(self, identity: Identity) -> None:
        assert self.memory._failing.drop(identity.digest)

    def age_kick(self) -> None:
        assert self.memory._kicked_ms is not None
        self.memory._kicked_ms -= 1000

    def age_stop(self, sandbox_id: str, node_id: str = "n1") -> None:
        self.memory._stopping[node_id][sandbox_id] -= 30_000

    def waiting(self, identity: Identity) -> int:
        return len(self.memory._waiters(identity.digest))

    def counted_for(self, user_id: str) -> set[str]:
        return set(self.memory._users[user_id])

    def counted_on(self, node_id: str) -> set[str]:
        return set(self.memory._places[node_id])

    def expire_op(self, op_id: str) -> None:
        self.memory._ops.drop(op_id)

    def expire_blob(self, blob_id: str) -> None:
        client, size, _ = self.memory._blobs[blob_id]
        self.memory._blobs[blob_id] = (client, size, 1)

    def expire_answer(self, op_id: str) -> None:
        assert self.memory._answers.drop(op_id)

    def end_recovery(self) -> None:
        self.memory._recovering_until = 1

    def kept_s(self, op_id: str) -> float:
        return (self.memory._ops._entries[op_id][1] - self.memory.now_ms()) / 1000

    def stream_kept_s(self, stream: str) -> float:
        return self.memory._outputs.left_ms(stream) / 1000

    def forge_id(self, sandbox_id: str, digest: str) -> None:
        self.memory._ids.put(sandbox_id, digest, math.inf)

    def flush(self) -> None:
        self.memory.forget_everything()

    def pushed(self, queue: str) -> list[str]:
        return self.memory.queues[queue][::-1]


class RedisWorld(World):
    kind = "redis"

    def __init__(self, url: str, prefix: str = "test:", **options: Any) -> None:
        self.redis_store = RedisStore(url, prefix, **options)
        self.store = self.redis_store
        self.url = url
        self.prefix = prefix
        self.raw: redis.Redis = redis.Redis.from_url(url, decode_responses=True)

    def lapse_lease(self, node_id: str = "n1") -> None:
        self.raw.delete(f"{self.prefix}lease:{node_id}")

    def expire_place(self, sandbox_id: str, node_id: str = "n1") -> None:
        for key in [f"{self.prefix}places:{node_id}", *self.raw.keys(f"{self.prefix}user:*")]:
            self.raw.zadd(key, {sandbox_id: 1}, xx=True)

    def expire_agent(self, sandbox_id: str, agent: str) -> None:
        self.raw.zadd(f"{self.prefix}agents:{sandbox_id}", {agent: 1})

    def expire_busy(self, sandbox_id: str, op_id: str) -> None:
        self.raw.zadd(f"{self.prefix}busy:{sandbox_id}", {op_id: 1})

    def expire_waiters(self, identity: Identity) -> None:
        key = f"{self.prefix}waiting:{identity.digest}"
        for op_id, text in self.raw.hgetall(key).items():
            if not op_id.startswith("@"):
                self.raw.hset(key, op_id, "1|" + text.split("|", 1)[1])
        self.raw.hset(key, "@until", 1)

    def end_pause(self, identity: Identity) -> None:
        assert self.raw.hset(f"{self.prefix}failing:{identity.digest}", "retry_at", 1) == 0

    def forget_failures(self, identity: Identity) -> None:
        assert self.raw.delete(f"{self.prefix}failing:{identity.digest}") == 1

    def age_kick(self) -> None:
        self.raw.hincrby(f"{self.prefix}line", "kicked", -1000)

    def age_stop(self, sandbox_id: str, node_id: str = "n1") -> None:
        self.raw.zincrby(f"{self.prefix}stopping:{node_id}", -30_000, sandbox_id)

    def waiting(self, identity: Identity) -> int:
        now, waiters = self.store.now_ms(), self.raw.hgetall(f"{self.prefix}waiting:{identity.digest}")
        return sum(1 for op, text in waiters.items() if op[0] != "@" and int(text.split("|")[0]) > now)

    def counted_for(self, user_id: str) -> set[str]:
        return set(self.raw.zrange(f"{self.prefix}user:{user_id}", 0, -1))

    def counted_on(self, node_id: str) -> set[str]:
        return set(self.raw.zrange(f"{self.prefix}places:{node_id}", 0, -1))

    def expire_op(self, op_id: str) -> None:
        self.raw.delete(f"{self.prefix}op:{op_id}")

    def expire_blob(self, blob_id: str) -> None:
        key = f"{self.prefix}blob:{blob_id}"
        self.raw.zadd(f"{self.prefix}blobs", {self.raw.hget(key, "member"): 1})
        self.raw.delete(key, *self.raw.keys(f"{key}:*"))

    def expire_answer(self, op_id: str) -> None:
        assert self.raw.delete(f"{self.prefix}answer:{op_id}") == 1

    def end_recovery(self) -> None:
        self.raw.hset(f"{self.prefix}fleet", "recovering", 1)

    def kept_s(self, op_id: str) -> float:
        return self.raw.pttl(f"{self.prefix}op:{op_id}") / 1000

    def stream_kept_s(self, stream: str) -> float:
        return self.raw.pttl(f"{self.prefix}out:{stream}") / 1000

    def forge_id(self, sandbox_id: str, digest: str) -> None:
        self.raw.set(f"{self.prefix}id:{sandbox_id}", digest)

    def flush(self) -> None:
        self.raw.flushdb()

    def pushed(self, queue: str) -> list[str]:
        return self.raw.lrange(queue, 0, -1)[::-1]

    def close(self) -> None:
        super().close()
        self.raw.close()


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Run ``act(i)`` in that many threads, started at one moment."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(i: int) -> None:
        barrier.wait()
        results[i] = act(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results
