"""The node's one waiter: a thread that waits for every running operation at once.

A running command holds no pool thread. Whoever started it registers a file descriptor and a
callback here and goes away; the waiter calls back when there is something to read. One thread
serves all sandboxes of a node, so a callback must never block.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["READ", "WRITE", "Timer", "Waiter", "shared_waiter"]

log = logging.getLogger(__name__)

READ = select.EPOLLIN | select.EPOLLRDHUP
WRITE = select.EPOLLOUT

#: The loop never sleeps longer. A timer further away than this needs no wake-up call to be noticed in
#: time, and a wake-up costs more than everything else about a timer.
_MAX_SLEEP_S = 1.0


class Timer:
    """A pending `Waiter.call_later`."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None] | None) -> None:
        self.when = when
        self.callback = callback

    def cancel(self) -> None:
        """Forget the callback; one that already runs is not stopped."""
        self.callback = None


class Waiter:
    """Calls back when a descriptor is ready, when a time has come, or at once; always on its own thread.

    All methods may be called from any thread. epoll lets descriptors be added and changed while
    another thread waits on it, so registering wakes nobody.
    """

    def __init__(self, name: str = "sandfleet-waiter") -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._wakes_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def register(self, fd: int, callback: Callable[[int], None], events: int = READ) -> None:
        """Call ``callback(events)`` whenever ``fd`` is ready (level-triggered), until `unregister`."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Wait for other events on a registered descriptor."""
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Forget a descriptor; do this before closing it. Unknown ones are fine.

        A callback that the waiter is about to make may still come.
        """
        if self._callbacks.pop(fd, None) is not None and not self._closed:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):  # already closed, here or by the kernel
                pass

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the waiter's thread, as soon as it is free."""
        self._soon.append(callback)
        if threading.current_thread() is not self._thread:
            self._wake()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback()`` on the waiter's thread after ``delay_s`` seconds."""
        timer = Timer(time.monotonic() + delay_s, callback)
        with self._lock:
            heapq.heappush(self._timers, (timer.when, next(self._order), timer))
            wake = timer.when < self._wakes_at
        if wake:
            self._wake()
        return timer

    def close(self) -> None:
        """End the thread. Callbacks that are due are not made any more."""
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError:  # closed meanwhile
            pass

    def _run(self) -> None:
        try:
            while not self._closed:
                for fd, events in self._epoll.poll(self._sleep_s()):
                    if fd == self._wake_fd:
                        os.eventfd_read(fd)
                    elif (callback := self._callbacks.get(fd)) is not None:
                        _call(callback, events)
                self._wakes_at = 0.0
                for _ in range(len(self._soon)):  # those they add themselves wait for the next round
                    _call(self._soon.popleft())
                self._run_due()
        finally:
            self._closed = True
            self._epoll.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _sleep_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            sleep_s = _MAX_SLEEP_S
            if self._soon:
                sleep_s = 0.0
            elif self._timers:
                sleep_s = min(max(self._timers[0][0] - now, 0.0), _MAX_SLEEP_S)
            self._wakes_at = now + sleep_s
            return sleep_s

    def _run_due(self) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > time.monotonic():
                    return
                timer = heapq.heappop(self._timers)[2]
            if (callback := timer.callback) is not None:
                _call(callback)


def _call(callback: Callable[..., None], *args: int) -> None:
    try:
        callback(*args)
    except Exception:  # one sandbox's callback must not end the loop of all
        log.exception("waiter.callback_failed")


_shared: Waiter | None = None
_shared_pid = 0
_shared_lock = threading.Lock()


def shared_waiter() -> Waiter:
    """The waiter of this process; made anew after a fork, because threads do not survive one."""
    global _shared, _shared_pid
    with _shared_lock:
        if _shared is None or _shared_pid != os.getpid() or not _shared.is_alive():
            _shared, _shared_pid = Waiter(), os.getpid()
        return _shared
