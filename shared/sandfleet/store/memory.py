"""Placeholder while the Redis store is written."""

from __future__ import annotations


class MemoryStore:
    """Not written yet."""
