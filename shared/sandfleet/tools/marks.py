"""The read-before-write gate's memory: which version of which file the agent has read.

Kept in the agent's state, so it travels with it: another process that goes on with the state knows the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from sandfleet.tools.paths import normalise

__all__ = ["digest_read", "forget_read", "note_read"]

_READS = "file_reads"


def note_read(state: MutableMapping[str, Any], path: str, digest: str | None) -> None:
    """Remember that the version with this digest was read. A file too big to have one counts as not read."""
    if digest is None:
        forget_read(state, path)
    else:
        # A new mapping: the old one may be part of a checkpoint.
        state[_READS] = {**_reads(state), normalise(path): digest}


def digest_read(state: MutableMapping[str, Any], path: str) -> str | None:
    """The digest of the version that was read, or None."""
    digest = _reads(state).get(normalise(path))
    return digest if isinstance(digest, str) else None


def forget_read(state: MutableMapping[str, Any], path: str) -> None:
    """Any write invalidates earlier reads."""
    reads = _reads(state)
    if reads.pop(normalise(path), None) is not None:
        state[_READS] = reads


def _reads(state: MutableMapping[str, Any]) -> dict[str, Any]:
    reads = state.get(_READS)
    return dict(reads) if isinstance(reads, MutableMapping) else {}
