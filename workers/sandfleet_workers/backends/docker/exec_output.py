"""What a process in a container writes: capped as it comes, and cut out of what our own script says around it. Pure."""

from __future__ import annotations

import base64

__all__ = ["Kept", "Marked"]

#: The longest line of our own script's; a sandbox that writes more in its place is not believed.
_LONGEST_LINE = 200


class Kept:
    """The first and the last half of ``cap`` bytes; the middle is dropped as it comes."""

    def __init__(self, cap: int) -> None:
        self._tail_cap = cap // 2
        self._head_cap = cap - self._tail_cap
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take more."""
        self.total += len(data)
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_cap + 65536:
            del self._tail[: len(self._tail) - self._tail_cap]

    @property
    def discarded(self) -> int:
        """How many bytes were dropped."""
        return max(0, self.total - self._head_cap - self._tail_cap)

    def parts(self) -> list[bytes]:
        """What is left, with a note where something was dropped."""
        tail = bytes(self._tail[max(0, len(self._tail) - self._tail_cap) :])
        if not self.discarded:
            return [bytes(self._head) + tail]
        if not self._head_cap:
            return []
        return [bytes(self._head), b"\n... [%d bytes discarded] ...\n" % self.discarded, tail]

    def text(self) -> str:
        """Decoded, with replacement."""
        return "".join(part.decode("utf-8", "replace") for part in self.parts())

    def base64(self) -> str:
        """As base64."""
        return base64.b64encode(b"".join(self.parts())).decode()

    def data(self) -> bytes:
        """The bytes, if none was dropped."""
        return b"".join(self.parts())


class Marked:
    """One stream of our script: perhaps a first line of its own, what it lets through, a last line of its own.

    Both lines begin with a mark that nobody else can know in advance, so that output cannot be taken for them.

    Args:
        mark: Of this run.
        kept: Takes what is let through.
        header: Whether there is a first line.
    """

    def __init__(self, mark: bytes, kept: Kept, *, header: bool) -> None:
        self._mark, self._kept = mark, kept
        self._held = b""
        self._wants_header = header
        self._ended = False
        #: What the script said first and last, without the mark; None until it did.
        self.header: str | None = None
        self.trailer: str | None = None

    def feed(self, data: bytes) -> None:
        """Take more of the stream."""
        if self.trailer is not None:
            return  # of a process that the command left behind
        self._held += data
        if self._wants_header and not self._take_header():
            return
        if not self._ended:
            found = self._held.find(self._mark)
            keep = found if found >= 0 else max(0, len(self._held) - len(self._mark) + 1)
            self._kept.feed(self._held[:keep])
            self._held = self._held[keep:]
            self._ended = found >= 0
        if self._ended:
            line, newline, _rest = self._held.partition(b"\n")
            if newline or len(line) > _LONGEST_LINE:
                self.trailer = _words(line[len(self._mark) :])
                self._held = b""

    def _take_header(self) -> bool:
        line, newline, rest = self._held.partition(b"\n")
        if not newline and len(line) <= _LONGEST_LINE:
            return False
        self._wants_header = False
        if line.startswith(self._mark) and newline:
            self.header, self._held = _words(line[len(self._mark) :]), rest
        return True

    def flush(self) -> None:
        """The stream is over: what was held back because a mark might have begun in it was output after all."""
        if self.trailer is None and not self._ended:
            self._kept.feed(self._held)
            self._held = b""


def _words(line: bytes) -> str:
    return line[:_LONGEST_LINE].decode("utf-8", "replace").strip()
