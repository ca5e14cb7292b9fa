"""The contract of the line of threads that wait for a place; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sandfleet.ids import Identity
from sandfleet.store.values import Parked, Push

__all__ = ["Line"]


class Line(ABC):
    """The part of `Store` about threads that stand in line because no place is free.

    Turns are fair per user, not per thread: a user's n-th waiting thread comes after everybody's (n-1)-th. A newcomer
    gets the turn after the one reached (the highest that got a place) and after the last that its user has in the
    line; within one turn whoever came first is first. All without a user count as one user.

    A thread leaves the line when it gets a place (`Store.reserve`), when a sandbox of its own appears, when its
    waiters are answered, when the last of them withdraws, and, found by `parked`, when the last of them expired.
    Nothing of it outlives a loss of the store's data: clients ask again, and are parked again.
    """

    @abstractmethod
    def park(self, identity: Identity, request: str, *, push: Push) -> int:
        """Put a thread at its place in the line, and have the line served soon; how many stand in it now.

        A thread that stands in it already keeps its turn and takes the new ``request`` (JSON text for whoever
        serves it). Nothing is done (0) when the thread has no waiter (`Store.acquire`) or has something live,
        creating or stopping.

        Args:
            push: The message that makes a scheduler serve the line. It is kept. Parking publishes it, and so does
                whatever frees a place, makes a sandbox warm, or brings a node or more places while anybody stands
                in line: at most once until `serve_line` is called or a second has passed.
        """

    @abstractmethod
    def serve_line(self) -> bool:
        """Say that the line is served from here on: whatever changes after this call publishes the message again.

        True if the message was published since the last call. So whoever served under a lock calls it once more
        after giving the lock back: True means that something changed meanwhile, and that the message may have gone
        to somebody who found the lock taken.
        """

    @abstractmethod
    def parked(self, *, after: str = "", limit: int = 200) -> list[Parked]:
        """The line in order of turns, at most 1000, from after the ``cursor`` of an entry read before.

        Those without an unexpired waiter leave it and are not given. An empty list is the end. A cursor holds while
        the line changes, its own entry too: nobody is given twice or passed over, but for those who come later with an
        earlier turn.
        """

    @abstractmethod
    def line_length(self) -> int:
        """How many threads stand in line; those whose waiters expired count until `parked` meets them."""

    @abstractmethod
    def withdraw(self, identity: Identity, op_id: str) -> int:
        """One waiter gives up; the thread leaves the line with its last one.

        Gives the thread's position before that: 1 is the next, 0 when it did not stand in line.
        """
