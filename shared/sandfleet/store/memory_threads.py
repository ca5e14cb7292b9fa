"""How a thread comes to its sandbox, in memory: one half of the twin of `sandfleet.store.redis_sandboxes`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sandfleet.checkpoints import Restoration
from sandfleet.errors import Busy, LeaseLost
from sandfleet.ids import Identity, sandbox_id_candidates
from sandfleet.model import NodeState, SandboxSpec, SandboxState
from sandfleet.store.base import Acquired, Push, Reserved, Route, Store, Waiter
from sandfleet.store.codec import brief_error, ms_of
from sandfleet.store.memory_state import KEEP_MS, Failing, Sandbox, Thread, Waiting
from sandfleet.store.memory_steps import STOPPING_MS, MemorySteps, where

ADOPTED_MS = 25_000
FAILING_MS = 600_000
MAX_WAITERS = 1000


class MemoryThreads(MemorySteps, Store):
    """The part of `MemoryStore` about acquiring, placing, creating and adopting."""

    def acquire(self, identity: Identity, waiter: Waiter, *, wait_s: float, push: Push | None) -> Acquired:
        with self._lock:
            now, digest = self._now(), identity.digest
            state, sandbox = self._thread_state(digest)
            if state == "live" and sandbox is not None:
                route = sandbox.route
                self._agents[route.sandbox_id][waiter.agent] = now + ms_of(waiter.agent_ttl_s)
                was_warm = self._warm[route.node_id].pop(route.sandbox_id, None) is not None
                sandbox.used_ms = now
                self._keep_alive(digest, sandbox)
                return Acquired("live", route, was_warm)
            failing = self._failing.get(digest) if state is None else None
            if failing is not None and failing.retry_at_ms > now:
                left_s = (failing.retry_at_ms - now) / 1000
                return Acquired("backing_off", retry_after_s=left_s, error=failing.error)
            return self._wait(digest, waiter, now + ms_of(wait_s), push, requested=state is None)

    def _wait(self, digest: str, waiter: Waiter, until: int, push: Push | None, *, requested: bool) -> Acquired:
        now = self._now()
        waiting = self._waiting.setdefault(digest, Waiting())
        waiting.parked = {op: entry for op, entry in waiting.parked.items() if entry[1] > now}
        others = sum(1 for op in waiting.parked if op != waiter.op_id)
        if others >= MAX_WAITERS:
            raise Busy("too many acquires wait for this thread", retry_after_s=1.0)
        waiting.parked[waiter.op_id] = (waiter, until)
        waiting.until_ms = max(waiting.until_ms, until)
        parked = requested and digest in self._in_line
        if push is not None:
            asked = waiting.requested_ms
            fresh = others > 0 and asked is not None and asked > now - 2000
            if requested and not parked and not fresh:
                waiting.requested_ms = now
                self._push(push)
            waiting.push = push
        if parked:
            return Acquired("parked")
        return Acquired("requested" if requested else "creating")

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
        with self._lock:
            now, digest = self._now(), identity.digest
            state, old = self._thread_state(digest)
            if state is not None and old is not None:
                if state == "live":
                    self._grant_waiters(digest, old.route, new=False)
                    return Reserved("live", old.route)
                return Reserved("creating", old.route)
            thread = self._threads.get(digest)
            if (thread is None or not thread.epoch) and self._recovering_until > now:
                return Reserved("recovering")
            if from_line and not (digest in self._in_line and self._awaited(digest)):
                self._leave_line(digest)
                return Reserved("withdrawn")
            refusal, blank = self._room_for(
                identity, old, node_id, incarnation, burst, max_per_user, from_line, spec_digest
            )
            if refusal is not None:
                return refusal
            sandbox_id = next(c for c in sandbox_id_candidates(digest) if (self._ids.get(c) or digest) == digest)
            epoch = max((thread.epoch if thread else 0) + 1, now * 1000)
            route = Route(sandbox_id, node_id, incarnation, epoch)
            if old is not None:
                self._forget(old.route)
            if blank:
                self._drop_blank(node_id, blank)
            self._own(identity, spec, route, data_id, SandboxState.CREATING)
            self._take_place(sandbox_id, node_id, identity.user_id, now + ms_of(expires_s))
            self._reached = max(self._reached, self._leave_line(digest) or 0)
            self._tell(sandbox_id, "reserved", **where(route), **({"blank": blank} if blank else {}))
            return Reserved("reserved", route, blank=blank)

    def _room_for(
        self,
        identity: Identity,
        old: Sandbox | None,
        node_id: str,
        incarnation: str,
        burst: bool,
        max_per_user: int,
        from_line: bool,
        spec_digest: str,
    ) -> tuple[Reserved | None, str]:
        """Why the thread gets no place on this node now, or None; and the blank whose place it takes over, or ""."""
        node = self._nodes.get(node_id)
        if (
            node is None
            or node.state != NodeState.READY
            or not node.record.incarnation == incarnation == self._leases.get(node_id)
        ):
            return Reserved("node_down"), ""
        room, taken = node.record.replicas, self._taken(node_id)
        taken -= old is not None and self._place_until(node_id, old.route.sandbox_id) > self._now()
        blank = self._choose_blank(node_id, spec_digest, any_kind=taken >= room)
        if not from_line and self._in_line and not (burst and taken >= room and not blank):
            return Reserved("queued"), ""
        if max_per_user > 0 and identity.user_id is not None:
            held, evict = self._of_user(identity.user_id, old)
            if held >= max_per_user:
                return Reserved("quota", evict=evict), ""
        if taken >= room + burst * node.record.burst_limit and not blank:
            return Reserved("full"), ""
        return None, blank

    def _of_user(self, user_id: str, old: Sandbox | None) -> tuple[int, str]:
        """How many places the user has, but for the one that is superseded, and the longest warm sandbox among them:
        none while another one is being removed, which makes the room."""
        now, held, leaving, warm = self._now(), 0, False, []
        for sandbox_id in [sid for sid, until in self._users[user_id].items() if until > now]:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is None or sandbox.state == SandboxState.LOST:
                del self._users[user_id][sandbox_id]
            elif old is None or sandbox_id != old.route.sandbox_id:
                held += 1
                node_id = sandbox.route.node_id
                leaving = leaving or self._stopping[node_id].get(sandbox_id, 0) > now - STOPPING_MS
                since = self._warm[node_id].get(sandbox_id)
                if since is not None and self._leases.get(node_id) == sandbox.route.incarnation:
                    warm.append((since, sandbox_id))
        return held, min(warm)[1] if warm and not leaving else ""

    def _own(
        self,
        identity: Identity,
        spec: SandboxSpec,
        route: Route,
        data_id: str,
        state: SandboxState,
        *,
        age_ms: int = 0,
    ) -> None:
        now, digest, sandbox_id = self._now(), identity.digest, route.sandbox_id
        before = self._sandboxes.get(sandbox_id)
        created = before.created_ms if before else now - age_ms
        thread = self._threads.get(digest)
        # The data of a thread that has some moves with `created`.
        stays = state == SandboxState.CREATING and thread is not None and thread.data_id is not None
        home = thread.data_id if stays and thread is not None else data_id
        self._threads.put(digest, Thread(sandbox_id, home, route.epoch), KEEP_MS)
        self._ids.put(sandbox_id, digest, KEEP_MS)
        sandbox = Sandbox(
            digest, identity.thread_id, identity.user_id, spec.backend, state, route, created, now, data_id
        )
        self._sandboxes.put(sandbox_id, sandbox, KEEP_MS)

    def created(self, route: Route, *, restored: Restoration | None = None) -> bool:
        with self._lock:
            sandbox = self._ours(route, SandboxState.CREATING)
            if sandbox is None or self._place_until(route.node_id, route.sandbox_id) <= self._now():
                return False
            self._take_place(route.sandbox_id, route.node_id, sandbox.user_id, math.inf)
            self._failing.drop(sandbox.owner)
            sandbox.state, sandbox.used_ms = SandboxState.LIVE, self._now()
            sandbox.restored = restored
            if (thread := self._threads.get(sandbox.owner)) is not None:
                thread.data_id = sandbox.data_id
            if not self._grant_waiters(sandbox.owner, route, new=True):
                self._warm[route.node_id][route.sandbox_id] = self._now()
                self._kick()
            self._tell(route.sandbox_id, "live", **where(route))
            return True

    def create_failed(self, route: Route, error: Mapping[str, Any]) -> bool:
        with self._lock:
            sandbox = self._ours(route, SandboxState.CREATING)
            if sandbox is None:
                return False
            self._forget(route)
            if error.get("code") == "start_failed":
                self._back_off(sandbox.owner, error)
            self._fail_waiters(sandbox.owner, error)
            self._tell(route.sandbox_id, "create_failed", code=str(error.get("code", "")), **where(route))
            return True

    def _back_off(self, digest: str, error: Mapping[str, Any]) -> None:
        """A thread whose sandbox cannot be started is tried again at once, then after ever longer pauses."""
        failing = self._failing.get(digest) or Failing()
        failing.fails += 1
        pause_ms = min(60_000, 500 * 2 ** min(failing.fails - 1, 20)) if failing.fails > 1 else 0
        failing.retry_at_ms, failing.error = self._now() + pause_ms, brief_error(error)
        self._failing.put(digest, failing, FAILING_MS)

    def answer_waiters(self, identity: Identity, error: Mapping[str, Any]) -> int:
        with self._lock:
            return self._fail_waiters(identity.digest, error)

    def adopt(self, identity: Identity, spec: SandboxSpec, route: Route, *, data_id: str, age_s: float = 0.0) -> bool:
        with self._lock:
            node, digest = self._nodes.get(route.node_id), identity.digest
            held = self._leases.get(route.node_id)
            if node is None or not node.record.incarnation == route.incarnation == held:
                raise LeaseLost(
                    f"incarnation {route.incarnation} does not hold the lease of node {route.node_id}; announce first",
                    node_id=route.node_id,
                )
            thread = self._threads.get(digest)
            if (thread and thread.epoch > route.epoch) or (self._ids.get(route.sandbox_id) or digest) != digest:
                return False
            old = self._sandboxes.get(thread.sandbox_id) if thread else None
            if old is not None and old.owner != digest:
                old = None
            same = old is not None and old.route.epoch == route.epoch
            if old is not None and same:
                mine = (old.route.node_id, old.route.sandbox_id) == (route.node_id, route.sandbox_id)
                if not mine or old.state == SandboxState.STOPPING:
                    return False
                if old.state == SandboxState.LIVE and old.route == route:
                    return True
            if old is not None and not same:
                self._forget(old.route)
            self._own(identity, spec, route, data_id, SandboxState.LIVE, age_ms=max(0, round(age_s * 1000)))
            self._take_place(route.sandbox_id, route.node_id, identity.user_id, math.inf)
            self._warm[route.node_id].pop(route.sandbox_id, None)
            self._grant_waiters(digest, route, new=False)
            if self._recovering_until > self._now():
                self._agents[route.sandbox_id]["recovering"] = self._now() + ADOPTED_MS
            self._settle(route)
            self._tell(route.sandbox_id, "adopted", **where(route))
            return True
