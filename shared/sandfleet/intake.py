"""What stands between a queue and Celery: a message that is none must not end the process that reads it, and a broker
that was away is met again at once."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

from celery import Celery, bootsteps
from celery.apps import worker as celery_worker
from celery.worker.consumer import Consumer
from kombu.transport import redis as transport

from sandfleet.store.base import Store

__all__ = ["CONSUMER", "FollowRedis", "QuickConsumer", "guard_intake"]

log = logging.getLogger("sandfleet.intake")
_celerys = logging.getLogger("celery.worker.consumer.consumer")

#: The setting ``worker_consumer`` of nodes and schedulers.
CONSUMER = f"{__name__}:QuickConsumer"
_LOOK_EVERY_S = 0.5
#: kombu's pauses between two tries to reach the broker, in seconds.
_RECONNECT = {"interval_start": 0.2, "interval_step": 0.2, "interval_max": 1.0}

_Channel: Any = transport.Channel  # the stubs know half of it
_SentinelChannel: Any = transport.SentinelChannel


class _Guard:
    """What kombu's channel lacks: a message nobody can read is dropped with a line in the log.

    kombu parses what it popped, and Celery chooses its task, in the worker's main loop. ▲ (one LPUSH of an
    empty string ended the worker) A recorded operation whose message was dropped is answered as lost.
    """

    connection: Any
    connection_errors: Any

    def _brpop_read(self, **options: Any) -> Any:
        above: Any = super()
        try:
            return above._brpop_read(**options)
        except (*self.connection_errors, *self.connection.channel_errors, Empty):
            raise
        except Exception as exc:  # noqa: BLE001  (whatever parsing somebody's bytes may raise)
            return _dropped(exc)

    def basic_consume(self, queue: str, *args: Any, **options: Any) -> Any:
        above: Any = super()
        answer = above.basic_consume(queue, *args, **options)
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


class _GuardedChannel(_Guard, _Channel):  # type: ignore[misc]
    pass


class _GuardedSentinelChannel(_Guard, _SentinelChannel):  # type: ignore[misc]
    pass


def _dropped(exc: Exception) -> bool:
    log.warning("message.dropped", extra={"error": f"{type(exc).__name__}: {exc}"[:300]})
    return True


def guard_intake() -> None:
    """Make every Celery consumer of this process survive unreadable messages, and leave what Celery prints beside the
    log away. For processes that are ours alone."""
    transport.Transport.Channel = _GuardedChannel
    transport.SentinelTransport.Channel = _GuardedSentinelChannel
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


class FollowRedis(bootsteps.StartStopStep):
    """Leaves a broker that is no longer the primary: one that hung and woke up says nothing of it for ten seconds, and
    meanwhile messages wait at the new one. The store notices, for it asks the Sentinels."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.timer: Any = None

    @staticmethod
    def look_at(app: Celery, store: Store) -> None:
        """Name the store that tells."""
        app.sandfleet_store = store  # type: ignore[attr-defined]

    def start(self, parent: Any) -> None:
        """Look twice a second, from the main loop."""
        store = parent.app.sandfleet_store
        began = store.moves

        def look() -> None:
            if store.moves != began:
                log.warning("broker.moved")
                self.stop(parent)
                _break_connections(parent.connection)

        self.timer = parent.timer.call_repeatedly(_LOOK_EVERY_S, look)

    def stop(self, parent: Any) -> None:
        """Look no more; it begins anew with the next connection."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    shutdown = stop


def _break_connections(connection: Any) -> None:
    """Make the main loop find its connections broken, which is how kombu comes to ask for the primary again."""
    for channel, _ in list(connection.transport.cycle._fd_to_chan.values()):
        for client in (channel.client, channel.subclient):
            sock = getattr(client.connection, "_sock", None)
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
