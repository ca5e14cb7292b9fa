"""Creating and destroying the node's sandboxes, and the upkeep of those it holds."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Completion, SandboxBackend, SandboxPlan
from sandfleet.errors import ConfigError, NotStarted, SandfleetError, StartFailed, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import SandboxInfo, SandboxSpec
from sandfleet.store.base import Route
from sandfleet.wire import OpMessage, node_queue
from sandfleet_workers.backends import load_backend

if TYPE_CHECKING:
    from sandfleet_workers.jobs import Job
    from sandfleet_workers.node import Held, Node

__all__ = ["Lifecycle", "thread_directory"]

log = logging.getLogger("sandfleet.node")

#: A recorded operation that is in no queue and in no pool for this long was lost on its way (a broker
#: connection that died between BRPOP and its answer).
_LOST_AFTER_MS = 3000
_CHILDREN = ("workspace", "uploads", "outputs")
_CONFIRM_WITHIN_S = 10.0
_COMPARE_EVERY_S = 5.0


def thread_directory(data_root: Path, identity: Identity) -> Path:
    """Where a thread's data lies: ``threads/{thread}`` or ``users/{user}/threads/{thread}``, then ``user-data``."""
    base = data_root if identity.user_id is None else data_root / "users" / identity.user_id
    return base / "threads" / identity.thread_id / "user-data"


