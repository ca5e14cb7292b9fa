"""The registry as it lies in Redis, without what may differ when it is made anew: times, and runs of nodes."""

from __future__ import annotations

from typing import Any

import redis

_OF_SANDBOX = ("owner", "state", "thread", "user", "backend", "spec")
_OF_NODE = ("state", "data_id", "replicas", "backends", "labels", "burst_limit")


def registry(url: str, prefix: str = "sandfleet:") -> dict[str, Any]:
    """Threads with home, sandbox and epoch; sandboxes with owner, node, epoch, state and spec; who has which id; the
    places of nodes and users; the nodes."""
    found: dict[str, Any] = {}
    with redis.Redis.from_url(url, decode_responses=True) as server:
        for key in server.scan_iter(f"{prefix}*"):
            kind = key.removeprefix(prefix).partition(":")[0]
            if kind == "thread":
                fields = server.hgetall(key)
                found[key] = {field: fields.get(field) for field in ("epoch", "sandbox_id", "data_id")}
            elif kind == "sandbox":
                fields = server.hgetall(key)
                if fields.get("state") == "lost":
                    continue
                sandbox_id, node, _, epoch = fields["route"].split("|")
                found[key] = {field: fields.get(field) for field in _OF_SANDBOX} | {"at": (sandbox_id, node, epoch)}
            elif kind == "node":
                fields = server.hgetall(key)
                if fields.get("state") != "gone":
                    found[key] = {field: fields.get(field) for field in _OF_NODE}
            elif kind == "id":
                found[key] = server.get(key)
            elif kind in ("places", "user"):
                # Blank sandboxes come and go by themselves.
                found[key] = {one for one in server.zrange(key, 0, -1) if not one.startswith("~")}
            elif kind in ("sandboxes", "nodes"):
                found[key] = set(server.zrange(key, 0, -1) if kind == "sandboxes" else server.smembers(key))
    return {key: value for key, value in found.items() if value}
