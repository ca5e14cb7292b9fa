"""Making a checkpoint: only what is new is written, the manifest last; and removing old ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import CheckpointCorrupt, CheckpointFailed, NoCheckpoint
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints.manifest import Manifest, ManifestName, Piece, told_skipped
from sandfleet_workers.checkpoints.reading import Known, Tree, read_tree
from sandfleet_workers.checkpoints.vault import Vault

__all__ = ["INDEX", "Index", "Policy", "Request", "save"]

log = logging.getLogger("sandfleet.node")

#: An object that no manifest names is removed so long after that was noticed: another node may be about to name it.
GRACE_MS = 3600 * 1000
_UPLOADS_AHEAD = 8
#: The name of a thread's index, beside its ``user-data``: the worker's own, which no sandbox sees.
INDEX = ".checkpoints.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """How much is saved and how many checkpoints are kept."""

    max_bytes: int = 0
    keep: int = 5
    grace_ms: int = GRACE_MS


@dataclass(frozen=True, slots=True)
class Request:
    """Whose data is to be saved.

    Attributes:
        epoch: Of the sandbox that has it.
        now_ms: The store's time.
        label: A name that the caller gave it.
        always: Make one although nothing changed since the last.
        may_remove: Asked before anything old is removed: whether the data is still this node's.
    """

    identity: Identity
    epoch: int
    now_ms: int
    label: str | None = None
    always: bool = False
    may_remove: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class Index:
    """What a node remembers between two checkpoints of a thread. Losing it costs time and nothing else."""

    known: dict[str, Known] = field(default_factory=dict)
    #: Objects that no manifest names, and when that was noticed.
    garbage: dict[str, int] = field(default_factory=dict)
    #: This node has looked for such objects.
    swept: bool = False

    @classmethod
    def read(cls, path: Path) -> Index:
        """As it was written; an empty one where there is none that can be read."""
        try:
            data = json.loads(path.read_bytes())
            known = {
                name: Known(size, mtime_ns, ctime_ns, ino, tuple(Piece(*piece) for piece in pieces))
                for name, (size, mtime_ns, ctime_ns, ino, pieces) in data["known"].items()
            }
            return cls(known, dict(data["garbage"]), bool(data["swept"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("checkpoint.index_unreadable", extra={"path": str(path), "error": str(exc)})
            return cls()

    def write(self, path: Path) -> None:
        """Keep it; that it cannot be kept is logged."""
        rows = {
            name: [k.size, k.mtime_ns, k.ctime_ns, k.ino, [[piece.size, piece.digest] for piece in k.pieces]]
            for name, k in self.known.items()
        }
        data = json.dumps({"known": rows, "garbage": self.garbage, "swept": self.swept}, separators=(",", ":"))
        fresh = path.with_name(f".{path.name}.new")
        try:
            fresh.write_text(data, encoding="ascii")
            fresh.replace(path)
        except OSError as exc:
            log.warning("checkpoint.index_not_kept", extra={"path": str(path), "error": str(exc)})


def save(top: int, vault: Vault, request: Request, policy: Policy, index_path: Path) -> tuple[Checkpoint, bool]:
    """Save what lies below the open directory ``top``; the checkpoint, and whether it is a new one. One at a time for
    a thread on this node; another node may do so beside it.

    Raises:
        CheckpointFailed: The storage refuses, or the data is more than may be saved.
    """
    index = Index.read(index_path)
    names, stored = vault.names(), vault.objects()
    parent = _newest_whole(vault, names)
    there = set() if parent is None else {one.digest for one in parent.pieces() if stored.get(one.digest) == one.size}
    known = {path: one for path, one in index.known.items() if _is_stored(one.pieces, there)}
    uploads = _Uploads(vault, there)
    tree = read_tree(
        top, known=known, keep=uploads.keep, max_bytes=policy.max_bytes, now_ns=_file_system_time_ns(index_path)
    )
    uploads.finish()
    seq = 1 + max((name.seq for name in names if name.epoch == request.epoch), default=0)
    manifest = _manifest(tree, request, seq, parent)
    new = request.always or request.label is not None or parent is None or not _is_alike(manifest, parent)
    if new:
        vault.put_manifest(manifest)
    elif parent is not None:
        manifest = parent
    kept = Index(tree.known, index.garbage, index.swept)
    if new:
        try:
            _remove_old(vault, manifest, request, policy, kept)
        except CheckpointFailed as exc:
            # The checkpoint is made, and old ones are looked at again with the next one.
            log.warning("checkpoint.old_kept", extra={"thread_id": request.identity.thread_id, "error": str(exc)})
    kept.write(index_path)
    return manifest.summary(), new


def _newest_whole(vault: Vault, names: list[ManifestName]) -> Manifest | None:
    for name in names:
        try:
            return vault.load(name)
        except (CheckpointCorrupt, NoCheckpoint) as exc:
            log.warning("checkpoint.unusable", extra={"checkpoint_id": name.id, "error": str(exc)})
    return None


def _is_stored(pieces: Iterable[Piece], there: set[str]) -> bool:
    return all(piece.digest in there for piece in pieces if piece.digest)


def _manifest(tree: Tree, request: Request, seq: int, parent: Manifest | None) -> Manifest:
    return Manifest(
        name=ManifestName(request.epoch, seq, secrets.token_hex(8)),
        thread_id=request.identity.thread_id,
        user_id=request.identity.user_id,
        saved_at_ms=request.now_ms,
        parent=parent.name.id if parent is not None else None,
        label=request.label,
        consistent=tree.consistent,
        skipped=told_skipped(tree.skipped),
        entries=tuple(tree.entries),
    )


def _is_alike(one: Manifest, other: Manifest) -> bool:
    return (one.entries, one.skipped) == (other.entries, other.skipped) and other.consistent >= one.consistent


def _file_system_time_ns(beside: Path) -> int:
    """What the file system's own clock says now."""
    probe = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(probe)
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


