"""Several operations in one, item after item, over any connection, holding no thread."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from sandfleet.backends import Completion, Connection, Done, Operation
from sandfleet.errors import Cancelled, InvalidArgument, PayloadTooLarge, QueueTimeout, SandfleetError

__all__ = ["MAX_CONTENT_BYTES", "BatchRun", "Batches"]

#: All contents of one batch's results together; they are held in memory, and as base64 in one answer.
MAX_CONTENT_BYTES = 64 * 1024 * 1024


class BatchRun:
    """One batch on its way through a connection.

    The value is ``{"results": [...], "stopped_at": index | None}``. A result is ``{"ok": value}``,
    with ``content_b64`` where there are bytes, or ``{"error": wire}``. ``stopped_at`` is the index
    of the item whose error ended the batch; items after it have no result. With
    ``stop_on_error=False`` every item runs.

    An item's content is text in ``content`` or base64 in ``content_b64``. Item *n* runs under the
    op id ``<batch>.<n>``, so a repeated batch joins its own items instead of running them twice.

    A batch does not outlive its deadline: a command gets at most the time that is left, and when nothing is
    left every further item is answered with `QueueTimeout` and the batch stops. Nor do its results outgrow
    64 MiB of content: an item whose content comes on top is answered with `PayloadTooLarge`.

    Args:
        connection: Carries out the items.
        op: The batch, validated.
        done: Called once with the completion.
        deadline: When it has to be over, in `time.monotonic` seconds; None for never.
        command_timeout_s: The deadline of a command that names none.
    """

    def __init__(
        self,
        connection: Connection,
        op: Operation,
        done: Callable[[Completion], None],
        *,
        deadline: float | None = None,
        command_timeout_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._op = op
        self._done = done
        self._deadline = deadline
        self._command_timeout_s = command_timeout_s
        self._bytes = 0
        self._items: list[Mapping[str, Any]] = list(op.args["ops"])
        self._stop_on_error = bool(op.args.get("stop_on_error", True))
        self._results: list[dict[str, Any]] = []
        self._cancelled = False
        self._lock = threading.Lock()
        self._pumping = False
        self._more = False

    def start(self) -> None:
        """Begin the first item; returns at once."""
        self._pump()

    def cancel(self) -> bool:
        """End the running item and begin no further one. True if the batch was still running."""
        with self._lock:
            if self._cancelled or len(self._results) >= len(self._items):
                return False
            self._cancelled = True
            current = len(self._results)
        self._connection.cancel(self._item_id(current))
        return True

    def _item_id(self, index: int) -> str:
        return f"{self._op.op_id}.{index}"

    def _pump(self) -> None:
        """Start item after item; one that completes inline makes this loop go on instead of recursing."""
        with self._lock:
            self._more = True
            if self._pumping:
                return
            self._pumping = True
        while True:
            self._more = False
            self._next()
            with self._lock:
                if not self._more:
                    self._pumping = False
                    return

    def _next(self) -> None:
        index = len(self._results)
        if index == len(self._items):
            self._finish(None)
            return
        if self._cancelled:
            self._record(Cancelled("the batch was cancelled before this item", started=False))
            self._finish(index)
            return
        left_s = None if self._deadline is None else self._deadline - monotonic()
        if left_s is not None and left_s <= 0:
            for _ in self._items[index:]:
                self._record(QueueTimeout("the batch's time was over before this item; it did not run"))
            self._finish(index)
            return
        try:
            item = _operation(self._items[index], self._item_id(index), left_s, self._command_timeout_s)
        except SandfleetError as exc:
            self._item_done(Completion(error=exc))
            return
        self._connection.start(item, self._item_done)

    def _item_done(self, completion: Completion) -> None:
        index = len(self._results)
        self._bytes += len(completion.content or b"")
        if self._bytes > MAX_CONTENT_BYTES:
            self._bytes -= len(completion.content or b"")
            limit = f"the contents of a batch have {MAX_CONTENT_BYTES} bytes at most; read this one by itself"
            completion = Completion(error=PayloadTooLarge(limit, limit=MAX_CONTENT_BYTES))
        if completion.error is not None:
            self._record(completion.error)
            if self._stop_on_error:
                self._finish(index)
                return
        else:
            result: dict[str, Any] = {"ok": completion.value}
            if completion.content is not None:
                result["content_b64"] = base64.b64encode(completion.content).decode()
            self._results.append(result)
        self._pump()

    def _record(self, error: SandfleetError) -> None:
        self._results.append({"error": error.to_wire()})

    def _finish(self, stopped_at: int | None) -> None:
        self._done(Completion({"results": self._results, "stopped_at": stopped_at}))


class Batches:
    """The batches that run on one connection. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._running: dict[str, BatchRun] = {}

    def start(self, op: Operation, done: Done) -> None:
        """Begin one; ``done`` comes once, at its end."""

        def finished(completion: Completion) -> None:
            self._running.pop(op.op_id, None)
            done(completion)

        batch = self._running[op.op_id] = BatchRun(self._connection, op, finished)
        batch.start()

    def cancel(self, op_id: str) -> bool | None:
        """As `Connection.cancel`; None when it is no batch that runs here."""
        batch = self._running.get(op_id)
        return None if batch is None else batch.cancel()


def _operation(item: Mapping[str, Any], op_id: str, left_s: float | None, command_timeout_s: float | None) -> Operation:
    content: bytes | None = None
    if (coded := item.get("content_b64")) is not None:
        try:
            content = base64.b64decode(coded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidArgument("batch: content_b64 is not base64", argument="content_b64") from None
    elif (raw := item.get("content")) is not None:
        content = raw.encode() if isinstance(raw, str) else bytes(raw)
    kind, args = str(item.get("kind")), dict(item.get("args") or {})
    if kind == "execute_command":
        wanted_s = args.get("timeout_s") or command_timeout_s
        limits = [limit for limit in (wanted_s, left_s) if limit is not None]
        if limits:
            args["timeout_s"] = min(limits)
    return Operation(op_id, kind, args, content)
