"""Threads and sandboxes in memory: the twin of `sandfleet.store.redis_sandboxes`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sandfleet.errors import Busy, LeaseLost
from sandfleet.ids import Identity, sandbox_id_candidates
from sandfleet.model import NodeState, SandboxInfo, SandboxSpec, SandboxState
from sandfleet.store.base import Acquired, Push, Recorded, Reserved, Route, Store, Waiter
from sandfleet.store.codec import ms_of
from sandfleet.store.memory_state import ADOPTED_MS, KEEP_MS, MAX_WAITERS, MemoryState, Sandbox, Thread, Waiting, _where


class MemorySandboxes(MemoryState, Store):
    """The part of `MemoryStore` about threads and sandboxes."""

    def acquire(self, identity: Identity, waiter: Waiter, *, wait_s: float, push: Push | None) -> Acquired:
        with self._lock:
            now, digest = self._now(), identity.digest
            state, sandbox = self._thread_state(digest)
            if state == "live" and sandbox is not None:
                route = sandbox.route
                self._agents[route.sandbox_id][waiter.agent] = now + ms_of(waiter.agent_ttl_s)
                was_warm = self._warm[route.node_id].pop(route.sandbox_id, None) is not None
                sandbox.used_ms = now
                self._touch(digest, sandbox)
                return Acquired("live", route, was_warm)
            return self._park(digest, waiter, now + ms_of(wait_s), push, requested=state is None)

    def _park(self, digest: str, waiter: Waiter, until: int, push: Push | None, *, requested: bool) -> Acquired:
        now = self._now()
        waiting = self._waiting.setdefault(digest, Waiting())
        waiting.parked = {op: entry for op, entry in waiting.parked.items() if entry[1] > now}
        others = sum(1 for op in waiting.parked if op != waiter.op_id)
        if others >= MAX_WAITERS:
            raise Busy("too many acquires wait for this thread", retry_after_s=1.0)
        waiting.parked[waiter.op_id] = (waiter, until)
        if push is not None:
            asked = waiting.requested_ms
            fresh = others > 0 and asked is not None and asked > now - 2000
            if requested and not fresh:
                waiting.requested_ms = now
                self._push(push)
            waiting.push = push
        return Acquired("requested" if requested else "creating")

    def _touch(self, digest: str, sandbox: Sandbox) -> None:
        self._sandboxes.touch(sandbox.route.sandbox_id, KEEP_MS)
        self._threads.touch(digest, KEEP_MS)
        self._ids.touch(sandbox.route.sandbox_id, KEEP_MS)

    def reserve(
        self,
        identity: Identity,
        spec: SandboxSpec,
        *,
        node_id: str,
        incarnation: str,
        data_id: str,
        expires_s: float,
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
            if thread is None and self._recovering_until > now:
                return Reserved("recovering")
            node = self._nodes.get(node_id)
            if (
                node is None
                or node.state != NodeState.READY
                or not node.record.incarnation == incarnation == self._leases.get(node_id)
            ):
                return Reserved("node_down")
            own = old is not None and self._place_until(node_id, old.route.sandbox_id) > now
            if self._taken(node_id) - own >= node.record.replicas:
                return Reserved("full")
            sandbox_id = next(c for c in sandbox_id_candidates(digest) if (self._ids.get(c) or digest) == digest)
            epoch = max((thread.epoch if thread else 0) + 1, now * 1000)
            route = Route(sandbox_id, node_id, incarnation, epoch)
            if old is not None:
                self._forget(old.route)
            self._own(identity, spec, route, data_id, SandboxState.CREATING)
            self._places[node_id][sandbox_id] = now + ms_of(expires_s)
            self._tell(sandbox_id, "reserved", **_where(route))
            return Reserved("reserved", route)

    def _own(self, identity: Identity, spec: SandboxSpec, route: Route, data_id: str, state: SandboxState) -> None:
        now, digest, sandbox_id = self._now(), identity.digest, route.sandbox_id
        before = self._sandboxes.get(sandbox_id)
        created = before.created_ms if before else now
        self._threads.put(digest, Thread(sandbox_id, data_id, route.epoch), KEEP_MS)
        self._ids.put(sandbox_id, digest, KEEP_MS)
        sandbox = Sandbox(digest, identity.thread_id, identity.user_id, spec.backend, state, route, created, now)
        self._sandboxes.put(sandbox_id, sandbox, KEEP_MS)

    def created(self, route: Route) -> bool:
        with self._lock:
            sandbox = self._ours(route, SandboxState.CREATING)
            if sandbox is None or self._place_until(route.node_id, route.sandbox_id) <= self._now():
                return False
            self._places[route.node_id][route.sandbox_id] = math.inf
            sandbox.state, sandbox.used_ms = SandboxState.LIVE, self._now()
            if not self._grant_waiters(sandbox.owner, route, new=True):
                self._warm[route.node_id][route.sandbox_id] = self._now()
            self._tell(route.sandbox_id, "live", **_where(route))
            return True

    def create_failed(self, route: Route, error: Mapping[str, Any]) -> bool:
        with self._lock:
            sandbox = self._ours(route, SandboxState.CREATING)
            if sandbox is None:
                return False
            self._forget(route)
            self._fail_waiters(sandbox.owner, error)
            self._tell(route.sandbox_id, "create_failed", code=str(error.get("code", "")), **_where(route))
            return True

    def _ours(self, route: Route, *states: SandboxState) -> Sandbox | None:
        sandbox = self._sandboxes.get(route.sandbox_id)
        return sandbox if sandbox and sandbox.route == route and sandbox.state in states else None

    def answer_waiters(self, identity: Identity, error: Mapping[str, Any]) -> int:
        with self._lock:
            return self._fail_waiters(identity.digest, error)

    def adopt(self, identity: Identity, spec: SandboxSpec, route: Route, *, data_id: str) -> bool:
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
            self._own(identity, spec, route, data_id, SandboxState.LIVE)
            self._places[route.node_id][route.sandbox_id] = math.inf
            self._warm[route.node_id].pop(route.sandbox_id, None)
            self._grant_waiters(digest, route, new=False)
            if self._recovering_until > self._now():
                self._agents[route.sandbox_id]["recovering"] = self._now() + ADOPTED_MS
            self._settle(route)
            self._tell(route.sandbox_id, "adopted", **_where(route))
            return True

    def release(self, sandbox_id: str, owner: str, agent: str) -> bool:
        with self._lock:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is None or sandbox.owner != owner:
                return False
            self._agents[sandbox_id].pop(agent, None)
            if sandbox.state == SandboxState.LIVE:
                sandbox.used_ms = self._now()
                if self._settle(sandbox.route):
                    self._tell(sandbox_id, "warm", **_where(sandbox.route))
            return True

    def renew_agents(self, agent: str, holds: Mapping[str, str], *, ttl_s: float) -> list[str]:
        with self._lock:
            gone = []
            for sandbox_id, owner in holds.items():
                sandbox = self._sandboxes.get(sandbox_id)
                if sandbox and sandbox.owner == owner and sandbox.state == SandboxState.LIVE:
                    self._agents[sandbox_id][agent] = self._now() + ms_of(ttl_s)
                    self._warm[sandbox.route.node_id].pop(sandbox_id, None)
                else:
                    gone.append(sandbox_id)
            return gone

    def begin_stop(
        self,
        sandbox_id: str,
        *,
        owner: str | None,
        force: bool,
        reason: str,
        if_warm_before_ms: int | None = None,
    ) -> Recorded:
        with self._lock:
            now, sandbox = self._now(), self._sandboxes.get(sandbox_id)
            if sandbox is None or (owner is not None and sandbox.owner != owner):
                return Recorded("not_found", now)
            route = sandbox.route
            if sandbox.state == SandboxState.LOST:
                self._sandboxes.drop(sandbox_id)
                return Recorded("lost", now, route)
            if sandbox.state != SandboxState.LIVE:
                return Recorded(str(sandbox.state), now, route)
            since = self._warm[route.node_id].get(sandbox_id)
            if if_warm_before_ms is not None and (since is None or since > if_warm_before_ms):
                return Recorded("busy", now, route)
            if not force and self._in_use(sandbox_id):
                return Recorded("busy", now, route)
            self._warm[route.node_id].pop(sandbox_id, None)
            self._agents.pop(sandbox_id, None)
            sandbox.state, sandbox.used_ms = SandboxState.STOPPING, now
            self._tell(sandbox_id, "stopping", reason=reason, **_where(route))
            return Recorded("recorded", now, route)

    def stopped(self, route: Route) -> bool:
        with self._lock:
            states = (SandboxState.CREATING, SandboxState.LIVE, SandboxState.STOPPING)
            sandbox = self._ours(route, *states)
            if sandbox is None:
                return False
            self._forget(route)
            self._request_again(sandbox.owner)
            self._tell(route.sandbox_id, "stopped", **_where(route))
            return True

    def lost(self, route: Route, *, reason: str) -> bool:
        with self._lock:
            sandbox = self._ours(route, SandboxState.CREATING, SandboxState.LIVE)
            if sandbox is None:
                return False
            creating = sandbox.state == SandboxState.CREATING
            self._make_lost(sandbox, reason)
            if creating:
                self._fail_waiters(sandbox.owner, creation_ended(route.sandbox_id, reason))
            return True

    def sweep(self, node_id: str, incarnation: str) -> list[tuple[str, int]]:
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.record.incarnation != incarnation:
                return []
            for sandbox_id, until in list(self._places[node_id].items()):
                sandbox = self._sandboxes.get(sandbox_id)
                if sandbox is None or sandbox.route.node_id != node_id:
                    del self._places[node_id][sandbox_id]
                elif sandbox.route.incarnation == incarnation:
                    self._sweep_one(sandbox, until)
            inflight = self._inflight[node_id]
            for op_id in [op_id for op_id in inflight if op_id not in self._ops]:
                del inflight[op_id]
            return sorted(self._warm[node_id].items(), key=lambda item: (item[1], item[0]))

    def _sweep_one(self, sandbox: Sandbox, until: float) -> None:
        now, route = self._now(), sandbox.route
        if sandbox.state == SandboxState.CREATING and until <= now:
            self._forget(route)
            error = {
                "code": "not_started",
                "message": "the creation took longer than its reservation",
                "facts": {"sandbox_id": route.sandbox_id},
            }
            self._fail_waiters(sandbox.owner, error)
            self._tell(route.sandbox_id, "reservation_expired", **_where(route))
            return
        for holders in (self._agents[route.sandbox_id], self._busy[route.sandbox_id]):
            for holder in [name for name, expiry in holders.items() if expiry <= now]:
                del holders[holder]
        if self._settle(route):
            self._tell(route.sandbox_id, "warm", **_where(route))
        self._touch(sandbox.owner, sandbox)

    def sandbox(self, sandbox_id: str) -> SandboxInfo | None:
        with self._lock:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is None:
                return None
            route = sandbox.route
            since = self._warm[route.node_id].get(sandbox_id) if sandbox.state == SandboxState.LIVE else None
            return SandboxInfo(
                sandbox_id=sandbox_id,
                thread_id=sandbox.thread_id,
                user_id=sandbox.user_id,
                state=SandboxState.WARM if since is not None else sandbox.state,
                node_id=route.node_id,
                incarnation=route.incarnation,
                epoch=route.epoch,
                backend=sandbox.backend,
                created_at=sandbox.created_ms / 1000,
                used_at=(sandbox.used_ms if since is None else since) / 1000,
                agents=self._count(self._agents[sandbox_id]),
                ops=self._count(self._busy[sandbox_id]),
            )

    def sandboxes(
        self, *, node_id: str | None = None, thread_id: str | None = None, user_id: str | None = None
    ) -> list[SandboxInfo]:
        with self._lock:
            found = [info for sid in self._sandboxes if (info := self.sandbox(sid)) is not None]
        return sorted(
            (
                info
                for info in found
                if (node_id is None or info.node_id == node_id)
                and (thread_id is None or info.thread_id == thread_id)
                and (user_id is None or info.user_id == user_id)
            ),
            key=lambda info: info.sandbox_id,
        )

    def route(self, sandbox_id: str) -> Route | None:
        with self._lock:
            sandbox = self._sandboxes.get(sandbox_id)
            return sandbox.route if sandbox and sandbox.state != SandboxState.LOST else None

    def thread_home(self, identity: Identity) -> str | None:
        with self._lock:
            thread = self._threads.get(identity.digest)
            return thread.data_id if thread else None

    def forget_home(self, identity: Identity) -> None:
        with self._lock:
            thread = self._threads.get(identity.digest)
            if thread is not None:
                thread.data_id = None


def creation_ended(sandbox_id: str, reason: str) -> dict[str, Any]:
    """The wire error for those who waited for a creation that ended."""
    return {
        "code": "not_started",
        "message": f"the sandbox was not created: {reason}",
        "facts": {"sandbox_id": sandbox_id, "reason": reason},
    }
