"""What goes into the store's transitions and what comes out of them; import them from `sandfleet.store.base`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandfleet.model import NodeState

__all__ = [
    "Acquired",
    "Claim",
    "Closed",
    "NodeRecord",
    "OpRecord",
    "OpView",
    "Parked",
    "Push",
    "Recorded",
    "Renewal",
    "Reply",
    "Reserved",
    "Route",
    "Swept",
    "Waiter",
    "wants_errors_only",
]


def wants_errors_only(reply_to: str) -> bool:
    """Whether successes are not appended to this client's stream: a "!" in front says so."""
    return reply_to.startswith("!")


@dataclass(frozen=True, slots=True)
class Push:
    """A ready-made Celery message that the same transaction LPUSHes: record and publish cannot part."""

    queue: str
    message: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where a sandbox lives: the fact that routing looks up."""

    sandbox_id: str
    node_id: str
    incarnation: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node says of itself when it announces."""

    node_id: str
    incarnation: str
    replicas: int
    data_id: str
    backends: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    version: str = ""
    burst_limit: int = 0


@dataclass(frozen=True, slots=True)
class Parked:
    """A thread that waits in line for a place. ``request`` is what `Store.park` was given; ``cursor`` is where reading
    the line goes on; ``waiting_since_ms`` when it was parked."""

    digest: str
    user_id: str | None
    request: str
    cursor: str
    waiting_since_ms: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a lease renewal. ``known`` False: the store lost its data, announce again."""

    now_ms: int
    state: NodeState
    known: bool


@dataclass(frozen=True, slots=True)
class Waiter:
    """An acquire that waits: where its reply goes and which agent holds the sandbox once it lives."""

    op_id: str
    reply_to: str
    agent: str
    agent_ttl_s: float


@dataclass(frozen=True, slots=True)
class Acquired:
    """What `Store.acquire` found. ``status`` is one of

    live: ``route`` is set, the agent is now a holder, ``was_warm`` tells which pool it came from ·
    creating: somebody else's creation is under way, or the old sandbox is being removed; the waiter is parked (and
    the last ``push`` is published when the removal is confirmed) ·
    requested: nothing lives; the waiter is parked and ``push`` was published (once per burst: with
    other waiters already parked and a request younger than 2 s it is not published again) ·
    parked: the thread stands in the line for a place; the waiter waits with it, nothing was published ·
    backing_off: its creates kept failing; nothing was parked, ``retry_after_s`` says when it may be tried again and
    ``error`` is the wire error of the last failure (JSON).
    """

    status: str
    route: Route | None = None
    was_warm: bool = False
    retry_after_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What `Store.reserve` did. ``status`` is one of

    reserved: ``route`` names the new owner and epoch, ``sandbox_id`` is fixed, a place is taken ·
    live / creating: the thread has one already, or its old one is being removed (nothing was taken; waiters of a
    live one were answered). One on a node without lease, draining or gone counts as nothing and is superseded ·
    full: no place on that node · node_down: not alive, not ready, or another incarnation · recovering: the store
    lost its data a moment ago and knows nothing of the thread; the node that holds its sandbox may yet adopt it ·
    queued: others stand in line for a place and this thread was not asked for from the line (``from_line``) ·
    withdrawn: it was asked for from the line and does not stand there (any more), or nobody waits for it ·
    quota: the user has ``max_per_user`` places (told rather than full); ``evict`` names the longest idle warm sandbox
    of the user, if any, and none while another one of the user's is being removed: that makes the room.

    With reserved, ``blank`` names the blank sandbox whose place was taken over, if one was: the node makes it the
    thread's, or, if it is of another kind, removes it before it starts one.
    """

    status: str
    route: Route | None = None
    evict: str = ""
    blank: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """A live sandbox as its node's upkeep sees it.

    Attributes:
        created_ms: Since when it exists.
        used_ms: When somebody last came, left, or began or ended an operation.
        warm_since_ms: Since when nobody is in it; None while somebody is.
        busy: An unexpired operation is in it.
    """

    sandbox_id: str
    created_ms: int
    used_ms: int
    warm_since_ms: int | None
    busy: bool


@dataclass(frozen=True, slots=True)
class OpRecord:
    """An operation as it is recorded before it is published.

    ``expect`` says what the sandbox must be for the record to be taken: ``live`` (operations),
    ``creating`` (node.create) or ``stopping`` (node.destroy); ``node`` asks nothing of it: such an operation is the
    node's own, without effect, and names no sandbox that is there. ``start_by_ms`` and ``deadline_ms``
    are absolute store time, at most two days ahead (beyond, the deadline is taken as that); the record,
    its busy mark and its reply are dropped some time after the deadline. A ``reply_to`` that starts with
    "!" wants errors only: its successes are told in another way (`wants_errors_only`).
    """

    op_id: str
    kind: str
    route: Route
    owner: str  # identity digest
    start_by_ms: int
    deadline_ms: int
    reply_to: str = ""
    describe: str = ""
    expect: str = "live"
    effect: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `Store.record` did. ``status`` is one of

    recorded: written and pushed · duplicate: this op_id is known for the same sandbox and kind
    (``state`` and, when done, ``reply`` tell the rest; nothing was pushed; done without a reply
    ended long ago and its big reply is not kept any more) · conflict: the op_id
    belongs to another op · moved: the route is stale, ``route`` is the current one ·
    not_found: no such sandbox, or not this owner's · lost · stopping · creating: the sandbox's
    state does not serve · live: ``expect`` was creating or stopping, and it is live on this very route ·
    node_down: its node's lease lapsed · draining · away: its node is expected back · busy: the node's inflight
    bound is reached.
    """

    status: str
    now_ms: int = 0
    route: Route | None = None
    state: str = ""
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What `Store.claim` decided. ``status`` is one of claimed, already (this incarnation claimed it
    before: a second delivery), closed (answered already: tombstone, cancelled or done), stale (epoch,
    node or incarnation is not current, or the lease lapsed), late (``start_by`` passed; the record stays
    open for `finish` with QueueTimeout), gone (no record)."""

    status: str
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """What one `close_incarnation` call did; call again while ``more``."""

    not_started: int
    unknown: int
    sandboxes: tuple[str, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """One entry of a reply stream: ``cursor`` is where to read on."""

    cursor: str
    op_id: str
    payload: str


@dataclass(frozen=True, slots=True)
class OpView:
    """An op record as ``sandfleet ops`` and late readers see it.

    ``state``: recorded, claimed, done, closed. ``outcome``: "", ok, or an error code. ``job``: it is a background job
    that has begun to run. ``owner``: the digest of whose it is.
    """

    op_id: str
    kind: str
    sandbox_id: str
    node_id: str
    incarnation: str
    state: str
    outcome: str
    describe: str
    recorded_at_ms: int
    claimed_at_ms: int | None
    finished_at_ms: int | None
    deadline_ms: int
    reply: str | None = None
    reply_to: str = ""
    job: bool = False
    owner: str = ""
