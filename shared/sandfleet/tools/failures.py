"""What a model is told when a tool fails: the reference's texts, and how to go on. Pure.

Only the tools turn errors into text; everything below them raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sandfleet.errors import FileError, SandfleetError

__all__ = ["Failures", "InitFailed", "blocked_text"]

#: What the system itself says; anything longer explains, and is worth passing on.
_PLAIN = {"permission denied", "operation not permitted", "access denied"}


class InitFailed(Exception):
    """The sandbox could not be had, for a reason that is no `SandfleetError`."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How one tool tells its failures.

    Attributes:
        doing: What it was doing, for what nobody expected: ``Unexpected error {doing}: …``.
        rules: (exception class, text) pairs; the first that fits is told. ``{path}``, ``{error}``, ``{why}`` are filled
            in.
        otherwise: Stands for ``Unexpected error {doing}``; ``{path}`` is filled in.
    """

    doing: str
    rules: Sequence[tuple[type[BaseException], str]] = ()
    otherwise: str = ""

    def text(self, error: Exception, path: str = "") -> str:
        """The answer of a tool that failed with ``error``, beginning with ``Error:``."""
        for kind, template in self.rules:
            if isinstance(error, kind):
                return "Error: " + template.format(path=path, why=_reason(error), error=error)
        if isinstance(error, InitFailed):
            return f"Error: Unexpected error initializing sandbox: {_named(error.__cause__ or error)}"
        if isinstance(error, SandfleetError) and not isinstance(error, FileError):
            return f"Error: {error}{_when_again(error)}"
        beginning = self.otherwise.format(path=path) if self.otherwise else f"Unexpected error {self.doing}"
        return f"Error: {beginning}: {_named(error)}"


def blocked_text(tool: str, path: str) -> str:
    """The answer to a write of a file whose current version was not read."""
    return (
        f"Error: {tool} blocked — {path} already exists and you have not read its current version. Any write "
        "invalidates earlier reads, so re-read before every modification. Call read_file on it, then try again."
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _reason(error: BaseException) -> str:
    """`` (why)`` where the error explains more than its kind does already; host mode names the allowed roots so."""
    text = error.message if isinstance(error, SandfleetError) else ""
    return f" ({text})" if text and text.lower() not in _PLAIN else ""


def _when_again(error: SandfleetError) -> str:
    return f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
