"""The contract of the places of blank sandboxes; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Blanks"]


class Blanks(ABC):
    """The part of `Store` about sandboxes that a node starts ahead, for whichever thread comes next.

    The node is the authority on its blank sandboxes; here they are places and little else. They belong to the
    incarnation that began them, and end with it: when another one announces itself, or when it is closed or gone. A
    thread takes one over by `Store.reserve`. Those that are ready are room: whoever stands in line may have them.
    """

    @abstractmethod
    def begin_blank(self, node_id: str, incarnation: str, slot: str, *, expires_s: float, reserve_free: int) -> bool:
        """Take a place for a blank sandbox that the node is about to start; it expires unless `blank_ready` comes.

        False (nothing done): the node is not ready, without lease or of another incarnation, somebody stands in line,
        fewer than ``reserve_free`` places would be left, or ``slot`` (hex) has a place already.
        """

    @abstractmethod
    def blank_ready(self, node_id: str, incarnation: str, slot: str, *, spec_digest: str, again: bool = False) -> bool:
        """The blank sandbox lives: it may be given to a thread from now on. False if it has no place (any more), or the
        node is of another incarnation; then the node removes it.

        ``again``: the store lost its data, the place is taken anew whatever the room. Not to be said of one that a
        thread may have taken over since.
        """

    @abstractmethod
    def blank_gone(self, node_id: str, incarnation: str, slot: str) -> bool:
        """The blank sandbox was removed, died, or was made a thread's that has a place of its own: its place is free.
        False if it was not known (a thread took its place over)."""

    @abstractmethod
    def blanks(self, node_id: str) -> dict[str, str]:
        """The node's blank sandboxes that are ready: slot → digest of the spec."""
