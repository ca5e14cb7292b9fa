"""Reading an output stream exactly once: where a reader is, and what an entry means for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from sandfleet.errors import InvalidArgument
from sandfleet.job_values import OutputChunk, OutputEnd, OutputGap, OutputRecord
from sandfleet.store.streams import Output

__all__ = ["Reading"]

_STREAMS = ("stdout", "stderr")


class Reading:
    """One reader's place in a stream, as byte offsets of stdout and stderr.

    Whatever entries come, in whatever pieces: each byte is given once and in order, and what is missing is told once.

    Args:
        after: A cursor that an earlier reading gave; None: from the beginning.

    Raises:
        InvalidArgument: It is no cursor.
    """

    def __init__(self, after: str | None = None) -> None:
        self._at = [0, 0] if after is None else _parsed(after)
        #: From where entries are to be read; behind the place itself while a gap is looked into.
        self.read_from = (self._at[0], self._at[1])
        self._looked_at: tuple[int, int] | None = None
        self.ended = False

    @property
    def cursor(self) -> str:
        """Where to go on."""
        return f"{self._at[0]}.{self._at[1]}"

    def take(self, entries: Sequence[Output]) -> list[OutputRecord]:
        """What these entries hold that was not given before."""
        records: list[OutputRecord] = []
        for entry in entries:
            here = (self._at[0], self._at[1])
            if (entry.out_at > here[0] or entry.err_at > here[1]) and self._looked_at != here:
                # A stream that was made anew has other pieces: what seems to be missing may lie in an earlier one.
                self._looked_at, self.read_from = here, (0, 0)
                return records
            for number, (begin, data) in enumerate(((entry.out_at, entry.out), (entry.err_at, entry.err))):
                self._take(number, begin, data, records)
            self.read_from = (entry.out_at + len(entry.out), entry.err_at + len(entry.err))
            if entry.end is not None:
                self.ended = True
                records.append(OutputEnd(entry.end, self.cursor))
                break
        return records

    def _take(self, number: int, begin: int, data: bytes, records: list[OutputRecord]) -> None:
        at, stream = self._at[number], _STREAMS[number]
        if begin > at:
            self._at[number] = begin
            records.append(OutputGap(stream, at, begin, self.cursor))
        new = data[max(0, self._at[number] - begin) :]
        if new:
            self._at[number] += len(new)
            records.append(OutputChunk(stream, new, self.cursor))


def _parsed(cursor: str) -> list[int]:
    parts = str(cursor).split(".")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise InvalidArgument(f"{str(cursor)[:80]!r} is no cursor; take it from a chunk of output", argument="after")
    return [int(part) for part in parts]
