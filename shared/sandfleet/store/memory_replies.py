"""Replies, blobs, locks and stories in memory: the twin of `sandfleet.store.redis_replies`."""

from __future__ import annotations

import time
from typing import Any

from sandfleet.errors import ByteBudgetExceeded, InvalidArgument, StoreUnavailable
from sandfleet.store.base import Reply, Store, Waiter
from sandfleet.store.codec import ms_of
from sandfleet.store.memory_state import Stream
from sandfleet.store.memory_steps import MemorySteps


class MemoryReplies(MemorySteps, Store):
    """The part of `MemoryStore` about what travels back, and small shared things."""

    def open_replies(self, client: str, *, ttl_s: float) -> bool:
        with self._lock:
            made = client not in self._streams
            if made:
                self._streams.put(client, Stream(), ms_of(ttl_s))
            else:
                self._streams.touch(client, ms_of(ttl_s))
            return made

    def close_replies(self, client: str) -> None:
        with self._lock:
            self._streams.drop(client)

    def read_replies(self, client: str, cursor: str, *, block_s: float) -> list[Reply]:
        after, until = _order(cursor), time.monotonic() + block_s
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed", reason="closed")

            def arrived() -> list[Reply]:
                stream = self._streams.get(client)
                return [r for r in stream.entries if _order(r.cursor) > after] if stream else []

            self._arrived.wait_for(lambda: self._closed or arrived(), max(0.0, until - time.monotonic()))
            return arrived()

    def trim_replies(self, client: str, cursor: str) -> None:
        until = _order(cursor)
        with self._lock:
            stream = self._streams.get(client)
            if stream is not None:
                stream.entries = [entry for entry in stream.entries if _order(entry.cursor) > until]

    def reply(self, waiter: Waiter, payload: str) -> bool:
        with self._lock:
            return self._send(waiter.reply_to, waiter.op_id, payload)

    # --- blobs ---------------------------------------------------------------------------------

    def blob_begin(self, blob_id: str, *, client: str, size: int, ttl_s: float) -> None:
        with self._lock:
            now = self._now()
            for blob in [b for b, (_, _, until) in self._blobs.items() if until <= now]:
                self._drop_blob(blob)
            self._blobs.pop(blob_id, None)
            mine = sum(s for c, s, _ in self._blobs.values() if c == client)
            for scope, used, limit in (
                ("client", mine, self._blob_client_limit),
                ("fleet", sum(s for _, s, _ in self._blobs.values()), self._blob_fleet_limit),
            ):
                if used + size > limit:
                    raise ByteBudgetExceeded(
                        f"{size} more bytes in flight would pass the limit of {limit} for this {scope}",
                        retry_after_s=1.0,
                        scope=scope,
                        limit_bytes=limit,
                    )
            self._blobs[blob_id] = (client, size, now + ms_of(ttl_s))

    def blob_put(self, blob_id: str, index: int, chunk: bytes | memoryview) -> None:
        with self._lock:
            if not self._blob_lives(blob_id):
                raise InvalidArgument(f"blob {blob_id[:80]} was not begun or has expired")
            self._chunks[blob_id, index] = bytes(chunk)

    def blob_get(self, blob_id: str, index: int) -> bytes | None:
        with self._lock:
            return self._chunks.get((blob_id, index)) if self._blob_lives(blob_id) else None

    def blob_drop(self, blob_id: str) -> None:
        with self._lock:
            self._drop_blob(blob_id)

    def _blob_lives(self, blob_id: str) -> bool:
        blob = self._blobs.get(blob_id)
        return blob is not None and blob[2] > self._now()

    def _drop_blob(self, blob_id: str) -> None:
        self._blobs.pop(blob_id, None)
        for key in [key for key in self._chunks if key[0] == blob_id]:
            del self._chunks[key]

    # --- locks and stories ---------------------------------------------------------------------

    def lock(self, name: str, token: str, *, ttl_s: float) -> bool:
        with self._lock:
            if (self._locks.get(name) or token) != token:
                return False
            self._locks.put(name, token, ms_of(ttl_s))
            return True

    def unlock(self, name: str, token: str) -> None:
        with self._lock:
            if self._locks.get(name) == token:
                self._locks.drop(name)

    def story(self, key: str) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._stories.get(key) or [])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._arrived.notify_all()


def _order(cursor: str) -> tuple[int, int]:
    first, _, second = cursor.partition("-")
    return int(first), int(second or 0)
