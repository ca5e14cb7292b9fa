"""What a caller is told who gets no place: what is missing, how full it is, what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sandfleet.errors import CapacityError, HomeUnavailable, NoCapacity, QuotaExceeded, SandfleetError
from sandfleet.fleet_facts import place_counts
from sandfleet.model import NodeState, NodeView
from sandfleet_scheduler.asking import AcquireRequest

__all__ = ["no_place", "quota_reached"]

#: Something is to change before it is worth another try, and nobody tells when it did.
_LATER_S = 5.0
_SOON_S = 0.5
_NAMED = 3
_REASON_CHARS = 200
_WHY = {
    "no_node": "no node is alive and ready; start one with `sandfleet worker`",
    "no_backend": "no node offers the backend {backend!r}; `sandfleet nodes` shows theirs: set SANDFLEET_BACKEND",
    "no_label": "no node carries the labels {labels}; see `sandfleet nodes`",
}


def no_place(
    reason: str, request: AcquireRequest, nodes: Iterable[NodeView], fitting: Iterable[NodeView] = ()
) -> SandfleetError:
    """The error for a thread that no node takes.

    Args:
        reason: no_node, no_backend, no_label, home_away, or full: the caller is not to wait for a place.
        nodes: Every node; the cordoned ones of them are named, with the reason.
        fitting: Those that would do if they had room.
    """
    cordoned = _cordoned(nodes)
    if reason == "home_away":
        return HomeUnavailable(
            f"the data of thread {request.identity.thread_id} lies on a data root whose nodes are away; wait for them, "
            "or acquire with on_lost='restore' to go on with the newest checkpoint once they are gone, or with "
            f"on_lost='fresh' to start with empty data{cordoned}",
            retry_after_s=1.0,
            thread_id=request.identity.thread_id,
        )
    if reason in _WHY:
        why = _WHY[reason].format(backend=request.spec.backend, labels=dict(request.spec.labels))
        return NoCapacity(f"{why}{cordoned}", retry_after_s=_SOON_S, reason=reason)
    return _full(request, list(fitting), cordoned)


def _full(request: AcquireRequest, fitting: list[NodeView], cordoned: str) -> CapacityError:
    replicas = sum(node.replicas for node in fitting)
    counts = Counter[str]()
    for node in fitting:
        counts.update(place_counts(node))
    active, warm, creating, blank = (counts[state] for state in ("live", "warm", "creating", "blank"))
    return NoCapacity(
        f"every fitting node is full: {replicas} places, {active} sandboxes in use, {warm} warm, {creating} being "
        f"created, {blank} being started ahead, and the overflow policy is {request.overflow}; release sandboxes, add "
        f"nodes or places, or wait in line (overflow_policy: wait){cordoned}",
        retry_after_s=_LATER_S,
        reason="full",
        overflow=request.overflow,
        active=active,
        warm=warm,
        creating=creating,
        blank=blank,
        replicas=replicas,
    )


def quota_reached(request: AcquireRequest, max_per_user: int) -> QuotaExceeded:
    """The error for a user who has as many sandboxes as one may, and does not want to wait for an end of one."""
    return QuotaExceeded(
        f"user {request.identity.user_id} has {max_per_user} sandboxes, which is as many as one user may have; "
        "destroy or release one of them, or raise max_per_user on the schedulers",
        retry_after_s=_LATER_S,
        reason="quota",
        overflow=request.overflow,
        max_per_user=max_per_user,
        user_id=request.identity.user_id,
    )


def _cordoned(nodes: Iterable[NodeView]) -> str:
    """Which nodes would be there if they were not cordoned: often that is the answer."""
    found = [node for node in nodes if node.alive and node.state is NodeState.CORDONED]
    told = [
        f"{node.node_id} is cordoned" + (f" ({node.reason[:_REASON_CHARS]})" if node.reason else "")
        for node in found[:_NAMED]
    ]
    if len(found) > _NAMED:
        told.append(f"{len(found) - _NAMED} more are cordoned")
    return f". {'; '.join(told)}; `sandfleet uncordon {found[0].node_id}` opens it again" if found else ""
