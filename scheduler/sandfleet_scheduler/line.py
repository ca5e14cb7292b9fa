"""What becomes of those who stand in line for a place. Pure: nodes and requests in, one verdict after the other out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from sandfleet.model import NodeState, NodeView
from sandfleet_scheduler.placement import PlacementRequest, fitting_nodes, rank

__all__ = ["Room", "Turn", "Verdict"]


class Verdict(StrEnum):
    """What whoever is next is to do."""

    PLACE = "place"  #: take the free place on ``node``
    SOON = "soon"  #: a place on ``node`` is about to be free
    EVICT = "evict"  #: end ``sandboxes`` on ``node``: that frees one
    BURST = "burst"  #: take a place above the replicas of ``node``
    WAIT = "wait"  #: nothing can be done now
    REFUSE = "refuse"  #: no present node could ever take it: ``reason``


_PROMISES = frozenset({Verdict.SOON, Verdict.EVICT})


@dataclass(frozen=True, slots=True)
class Turn:
    """One verdict. Whatever it takes is counted already; ``blank`` is the spec of the blank sandbox that it takes."""

    verdict: Verdict
    node: NodeView | None = None
    sandboxes: tuple[str, ...] = ()
    reason: str = ""
    blank: str | None = None


class Room:
    """The room of a fleet, counted down while those in line are gone through in their order.

    Whoever comes first takes: a blank sandbox of the spec, a free place, that of another blank sandbox, one that is
    about to be free, one that an eviction makes free, and only then is anybody kept waiting; who waits keeps nobody
    behind from what he has no use for himself. A place that is about to be free is promised to one thread, so that no
    second sandbox is evicted for it: neither in this pass, nor in the next one, which finds the removal under way.

    One verdict at a time and not one plan: what was found free may turn out taken, and then those behind must not
    be planned as if it were not. The caller says so (`filled`, `gone`, `kept`, `give_back`) and asks again.

    Args:
        nodes: Every node, as the store has them at this moment.
    """

    def __init__(self, nodes: Iterable[NodeView]) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        #: Free places less those promised; below zero where burst places are taken, or places that will be free.
        self._room = {node.node_id: node.replicas - node.places for node in self._nodes.values()}
        self._blanks = {node.node_id: Counter(node.blanks) for node in self._nodes.values()}
        self._coming = {node.node_id: node.stopping for node in self._nodes.values()}
        self._promised = dict.fromkeys(self._nodes, 0)
        # Longest idle first.
        self._evictable = {node.node_id: deque(node.idlest) for node in self._nodes.values()}
        self._fitting: dict[Hashable, tuple[tuple[NodeView, ...], str]] = {}
        self._waits: set[Hashable] = set()

    @property
    def left(self) -> int:
        """At most so many more can be given something, whoever they are; 0: everybody waits or is refused."""
        return sum(
            max(0, self._room[name] + max(node.burst_limit, self._coming[name] + len(self._evictable[name])))
            + self._blanks[name].total()
            for name, node in self._nodes.items()
            if node.alive and node.state is NodeState.READY
        )

    def turn(self, request: PlacementRequest, *, burst: bool = False) -> Turn:
        """The verdict for the next in line; ``burst``: it may take a place above the replicas."""
        shape = (request.backend, frozenset(request.labels.items()), request.home, request.fresh, request.if_gone)
        if shape not in self._fitting:
            self._fitting[shape] = fitting_nodes(request, self._nodes.values())
        fitting, reason = self._fitting[shape]
        if reason:
            return Turn(Verdict.REFUSE, reason=reason)
        if (shape, burst) in self._waits:
            return Turn(Verdict.WAIT)
        turn = self._free(request, fitting) or self._soon(fitting) or self._evict(fitting)
        if turn is None and burst:
            turn = self._above(request, fitting)
        if turn is None:
            self._waits.add((shape, burst))
            return Turn(Verdict.WAIT)
        assert turn.node is not None
        self._count(turn, 1)
        return turn

    def _free(self, request: PlacementRequest, fitting: Iterable[NodeView]) -> Turn | None:
        free = [node for node in fitting if self._room[node.node_id] > 0 or self._blanks[node.node_id].total()]
        if not free:
            return None
        node = self._best(request, free)
        blanks, blank = self._blanks[node.node_id], None
        if blanks[request.spec_digest]:
            blank = request.spec_digest
        elif self._room[node.node_id] <= 0:
            blank = next(spec for spec, count in blanks.items() if count)
        return Turn(Verdict.PLACE, node, blank=blank)

    def _soon(self, fitting: Iterable[NodeView]) -> Turn | None:
        soon = next((node for node in fitting if self._room_soon(node) > 0), None)
        return Turn(Verdict.SOON, soon) if soon is not None else None

    def _evict(self, fitting: Iterable[NodeView]) -> Turn | None:
        """The longest idle of all, but first where one is enough: burst places have to be given back as well."""
        able = [node for node in fitting if len(self._evictable[node.node_id]) > -self._room_soon(node)]
        if not able:
            return None
        node = min(able, key=lambda node: (-self._room_soon(node), self._evictable[node.node_id][0][1], node.node_id))
        waiting = self._evictable[node.node_id]
        chosen = tuple(waiting.popleft()[0] for _ in range(1 - self._room_soon(node)))
        self._coming[node.node_id] += len(chosen)
        return Turn(Verdict.EVICT, node, chosen)

    def _above(self, request: PlacementRequest, fitting: Iterable[NodeView]) -> Turn | None:
        """Not where a place is promised: with one more above the replicas it would not become free."""
        names = [node for node in fitting if not self._promised[node.node_id]]
        above = [node for node in names if self._room[node.node_id] + node.burst_limit > 0]
        return Turn(Verdict.BURST, self._best(request, above)) if above else None

    def _best(self, request: PlacementRequest, nodes: Iterable[NodeView]) -> NodeView:
        return min(nodes, key=lambda node: rank(request, node, self._room[node.node_id], self._blanks[node.node_id]))

    def _room_soon(self, node: NodeView) -> int:
        return self._room[node.node_id] + self._coming[node.node_id]

    def _count(self, turn: Turn, taken: int) -> None:
        assert turn.node is not None
        name = turn.node.node_id
        if turn.blank is None:
            self._room[name] -= taken
        else:
            self._blanks[name][turn.blank] -= taken
        self._promised[name] += taken * (turn.verdict in _PROMISES)

    # --- what turned out otherwise -----------------------------------------------------------

    def give_back(self, turn: Turn) -> None:
        """The place that the verdict took is not needed after all."""
        self._count(turn, -1)
        self._waits.clear()

    def kept(self, turn: Turn, count: int) -> None:
        """So many of the sandboxes that the verdict names are not ended: they are in use again, or need not be."""
        assert turn.node is not None
        self._coming[turn.node.node_id] -= count

    def filled(self, node: NodeView) -> None:
        """The node has no free place: somebody else was faster."""
        self._room[node.node_id] = min(self._room[node.node_id], 0)
        self._blanks[node.node_id].clear()

    def gone(self, node: NodeView) -> None:
        """The node takes nothing: it died, or is not ready any more."""
        if self._nodes.pop(node.node_id, None) is not None:
            self._fitting.clear()
            self._waits.clear()
