"""What `MemoryStore` keeps, and the steps that its transitions share (the twins of ``scripts/lib``)."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import NodeRecord, OpRecord, Push, Reply, Route, Waiter
from sandfleet.store.keys import DEFAULT_PREFIX

__all__ = ["DAY_MS", "KEEP_MS", "Expiring", "MemoryState", "Node", "Op", "Sandbox", "Stream", "Thread", "Waiting"]

DAY_MS = 86_400_000
KEEP_MS = 30 * DAY_MS
LOST_MS = 600_000
ADOPTED_MS = 60_000
MAX_WAITERS = 1000
STORY_LENGTH = 100
STREAM_LENGTH = 10_000

K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """A mapping whose entries end at a point in time of the store's clock, as Redis keys do."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._entries: dict[K, tuple[V, float]] = {}

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[1] <= self._now():
            del self._entries[key]
            return None
        return entry[0]

    def put(self, key: K, value: V, ttl_ms: float = math.inf) -> V:
        self._entries[key] = (value, self._now() + ttl_ms)
        return value

    def touch(self, key: K, ttl_ms: float) -> None:
        value = self.get(key)
        if value is not None:
            self.put(key, value, ttl_ms)

    def drop(self, key: K) -> bool:
        return self._entries.pop(key, None) is not None

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[K]:
        return iter([key for key in list(self._entries) if key in self])


@dataclass(slots=True)
class Node:
    record: NodeRecord
    state: NodeState
    started_ms: int
    load: Mapping[str, Any] = field(default_factory=dict)
    retired: str = ""


@dataclass(slots=True)
class Thread:
    sandbox_id: str
    data_id: str | None
    epoch: int


@dataclass(slots=True)
class Sandbox:
    owner: str
    thread_id: str
    user_id: str | None
    backend: str
    state: SandboxState
    route: Route
    created_ms: int
    used_ms: int


@dataclass(slots=True)
class Waiting:
    parked: dict[str, tuple[Waiter, int]] = field(default_factory=dict)
    requested_ms: int | None = None
    push: Push | None = None


@dataclass(slots=True)
class Op:
    record: OpRecord
    at_ms: int
    state: str = "recorded"
    outcome: str = ""
    claimed_ms: int | None = None
    finished_ms: int | None = None
    reply: str | None = None


@dataclass(slots=True)
class Stream:
    entries: list[Reply] = field(default_factory=list)


