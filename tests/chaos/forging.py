"""Messages as a client writes them, to be lost, doubled, spoilt and forged by the tests."""

from __future__ import annotations

from typing import Any

from sandfleet import SandboxProvider
from sandfleet.ids import Identity, new_op_id
from sandfleet.store.base import OpRecord, Push, Recorded, Route
from sandfleet.wire import OpMessage, celery_message, node_queue
from tests.chaos.fleet import (
    Fleet,
)

N1 = node_queue("n1")


def route_of(fleet: Fleet, sandbox_id: str) -> Route:
    route = fleet.store.route(sandbox_id)
    assert route is not None
    return route


def a_command(
    fleet: Fleet, thread: str, route: Route, command: str, *, reply_to: str = "", caller: str = "t"
) -> OpMessage:
    """A well-formed operation message, as a client would send it."""
    now_ms = fleet.store.now_ms()
    return OpMessage(
        op_id=new_op_id(),
        kind="execute_command",
        identity=Identity(thread),
        route=route,
        lanes=(f"{route.sandbox_id}/shell/{caller}",),
        args={"command": command},
        content=None,
        start_by_ms=now_ms + 30_000,
        deadline_ms=now_ms + 60_000,
        reply_to=reply_to,
        sent_at_ms=now_ms,
    )


def record_of(message: OpMessage) -> OpRecord:
    return OpRecord(
        op_id=message.op_id,
        kind=message.kind,
        route=message.route,
        owner=message.identity.digest,
        start_by_ms=message.start_by_ms,
        deadline_ms=message.deadline_ms,
        reply_to=message.reply_to,
        describe="test",
    )


def envelope(message: OpMessage, **changes: Any) -> str:
    """The Celery message of an operation, with fields of its body overwritten."""
    body = {**message.to_wire(), **changes}
    return celery_message(
        f"sandbox.{message.kind}", message.op_id, body, queue=node_queue(message.route.node_id), describe="test"
    )


def capture(provider: SandboxProvider) -> list[Push]:
    """Every message the provider publishes from now on."""
    sent: list[Push] = []
    store = provider._client().store
    record = store.record

    def recording(op: OpRecord, push: Push | None, **options: Any) -> Recorded:
        if push is not None:
            sent.append(push)
        return record(op, push, **options)

    store.record = recording  # type: ignore[method-assign]
    return sent
