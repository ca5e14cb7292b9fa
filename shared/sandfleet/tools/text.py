"""How a tool's answer reads: cut to its limit, marked where it was cut, without secrets. Pure.

A limit of 0 means none. Whatever is cut says so, in words a model can act on; where the limit is too small even for
that, the notice itself is cut, never the warning that something is missing. The one exception is the bash tool, where
the reference keeps the beginning of the output instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from sandfleet.model import GrepMatch, TextRead

__all__ = [
    "REDACTED",
    "bounded_write_error",
    "clamp",
    "cut_head",
    "cut_middle",
    "glob_text",
    "grep_text",
    "one_line",
    "read_text",
    "redact",
    "secrets_of",
]

#: What stands where a secret stood.
REDACTED = "[redacted]"

_SHORTEST_SECRET = 8
#: Shorter pieces of a secret, at the edge of dropped output, are chance.
_SHORTEST_REST = 4
#: The line that stands where a node dropped output; captured, so that a split keeps it.
_GAP = re.compile(r"(\n\.\.\. \[\d+ bytes discarded\] \.\.\.\n)")
_WRITE_ERROR_CHARS = 2000


# --- secrets -----------------------------------------------------------------------------------


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """The values worth hiding: 8 characters or more, longest first, so that none hides inside another."""
    return sorted({value for value in env.values() if len(value) >= _SHORTEST_SECRET}, key=lambda v: (-len(v), v))


def redact(text: str, secrets: Sequence[str]) -> str:
    """The text with every secret replaced. Do it before cutting: half a secret is not found again.

    Args:
        text: What a command wrote.
        secrets: As `secrets_of` gives them, longest first.
    """
    # What stands in for one secret must not be taken for a part of another.
    pieces = [text]
    for secret in secrets:
        pieces = [part for piece in pieces for part in _split(piece, secret)]
    return _edges(REDACTED.join(pieces), secrets)


def _edges(text: str, secrets: Sequence[str]) -> str:
    """Hide what is left of a secret where the node dropped the middle of an output."""
    parts = _GAP.split(text)
    for number in range(0, len(parts), 2):
        for secret in secrets:
            for size in range(len(secret) - 1, _SHORTEST_REST - 1, -1):
                if number + 1 < len(parts) and parts[number].endswith(secret[:size]):
                    parts[number] = parts[number][:-size] + REDACTED
                if number > 0 and parts[number].startswith(secret[-size:]):
                    parts[number] = REDACTED + parts[number][size:]
    return "".join(parts)


def _split(piece: str, secret: str) -> list[str]:
    return piece.split(secret) if secret else [piece]


# --- cutting -----------------------------------------------------------------------------------


def cut_middle(text: str, max_chars: int) -> str:
    """Beginning and end of a long output, half each, with a line between them that counts what is missing.

    The result is never longer than ``max_chars``. Where not even the notice fits it is the plain beginning.
    """
    return _cut_middle(text, max_chars, "\n... [middle truncated: {skipped} chars skipped] ...\n")


def bounded_write_error(text: str) -> str:
    """An error of write_file, at most 2000 characters: it may quote what was written."""
    return _cut_middle(text, _WRITE_ERROR_CHARS, "\n... [write_file error truncated: {skipped} chars skipped] ...\n")


def _cut_middle(text: str, max_chars: int, notice: str) -> str:
    if max_chars <= 0 or len(text) <= max_chars:
        return text
    # The notice is longest when everything is skipped; planning with that length never overshoots.
    kept = max_chars - len(notice.format(skipped=len(text)))
    if kept <= 0:
        return text[:max_chars]
    tail = kept // 2
    head = kept - tail
    return text[:head] + notice.format(skipped=len(text) - kept) + text[len(text) - tail :]


def cut_head(text: str, max_chars: int) -> str:
    """The first whole lines of a listing: half a path would look like a path."""
    if max_chars <= 0 or len(text) <= max_chars:
        return text
    total = len(text)

    def notice(kept: int) -> str:
        return (
            f"\n... [truncated: showing first {kept} of {total} chars. "
            "Use a more specific path to see fewer results] ..."
        )

    room = max_chars - len(notice(total))
    kept = _whole_lines(text, room)
    if kept <= 0:
        return notice(0).lstrip("\n")[:max_chars]
    return text[:kept] + notice(kept)


def _whole_lines(text: str, room: int) -> int:
    """How many characters of ``text`` are whole lines within ``room``, not counting the last line's end."""
    if room <= 0:
        return 0
    if len(text) <= room:
        return len(text)
    return max(text.rfind("\n", 0, room + 1), 0)


# --- reading files -----------------------------------------------------------------------------


def read_text(read: TextRead, path: str, *, start_line: int | None, end_line: int | None, max_chars: int) -> str:
    """What read_file shows of a part of a file.

    The whole file is shown as it is; a range loses its line ends (``\\r`` too) and is joined by newlines. What does
    not fit is left out in whole lines, and the answer names the line to go on with.

    Args:
        read: The part that was read, with at most ``max_chars`` characters.
        path: As the caller wrote it; the advice for a huge line names it.
        start_line: As asked for.
        end_line: As asked for.
        max_chars: Limit of the result; 0 means none.
    """
    ranged = start_line is not None or end_line is not None
    if not read.text:
        if ranged and start_line is not None and (read.total_lines is None or start_line > max(read.total_lines, 1)):
            return "(start_line exceeds file length)"
        if not read.truncated:
            return "(empty)"
    lines = read.text.split("\n")
    if lines[-1] == "" and not read.cut_line:
        lines.pop()
    if ranged:
        lines = [line.removesuffix("\r") for line in lines]
    if not read.truncated and not read.cut_line:
        text = "\n".join(lines) if ranged else read.text
        if max_chars <= 0 or len(text) <= max_chars:
            return text or "(empty)"
    return _part_of_file(read, lines, path, end_line, max_chars)


