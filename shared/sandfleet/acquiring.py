"""Getting a sandbox for a thread, and the lifecycle operations a caller sends to a node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sandfleet.client import Client
from sandfleet.errors import (
    HomeUnavailable,
    NoCapacity,
    NotStarted,
    OutcomeUnknown,
    ReplyTimeout,
    SandfleetError,
    StartFailed,
    StoreUnavailable,
    from_wire,
)
from sandfleet.ids import Identity, new_op_id
from sandfleet.model import SandboxSpec
from sandfleet.steps import Do, Sleep, Steps, Wait
from sandfleet.store.base import Acquired, OpRecord, Push, Recorded, Route, Waiter
from sandfleet.wire import SCHEDULER_QUEUE, VERSION, OpMessage, celery_message, node_queue

__all__ = ["ON_LOST", "acquire_steps", "send_lifecycle"]

ON_LOST = ("wait_for_home", "restore", "fresh")

#: How long an acquire waits for an answer before it asks again: a scheduler may have died with the request.
_SLICE_S = 2.0


def acquire_steps(
    client: Client,
    identity: Identity,
    spec: SandboxSpec,
    *,
    agent: str,
    within_s: float,
    on_lost: str = "wait_for_home",
    place: Callable[[], None] | None = None,
) -> Steps[Route]:
    """Find the thread's sandbox or have one made, asking again until ``within_s`` passes.

    Args:
        agent: Who holds the sandbox from now on; the client renews only holds of its own id.
        place: Called instead of publishing ``scheduler.acquire`` (by a scheduler that is its own client).
    """
    until = time.monotonic() + within_s
    last: SandfleetError | None = None
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0 and last is not None:
            raise last
        try:
            return (yield from _ask(client, identity, spec, agent, on_lost, max(left_s, 0.001), within_s, place))
        except (NoCapacity, HomeUnavailable, NotStarted, StartFailed, StoreUnavailable) as exc:
            last = exc
            if isinstance(exc, StoreUnavailable) and not client.has_met_store:
                raise
            pause_s = exc.retry_after_s or 0.2
            if time.monotonic() + pause_s >= until:
                raise
            yield Sleep(pause_s)


def _ask(
    client: Client,
    identity: Identity,
    spec: SandboxSpec,
    agent: str,
    on_lost: str,
    left_s: float,
    within_s: float,
    place: Callable[[], None] | None,
) -> Steps[Route]:
    """Ask once and, when nothing lives yet, wait for the answer, asking again every two seconds."""
    op_id = new_op_id()
    waiter = Waiter(op_id, client.id, agent, client.settings.agent_ttl_s)
    push = None if place is not None else _request(op_id, identity, spec, on_lost)
    reader = yield Do(client.reader)
    pending = reader.expect(op_id, recorded=False)
    until = time.monotonic() + left_s
    try:
        while True:
            acquired: Acquired = yield Do(lambda: client.store.acquire(identity, waiter, wait_s=left_s + 5, push=push))
            if acquired.route is not None:
                return acquired.route
            if place is not None and acquired.status == "requested":
                yield Do(place)
            try:
                payload = yield Wait(pending, min(_SLICE_S, until - time.monotonic()))
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                raise ReplyTimeout(
                    f"no sandbox for thread {identity.thread_id} within {within_s:.0f} s; is a scheduler running? "
                    "`sandfleet doctor` tells",
                    thread_id=identity.thread_id,
                ) from None
            return _route_of(payload)
    finally:
        reader.forget(op_id, pending)


def _request(op_id: str, identity: Identity, spec: SandboxSpec, on_lost: str) -> Push:
    owner = [identity.user_id, identity.thread_id]
    request = {"v": VERSION, "owner": owner, "spec": spec.to_wire(), "on_lost": on_lost}
    shown = f"acquire: {identity.thread_id}"
    message = celery_message("scheduler.acquire", op_id, request, queue=SCHEDULER_QUEUE, describe=shown)
    return Push(SCHEDULER_QUEUE, message)


def _route_of(payload: str | None) -> Route:
    if payload is None:
        raise NotStarted("the reply to acquire was lost")
    data: Mapping[str, Any] = json.loads(payload)
    if "error" in data:
        raise from_wire(data["error"])
    ok = data["ok"]
    return Route(ok["sandbox_id"], ok["node_id"], ok["incarnation"], int(ok["epoch"]))


def send_lifecycle(
    client: Client,
    kind: str,
    identity: Identity,
    route: Route,
    args: Mapping[str, Any],
    *,
    expect: str,
    within_s: float,
) -> Steps[dict[str, Any]]:
    """Send ``node.create`` or ``node.destroy`` to the node of ``route`` and wait for the reply's JSON.

    Raises:
        NotStarted: The node or the sandbox was not in the state the operation expects.
        ReplyTimeout: No answer within ``within_s``.
    """
    op_id = new_op_id()
    reader = yield Do(client.reader)
    pending = reader.expect(op_id, recorded=False)
    now_ms: int = yield Do(client.now_ms)
    record, push = lifecycle_message(
        op_id,
        kind,
        identity,
        route,
        args,
        expect=expect,
        now_ms=now_ms,
        within_s=within_s,
        reply_to=client.id,
    )
    try:
        recorded: Recorded = yield Do(lambda: client.store.record(record, push))
        pending.now_recorded()
        if recorded.status != "recorded":
            raise NotStarted(
                f"{kind} of sandbox {route.sandbox_id} was not taken: {recorded.status}",
                sandbox_id=route.sandbox_id,
            )
        try:
            payload = yield Wait(pending, within_s)
        except TimeoutError:
            raise ReplyTimeout(
                f"no answer to {kind} of {route.sandbox_id} within {within_s:.0f} s", op_id=op_id
            ) from None
    finally:
        reader.forget(op_id, pending)
    if payload is None:
        raise OutcomeUnknown(f"the record of {kind} of sandbox {route.sandbox_id} is gone; look whether it happened")
    reply: dict[str, Any] = json.loads(payload)
    return reply


def lifecycle_message(
    op_id: str,
    kind: str,
    identity: Identity,
    route: Route,
    args: Mapping[str, Any],
    *,
    expect: str,
    now_ms: int,
    within_s: float,
    reply_to: str = "",
) -> tuple[OpRecord, Push]:
    """The record and the message of a lifecycle operation."""
    until_ms = now_ms + int(within_s * 1000)
    message = OpMessage(op_id, kind, identity, route, (), args, None, until_ms, until_ms, reply_to, now_ms)
    shown = f"{kind.partition('.')[2]}: {identity.thread_id} · {route.sandbox_id[:12]}"
    record = OpRecord(op_id, kind, route, identity.digest, until_ms, until_ms, reply_to, shown, expect)
    queue = node_queue(route.node_id)
    return record, Push(queue, celery_message(kind, op_id, message.to_wire(), queue=queue, describe=shown))
