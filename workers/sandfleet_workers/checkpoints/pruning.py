"""Looking through a whole storage, and removing checkpoints of threads for good: what `sandfleet gc` needs of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import CheckpointCorrupt, NoCheckpoint
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints.storage import Storage
from sandfleet_workers.checkpoints.vault import Vault, vaults

__all__ = ["Saved", "prune", "saved_threads"]

log = logging.getLogger("sandfleet.node")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a storage has of one thread: its checkpoints, the newest first, and how many bytes they take together.

    ``identity`` is None where no checkpoint is whole: then nobody can tell whose it is, and nothing of it is of use.
    """

    digest: str
    identity: Identity | None
    checkpoints: tuple[Checkpoint, ...]
    stored_bytes: int


def saved_threads(storage: Storage) -> Iterator[Saved]:
    """Every thread that has a place in the storage. Blocks, for as long as that takes.

    Raises:
        CheckpointFailed: The storage cannot be read.
    """
    for digest in vaults(storage):
        vault = Vault(storage, digest)
        found = tuple(told for _, told in vault.checkpoints())
        identity = Identity(found[0].thread_id, found[0].user_id) if found else None
        yield Saved(digest, identity, found, sum(vault.objects().values()))


def prune(storage: Storage, digest: str, ids: Collection[str]) -> None:
    """Remove checkpoints of a thread, and at once the objects that no other one needs; with the last one, its place.

    Nobody may save anything of the thread meanwhile: it has no sandbox, or its node holds it back.

    Raises:
        CheckpointFailed: Not all of it is gone.
    """
    vault = Vault(storage, digest)
    vault.drop(name for name in vault.names() if name.id in ids)
    needed, left = set[str](), 0
    for name in vault.names():
        try:
            needed |= vault.load(name).digests()
            left += 1
        except NoCheckpoint:
            continue
        except CheckpointCorrupt as exc:
            log.warning("checkpoint.unusable", extra={"checkpoint_id": name.id, "error": str(exc)})
    if left:
        vault.sweep(object_digest for object_digest in vault.objects() if object_digest not in needed)
    else:
        vault.remove()
