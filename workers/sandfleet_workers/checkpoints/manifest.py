"""A checkpoint as it is written down: what its files are called and which objects hold their bytes. Pure.

A manifest is three lines: a head with the digests of the other two, a summary, and the entries. So a list of
checkpoints is made from the beginnings of files, and one that was written half is known by its length.

What is read here comes from a storage that others may write to, and describes a tree that a sandbox made. Nothing of it
is believed before `decode` has looked at it: names are relative, each lies in a directory that is listed before it, and
no name occurs twice, so that no link can stand where a directory is expected.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import CheckpointCorrupt
from sandfleet.ids import Identity

__all__ = [
    "DIRECTORY",
    "FILE",
    "HEAD_BYTES",
    "LINK",
    "MAX_ENTRIES",
    "MAX_MANIFEST_BYTES",
    "MAX_PATHS_BYTES",
    "MAX_PATH_BYTES",
    "MAX_PIECES",
    "PIECE_BYTES",
    "Entry",
    "Manifest",
    "ManifestName",
    "Piece",
    "decode",
    "decode_summary",
    "encode",
    "newest",
    "told_skipped",
]

DIRECTORY, FILE, LINK = "d", "f", "l"
#: Files are cut into pieces of this size at most, and each is an object of its own.
PIECE_BYTES = 8 * 1024 * 1024
MAX_ENTRIES = 500_000
MAX_PIECES = 1_000_000
MAX_PATH_BYTES = 4096
#: Of all paths together: a few deep directories full of empty ones would otherwise cost gigabytes, and hours to enter.
MAX_PATHS_BYTES = 64 * 1024 * 1024
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
#: The head and the summary together are shorter.
HEAD_BYTES = 64 * 1024
_MAX_NAME_BYTES = 255
_MAX_SIZE = 2**53
_MAX_TIME_NS = 2**63 - 1
_SKIPPED_TOLD, _SKIPPED_CHARS = 50, 200

_MAGIC = "sandfleet-checkpoint 1"
_HEAD = re.compile(rf"{_MAGIC} ([0-9a-f]{{64}}) ([0-9a-f]{{64}}) ([0-9]{{1,12}})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{16})\.json")


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """The name of a manifest's file. They sort by age: a new owner's epoch is larger, so whatever an old one that was
    paused still writes is older than all that the new one wrote."""

    epoch: int
    seq: int
    id: str

    def __str__(self) -> str:
        return f"{self.epoch:016x}-{self.seq:08x}-{self.id}.json"

    @classmethod
    def parse(cls, text: str) -> ManifestName | None:
        """The name, or None for any other file."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1], 16), int(found[2], 16), found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: an object's digest, or "" for a hole, of which nothing is stored."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, directory or link; ``path`` is relative, with ``surrogateescape`` for what is not UTF-8."""

    path: str
    kind: str
    mode: int = 0
    mtime_ns: int = 0
    pieces: tuple[Piece, ...] = ()
    target: str = ""

    @property
    def size(self) -> int:
        """Bytes of the file, holes included."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint. ``skipped``: what could not be saved, and why, as far as there is room to tell."""

    name: ManifestName
    thread_id: str
    user_id: str | None
    saved_at_ms: int
    parent: str | None
    label: str | None
    consistent: bool
    skipped: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def identity(self) -> Identity:
        """Whose it is."""
        return Identity(self.thread_id, self.user_id)

    @property
    def data_bytes(self) -> int:
        """Bytes of the files, without holes."""
        return sum(piece.size for entry in self.entries for piece in entry.pieces if piece.digest)

    def pieces(self) -> Iterator[Piece]:
        """Every part of a file that has an object; an object may be that of several."""
        return (piece for entry in self.entries for piece in entry.pieces if piece.digest)

    def digests(self) -> set[str]:
        """Every object that it needs."""
        return {piece.digest for piece in self.pieces()}

    def summary(self) -> Checkpoint:
        """What a caller is told of it."""
        return Checkpoint(
            id=self.name.id,
            thread_id=self.thread_id,
            user_id=self.user_id,
            saved_at=self.saved_at_ms / 1000,
            files=sum(entry.kind == FILE for entry in self.entries),
            size_bytes=self.data_bytes,
            consistent=self.consistent,
            parent=self.parent,
            epoch=self.name.epoch,
            name=self.label,
            skipped=self.skipped,
        )


def told_skipped(skipped: Sequence[str]) -> tuple[str, ...]:
    """What was left out, cut to what a summary holds."""
    told = [line.encode("utf-8", "replace").decode()[:_SKIPPED_CHARS] for line in skipped[:_SKIPPED_TOLD]]
    more = len(skipped) - len(told)
    return (*told, *([f"and {more} more"] if more else []))


