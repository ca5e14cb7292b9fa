"""The client's end of the reply stream: one daemon thread that serves every thread and event loop of the process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from sandfleet.errors import StoreUnavailable
from sandfleet.store.base import OpView, Store

__all__ = ["Pending", "ReplyReader"]

log = logging.getLogger("sandfleet.client")

_STREAM_TTL_S = 120.0
_CHECK_AFTER_S = 2.0
_LATE_S = 0.5
_CHECKS_PER_TICK = 200


class Pending:
    """A reply that is awaited. Exactly one payload comes; ``deliver`` gets it, from the reader's thread.

    ``payload`` is the reply JSON, or None when the op record is gone and nobody can tell.
    """

    __slots__ = ("_box", "_deliver", "_done", "_lock", "checked_at", "foreign", "op_id", "recorded", "since")

    def __init__(self, op_id: str, *, foreign: bool = False, recorded: bool = True) -> None:
        self.op_id = op_id
        self.since = self.checked_at = time.monotonic()
        #: The reply goes to another client's stream; only looking at the record finds it.
        self.foreign = foreign
        #: False for acquires: they have no op record to look at, their caller asks again instead.
        self.recorded = recorded
        self._box: SimpleQueue[str | None] = SimpleQueue()
        self._deliver: Callable[[str | None], None] = self._box.put
        self._done = False
        self._lock = threading.Lock()

    def deliver(self, payload: str | None) -> None:
        """Give the payload; a second one is dropped."""
        with self._lock:
            if self._done:
                return
            self._done = True
            hand_over = self._deliver
            if hand_over == self._box.put:
                self._box.put(payload)  # under the lock, so that `forward` finds it
                return
        hand_over(payload)

    def now_recorded(self) -> None:
        """Its record is written: from now on a missing one means something."""
        self.checked_at = self.since = time.monotonic()
        self.recorded = True

    def wait(self, timeout_s: float) -> str | None:
        """The payload.

        Raises:
            TimeoutError: None came within ``timeout_s``.
        """
        try:
            return self._box.get(timeout=max(0.0, timeout_s))
        except Empty:
            raise TimeoutError(self.op_id) from None

    def forward(self, deliver: Callable[[str | None], None]) -> None:
        """Hand the payload to ``deliver`` instead of `wait` (an event loop does)."""
        with self._lock:
            self._deliver = deliver
            try:
                payload = self._box.get_nowait()
            except Empty:
                return
        deliver(payload)


class ReplyReader:
    """Reads the client's stream by cursor and hands each reply to its `Pending`.

    A stream can lose an entry (trimmed, Redis restarted, another server after a failover), so replies awaited
    for more than two seconds are also looked up in their op record.

    Args:
        store: Where the stream is.
        client: Id of this process' stream.
        on_tick: Called about once a second from the reader's thread (renewals of the client).
    """

    def __init__(self, store: Store, client: str, *, on_tick: Callable[[], None]) -> None:
        self._store = store
        self._client = client
        self._on_tick = on_tick
        # A list: two threads may repeat one op id and both wait for its one answer.
        self._pending: dict[str, list[Pending]] = {}
        self._lock = threading.Lock()
        self._cursor = self._trimmed = "0"
        self._stop = threading.Event()
        self._opened_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"sandfleet-replies-{client}", daemon=True)

    def start(self) -> None:
        """Open the stream and begin to read.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        self._keep_open()
        self._thread.start()

    def expect(self, op_id: str, *, foreign: bool = False, recorded: bool = True) -> Pending:
        """Await the reply of ``op_id``; call before publishing it."""
        pending = Pending(op_id, foreign=foreign, recorded=recorded)
        with self._lock:
            self._pending.setdefault(op_id, []).append(pending)
        return pending

    def forget(self, op_id: str, pending: Pending | None = None) -> None:
        """Nobody awaits ``op_id`` any more, or just ``pending`` does not."""
        with self._lock:
            left = [other for other in self._pending.pop(op_id, ()) if pending is not None and other is not pending]
            if left:
                self._pending[op_id] = left

    def _deliver(self, op_id: str, payload: str | None) -> None:
        with self._lock:
            awaited = self._pending.pop(op_id, ())
        for pending in awaited:
            pending.deliver(payload)

    def close(self) -> None:
        """Stop reading and drop the stream; awaited replies are given up."""
        self._stop.set()
        try:
            self._store.close_replies(self._client)
        except StoreUnavailable:
            log.info("replies.close_failed", extra={"client": self._client})
        self._thread.join(timeout=3.0)
        for op_id in list(self._pending):
            self._deliver(op_id, None)

    def _run(self) -> None:
        tick_at = 0.0
        while not self._stop.is_set():
            try:
                for reply in self._store.read_replies(self._client, self._cursor, block_s=0.5):
                    self._cursor = reply.cursor
                    self._deliver(reply.op_id, reply.payload)
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + 0.5
                    self._tick()
            except StoreUnavailable as exc:
                if self._stop.is_set():
                    return
                log.warning("replies.store_unavailable", extra={"client": self._client, "error": str(exc)})
                self._opened_at = 0.0
                self._stop.wait(0.2)
            except Exception:
                # The reader serves every caller of the process: a bug in one reply must not end it.
                log.exception("replies.reader_error", extra={"client": self._client})
                self._stop.wait(0.2)

    def _tick(self) -> None:
        now = time.monotonic()
        with self._lock:
            awaited = [pending for waiters in self._pending.values() for pending in waiters]
        # Where an answer is late, a Redis that lost its data may have lost the stream that it would come by.
        self._keep_open(doubtful=any(now - pending.since > _LATE_S for pending in awaited))
        if self._cursor != self._trimmed:
            # What was read has no reader any more; a stream of big replies would fill Redis.
            self._store.trim_replies(self._client, self._cursor)
            self._trimmed = self._cursor
        self._on_tick()
        now = time.monotonic()
        late = [
            pending
            for pending in awaited
            if pending.recorded and now - pending.checked_at > (0.1 if pending.foreign else _CHECK_AFTER_S)
        ]
        for pending in late[:_CHECKS_PER_TICK]:
            pending.checked_at = now
            self._check(pending)

    def _check(self, pending: Pending) -> None:
        view: OpView | None = self._store.op(pending.op_id)
        if view is None or view.job or view.state in ("done", "closed"):
            # The stream may hold it already, unread: give it one more turn before the record decides.
            if view is not None and view.reply is None and time.monotonic() - pending.since < 2 * _CHECK_AFTER_S:
                return
            self._deliver(pending.op_id, None if view is None else view.reply)

    def _keep_open(self, *, doubtful: bool = False) -> None:
        if time.monotonic() - self._opened_at < (_CHECK_AFTER_S if doubtful else _STREAM_TTL_S / 3):
            return
        if self._store.open_replies(self._client, ttl_s=_STREAM_TTL_S):
            # A stream made anew (Redis lost its data) starts with new ids; the old cursor may lie ahead of them.
            self._cursor = "0"
        self._opened_at = time.monotonic()
