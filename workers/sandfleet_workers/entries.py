"""What a node writes down about a sandbox that may outlive it. Pure.

Whatever is read back is judged: the file may be of another version, cut short, or written by somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity, is_sandbox_id
from sandfleet.model import SandboxSpec

__all__ = ["Entry"]

_VERSION = 1
_SLOT = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One sandbox of the journal.

    Attributes:
        slot: The one it was claimed from, None if it was started for its thread.
        made_at_s: When it was started, by CLOCK_BOOTTIME.
        ticket: What its backend's `attach` needs.
        stopping: Somebody has begun to end it.
    """

    sandbox_id: str
    identity: Identity
    epoch: int
    spec: SandboxSpec
    backend: str
    slot: str | None
    made_at_s: float
    ticket: Mapping[str, Any]
    stopping: bool = False

    @property
    def name(self) -> str:
        """What the journal calls it: its slot, or sandbox and epoch, which are this ownership's alone."""
        return self.slot or f"{self.sandbox_id[:32]}-{self.epoch:x}"

    @property
    def run_dir(self) -> str:
        """The name of its run directory."""
        return f"b{self.slot}" if self.slot else f"{self.sandbox_id[:16]}.{self.epoch:x}"

    @property
    def container(self) -> str:
        """The name by which its backend removes what is left of it."""
        return str(self.ticket.get("name") or "")

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "v": _VERSION,
            "sandbox_id": self.sandbox_id,
            "thread": self.identity.thread_id,
            "user": self.identity.user_id,
            "epoch": self.epoch,
            "spec": self.spec.to_wire(),
            "backend": self.backend,
            "slot": self.slot,
            "made_at_s": self.made_at_s,
            "ticket": dict(self.ticket),
            "stopping": self.stopping,
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Entry:
        """The entry of its JSON form.

        Raises:
            ValueError: It is none, or not one that this version understands.
        """
        if data.get("v") != _VERSION:
            raise ValueError(f"version {data.get('v')!r}")
        try:
            identity = Identity(data["thread"], data["user"])
            spec = SandboxSpec.from_wire(data["spec"])
            entry = cls(
                sandbox_id=data["sandbox_id"],
                identity=identity,
                epoch=data["epoch"],
                spec=spec,
                backend=data["backend"],
                slot=data["slot"],
                made_at_s=float(data["made_at_s"]),
                ticket=data["ticket"],
                stopping=data["stopping"] is True,
            )
        except KeyError as exc:
            raise ValueError(f"it has no {exc}") from None
        except (SandfleetError, TypeError, AttributeError, OverflowError) as exc:
            raise ValueError(f"{type(exc).__name__}: {exc}") from None
        if problem := _problem(data, identity):
            raise ValueError(problem)
        return entry


def _problem(data: Mapping[str, Any], identity: Identity) -> str:
    """What is wrong with a complete entry; empty for a good one."""
    sandbox_id, epoch, slot = data["sandbox_id"], data["epoch"], data["slot"]
    if not is_sandbox_id(sandbox_id) or not identity.digest.startswith(sandbox_id):
        return "the sandbox is not its thread's"
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 < epoch < 2**63:
        return "its epoch is no epoch"
    if not isinstance(data["backend"], str) or not isinstance(data["ticket"], dict):
        return "it names no backend, or has no ticket"
    if slot is not None and not (isinstance(slot, str) and _SLOT.fullmatch(slot)):
        return "its slot is none"
    return ""
