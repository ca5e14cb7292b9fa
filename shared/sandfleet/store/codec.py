"""From the flat lists that scripts answer with to the dataclasses of the contract, and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sandfleet.checkpoints import Restoration
from sandfleet.errors import PayloadTooLarge
from sandfleet.model import NodeState, NodeView, SandboxInfo, SandboxState
from sandfleet.store.base import OpView, Parked, Route, Swept

__all__ = [
    "brief_error",
    "check_reply",
    "in_order",
    "ms_of",
    "node_view",
    "op_view",
    "parked_entry",
    "parse_route",
    "route_text",
    "sandbox_info",
    "swept",
    "wire_error",
]

MAX_REPLY_BYTES = 512 * 1024
MAX_KEPT_ERROR = 4000


def ms_of(seconds: float) -> int:
    """Whole milliseconds, at least one: Redis refuses an expiry of zero."""
    return max(1, round(seconds * 1000))


def route_text(route: Route) -> str:
    """The route as the scripts keep and compare it."""
    return f"{route.sandbox_id}|{route.node_id}|{route.incarnation}|{route.epoch}"


def parse_route(text: str) -> Route:
    """The inverse of `route_text`."""
    sandbox_id, node_id, incarnation, epoch = text.split("|")
    return Route(sandbox_id, node_id, incarnation, int(epoch))


def wire_error(error: Any) -> str:
    """A reply payload that carries a wire error."""
    return json.dumps({"error": dict(error)}, separators=(",", ":"))


def brief_error(error: Mapping[str, Any]) -> str:
    """A wire error as JSON of at most 4000 characters: facts go first, then the end of the message."""
    text = json.dumps(dict(error), separators=(",", ":"))
    if len(text) <= MAX_KEPT_ERROR:
        return text
    # JSON writes one character as twelve at most (a surrogate pair).
    message = str(error.get("message", ""))[: MAX_KEPT_ERROR // 12 - 40]
    return json.dumps({"code": str(error.get("code", ""))[:30], "message": message, "facts": {}}, separators=(",", ":"))


def parked_entry(row: list[Any]) -> Parked:
    """A row of the ``parked`` script."""
    digest, score, user, request, since = row
    return Parked(digest, user or None, request, score, int(since))


def swept(row: list[Any]) -> Swept:
    """A row of the ``sweep`` script."""
    sandbox_id, created, used, warm_since, busy = row
    return Swept(sandbox_id, int(created), int(used), int(float(warm_since)) if warm_since else None, bool(busy))


def in_order(found: Iterable[Swept]) -> list[Swept]:
    """The longest unused first."""
    return sorted(found, key=lambda s: (s.used_ms if s.warm_since_ms is None else s.warm_since_ms, s.sandbox_id))


def sandbox_info(row: list[Any]) -> SandboxInfo:
    """A row of the ``view`` script part."""
    sandbox_id, state, route_str, thread, user, backend, created, used, warm_since, agents, ops, restored = row
    route = parse_route(route_str)
    return SandboxInfo(
        sandbox_id=sandbox_id,
        thread_id=thread,
        user_id=user or None,
        state=SandboxState.WARM if warm_since else SandboxState(state),
        node_id=route.node_id,
        incarnation=route.incarnation,
        epoch=route.epoch,
        backend=backend,
        created_at=int(created) / 1000,
        used_at=(int(float(warm_since)) if warm_since else int(used)) / 1000,
        agents=agents,
        ops=ops,
        restored=restoration(restored),
    )


def restoration(text: str) -> Restoration | None:
    """What was kept with a sandbox of its beginning, if it began with a checkpoint."""
    return Restoration.from_wire(json.loads(text)) if text else None


def node_view(row: list[Any]) -> NodeView:
    """A row of the ``nodes`` script."""
    node_id, holder, places, creating, starting, stopping, warm, idlest, blanks, inflight, *flat = row
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return NodeView(
        node_id=node_id,
        incarnation=fields["incarnation"],
        state=NodeState(fields["state"]),
        alive=holder == fields["incarnation"],
        replicas=int(fields["replicas"]),
        places=places,
        warm=warm,
        data_id=fields["data_id"],
        backends=tuple(json.loads(fields["backends"])),
        labels=json.loads(fields["labels"]),
        inflight=inflight,
        started_at=int(fields["started"]) / 1000,
        host=fields["host"],
        pid=int(fields["pid"]),
        version=fields["version"],
        load=json.loads(fields.get("load", "{}")),
        burst_limit=int(fields.get("burst_limit", "0")),
        creating=creating,
        starting=starting,
        stopping=stopping,
        reason=fields.get("reason", ""),
        idlest=tuple((sid, int(float(since))) for sid, since in zip(idlest[::2], idlest[1::2], strict=True)),
        blanks=dict(Counter(blanks)),  # `asdict` cannot copy a Counter
    )


def op_view(op_id: str, fields: dict[str, str]) -> OpView:
    """An op hash."""
    route = parse_route(fields["route"])
    return OpView(
        op_id=op_id,
        kind=fields["kind"],
        sandbox_id=route.sandbox_id,
        node_id=route.node_id,
        incarnation=route.incarnation,
        state=fields["state"],
        outcome=fields.get("outcome", ""),
        describe=fields["describe"],
        recorded_at_ms=int(fields["at"]),
        claimed_at_ms=_optional(fields.get("claimed")),
        finished_at_ms=_optional(fields.get("finished")),
        deadline_ms=int(fields["deadline"]),
        reply=fields.get("reply"),
        reply_to=fields["reply_to"],
        job=fields.get("job") == "1",
        owner=fields["owner"],
    )


def _optional(text: str | None) -> int | None:
    return int(text) if text else None


def check_reply(reply: str) -> None:
    """Refuse a reply that belongs into a blob.

    Raises:
        PayloadTooLarge: Above 512 KiB.
    """
    size = len(reply)
    if size <= MAX_REPLY_BYTES // 4:
        return
    if len(reply.encode()) > MAX_REPLY_BYTES:
        raise PayloadTooLarge(f"a reply is at most {MAX_REPLY_BYTES} bytes; send the content as a blob")
