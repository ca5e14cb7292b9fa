"""A thread's directory, a storage in a directory, and the two ways between them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandfleet.checkpoints import Checkpoint
from sandfleet.ids import Identity
from sandfleet_workers.checkpoints import restoring
from sandfleet_workers.checkpoints.saving import INDEX, Policy, Request, save
from sandfleet_workers.checkpoints.storage import Storage
from sandfleet_workers.checkpoints.vault import Vault

CHILDREN = ("workspace", "uploads", "outputs")
HOUR_MS = 3600 * 1000


class World:
    """One thread's data on any number of machines, and its vault."""

    def __init__(self, tmp_path: Path) -> None:
        self.base = tmp_path
        self.identity = Identity("t", "u")
        self.storage = Storage(str(tmp_path / "storage"))
        self.vault = Vault(self.storage, self.identity.digest)
        self.now_ms = 1_800_000_000_000

    def thread(self, machine: str = "one") -> Path:
        path = self.base / machine / "t"
        for child in CHILDREN:
            (path / "user-data" / child).mkdir(parents=True, exist_ok=True)
        return path

    def work(self, machine: str = "one") -> Path:
        return self.thread(machine) / "user-data" / "workspace"

    def save(
        self,
        machine: str = "one",
        *,
        epoch: int = 1,
        policy: Policy | None = None,
        vault: Vault | None = None,
        may_remove: Callable[[], bool] = lambda: True,
        **asked: Any,
    ) -> tuple[Checkpoint, bool]:
        thread = self.thread(machine)
        top = os.open(thread / "user-data", os.O_RDONLY | os.O_DIRECTORY)
        request = Request(self.identity, epoch, self.now_ms, may_remove=may_remove, **asked)
        try:
            return save(top, vault or self.vault, request, policy or Policy(), thread / INDEX)
        finally:
            os.close(top)

    def restore(self, machine: str = "two", checkpoint: str | None = None, **limits: int) -> Path:
        """Bring it back on another machine; the directory with the files."""
        manifest = restoring.choose(self.vault, checkpoint)
        assert manifest is not None
        thread = self.base / machine / "t"
        given = {"max_bytes": 0, "min_free_bytes": 0, **limits}
        restoring.restore(self.vault, manifest, thread, **given)
        return thread / "user-data" / "workspace"

    def objects(self) -> set[str]:
        return set(self.vault.objects())


def picture(top: Path) -> dict[bytes, tuple[Any, ...]]:
    """A tree as it can be compared: names, kinds, modes, times, contents."""
    found: dict[bytes, tuple[Any, ...]] = {}
    root = os.fsencode(top)
    for above, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(above, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content: Any = None
            if stat.S_ISLNK(kind):
                content = os.readlink(path)
            elif stat.S_ISREG(kind):
                with open(path, "rb") as file:
                    content = file.read()
            time_ns = None if stat.S_ISLNK(kind) else status.st_mtime_ns
            mode = None if stat.S_ISLNK(kind) else stat.S_IMODE(status.st_mode)
            found[path[len(root) + 1 :]] = (kind, mode, time_ns, content)
    return found
