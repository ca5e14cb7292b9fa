"""Getting a sandbox for a thread, and the lifecycle operations a caller sends to a node."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import (
    HomeUnavailable,
    NoCapacity,
    NotStarted,
    OutcomeUnknown,
    QuotaExceeded,
    ReplyTimeout,
    SandboxLost,
    SandfleetError,
    StartFailed,
    StoreUnavailable,
    from_wire,
)
from sandfleet.ids import Identity, new_op_id
from sandfleet.model import SandboxSpec
from sandfleet.steps import Do, Sleep, Steps, Wait, aside
from sandfleet.store.base import Acquired, OpRecord, Push, Recorded, Route, Waiter
from sandfleet.wire import SCHEDULER_QUEUE, VERSION, OpMessage, celery_message, node_queue

__all__ = [
    "ON_LOST",
    "Asking",
    "StandsInLine",
    "acquire_steps",
    "in_line_too_long",
    "lifecycle_message",
    "send_lifecycle",
    "wanted_spec",
]

log = logging.getLogger("sandfleet.client")

ON_LOST = ("wait_for_home", "restore", "fresh")

#: How long an acquire waits for an answer before it asks again: a scheduler may have died with the request.
_SLICE_S = 2.0
#: In line nothing is lost with a scheduler: asking again only shows that somebody still waits.
_LINE_SLICE_S = 10.0
#: How long a waiter is kept that does not ask again: its client died, and is to get no place before those behind it.
_SILENT_S = 2.5 * _LINE_SLICE_S
#: Only a look: nobody waits.
_NO_TIME_S = 0.001
_AFTER_LINE_S = 1.0
_AGAIN_S = 0.2
#: Between two looks whether a node that is away has come back.
_AWAY_S = 0.3
#: Reasons that an overflow policy decides about.
_FULL = ("full", "quota", "in_line")


class StandsInLine(Exception):
    """The thread stands in the line for a place, and its waiter was left there: ask again with the same waiter."""


@dataclass(frozen=True, slots=True)
class Asking:
    """One acquire.

    Attributes:
        agent: Who holds the sandbox from now on; the client renews only holds of its own id.
        within_s: How long to ask.
        on_lost: See `sandfleet.provider.SandboxProvider.acquire`.
        place: Called instead of publishing ``scheduler.acquire`` (by a scheduler that is its own client); gives whether
            the thread stands in line now.
        waiter_id: The waiter's id, for a caller that comes again; a fresh one by default.
        restore: What to begin with: ``{"checkpoint": id, "from": thread or None}``; None is what the thread has.
        line_patience_s: How long to wait in line before `StandsInLine` is raised; None waits until the end.
    """

    identity: Identity
    spec: SandboxSpec
    agent: str
    within_s: float
    on_lost: str = "wait_for_home"
    place: Callable[[], bool] | None = None
    waiter_id: str | None = None
    line_patience_s: float | None = None
    restore: Mapping[str, Any] | None = None


#: What of the container settings a caller may ask of a node; a node that allows less says so.
_ASKABLE = ("memory_bytes", "cpus", "pids", "network_mode", "runtime", "preset")


def wanted_spec(settings: Settings, spec: SandboxSpec | None = None) -> SandboxSpec:
    """What is asked for with these settings: their ``environment`` is under that of ``spec``, if one is given.

    Of the container settings only those are asked for that were set: for the others each node has its own.
    """
    if spec is None:
        container = settings.container
        options = {name: getattr(container, name) for name in _ASKABLE if name in container.model_fields_set}
        spec = SandboxSpec(
            backend=settings.backend, image=container.image, labels=dict(settings.labels), options=options
        )
    return replace(spec, env={**settings.environment, **spec.env}) if settings.environment else spec


def acquire_steps(client: Client, asking: Asking) -> Steps[Route]:
    """Find the thread's sandbox or have one made, asking again until the time is up.

    Raises (from the generator):
        NoCapacity: No node fits, or the thread still stood in line (``facts["position"]``, ``waited_s``), or all that
            fit are full and the settings' overflow policy is ``reject``.
        StartFailed: It could not be started; with the reason ``backing_off`` repeatedly, and not tried again before
            ``retry_after_s``.
        QuotaExceeded, HomeUnavailable, NotStarted, StoreUnavailable: As they say.
        ReplyTimeout: No scheduler ever answered.
        StandsInLine: Only with ``line_patience_s``.
    """
    began = time.monotonic()
    until = began + asking.within_s
    last: SandfleetError | None = None
    while True:
        if time.monotonic() >= until and last is not None:
            raise last
        try:
            return (yield from _ask(client, asking, began, max(until - time.monotonic(), 0.001)))
        except (NoCapacity, QuotaExceeded, HomeUnavailable, NotStarted, StartFailed, StoreUnavailable) as exc:
            last = exc
            if isinstance(exc, StoreUnavailable) and not client.has_met_store:
                raise
            if exc.facts.get("reason") in _FULL and client.settings.overflow_policy == "reject":
                raise  # its caller would rather not wait
            pause_s = exc.retry_after_s or _AGAIN_S
            if exc.facts.get("overflow") == "reject":
                pause_s = _AGAIN_S  # told to another caller of the thread, who would rather not wait
            if time.monotonic() + pause_s >= until:
                raise
            yield Sleep(pause_s)
        except ReplyTimeout:
            if last is None:
                raise
            # What the fleet said a moment ago tells more than that the time was up before it could say it again.
            raise last from None


def _ask(client: Client, asking: Asking, began: float, left_s: float) -> Steps[Route]:
    """Ask once and, when nothing lives yet, wait for the answer, asking again every two seconds: in line, less often.

    Whoever leaves without an answer withdraws, so that no place goes to nobody.
    """
    identity, op_id = asking.identity, asking.waiter_id or new_op_id()
    waiter = Waiter(op_id, client.id, asking.agent, client.settings.agent_ttl_s)
    push: Push | None = None
    if asking.place is None:
        now_ms: int = client.now_ms() if client.has_clock else (yield Do(client.now_ms))
        push = _request(op_id, asking, client.settings, now_ms - int((time.monotonic() - began) * 1000))
    reader = yield Do(client.reader)
    pending = reader.expect(op_id, recorded=False)
    until = time.monotonic() + left_s
    kept_s = left_s + 5 if asking.line_patience_s is not None else min(left_s + 5, _SILENT_S)
    # Whoever would rather not wait and did not ask yet finds only others of its thread in line.
    theirs, looked = client.settings.overflow_policy == "reject", False
    try:
        while True:
            acquired: Acquired = yield Do(lambda: client.store.acquire(identity, waiter, wait_s=kept_s, push=push))
            if acquired.route is not None:
                return acquired.route
            if acquired.status == "backing_off":
                raise _backing_off(identity, acquired)
            in_line, theirs = acquired.status == "parked", theirs and acquired.status != "requested"
            if in_line and theirs and looked:
                break
            looked = True
            if asking.place is not None and acquired.status == "requested":
                in_line = yield Do(asking.place)
            slice_s = _LINE_SLICE_S if in_line and not theirs else _SLICE_S
            if in_line and asking.line_patience_s is not None:
                slice_s = asking.line_patience_s
            try:
                return _route_of((yield Wait(pending, min(slice_s, until - time.monotonic()))))
            except TimeoutError:
                if in_line and asking.line_patience_s is not None:
                    raise StandsInLine from None
                if time.monotonic() >= until:
                    break
        route: Route = yield Do(lambda: _give_up(client, asking, waiter, time.monotonic() - began))
        return route
    except GeneratorExit:
        # The caller was cancelled. A generator that is being closed may wait for nothing.
        aside(lambda: _leave(client, asking, waiter))
        raise
    finally:
        reader.forget(op_id, pending)


def _give_up(client: Client, asking: Asking, waiter: Waiter, waited_s: float) -> Route:
    """The time is up: withdraw, and say why there is no sandbox; unless it was granted at this very moment."""
    identity = asking.identity
    position, route = _withdraw(client, identity, waiter)
    if position:
        raise in_line_too_long(identity, position, waited_s)
    if route is None:
        raise ReplyTimeout(
            f"no sandbox for thread {identity.thread_id} within {asking.within_s:.0f} s; is a scheduler running? "
            "`sandfleet doctor` tells",
            thread_id=identity.thread_id,
        )
    return route


def _leave(client: Client, asking: Asking, waiter: Waiter) -> None:
    """Withdraw; and when the sandbox was granted meanwhile, do not hold it. Whatever fails here expires by itself."""
    identity = asking.identity
    try:
        _, route = _withdraw(client, identity, waiter)
        if route is None:
            return
        if waiter.agent == client.id:
            client.holds.release(route.sandbox_id, identity.digest)
        else:
            client.store.release(route.sandbox_id, identity.digest, waiter.agent)
    except SandfleetError as exc:
        log.info("acquire.left", extra={"thread_id": identity.thread_id, "error": str(exc)})


def _withdraw(client: Client, identity: Identity, waiter: Waiter) -> tuple[int, Route | None]:
    """Wait no more. The thread's position in line, if it stood there; else its sandbox, if it was granted before."""
    position = client.store.withdraw(identity, waiter.op_id)
    if position:
        return position, None
    route = client.store.acquire(identity, waiter, wait_s=_NO_TIME_S, push=None).route
    if route is None:
        client.store.withdraw(identity, waiter.op_id)  # looking is waiting, for a moment
    return 0, route


