"""What is told of saved thread data: a `Checkpoint`, and what came back of it, a `Restoration`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["NOT_RESTORED", "Checkpoint", "Restoration"]

#: What no checkpoint holds.
NOT_RESTORED = ("processes", "memory", "changes since")
_SKIPPED_TOLD = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A thread's files as they were saved.

    Attributes:
        id: 16 hex digits.
        thread_id, user_id: Whose they are.
        saved_at: When, in unix seconds of Redis' clock.
        files: How many files.
        size_bytes: What they hold, without holes.
        consistent: Nothing changed while they were read.
        parent: The id of the one before, if there was one.
        epoch: Of the sandbox that had them.
        name: As its maker called it. Named ones are counted apart from the others when old ones are removed.
        skipped: What could not be saved (sockets, what the node may not read…), and why; at most 50 of them.
    """

    id: str
    thread_id: str
    user_id: str | None
    saved_at: float
    files: int
    size_bytes: int
    consistent: bool = True
    parent: str | None = None
    epoch: int = 0
    name: str | None = None
    skipped: tuple[str, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "skipped": list(self.skipped)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint of its JSON form.

        Raises:
            ValueError, KeyError, TypeError: It is none.
        """
        user, parent, name = data["user_id"], data.get("parent"), data.get("name")
        return cls(
            id=_text(data["id"]),
            thread_id=_text(data["thread_id"]),
            user_id=None if user is None else _text(user),
            saved_at=float(data["saved_at"]),
            files=int(data["files"]),
            size_bytes=int(data["size_bytes"]),
            consistent=bool(data.get("consistent", True)),
            parent=None if parent is None else _text(parent),
            epoch=int(data.get("epoch", 0)),
            name=None if name is None else _text(name)[:100],
            skipped=tuple(_text(line) for line in data.get("skipped") or ()),
        )


@dataclass(frozen=True, slots=True)
class Restoration:
    """What a sandbox began with that its thread's old one had left.

    Attributes:
        checkpoint_id: Of the checkpoint.
        saved_at: When that was saved: nothing that was changed later is there.
        files: How many files came back.
        size_bytes: What they hold.
        missing: What did not come back.
        passed_over: Ids of newer checkpoints that could not be used, so that this one was taken.
        consistent: Nothing had changed while it was saved.
        skipped: What could not be saved then, and why; 5 of them at most.
    """

    checkpoint_id: str
    saved_at: float
    files: int
    size_bytes: int
    missing: tuple[str, ...] = NOT_RESTORED
    passed_over: tuple[str, ...] = ()
    consistent: bool = True
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, passed_over: Sequence[str] = ()) -> Restoration:
        """What came back of a checkpoint."""
        return cls(
            checkpoint.id,
            checkpoint.saved_at,
            checkpoint.files,
            checkpoint.size_bytes,
            passed_over=tuple(passed_over),
            consistent=checkpoint.consistent,
            skipped=checkpoint.skipped[:_SKIPPED_TOLD],
        )

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        lists = {name: list(getattr(self, name)) for name in ("missing", "passed_over", "skipped")}
        return {**asdict(self), **lists}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Restoration:
        """The restoration of its JSON form.

        Raises:
            ValueError, KeyError, TypeError: It is none.
        """
        return cls(
            checkpoint_id=_text(data["checkpoint_id"]),
            saved_at=float(data["saved_at"]),
            files=int(data["files"]),
            size_bytes=int(data["size_bytes"]),
            missing=tuple(_text(line) for line in data.get("missing") or ()),
            passed_over=tuple(_text(line) for line in data.get("passed_over") or ()),
            consistent=bool(data.get("consistent", True)),
            skipped=tuple(_text(line) for line in data.get("skipped") or ()),
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is wanted, not {type(value).__name__}")
    return value
