"""What a container writes while it starts, as the engine hands it out."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

__all__ = ["Output", "Silence"]

_HEADER = struct.Struct(">BxxxL")
_STDOUT = 1
#: More than this is no start of ours any more.
_MOST = 64 * 1024
_TAIL = 2000


class Silence(Exception):
    """Nothing more came within the time."""


class Output:
    """The two streams of an attached container, as frames of 8 bytes of header and a text.

    Args:
        raw: What the SDK gives for an attached container: a socket, or a file around one.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._sock: socket.socket = getattr(raw, "_sock", raw)
        self._data = b""
        self._texts: dict[bool, bytes] = {True: b"", False: b""}

    def close(self) -> None:
        """Let go of it; the container runs on."""
        if (response := getattr(self._raw, "_response", None)) is not None:
            response.close()
        self._sock.close()

    @property
    def told(self) -> str:
        """The end of what came on stderr, else on stdout."""
        text = self._texts[False].strip() or self._texts[True].strip()
        return text[-_TAIL:].decode("utf-8", "replace")

    def line(self, deadline: float) -> str | None:
        """The first line on stdout; None when the container ended, or wrote too much, without one.

        Raises:
            Silence: Nothing came until ``deadline`` (of the monotonic clock).
        """
        while b"\n" not in self._texts[True]:
            if sum(map(len, self._texts.values())) > _MOST or not self._more(deadline):
                return None
        return self._texts[True].split(b"\n", 1)[0].decode("utf-8", "replace")

    def drain(self, wait_s: float) -> None:
        """Take what still comes, until the end or for ``wait_s``."""
        deadline = time.monotonic() + wait_s
        try:
            while sum(map(len, self._texts.values())) <= _MOST and self._more(deadline):
                pass
        except Silence:
            pass

    def _more(self, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Silence
        self._sock.settimeout(left_s)
        try:
            piece = self._sock.recv(65536)
        except TimeoutError:
            raise Silence from None
        except OSError:
            return False
        self._data += piece
        while len(self._data) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._data)
            end = _HEADER.size + length
            if length > _MOST or len(self._data) < end:
                break
            self._texts[kind == _STDOUT] += self._data[_HEADER.size : end]
            self._data = self._data[end:]
        return bool(piece) and len(self._data) <= 2 * _MOST
