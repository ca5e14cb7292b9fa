"""The contract of what commands write while they run, and of jobs; `sandfleet.store.base` is the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sandfleet.store.values import Route

__all__ = ["Output", "Pushed", "Streams"]


@dataclass(frozen=True, slots=True)
class Output:
    """One entry of an output stream: what came of stdout and stderr within some milliseconds.

    ``out_at`` and ``err_at`` are the byte offsets at which ``out`` and ``err`` begin. Where an entry begins
    after the one before it ended, output is missing. ``end``: the outcome, with which the last entry ends the stream.
    """

    out_at: int
    err_at: int
    out: bytes = b""
    err: bytes = b""
    end: str | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `Streams.push_output` found: ``status`` is ok, ended (nothing comes after an end) or gone (there is no
    stream, and this would not be its beginning). ``out_at`` and ``err_at``: up to where the stream goes now."""

    status: str
    out_at: int = 0
    err_at: int = 0


class Streams(ABC):
    """Output streams and background jobs: the part of `Store` about commands that are followed while they run.

    Positions in a stream are byte offsets of the command's own output, so that they mean the same before and after
    Redis lost its data, and an entry that is pushed twice is there once.
    """

    @abstractmethod
    def started(self, op_id: str, route: Route, *, reply: str, lasts_s: float) -> bool:
        """A background job runs: its caller gets ``reply``, its record stays claimed and its sandbox busy for up to
        ``lasts_s``. The record and the outcome are kept a day beyond that. ``reply`` is its reply until `finish`, which
        answers nobody's stream then.

        Repeating it is harmless. False if the operation is not claimed by this node and incarnation (any more).
        """

    @abstractmethod
    def job_again(self, op_id: str, route: Route, *, reply: str, describe: str, lasts_s: float) -> bool:
        """A background job runs whose record the store may have lost: it is there again, as if it had just `started`.

        False, and nothing changes, if there is a record, or its sandbox is not live on that route of this incarnation.
        """

    @abstractmethod
    def push_output(self, stream: str, output: Output, *, keep_bytes: int, ttl_s: float, anew: bool = False) -> Pushed:
        """Append what a command wrote, and drop what is more than ``keep_bytes`` behind. The stream lives ``ttl_s``
        more. What is in it already is left away, and so is what does not begin where it ends: the answer says where
        that is, whatever was appended.

        Args:
            anew: It may begin beyond that: what lies between is missing for good. So may an empty one, which says that
                output is missing up to there.
        """

    @abstractmethod
    def read_output(
        self, stream: str, out_at: int, err_at: int, *, block_s: float, reader: str, only_end: bool = False
    ) -> list[Output]:
        """Entries beyond a position, oldest first, up to 16, waiting up to ``block_s`` for the first. An entry that the
        position lies within is given whole. ``only_end``: nothing but the end. ``reader`` names a connection of its
        own, which `drop_reader` gives back."""

    @abstractmethod
    def drop_reader(self, reader: str) -> None:
        """End a `read_output` that waits, with no entries, and give its connection back. Unknown ones are fine."""
