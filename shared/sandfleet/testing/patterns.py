"""The globs of a sandbox's file operations, as sandboxd understands them, for a file system in memory."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from sandfleet.errors import InvalidPattern
from sandfleet.globs import IGNORE, one_of

__all__ = ["IGNORE", "glob_matcher", "grep_expression", "is_ignored"]


def is_ignored(name: str) -> bool:
    """Whether searches pass over a file or directory of that name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORE)


def glob_matcher(pattern: str) -> Callable[[str], bool]:
    """A test of a path relative to where the search began.

    Without a slash the pattern is matched against the last component at any depth; ``**`` is any
    number of directories; ``*``, ``?`` and ``[…]`` stay inside one component.

    Raises:
        InvalidPattern: Not relative, or not a glob.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not parts or pattern.startswith("/") or ".." in parts or "\0" in pattern:
        raise InvalidPattern("a glob is relative, without '..'", pattern=pattern)
    if "/" not in pattern and parts != ["**"]:
        parts = ["**", *parts]
    text = ""
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if part == "**":
            text += r"[^/]+(?:/[^/]+)*" if last else r"(?:[^/]+/)*"
        else:
            text += _component(part) + ("" if last else "/")
    try:
        match = re.compile(text, re.DOTALL).fullmatch
    except re.error as exc:
        raise InvalidPattern(f"not a valid glob: {exc}", pattern=pattern) from None
    return lambda path: match(path) is not None


def _component(part: str) -> str:
    text, rest = "", part
    while rest:
        bracket = re.match(r"\[([!^]?)(\]?[^\]]*)\]", rest)
        if bracket and bracket[2]:
            text += "(?!/)" + one_of(bracket[2], negated=bool(bracket[1]))
            rest = rest[bracket.end() :]
            continue
        text += {"*": "[^/]*", "?": "[^/]"}.get(rest[0], re.escape(rest[0]))
        rest = rest[1:]
    return re.sub(r"(?:\[\^/\]\*)+", lambda _: "[^/]*", text)


def grep_expression(pattern: str, *, literal: bool, case_sensitive: bool) -> re.Pattern[str]:
    """The compiled pattern of a text search.

    Raises:
        InvalidPattern: It does not parse.
    """
    try:
        return re.compile(re.escape(pattern) if literal else pattern, 0 if case_sensitive else re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as exc:
        raise InvalidPattern(f"not a valid expression: {exc}", pattern=pattern) from None
