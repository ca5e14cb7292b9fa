"""The lives and ends of sandboxes in memory: the other half of the twin of `sandfleet.store.redis_sandboxes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandfleet.ids import Identity
from sandfleet.model import SandboxInfo, SandboxState
from sandfleet.store.base import Recorded, Route, Store, Swept
from sandfleet.store.codec import in_order, ms_of
from sandfleet.store.memory_state import Sandbox
from sandfleet.store.memory_steps import MemorySteps, is_blank, where


class MemorySandboxes(MemorySteps, Store):
    """The part of `MemoryStore` about sandboxes that are there."""

    def release(self, sandbox_id: str, owner: str, agent: str) -> bool:
        with self._lock:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is None or sandbox.owner != owner:
                return False
            self._agents[sandbox_id].pop(agent, None)
            if sandbox.state == SandboxState.LIVE:
                sandbox.used_ms = self._now()
                if self._settle(sandbox.route):
                    self._tell(sandbox_id, "warm", **where(sandbox.route))
            return True

    def renew_agents(self, agent: str, holds: Mapping[str, str], *, ttl_s: float) -> list[str]:
        with self._lock:
            gone = []
            unsure = next(iter(self._nodes), None) is None or self._recovering_until > self._now()
            for sandbox_id, owner in holds.items():
                sandbox = self._sandboxes.get(sandbox_id)
                if sandbox and sandbox.owner == owner and sandbox.state == SandboxState.LIVE:
                    self._agents[sandbox_id][agent] = self._now() + ms_of(ttl_s)
                    self._warm[sandbox.route.node_id].pop(sandbox_id, None)
                elif sandbox or not unsure:
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
        if_idle_before_ms: int | None = None,
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
            if if_idle_before_ms is not None:
                in_use = sandbox.used_ms >= if_idle_before_ms or self._has_ops(sandbox_id)
            else:
                in_use = not force and self._in_use(sandbox_id)
            if in_use:
                return Recorded("busy", now, route)
            self._warm[route.node_id].pop(sandbox_id, None)
            self._agents.pop(sandbox_id, None)
            sandbox.state, sandbox.used_ms = SandboxState.STOPPING, now
            self._stopping[route.node_id][sandbox_id] = now
            self._tell(sandbox_id, "stopping", reason=reason, **where(route))
            return Recorded("recorded", now, route)

    def stopped(self, route: Route) -> bool:
        with self._lock:
            states = (SandboxState.CREATING, SandboxState.LIVE, SandboxState.STOPPING)
            sandbox = self._ours(route, *states)
            if sandbox is None:
                return False
            self._forget(route)
            self._request_again(sandbox.owner)
            self._tell(route.sandbox_id, "stopped", **where(route))
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

    def sweep(self, node_id: str, incarnation: str) -> list[Swept]:
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.record.incarnation != incarnation:
                return []
            found: list[Swept] = []
            for sandbox_id, until in list(self._places[node_id].items()):
                sandbox = self._sandboxes.get(sandbox_id)
                if is_blank(sandbox_id):
                    if until <= self._now():
                        del self._places[node_id][sandbox_id]
                        self._kick()
                elif sandbox is None or sandbox.route.node_id != node_id:
                    del self._places[node_id][sandbox_id]
                elif sandbox.route.incarnation == incarnation:
                    found += self._sweep_one(sandbox, until)
            inflight = self._inflight[node_id]
            for op_id in [op_id for op_id in inflight if op_id not in self._ops]:
                del inflight[op_id]
            return in_order(found)

    def _sweep_one(self, sandbox: Sandbox, until: float) -> list[Swept]:
        now, route = self._now(), sandbox.route
        if sandbox.state == SandboxState.CREATING and until <= now:
            self._forget(route)
            error = {
                "code": "not_started",
                "message": "the creation took longer than its reservation",
                "facts": {"sandbox_id": route.sandbox_id},
            }
            self._fail_waiters(sandbox.owner, error)
            self._tell(route.sandbox_id, "reservation_expired", **where(route))
            return []
        for holders in (self._agents[route.sandbox_id], self._busy[route.sandbox_id]):
            for holder in [name for name, expiry in holders.items() if expiry <= now]:
                del holders[holder]
        if self._settle(route):
            self._tell(route.sandbox_id, "warm", **where(route))
        self._keep_alive(sandbox.owner, sandbox)
        if sandbox.state != SandboxState.LIVE:
            return []
        since, busy = self._warm[route.node_id].get(route.sandbox_id), self._has_ops(route.sandbox_id)
        return [Swept(route.sandbox_id, sandbox.created_ms, sandbox.used_ms, since, busy)]

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
                restored=sandbox.restored,
            )

    def sandboxes(
        self, *, node_id: str | None = None, thread_id: str | None = None, user_id: str | None = None
    ) -> list[SandboxInfo]:
        with self._lock:
            ids = list(self._sandboxes) if node_id is None else list(self._places[node_id])
            found = [info for sid in ids if (info := self.sandbox(sid)) is not None]
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


def creation_ended(sandbox_id: str, reason: str) -> dict[str, Any]:
    """The wire error for those who waited for a creation that ended."""
    return {
        "code": "not_started",
        "message": f"the sandbox was not created: {reason}",
        "facts": {"sandbox_id": sandbox_id, "reason": reason},
    }
