"""What the caller is told when the store does not take an operation. Pure."""

from __future__ import annotations

from typing import Any

from sandfleet.errors import (
    Busy,
    NotStarted,
    OpConflict,
    SandboxLost,
    SandboxNotFound,
    SandboxStopping,
    SandfleetError,
)

__all__ = ["is_passing", "refusal"]

#: Reasons of `NotStarted` that pass by themselves: the sandbox's node is on its way back, or there is another one.
_PASSING = frozenset(
    {
        "node_down",
        "away",
        "creating",
        "draining",
        "leaving",
        "stale_route",
        "the node is draining",
        "its node came back",
        "the node left",
    }
)


def is_passing(error: SandfleetError) -> bool:
    """Whether an operation did not begin because its node comes, goes or changes: it is worth to wait for that as long
    as the caller does."""
    return isinstance(error, NotStarted) and error.facts.get("reason") in _PASSING


def refusal(status: str, sandbox_id: str, op_id: str) -> SandfleetError:
    """The error of a record that was not taken."""
    facts: dict[str, Any] = {"sandbox_id": sandbox_id, "op_id": op_id}
    again = "acquire again"
    match status:
        case "not_found":
            return SandboxNotFound(f"no sandbox {sandbox_id} of yours; {again}", **facts)
        case "lost":
            return SandboxLost(f"sandbox {sandbox_id} has died, with all that ran in it; {again}", **facts)
        case "stopping":
            return SandboxStopping(f"sandbox {sandbox_id} is being destroyed; {again}", **facts)
        case "node_down":
            return NotStarted(
                f"the node of sandbox {sandbox_id} does not answer", reason=status, retry_after_s=0.5, **facts
            )
        case "away":
            return NotStarted(
                f"the node of sandbox {sandbox_id} is away and expected back", reason=status, retry_after_s=0.2, **facts
            )
        case "draining" | "creating":
            return NotStarted(
                f"the node of sandbox {sandbox_id} takes nothing now ({status})",
                reason=status,
                retry_after_s=0.5,
                **facts,
            )
        case "busy":
            return Busy(
                f"the node of sandbox {sandbox_id} holds as many operations as it may",
                retry_after_s=0.5,
                **facts,
            )
        case "conflict":
            return OpConflict(f"op_id {op_id} belongs to another operation", **facts)
    return NotStarted(f"the operation was not taken: {status}", **facts)
