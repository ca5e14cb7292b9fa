"""The contract of the shared state: one method per transition, each of them atomic.

Two implementations: `sandfleet.store.redis.RedisStore` (one Lua script per transition) and
`sandfleet.store.memory.MemoryStore` (the same under a lock, for tests). One contract suite judges
both. All points in time are milliseconds of the *store's* clock, never of a caller's.

The facts kept here (``{p}`` is the deployment's prefix):

=========================  ==========================================================================
``{p}fleet``               hash: since when this store serves a fleet, its longest lease, until when it recovers
``{p}nodes``               set of node ids; ``{p}node:{id}`` hash, ``{p}lease:{id}`` string incarnation + PX
``{p}sandbox:{sid}``       hash: identity, route (node, incarnation, epoch), state, spec…; ``{p}sandboxes`` zset of all
``{p}thread:{digest}``     hash: sandbox_id, data_id (home of its data), epoch of the last owner
``{p}id:{sid}``            string digest: whom a sandbox id belongs to
``{p}places:{node}``       zset sandbox id, or ~slot of a blank one → reservation expiry (+inf once confirmed)
``{p}blanks:{node}``       hash slot → spec digest: blank sandboxes that are ready
``{p}warm:{node}``         zset sandbox id → since when nobody is in it
``{p}agents:{sid}``        zset agent → expiry;  ``{p}busy:{sid}`` zset op id → expiry
``{p}waiting:{digest}``    hash of acquires that wait for this thread's sandbox, and the last request for one
``{p}failing:{digest}``    hash: how often its creates failed in a row, when the next may be tried, the last error
``{p}parked``              zset digest → its turn in the line for a place; ``{p}parked:{digest}`` hash of the request;
                           ``{p}turns:{user}`` zset digest → turn; ``{p}line`` hash: turn reached, ``serve`` message
``{p}stopping:{node}``     zset sandbox id → since when it is being removed
``{p}user:{user}``         zset sandbox id → reservation expiry: the places of one user
``{p}op:{op_id}``          hash: the op record;  ``{p}inflight:{node}`` zset op id → sequence
``{p}answer:{op_id}``      string: a reply too big to be kept as long as its record
``{p}reply:{client}``      stream of replies;  ``{p}out:{op_id}`` stream of what a command writes while it runs
``{p}blob:{id}:{n}``       chunks; ``{p}blob:{id}`` hash, ``{p}blobs`` zset and ``{p}bytes`` hash keep the byte budget
``{p}lock:{name}``         string token + PX;  ``{p}story:{id}`` list of recent transitions
=========================  ==========================================================================
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from sandfleet.checkpoints import Restoration
from sandfleet.ids import Identity
from sandfleet.model import NodeState, NodeView, SandboxInfo, SandboxSpec
from sandfleet.store.blanks import Blanks
from sandfleet.store.collecting import Collecting
from sandfleet.store.exchange import Exchange
from sandfleet.store.line import Line
from sandfleet.store.returning import Returning
from sandfleet.store.streams import Output, Pushed, Streams
from sandfleet.store.values import (
    Acquired,
    Claim,
    Closed,
    NodeRecord,
    OpRecord,
    OpView,
    Parked,
    Push,
    Recorded,
    Renewal,
    Reply,
    Reserved,
    Route,
    Swept,
    Waiter,
    wants_errors_only,
)

__all__ = [
    "Acquired",
    "Claim",
    "Closed",
    "NodeRecord",
    "OpRecord",
    "OpView",
    "Output",
    "Parked",
    "Push",
    "Pushed",
    "Recorded",
    "Renewal",
    "Reply",
    "Reserved",
    "Route",
    "Store",
    "Swept",
    "Waiter",
    "wants_errors_only",
]


class Store(Blanks, Line, Returning, Exchange, Streams, Collecting):
    """Shared state. Thread-safe. Every method is one atomic transition (one round trip in Redis).

    Raises (any method):
        StoreUnavailable: The store does not answer, is loading or full, or refuses the credentials.
    """

    # --- time and nodes ----------------------------------------------------------------------

    @property
    def moves(self) -> int:
        """How often the shared state was found on another server: behind Sentinels its primary changes."""
        return 0

    @abstractmethod
    def now_ms(self) -> int:
        """The store's clock in unix milliseconds."""

    @abstractmethod
    def announce(self, node: NodeRecord, *, lease_s: float, again: bool = False, take_over: bool = False) -> int:
        """Register this incarnation of a node, state ready, and take its lease; gives the store's time in ms.

        ``take_over`` says that the caller knows the earlier incarnation's process to have ended (it holds the lock of
        the node's id): its lease is taken at once if it is of the same data root. The live sandboxes of the earlier one
        go on being live for `acquire` and `reserve` until `close_incarnation` is through: it may adopt them.

        ``again`` says that this node had announced itself before. If the store does not know it, the store
        lost its data: for the longest lease announced, threads it knows nothing of are not placed (`reserve` says
        recovering), because their sandboxes may be about to be adopted.

        Repeating it for the same incarnation is harmless (and restores a registration that the store lost;
        a cordon set before is kept). Inflight entries of earlier incarnations are left for
        `close_incarnation`, which the caller runs next.

        Raises:
            NodeIdInUse: Another incarnation holds an unexpired lease.
            LeaseLost: This incarnation was closed (`close_incarnation` with None, or state gone); it stays so.
        """

    @abstractmethod
    def renew(
        self, node_id: str, incarnation: str, *, lease_s: float, load: Mapping[str, Any] | None = None
    ) -> Renewal:
        """Push the lease ``lease_s`` seconds past now.

        A lapsed lease that nobody took is taken again. ``load`` (small JSON) is kept for ``sandfleet nodes``.

        Raises:
            LeaseLost: Another incarnation announced itself, or this one was closed (`close_incarnation` with retire).
        """

    @abstractmethod
    def set_node_state(
        self,
        node_id: str,
        state: NodeState,
        *,
        incarnation: str | None = None,
        reason: str = "",
        lease_s: float | None = None,
    ) -> bool:
        """Cordon, drain or open a node; False if no such node, or if ``incarnation`` is given and another is current.

        ``AWAY`` is what a node says of itself that leaves its sandboxes running for its next incarnation: nothing is
        placed there and no operation taken, but its sandboxes count as live while its lease lasts, which ``lease_s``
        sets anew if it still holds it. Only `announce`, or the end, follows upon it: other states are refused then.

        ``reason`` is shown with the node until it is ready again or gets another state; without one, a node that has
        that state already keeps the reason it has.

        ``GONE`` is what a leaving node says of itself last: its lease is deleted with it, so that
        `close_incarnation` may follow at once.
        """

    @abstractmethod
    def nodes(self) -> list[NodeView]:
        """Every known node, dead ones too (`alive` False), sorted by id. Forgotten a day after their last renewal."""

    @abstractmethod
    def close_incarnation(self, node_id: str, incarnation: str | None, *, reason: str, limit: int = 200) -> Closed:
        """Answer for a node that died or came back: close what belongs to incarnations *other than* the one given.

        With ``incarnation`` set: everything recorded for other incarnations of this node is closed (a node
        calls this right after `announce`). With None: everything is closed, the lease is deleted and the
        node's state becomes gone — refused (nothing done, more=False, zero counts) while its lease is unexpired.
        Each call handles up to ``limit`` inflight entries, in the order they were recorded: unclaimed →
        tombstone + reply NotStarted; claimed with effect → OutcomeUnknown; claimed without → NotStarted. A later
        claim or finish of those ops finds them closed. Sandboxes of the closed incarnations become lost
        (kept 10 min so that callers get a clear answer; epoch kept), their places are freed; for sandboxes in
        creation the waiters get NotStarted. ``reason`` goes into messages and stories. An incarnation that is not
        the current one closes nothing.
        """

    @abstractmethod
    def drain_inflight(self, node_id: str, incarnation: str, *, limit: int = 200) -> Closed:
        """A leaving node answers for itself: closes *unclaimed* entries of this incarnation with NotStarted, in
        recorded order, whatever the lease. Claimed ones are left to the node."""

    # --- threads and sandboxes ---------------------------------------------------------------

    @abstractmethod
    def acquire(self, identity: Identity, waiter: Waiter, *, wait_s: float, push: Push | None) -> Acquired:
        """The one-call acquire: see `Acquired`.

        A live sandbox counts only while its node's lease is unexpired and the node is not draining/gone (a
        cordoned node still serves its own, and one that is away will). An expired ``creating`` reservation counts as
        nothing. ``wait_s`` bounds how long the parked waiter is kept. The same waiter (op_id) parked twice is kept
        once. A thread whose creates fail (see `create_failed`) is told ``backing_off`` until it may be tried again.

        Raises:
            Busy: A thousand acquires wait for this thread already.
        """

    @abstractmethod
    def reserve(
        self,
        identity: Identity,
        spec: SandboxSpec,
        *,
        node_id: str,
        incarnation: str,
        data_id: str,
        expires_s: float,
        burst: bool = False,
        max_per_user: int = 0,
        from_line: bool = False,
        spec_digest: str = "",
    ) -> Reserved:
        """Take a place on a node for a thread, atomically with the check that it has none: see `Reserved`.

        ``burst`` may go ``burst_limit`` places above the node's ``replicas``. ``max_per_user`` bounds the places of
        the identity's user (0, or no user: no bound), whatever their state; the thread's own old sandbox that is
        superseded does not count. While anybody stands in line (`park`), a thread that was not read from it
        (``from_line``) is told ``queued``, but for a burst above the replicas, for which nobody there waits. A thread
        that gets a place leaves the line.

        A ready blank of ``spec_digest`` on the node gives its place to the thread; when no place is free, any ready
        blank does (`Reserved.blank`). That blank is not known any more then.

        The sandbox id is the first of `sandbox_id_candidates` that is free or already this identity's.
        The epoch is max(last epoch of the thread + 1, store time in µs). A thread without a home gets ``data_id`` as
        one; that of another one moves with `created`.
        The sandbox is ``creating`` until `created`; the place expires after ``expires_s`` unless confirmed.
        """

    @abstractmethod
    def created(self, route: Route, *, restored: Restoration | None = None) -> bool:
        """Confirm: creating → live; every parked waiter becomes an agent and is answered with the route. The thread's
        home becomes the ``data_id`` of the reservation; ``restored`` is kept with the sandbox.

        Reply value: ``{"ok": {"sandbox_id", "node_id", "incarnation", "epoch", "new": true}}``. With no waiter left
        the sandbox is warm at once. False (nothing done) if the reservation is not this route's any more or has
        expired: the caller must destroy what it started.
        """

    @abstractmethod
    def create_failed(self, route: Route, error: Mapping[str, Any]) -> bool:
        """Give the place back and answer the waiters with the wire ``error``. False if not this route's.

        With the code ``start_failed`` the thread backs off from its second failure in a row on: 1 s, then twice as
        long each time, a minute at most. `created` ends that, and so do ten minutes without another failure.
        """

    @abstractmethod
    def answer_waiters(self, identity: Identity, error: Mapping[str, Any]) -> int:
        """Answer every parked waiter of the thread with an error (no capacity, no home…); how many there were."""

    @abstractmethod
    def adopt(self, identity: Identity, spec: SandboxSpec, route: Route, *, data_id: str, age_s: float = 0.0) -> bool:
        """A node re-announces a sandbox it holds after the store lost its data (or under a new incarnation): live
        again if nothing newer is known of the thread (epoch ≤ route.epoch). Never refused for want of a place: it runs,
        and somebody may be in it; while the store recovers it counts as in use for a minute, until those who are in
        it renew their holds. False: somebody newer owns it or it is being removed, destroy it.

        Args:
            age_s: For how long it has existed, for a store that does not know any more.

        Raises:
            LeaseLost: The incarnation does not hold its node's lease; announce first (nothing is to be destroyed).
        """

    @abstractmethod
    def release(self, sandbox_id: str, owner: str, agent: str) -> bool:
        """The agent leaves; with no agent and no running op left the sandbox is warm.

        False if unknown or not the owner's.
        """

    @abstractmethod
    def renew_agents(self, agent: str, holds: Mapping[str, str], *, ttl_s: float) -> list[str]:
        """Hold every sandbox of ``holds`` (sandbox id → owner's digest) ``ttl_s`` longer; gives those that are not live
        or not that owner's, but none that a store which lost its data may hear of yet. A hold that lapsed or was lost
        is taken again; the sandbox is not warm then."""

    @abstractmethod
    def begin_stop(
        self,
        sandbox_id: str,
        *,
        owner: str | None,
        force: bool,
        reason: str,
        if_warm_before_ms: int | None = None,
        if_idle_before_ms: int | None = None,
    ) -> Recorded:
        """live → stopping. ``recorded`` with the route; not_found (also when ``owner`` is given and differs); busy: in
        use (an unexpired agent or op) and not ``force``, or with ``if_warm_before_ms``: not warm or warm since later
        than that; stopping: it already was (route given); lost: it was lost and is now forgotten; creating.

        ``if_idle_before_ms`` is for what is held but not used: agents do not protect it then, but it is busy with an
        unexpired op in it (even with ``force``), or when it was used at or after that time."""

    @abstractmethod
    def stopped(self, route: Route) -> bool:
        """Removal is confirmed: the place is free, the record gone, the thread's home stays; acquires that were parked
        meanwhile are requested again. False if not this route's or lost."""

    @abstractmethod
    def lost(self, route: Route, *, reason: str) -> bool:
        """The owner noticed the death of its sandbox: live/creating → lost, place freed. Claimed ops are left to the
        node. False if not this route's, stopping (`stopped` follows) or lost already."""

    @abstractmethod
    def sweep(self, node_id: str, incarnation: str) -> list[Swept]:
        """Node-local upkeep: drop expired agents, busy marks and reservations of this node's sandboxes; those with
        nobody in them become warm. Gives every live one of this incarnation, the longest unused first.
        Expired reservations: sandbox record removed, waiters answered NotStarted."""

    @abstractmethod
    def sandbox(self, sandbox_id: str) -> SandboxInfo | None:
        """What is known of a sandbox. ``state`` is WARM for a live one in the warm pool."""

    @abstractmethod
    def sandboxes(
        self, *, node_id: str | None = None, thread_id: str | None = None, user_id: str | None = None
    ) -> list[SandboxInfo]:
        """All known sandboxes, sorted by id; filters are ANDed. With ``node_id`` only those that take a place there
        are read, whatever the size of the fleet: creating, live, warm, stopping, but no lost ones."""

    @abstractmethod
    def route(self, sandbox_id: str) -> Route | None:
        """Where it lives now, whatever its state except lost."""

    @abstractmethod
    def thread_home(self, identity: Identity) -> str | None:
        """The data_id on which the thread's data lies, None if it never had a sandbox."""

    # --- operations --------------------------------------------------------------------------

    @abstractmethod
    def record(self, op: OpRecord, push: Push | None, *, max_inflight: int = 20_000) -> Recorded:
        """Record an operation, mark its sandbox busy and publish it, or say why not: see `Recorded`."""

    @abstractmethod
    def claim(self, op_id: str, route: Route) -> Claim:
        """Take the right to start the effect, once: see `Claim`."""

    @abstractmethod
    def finish(
        self,
        op_id: str,
        route: Route,
        *,
        outcome: str,
        reply: str,
        keep_s: float = 60.0,
        only_recorded: bool = False,
        stream: str = "",
    ) -> bool:
        """Answer the operation: state done, reply appended to the client's stream if that exists (to one that wants
        errors only, see `OpRecord`, nothing but those); inflight and busy entries removed. False if it was closed
        before (that answer stands), or is unknown.

        The record of an effect goes on protecting its op id until an hour past the deadline, with the reply if that
        has at most 4 KiB; a bigger one is kept ``keep_s`` seconds. Without effect ``keep_s`` is for the whole record.

        Args:
            outcome: ``ok`` or the error's code.
            reply: The reply JSON, at most 512 KiB.
            only_recorded: Leave a claimed operation alone and give False: whoever claimed it answers.
            stream: The output stream that ends with it, even if the store does not know the operation any more.
        """

    @abstractmethod
    def cancel(self, op_id: str) -> OpView | None:
        """Cancel: an unclaimed op is closed and its client answered with Cancelled (state closed in the view); a
        claimed one is flagged and returned (state claimed) so that the caller can tell its node; done/closed ones are
        returned as they are."""

    @abstractmethod
    def op(self, op_id: str) -> OpView | None:
        """The op record, if it is still kept."""

    @abstractmethod
    def ops(self, *, node_id: str | None = None, limit: int = 200) -> list[OpView]:
        """Inflight operations, oldest first."""

    @abstractmethod
    def queue_length(self, queue: str) -> int:
        """Messages that wait in a Celery queue."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Every key of this deployment (for tests and ``doctor``; O(n))."""

    @abstractmethod
    def close(self) -> None:
        """Close connections."""
