"""Threads, sandboxes and their lives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sandfleet.checkpoints import Restoration
from sandfleet.errors import Busy, LeaseLost
from sandfleet.ids import Identity, sandbox_id_candidates
from sandfleet.model import SandboxInfo, SandboxSpec
from sandfleet.store.base import Acquired, Push, Recorded, Reserved, Route, Store, Swept, Waiter
from sandfleet.store.codec import (
    brief_error,
    in_order,
    ms_of,
    parse_route,
    route_text,
    sandbox_info,
    swept,
    wire_error,
)
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_ACQUIRE, _RESERVE, _CREATED, _CREATE_FAILED = map(load, ("acquire", "reserve", "created", "create_failed"))
_RELEASE, _RENEW_AGENTS, _BEGIN_STOP, _STOPPED = map(load, ("release", "renew_agents", "begin_stop", "stopped"))
_LOST, _SWEEP, _SANDBOX, _SANDBOXES, _VIEWS = map(load, ("lost", "sweep", "sandbox", "sandboxes", "views"))
_ADOPT, _ANSWER = map(load, ("adopt", "answer_waiters"))
_PAGE = 200


class SandboxesMixin(Store):
    """The part of `RedisStore` about threads and sandboxes."""

    _link: Link
    _keys: Keys

    def acquire(self, identity: Identity, waiter: Waiter, *, wait_s: float, push: Push | None) -> Acquired:
        status, *rest = self._link.run(
            _ACQUIRE,
            identity.digest,
            waiter.op_id,
            waiter.reply_to,
            waiter.agent,
            ms_of(waiter.agent_ttl_s),
            ms_of(wait_s),
            *((push.queue, push.message) if push else ("", "")),
        )
        if status == "crowded":
            raise Busy("too many acquires wait for this thread", retry_after_s=1.0)
        if status == "live":
            return Acquired(status, parse_route(rest[0]), bool(rest[1]))
        if status == "backing_off":
            return Acquired(status, retry_after_s=rest[0] / 1000, error=rest[1])
        return Acquired(status)

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
        digest = identity.digest
        status, *rest = self._link.run(
            _RESERVE,
            digest,
            identity.thread_id,
            identity.user_id or "",
            spec.backend,
            json.dumps(spec.to_wire(), separators=(",", ":")),
            node_id,
            incarnation,
            data_id,
            ms_of(expires_s),
            int(burst),
            max(0, max_per_user),
            int(from_line),
            spec_digest,
            *sandbox_id_candidates(digest),
        )
        if status == "quota":
            return Reserved(status, evict=rest[1])
        blank = rest[1] if status == "reserved" else ""
        return Reserved(status, parse_route(rest[0]) if rest else None, blank=blank)

    def created(self, route: Route, *, restored: Restoration | None = None) -> bool:
        told = json.dumps(restored.to_wire(), separators=(",", ":")) if restored is not None else ""
        return bool(self._link.run(_CREATED, route.sandbox_id, route.node_id, route_text(route), told))

    def create_failed(self, route: Route, error: Mapping[str, Any]) -> bool:
        code = str(error.get("code", ""))
        args = (route.sandbox_id, route_text(route), wire_error(error), code, brief_error(error))
        return bool(self._link.run(_CREATE_FAILED, *args))

    def answer_waiters(self, identity: Identity, error: Mapping[str, Any]) -> int:
        return int(self._link.run(_ANSWER, identity.digest, wire_error(error)))

    def adopt(self, identity: Identity, spec: SandboxSpec, route: Route, *, data_id: str, age_s: float = 0.0) -> bool:
        answer = self._link.run(
            _ADOPT,
            identity.digest,
            identity.thread_id,
            identity.user_id or "",
            spec.backend,
            json.dumps(spec.to_wire(), separators=(",", ":")),
            route.sandbox_id,
            route.node_id,
            route.incarnation,
            str(route.epoch),
            data_id,
            max(0, round(age_s * 1000)),
        )
        if answer == "no_lease":
            raise LeaseLost(
                f"incarnation {route.incarnation} does not hold the lease of node {route.node_id}; announce first",
                node_id=route.node_id,
            )
        return bool(answer == "adopted")

    def release(self, sandbox_id: str, owner: str, agent: str) -> bool:
        return bool(self._link.run(_RELEASE, sandbox_id, owner, agent))

    def renew_agents(self, agent: str, holds: Mapping[str, str], *, ttl_s: float) -> list[str]:
        gone: list[str] = []
        flat = [part for hold in holds.items() for part in hold]
        for start in range(0, len(flat), 2 * _PAGE):
            gone += self._link.run(_RENEW_AGENTS, agent, ms_of(ttl_s), *flat[start : start + 2 * _PAGE])
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
        conditions = ["" if ms is None else ms for ms in (if_warm_before_ms, if_idle_before_ms)]
        status, now, *rest = self._link.run(_BEGIN_STOP, sandbox_id, owner or "", int(force), reason, *conditions)
        return Recorded(status, now, parse_route(rest[0]) if rest else None)

    def stopped(self, route: Route) -> bool:
        return bool(self._link.run(_STOPPED, route.sandbox_id, route_text(route)))

    def lost(self, route: Route, *, reason: str) -> bool:
        return bool(self._link.run(_LOST, route.sandbox_id, route_text(route), reason))

    def sweep(self, node_id: str, incarnation: str) -> list[Swept]:
        return in_order(map(swept, self._link.run(_SWEEP, node_id, incarnation)))

    def sandbox(self, sandbox_id: str) -> SandboxInfo | None:
        row = self._link.run(_SANDBOX, sandbox_id)
        return sandbox_info(row) if row else None

    def sandboxes(
        self, *, node_id: str | None = None, thread_id: str | None = None, user_id: str | None = None
    ) -> list[SandboxInfo]:
        rows = self._rows() if node_id is None else self._rows_of(node_id)
        return [
            info
            for info in map(sandbox_info, rows)
            if (node_id is None or info.node_id == node_id)
            and (thread_id is None or info.thread_id == thread_id)
            and (user_id is None or info.user_id == user_id)
        ]

    def _rows(self) -> Iterator[list[Any]]:
        """Page by page, so that a fleet of thousands does not hold the server up."""
        after = "-"
        while True:
            last, rows = self._link.run(_SANDBOXES, after, _PAGE)
            yield from rows
            if not last:
                return
            after = f"({last}"

    def _rows_of(self, node_id: str) -> Iterator[list[Any]]:
        ids = sorted(self._link.command("ZRANGE", self._keys.places(node_id), 0, -1))
        for start in range(0, len(ids), _PAGE):
            yield from self._link.run(_VIEWS, *ids[start : start + _PAGE])

    def route(self, sandbox_id: str) -> Route | None:
        state, text = self._link.command("HMGET", self._keys.sandbox(sandbox_id), "state", "route")
        return parse_route(text) if text and state != "lost" else None

    def thread_home(self, identity: Identity) -> str | None:
        home = self._link.command("HGET", self._keys.thread(identity.digest), "data_id")
        return str(home) if home is not None else None
