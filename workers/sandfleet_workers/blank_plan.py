"""Which blank sandboxes a node keeps. Pure: what was wanted and what there is in, what to start and end out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BlankPlan", "Demand", "blank_plan", "blank_targets"]


@dataclass(frozen=True, slots=True)
class Demand:
    """How much one kind of sandbox was wanted lately: so many creations, the last one at ``at_s``."""

    creations: int
    at_s: float


@dataclass(frozen=True, slots=True)
class BlankPlan:
    """What to do now.

    Attributes:
        start: Kinds to start one of, each as often as it is named, the most wanted first.
        end: Slots of blank sandboxes to remove.
    """

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Share:
    kind: str
    count: int
    rest: float = field(compare=False)


def blank_targets(demand: Mapping[str, Demand], *, default: str, size: int) -> dict[str, int]:
    """How many of each kind: ``size`` in all, shared out by what was wanted lately.

    The node's own kind (``default``) counts as wanted once more than it was, so that it is there when nothing is known.
    Kinds that get none are absent.
    """
    if size <= 0:
        return {}
    weights = {kind: one.creations for kind, one in demand.items()}
    weights[default] = weights.get(default, 0) + 1
    total = sum(weights.values())
    shares = [_Share(kind, size * weight // total, size * weight / total % 1) for kind, weight in weights.items()]
    targets = {share.kind: share.count for share in shares}

    def claim_to_the_rest(share: _Share) -> tuple[float, float, str]:
        last = demand[share.kind].at_s if share.kind in demand else 0.0
        return -share.rest, -last, share.kind

    for share in sorted(shares, key=claim_to_the_rest)[: size - sum(targets.values())]:
        targets[share.kind] += 1
    return {kind: count for kind, count in targets.items() if count}


def blank_plan(
    targets: Mapping[str, int], *, ready: Mapping[str, str], starting: Mapping[str, int], outdated: frozenset[str]
) -> BlankPlan:
    """What to start and what to end so that there are as many as ``targets`` says, and never more in all.

    Args:
        targets: Kind → how many.
        ready: Slot → kind, of those that run.
        starting: Kind → how many are being started.
        outdated: Slots to remove whatever their kind (too old).
    """
    kept: dict[str, list[str]] = {}
    for slot, kind in sorted(ready.items()):
        if slot not in outdated:
            kept.setdefault(kind, []).append(slot)
    surplus = [slot for kind, slots in kept.items() for slot in slots[targets.get(kind, 0) :]]
    start: list[str] = []
    for kind, count in sorted(targets.items(), key=lambda item: (-item[1], item[0])):
        start += [kind] * max(0, count - len(kept.get(kind, ())) - starting.get(kind, 0))
    total = sum(map(len, kept.values())) + sum(starting.values()) + len(start)
    too_many = max(0, total - sum(targets.values()))
    return BlankPlan(tuple(start), (*sorted(outdated & set(ready)), *surplus[:too_many]))