def _part_of_file(read: TextRead, lines: Sequence[str], path: str, end_line: int | None, max_chars: int) -> str:
    """The first lines that fit beside the notice that there are more."""
    last = _last_line(read, end_line)

    def notice(shown: int) -> str:
        through = read.start_line + shown - 1
        of = f" of {read.start_line}-{last} lines" if last is not None else ", there are more lines"
        return (
            f"\n... [truncated: showing lines {read.start_line}-{through}{of}. "
            f"Continue with start_line={through + 1}] ..."
        )

    text = "\n".join(lines)
    kept = _whole_lines(text, max_chars - len(notice(len(lines)))) if max_chars > 0 else len(text)
    if kept <= 0 or read.cut_line:
        return _part_of_line(read, lines[0], path, last, max_chars)
    return text[:kept] + notice(text.count("\n", 0, kept) + 1)


def _last_line(read: TextRead, end_line: int | None) -> int | None:
    """The last line of what was asked for, where that is known."""
    if read.total_lines is None:
        return end_line
    return min(end_line, read.total_lines) if end_line is not None else read.total_lines


def _part_of_line(read: TextRead, line: str, path: str, last: int | None, max_chars: int) -> str:
    """The beginning of a line that is too long for one answer, and how to see the rest of it."""
    number = read.start_line
    # cut counts bytes, and in another encoding than UTF-8 it would count something else again.
    decode = "" if read.encoding.startswith("utf-8") else f"iconv -t UTF-8 -f {read.encoding.upper()[:6]} "
    source = (
        f"{decode}{shlex.quote(path)} | sed -n '{number}p'" if decode else f"sed -n '{number}p' {shlex.quote(path)}"
    )

    def notice(kept: int) -> str:
        done = len(line[:kept].encode("utf-8", "replace"))
        of = f" of {number}-{last} lines" if last is not None else ""
        more = "" if last is not None and last <= number else f". The next line is start_line={number + 1}"
        return (
            f"\n... [truncated: showing the first {kept} chars of line {number}{of}, which is too long for one answer. "
            f"See more of it with bash: {source} | cut -c {done + 1}-{2 * done or max_chars}{more}] ..."
        )

    # The notice counts what is kept, in characters and bytes; with the largest counts it is longest.
    room = max_chars - len(notice(len(line))) if max_chars > 0 else len(line)
    if room <= 0:
        return notice(0).lstrip("\n")[:max_chars]
    return line[:room] + notice(min(room, len(line)))


# --- search results ----------------------------------------------------------------------------


def clamp(requested: int, configured: int, *, default: int, hard: int) -> int:
    """How many results are shown: the smaller of what was asked for and what is configured, 1 to ``hard``.

    Zero and less mean the default, as in the reference.
    """

    def one(value: int) -> int:
        return min(value if value > 0 else default, hard)

    return min(one(requested), one(configured))


def one_line(path: str) -> str:
    """A path on one line: a name with a line break in it must not read as two results."""
    return path if path.isprintable() else "".join(_escaped(ch) for ch in path)


def _escaped(ch: str) -> str:
    return ch if ch.isprintable() or not ch.isascii() else ch.encode("unicode_escape").decode("ascii")


def glob_text(path: str, found: Sequence[str], truncated: bool, skipped: Mapping[str, int]) -> str:
    """The paths a glob found, numbered."""
    if not found:
        return f"No files matched under {path}" + _not_searched(skipped)
    lines = [f"Found {len(found)} paths under {path}" + (f" (showing first {len(found)})" if truncated else "")]
    lines += [f"{number}. {one_line(name)}" for number, name in enumerate(found, 1)]
    if truncated:
        lines.append("Results truncated. Narrow the path or pattern to see fewer matches.")
    return "\n".join(lines) + _not_searched(skipped)


def grep_text(path: str, found: Sequence[GrepMatch], truncated: bool, skipped: Mapping[str, int]) -> str:
    """The lines a grep found, each with its file and number."""
    if not found:
        return f"No matches found under {path}" + _not_searched(skipped)
    lines = [f"Found {len(found)} matches under {path}" + (f" (showing first {len(found)})" if truncated else "")]
    lines += [f"{one_line(match.path)}:{match.line_number}: {match.line}" for match in found]
    if truncated:
        lines.append("Results truncated. Narrow the path or add a glob filter.")
    return "\n".join(lines) + _not_searched(skipped)


def _not_searched(skipped: Mapping[str, int]) -> str:
    """A line that says what a search left out; binary files are no news."""
    words = {
        "errors": "could not be read",
        "large": "files above 1000000 bytes",
        "long_lines": "lines above 2000 chars",
    }
    told = [f"{skipped[kind]} {what}" for kind, what in words.items() if skipped.get(kind)]
    return f"\nNot searched: {', '.join(told)}." if told else ""
