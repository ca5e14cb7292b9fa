"""Globs and expressions for sandboxes without Python. Pure.

Callers' patterns meet names that a sandbox chose, so globs are matched here without backtracking, and expressions,
which cannot be, are matched inside the sandbox only.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sandfleet.errors import InvalidPattern
from sandfleet.globs import IGNORE, one_of

__all__ = ["IGNORE", "basic_expression", "check_expression", "glob_matcher", "perl_expression", "prefilter"]

_ANY_DEPTH = "**"


def glob_matcher(pattern: str) -> Callable[[str], bool]:
    """A test of a path relative to where the search began; its time grows with the product of both lengths.

    Without a slash the pattern is matched against the last component at any depth; ``**`` is any number of directories;
    ``*``, ``?`` and ``[…]`` stay inside one component.

    Raises:
        InvalidPattern: Not relative, or not a glob.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not parts or pattern.startswith("/") or ".." in parts or "\0" in pattern:
        raise InvalidPattern("a glob is relative, without '..'", pattern=pattern)
    if "/" not in pattern and parts != [_ANY_DEPTH]:
        parts = [_ANY_DEPTH, *parts]
    if parts[-1] == _ANY_DEPTH:
        parts.append("*")  # at its end it stands for at least one component
    try:
        found = re.compile(_whole(parts)).match
    except re.error as exc:
        raise InvalidPattern(f"not a valid glob: {exc}", pattern=pattern) from None
    return lambda path: found(path) is not None


# Nothing is tried twice: what stands between two ``*`` (or two ``**``) is taken where it fits first, for good, which
# leaves the most room for what comes after.


def _whole(parts: list[str]) -> str:
    """The expression of a path."""
    groups: list[list[str]] = [[]]
    for part in parts:
        if part == _ANY_DEPTH:
            groups.append([])
        else:
            groups[-1].append(_component(part))
    *before, last = ("".join(f"{component}/" for component in group) for group in groups)
    text = "".join(before[:1])
    for group in before[1:]:
        text += f"(?>(?:[^/]*+/)*?{group})"
    return text + ("(?:[^/]*+/)*?" if before else "") + last.removesuffix("/") + r"\Z"


def _component(part: str) -> str:
    """The expression of one name, up to its end."""
    first, *more = _pieces(part)
    if not more:
        return first
    *middle, last = more
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + f"(?>[^/]*{last}(?![^/]))"


def _pieces(part: str) -> list[str]:
    """What stands between the ``*`` of a name."""
    pieces, rest = [""], part
    while rest:
        char, rest = rest[0], rest[1:]
        end = rest.find("]", 2 if rest[:1] in ("!", "^") else 1) if char == "[" else -1
        if char == "*":
            pieces.append("")
        elif char == "?":
            pieces[-1] += "[^/]"
        elif end > 0:
            inner, rest = rest[:end], rest[end + 1 :]
            negated = inner[0] in "!^"
            pieces[-1] += "(?!/)" + one_of(inner[negated:], negated=negated)
        else:
            pieces[-1] += re.escape(char)
    return pieces


def prefilter(pattern: str | None) -> str:
    """What ``find -name`` may look for so that nothing is missed which `glob_matcher` finds."""
    return pattern if pattern is not None and re.fullmatch(r"[A-Za-z0-9_.*?+-]+", pattern) else "*"


def check_expression(pattern: str) -> None:
    """Whether it is a regular expression as everywhere else; it is compiled here, and never matched.

    Raises:
        InvalidPattern: It does not parse.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        raise InvalidPattern(f"not a valid expression: {exc}", pattern=pattern) from None


def perl_expression(pattern: str) -> str:
    """For ``grep -P``, whose lines keep the CR of their CR LF, and whose ``$`` looks at the very end otherwise."""
    return f"(*ANYCRLF)(?m){pattern}" if "$" in pattern or "\\Z" in pattern else pattern


#: What an extended expression says otherwise, and the same inside of brackets.
_CLASSES = {"d": "0-9", "w": "[:alnum:]_", "s": "[:space:]"}
_NEGATED = {"D": "d", "W": "w", "S": "s"}
_CHARACTERS = {"t": "\t", "f": "\f", "v": "\v", "r": "\r"}


def basic_expression(pattern: str) -> str:
    """An extended regular expression that finds the same lines, for a grep that knows no other; "" if there is none.

    Which part of a line matches does not count, so lazy repetition is the same as greedy.
    """
    result, rest = "", pattern
    while rest:
        taken = _bracket(rest) or _escape(rest) or _plain(rest)
        if taken is None:
            return ""
        text, rest = taken
        result += text
    return result


def _plain(rest: str) -> tuple[str, str] | None:
    if rest.startswith("(?:"):
        return "(", rest[3:]
    if rest.startswith("(?") or rest[0] in "\n[\\":
        return None  # lookaround, names, flags; or a bracket or an escape that was not understood
    if rest[0] == "$":
        return "\r?$", rest[1:]
    repeat = re.match(r"([*+?]|\{\d+(?:,\d*)?\})([?+]?)", rest)
    if repeat:
        return None if repeat[2] == "+" else (repeat[1], rest[repeat.end() :])
    return ("\\" + rest[0] if rest[0] in "{}" else rest[0]), rest[1:]


def _escape(rest: str) -> tuple[str, str] | None:
    if rest[0] != "\\" or len(rest) < 2:
        return None
    char = rest[1]
    if char in _CLASSES:
        return f"[{_CLASSES[char]}]", rest[2:]
    if char in _NEGATED:
        return f"[^{_CLASSES[_NEGATED[char]]}]", rest[2:]
    if char in _CHARACTERS:
        return _CHARACTERS[char], rest[2:]
    if char in "bB":
        return rest[:2], rest[2:]
    if char == "Z":
        return "\r?$", rest[2:]
    if char == "A":
        return "^", rest[2:]
    if char.isascii() and char.isalnum():
        return None
    return ("\\" + char if char in r".[]{}()*+?^$|\/"[:-1] else char), rest[2:]


def _bracket(rest: str) -> tuple[str, str] | None:
    """A set of characters; a backslash means itself in an extended expression's."""
    found = re.match(r"\[(\^?)((?:\\.|[^\]\\]|(?<=\[)\]|(?<=\[\^)\])+)\]", rest)
    if found is None:
        return None
    inner, first, last, middle = found[2], "", "", ""
    while inner:
        escaped = inner[0] == "\\"
        char, inner = (inner[1], inner[2:]) if escaped else (inner[0], inner[1:])
        if escaped and char in _CLASSES:
            middle += _CLASSES[char]
        elif escaped and char.isascii() and char.isalnum():
            if char not in _CHARACTERS:
                return None
            middle += _CHARACTERS[char]
        elif char == "]":
            first = "]"
        elif char == "^" or (char == "-" and (escaped or not inner or not middle)):
            last = char + last if char == "^" else last + char
        elif char == "[" and inner[:1] in (":", ".", "="):
            return None
        else:
            middle += char
    if not found[1] and not first and not middle:  # a circumflex must not come first
        return "\\" + last if len(last) == 1 else "(" + "|".join("\\" + char for char in last) + ")", rest[
            found.end() :
        ]
    return f"[{found[1]}{first}{middle}{last}]", rest[found.end() :]
