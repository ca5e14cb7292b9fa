"""How a node tells of its operations: one log line each, and metrics when they are on.

Counting costs a few microseconds an operation and does no I/O. What a line or a metric says of an operation is its
kind, its outcome and its times: no arguments, no output.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sandfleet.errors import SandfleetError
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import Spent

if TYPE_CHECKING:
    from sandfleet_workers.metrics import NodeMeter
    from sandfleet_workers.node import Node

__all__ = ["Watch", "load_of"]

log = logging.getLogger("sandfleet.node")


class Watch:
    """Hears of every operation once when it starts and once when it is answered. Thread-safe.

    Attributes:
        answers: Operations answered so far, refused ones too.
        meter: Set while metrics are on.
        address: Where they are served, HOST:PORT; empty when they are off.
    """

    def __init__(self) -> None:
        self.answers = 0
        self.meter: NodeMeter | None = None
        self.address = ""

    def started(self, message: OpMessage) -> None:
        """The effect is about to begin."""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("op.started", extra=_facts(message))

    def answered(self, message: OpMessage, error: SandfleetError | None, spent: Spent, reply_bytes: int) -> None:
        """The answer is out."""
        self.answers += 1  # a lost increment between two threads is no harm
        if self.meter is not None:
            self.meter.answered(message, "ok" if error is None else error.code, spent, reply_bytes)
        if error is not None:
            facts = {**_facts(message, spent), "code": error.code, "error": str(error)[:300]}
            log.info("op.failed", extra=facts)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("op.finished", extra=_facts(message, spent))

    def refused(self, op_id: str, error: SandfleetError) -> None:
        """A message was malformed or foreign: there is nothing to tell of it but its id."""
        self.answers += 1
        if self.meter is not None:
            self.meter.refused(error.code)
        log.warning("op.refused", extra={"op_id": op_id, "code": error.code, "error": str(error)})


def _facts(message: OpMessage, spent: Spent | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"op_id": message.op_id, "sandbox_id": message.route.sandbox_id, "kind": message.kind}
    if spent is not None:
        facts.update(queue_ms=spent[0], lane_ms=spent[1], run_ms=spent[2])
    return facts


def load_of(node: Node) -> dict[str, Any]:
    """What the node says of its load with each renewal of its lease (``sandfleet nodes --json``, ``sandfleet top``).

    ``answers`` grows; two readings and the ``at_ms`` of each give operations per second.
    """
    held, waiting = node.pool.counts()
    load: dict[str, Any] = {
        "at_ms": node.lease.now_ms(),
        "answers": node.watch.answers,
        "running": held - waiting + node.runs.count(),
        "waiting": waiting,
        "load_1m": round(os.getloadavg()[0], 2),
        "cpus": os.cpu_count() or 1,
    }
    if node.watch.address:
        load["metrics"] = node.watch.address
    return load
