"""One thread's place in the storage: its manifests and the objects that they share.

``{digest[:2]}/{digest}/objects/{sha256[:2]}/<sha256>`` and ``…/manifests/<epoch>-<seq>-<id>.json``, where ``digest`` is
the identity's. Objects come first and the manifest last, so what a crash leaves is objects that nobody names.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import CheckpointCorrupt, CheckpointFailed, NoCheckpoint
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints.manifest import (
    HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestName,
    Piece,
    decode,
    decode_summary,
    encode,
    newest,
)
from sandfleet_workers.checkpoints.storage import Storage

__all__ = ["Vault", "vaults"]

log = logging.getLogger("sandfleet.node")


def vaults(storage: Storage) -> Iterator[str]:
    """The digests of all identities that have a place in the storage.

    Raises:
        CheckpointFailed: The storage cannot be read.
    """
    for folder in storage.folders(""):
        if len(folder) == 2:
            yield from (digest for digest in storage.folders(folder) if digest.startswith(folder))


class Vault:
    """The checkpoints of one identity.

    Raises (any method):
        CheckpointFailed: The storage does not answer or refuses.
    """

    def __init__(self, storage: Storage, digest: str) -> None:
        self.storage = storage
        self.digest = digest
        self._place = f"{digest[:2]}/{digest}"

    # --- manifests ---------------------------------------------------------------------------

    def names(self) -> list[ManifestName]:
        """Of every manifest, whole or not, the newest first."""
        return newest(self._manifests())

    def _manifests(self) -> dict[ManifestName, int]:
        files = self.storage.files(f"{self._place}/manifests")
        return {name: size for text, size in files.items() if (name := ManifestName.parse(text)) is not None}

    def _path(self, name: ManifestName) -> str:
        return f"{self._place}/manifests/{name}"

    def checkpoints(self) -> list[tuple[ManifestName, Checkpoint]]:
        """What is saved, the newest first; what was written half or belongs to somebody else is left out."""
        sizes = self._manifests()
        found = []
        for name in newest(sizes):
            try:
                begin = self.storage.read(self._path(name), most=HEAD_BYTES, begin=True)
                summary = decode_summary(name, begin, sizes[name])
                self._check_owner(summary)
            except (CheckpointCorrupt, FileNotFoundError) as exc:
                log.warning("checkpoint.unusable", extra={"checkpoint_id": name.id, "error": str(exc)})
                continue
            found.append((name, summary))
        return found

    def load(self, name: ManifestName) -> Manifest:
        """A manifest, checked.

        Raises:
            CheckpointCorrupt: It is not whole, not what was written, or another thread's.
            NoCheckpoint: It is gone.
        """
        try:
            data = self.storage.read(self._path(name), most=MAX_MANIFEST_BYTES + HEAD_BYTES)
        except FileNotFoundError:
            raise NoCheckpoint(f"checkpoint {name.id} is gone", checkpoint_id=name.id) from None
        manifest = decode(name, data)
        self._check_owner(manifest.summary())
        return manifest

    def _check_owner(self, found: Checkpoint) -> None:
        if Identity(found.thread_id, found.user_id).digest != self.digest:
            raise CheckpointCorrupt(f"checkpoint {found.id} is another thread's", checkpoint_id=found.id)

    def put_manifest(self, manifest: Manifest) -> None:
        """Write it, after all its objects: from now on it is a checkpoint."""
        try:
            data = encode(manifest)
        except ValueError as exc:
            raise CheckpointFailed(f"the thread's data is not saved: {exc}", reason="too_large") from exc
        self.storage.write(self._path(manifest.name), data)

    def drop(self, names: Iterable[ManifestName]) -> None:
        """Remove manifests; their objects stay until nobody names them (see `sweep`)."""
        self.storage.remove(map(self._path, names))

    # --- objects -----------------------------------------------------------------------------

    def objects(self) -> dict[str, int]:
        """The digests of the objects that are there, and their sizes."""
        listed = self.storage.all_files(f"{self._place}/objects")
        return {name: size for name, size in listed.items() if len(name) == 64}

    def _object(self, digest: str) -> str:
        return f"{self._place}/objects/{digest[:2]}/{digest}"

    def put_object(self, digest: str, data: bytes) -> None:
        """Write an object."""
        self.storage.write(self._object(digest), data)

    def object(self, piece: Piece) -> bytes:
        """The bytes of a piece, compared with its digest.

        Raises:
            CheckpointCorrupt: They are not what was saved, or gone.
        """
        try:
            data = self.storage.read(self._object(piece.digest), most=piece.size)
        except FileNotFoundError:
            data = b""
        except CheckpointFailed as exc:
            if exc.facts.get("reason") != "too_large":
                raise
            data = b""
        if len(data) != piece.size or hashlib.sha256(data).hexdigest() != piece.digest:
            raise CheckpointCorrupt(f"the object {piece.digest} is not what was saved", digest=piece.digest)
        return data

    def sweep(self, digests: Iterable[str]) -> None:
        """Remove objects that no manifest names."""
        self.storage.remove(map(self._object, digests))

    def remove(self) -> None:
        """Everything that was saved of this identity goes: first the manifests, so that none is left without its
        objects."""
        self.storage.remove_folder(f"{self._place}/manifests")
        self.storage.remove_folder(self._place)
