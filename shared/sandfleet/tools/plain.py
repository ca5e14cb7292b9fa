"""What our `Sandbox` does on the node, done here for sandboxes that have the seeds' methods only. Pure."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sandfleet.errors import AmbiguousMatch, NoMatch, NotSupported
from sandfleet.model import TextRead

__all__ = ["lacks", "replaced", "taken", "text_read"]

_LINES_NAMED = 20


def lacks(error: AttributeError | NotSupported, method: str) -> bool:
    """Whether the error says that a sandbox has no such method (and not that the method itself went wrong)."""
    return isinstance(error, NotSupported) or error.name == method


def taken(method: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without a timeout where the method takes none: a sandbox of one's own has its own limit then.

    Nothing else is left out: a command without its environment would be another command.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(each.name == "timeout" or each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name != "timeout"}


def text_read(text: str, start_line: int | None, end_line: int | None, max_chars: int | None) -> TextRead:
    """The part of a whole text that `Sandbox.read_text` would give."""
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    first = start_line or 1
    wanted = lines[first - 1 : end_line]
    asked = sum(map(len, wanted))
    shown, size = 0, 0
    while shown < len(wanted) and (max_chars is None or size + len(wanted[shown]) <= max_chars):
        size += len(wanted[shown])
        shown += 1
    cut = bool(wanted) and not shown
    data = text.encode("utf-8", "surrogatepass")
    return TextRead(
        text=wanted[0][:max_chars] if cut else "".join(wanted[:shown]),
        start_line=first,
        end_line=first + (1 if cut else shown) - 1,
        total_lines=len(lines),
        total_chars=asked,
        truncated=cut or shown < len(wanted),
        cut_line=cut,
        encoding="utf-8",
        size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )


def replaced(text: str, old: str, new: str, *, every: bool) -> str:
    """The text with ``old`` replaced.

    Raises:
        NoMatch: It does not occur.
        AmbiguousMatch: It occurs several times and ``every`` is not set.
    """
    count = text.count(old)
    if count == 0:
        raise NoMatch("the text was not found")
    if count > 1 and not every:
        lines, at = list[int](), text.find(old)
        while at >= 0 and len(lines) < _LINES_NAMED:
            lines.append(1 + text.count("\n", 0, at))
            at = text.find(old, at + len(old))
        raise AmbiguousMatch("the text was found several times", count=count, lines=lines)
    return text.replace(old, new)
