"""Looking through a whole storage, and removing checkpoints of threads for good: what `sandfleet gc` needs of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import CheckpointCorrupt, NoCheckpoint
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints.manifest import ManifestName
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
    """Remove checkpoints of a thread, and at once the objects that only they needed; with the last one, its place.

    Somebody may be saving the thread meanwhile, as a node does whose sandbox has just ended: objects that no manifest
    names yet may be his, and stay.

    Raises:
        CheckpointCorrupt: None of those that would stay is whole; nothing was removed.
        CheckpointFailed: Not all of it is gone.
    """
    vault = Vault(storage, digest)
    stay = [name for name, _ in vault.checkpoints() if name.id not in ids]
    if not stay:
        vault.remove()
        return
    if not _has_whole(vault, stay):
        raise CheckpointCorrupt("none of the checkpoints that would stay is whole", digest=digest)
    gone = [name for name in vault.names() if name.id in ids]
    unneeded = set[str]().union(*(_needed(vault, name) for name in gone))
    vault.drop(gone)
    # Those that are there now, one that was made meanwhile among them.
    for name in vault.names():
        unneeded -= _needed(vault, name)
    vault.sweep(unneeded)


def _has_whole(vault: Vault, names: Collection[ManifestName]) -> bool:
    stored = vault.objects()
    return any(_needed(vault, name, none=frozenset({""})) <= stored.keys() for name in names)


def _needed(vault: Vault, name: ManifestName, *, none: Set[str] = frozenset()) -> Set[str]:
    """The objects that a manifest names; ``none`` of one that is not whole."""
    try:
        return vault.load(name).digests()
    except NoCheckpoint:
        return none
    except CheckpointCorrupt as exc:
        log.warning("checkpoint.unusable", extra={"checkpoint_id": name.id, "error": str(exc)})
        return none
