"""Bytes above the inline limit: chunked, checked by digest, expiring, and counted against a budget."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from sandfleet.config import INLINE_BYTES
from sandfleet.errors import InvalidArgument, OutcomeUnknown, StoreUnavailable
from sandfleet.ids import new_op_id
from sandfleet.metrics import Tally
from sandfleet.store.base import Store
from sandfleet.wire import decode_content, encode_content

__all__ = ["CHUNK_BYTES", "MAX_BLOB_BYTES", "MOVED", "drop", "pack_bytes", "pack_json", "unpack_bytes", "unpack_json"]

CHUNK_BYTES = 1024 * 1024
MAX_BLOB_BYTES = 100 * 1024 * 1024
_WORST_ESCAPE = 6

#: ``bytes`` moved by this process, ``in`` and ``out``.
MOVED = Tally()

log = logging.getLogger("sandfleet.blobs")


def pack_bytes(store: Store, content: bytes | None, *, client: str, ttl_s: float) -> dict[str, Any] | None:
    """The wire form of ``content``: inline up to 256 KiB, above that a blob that lives ``ttl_s`` seconds.

    Raises:
        ByteBudgetExceeded: This client or the fleet has too many bytes in flight.
        InvalidArgument: More than 100 MiB.
    """
    if content is None or len(content) <= INLINE_BYTES // _WORST_ESCAPE:
        return encode_content(content)
    if len(content) <= INLINE_BYTES:
        inline = encode_content(content)
        # What counts is the size as JSON: a control character takes six bytes there.
        if len(json.dumps(inline)) <= INLINE_BYTES:
            return inline
    return _put(store, content, client=client, ttl_s=ttl_s)


def unpack_bytes(store: Store, content: Mapping[str, Any] | None) -> bytes | None:
    """The bytes of a wire form.

    Raises:
        OutcomeUnknown: The blob expired before it was read.
        InvalidArgument: Malformed, or its digest does not fit.
    """
    if content is not None and "blob" in content:
        return _get(store, content)
    return decode_content(content)


def pack_json(store: Store, value: Any, *, client: str, ttl_s: float) -> Any:
    """``value`` itself, or ``{"$blob": …}`` when its JSON is above the inline limit."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) <= INLINE_BYTES:
        return value
    return {"$blob": _put(store, text.encode(), client=client, ttl_s=ttl_s)}


def unpack_json(store: Store, value: Any) -> Any:
    """The value of `pack_json`; raises as `unpack_bytes`."""
    if isinstance(value, dict) and isinstance(value.get("$blob"), dict):
        reference = value["$blob"]
        loaded = json.loads(_get(store, reference))
        drop(store, reference)
        return loaded
    return value


def drop(store: Store, reference: Mapping[str, Any] | None) -> None:
    """Give a blob's bytes back once they were read; anything else is fine and ignored. Never raises: what cannot be
    given back now expires by itself."""
    if not isinstance(reference, Mapping) or not isinstance(reference.get("blob"), str):
        return
    try:
        store.blob_drop(reference["blob"])
    except StoreUnavailable as exc:
        log.info("blob.left_to_expire", extra={"blob_id": reference["blob"], "error": str(exc)})


def _put(store: Store, data: bytes, *, client: str, ttl_s: float) -> dict[str, Any]:
    if len(data) > MAX_BLOB_BYTES:
        raise InvalidArgument(f"{len(data)} bytes exceed the limit of {MAX_BLOB_BYTES} bytes for one operation")
    blob_id = new_op_id()
    store.blob_begin(blob_id, client=client, size=len(data), ttl_s=ttl_s)
    try:
        view = memoryview(data)
        for index in range(0, len(data), CHUNK_BYTES):
            store.blob_put(blob_id, index // CHUNK_BYTES, view[index : index + CHUNK_BYTES])
    except StoreUnavailable:
        drop(store, {"blob": blob_id})
        raise
    MOVED.add("bytes", "out", len(data))
    return {"blob": blob_id, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _get(store: Store, reference: Mapping[str, Any]) -> bytes:
    blob_id, size = reference.get("blob"), reference.get("size")
    if not isinstance(blob_id, str) or not isinstance(size, int) or not 0 <= size <= MAX_BLOB_BYTES:
        raise InvalidArgument("malformed blob reference")
    chunks: list[bytes] = []
    for index in range((size + CHUNK_BYTES - 1) // CHUNK_BYTES):
        chunk = store.blob_get(blob_id, index)
        if chunk is None:
            raise OutcomeUnknown(f"blob {blob_id} expired before it was read", blob_id=blob_id)
        chunks.append(chunk)
    data = b"".join(chunks)
    if len(data) != size or hashlib.sha256(data).hexdigest() != reference.get("sha256"):
        raise InvalidArgument(f"blob {blob_id} does not have the promised size and digest")
    MOVED.add("bytes", "in", size)
    return data
