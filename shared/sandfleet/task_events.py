"""Celery's task events, sent together: on its own each costs as much as the operation it tells of."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps

__all__ = ["EventFlush"]

log = logging.getLogger("sandfleet.events")

#: An event waits this long for others to be sent with, but no more of them than that.
_EVERY_S = 0.05
_AT_ONCE = 500


class EventFlush(bootsteps.StartStopStep):
    """Sends the events of a worker's tasks about twenty times a second, instead of with each turn of its main loop.

    For processes that are ours: add it to the app's consumer steps. Without task events it does nothing.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.timer: Any = None

    def start(self, parent: Any) -> None:
        dispatcher = parent.event_dispatcher
        # It is made anew with every connection, and buffers only where there is an event loop.
        if dispatcher is None or not dispatcher.enabled or not dispatcher.buffer_group:
            return
        dispatcher.on_send_buffered, dispatcher.buffer_limit = None, _AT_ONCE
        self.timer = parent.timer.call_repeatedly(_EVERY_S, dispatcher.flush)

    def stop(self, parent: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def shutdown(self, parent: Any) -> None:
        """The last ones: nobody would send them afterwards."""
        self.stop(parent)
        dispatcher = parent.event_dispatcher
        if dispatcher is None or not dispatcher.enabled:
            return
        try:
            dispatcher.flush()
        except Exception as exc:  # noqa: BLE001  (the broker is away: whoever watches learns it in other ways)
            log.info("events.not_sent", extra={"error": f"{type(exc).__name__}: {exc}"[:200]})