# --- writing -----------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """Its file.

    Raises:
        ValueError: It is larger than one may be.
    """
    summary = _line({**manifest.summary().to_wire(), "v": 1, "seq": manifest.name.seq})
    entries = _line([_row(entry) for entry in manifest.entries])
    head = f"{_MAGIC} {_sha256(summary)} {_sha256(entries)} {len(entries)}\n".encode()
    if len(head) + len(summary) > HEAD_BYTES or len(entries) > MAX_MANIFEST_BYTES:
        raise ValueError("there are more files than one checkpoint may have")
    return head + summary + entries


def _line(value: Any) -> bytes:
    # ASCII, so that the surrogates of odd names travel as they are.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _row(entry: Entry) -> list[Any]:
    if entry.kind == LINK:
        return [entry.path, LINK, entry.target]
    row: list[Any] = [entry.path, entry.kind, entry.mode, entry.mtime_ns]
    if entry.kind == FILE:
        row.append([[piece.size, piece.digest] for piece in entry.pieces])
    return row


# --- reading -----------------------------------------------------------------------------------


def decode_summary(name: ManifestName, begin: bytes, file_bytes: int) -> Checkpoint:
    """What a list shows of a manifest, from the first `HEAD_BYTES` of its file and the file's size.

    Raises:
        CheckpointCorrupt: It is none, or was not written whole.
    """
    return _summary(name, *_head(begin, file_bytes)[:2])


def decode(name: ManifestName, data: bytes) -> Manifest:
    """The manifest of a whole file.

    Raises:
        CheckpointCorrupt: It is none, was not written whole, or describes what no checkpoint may hold.
    """
    summary_line, summary_digest, start, entries_digest = _head(data, len(data))
    summary = _summary(name, summary_line, summary_digest)
    if _sha256(data[start:]) != entries_digest:
        raise _corrupt(name, "its entries have another digest")
    try:
        rows = json.loads(data[start:])
    except (ValueError, RecursionError) as exc:
        raise _corrupt(name, "its entries are no JSON") from exc
    return Manifest(
        name=name,
        thread_id=summary.thread_id,
        user_id=summary.user_id,
        saved_at_ms=round(summary.saved_at * 1000),
        parent=summary.parent,
        label=summary.name,
        consistent=summary.consistent,
        skipped=summary.skipped,
        entries=_entries(name, rows),
    )


def _corrupt(name: ManifestName, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"checkpoint {name.id} cannot be used: {why}", checkpoint_id=name.id)


def _head(data: bytes, file_bytes: int) -> tuple[bytes, str, int, str]:
    """The summary line and its digest, where the entries begin, and theirs."""
    head, newline, rest = data[:HEAD_BYTES].partition(b"\n")
    found = _HEAD.fullmatch(head.decode("ascii", "replace"))
    summary, end, _ = rest.partition(b"\n")
    start = len(head) + len(newline) + len(summary) + len(end)
    if found is None or not end or start + int(found[3]) != file_bytes:
        raise CheckpointCorrupt("a checkpoint was not written whole, or is none")
    return summary + end, found[1], start, found[2]


def _summary(name: ManifestName, line: bytes, digest: str) -> Checkpoint:
    if _sha256(line) != digest:
        raise _corrupt(name, "its summary has another digest")
    try:
        fields = json.loads(line)
        found = Checkpoint.from_wire(fields)
        identity = Identity(found.thread_id, found.user_id)
        seq = fields["seq"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise _corrupt(name, "its summary cannot be read") from exc
    if (found.id, found.epoch, seq) != (name.id, name.epoch, name.seq) or identity.thread_id != found.thread_id:
        raise _corrupt(name, "it has another one's name")
    if found.parent is not None and not _ID.fullmatch(found.parent):
        raise _corrupt(name, "its parent is no checkpoint")
    return found


def _entries(name: ManifestName, rows: Any) -> tuple[Entry, ...]:
    if not isinstance(rows, list) or len(rows) > MAX_ENTRIES:
        raise _corrupt(name, "its entries are no list, or too many")
    directories, seen, pieces = {""}, set[str](), 0
    entries = []
    for row in rows:
        try:
            entry = _entry(row)
        except (ValueError, TypeError, KeyError, IndexError) as exc:
            raise _corrupt(name, f"an entry is malformed ({exc})") from exc
        pieces += len(entry.pieces)
        if entry.path in seen or entry.path.rpartition("/")[0] not in directories or pieces > MAX_PIECES:
            raise _corrupt(name, "an entry occurs twice, lies in no directory, or is one too many")
        seen.add(entry.path)
        if entry.kind == DIRECTORY:
            directories.add(entry.path)
        entries.append(entry)
    return tuple(entries)


def _entry(row: Any) -> Entry:
    path, kind, *rest = row
    _check_path(path)
    if kind == LINK:
        (target,) = rest
        if not isinstance(target, str) or "\0" in target or not 0 < len(_bytes(target)) < MAX_PATH_BYTES:
            raise ValueError("a link leads nowhere")
        return Entry(path, LINK, target=target)
    if kind == DIRECTORY:
        mode, mtime_ns = rest
        pieces: tuple[Piece, ...] = ()
    elif kind == FILE:
        mode, mtime_ns, listed = rest
        pieces = tuple(_piece(*pair) for pair in listed)
    else:
        raise ValueError("neither a file nor a directory nor a link")
    if type(mode) is not int or type(mtime_ns) is not int or not -_MAX_TIME_NS <= mtime_ns <= _MAX_TIME_NS:
        raise ValueError("its mode or time is no number")
    # No special bit comes out of a storage, whatever the manifest says.
    entry = Entry(path, kind, mode & 0o777, mtime_ns, pieces)
    if entry.size > _MAX_SIZE:
        raise ValueError("a file is larger than files are")
    return entry


def _piece(size: Any, digest: Any) -> Piece:
    if type(size) is not int or type(digest) is not str or not 0 < size <= _MAX_SIZE:
        raise ValueError("a piece of a file has no size")
    if digest and (not _DIGEST.fullmatch(digest) or size > PIECE_BYTES):
        raise ValueError("a piece of a file is none")
    return Piece(size, digest)


def _check_path(path: Any) -> None:
    if type(path) is not str or "\0" in path or len(_bytes(path)) > MAX_PATH_BYTES:
        raise ValueError("a name is none")
    if any(part in ("", ".", "..") or len(_bytes(part)) > _MAX_NAME_BYTES for part in path.split("/")):
        raise ValueError("a name leads elsewhere")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def newest(names: Iterable[ManifestName]) -> list[ManifestName]:
    """The newest first."""
    return sorted(names, reverse=True)
