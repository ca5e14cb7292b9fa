"""What was found on the way to settings: values with their places, and what deserves a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Found", "Layer", "Notice", "nearest"]


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and where it was said: ``source`` in words, ``key`` as it was written there."""

    value: Any
    source: str
    key: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that was accepted and deserves a word. ``warning``: somebody may rely on what is not so."""

    key: str
    text: str
    warning: bool = False


@dataclass
class Layer:
    """The settings one layer names, by short name; ``unset`` are those it takes back to the default."""

    values: dict[str, Found] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    notices: list[Notice] = field(default_factory=list)
    #: The backend was named by a seed's class path, so `provisioner_url` may still turn it into another.
    backend_by_class: bool = False


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""
