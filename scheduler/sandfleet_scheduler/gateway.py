"""The gateway for plain Celery callers.

They write ``send_task("sandbox.execute_command", kwargs={"thread_id": …, "command": …})`` and nothing more.
A plain caller knows no node and writes no op record. The gateway acquires the thread's sandbox, records the
operation under the task's own id and gives back the signature that the task is replaced with, so that id,
group and chord stay the caller's.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.canvas import Signature
from celery.exceptions import Ignore

from sandfleet import blobs
from sandfleet.acquiring import Asking, StandsInLine, acquire_steps, in_line_too_long, wanted_spec
from sandfleet.celery_app import queue_of
from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.errors import Busy, InvalidArgument, NotStarted, OpConflict, SandboxNotFound, SandfleetError
from sandfleet.ids import Identity, new_op_id, sandbox_id_candidates
from sandfleet.ops import CONTENT_KINDS, MAX_TIMEOUT_S, OPS, describe, lanes_of, parse_args, task_name
from sandfleet.refusals import refusal
from sandfleet.steps import drive
from sandfleet.store.base import OpRecord, Route, Waiter
from sandfleet.wire import WAITING_QUEUE, OpMessage, node_queue, shown_owner
from sandfleet_scheduler.asking import AcquireRequest
from sandfleet_scheduler.results import PLAIN_CALLERS, remember
from sandfleet_scheduler.rounds import Rounds
from sandfleet_scheduler.service import IN_LINE, Scheduler

__all__ = ["Gateway"]

if TYPE_CHECKING:
    _Task = Task[Any, Any]  # generic in the stubs only
else:
    _Task = Task

#: The headers that tell since when (store time) a call goes round, and as whom it waits; and how long it rests on each
#: round: where it waits for a thread, and where its thread of conversation stands in line.
_SINCE = "sandfleet_since_ms"
_WAITER = "sandfleet_waiter"
_PAUSE_S = 0.05
_LINE_PAUSE_S = 0.1
_WAITER_CHARS = 64
#: How much longer than it asks a waiter is kept, so that it is still there when the call has gone round.
_WAITER_GRACE_S = 5.0
#: How long a call holds the sandbox it was given until it has come round: one that died with its scheduler never does.
_HOLD_S = 20.0
_TAKES = ("thread_id", "user_id", "sandbox_id", "content", "content_b64", "queue_timeout_s")


class _Crowded(Exception):
    """No thread may wait for another sandbox now."""


class Gateway:
    """Turns plain calls into recorded operations. Thread-safe."""

    def __init__(self, settings: Settings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._client: Client = scheduler.client
        # A call whose sandbox does not live yet holds a thread until it does. Half of the threads stay free of such
        # calls, or they would keep every SDK client's acquire from being handled.
        self._waiting = threading.BoundedSemaphore(max(1, settings.concurrency // 2))
        self._rounds = Rounds(self._client.reader, pause_s=_LINE_PAUSE_S)

    def forward(self, task: _Task, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature that carries this call to its node.

        Keyword arguments are the operation's own (see `sandfleet.ops`) plus ``thread_id`` (with ``user_id``)
        or ``sandbox_id``, ``content`` (text) or ``content_b64``, and ``queue_timeout_s``.

        Raises:
            SandfleetError: The call is wrong, or no sandbox can be had.
            Ignore: This is the second delivery of a call that is on its way already.
            Retry: Its thread stands in line for a place, or as many calls wait for a sandbox as may; this one went back
                to the end of the queue.
        """
        if args:
            raise InvalidArgument(
                f"{task_name(kind)} takes keyword arguments only: thread_id=…, {', '.join(OPS[kind].args.model_fields)}"
            )
        call = {key: value for key, value in kwargs.items() if key not in _TAKES}
        parsed = parse_args(kind, call).model_dump(exclude_unset=True)
        # Whatever can be wrong with the call is told before a sandbox is started for it.
        _content(kind, kwargs), _queue_timeout_s(kwargs, self._settings.queue_timeout_s)
        remember(task.app, task.request)
        waiter_id = self._waiter_id(task)
        try:
            record, message = self._take(task, kind, parsed, kwargs, waiter_id)
        except (_Crowded, StandsInLine):
            raise self._later(task, kwargs, waiter_id) from None
        except OpConflict:
            raise
        except SandfleetError as exc:
            # Celery restores what was not acknowledged when its connection broke. That the second delivery finds no
            # sandbox is no failure of the first one, which runs.
            if self._is_under_way(str(task.request.id), kind, kwargs):
                raise Ignore from exc
            raise
        signature: Signature = task.signature(
            args=(message.to_wire(),),
            kwargs={},
            queue=queue_of(node_queue(record.route.node_id)),  # type: ignore[arg-type]  # Celery takes a Queue
            argsrepr=record.describe,
            kwargsrepr=shown_owner([message.identity.user_id, message.identity.thread_id]),
        )
        return signature

    def _is_under_way(self, op_id: str, kind: str, kwargs: Mapping[str, Any]) -> bool:
        """Whether this very call is recorded (and not another one that was given the same task id)."""
        view = self._client.store.op(op_id)
        if view is None or view.kind != kind or kwargs.get("sandbox_id") not in (None, view.sandbox_id):
            return False
        thread_id = kwargs.get("thread_id")
        if thread_id is None:
            return True
        return view.sandbox_id in sandbox_id_candidates(Identity(thread_id, kwargs.get("user_id")).digest)

    @staticmethod
    def _waiter_id(task: _Task) -> str:
        """As whom this call waits, on every round the same; a second delivery is somebody else."""
        known = (task.request.headers or {}).get(_WAITER)
        return known if isinstance(known, str) and len(known) <= _WAITER_CHARS else new_op_id()

    def _later(self, task: _Task, kwargs: Mapping[str, Any], waiter_id: str) -> Exception:
        """To the end of a queue, with id, group and chord; at once, because a message that waits for a moment in time
        does so in a worker that may die, and by a clock that may be wrong. The queue is one of its own: whoever finds
        its sandbox alive is not to wait behind those who wait."""
        headers, now_ms = dict(task.request.headers or {}), self._client.now_ms()
        since = headers.get(_SINCE)
        headers[_SINCE] = since = since if isinstance(since, int) else now_ms
        headers[_WAITER] = waiter_id
        waited_s = (now_ms - since) / 1000
        if waited_s > _queue_timeout_s(kwargs, self._settings.queue_timeout_s):
            self._rounds.over(waiter_id)
            identity = Identity(str(kwargs.get("thread_id")), kwargs.get("user_id"))
            if position := self._client.store.withdraw(identity, waiter_id):
                return in_line_too_long(identity, position, waited_s)
            return Busy(
                f"as many plain calls wait for their sandbox as may, for {waited_s:.0f} s now; "
                "start more schedulers, or give them a higher concurrency",
                retry_after_s=1.0,
            )
        return task.retry(countdown=0, throw=False, headers=headers, queue=queue_of(WAITING_QUEUE))

    def _take(
        self, task: _Task, kind: str, parsed: dict[str, Any], kwargs: Mapping[str, Any], waiter_id: str
    ) -> tuple[OpRecord, OpMessage]:
        identity, route, agent = self._route(str(task.request.id), kwargs, waiter_id)
        try:
            return self._record(task, kind, parsed, kwargs, identity, route)
        finally:
            if agent is not None:
                # The record marks the sandbox busy; the plain caller holds nothing beyond its operation.
                self._client.store.release(route.sandbox_id, identity.digest, agent)

    def _record(
        self,
        task: _Task,
        kind: str,
        parsed: dict[str, Any],
        kwargs: Mapping[str, Any],
        identity: Identity,
        route: Route,
    ) -> tuple[OpRecord, OpMessage]:
        for _ in range(3):
            record, message = self._message(task, kind, parsed, kwargs, identity, route)
            recorded = self._client.store.record(record, None)
            if recorded.status == "recorded":
                return record, message
            if recorded.status == "duplicate":
                raise Ignore
            if recorded.status != "moved" or recorded.route is None:
                raise refusal(recorded.status, route.sandbox_id, record.op_id)
            route = recorded.route
        raise NotStarted(f"sandbox {route.sandbox_id} changes its node faster than it can be addressed")

    def _message(
        self,
        task: _Task,
        kind: str,
        parsed: dict[str, Any],
        kwargs: Mapping[str, Any],
        identity: Identity,
        route: Route,
    ) -> tuple[OpRecord, OpMessage]:
        op_id = str(task.request.id)
        now_ms = self._client.now_ms()
        queue_s = _queue_timeout_s(kwargs, self._settings.queue_timeout_s)
        run_s = float(parsed.get("timeout_s") or self._settings.command_timeout_s)
        start_by_ms = now_ms + int(queue_s * 1000)
        deadline_ms = start_by_ms + int(run_s * 1000)
        shown = describe(kind, parsed, route.sandbox_id)
        content = _content(kind, kwargs)
        message = OpMessage(
            op_id,
            kind,
            identity,
            route,
            lanes_of(kind, parsed, route.sandbox_id, f"celery.{op_id}"),
            parsed,
            blobs.pack_bytes(self._client.store, content, client=PLAIN_CALLERS, ttl_s=queue_s + run_s),
            start_by_ms,
            deadline_ms,
            PLAIN_CALLERS,
            now_ms,
        )
        effect = OPS[kind].effect
        return OpRecord(
            op_id, kind, route, identity.digest, start_by_ms, deadline_ms, PLAIN_CALLERS, shown, effect=effect
        ), message

    def _route(self, op_id: str, kwargs: Mapping[str, Any], waiter_id: str) -> tuple[Identity, Route, str | None]:
        """Whose sandbox, where it lives, and the agent that holds it until the record does (None: nobody needs to)."""
        store = self._client.store
        sandbox_id, thread_id, user_id = (
            kwargs.get("sandbox_id"),
            kwargs.get("thread_id"),
            kwargs.get("user_id"),
        )
        if sandbox_id is not None:
            info = store.sandbox(str(sandbox_id))
            route = store.route(str(sandbox_id)) if info is not None else None
            owned = thread_id is None or (info is not None and (info.thread_id, info.user_id) == (thread_id, user_id))
            if info is None or route is None or not owned:
                raise SandboxNotFound(f"no sandbox {str(sandbox_id)[:64]} of yours; give thread_id to get one")
            return Identity(info.thread_id, info.user_id), route, None
        if thread_id is None:
            raise InvalidArgument("give thread_id (and user_id), or sandbox_id")
        identity = Identity(thread_id, user_id)
        agent = f"celery.{op_id}.{waiter_id}"  # of this delivery: a second one must not release the first one's
        return identity, self._acquire(identity, agent, waiter_id), agent

    def _acquire(self, identity: Identity, agent: str, waiter_id: str) -> Route:
        """Acquire as any client does, but place inline: a queued request could wait for the threads that wait here.

        Raises:
            StandsInLine: No place is free. That may take long, and so holds no thread.
            _Crowded: Nothing lives, and as many calls wait here as may.
        """
        self._client.reader()  # whoever is granted a sandbox has to be listening
        waiter = Waiter(waiter_id, self._client.id, agent, min(self._settings.agent_ttl_s, _HOLD_S))
        wait_s = self._settings.acquire_timeout_s + _WAITER_GRACE_S
        found = self._client.store.acquire(identity, waiter, wait_s=wait_s, push=None)
        if found.route is not None:
            self._rounds.over(waiter_id)
            return found.route
        if found.status == "parked":
            self._rounds.rest(waiter_id)
            raise StandsInLine
        self._rounds.over(waiter_id)
        if not self._waiting.acquire(timeout=_PAUSE_S):
            raise _Crowded
        try:
            return self._wait_for_sandbox(identity, agent, waiter_id)
        finally:
            self._waiting.release()

    def _wait_for_sandbox(self, identity: Identity, agent: str, waiter_id: str) -> Route:
        settings = self._settings
        now_ms = self._client.now_ms()
        request = AcquireRequest(identity, wanted_spec(settings), settings.on_lost, settings.overflow_policy, now_ms)
        asking = Asking(
            identity,
            request.spec,
            agent,
            settings.acquire_timeout_s,
            settings.on_lost,
            place=lambda: self._scheduler.place_or_tell(request) == IN_LINE,
            waiter_id=waiter_id,
            line_patience_s=0.0,
        )
        return drive(acquire_steps(self._client, asking))


def _content(kind: str, kwargs: Mapping[str, Any]) -> bytes | None:
    text, encoded = kwargs.get("content"), kwargs.get("content_b64")
    if text is None and encoded is None:
        return None
    if kind not in CONTENT_KINDS:
        raise InvalidArgument(f"{kind} takes no content", argument="content")
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else _no_content()
    except ValueError as exc:
        raise InvalidArgument(f"content_b64 is not base64: {exc}", argument="content_b64") from None


def _no_content() -> bytes:
    raise InvalidArgument("content must be text, content_b64 base64 text", argument="content")


def _queue_timeout_s(kwargs: Mapping[str, Any], default: float) -> float:
    value = kwargs.get("queue_timeout_s", default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidArgument(
            f"queue_timeout_s must be seconds above 0 and up to {MAX_TIMEOUT_S:g}, not {str(value)[:40]!r}",
            argument="queue_timeout_s",
        )
    return float(value)
