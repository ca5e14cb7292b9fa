"""Creating and destroying the node's sandboxes."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Completion, SandboxBackend
from sandfleet.errors import Busy, ConfigError, NotStarted, SandfleetError, StartFailed, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.store.base import Route
from sandfleet.wire import OpMessage
from sandfleet_workers.adopting import Adoption
from sandfleet_workers.backends import load_backend, local_dirs
from sandfleet_workers.backends.mounts import PlannedMount, node_mounts
from sandfleet_workers.blanks import BlankPool
from sandfleet_workers.checkpoints.keeper import Checkpoints
from sandfleet_workers.cordoning import FailureRow
from sandfleet_workers.creating import Creating, confirmed, outlives
from sandfleet_workers.holdings import Held
from sandfleet_workers.homes import Homes
from sandfleet_workers.leftovers import Leftovers
from sandfleet_workers.rolling import Rolling
from sandfleet_workers.sandbox_dirs import SandboxDirs
from sandfleet_workers.upkeep import Upkeep

if TYPE_CHECKING:
    from sandfleet_workers.jobs import Job
    from sandfleet_workers.node import Node

__all__ = ["Lifecycle"]

log = logging.getLogger("sandfleet.node")

_GONE_WITHIN_S = 60.0
_ENDING_AT_ONCE = 8
_CORDON_REASON_CHARS = 300


class Lifecycle:
    """The node's sandboxes, from creation to removal. Its methods run on lifecycle threads."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._backends: dict[str, SandboxBackend] = {}
        #: Of every sandbox, from the settings.
        self._mounts: tuple[PlannedMount, ...] = ()
        self._failures = FailureRow(node.settings.cordon_after_failures)
        #: What is being ended at this moment; set once it is gone.
        self._ending: dict[Route, threading.Event] = {}
        self.upkeep = Upkeep(node, self)
        self.checkpoints = Checkpoints(node)
        limits = node.settings.container
        self.dirs = SandboxDirs(
            node.settings.data_root, node.node_id, max_bytes=limits.disk_bytes, max_inodes=limits.disk_inodes
        )
        self.homes = Homes(node)
        #: Set before `open`.
        self.data_id = ""

    @property
    def run_dir(self) -> Path:
        """Where the sockets of this node's sandboxes lie. Data roots may share a run_root, and number nodes alike."""
        return self._node.settings.run_root / f"{self._node.node_id}-{self.data_id[:8]}"

    # --- backends ----------------------------------------------------------------------------

    @property
    def may_outlive(self) -> bool:
        """Whether this node offers sandboxes that may outlive it."""
        return any(map(outlives, self._backends.values()))

    def load(self) -> None:
        """Make every backend the node offers, if it can run here. Before the lease: a node that will not start is given
        nothing to do.

        Raises:
            ConfigError: A backend cannot run here or a mount cannot be made; the message says what to do.
        """
        self._mounts = node_mounts(self._node.settings)
        settings = self._node.settings.model_copy(update={"node_id": self._node.node_id})
        for name in settings.offered:
            kind = load_backend(name)
            problems = kind.check()
            if problems:
                raise ConfigError(f"backend {name} cannot run here: {'; '.join(problems)}", key="backend")
            self._backends[name] = kind(settings, self._died)
        self.checkpoints.open()

    def open(self) -> None:
        """Hold again what an earlier run of this node left running for it, remove the rest, so its lease must be held;
        begin to keep blank sandboxes.

        Raises:
            ConfigError: The directory of the node's sockets cannot be made.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
        except OSError as exc:
            raise ConfigError(
                f"run_root {self._node.settings.run_root} cannot be used: {exc.strerror}; "
                "set SANDFLEET_RUN_ROOT to a directory this user may write",
                key="run_root",
            ) from exc
        self.blanks = BlankPool(self._node, self.dirs, self.run_dir, self._mounts)
        self._creating = Creating(self.dirs, self._backends, self.run_dir, self._mounts)
        taken_back = Adoption(self._node, self.dirs, self._backends).run()
        kept = {entry.run_dir for entry in taken_back}
        for path in self.run_dir.iterdir():
            if path.name not in kept:
                local_dirs.remove_tree(path)
        self.leftovers = Leftovers(self._node, self.dirs, self._backends)
        self.leftovers.remove_own()
        self.dirs.recover(keep={entry.name for entry in taken_back})
        self.blanks.open(self._backends)
        self.rolling = Rolling(self._node, self, self._backends)

    def _backend(self, name: str) -> SandboxBackend:
        backend = self._backends.get(name)
        if backend is None:
            raise StartFailed(
                f"node {self._node.node_id} offers {', '.join(self._backends)}, not {name}",
                reason="no_backend",
            )
        return backend

    # --- node.create and node.destroy --------------------------------------------------------

    def is_quick(self, message: OpMessage) -> bool:
        """Whether it need not wait behind the starts of others: a blank sandbox is there for it."""
        slot = message.args.get("blank")
        if message.kind != "node.create" or not slot or self.checkpoints.may_restore(message.args):
            return False
        return self.blanks.has(str(slot), SandboxSpec.from_wire(message.args.get("spec") or {}))

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
        if message.kind == "node.create":
            self._judge(message.identity, completion.error)
            if completion.error is not None:
                self.give_back(message.route, completion.error)
        self._node.finish(job, completion)

    def _judge(self, identity: Identity, error: SandfleetError | None) -> None:
        """Take nothing new once creations fail whoever asks for them: other nodes can do better."""
        if error is not None and not isinstance(error, StartFailed):
            return  # nothing was tried
        with self._lock:
            threads = self._failures.succeeded() if error is None else self._failures.failed(identity.digest)
        node = self._node
        if error is None or not threads or node.draining or node.lease.state is not NodeState.READY:
            return
        reason = f"creates of {threads} threads in a row failed: {error.message[:_CORDON_REASON_CHARS]}"
        log.error("node.cordoned_itself", extra={"node_id": node.node_id, "reason": reason})
        try:
            # Before the place is given back: it is not to be given to the next one.
            node.store.set_node_state(node.node_id, NodeState.CORDONED, incarnation=node.incarnation, reason=reason)
        except StoreUnavailable as exc:
            log.warning("node.cordon_not_recorded", extra={"node_id": node.node_id, "error": str(exc)})

    def give_back(self, route: Route, error: SandfleetError) -> None:
        """A creation failed or was refused: its place is free, its waiters are told. Never raises."""
        try:
            self._node.store.create_failed(route, error.to_wire())
        except StoreUnavailable as exc:
            # The reservation expires by itself, and whoever waits asks again.
            log.warning("sandbox.failure_not_recorded", extra={"sandbox_id": route.sandbox_id, "error": str(exc)})

    def _create(self, message: OpMessage) -> dict[str, Any]:
        node, route = self._node, message.route
        spec = SandboxSpec.from_wire(message.args.get("spec") or {})
        backend = self._backend(spec.backend)
        kind = backend.digest(spec)
        self._end_older(route)
        started = time.monotonic()
        # First what takes it over, so that a blank sandbox whose place this thread has is not left behind.
        blank = self.blanks.take(str(message.args.get("blank") or ""), kind)
        self.blanks.wanted(kind, spec, backend, found=blank is not None)
        held = self._creating.made(blank, message, spec, backend, self.checkpoints, discard=self.blanks.discard)
        node.held[route.sandbox_id] = held
        if route.sandbox_id not in backend.running():
            # It died before it was held, so nobody heard of it.
            self.end(route)
            raise StartFailed(f"sandbox {route.sandbox_id} ended while it started", reason="died")
        if not self._confirmed(held):
            # The reservation lapsed or belongs to a newer epoch: what we started has no owner.
            self.end(route)
            raise NotStarted(
                f"the reservation of sandbox {route.sandbox_id} lapsed while it started",
                sandbox_id=route.sandbox_id,
            )
        took_s = time.monotonic() - started
        log.info(
            "sandbox.started",
            extra={
                "sandbox_id": route.sandbox_id,
                "took_s": round(took_s, 4),
                "backend": spec.backend,
                "blank": held.slot is not None,
            },
        )
        return {"took_s": took_s}

    def _end_older(self, route: Route) -> None:
        """Nothing of an earlier owner is left here when this returns.

        Raises:
            NotStarted: The message is the older one.
            Busy: The earlier one does not end.
        """
        held = self._node.held.get(route.sandbox_id)
        if held is not None and held.route != route:
            if held.route.epoch > route.epoch:
                raise NotStarted(
                    f"sandbox {route.sandbox_id} has a newer owner", reason="stale_route", sandbox_id=route.sandbox_id
                )
            held.stopping = True
            self.end(held.route)
        self._wait_until_gone(route.sandbox_id)

    def _confirmed(self, held: Held) -> bool:
        try:
            return confirmed(self._node.store, held.route, restored=held.restored)
        except StoreUnavailable:
            self.end(held.route)
            raise

    def _destroy(self, message: OpMessage) -> dict[str, Any]:
        node, route = self._node, message.route
        self._end_older(route)
        held = node.held.get(route.sandbox_id)
        if held is not None:
            held.stopping = True
        if (delete := message.args.get("delete_data") is True) and held is not None:
            held.saved_effects = held.effects  # nothing of it is to be kept
        self.end(route)
        if delete:
            self.dirs.remove_data(message.identity)
        try:
            if delete:  # before its place is free: the next sandbox must neither begin with them nor lose its own
                self.checkpoints.forget(message.identity)
        finally:
            node.store.stopped(route)
        return {}

    # --- ending ------------------------------------------------------------------------------

    def end(self, route: Route) -> None:
        """End exactly that sandbox, or wait until whoever does so already is done; a newer one is left alone.

        Raises:
            Busy: It does not end.
            SandfleetError: It could not be ended now. It is held still, and `Upkeep` tries again.
        """
        while not isinstance(held := self._take(route), Held):
            if held is None:
                return
            self._wait_until_gone(route.sandbox_id)
        kept: Held | None = held
        try:
            if held.entry is not None:
                self.dirs.note_stopping(held.entry)
            held.connection.close()
            held.backend.destroy(route.sandbox_id)
            self._forget(held)
            kept = None
            # Before its place is free: nobody else works on its files now.
            self.checkpoints.save(held, "ended")
        finally:
            with self._lock:
                if kept is not None:
                    # It may live: forgotten, it would run for nobody, and its thread would get another one beside it.
                    kept.stopping = kept.stuck = True
                    self._node.held.setdefault(route.sandbox_id, kept)
                self._ending.pop(route).set()

    def _forget(self, held: Held) -> None:
        """It has ended for sure, and so has what was written down of it."""
        if held.entry is not None:
            self.dirs.forget(held.entry)
        elif held.slot is not None:
            self.dirs.remove_slot(held.slot)

    def _take(self, route: Route) -> Held | threading.Event | None:
        """Out of what is held and into what is being ended: from here on one thread ends it. None when nothing of that
        id is left to end, an event when somebody is about it."""
        with self._lock:
            held = self._node.held.get(route.sandbox_id)
            if held is None or held.route != route:
                ending = (gone for other, gone in self._ending.items() if other.sandbox_id == route.sandbox_id)
                return next(ending, None)
            del self._node.held[route.sandbox_id]
            self._ending[route] = threading.Event()
            return held

    def end_and_tell(self, route: Route) -> None:
        """End it and free its place."""
        self.end(route)
        self._node.store.stopped(route)

    def is_ending(self, sandbox_id: str) -> bool:
        """Whether a sandbox of that id is being ended at this moment."""
        with self._lock:
            return any(route.sandbox_id == sandbox_id for route in self._ending)

    def _wait_until_gone(self, sandbox_id: str | None = None) -> None:
        """Return when no other thread ends a sandbox of that id (of any id) any more.

        Raises:
            Busy: One does not end.
        """
        until = time.monotonic() + _GONE_WITHIN_S
        with self._lock:
            events = [gone for route, gone in self._ending.items() if sandbox_id in (None, route.sandbox_id)]
        for gone in events:
            if not gone.wait(max(0.0, until - time.monotonic())):
                raise Busy("an earlier sandbox is still being ended", retry_after_s=1.0)

    # --- what happens by itself --------------------------------------------------------------

    def _died(self, sandbox_id: str, reason: str) -> None:
        """The backend saw a sandbox end by itself: record it at once, so that acquire can trust the registry."""
        if self.blanks.died(sandbox_id, reason):
            return
        held = self._node.held.get(sandbox_id)
        if held is None or sandbox_id in held.backend.running():
            return  # late news of an earlier one: a newer one of that id runs
        with self._lock:
            if self._node.held.get(sandbox_id) is not held:
                return
            del self._node.held[sandbox_id]
        try:
            if not held.stopping:  # else whoever stops it tells
                log.warning("sandbox.died", extra={"sandbox_id": sandbox_id, "reason": reason})
                self._node.store.lost(held.route, reason=reason)
        except StoreUnavailable as exc:
            log.warning("sandbox.death_not_recorded", extra={"sandbox_id": sandbox_id, "error": str(exc)})
        held.connection.close()
        self.checkpoints.save_soon(held, "died")
        if held.slot is not None or held.entry is not None:
            self._node.pool.run_slow(functools.partial(self._forget, held))

    def tick(self, now_ms: int) -> None:
        """Upkeep, about once a second."""
        self.upkeep.tick(now_ms)
        self.blanks.tick()
        self.leftovers.tick()
        self.rolling.tick()

    def close(self, leave: Collection[str] = ()) -> None:
        """End what does not survive this process and say so; the sandboxes ``leave`` run on, for the next run."""
        self.blanks.close()
        with ThreadPoolExecutor(_ENDING_AT_ONCE, thread_name_prefix="sandfleet-ending") as enders:
            for held in list(self._node.held.values()):
                if held.route.sandbox_id not in leave:
                    held.stopping = True
                    enders.submit(self._close_one, held)
        try:
            self._wait_until_gone()
        except Busy as exc:
            log.warning("sandbox.end_failed", extra={"error": str(exc)})
        self.checkpoints.close()
        for backend in self._backends.values():
            if leave and outlives(backend):
                backend.detach()
            backend.close()
        if not leave:
            local_dirs.remove_tree(self.run_dir)

    def _close_one(self, held: Held) -> None:
        node, sandbox_id = self._node, held.route.sandbox_id
        try:
            # First this: from the moment it is known to be lost, its thread may get another one on the same files.
            self.end(held.route)
        except (SandfleetError, OSError) as exc:
            log.warning("sandbox.end_failed", extra={"sandbox_id": sandbox_id, "error": str(exc)})
        try:
            if not node.fenced:
                node.store.lost(held.route, reason="its node was stopped")
        except StoreUnavailable as exc:
            log.warning("sandbox.end_not_recorded", extra={"sandbox_id": sandbox_id, "error": str(exc)})
