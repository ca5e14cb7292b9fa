"""How an outcome is told: to the client's reply stream, and to Celery."""

from __future__ import annotations

import json
from typing import Any

from sandfleet import blobs
from sandfleet.backends import Completion
from sandfleet.store.base import Store

__all__ = ["celery_result", "encode_reply"]

_BLOBS_KEPT_S = 120.0


def encode_reply(store: Store, completion: Completion, *, client: str, spent_ms: tuple[float, float, float]) -> str:
    """The reply JSON: ``{"ok", "content"?, "t"}`` or ``{"error", "t"}``; too big values become blobs.

    Raises:
        ByteBudgetExceeded: The client or the fleet has too many bytes in flight.
    """
    reply: dict[str, Any] = {"t": spent_ms}
    if completion.error is not None:
        reply["error"] = completion.error.to_wire()
    else:
        reply["ok"] = blobs.pack_json(store, completion.value, client=client, ttl_s=_BLOBS_KEPT_S)
        if completion.content is not None:
            reply["content"] = blobs.pack_bytes(store, completion.content, client=client, ttl_s=_BLOBS_KEPT_S)
    return json.dumps(reply, separators=(",", ":"))


def celery_result(completion: Completion, *, shown_only: bool) -> Any:
    """What the task returns: everything to a plain Celery caller; with ``shown_only`` (the reply stream carried
    the result) the few words a person wants to see in Flower."""
    value = completion.value
    if shown_only:
        if isinstance(value, dict) and "exit_code" in value:
            return "timed out" if value.get("timed_out") else f"exit {value['exit_code']}"
        return "ok"
    if completion.content is not None:
        return {**(value or {}), "content": completion.content.decode("utf-8", "replace")}
    return value