class _Uploads:
    """Writes the objects that are not there yet, a few at a time."""

    def __init__(self, vault: Vault, there: set[str]) -> None:
        self._vault = vault
        self._there = set(there)
        self._waiting: list[tuple[str, bytes]] = []
        self._bytes = 0

    def keep(self, data: bytes) -> str:
        """The digest of a piece, which is stored at the latest with `finish`."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._there:
            self._there.add(digest)
            self._waiting.append((digest, data))
            self._bytes += len(data)
            if len(self._waiting) >= 16 * _UPLOADS_AHEAD or self._bytes >= 32 * 1024 * 1024:
                self.finish()
        return digest

    def finish(self) -> None:
        """Write what waits."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        self._vault.storage.each(partial(self._vault.put_object, digest, data) for digest, data in waiting)


# --- what is old -------------------------------------------------------------------------------


def _remove_old(vault: Vault, mine: Manifest, request: Request, policy: Policy, index: Index) -> None:
    """Checkpoints beyond those that are kept, and objects that nobody has named for a while.

    Only the newest owner does so, and an object is given time: somebody who was paused may be in the middle of a
    checkpoint, which counts for nothing any more, and somebody newer must never lose what he is about to name.
    """
    found = vault.checkpoints()
    if not request.may_remove() or any(name.epoch > request.epoch for name, _ in found):
        return
    kept: set[ManifestName] = {mine.name}
    for named in (False, True):
        row = [name for name, told in found if (told.name is not None) == named]
        kept.update(row[: policy.keep])
    old = [name for name, _ in found if name not in kept]
    if not old and not index.garbage and index.swept:
        return
    vault.drop(old)
    needed = _needed(vault, mine)
    if needed is None:
        return
    unnamed = {digest for digest in vault.objects() if digest not in needed}
    index.garbage = {digest: index.garbage.get(digest, request.now_ms) for digest in unnamed}
    index.swept = True
    due = [digest for digest, since in index.garbage.items() if since <= request.now_ms - policy.grace_ms]
    if due and request.may_remove():
        vault.sweep(due)
        for digest in due:
            del index.garbage[digest]


def _needed(vault: Vault, mine: Manifest) -> set[str] | None:
    """Every object that a manifest names; None while that cannot be told."""
    needed = mine.digests()
    for name in vault.names():
        if name == mine.name:
            continue
        try:
            needed |= vault.load(name).digests()
        except NoCheckpoint:
            continue
        except CheckpointCorrupt:
            if name > mine.name:
                return None  # a newer owner writes it, perhaps
            # Nobody will complete it.
            vault.drop([name])
    return needed
