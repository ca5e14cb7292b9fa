"""Several operations in one, item after item, over any connection, holding no thread."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sandfleet.backends import Completion, Connection, Operation
from sandfleet.errors import Cancelled, InvalidArgument, SandfleetError

__all__ = ["BatchRun"]


class BatchRun:
    """One batch on its way through a connection.

    The value is ``{"results": [...], "stopped_at": index | None}``. A result is ``{"ok": value}``,
    with ``content_b64`` where there are bytes, or ``{"error": wire}``. ``stopped_at`` is the index
    of the item whose error ended the batch; items after it have no result. With
    ``stop_on_error=False`` every item runs.

    An item's content is text in ``content`` or base64 in ``content_b64``. Item *n* runs under the
    op id ``<batch>.<n>``, so a repeated batch joins its own items instead of running them twice.

    Args:
        connection: Carries out the items.
        op: The batch, validated.
        done: Called once with the completion.
    """

    def __init__(self, connection: Connection, op: Operation, done: Callable[[Completion], None]) -> None:
        self._connection = connection
        self._op = op
        self._done = done
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
        try:
            item = _operation(self._items[index], self._item_id(index))
        except SandfleetError as exc:
            self._item_done(Completion(error=exc))
            return
        self._connection.start(item, self._item_done)

    def _item_done(self, completion: Completion) -> None:
        index = len(self._results)
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


def _operation(item: Mapping[str, Any], op_id: str) -> Operation:
    content: bytes | None = None
    if (coded := item.get("content_b64")) is not None:
        try:
            content = base64.b64decode(coded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidArgument("batch: content_b64 is not base64", argument="content_b64") from None
    elif (raw := item.get("content")) is not None:
        content = raw.encode() if isinstance(raw, str) else bytes(raw)
    return Operation(op_id, str(item.get("kind")), item.get("args") or {}, content)