def in_line_too_long(identity: Identity, position: int, waited_s: float) -> NoCapacity:
    """What somebody is told who stood in line until the time was up."""
    return NoCapacity(
        f"thread {identity.thread_id} waited {waited_s:.1f} s for a sandbox and was number {position} in line for a "
        "place; try again later, wait longer (acquire_timeout), release sandboxes, or add nodes or places. "
        "(`sandfleet doctor` tells whether a scheduler serves the line.)",
        retry_after_s=_AFTER_LINE_S,
        reason="in_line",
        position=position,
        waited_s=round(waited_s, 3),
    )


def _backing_off(identity: Identity, acquired: Acquired) -> StartFailed:
    try:
        last = from_wire(json.loads(acquired.error)).message
    except ValueError:
        last = "unknown"
    return StartFailed(
        f"the sandbox of thread {identity.thread_id} failed to start repeatedly and is not tried again for "
        f"{acquired.retry_after_s:.1f} s; the last time: {last}",
        retry_after_s=acquired.retry_after_s,
        reason="backing_off",
        thread_id=identity.thread_id,
    )


def _request(op_id: str, asking: Asking, settings: Settings, asked_at_ms: int) -> Push:
    request = {
        "v": VERSION,
        "owner": [asking.identity.user_id, asking.identity.thread_id],
        "spec": asking.spec.to_wire(),
        "on_lost": asking.on_lost,
        "overflow": settings.overflow_policy,
        "asked_at_ms": asked_at_ms,
    }
    if asking.restore is not None:
        request["restore"] = dict(asking.restore)
    shown = f"acquire: {asking.identity.thread_id}"
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
        SandboxLost: It ended before the node could be asked to delete its data.
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
        recorded, waited = yield from _recorded(client, record, push, within_s)
        pending.now_recorded()
        if recorded.status == "not_found" and waited:
            return _ended_by_itself(route, args)
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


def _ended_by_itself(route: Route, args: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to ``node.destroy`` when its node came back and had ended the sandbox before it was asked."""
    if args.get("delete_data"):
        raise SandboxLost(
            f"sandbox {route.sandbox_id} ended while its node was away, its data is not deleted: acquire its thread "
            "again, then destroy",
            sandbox_id=route.sandbox_id,
        )
    return {"ok": {}}


def _recorded(client: Client, record: OpRecord, push: Push, within_s: float) -> Steps[tuple[Recorded, bool]]:
    """What the store says of it, once its node is back or closed out; and whether it was not there."""
    until, waited = time.monotonic() + within_s, False
    recorded: Recorded = yield Do(lambda: client.store.record(record, push))
    while recorded.status in ("away", "node_down") and time.monotonic() < until:
        waited = True
        yield Sleep(_AWAY_S)
        recorded = yield Do(lambda: client.store.record(record, push))
    return recorded, waited


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
    effect = expect != "node"
    record = OpRecord(op_id, kind, route, identity.digest, until_ms, until_ms, reply_to, shown, expect, effect)
    queue = node_queue(route.node_id)
    return record, Push(queue, celery_message(kind, op_id, message.to_wire(), queue=queue, describe=shown))
