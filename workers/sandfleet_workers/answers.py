"""How an outcome is told: to the client's reply stream, and to Celery."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict, deque
from typing import Any

from sandfleet import blobs
from sandfleet.backends import Completion
from sandfleet.config import INLINE_BYTES
from sandfleet.errors import OutcomeUnknown, PayloadTooLarge, SandfleetError, StoreUnavailable
from sandfleet.store.base import Route, Store, wants_errors_only
from sandfleet.wire import OpMessage, put_beside
from sandfleet_workers.jobs import Job

__all__ = ["Outbox", "Spent", "celery_result", "encode_reply", "shown_result", "spent_ms"]

#: Milliseconds in the queue, in its lanes, running.
Spent = tuple[float, float, float]

log = logging.getLogger("sandfleet.node")

_BLOBS_KEPT_S = 120.0
_KEPT = 10_000
_SENT_PER_TICK = 500
#: Answers that are remembered in case Redis forgets them: a failover loses what was written a moment before it.
_TOLD_KEPT, _TOLD_BYTES = 5_000, 4096
#: Results of plain Celery callers lie in Redis for an hour: bigger ones want the SDK's blobs.
_CELERY_RESULT_BYTES = 8 * 1024 * 1024


def encode_reply(store: Store, completion: Completion, message: OpMessage, *, spent_ms: Spent) -> str:
    """The reply JSON: ``{"ok", "content"?, "beside"?, "t"}`` or ``{"error", "t"}``; too big values become blobs, and
    big output is the content where the client understands that.

    Raises:
        ByteBudgetExceeded: The client or the fleet has too many bytes in flight.
    """
    reply: dict[str, Any] = {"t": spent_ms}
    client, value, content = message.reply_to, completion.value, completion.content
    if completion.error is not None:
        reply["error"] = completion.error.to_wire()
    elif wants_errors_only(client):
        reply["ok"] = None  # a plain Celery caller: its result goes to the result backend
    else:
        if message.beside and content is None and (moved := put_beside(value, INLINE_BYTES)) is not None:
            value, reply["beside"], content = moved
        reply["ok"] = blobs.pack_json(store, value, client=client, ttl_s=_BLOBS_KEPT_S)
        if content is not None:
            reply["content"] = blobs.pack_bytes(store, content, client=client, ttl_s=_BLOBS_KEPT_S)
    return json.dumps(reply, separators=(",", ":"))


def celery_result(completion: Completion, *, shown_only: bool) -> Any:
    """What the task returns: everything to a plain Celery caller; with ``shown_only`` (the reply stream carried
    the result) the few words a person wants to see in Flower.

    Raises:
        PayloadTooLarge: More than 8 MiB for the result backend.
    """
    value = completion.value
    if shown_only:
        return shown_result(completion)
    if completion.content is not None:
        value = {**(value or {}), "content": completion.content.decode("utf-8", "replace")}
    if len(json.dumps(value)) > _CELERY_RESULT_BYTES:
        raise PayloadTooLarge(
            f"a plain Celery result holds at most {_CELERY_RESULT_BYTES} bytes; read it in parts, or with the SDK"
        )
    return value


def shown_result(completion: Completion) -> str:
    """The few words of a success that Flower's result column shows; never output, never contents."""
    value = completion.value
    if isinstance(value, dict) and "exit_code" in value:
        if value.get("timed_out"):
            return "timed out"
        if value.get("out_of_memory"):
            return "out of memory"
        return "cancelled" if value.get("cancelled") else f"exit {value['exit_code']}"
    return "ok"


def spent_ms(job: Job, message: OpMessage, now_ms: int) -> Spent:
    """Where an operation's time went until now: in the queue, in its lanes, running.

    Args:
        now_ms: The store's time now.
    """
    now = time.monotonic()
    began = job.started_at or now
    queued = (now_ms - (now - job.taken_at) * 1000) - message.sent_at_ms
    return round(max(0.0, queued), 2), round((began - job.taken_at) * 1000, 2), round((now - began) * 1000, 2)


class Outbox:
    """Sends answers, and keeps those that Redis did not take until it does. Thread-safe.

    The last ones are remembered: an operation that Redis has forgotten to be answered must not be told anything else.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: deque[tuple[str, Route, str, str, str]] = deque()
        self._told: OrderedDict[str, tuple[Route, str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def send(self, op_id: str, route: Route, outcome: str, payload: str, *, stream: str = "") -> None:
        """Answer an operation, and end its output stream; never raises."""
        self.remember(op_id, route, outcome, payload)
        try:
            self._store.finish(op_id, route, outcome=outcome, reply=payload, stream=stream)
        except StoreUnavailable as exc:
            self._keep((op_id, route, outcome, payload, stream), str(exc))
        except SandfleetError as exc:
            # Whatever it is, it is about this payload: the caller is told that, not left to wait.
            log.exception("op.reply_refused", extra={"op_id": op_id})
            self._send_error(op_id, route, exc)

    def _send_error(self, op_id: str, route: Route, error: SandfleetError) -> None:
        payload = json.dumps({"error": error.to_wire()})
        try:
            self._store.finish(op_id, route, outcome=error.code, reply=payload)
        except SandfleetError as exc:
            self._keep((op_id, route, error.code, payload, ""), str(exc))

    def _keep(self, answer: tuple[str, Route, str, str, str], why: str) -> None:
        with self._lock:
            if len(self._kept) >= _KEPT:
                log.error("op.reply_dropped", extra={"op_id": self._kept.popleft()[0], "why": "too many are kept"})
            self._kept.append(answer)
        log.warning("op.reply_kept", extra={"op_id": answer[0], "error": why})

    def remember(self, op_id: str, route: Route, outcome: str, payload: str) -> None:
        """Keep what an operation was answered, for `tell_again`."""
        if len(payload) > _TOLD_BYTES:
            lost = OutcomeUnknown(f"operation {op_id} was answered, and Redis lost the answer", op_id=op_id)
            outcome, payload = lost.code, json.dumps({"error": lost.to_wire()})
        with self._lock:
            self._told[op_id] = (route, outcome, payload)
            if len(self._told) > _TOLD_KEPT:
                self._told.popitem(last=False)

    def tell_again(self, op_id: str) -> bool:
        """Whether the operation was answered here; if so, it is answered so once more where Redis has lost it.

        Raises:
            StoreUnavailable: Redis is away.
        """
        with self._lock:
            told = self._told.get(op_id)
            if told is None or any(kept[0] == op_id for kept in self._kept):
                return told is not None  # one that Redis did not take yet is sent by `flush`
        route, outcome, payload = told
        if self._store.finish(op_id, route, outcome=outcome, reply=payload):
            log.warning("op.told_again", extra={"op_id": op_id})
        return True

    def flush(self) -> None:
        """Send what was kept, a bounded part of it per call; the rest stays if Redis is still away."""
        for _ in range(min(_SENT_PER_TICK, len(self._kept))):
            with self._lock:
                op_id, route, outcome, payload, stream = self._kept.popleft()
            try:
                self._store.finish(op_id, route, outcome=outcome, reply=payload, stream=stream)
            except SandfleetError:
                with self._lock:
                    self._kept.appendleft((op_id, route, outcome, payload, stream))
                return
