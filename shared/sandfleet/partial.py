"""Answers that may be a part of the whole, and say so. They are what they look like, with one attribute more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["Listed", "Searched"]

T = TypeVar("T")


class Listed(list[T]):
    """The entries of a listing.

    Attributes:
        unread: Directories below the listed one that could not be read, so that their entries are missing.
    """

    __slots__ = ("unread",)

    def __init__(self, entries: Iterable[T] = (), *, unread: int = 0) -> None:
        super().__init__(entries)
        self.unread = unread


class Searched(tuple[list[T], bool]):
    """(what was found, whether there is more) of a search.

    Attributes:
        skipped: What was not searched and how often: ``errors`` (files and directories that could not be read),
            ``large`` and ``binary`` (files), ``long_lines``.
    """

    skipped: Mapping[str, int]

    def __new__(cls, found: list[T], truncated: bool, skipped: Mapping[str, int] | None = None) -> Searched[T]:
        """The pair, with what is missing from it."""
        made = super().__new__(cls, (found, truncated))
        made.skipped = dict(skipped or {})
        return made

    def __getnewargs__(self) -> tuple[list[T], bool]:
        """For copies and pickles, which would call `__new__` with the pair as one argument."""
        return self[0], self[1]
