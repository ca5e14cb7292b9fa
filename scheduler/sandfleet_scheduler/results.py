"""Results of plain Celery callers whose node cannot store them any more.

A node stores the result of a plain call itself. When it dies, the script that closes it out answers to a reply
stream; this module reads that stream and turns what it finds into an ordinary Celery FAILURE, chord and all, so that
nobody's ``get()`` waits for ever.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from celery import Celery
from celery.app.task import Context

from sandfleet.errors import OperationFailed, SandfleetError
from sandfleet.store.base import Reply, Store

__all__ = ["PLAIN_CALLERS", "PlainResults", "remember"]

log = logging.getLogger("sandfleet.scheduler")

#: The "client" to whom operations of plain callers reply; the "!" asks for errors only (`OpRecord`).
PLAIN_CALLERS = "!celery-results"
_STREAM_TTL_S = 600.0
#: Only these can come from somebody else than the node that ran the operation.
_CLOSED = frozenset({"not_started", "outcome_unknown", "cancelled"})
_TRIES = 5
_KEPT_OF_REQUEST = ("group", "group_index", "chord", "errbacks", "root_id", "parent_id", "task")


def remember(app: Celery, request: Any) -> None:
    """Keep what a failure must tell a chord or a group, for as long as results are kept. No-op for single tasks."""
    if request.group or request.chord or request.errbacks:
        kept = {name: getattr(request, name, None) for name in _KEPT_OF_REQUEST}
        backend: Any = app.backend
        backend.set(_key(request.id), json.dumps(kept, default=str))


def _key(op_id: str) -> str:
    return f"celery-task-request-{op_id}"


class PlainResults:
    """Reads the plain callers' stream from a thread of its own. Any number of schedulers may: storing a failure
    twice changes nothing, and what is stored leaves the stream, so that nobody stores it again when the result has
    expired."""

    def __init__(self, app: Celery, store: Store) -> None:
        self._app = app
        self._store = store
        self._cursor = "0"
        self._failed = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandfleet-plain-results", daemon=True)

    def start(self) -> None:
        """Open the stream and begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; the stream stays for the next scheduler, until it expires."""
        self._stopped.set()
        self._thread.join(timeout=3.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.read(block_s=1.0)
            except SandfleetError as exc:
                if not self._stopped.wait(0.5):
                    log.warning("plain_results.store_unavailable", extra={"error": str(exc)})
            except Exception:
                # Every other caller waits for as long as this thread does nothing.
                log.exception("plain_results.error")
                self._stopped.wait(0.5)

    def read(self, *, block_s: float) -> None:
        """Take what came, in order, and trim it. A reply that cannot be stored is tried a few times, then left out."""
        if self._store.open_replies(PLAIN_CALLERS, ttl_s=_STREAM_TTL_S):
            self._cursor = "0"
        replies = self._store.read_replies(PLAIN_CALLERS, self._cursor, block_s=block_s)
        for reply in replies:
            try:
                self._take(reply)
            except Exception:
                self._failed += 1
                if self._failed < _TRIES:
                    raise
                log.exception("plain_results.left_out", extra={"op_id": reply.op_id})
            self._cursor, self._failed = reply.cursor, 0
        if replies:
            self._store.trim_replies(PLAIN_CALLERS, self._cursor)

    def _take(self, reply: Reply) -> None:
        error = json.loads(reply.payload).get("error")
        if not isinstance(error, dict) or error.get("code") not in _CLOSED:
            return
        if self._app.AsyncResult(reply.op_id).ready():
            return
        backend: Any = self._app.backend
        kept = backend.get(_key(reply.op_id))
        request = Context({"id": reply.op_id, **(json.loads(kept) if kept else {})})
        failure = OperationFailed(json.dumps(error))
        backend.mark_as_failure(reply.op_id, failure, request=request)
        log.info("plain_results.failed", extra={"op_id": reply.op_id, "code": error["code"]})
