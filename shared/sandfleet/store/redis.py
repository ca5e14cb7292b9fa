"""The store in Redis: one Lua script per transition, one round trip per call."""

from __future__ import annotations

from sandfleet.store.keys import DEFAULT_PREFIX, Keys
from sandfleet.store.link import Link
from sandfleet.store.redis_blanks import BlanksMixin
from sandfleet.store.redis_collecting import CollectingMixin
from sandfleet.store.redis_line import LineMixin
from sandfleet.store.redis_nodes import NodesMixin
from sandfleet.store.redis_ops import OpsMixin
from sandfleet.store.redis_replies import Readers, RepliesMixin
from sandfleet.store.redis_returning import ReturningMixin
from sandfleet.store.redis_sandboxes import SandboxesMixin
from sandfleet.store.redis_streams import StreamsMixin

__all__ = ["RedisStore"]

MIB = 1024 * 1024


class RedisStore(
    NodesMixin,
    SandboxesMixin,
    BlanksMixin,
    LineMixin,
    OpsMixin,
    ReturningMixin,
    RepliesMixin,
    StreamsMixin,
    CollectingMixin,
):
    """Shared state in one Redis or Valkey server, 6.2 or newer.

    Connects on first use, is safe for threads and makes its connections anew after a fork.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; `sandfleet.connection.check_url` judges it first.
        prefix: In front of every key, so that deployments may share a server.
        blob_client_bytes: How many blob bytes one client may have in flight.
        blob_fleet_bytes: How many all clients together may.
        name: Shown by ``CLIENT LIST``.
    """

    def __init__(
        self,
        url: str,
        prefix: str = DEFAULT_PREFIX,
        *,
        blob_client_bytes: int = 128 * MIB,
        blob_fleet_bytes: int = 512 * MIB,
        name: str = "sandfleet",
    ) -> None:
        self._keys = Keys(prefix)
        self._link = Link(url, prefix=prefix, name=name)
        self._readers = Readers(url)
        self._link.on_move = self._readers.reconnect
        self._blob_client_limit = blob_client_bytes
        self._blob_fleet_limit = blob_fleet_bytes

    @property
    def moves(self) -> int:
        return self._link.moves

    def close(self) -> None:
        self._readers.close()
        self._link.close()
