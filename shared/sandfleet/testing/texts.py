"""Texts of mock sandboxes: decoded, cut and edited as sandboxd does it, but in one go and on the whole file."""

from __future__ import annotations

import codecs
import hashlib
import re
from typing import Any

from sandfleet.errors import AmbiguousMatch, BinaryFile, InvalidArgument, NoMatch

__all__ = ["check_range", "read_text", "replaced"]

_PROBE_BYTES = 8192
_SCAN_BYTES = 64 * 1024 * 1024
_MOST_CHARS = 16 * 1024 * 1024
_UNDECODED = "\udcff"
_MARKS = (
    ("utf-8-sig", codecs.BOM_UTF8),
    ("utf-32-le", codecs.BOM_UTF32_LE),
    ("utf-32-be", codecs.BOM_UTF32_BE),
    ("utf-16-le", codecs.BOM_UTF16_LE),
    ("utf-16-be", codecs.BOM_UTF16_BE),
)


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _UNDECODED, error.end


codecs.register_error("sandfleet.mock", _mark)


def _decoded(data: bytes, *, final: bool = True) -> tuple[str, str]:
    """(text, encoding); what does not decode is a lone surrogate."""
    encoding, mark = next(((name, mark) for name, mark in _MARKS if data.startswith(mark)), ("utf-8", b""))
    decoder = codecs.getincrementaldecoder("utf-8" if encoding == "utf-8-sig" else encoding)("sandfleet.mock")
    return decoder.decode(data[len(mark) :], final=final), encoding


def check_range(start: int | None, end: int | None) -> None:
    """Raises InvalidArgument: the range ends before it starts."""
    if start is not None and end is not None and start > end:
        raise InvalidArgument("start_line > end_line", argument="start_line")


def read_text(
    data: bytes, path: str, start: int | None, end: int | None, most: int | None, *, lenient: bool
) -> tuple[dict[str, Any], bytes]:
    """(value, content) of read_file with ``as_text``.

    Raises:
        BinaryFile: Its beginning, or what would be shown, is not text.
    """
    first, most = start or 1, min(most or _MOST_CHARS, _MOST_CHARS)
    text, encoding = _decoded(data)
    if not lenient:
        _check(_decoded(data[:_PROBE_BYTES], final=len(data) < _PROBE_BYTES)[0], path, data)
    lines = re.findall(r"[^\n]*\n|[^\n]+\Z", text)
    wanted = lines[first - 1 : end]
    shown = _whole_lines(wanted, most)
    cut = bool(wanted) and not shown
    kept = wanted[0][:most] if cut else "".join(shown)
    if not lenient:
        _check(kept, path, data)
    counted = not lenient and len(data) <= _SCAN_BYTES
    asked = len("".join(wanted))
    reached_end = counted or (asked <= most and not (end is not None and text.count("\n") >= end))
    value = {
        "start_line": first,
        "end_line": first + (1 if cut else len(shown)) - 1,
        "total_lines": len(lines) if reached_end else None,
        "total_chars": asked if counted or asked <= most else None,
        "truncated": asked > most,
        "cut_line": cut,
        "encoding": encoding,
        "size_bytes": len(data),
        "digest": hashlib.sha256(data).hexdigest() if counted else None,
    }
    return value, kept.replace(_UNDECODED, "\ufffd").encode()


def _whole_lines(lines: list[str], most: int) -> list[str]:
    size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if size > most:
            return lines[:number]
    return lines


def _check(text: str, path: str, data: bytes) -> None:
    if "\0" in text or _UNDECODED in text:
        raise BinaryFile("the file is not text", path=path, size=len(data))


def replaced(data: bytes, old: str, new: str, path: str, *, every: bool) -> tuple[int, bytes]:
    """How many were replaced, and the file's new bytes, in its own encoding and line ends.

    Raises:
        NoMatch, AmbiguousMatch
        BinaryFile: It has NUL bytes near its beginning, or its byte order mark lies.
    """
    text, encoding = _decoded(data)
    if encoding in ("utf-8", "utf-8-sig"):
        if b"\0" in data[:_PROBE_BYTES]:
            raise BinaryFile("the file is not text", path=path, size=len(data))
        text, encoding = data.decode("utf-8", "surrogateescape"), "utf-8"
    elif _UNDECODED in text:
        raise BinaryFile("the file is not text", path=path, size=len(data))
    if "\n" in text and not re.search(r"(?<!\r)\n", text):
        old, new = (re.sub(r"(?<!\r)\n", "\r\n", part) for part in (old, new))
    count = text.count(old)
    if count == 0:
        raise NoMatch("the text was not found", path=path)
    if count > 1 and not every:
        starts = [match.start() for match in re.finditer(re.escape(old), text)][:20]
        lines = [1 + text.count("\n", 0, start) for start in starts]
        raise AmbiguousMatch("the text was found several times", path=path, count=count, lines=lines)
    text = text.replace(old, new)
    if encoding == "utf-8":
        return count, text.encode("utf-8", "surrogateescape")
    return count, dict(_MARKS)[encoding] + text.encode(encoding)
