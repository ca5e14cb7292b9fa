"""The shared state: `Store` is the contract, `RedisStore` and `MemoryStore` keep it."""

from __future__ import annotations

from sandfleet.connection import check_url
from sandfleet.store.base import Store
from sandfleet.store.keys import DEFAULT_PREFIX
from sandfleet.store.memory import MemoryStore
from sandfleet.store.redis import RedisStore

__all__ = ["MemoryStore", "RedisStore", "Store", "open_store"]


MIB = 1024 * 1024


def open_store(
    url: str,
    prefix: str = DEFAULT_PREFIX,
    *,
    allow_insecure: bool = False,
    client_bytes: int = 128 * MIB,
    fleet_bytes: int = 512 * MIB,
) -> Store:
    """The store that a URL names: Redis, or ``memory://`` for one process alone.

    Raises:
        InsecureRedis: The server is on a network and has no password.
        ConfigError: It is not a usable URL.
    """
    if url.startswith("memory://"):
        return MemoryStore()
    check_url(url, allow_insecure=allow_insecure)
    return RedisStore(url, prefix, blob_client_bytes=client_bytes, blob_fleet_bytes=fleet_bytes)
