"""Which threads' data goes, by age and by count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import InvalidArgument
from sandfleet.leftover_dirs import ThreadData

__all__ = ["Rules", "surplus", "surplus_checkpoints"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a caller of ``gc`` wants removed.

    Attributes:
        older_than_s: Only what nothing has changed for so long; None: of any age.
        keep_threads: Of each user, the data of so many threads that changed last stays; None: no such rule.
        user_id: Only that user's; None: everybody's.
        thread_data: Threads' data at all: without it only what is nobody's.
        checkpoints: Checkpoints, too.
        keep_checkpoints: So many newest ones of each thread stay.
        remove: Do it; else it is only told.
    """

    older_than_s: float | None = None
    keep_threads: int | None = None
    user_id: str | None = None
    thread_data: bool = False
    checkpoints: bool = False
    keep_checkpoints: int = 1
    remove: bool = False

    @classmethod
    def from_wire(cls, asked: Mapping[str, Any]) -> Rules:
        """The rules of a message.

        Raises:
            InvalidArgument: They are none, or would remove everything: neither an age nor a count is named.
        """
        known = {name: asked[name] for name in cls.__slots__ if asked.get(name) is not None}
        if not all(isinstance(value, _TYPES[name]) for name, value in known.items()):
            raise InvalidArgument("the rules of gc are malformed")
        rules = cls(**known)
        numbers = (rules.older_than_s, rules.keep_threads, rules.keep_checkpoints)
        if any(number is not None and not number >= 0 for number in numbers):
            raise InvalidArgument("ages and counts of gc are not negative")
        if rules.thread_data and rules.older_than_s is None and rules.keep_threads is None:
            raise InvalidArgument("gc of thread data needs an age or a count")
        return rules

    def to_wire(self) -> dict[str, Any]:
        """Their message."""
        return {name: getattr(self, name) for name in self.__slots__}


_TYPES: dict[str, tuple[type, ...]] = {
    "older_than_s": (int, float),
    "keep_threads": (int,),
    "user_id": (str,),
    "thread_data": (bool,),
    "checkpoints": (bool,),
    "keep_checkpoints": (int,),
    "remove": (bool,),
}


def surplus(found: Iterable[ThreadData], rules: Rules) -> list[ThreadData]:
    """Those that every rule gives up: older than the age *and* not among the ones to keep."""
    of_user: dict[str | None, list[ThreadData]] = {}
    for data in found:
        if rules.user_id is None or data.user_id == rules.user_id:
            of_user.setdefault(data.user_id, []).append(data)
    gone: list[ThreadData] = []
    for user_id in sorted(of_user, key=lambda user: (user is not None, user or "")):
        gone += _surplus_of_one(of_user[user_id], rules)
    return gone


def _surplus_of_one(found: Sequence[ThreadData], rules: Rules) -> list[ThreadData]:
    newest_first = sorted(found, key=lambda data: (data.idle_s, data.thread_id))
    beyond = newest_first[rules.keep_threads :] if rules.keep_threads is not None else newest_first
    return [data for data in beyond if rules.older_than_s is None or data.idle_s >= rules.older_than_s]


def surplus_checkpoints(found: Sequence[Checkpoint], rules: Rules, *, now_s: float) -> list[Checkpoint]:
    """Those of one thread's that every rule gives up. Named ones are somebody's own, and counted apart.

    Args:
        found: The newest first.
        now_s: By the clock that they were saved by.
    """
    gone = []
    for named in (False, True):
        alike = [one for one in found if (one.name is not None) is named]
        gone += [
            one
            for one in alike[rules.keep_checkpoints :]
            if rules.older_than_s is None or now_s - one.saved_at >= rules.older_than_s
        ]
    return gone