class Lifecycle:
    """The node's sandboxes, from creation to removal. Its methods run on lifecycle threads."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._backends: dict[str, SandboxBackend] = {}
        self._lost_checked_at = 0.0
        self._compared_at = time.monotonic()
        self.run_dir = node.settings.run_root / node.node_id
        self.data_id = ""

    # --- backends ----------------------------------------------------------------------------

    def open(self) -> None:
        """Load every backend the node offers; leftovers of an earlier run of this node id are removed.

        Raises:
            ConfigError: A backend cannot run here; the message says what to do.
        """
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
        for name in self._node.settings.offered:
            kind = load_backend(name)
            problems = kind.check()
            if problems:
                raise ConfigError(f"backend {name} cannot run here: {'; '.join(problems)}", key="backend")
            self._backends[name] = kind(self._node.settings, self._died)

    def _backend(self, name: str) -> SandboxBackend:
        backend = self._backends.get(name)
        if backend is None:
            raise StartFailed(
                f"node {self._node.node_id} offers {', '.join(self._backends)}, not {name}",
                reason="no_backend",
            )
        return backend

    # --- node.create and node.destroy --------------------------------------------------------

    def run(self, job: Job, message: OpMessage) -> None:
        """Carry out a claimed lifecycle operation and finish it."""
        try:
            if message.kind == "node.create":
                value = self._create(message)
            else:
                value = self._destroy(message)
            completion = Completion(value=value)
        except SandfleetError as exc:
            completion = Completion(error=exc)
        except Exception as exc:
            log.exception("lifecycle.failed", extra={"op_id": job.op_id, "kind": message.kind})
            completion = Completion(error=StartFailed(f"{type(exc).__name__}: {exc}", reason="internal"))
        if completion.error is not None and message.kind == "node.create":
            self._node.store.create_failed(message.route, completion.error.to_wire())
        self._node.finish(job, completion)

    def _create(self, message: OpMessage) -> dict[str, Any]:
        from sandfleet_workers.node import Held  # noqa: PLC0415

        node, route = self._node, message.route
        spec = SandboxSpec.from_wire(message.args.get("spec") or {})
        backend = self._backend(spec.backend)
        started = time.monotonic()
        plan = SandboxPlan(
            sandbox_id=route.sandbox_id,
            identity=message.identity,
            epoch=route.epoch,
            user_data=self._user_data(message.identity),
            run_dir=self.run_dir / route.sandbox_id[:16],
            spec=spec,
        )
        connection = backend.create(plan)
        node.held[route.sandbox_id] = Held(route, message.identity, spec, backend, connection)
        if not self._confirmed(route):
            # The reservation lapsed or belongs to a newer epoch: what we started has no owner.
            self._end(route.sandbox_id)
            raise NotStarted(
                f"the reservation of sandbox {route.sandbox_id} lapsed while it started",
                sandbox_id=route.sandbox_id,
            )
        took_s = time.monotonic() - started
        log.info(
            "sandbox.started",
            extra={"sandbox_id": route.sandbox_id, "took_s": round(took_s, 4), "backend": spec.backend},
        )
        return {"took_s": took_s}

    def _confirmed(self, route: Route) -> bool:
        """Tell the store that the sandbox lives; a store that stays away means nobody will ever know of it."""
        until, asked = time.monotonic() + _CONFIRM_WITHIN_S, 0
        while True:
            asked += 1
            try:
                # Asked again, a confirmation whose answer got lost is refused: then the registry has it as live.
                store = self._node.store
                return store.created(route) or (asked > 1 and store.route(route.sandbox_id) == route)
            except StoreUnavailable:
                if time.monotonic() > until:
                    self._end(route.sandbox_id)
                    raise
                time.sleep(0.2)

    def _user_data(self, identity: Identity) -> Path:
        path = thread_directory(self._node.settings.data_root, identity)
        for child in _CHILDREN:
            (path / child).mkdir(parents=True, exist_ok=True)
        return path

    def _destroy(self, message: OpMessage) -> dict[str, Any]:
        node, route = self._node, message.route
        held = node.held.get(route.sandbox_id)
        if held is not None and held.route == route:
            held.stopping = True
            self._end(route.sandbox_id)
        if message.args.get("delete_data") is True:
            _remove_tree(thread_directory(node.settings.data_root, message.identity).parent)
        node.store.stopped(route)
        return {}

    def _end(self, sandbox_id: str) -> None:
        held = self._node.held.pop(sandbox_id, None)
        if held is not None:
            held.connection.close()
            held.backend.destroy(sandbox_id)

    # --- what happens by itself --------------------------------------------------------------

    def _died(self, sandbox_id: str, reason: str) -> None:
        """The backend saw a sandbox end by itself: record it at once, so that acquire can trust the registry."""
        held = self._node.held.pop(sandbox_id, None)
        if held is None or held.stopping:
            return
        log.warning("sandbox.died", extra={"sandbox_id": sandbox_id, "reason": reason})
        try:
            self._node.store.lost(held.route, reason=reason)
        except StoreUnavailable as exc:
            log.warning("sandbox.death_not_recorded", extra={"sandbox_id": sandbox_id, "error": str(exc)})
        held.connection.close()

    def tick(self, now_ms: int) -> None:
        """Upkeep, about once a second: expire holds, end idle warm sandboxes, answer lost messages."""
        node = self._node
        warm = node.store.sweep(node.node_id, node.incarnation)
        idle_ms = int(node.settings.idle_timeout_s * 1000)
        for sandbox_id, since_ms in warm:
            held = node.held.get(sandbox_id)
            if held is None:
                continue
            if idle_ms and since_ms < now_ms - idle_ms:
                self._retire(held, now_ms - idle_ms)
        if time.monotonic() - self._lost_checked_at > 1.0:
            self._lost_checked_at = time.monotonic()
            self._answer_lost(now_ms)
        if time.monotonic() - self._compared_at > _COMPARE_EVERY_S:
            self._compared_at = time.monotonic()
            self._compare(now_ms)

    def _compare(self, now_ms: int) -> None:
        """Make what this node runs and what the registry says of it agree again."""
        before = dict(self._node.held)
        infos = self._node.store.sandboxes(node_id=self._node.node_id)
        self._end_disowned(before, infos)
        long_ago = now_ms / 1000 - 2 * _LOST_AFTER_MS / 1000
        mine = [info for info in infos if info.incarnation == self._node.incarnation and info.used_at < long_ago]
        suspects = [info for info in mine if info.state in ("creating", "stopping") or info.sandbox_id not in before]
        if suspects:
            coming = {op.sandbox_id for op in self._node.store.ops(node_id=self._node.node_id, limit=100_000)}
            for info in suspects:
                if info.sandbox_id not in coming:
                    self._settle(info)

    def _end_disowned(self, before: Mapping[str, Held], infos: Sequence[SandboxInfo]) -> None:
        """End what this node runs and the registry does not know as its: nobody could ever reach or release it."""
        node = self._node
        known = {info.sandbox_id: (info.incarnation, info.epoch) for info in infos}
        for sandbox_id, held in before.items():
            route = held.route
            if held.stopping or known.get(sandbox_id) == (route.incarnation, route.epoch):
                continue
            log.warning("sandbox.disowned", extra={"sandbox_id": sandbox_id, "epoch": route.epoch})
            held.stopping = True
            node.pool.run_slow(functools.partial(self._end, sandbox_id))

    def _settle(self, info: SandboxInfo) -> None:
        """Finish what was decided and never came: the message got lost, or whoever was to send it died."""
        store, held = self._node.store, self._node.held.get(info.sandbox_id)
        route = Route(info.sandbox_id, info.node_id, info.incarnation, info.epoch)
        log.warning("sandbox.settled", extra={"sandbox_id": info.sandbox_id, "state": str(info.state)})
        if info.state == "creating":
            lost = NotStarted(f"the creation of sandbox {info.sandbox_id} was lost on its way", reason="message_lost")
            store.create_failed(route, lost.to_wire())
        elif info.state != "stopping":
            store.lost(route, reason="its node does not run it")
        elif held is None:
            store.stopped(route)
        elif not held.stopping:
            held.stopping = True
            self._node.pool.run_slow(functools.partial(self._end_and_tell, route))

    def _retire(self, held: Held, before_ms: int) -> None:
        stop = self._node.store.begin_stop(
            held.route.sandbox_id, owner=None, force=False, reason="idle", if_warm_before_ms=before_ms
        )
        if stop.route == held.route and stop.status in ("recorded", "stopping"):
            held.stopping = True
            self._node.pool.run_slow(lambda: self._end_and_tell(held.route))

    def _end_and_tell(self, route: Route) -> None:
        self._end(route.sandbox_id)
        self._node.store.stopped(route)

    def _answer_lost(self, now_ms: int) -> None:
        node = self._node
        if node.store.queue_length(node_queue(node.node_id)):
            return
        for view in node.store.ops(node_id=node.node_id, limit=500):
            mine = view.incarnation == node.incarnation and view.state == "recorded"
            if mine and view.recorded_at_ms < now_ms - _LOST_AFTER_MS and not node.pool.holds(view.op_id):
                log.warning("op.message_lost", extra={"op_id": view.op_id})
                route = Route(view.sandbox_id, view.node_id, view.incarnation, 0)
                error = NotStarted(f"the message of operation {view.op_id} was lost on its way", reason="message_lost")
                node.store.finish(view.op_id, route, outcome=error.code, reply=_error_reply(error))
                current = node.store.route(view.sandbox_id) if view.kind == "node.create" else None
                if current is not None:
                    node.store.create_failed(current, error.to_wire())  # whoever waits for it asks again

    def readopt(self) -> None:
        """The store lost its data: tell it what this node still holds."""
        node = self._node
        for sandbox_id, held in list(node.held.items()):
            if held.stopping:
                continue
            if not node.store.adopt(held.identity, held.spec, held.route, data_id=self.data_id):
                log.warning("sandbox.superseded", extra={"sandbox_id": sandbox_id})
                held.stopping = True
                node.pool.run_slow(functools.partial(self._end, sandbox_id))

    def close(self) -> None:
        """End what does not survive this process and say so."""
        node = self._node
        for held in list(node.held.values()):
            held.stopping = True
            try:
                if not node.fenced:
                    node.store.lost(held.route, reason="its node was stopped")
            except StoreUnavailable as exc:
                log.warning("sandbox.end_not_recorded", extra={"sandbox_id": held.route.sandbox_id, "error": str(exc)})
            try:
                self._end(held.route.sandbox_id)
            except (SandfleetError, OSError) as exc:
                log.warning("sandbox.end_failed", extra={"sandbox_id": held.route.sandbox_id, "error": str(exc)})
        for backend in self._backends.values():
            backend.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def _error_reply(error: SandfleetError) -> str:
    return json.dumps({"error": error.to_wire()})


def _remove_tree(path: Path) -> None:
    """Remove a thread's directory; what the sandbox planted in it (links, odd names) is removed, never followed."""
    if not shutil.rmtree.avoids_symlink_attacks:  # pragma: no cover - Linux always does
        raise StartFailed("this platform cannot remove a tree safely", reason="platform")
    if path.is_symlink() or not os.path.lexists(path):
        return
    shutil.rmtree(path)
