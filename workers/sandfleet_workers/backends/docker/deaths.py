"""Hearing of the deaths of containers from the engine."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker.engine import TROUBLE, Engine

__all__ = ["DeathWatch", "how_it_ended"]

log = logging.getLogger("sandfleet.node")

_AGAIN_S = 0.5
_AGAIN_MOST_S = 10.0
_KILLED = 128 + signal.SIGKILL


def how_it_ended(state: Mapping[str, Any] | None) -> str:
    """Words for the state of a container that has ended; None when it was removed by somebody."""
    if state is None:
        return "its container was removed"
    code = int(state.get("ExitCode") or 0)
    if state.get("OOMKilled") and code == _KILLED:
        return "out of memory"
    if code <= 128:
        return f"exited with {code}"
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exited with {code}"


class DeathWatch:
    """A thread that follows the engine's events, for as long as the engine is there and whenever it is back.

    Args:
        engine: Whose events.
        labels: Of the containers that count.
        on_death: Called with a container's id once it has ended or was removed.
        on_gap: Called when events may have been missed; looks for itself.
    """

    def __init__(
        self,
        engine: Engine,
        labels: Mapping[str, str],
        on_death: Callable[[str], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._on_death = on_death
        self._on_gap = on_gap
        self._closed = threading.Event()
        self._stream: Any = None
        #: Of the last event, by the engine's clock.
        self._since: float | None = None
        self._thread = threading.Thread(target=self._run, name="sandfleet-docker-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if (stream := self._stream) is not None:
            try:
                stream.close()
            except (*TROUBLE, AttributeError) as exc:  # it ended by itself at this moment
                log.debug("events.closed", extra={"error": str(exc)})
        self._thread.join(5)

    def _run(self) -> None:
        pause_s = _AGAIN_S
        while not self._closed.is_set():
            try:
                self._stream = self._engine.events(self._labels, self._since)
                if self._closed.is_set():
                    self._stream.close()
                # What ended before this stream began is in no stream.
                self._on_gap()
                with closing(self._stream._response):  # the SDK ends the stream and forgets its socket
                    for event in self._stream:
                        pause_s = _AGAIN_S
                        self._heard(event)
            except (StartFailed, *TROUBLE, AttributeError) as exc:
                # The stream was closed under the SDK's hands, or the engine is away.
                if not self._closed.is_set():
                    log.warning("events.interrupted", extra={"error": str(exc)})
            except Exception:  # one odd event must not end the watch
                log.exception("events.failed")
            self._closed.wait(pause_s)
            pause_s = min(pause_s * 2, _AGAIN_MOST_S)

    def _heard(self, event: Mapping[str, Any]) -> None:
        self._since = float(event.get("time") or 0) or self._since
        container = str((event.get("Actor") or {}).get("ID") or event.get("id") or "")
        if container:
            self._on_death(container)
