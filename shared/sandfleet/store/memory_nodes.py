"""Nodes in memory: the twin of `sandfleet.store.redis_nodes`."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sandfleet.errors import LeaseLost, NodeIdInUse
from sandfleet.model import NodeState, NodeView, SandboxState
from sandfleet.store.base import Closed, NodeRecord, Renewal, Store
from sandfleet.store.codec import ms_of
from sandfleet.store.memory_sandboxes import creation_ended
from sandfleet.store.memory_state import DAY_MS, Node
from sandfleet.store.memory_steps import STOPPING_MS, MemorySteps, is_blank


class MemoryNodes(MemorySteps, Store):
    """The part of `MemoryStore` about nodes."""

    def now_ms(self) -> int:
        return self._now()

    def announce(self, node: NodeRecord, *, lease_s: float, again: bool = False, take_over: bool = False) -> int:
        with self._lock:
            now, held = self._now(), self._leases.get(node.node_id)
            known = self._nodes.get(node.node_id)
            ended = take_over and known is not None and known.record.data_id == node.data_id
            if held is not None and held != node.incarnation and not ended:
                raise NodeIdInUse(
                    f"node {node.node_id} is held by another live process (incarnation {held})",
                    node_id=node.node_id,
                )
            if known is not None and known.retired == node.incarnation:
                raise _lease_lost(node.node_id, node.incarnation)
            if known is not None and known.record.incarnation == node.incarnation:
                known.record = node
                self._nodes.touch(node.node_id, DAY_MS)
            else:
                self._drop_blanks(node.node_id)
                retired = known.retired if known else ""
                fresh = Node(node, NodeState.READY, now, {}, retired, returning=ended)
                self._nodes.put(node.node_id, fresh, DAY_MS)
                self._tell(node.node_id, "announced", incarnation=node.incarnation)
            self._leases.put(node.node_id, node.incarnation, ms_of(lease_s))
            self._longest_lease_ms = max(self._longest_lease_ms, ms_of(lease_s))
            if again and known is None:
                self._recovering_until = now + self._longest_lease_ms
            self._kick()
            return now

    def renew(
        self, node_id: str, incarnation: str, *, lease_s: float, load: Mapping[str, Any] | None = None
    ) -> Renewal:
        with self._lock:
            held, node = self._leases.get(node_id), self._nodes.get(node_id)
            if held is not None and held != incarnation:
                raise _lease_lost(node_id, incarnation)
            if node is None:
                return Renewal(self._now(), NodeState.GONE, known=False)
            if node.record.incarnation != incarnation or node.state == NodeState.GONE:
                raise _lease_lost(node_id, incarnation)
            self._nodes.touch(node_id, DAY_MS)
            self._leases.put(node_id, incarnation, ms_of(lease_s))
            if load is not None:
                node.load = dict(load)
            if held is None:
                self._kick()
            return Renewal(self._now(), node.state, known=True)

    def set_node_state(
        self,
        node_id: str,
        state: NodeState,
        *,
        incarnation: str | None = None,
        reason: str = "",
        lease_s: float | None = None,
    ) -> bool:
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.state == NodeState.GONE:
                return False
            if incarnation and node.record.incarnation != incarnation:
                return False
            if node.state == NodeState.AWAY and state not in (NodeState.AWAY, NodeState.GONE):
                return False
            if state == NodeState.AWAY:
                self._drop_blanks(node_id)
            if lease_s is not None and self._leases.get(node_id) == node.record.incarnation:
                self._leases.touch(node_id, ms_of(lease_s))
            if state == NodeState.READY:
                node.reason = ""
            elif reason or node.state != state:
                node.reason = reason
            if node.state != state:
                node.state = state
                self._tell(node_id, "state", state=str(state), **({"reason": reason} if reason else {}))
                if state == NodeState.READY:
                    self._kick()
            if state == NodeState.GONE:
                self._leases.drop(node_id)
                node.retired = node.record.incarnation
                self._drop_blanks(node_id)
            return True

    def nodes(self) -> list[NodeView]:
        with self._lock:
            return [self._node_view(node_id) for node_id in sorted(self._nodes)]

    def _node_view(self, node_id: str) -> NodeView:
        node = self._nodes.get(node_id)
        assert node is not None
        record, now = node.record, self._now()
        warm = self._warm[node_id]
        making = [member for member, until in self._places[node_id].items() if now < until < math.inf]
        starting = sum(map(is_blank, making))
        return NodeView(
            node_id=node_id,
            incarnation=record.incarnation,
            state=node.state,
            alive=self._leases.get(node_id) == record.incarnation,
            replicas=record.replicas,
            places=self._taken(node_id),
            warm=len(warm),
            data_id=record.data_id,
            backends=tuple(record.backends),
            labels=dict(record.labels),
            inflight=len(self._inflight[node_id]),
            started_at=node.started_ms / 1000,
            host=record.host,
            pid=record.pid,
            version=record.version,
            load=node.load,
            burst_limit=record.burst_limit,
            creating=len(making) - starting,
            starting=starting,
            stopping=sum(1 for since in self._stopping[node_id].values() if since > now - STOPPING_MS),
            reason=node.reason,
            idlest=tuple(heapq.nsmallest(32, warm.items(), key=lambda item: (item[1], item[0]))),
            blanks=dict(Counter(self._blanks[node_id].values())),
        )

    def close_incarnation(self, node_id: str, incarnation: str | None, *, reason: str, limit: int = 200) -> Closed:
        with self._lock:
            node, limit = self._nodes.get(node_id), max(1, limit)
            if incarnation is None:
                if self._leases.get(node_id) is not None:
                    return Closed(0, 0, (), more=False)
                if node is not None and node.state != NodeState.GONE:
                    node.state, node.retired = NodeState.GONE, node.record.incarnation
                    self._tell(node_id, "closed", incarnation=node.record.incarnation, reason=reason)
            elif node is not None and node.record.incarnation != incarnation:
                return Closed(0, 0, (), more=False)
            closed, doubtful, more = self._close_ops(node_id, incarnation, reason, limit)
            lost, more_sandboxes = self._close_sandboxes(node_id, incarnation, reason, limit)
            if incarnation is None and not (more or more_sandboxes):
                self.queues.pop(f"sandfleet.node.{node_id}", None)
            if incarnation is not None and node is not None and not (more or more_sandboxes):
                node.returning = False
            return Closed(closed, doubtful, tuple(lost), more or more_sandboxes)

    def _close_ops(self, node_id: str, kept: str | None, reason: str, limit: int) -> tuple[int, int, bool]:
        closed = doubtful = handled = 0
        inflight = self._inflight[node_id]
        for op_id in list(inflight)[:limit]:
            op = self._ops.get(op_id)
            if op is not None and op.record.route.incarnation == kept:
                break
            handled += 1
            if op is None or op.state not in ("recorded", "claimed"):
                inflight.pop(op_id, None)
            elif op.state == "claimed" and op.record.effect:
                message = f"the operation had begun and nobody can tell how it ended: {reason}"
                self._close_op(op_id, op, "outcome_unknown", message, reason=reason)
                doubtful += 1
            else:
                self._close_not_started(op_id, op, reason)
                closed += 1
        return closed, doubtful, handled == limit and bool(inflight)

    def _close_sandboxes(self, node_id: str, kept: str | None, reason: str, limit: int) -> tuple[list[str], bool]:
        lost: list[str] = []
        node = self._nodes.get(node_id)
        if node is None or node.record.incarnation != kept:
            self._drop_blanks(node_id)
        for sandbox_id, _ in sorted(self._places[node_id].items(), key=lambda item: (item[1], item[0])):
            if len(lost) == limit:
                return lost, True
            sandbox = self._sandboxes.get(sandbox_id)
            if is_blank(sandbox_id):
                continue
            if sandbox is None or sandbox.route.node_id != node_id:
                del self._places[node_id][sandbox_id]
            elif sandbox.route.incarnation != kept:
                state = sandbox.state
                self._make_lost(sandbox, reason)
                lost.append(sandbox_id)
                if state == SandboxState.CREATING:
                    self._fail_waiters(sandbox.owner, creation_ended(sandbox_id, reason))
                elif state == SandboxState.STOPPING:
                    self._request_again(sandbox.owner)
        return lost, False

    def drain_inflight(self, node_id: str, incarnation: str, *, limit: int = 200) -> Closed:
        with self._lock:
            closed = 0
            for op_id in list(self._inflight[node_id]):
                op = self._ops.get(op_id)
                if op is None or op.state != "recorded" or op.record.route.incarnation != incarnation:
                    continue
                if closed == max(1, limit):
                    return Closed(closed, 0, (), more=True)
                self._close_not_started(op_id, op, "the node is draining")
                closed += 1
            return Closed(closed, 0, (), more=False)


def _lease_lost(node_id: str, incarnation: str) -> LeaseLost:
    return LeaseLost(
        f"incarnation {incarnation} of node {node_id} was closed or followed by another; it must stop",
        node_id=node_id,
        incarnation=incarnation,
    )
