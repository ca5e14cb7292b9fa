"""Texts of sandboxes without Python, decoded, cut and edited in the worker, to the letter as sandboxd does it. Pure.

A file may be hostile: nothing here takes more than a few times its size, however its lines lie.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from typing import Any, AnyStr

from sandfleet.errors import AmbiguousMatch, BinaryFile, DigestMismatch, FileTooLarge, InvalidArgument, NoMatch

__all__ = ["EDIT_BYTES", "check_range", "lines_of", "replaced", "text_of"]

EDIT_BYTES = 64 * 1024 * 1024
_PROBE_BYTES = 8192
_MOST_CHARS = 16 * 1024 * 1024
_MOST_NAMED = 20
_STRIDE = 65536
#: What bytes that do not decode become: a lone surrogate, which no strict decoding gives.
_UNDECODED = "\udcff"
_MARKS = (
    ("utf-8-sig", codecs.BOM_UTF8),
    ("utf-32-le", codecs.BOM_UTF32_LE),  # begins with UTF-16's, so it is looked for first
    ("utf-32-be", codecs.BOM_UTF32_BE),
    ("utf-16-le", codecs.BOM_UTF16_LE),
    ("utf-16-be", codecs.BOM_UTF16_BE),
)


def _mark_undecoded(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _UNDECODED, error.end


codecs.register_error("sandfleet.exec", _mark_undecoded)


def _encoding(data: bytes) -> tuple[str, bytes]:
    return next(((name, mark) for name, mark in _MARKS if data.startswith(mark)), ("utf-8", b""))


def _decoded(data: bytes, *, final: bool = True) -> tuple[str, str]:
    encoding, mark = _encoding(data)
    decoder = codecs.getincrementaldecoder("utf-8" if encoding == "utf-8-sig" else encoding)("sandfleet.exec")
    return decoder.decode(data[len(mark) :], final=final), encoding


def check_range(start: int | None, end: int | None) -> None:
    """Raises InvalidArgument: the range ends before it starts."""
    if start is not None and end is not None and start > end:
        raise InvalidArgument("start_line > end_line", argument="start_line")


def _after(text: AnyStr, newline: AnyStr, number: int) -> int:
    """Where the text goes on after its ``number``-th newline; its end if it has fewer."""
    position = 0
    while number > 0 and position < len(text):
        there = text.count(newline, position, position + _STRIDE)
        if there < number:
            number, position = number - there, position + _STRIDE
            continue
        for _ in range(number):
            position = text.index(newline, position) + 1
        return position
    return min(position, len(text))


def _count_lines(data: str | bytes) -> int:
    newline: Any = "\n" if isinstance(data, str) else b"\n"
    return data.count(newline) + (data[-1:] not in ("", b"", newline))


def lines_of(data: bytes, start: int | None, end: int | None, most: int | None) -> tuple[dict[str, Any], bytes]:
    """(value, content) of read_file for a range of lines."""
    begin = _after(data, b"\n", (start or 1) - 1)
    stop = len(data) if end is None else _after(data, b"\n", end)
    content = data[begin:stop]
    truncated = most is not None and len(content) > most
    known = not truncated and stop == len(data)
    value = {"size": len(data), "total_lines": _count_lines(data) if known else None, "truncated": truncated}
    return value, content[:most]


def text_of(
    data: bytes, path: str, start: int | None, end: int | None, most: int | None, *, lenient: bool
) -> tuple[dict[str, Any], bytes]:
    """(value, content) of read_file with ``as_text``.

    Raises:
        BinaryFile: Its beginning, or what would be shown, is not text.
    """
    most = min(most or _MOST_CHARS, _MOST_CHARS)
    text, encoding = _decoded(data)
    if not lenient:
        _check(_decoded(data[:_PROBE_BYTES], final=len(data) < _PROBE_BYTES)[0], path, data)
    begin = _after(text, "\n", (start or 1) - 1)
    stop = len(text) if end is None else _after(text, "\n", end)
    kept, cut = text[begin:stop], False
    if stop - begin > most:
        whole = text.rfind("\n", begin, begin + most) + 1
        cut = whole <= begin
        kept = text[begin : begin + most if cut else whole]
    if not lenient:
        _check(kept, path, data)
    shown = _count_lines(kept)
    value = {
        "start_line": start or 1,
        "end_line": (start or 1) + shown - 1,
        "total_lines": _count_lines(text),
        "total_chars": stop - begin,
        "truncated": stop - begin > most,
        "cut_line": cut,
        "encoding": encoding,
        "size_bytes": len(data),
        "digest": None if lenient else hashlib.sha256(data).hexdigest(),
    }
    return value, kept.replace(_UNDECODED, "\ufffd").encode()


def _check(text: str, path: str, data: bytes) -> None:
    if "\0" in text or _UNDECODED in text:
        raise BinaryFile("the file is not text", path=path, size=len(data))


def replaced(
    data: bytes, old: str, new: str, path: str, *, every: bool, if_digest: str | None = None
) -> tuple[int, bytes]:
    """How many were replaced, and the file's new bytes, in its own encoding and line ends.

    Raises:
        DigestMismatch: Looked at first: whether the text occurs in another version is not told.
        NoMatch, AmbiguousMatch
        BinaryFile: It has NUL bytes near its beginning, or its byte order mark lies.
        FileTooLarge: The result would be.
    """
    if if_digest is not None and (digest := hashlib.sha256(data).hexdigest()) != if_digest.lower():
        raise DigestMismatch("the file has changed", path=path, digest=digest)
    encoding, mark = _encoding(data)
    if encoding in ("utf-8", "utf-8-sig"):
        if b"\0" in data[:_PROBE_BYTES]:
            raise BinaryFile("the file is not text", path=path, size=len(data))
        plain, encoding, mark = data, "utf-8", b""
    else:
        try:
            plain = data[len(mark) :].decode(encoding).encode()
        except UnicodeDecodeError:
            raise BinaryFile("the file is not text", path=path, size=len(data)) from None
    before, after = old.encode("utf-8", "surrogateescape"), new.encode("utf-8", "surrogateescape")
    newlines = plain.count(b"\n") if b"\n" in before + after else 0
    if newlines and plain.count(b"\r\n") == newlines:
        before, after = (part.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for part in (before, after))
    count = plain.count(before)
    if count == 0:
        raise NoMatch("the text was not found", path=path)
    if count > 1 and not every:
        lines = list(_lines_at(plain, before))
        raise AmbiguousMatch("the text was found several times", path=path, count=count, lines=lines)
    if len(plain) + count * (len(after) - len(before)) > 2 * EDIT_BYTES:
        raise FileTooLarge("the result would be too large", path=path, limit=2 * EDIT_BYTES)
    plain = plain.replace(before, after)
    try:
        return count, plain if encoding == "utf-8" else mark + plain.decode().encode(encoding)
    except UnicodeError:
        raise InvalidArgument("the new text is not UTF-8", argument="new", path=path) from None


def _lines_at(data: bytes, wanted: bytes) -> Iterator[int]:
    """The lines of the first matches."""
    line, position, found = 1, 0, data.find(wanted)
    for _ in range(_MOST_NAMED):
        if found < 0:
            return
        line += data.count(b"\n", position, found)
        yield line
        position, found = found, data.find(wanted, found + len(wanted))
