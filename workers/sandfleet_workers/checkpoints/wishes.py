"""What a creation says its sandbox is to begin with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandfleet.errors import InvalidArgument

__all__ = ["Wish"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a sandbox is to begin with.

    ``checkpoint``: an id, or None for the newest. ``source``: another thread of the same user. ``required``: rather no
    sandbox than one without it. ``replace``: whatever the thread has here. ``empty``: nothing, whatever it has here:
    that is older than what it lost, and is set aside.
    """

    checkpoint: str | None = None
    source: str | None = None
    required: bool = False
    replace: bool = False
    empty: bool = False

    @classmethod
    def of(cls, args: Mapping[str, Any], *, on_start: bool) -> Wish | None:
        """The wish of a creation with these arguments; None for what the thread has, or nothing.

        Args:
            on_start: A thread that has nothing begins with its newest checkpoint, unless it is told otherwise.

        Raises:
            InvalidArgument: It is malformed.
        """
        asked = args.get("restore")
        if asked is None:
            return cls() if on_start else None
        if not isinstance(asked, Mapping):
            raise InvalidArgument("field restore must be an object")
        checkpoint, source = asked.get("checkpoint"), asked.get("from")
        if checkpoint is None:
            return cls(empty=True)  # that was asked for outright
        if not isinstance(checkpoint, str) or not (source is None or isinstance(source, str)):
            raise InvalidArgument("fields checkpoint and from of restore must be text")
        wanted = None if checkpoint == "latest" else checkpoint
        return cls(wanted, source, asked.get("required") is True, asked.get("replace") is True)
