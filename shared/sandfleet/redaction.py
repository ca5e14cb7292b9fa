"""What looks like a secret in a line for people (Flower, logs, ``sandfleet ops``) becomes ``[redacted]``. Pure.

A guess by names and forms, for command lines as they are typed: what must stay secret belongs into ``env``.
"""

from __future__ import annotations

import re

__all__ = ["without_credentials", "without_secrets"]

_HIDDEN = "[redacted]"
_WORDS = r"(?:key|secret|token|pass(?:wd|word|phrase|(?![a-z]))|credential|dsn|authorization)[\w-]*"
#: What a secret comes after: ``NAME=``, ``"name": ``, ``--name ``, ``-u user:``, ``Bearer ``.
_BEFORE = re.compile(
    rf"""(?i)(?<![\w-])[\w-]*{_WORDS}\\?["']?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?"""
    rf"""|--[\w-]*{_WORDS}\s+|(?<!\S)(?:-u|--user)[\s=]*["']?[a-z][^\s:"']*:|\b(?:bearer|basic)\s+"""
)
#: A quoted part of a command line; one that is not closed goes on to the end.
_QUOTED = re.compile(r"""\\.|"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)""", re.DOTALL)
#: What a shell takes as one word.
_WORD = re.compile(r"""(?:\\.|"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s"'\\]|\\\Z)+""", re.DOTALL)
#: A value within a quoted part: quoted in its turn, or up to the next blank or quote.
_INNER = re.compile(r"""\\"(?:[^"\\]|\\[^"])*(?:\\"|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s"']+""", re.DOTALL)
#: User and password in a URL.
_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@'\"]*@")


def without_credentials(text: str) -> str:
    """``text`` without the user and password of any URL in it."""
    return _CREDENTIALS.sub(rf"\1{_HIDDEN}@", text) if "://" in text else text


def without_secrets(line: str) -> str:
    """A command line without what looks like a secret in it; one that was cut off is fine."""
    line = without_credentials(line)
    quoted = [part.span() for part in _QUOTED.finditer(line) if part[0][0] != "\\"]
    shown, at = [], 0
    for before in _BEFORE.finditer(line):
        if before.start() < at:
            continue  # it lies in what is hidden already
        end = _value_end(line, before, quoted)
        if end > before.end():
            shown += [line[at : before.end()], _HIDDEN]
            at = end
    return "".join([*shown, line[at:]])


def _value_end(line: str, before: re.Match[str], quoted: list[tuple[int, int]]) -> int:
    """Where the value ends that begins behind ``before``."""
    start = before.end()
    around = next(((first, last) for first, last in quoted if first < start < last), None)
    if around is None:
        found = _WORD.match(line, start)
        return found.end() if found else start
    first, last = around
    closed = last - 1 if last - first > 1 and line[last - 1] == line[first] else last
    if before.start() == first + 1:
        return closed  # "NAME=…", "Name: …": all of it
    found = _INNER.match(line, start, closed)
    return found.end() if found else start
