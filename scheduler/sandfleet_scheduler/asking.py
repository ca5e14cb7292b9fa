"""One thread's wish for a sandbox, as it travels from the client to a scheduler and waits in the line. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandfleet.errors import InvalidArgument, VersionMismatch
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.wire import VERSION
from sandfleet_scheduler.placement import PlacementRequest

__all__ = ["AcquireRequest"]

_POLICIES = ("wait", "reject", "burst")


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """Who wants what.

    Attributes:
        identity: The thread, and its user.
        spec: What kind of sandbox.
        on_lost: When the node with the thread's data is away: ``fresh``: empty data elsewhere will do; ``restore``: the
            newest checkpoint, elsewhere.
        overflow: What to do when every place is taken: ``wait``, ``reject`` or ``burst``.
        asked_at_ms: When the caller began to ask, in store time; 0: not told. For metrics.
        restore: What to begin with, whatever the thread has: ``checkpoint``, and ``from``, another thread of the user.
    """

    identity: Identity
    spec: SandboxSpec
    on_lost: str = "wait_for_home"
    overflow: str = "wait"
    asked_at_ms: int = 0
    restore: Mapping[str, Any] | None = None

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> AcquireRequest:
        """The request of a ``scheduler.acquire`` message, of this version or the one before.

        Raises:
            VersionMismatch, InvalidArgument: It is not one.
        """
        if data.get("v") not in (VERSION, VERSION - 1):
            raise VersionMismatch(f"acquire message of version {data.get('v')!r}; this scheduler speaks {VERSION}")
        owner = data.get("owner")
        if not isinstance(owner, list) or len(owner) != 2:
            raise InvalidArgument("field owner must be [user_id, thread_id]")
        overflow, asked_at_ms = data.get("overflow"), data.get("asked_at_ms")
        restore = data.get("restore")
        if restore is not None and not isinstance(restore, Mapping):
            raise InvalidArgument("field restore must be an object")
        return cls(
            Identity(owner[1], owner[0]),
            SandboxSpec.from_wire(data.get("spec") or {}),
            str(data.get("on_lost", "wait_for_home")),
            str(overflow) if overflow in _POLICIES else "wait",
            asked_at_ms if isinstance(asked_at_ms, int) else 0,
            restore,
        )

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "v": VERSION,
            "owner": [self.identity.user_id, self.identity.thread_id],
            "spec": self.spec.to_wire(),
            "on_lost": self.on_lost,
            "overflow": self.overflow,
            "asked_at_ms": self.asked_at_ms,
            **({"restore": dict(self.restore)} if self.restore is not None else {}),
        }

    def wanted(self, home: str | None) -> PlacementRequest:
        """What placement has to know, with the ``home`` of the thread's data."""
        fresh = self.on_lost == "fresh" or self.restore is not None
        if_gone = self.on_lost == "restore"
        spec = self.spec
        return PlacementRequest(self.identity.digest, spec.backend, spec.labels, home, fresh, spec.digest, if_gone)

    def begins_with(self, away: bool) -> dict[str, Any] | None:
        """What the node is told to restore; None: nothing but what its own settings say.

        Args:
            away: The thread has data, and the node is not where that lies.
        """
        if self.restore is not None:
            return {**self.restore, "required": True, "replace": True}
        if self.on_lost == "restore":
            # Away from home, what the node has of the thread is older than any checkpoint, or nothing.
            return {"checkpoint": "latest", "required": away, "replace": away}
        return {"checkpoint": None} if self.on_lost == "fresh" and away else None

    def for_line(self, home: str | None) -> str:
        """What stands in the line. The home is part of it: it cannot change while the thread has nothing anywhere, and
        whoever serves the line would otherwise look up each thread's."""
        return json.dumps({**self.to_wire(), "home": home}, separators=(",", ":"))

    @classmethod
    def from_line(cls, text: str) -> tuple[AcquireRequest, str | None]:
        """The request and the home of what stands in the line.

        Raises:
            VersionMismatch, InvalidArgument, ValueError: It is not one of ours.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise InvalidArgument("what stands in line must be a JSON object")
        home = data.get("home")
        return cls.from_wire(data), home if isinstance(home, str) else None
