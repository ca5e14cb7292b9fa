"""Whose data lies on a node's data root, told to a registry that may not know it (any more)."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sandfleet.errors import ConfigError, InvalidArgument, StoreUnavailable
from sandfleet.ids import Identity
from sandfleet.leftover_dirs import directories
from sandfleet_workers.holders import last_epoch

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["Homes"]

log = logging.getLogger("sandfleet.node")

_PAGE = 500
_AGAIN_S = 1.0
_TRIES = 60


class Homes:
    """Tells the registry which threads' data is here: at the start of a node, since the registry forgets a thread after
    a month and its files do not go, and when it has lost all. Otherwise the thread's next sandbox could be placed
    elsewhere, and would begin empty."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._due = threading.Event()
        self._running = threading.Lock()

    def tell_soon(self) -> None:
        """Have it told by a thread of its own, also if one is about it already: the registry may have been emptied."""
        self._due.set()
        threading.Thread(target=self._run, name="sandfleet-homes", daemon=True).start()

    def _run(self) -> None:
        with self._running:
            for _ in range(_TRIES):
                if not self._due.is_set() or self._node.draining:
                    return
                self._due.clear()
                try:
                    self.tell()
                except StoreUnavailable as exc:
                    log.warning("homes.not_told", extra={"node_id": self._node.node_id, "error": str(exc)})
                    self._due.set()
                    threading.Event().wait(_AGAIN_S)
                except ConfigError as exc:
                    log.error("homes.not_readable", extra={"node_id": self._node.node_id, "error": exc.message})

    def tell(self) -> int:
        """Tell it now; how many threads had no home.

        Raises:
            StoreUnavailable: Redis is away.
            ConfigError: The data root cannot be read.
        """
        told = 0
        found = self._found(self._node.settings.data_root)
        while page := list(itertools.islice(found, _PAGE)):
            told += self._node.store.tell_homes(self._node.lifecycle.data_id, page)
        if told:
            log.info("homes.told", extra={"node_id": self._node.node_id, "threads": told})
        return told

    def _found(self, data_root: Path) -> Iterator[tuple[str, int]]:
        yield from self._of(None, data_root / "threads")
        for user in directories(data_root / "users"):
            yield from self._of(user.name, Path(user.path) / "threads")

    def _of(self, user_id: str | None, home: Path) -> Iterator[tuple[str, int]]:
        for entry in directories(home):
            try:
                identity = Identity(entry.name, user_id)
            except InvalidArgument:
                continue  # no thread's
            if (Path(entry.path) / "user-data").is_dir():
                yield identity.digest, last_epoch(Path(entry.path))