class MemoryState:
    """The facts, one lock, and a clock.

    Attributes:
        queues: What was published, per queue, newest first (LPUSH); take from the end.
    """

    def __init__(
        self,
        now_ms: Callable[[], int] | None = None,
        *,
        blob_client_bytes: int = 128 * 1024 * 1024,
        blob_fleet_bytes: int = 512 * 1024 * 1024,
    ) -> None:
        self._clock = now_ms or (lambda: int(time.time() * 1000))
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._closed = False
        self._blob_client_limit = blob_client_bytes
        self._blob_fleet_limit = blob_fleet_bytes
        self.queues: dict[str, list[str]] = defaultdict(list)
        self._clear()

    def _clear(self) -> None:
        now = self._now
        self._nodes: Expiring[str, Node] = Expiring(now)
        self._leases: Expiring[str, str] = Expiring(now)
        self._sandboxes: Expiring[str, Sandbox] = Expiring(now)
        self._threads: Expiring[str, Thread] = Expiring(now)
        self._ids: Expiring[str, str] = Expiring(now)
        self._longest_lease_ms = 0
        self._recovering_until = 0
        self._places: dict[str, dict[str, float]] = defaultdict(dict)
        self._warm: dict[str, dict[str, int]] = defaultdict(dict)
        self._agents: dict[str, dict[str, int]] = defaultdict(dict)
        self._busy: dict[str, dict[str, int]] = defaultdict(dict)
        self._waiting: dict[str, Waiting] = {}
        self._ops: Expiring[str, Op] = Expiring(now)
        self._answers: Expiring[str, str] = Expiring(now)
        self._inflight: dict[str, dict[str, None]] = defaultdict(dict)
        self._streams: Expiring[str, Stream] = Expiring(now)
        self._blobs: dict[str, tuple[str, int, int]] = {}
        self._chunks: dict[tuple[str, int], bytes] = {}
        self._locks: Expiring[str, str] = Expiring(now)
        self._stories: Expiring[str, list[dict[str, Any]]] = Expiring(now)
        self._sequence = 0

    def forget_everything(self) -> None:
        """What FLUSHALL does to Redis."""
        with self._lock:
            self.queues.clear()
            self._clear()

    def _now(self) -> int:
        return int(self._clock())

    # --- shared steps --------------------------------------------------------------------------

    def _tell(self, key: str, event: str, **facts: Any) -> None:
        story = self._stories.get(key) or []
        entry = {"at_ms": self._now(), "event": event, **facts}
        self._stories.put(key, [*story, entry][-STORY_LENGTH:], DAY_MS)

    def _push(self, push: Push) -> None:
        self.queues[push.queue].insert(0, push.message)

    def _send(self, client: str, op_id: str, payload: str) -> bool:
        stream = self._streams.get(client) if client else None
        if stream is None:
            return False
        self._sequence += 1
        stream.entries.append(Reply(f"{self._now()}-{self._sequence}", op_id, payload))
        del stream.entries[:-STREAM_LENGTH]
        self._arrived.notify_all()
        return True

    def _count(self, holders: dict[str, int]) -> int:
        now = self._now()
        return sum(1 for expiry in holders.values() if expiry > now)

    def _in_use(self, sandbox_id: str) -> bool:
        return bool(self._count(self._agents[sandbox_id]) or self._count(self._busy[sandbox_id]))

    def _settle(self, route: Route) -> bool:
        """A live sandbox with nobody in it is warm; True if it became so now."""
        sandbox = self._sandboxes.get(route.sandbox_id)
        if sandbox is None or sandbox.state != SandboxState.LIVE or sandbox.route != route:
            return False
        warm = self._warm[route.node_id]
        if self._in_use(route.sandbox_id) or route.sandbox_id in warm:
            return False
        warm[route.sandbox_id] = self._now()
        return True

    def _taken(self, node_id: str) -> int:
        now = self._now()
        return sum(1 for expiry in self._places[node_id].values() if expiry > now)

    def _place_until(self, node_id: str, sandbox_id: str) -> float:
        return self._places[node_id].get(sandbox_id, 0)

    def _thread_state(self, digest: str) -> tuple[str | None, Sandbox | None]:
        """live, creating, stopping, or None (nothing that serves); with the old record, if there is one."""
        thread = self._threads.get(digest)
        sandbox = self._sandboxes.get(thread.sandbox_id) if thread else None
        if sandbox is None or sandbox.owner != digest:
            return None, None
        route, state = sandbox.route, sandbox.state
        if state == SandboxState.LOST or self._leases.get(route.node_id) != route.incarnation:
            return None, sandbox
        node = self._nodes.get(route.node_id)
        if state == SandboxState.LIVE and (node is None or node.state not in (NodeState.READY, NodeState.CORDONED)):
            return None, sandbox
        expired = self._place_until(route.node_id, route.sandbox_id) <= self._now()
        if state == SandboxState.CREATING and expired:
            return None, sandbox
        return str(state), sandbox

    def _forget(self, route: Route) -> None:
        sandbox_id = route.sandbox_id
        self._leave_node(route)
        self._sandboxes.drop(sandbox_id)

    def _leave_node(self, route: Route) -> None:
        self._places[route.node_id].pop(route.sandbox_id, None)
        self._warm[route.node_id].pop(route.sandbox_id, None)
        self._agents.pop(route.sandbox_id, None)
        self._busy.pop(route.sandbox_id, None)

    def _make_lost(self, sandbox: Sandbox, reason: str) -> None:
        self._leave_node(sandbox.route)
        sandbox.state, sandbox.used_ms = SandboxState.LOST, self._now()
        self._sandboxes.touch(sandbox.route.sandbox_id, LOST_MS)
        self._tell(sandbox.route.sandbox_id, "lost", reason=reason, **_where(sandbox.route))

    # --- waiters -------------------------------------------------------------------------------

    def _parked(self, digest: str) -> list[Waiter]:
        now = self._now()
        waiting = self._waiting.get(digest)
        return [w for w, until in waiting.parked.values() if until > now] if waiting else []

    def _grant_waiters(self, digest: str, route: Route, *, new: bool) -> int:
        """Every waiter whose client still listens becomes an agent and gets the route."""
        payload = json.dumps({"ok": {**_where(route), "sandbox_id": route.sandbox_id, "new": new}})
        granted = 0
        for waiter in self._parked(digest):
            if self._send(waiter.reply_to, waiter.op_id, payload):
                expiry = self._now() + max(1, round(waiter.agent_ttl_s * 1000))
                self._agents[route.sandbox_id][waiter.agent] = expiry
                granted += 1
        self._waiting.pop(digest, None)
        if granted:
            self._warm[route.node_id].pop(route.sandbox_id, None)
        return granted

    def _fail_waiters(self, digest: str, error: Mapping[str, Any]) -> int:
        waiters = self._parked(digest)
        for waiter in waiters:
            self._send(waiter.reply_to, waiter.op_id, json.dumps({"error": dict(error)}))
        self._waiting.pop(digest, None)
        return len(waiters)

    def _request_again(self, digest: str) -> None:
        waiting = self._waiting.get(digest)
        if waiting is not None and waiting.push is not None and self._parked(digest):
            waiting.requested_ms = self._now()
            self._push(waiting.push)

    # --- operations ----------------------------------------------------------------------------

    def _close_op(self, op_id: str, op: Op, code: str, message: str, **facts: Any) -> None:
        """Answer an operation that no node will answer: closed, a tombstone for late messages."""
        route = op.record.route
        facts = {"op_id": op_id, "sandbox_id": route.sandbox_id, **facts}
        payload = json.dumps({"error": {"code": code, "message": message, "facts": facts}})
        self._inflight[route.node_id].pop(op_id, None)
        self._busy[route.sandbox_id].pop(op_id, None)
        op.state, op.outcome, op.finished_ms, op.reply = "closed", code, self._now(), payload
        self._send(op.record.reply_to, op_id, payload)
        self._settle(route)

    def _close_not_started(self, op_id: str, op: Op, reason: str) -> None:
        self._close_op(op_id, op, "not_started", f"the operation never began: {reason}", reason=reason)

    def keys(self) -> list[str]:
        """Names as they would be in Redis."""
        with self._lock:
            expiring: dict[str, Expiring[str, Any]] = {
                "node": self._nodes,
                "lease": self._leases,
                "sandbox": self._sandboxes,
                "thread": self._threads,
                "id": self._ids,
                "op": self._ops,
                "answer": self._answers,
                "reply": self._streams,
                "lock": self._locks,
                "story": self._stories,
            }
            names = [f"{kind}:{key}" for kind, table in expiring.items() for key in table]
            plain: dict[str, Mapping[str, Any]] = {
                "places": self._places,
                "warm": self._warm,
                "agents": self._agents,
                "busy": self._busy,
                "waiting": self._waiting,
                "inflight": self._inflight,
            }
            names += [f"{kind}:{key}" for kind, table in plain.items() for key, value in table.items() if value]
            names += [f"blob:{blob}:{index}" for blob, index in self._chunks]
            return sorted(DEFAULT_PREFIX + name for name in names)


def _where(route: Route) -> dict[str, Any]:
    return {"node_id": route.node_id, "incarnation": route.incarnation, "epoch": route.epoch}
