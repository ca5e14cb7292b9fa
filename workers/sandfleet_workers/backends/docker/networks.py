"""The engine's networks that sandboxes of one data root are on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sandfleet.config.models import ContainerSettings
from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.hostconfig import LABEL_DEPLOYMENT

__all__ = ["Networks"]


class Networks:
    """Makes and removes networks. Nodes that share the data root share them; the engine would make two of one name, so
    they take turns.

    Args:
        engine: Where they are.
        container: Which network the operator named, if any.
        data_root: Of the nodes.
        data_id: Its id, which is in the networks' names and labels.
    """

    def __init__(self, engine: Engine, container: ContainerSettings, data_root: Path, data_id: str) -> None:
        self._engine = engine
        self._named = container.docker_network
        self._data_root = data_root
        self._data_id = data_id

    @property
    def own(self) -> str:
        """The name of the one that we make."""
        return f"sandfleet-{self._data_id[:8]}"

    def with_a_way_out(self) -> str:
        """The name of the network for sandboxes that may reach others; it is there.

        Raises:
            StartFailed: ``reason`` no_network, or what the engine refused.
        """
        if not self._named:
            self.make(self.own)
            return self.own
        if not self._engine.has_network(self._named):
            raise StartFailed(
                f"there is no Docker network {self._named}; make it or leave sandbox.docker_network out",
                reason="no_network",
            )
        return self._named

    def make(self, name: str, *, internal: bool = False) -> None:
        """Have one of that name; ``internal``: nothing beyond it can be reached from there.

        Raises:
            StartFailed: What the engine refused.
        """
        with self._alone():
            self._engine.ensure_network(name, {LABEL_DEPLOYMENT: self._data_id}, internal=internal)

    def drop(self, names: Iterable[str]) -> None:
        """Remove those that nobody is on."""
        with self._alone():
            for name in names:
                self._engine.drop_network(name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        path = self._data_root / "nodes" / "networks.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
