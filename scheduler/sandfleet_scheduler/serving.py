"""Serving the line: whoever waits for a place gets it in turn, as places become free."""

from __future__ import annotations

import logging
import time

from sandfleet.errors import InvalidArgument, NoCapacity, NotStarted, SandfleetError, VersionMismatch
from sandfleet.ids import Identity, new_op_id
from sandfleet.model import NodeView
from sandfleet.store.base import Parked
from sandfleet_scheduler.asking import AcquireRequest
from sandfleet_scheduler.line import Room, Turn, Verdict
from sandfleet_scheduler.refusing import no_place, quota_reached
from sandfleet_scheduler.service import Scheduler

__all__ = ["LineServer"]

log = logging.getLogger("sandfleet.scheduler")

_LOCK = "serve"
#: As long as this a scheduler that dies while it serves keeps the others from it.
_LOCK_S = 2.0
_THOROUGH_EVERY_S = 1.0
_PAGE = 1000
_LEAST_READ = 20


class LineServer:
    """Gives places to those who stand in line. Thread-safe; one scheduler does it at a time.

    Who serves needs no memory: everything is in the store, so a scheduler that dies in the middle leaves a line that
    the next one goes on with (`serve_if_due`, each second, by every scheduler).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._store = scheduler.store

    def serve(self, *, everybody: bool = False) -> str:
        """Go through the line until nothing more can be done; a few words for Flower.

        Args:
            everybody: Look at everybody, so that those are told whom no present node could ever take; otherwise only
                as far as there is something to give.
        """
        served = 0
        while True:
            token = new_op_id()
            if not self._store.lock(_LOCK, token, ttl_s=_LOCK_S):
                # Whoever has the lock looks once more before the last of it; see below.
                return "another one serves"
            try:
                self._store.serve_line()
                self._scheduler.tally.add("serve_passes")
                served += _Pass(self._scheduler, token, everybody=everybody).run()
            finally:
                self._store.unlock(_LOCK, token)
            # A wake-up that came meanwhile found the lock taken and went. Its mark is still there.
            if not self._store.serve_line():
                return f"served {served}"

    def serve_if_due(self, *, refuse: bool = True) -> None:
        """Serve the line if there is one and nobody did so within this second.

        ``refuse``: also tell those whom no present node could take. Not after an outage of Redis: until every node has
        had the time to show itself, none seems to be there.
        """
        if self._store.line_length() and self._store.lock("serve-all", new_op_id(), ttl_s=_THOROUGH_EVERY_S):
            self.serve(everybody=refuse)


class _Pass:
    """One walk along the line."""

    def __init__(self, scheduler: Scheduler, token: str, *, everybody: bool) -> None:
        self._scheduler = scheduler
        self._store = scheduler.store
        self._token = token
        self._everybody = everybody
        self._nodes = self._store.nodes()
        self._room = Room(self._nodes)
        #: Users who have as many sandboxes as one may: the rest of theirs is passed over.
        self._at_quota: set[str] = set()
        self._locked_at = time.monotonic()

    def run(self) -> int:
        """How many were given a place or told that there is none for them."""
        served, after, size = 0, "", _PAGE if self._everybody else _LEAST_READ
        while (left := self._room.left) or self._everybody:
            # Mostly the first few take it all. Where they wait for something else, the whole line may have to be read.
            size = min(_PAGE, max(4 * size, 2 * left)) if after else max(size, min(_PAGE, 2 * left))
            page = self._store.parked(after=after, limit=size)
            if not page:
                return served
            for entry in page:
                if not self._keeps_lock():
                    return served
                served += self._serve(entry)
            after = page[-1].cursor
        return served

    def _keeps_lock(self) -> bool:
        if time.monotonic() - self._locked_at < _LOCK_S / 4:
            return True
        self._locked_at = time.monotonic()
        return self._store.lock(_LOCK, self._token, ttl_s=_LOCK_S)

    def _serve(self, entry: Parked) -> bool:
        try:
            request, home = AcquireRequest.from_line(entry.request)
        except (InvalidArgument, VersionMismatch, ValueError) as exc:
            # Of a version that nobody speaks any more. Its client asks again when this waiter has expired.
            log.error("line.unreadable", extra={"digest": entry.digest, "error": str(exc)[:200]})
            return False
        if request.identity.user_id in self._at_quota:
            return self._tell_quota(request)
        try:
            return self._give(request, home)
        except NotStarted as exc:
            self._store.answer_waiters(request.identity, exc.to_wire())
            return True

    def _give(self, request: AcquireRequest, home: str | None) -> bool:
        """Do what the verdict says, and ask for another one as long as it turns out not to hold."""
        while True:
            turn = self._room.turn(request.wanted(home), burst=request.overflow == "burst")
            if turn.verdict is Verdict.REFUSE:
                return self._refuse(request, no_place(turn.reason, request, self._nodes))
            if turn.verdict is Verdict.WAIT:
                return request.overflow == "reject" and self._refuse(
                    request, no_place("full", request, self._nodes, self._nodes)
                )
            if turn.verdict is Verdict.SOON:
                return False
            assert turn.node is not None
            if (done := self._take(request, turn, turn.node)) is not None:
                return done

    def _take(self, request: AcquireRequest, turn: Turn, node: NodeView) -> bool | None:
        """Whether the thread was served; None when the verdict did not hold.

        Before somebody's sandbox is ended for it, a thread asks for a place all the same: it may be one that may not
        have any more.
        """
        told = self._scheduler.reserve(request, node, burst=turn.verdict is Verdict.BURST, from_line=True)
        if told.status == "reserved":
            self._room.kept(turn, len(turn.sandboxes))
            return True
        if told.status == "full" and turn.verdict is Verdict.EVICT:
            return self._evict_all(turn)
        self._room.give_back(turn)
        self._room.kept(turn, len(turn.sandboxes))
        if told.status == "full":
            self._room.filled(node)
            return None
        if told.status == "quota":
            return self._at_its_quota(request, told.evict)
        if told.status in ("live", "creating", "withdrawn"):
            return False
        self._room.gone(node)  # node_down
        return None

    def _evict_all(self, turn: Turn) -> bool | None:
        """End what the verdict names. The thread waits on: the end of the removal wakes the line, and it is next."""
        kept = [sandbox_id for sandbox_id in turn.sandboxes if not self._evict(sandbox_id, "evicted to make room")]
        if not kept:
            return False
        self._room.kept(turn, len(kept))
        self._room.give_back(turn)
        return None

    def _at_its_quota(self, request: AcquireRequest, evict: str) -> bool:
        user_id = request.identity.user_id
        if user_id is not None:
            self._at_quota.add(user_id)
        if evict:
            self._evict(evict, "evicted for another thread of its user, who may have no more")
            return False
        return self._tell_quota(request)

    def _tell_quota(self, request: AcquireRequest) -> bool:
        if request.overflow != "reject":
            return False
        return self._refuse(request, quota_reached(request, self._scheduler.max_per_user))

    def _evict(self, sandbox_id: str, reason: str) -> bool:
        """End a warm sandbox; False if somebody is in it again, or it is gone."""
        info = self._store.sandbox(sandbox_id)
        if info is None:
            return False
        stop = self._store.begin_stop(sandbox_id, owner=None, force=False, reason=reason)
        if stop.status != "recorded" or stop.route is None:
            return False
        self._scheduler.tally.add("evictions")
        evicted, args = Identity(info.thread_id, info.user_id), {"delete_data": False}
        status = self._scheduler.send("node.destroy", evicted, stop.route, args, "stopping")
        if status != "recorded":
            # Its node ends it all the same when it compares what it holds with the registry, but not now.
            extra = {"sandbox_id": sandbox_id, "node_id": stop.route.node_id, "status": status}
            log.warning("evict.not_taken", extra=extra)
        return True

    def _refuse(self, request: AcquireRequest, error: SandfleetError) -> bool:
        self._store.answer_waiters(request.identity, error.to_wire())
        code = error.facts.get("reason", error.code) if isinstance(error, NoCapacity) else error.code
        log.info("line.refused", extra={"thread_id": request.identity.thread_id, "code": code})
        return True
