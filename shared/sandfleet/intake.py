"""What stands between a queue and Celery: a message that is none must not end the process that reads it, and a broker
that was away is met again at once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from queue import Empty
from typing import Any

from celery.apps import worker as celery_worker
from celery.worker.consumer import Consumer
from kombu.transport import redis as transport

__all__ = ["CONSUMER", "QuickConsumer", "guard_intake"]

log = logging.getLogger("sandfleet.intake")
_celerys = logging.getLogger("celery.worker.consumer.consumer")

#: The setting ``worker_consumer`` of nodes and schedulers.
CONSUMER = f"{__name__}:QuickConsumer"
#: kombu's pauses between two tries to reach the broker, in seconds.
_RECONNECT = {"interval_start": 0.2, "interval_step": 0.2, "interval_max": 1.0}

_Channel: Any = transport.Channel  # the stubs know half of it


class _GuardedChannel(_Channel):  # type: ignore[misc]  # for that reason
    """kombu's channel, except that a message nobody can read is dropped with a line in the log.

    kombu parses what it popped, and Celery chooses its task, in the worker's main loop. ▲ (one LPUSH of an
    empty string ended the worker) A recorded operation whose message was dropped is answered as lost.
    """

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (*self.connection_errors, *self.connection.channel_errors, Empty):
            raise
        except Exception as exc:  # noqa: BLE001  (whatever parsing somebody's bytes may raise)
            return _dropped(exc)

    def basic_consume(self, queue: str, *args: Any, **options: Any) -> Any:
        answer = super().basic_consume(queue, *args, **options)
        callbacks = self.connection._callbacks
        callbacks[queue] = self._guarded(callbacks[queue])
        return answer

    def _guarded(self, deliver: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def guarded(message: Any) -> Any:
            try:
                return deliver(message)
            except Exception as exc:
                # kombu counts KeyError as a broken connection; here it is a field that a message lacks.
                if isinstance(exc, self.connection_errors) and not isinstance(exc, KeyError):
                    raise
                return _dropped(exc)

        return guarded


def _dropped(exc: Exception) -> bool:
    log.warning("message.dropped", extra={"error": f"{type(exc).__name__}: {exc}"[:300]})
    return True


def guard_intake() -> None:
    """Make every Celery consumer of this process survive unreadable messages, and leave what Celery prints beside the
    log away. For processes that are ours alone."""
    transport.Transport.Channel = _GuardedChannel
    celery_worker.safe_say = lambda *_: None  # type: ignore[attr-defined]  # missing in the stubs


class QuickConsumer(Consumer):
    """Celery's consumer, except that it asks for its broker at least once a second, and that a message it has no task
    for is not written to the log with all that is in it.

    Celery pauses 2, 4, 6… seconds: an outage of ten seconds would cost twenty. There is no setting for it.
    """

    def ensure_connected(self, conn: Any) -> Any:
        conn.ensure_connection = functools.partial(conn.ensure_connection, **_RECONNECT)
        return super().ensure_connected(conn)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Nobody here has a task of that name: the sender is told, as Celery does."""
        _refuse(message, "there is no such task", super().on_unknown_task, body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """A task without arguments that could be read."""
        _refuse(message, "the task cannot be read", super().on_invalid_task, body, message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """No task at all."""
        _refuse(message, "it is no task", super().on_unknown_message, body, message)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Not in the encoding it says."""
        _refuse(message, "it cannot be decoded", super().on_decode_error, message, exc)


def _refuse(message: Any, why: str, refuse: Callable[..., Any], *args: Any) -> None:
    """What Celery does with such a message, but for its words: they have the arguments, environment values and all."""
    headers = message.headers if isinstance(message.headers, dict) else {}
    facts = {"task": str(headers.get("task"))[:100], "op_id": str(headers.get("id"))[:80]}
    log.warning("message.refused", extra={**facts, "why": why})
    _celerys.disabled = True
    try:
        refuse(*args)
    finally:
        _celerys.disabled = False
