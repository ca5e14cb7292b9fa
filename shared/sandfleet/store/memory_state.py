"""What `MemoryStore` keeps, and how it shows that as Redis would."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sandfleet.checkpoints import Restoration
from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import NodeRecord, OpRecord, Output, Push, Reply, Route, Waiter
from sandfleet.store.keys import DEFAULT_PREFIX

__all__ = [
    "DAY_MS",
    "KEEP_MS",
    "Expiring",
    "Failing",
    "InLine",
    "MemoryState",
    "Node",
    "Op",
    "Sandbox",
    "Stream",
    "Thread",
    "Waiting",
]

DAY_MS = 86_400_000
KEEP_MS = 30 * DAY_MS
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

    def left_ms(self, key: K) -> float:
        """How long the entry will still be there."""
        return self._entries[key][1] - self._now()

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
    reason: str = ""
    returning: bool = False


@dataclass(slots=True)
class Thread:
    """``epoch`` 0: it has had no sandbox here; a node told its home, as of the epoch ``told``."""

    sandbox_id: str
    data_id: str | None
    epoch: int
    told: int = 0


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
    data_id: str = ""
    restored: Restoration | None = None


@dataclass(slots=True)
class Waiting:
    parked: dict[str, tuple[Waiter, int]] = field(default_factory=dict)
    requested_ms: int | None = None
    push: Push | None = None
    until_ms: int = 0


@dataclass(slots=True)
class InLine:
    """A thread that waits for a place; ``stands`` is its turn and the order of arrival within it."""

    user: str
    stands: tuple[int, int]
    request: str
    since_ms: int


@dataclass(slots=True)
class Failing:
    fails: int = 0
    retry_at_ms: int = 0
    error: str = ""


@dataclass(slots=True)
class Op:
    record: OpRecord
    at_ms: int
    state: str = "recorded"
    outcome: str = ""
    claimed_ms: int | None = None
    finished_ms: int | None = None
    reply: str | None = None
    job: bool = False


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
        self._reading: set[str] = set()
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
        self._blanks: dict[str, dict[str, str]] = defaultdict(dict)
        self._warm: dict[str, dict[str, int]] = defaultdict(dict)
        self._agents: dict[str, dict[str, int]] = defaultdict(dict)
        self._busy: dict[str, dict[str, int]] = defaultdict(dict)
        self._waiting: dict[str, Waiting] = {}
        self._failing: Expiring[str, Failing] = Expiring(now)
        self._users: dict[str, dict[str, float]] = defaultdict(dict)
        self._stopping: dict[str, dict[str, int]] = defaultdict(dict)
        self._in_line: dict[str, InLine] = {}
        self._order: list[tuple[tuple[int, int], str]] = []
        self._turns: dict[str, dict[str, int]] = defaultdict(dict)
        self._reached = 0
        self._serve: Push | None = None
        self._kicked_ms: int | None = None
        self._ops: Expiring[str, Op] = Expiring(now)
        self._answers: Expiring[str, str] = Expiring(now)
        self._inflight: dict[str, dict[str, None]] = defaultdict(dict)
        self._streams: Expiring[str, Stream] = Expiring(now)
        self._outputs: Expiring[str, list[Output]] = Expiring(now)
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
                "failing": self._failing,
                "reply": self._streams,
                "out": self._outputs,
                "lock": self._locks,
                "story": self._stories,
            }
            names = [f"{kind}:{key}" for kind, table in expiring.items() for key in table]
            plain: dict[str, Mapping[str, Any]] = {
                "places": self._places,
                "blanks": self._blanks,
                "warm": self._warm,
                "agents": self._agents,
                "busy": self._busy,
                "waiting": self._waiting,
                "parked": self._in_line,
                "turns": self._turns,
                "user": self._users,
                "stopping": self._stopping,
                "inflight": self._inflight,
            }
            names += [f"{kind}:{key}" for kind, table in plain.items() for key, value in table.items() if value]
            names += [f"blob:{blob}:{index}" for blob, index in self._chunks]
            return sorted(DEFAULT_PREFIX + name for name in names)
