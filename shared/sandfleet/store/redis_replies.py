"""Replies, blobs, locks and stories."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

import redis

from sandfleet.connection import connect, translate
from sandfleet.errors import ByteBudgetExceeded, InvalidArgument, StoreUnavailable
from sandfleet.store.base import Reply, Store, Waiter
from sandfleet.store.codec import ms_of
from sandfleet.store.keys import Keys
from sandfleet.store.link import Link
from sandfleet.store.scripts import load

_OPEN, _LOCK, _UNLOCK = map(load, ("open_replies", "lock", "unlock"))
_BLOB_BEGIN, _BLOB_PUT, _BLOB_DROP = map(load, ("blob_begin", "blob_put", "blob_drop"))
_SLICE_MS = 1000
_MARGIN_S = 5.0
_PAGE = 500
_FULL_SHARE = 0.75


class RepliesMixin(Store):
    """The part of `RedisStore` about what travels back, and small shared things."""

    _link: Link
    _keys: Keys
    _blob_client_limit: int
    _blob_fleet_limit: int

    def open_replies(self, client: str, *, ttl_s: float) -> bool:
        return bool(self._link.run(_OPEN, client, ms_of(ttl_s)))

    def close_replies(self, client: str) -> None:
        self._readers.drop(client)
        self._link.command("DEL", self._keys.reply(client))

    def read_replies(self, client: str, cursor: str, *, block_s: float) -> list[Reply]:
        return self._readers.read(client, self._keys.reply(client), cursor, block_s)

    def trim_replies(self, client: str, cursor: str) -> None:
        # MINID keeps its bound, so the bound is the id that would follow the cursor.
        first, _, second = cursor.partition("-")
        self._link.command("XTRIM", self._keys.reply(client), "MINID", f"{first}-{int(second or 0) + 1}")

    def reply(self, waiter: Waiter, payload: str) -> bool:
        if not waiter.reply_to:
            return False
        key = self._keys.reply(waiter.reply_to)
        head = ("XADD", key, "NOMKSTREAM", "MAXLEN", "~", 10000, "*")
        return self._link.command(*head, "op", waiter.op_id, "r", payload) is not None

    # --- blobs ---------------------------------------------------------------------------------

    def blob_begin(self, blob_id: str, *, client: str, size: int, ttl_s: float) -> None:
        self._check_memory()
        answer = self._link.run(
            _BLOB_BEGIN, blob_id, client, size, ms_of(ttl_s), self._blob_client_limit, self._blob_fleet_limit
        )
        if answer != "ok":
            limit = self._blob_client_limit if answer == "client" else self._blob_fleet_limit
            raise ByteBudgetExceeded(
                f"{size} more bytes in flight would pass the limit of {limit} for this {answer}",
                retry_after_s=1.0,
                scope=answer,
                limit_bytes=limit,
            )

    def blob_put(self, blob_id: str, index: int, chunk: bytes | memoryview) -> None:
        if not self._link.put(self._keys.chunk(blob_id, index), chunk, _BLOB_PUT, blob_id, index):
            raise InvalidArgument(f"blob {blob_id[:80]} was not begun or has expired")

    def blob_get(self, blob_id: str, index: int) -> bytes | None:
        chunk = self._link.command("GET", self._keys.chunk(blob_id, index), decode=False)
        return None if chunk is None else bytes(chunk)

    def blob_drop(self, blob_id: str) -> None:
        while self._link.run(_BLOB_DROP, blob_id):
            pass

    def _check_memory(self) -> None:
        """Refuse bytes while Redis is nearly full: a full one fails replies and claims first."""
        now = time.monotonic()
        if now - self._memory_read_at > 1.0:
            self._memory_read_at = now
            lines = self._link.command("INFO", "memory").splitlines()
            facts = dict(line.split(":", 1) for line in lines if ":" in line)
            limit = int(facts.get("maxmemory", "0"))
            self._memory_share = int(facts.get("used_memory", "0")) / limit if limit > 0 else 0.0
        if self._memory_share > _FULL_SHARE:
            raise ByteBudgetExceeded(
                f"Redis uses {self._memory_share:.0%} of its maxmemory; blobs are refused above {_FULL_SHARE:.0%}",
                retry_after_s=5.0,
                scope="redis",
            )

    _memory_read_at = float("-inf")
    _memory_share = 0.0

    # --- locks and stories ---------------------------------------------------------------------

    def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
        return bool(self._link.run(_LOCK, name, token, ms_of(ttl_s)))

    def unlock(self, name: str, token: str) -> None:
        self._link.run(_UNLOCK, name, token)

    def story(self, key: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._link.command("LRANGE", self._keys.story(key), 0, -1)]

    def keys(self) -> list[str]:
        found: set[str] = set()
        cursor, pattern = "0", _escaped(self._keys.prefix) + "*"
        while True:
            cursor, page = self._link.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found.update(page)
            if str(cursor) == "0":
                return sorted(found)

    _readers: Readers


class Readers:
    """One blocking connection per client that is read, woken at once when the store closes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._open: dict[str, Any] = {}

    def read(self, client: str, key: str, cursor: str, block_s: float) -> list[Reply]:
        """The replies after ``cursor``."""
        return [_reply(entry) for entry in self.entries(client, key, cursor, block_s)]

    def entries(
        self, reader: str, key: str, cursor: str, block_s: float, *, count: int = _PAGE, decode: bool = True
    ) -> list[Any]:
        """Entries after ``cursor`` as Redis gives them. The wait is sliced, so that neither a close nor a dead network
        is slept through."""
        until = time.monotonic() + block_s
        while True:
            wait_ms = min(_SLICE_MS, int((until - time.monotonic()) * 1000))
            found = self._read_once(reader, key, cursor, wait_ms, count, decode)
            if found or wait_ms < _SLICE_MS or self._closed.is_set():
                return found
            with self._lock:
                if reader not in self._open:
                    return []

    def wake(self, reader: str) -> None:
        """End a read of this reader, if one waits: it gets no entries. Its connection is closed."""
        with self._lock:
            conn = self._open.pop(reader, None)
        if conn is not None:
            _wake(conn)
            conn.disconnect()

    def drop(self, client: str) -> None:
        """Forget a client's connection."""
        with self._lock:
            conn = self._open.pop(client, None)
        if conn is not None:
            conn.disconnect()

    def reconnect(self) -> None:
        """Redis is another server now: whoever reads goes on there."""
        with self._lock:
            readers = list(self._open)
        for reader in readers:
            self.wake(reader)

    def close(self) -> None:
        """Wake every reader; it gets no entries, and later reads raise."""
        self._closed.set()
        with self._lock:
            conns = list(self._open.values())
        for conn in conns:
            _wake(conn)

    def _read_once(self, client: str, key: str, cursor: str, wait_ms: int, count: int, decode: bool) -> list[Any]:
        conn = self._connection(client)
        # BLOCK 0 would wait for ever: no block at all is what a caller without time means.
        block = ("BLOCK", wait_ms) if wait_ms > 0 else ()
        try:
            conn.send_command("XREAD", "COUNT", count, *block, "STREAMS", key, cursor, check_health=False)
            answer = conn.read_response(disable_decoding=not decode, timeout=max(wait_ms, 0) / 1000 + _MARGIN_S)
        except redis.ResponseError as exc:
            raise translate(exc, self._url) from exc
        except (redis.RedisError, ValueError, AttributeError, OSError) as exc:
            with self._lock:
                woken = self._open.get(client) is not conn
            self.drop(client)
            if woken or self._closed.is_set():
                return []
            if isinstance(exc, redis.RedisError):
                raise translate(exc, self._url) from exc
            raise StoreUnavailable(f"the reply connection broke: {exc}", retry_after_s=1.0) from exc
        except BaseException:
            self.drop(client)
            raise
        return list(next(iter(answer.values()))) if isinstance(answer, dict) and answer else []

    def _connection(self, client: str) -> Any:
        if self._pid != os.getpid():
            # The parent's reader still uses these; closing our copies does not disturb it.
            self._lock, self._open, self._pid = threading.Lock(), {}, os.getpid()
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed", reason="closed")
        with self._lock:
            conn = self._open.get(client)
        if conn is not None:
            return conn
        pool = connect(self._url, blocking=True, name="sandfleet-replies").connection_pool
        conn = pool.connection_class(**pool.connection_kwargs)
        try:
            conn.connect()
        except redis.RedisError as exc:
            raise translate(exc, self._url) from exc
        with self._lock:
            self._open[client] = conn
        if self._closed.is_set():  # `close` may have looked just before
            _wake(conn)
        return conn


def _wake(conn: Any) -> None:
    """End a blocked read from another thread: the socket's end is seen at once, its closing would not be."""
    sock = getattr(conn, "_sock", None)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(2)


def _reply(entry: list[Any]) -> Reply:
    cursor, flat = entry
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return Reply(cursor, fields.get("op", ""), fields.get("r", ""))


def _escaped(prefix: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix)
