"""The node's blank pool: sandboxes started ahead, for threads that were never here.

The node is the authority on its blank sandboxes; the store counts their places and tells schedulers of them. A
creation names the blank sandbox whose place it took over, and the node makes that one the thread's, or any other
that is alike, or removes it: a used one never comes back here.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sandfleet.acquiring import wanted_spec
from sandfleet.backends import Capability, SandboxBackend, SandboxPlan
from sandfleet.errors import SandfleetError, StoreUnavailable
from sandfleet.model import NodeState, SandboxSpec
from sandfleet_workers.backends.mounts import ACP_WORKSPACE, PlannedMount
from sandfleet_workers.blank_plan import BlankPlan, Demand, blank_plan, blank_targets

if TYPE_CHECKING:
    from sandfleet_workers.node import Node
    from sandfleet_workers.sandbox_dirs import SandboxDirs

__all__ = ["Blank", "BlankPool", "new_slot"]

log = logging.getLogger("sandfleet.node")

_STARTERS = 2
_STARTED_WITHIN_S = 5.0
_ENDING_AT_ONCE = 8
#: A start that takes longer than this (an image is pulled) has lost its place and is undone.
_START_WITHIN_S = 120.0
#: For how long a creation counts as demand for its kind, and how many kinds are remembered.
_WANTED_FOR_S = 600.0
_KINDS = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_COMPARE_EVERY_S = 5.0


def monotonic() -> float:
    """The clock of demand, ages and pauses."""
    return time.monotonic()


def new_slot() -> str:
    """The name of a slot, and of the blank sandbox in it: one that never was."""
    return secrets.token_hex(8)


@dataclass(slots=True, eq=False)
class Blank:
    """A blank sandbox that runs. ``kind`` is what its backend calls alike, ``spec`` what schedulers know it by."""

    slot: str
    kind: str
    spec: SandboxSpec
    backend: SandboxBackend
    made_at: float = field(default_factory=monotonic)


@dataclass(slots=True)
class _Kind:
    """What is wanted: the spec as it was asked for last, and when each creation came."""

    spec: SandboxSpec
    backend: SandboxBackend
    wanted_at: list[float] = field(default_factory=list)


class BlankPool:
    """Keeps as many blank sandboxes ready as the settings say. Thread-safe.

    Args:
        node: Whose they are.
        dirs: The directories of the node's sandboxes.
        run_dir: Where their sockets lie.
        mounts: What every sandbox of the node sees beside its thread's directories.
    """

    def __init__(self, node: Node, dirs: SandboxDirs, run_dir: Path, mounts: tuple[PlannedMount, ...]) -> None:
        self._node = node
        self._dirs = dirs
        self._run_dir = run_dir
        self._mounts = mounts
        self._lock = threading.Lock()
        self._ready: dict[str, Blank] = {}
        self._starting: dict[str, str] = {}
        self._threads: set[threading.Thread] = set()
        self._kinds: dict[str, _Kind] = {}
        self._default = ""
        self._open = False
        self._pause_s, self._not_before = _FIRST_PAUSE_S, 0.0
        self._compared_at = monotonic()
        #: In the pool no more, and could not be ended.
        self._stuck: dict[str, Blank] = {}
        #: Ready ones that the last comparison did not find in the store.
        self._unknown: frozenset[str] = frozenset()
        #: The store lost its data and is to be told anew.
        self.to_tell_again = False
        #: Creations that found a blank sandbox, and that did not, while the pool is on.
        self.used, self.missed = 0, 0

    # --- opening and closing -----------------------------------------------------------------

    def open(self, backends: dict[str, SandboxBackend]) -> None:
        """Begin, if the settings want blank sandboxes, a backend has them, and claims can work here."""
        settings = self._node.settings
        able = [name for name, backend in backends.items() if Capability.BLANKS in backend.capabilities]
        if not able or not settings.blank_pool:
            return
        if problem := self._dirs.claim_problem():
            log.error("blanks.off", extra={"node_id": self._node.node_id, "reason": problem})
            return
        name = settings.backend if settings.backend in able else able[0]
        spec = replace(wanted_spec(settings), backend=name)
        self._default = backends[name].digest(spec)
        self._kinds[self._default] = _Kind(spec, backends[name])
        self._open = True

    @property
    def on(self) -> bool:
        """Whether this node keeps blank sandboxes."""
        return self._open

    def close(self) -> None:
        """End them all, and what is being started. A start that is stuck is left to its backend's end."""
        with self._lock:
            self._open = False
            starters = list(self._threads)
        until = monotonic() + _STARTED_WITHIN_S
        for starter in starters:
            starter.join(max(0.0, until - monotonic()))
        with self._lock:
            blanks = [*self._ready.values(), *self._stuck.values()]
            self._ready.clear()
            self._stuck.clear()
        with ThreadPoolExecutor(_ENDING_AT_ONCE, thread_name_prefix="sandfleet-ending") as enders:
            enders.map(self._remove, blanks)

    # --- giving them away --------------------------------------------------------------------

    def has(self, slot: str, spec: SandboxSpec) -> bool:
        """Whether that one is here and was started for this spec."""
        blank = self._ready.get(slot)
        return blank is not None and blank.spec.digest == spec.digest

    def take(self, slot: str, kind: str) -> Blank | None:
        """A blank sandbox of the kind, out of the pool for good: that of ``slot`` if it is one, else any.

        ``slot`` names the one whose place the caller has, if any; when another one or none is taken, it is removed.
        """
        with self._lock:
            given = self._ready.pop(slot, None)
            if given is not None and given.kind == kind:
                return given
            other = next((blank for blank in self._ready.values() if blank.kind == kind), None)
            if other is not None:
                del self._ready[other.slot]
        if given is not None:
            self._remove(given)
        if other is not None:
            self._tell_gone(other.slot)  # its thread has a place of its own
        return other

    def wanted(self, kind: str, spec: SandboxSpec, backend: SandboxBackend, *, found: bool) -> None:
        """A thread asked for this kind, and found one or not: that is what is worth having ready."""
        if not self.on or Capability.BLANKS not in backend.capabilities:
            return
        with self._lock:
            default = self._kinds[self._default]
            if kind != self._default and (spec.digest, backend) == (default.spec.digest, default.backend):
                self._now_called(self._default, kind)
            known = self._kinds.get(kind)
            if known is None:
                known = self._kinds[kind] = _Kind(spec, backend)
            elif kind != self._default:
                known.spec = spec
            known.wanted_at.append(monotonic())
            self.used, self.missed = self.used + found, self.missed + (not found)
            if len(self._kinds) > _KINDS:
                oldest = min((k for k in self._kinds if k != self._default), key=lambda k: self._kinds[k].wanted_at[-1])
                del self._kinds[oldest]

    def _now_called(self, before: str, kind: str) -> None:
        """What is asked for the same way is another kind by now: its image was pulled, or is a newer one."""
        known = self._kinds.pop(before, None)
        if known is not None:
            other = self._kinds.setdefault(kind, known)
            if other is not known:
                other.wanted_at = sorted(other.wanted_at + known.wanted_at)
        if before == self._default:
            self._default = kind

    def discard(self, blank: Blank) -> None:
        """One that was taken and cannot be used after all: end it."""
        self._remove(blank)

    def died(self, slot: str, reason: str) -> bool:
        """A sandbox of this name ended by itself; False if it is none of these."""
        with self._lock:
            blank = self._ready.pop(slot, None)
        if blank is None:
            return False
        log.warning("blank.died", extra={"slot": slot, "reason": reason})
        self._node.pool.run_slow(functools.partial(self._remove, blank))
        return True

    def counts(self) -> tuple[int, int]:
        """(ready, being started)."""
        return len(self._ready), len(self._starting)

    # --- keeping them ------------------------------------------------------------------------

    def tick(self) -> None:
        """Start and end what is due; from the lease's thread, about once a second."""
        if not self._open or self._node.draining:
            return
        now = monotonic()
        if self.to_tell_again:
            self._tell_all_again()
        if now - self._compared_at >= _COMPARE_EVERY_S:
            self._compared_at = now
            self._end_stuck()
            self._compare()
        if self._node.lease.state is not NodeState.READY or now < self._not_before:
            return
        plan = self._plan(now)
        self.replace(plan.end)
        for kind in plan.start[: _STARTERS - len(self._starting)]:
            if not self._begin(kind):
                return

    def replace(self, slots: Iterable[str]) -> None:
        """End those of these that are in the pool; what is missing then is started by and by."""
        for slot in slots:
            with self._lock:
                blank = self._ready.pop(slot, None)
            if blank is not None:
                # Its place goes first: no thread is to be given what is on its way out.
                self._tell_gone(slot)
                self._node.pool.run_slow(functools.partial(self._remove, blank))

    def _plan(self, now: float) -> BlankPlan:
        settings = self._node.settings
        with self._lock:
            demand = {}
            for kind, known in list(self._kinds.items()):
                known.wanted_at = [at for at in known.wanted_at if at > now - _WANTED_FOR_S]
                if known.wanted_at:
                    demand[kind] = Demand(len(known.wanted_at), known.wanted_at[-1])
                elif kind != self._default:
                    del self._kinds[kind]
            ready = {blank.slot: blank.kind for blank in self._ready.values()}
            old = settings.max_age_s
            outdated = frozenset(b.slot for b in self._ready.values() if old and b.made_at < now - old)
            starting = Counter(self._starting.values())
        targets = blank_targets(demand, default=self._default, size=settings.blank_pool)
        return blank_plan(targets, ready=ready, starting=starting, outdated=outdated)

    def _begin(self, kind: str) -> bool:
        """Have one started, if there is a place for it."""
        node, slot = self._node, new_slot()
        with self._lock:
            known = self._kinds.get(kind)
        if known is None or not node.store.begin_blank(
            node.node_id,
            node.incarnation,
            slot,
            expires_s=_START_WITHIN_S,
            reserve_free=node.settings.reserve_free,
        ):
            return False
        # A thread that nobody has to wait for: an image that is pulled for minutes does not keep the node from ending.
        blank = Blank(slot, kind, known.spec, known.backend)
        starter = threading.Thread(target=self._start, args=(blank,), name=f"sandfleet-blank-{slot}", daemon=True)
        with self._lock:
            if not self._open:
                return False
            self._starting[slot] = kind
            self._threads.add(starter)
            starter.start()
        return True

    def _start(self, blank: Blank) -> None:
        """Start one (on a thread of its own) and offer it."""
        node, slot, began = self._node, blank.slot, monotonic()
        try:
            directory = self._dirs.make_slot(slot)
            plan = SandboxPlan(
                sandbox_id=slot,
                identity=None,
                epoch=0,
                user_data=directory / "user-data",
                run_dir=self._run_dir / f"b{slot}",
                spec=blank.spec,
                mounts=(*self._mounts, (directory / "acp-workspace", ACP_WORKSPACE, True)),
            )
            blank.backend.create(plan)
            if (kind := blank.backend.digest(blank.spec)) != blank.kind:
                with self._lock:
                    self._now_called(blank.kind, kind)
                blank.kind = kind
            # Here before there: a creation that names it must find it.
            with self._lock:
                self._ready[slot] = blank
            if slot not in blank.backend.running():
                self.died(slot, "it ended while it started")
            elif not node.store.blank_ready(node.node_id, node.incarnation, slot, spec_digest=blank.spec.digest):
                self._withdraw(slot, "it took too long to start")
            self._pause_s = _FIRST_PAUSE_S
            log.info("blank.started", extra={"slot": slot, "took_s": round(monotonic() - began, 3)})
        except Exception as exc:  # noqa: BLE001  (whatever it was, the next one is tried later)
            self._failed(blank, exc)
        finally:
            with self._lock:
                self._starting.pop(slot, None)
                self._threads.discard(threading.current_thread())
            if not self._open:
                self._withdraw(slot, "the node is closing")

    def _failed(self, blank: Blank, exc: Exception) -> None:
        self._not_before = monotonic() + self._pause_s
        extra = {"slot": blank.slot, "error": f"{type(exc).__name__}: {exc}", "again_in_s": self._pause_s}
        log.warning("blank.not_started", extra=extra)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        with self._lock:
            self._ready.pop(blank.slot, None)
        self._remove(blank)

    def _withdraw(self, slot: str, reason: str) -> None:
        """Out of the pool with it, if it still is there; may wait for the engine."""
        with self._lock:
            blank = self._ready.pop(slot, None)
        if blank is not None:
            log.info("blank.withdrawn", extra={"slot": slot, "reason": reason})
            self._remove(blank)

    # --- the store's side --------------------------------------------------------------------

    def _remove(self, blank: Blank) -> None:
        """End one that is in the pool no more, then free its place. Never raises; may wait for the engine."""
        try:
            blank.backend.destroy(blank.slot)
            self._dirs.remove_slot(blank.slot)
        except (SandfleetError, OSError) as exc:
            # Its backend holds it still, so it is nobody's leftover.
            log.warning("blank.not_removed", extra={"slot": blank.slot, "error": str(exc)})
            with self._lock:
                self._stuck[blank.slot] = blank
        self._tell_gone(blank.slot)

    def _end_stuck(self) -> None:
        with self._lock:
            stuck, self._stuck = self._stuck, {}
        for blank in stuck.values():
            self._node.pool.run_slow(functools.partial(self._remove, blank))

    def _tell_gone(self, slot: str) -> None:
        try:
            self._node.store.blank_gone(self._node.node_id, self._node.incarnation, slot)
        except StoreUnavailable as exc:
            # `_compare` tells it later.
            log.info("blank.end_not_recorded", extra={"slot": slot, "error": str(exc)})

    def _tell_all_again(self) -> None:
        for blank in list(self._ready.values()):
            self._node.store.blank_ready(
                self._node.node_id, self._node.incarnation, blank.slot, spec_digest=blank.spec.digest, again=True
            )
        self.to_tell_again = False

    def _compare(self) -> None:
        """Make store and pool agree: what only the store has is gone; what it has not, twice, was given to a thread
        whose creation never came, and would run here for nobody."""
        node = self._node
        with self._lock:
            before = set(self._ready)
        there = set(node.store.blanks(node.node_id))
        with self._lock:
            ready, starting = set(self._ready), set(self._starting)
        for slot in there - before - ready - starting:
            self._tell_gone(slot)
        unknown = (before & ready) - there
        for slot in unknown & self._unknown:
            reason = "its place was given away and nobody came for it"
            node.pool.run_slow(functools.partial(self._withdraw, slot, reason))
        self._unknown = frozenset(unknown)
