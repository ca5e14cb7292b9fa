"""The caller's side of the path: record, publish, wait, and repeat only what is known not to have begun.

The logic is written once, as generators (`sandfleet.steps`). Identity is per process: after a fork reader,
connections and pending replies are made anew.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandfleet import blobs
from sandfleet.config import Settings
from sandfleet.errors import (
    Busy,
    InvalidArgument,
    NotStarted,
    OutcomeUnknown,
    ReplyTimeout,
    SandfleetError,
    StoreUnavailable,
    from_wire,
)
from sandfleet.holds import Holds
from sandfleet.ids import Identity, check_op_id, new_op_id, new_token
from sandfleet.model import Timings
from sandfleet.ops import CONTENT_KINDS, MAX_TIMEOUT_S, OPS, describe, lanes_of, parse_args, task_name
from sandfleet.publish import publisher
from sandfleet.refusals import refusal
from sandfleet.replies import Pending, ReplyReader
from sandfleet.steps import Do, Sleep, Steps, Wait
from sandfleet.store import open_store
from sandfleet.store.base import OpRecord, Recorded, Route, Store
from sandfleet.tries import Tries
from sandfleet.wire import OpMessage, node_queue, take_beside

__all__ = ["Answer", "Call", "Client", "Target"]

log = logging.getLogger("sandfleet.client")

#: Beyond start_by and the operation's own deadline, how long the client waits for the answer.
_REPLY_GRACE_S = 15.0


@dataclass(slots=True)
class Target:
    """A sandbox as its handles know it.

    The route is a cache that any answer may renew. The identity is what the handle claims to be, and the node
    checks it; None (a bare id from somewhere else) is looked up on first use.
    """

    sandbox_id: str
    identity: Identity | None = None
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operation to be made."""

    kind: str
    args: Mapping[str, Any]
    content: bytes | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    op_id: str | None = None
    #: Commands of one caller run in order; those of others beside them.
    caller: str = ""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Arguments and content as they travel: inline, or as references to blobs."""

    args: Any
    content: dict[str, Any] | None

    @property
    def in_blobs(self) -> bool:
        return "blob" in (self.content or ()) or "$blob" in self.args


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the operation's value, the bytes beside it, and where the time went."""

    op_id: str
    value: Any
    content: bytes | None
    timings: Timings = field(default_factory=Timings)


class Client:
    """One process' connection to a fleet: a store, a reply stream and the clock offset.

    Thread-safe. Made by `SandboxProvider`; use one per process and fleet.
    """

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.id = f"{self.pid:x}-{new_token()}"
        self.store = store or open_store(
            settings.redis_url,
            settings.prefix,
            allow_insecure=settings.allow_insecure_redis,
            client_bytes=settings.client_bytes,
            fleet_bytes=settings.fleet_bytes,
        )
        self._publish = publisher(settings, self.store)
        self._lock = threading.Lock()
        self._reader: ReplyReader | None = None
        self.holds = Holds(self.store, self.id, ttl_s=settings.agent_ttl_s)
        # Store time minus this process' monotonic clock: a wall clock that jumps or lies does not matter.
        self._offset_ms: float | None = None

    # --- the parts other modules use ---------------------------------------------------------

    def reader(self) -> ReplyReader:
        """The reply reader, started on first use."""
        if self._reader is None:
            with self._lock:
                if self._reader is None:
                    reader = ReplyReader(self.store, self.id, on_tick=self.holds.renew)
                    reader.start()
                    self._reader = reader
        return self._reader

    def now_ms(self) -> int:
        """The store's time, estimated from the last answer that carried it."""
        if self._offset_ms is None:
            self.learn_clock(self.store.now_ms())
        return int(time.monotonic() * 1000 + (self._offset_ms or 0.0))

    @property
    def has_clock(self) -> bool:
        """Whether `now_ms` knows the store's time without asking for it."""
        return self._offset_ms is not None

    def learn_clock(self, store_ms: int) -> None:
        """Correct the clock offset by a time just read in the store."""
        if store_ms:
            self._offset_ms = store_ms - time.monotonic() * 1000

    def close(self) -> None:
        """Stop the reader and close the connections."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self.store.close()

    # --- one operation -----------------------------------------------------------------------

    def call(self, target: Target, call: Call) -> Steps[Answer]:
        """Carry one operation through: see the module's docstring.

        Raises (from the generator):
            SandfleetError: Whatever the operation or the fleet said; see `sandfleet.errors`.
        """
        args = parse_args(call.kind, call.args).model_dump(exclude_unset=True)
        if call.content is not None and call.kind not in CONTENT_KINDS:
            raise ValueError(f"{call.kind} takes no content")
        op_id = check_op_id(call.op_id) if call.op_id is not None else new_op_id()
        started = time.monotonic()
        for name, given_s in (("queue_timeout_s", call.queue_timeout_s), ("timeout_s", call.timeout_s)):
            if given_s is not None and not 0 < given_s <= MAX_TIMEOUT_S:
                raise InvalidArgument(f"{name} must be above 0 and at most {MAX_TIMEOUT_S:g} seconds", argument=name)
        budget_s = call.queue_timeout_s or self.settings.queue_timeout_s
        attempt_id, tries, outages = op_id, Tries(), 0
        packed: _Packed | None = None
        while True:
            try:
                if packed is None:
                    packed = yield Do(lambda: self._pack(args, call))
                left_s = max(budget_s - (time.monotonic() - started), 0.001)
                reply = yield from self._attempt(target, call, attempt_id, args, packed, left_s, tries)
                answer: Answer = yield Do(lambda: self._decode(attempt_id, reply, started))  # noqa: B023
                return answer
            except (NotStarted, Busy) as exc:
                wanted_s = tries.pause_s(exc)
                if wanted_s is None or budget_s - (time.monotonic() - started) < wanted_s:
                    raise
                pause_s = wanted_s
                if tries.recorded:
                    # A tombstoned op id stays closed for ever; the same call gets the next id, in a row that is
                    # the same for whoever repeats it.
                    attempt_id = tries.next_id(op_id)
                target.route = None
                if packed is not None and packed.in_blobs:
                    # The node may have given these bytes back already; they go out anew, and count once.
                    yield Do(functools.partial(self._drop, packed))
                    packed = None
                yield Sleep(pause_s)
            except StoreUnavailable as exc:
                # Recorded or not: the same op id asks again, and a record that got in answers "duplicate".
                pause_s = exc.retry_after_s or min(0.2 * 2**outages, 2.0)
                if not self.has_met_store or budget_s - (time.monotonic() - started) < pause_s:
                    raise
                outages += 1
                yield Sleep(pause_s)

    @property
    def has_met_store(self) -> bool:
        """Whether the store ever answered this process. One that never did is a mistake, not an outage to sit out."""
        return self._offset_ms is not None or self._reader is not None

    def _pack(self, args: dict[str, Any], call: Call) -> _Packed:
        ttl_s = self._reply_within_s(call) + 60
        return _Packed(
            blobs.pack_json(self.store, args, client=self.id, ttl_s=ttl_s),
            blobs.pack_bytes(self.store, call.content, client=self.id, ttl_s=ttl_s),
        )

    def _drop(self, packed: _Packed) -> None:
        blobs.drop(self.store, packed.content)
        if isinstance(packed.args, dict):
            blobs.drop(self.store, packed.args.get("$blob"))

    def _reply_within_s(self, call: Call) -> float:
        queue_s = call.queue_timeout_s or self.settings.queue_timeout_s
        return queue_s + self._run_within_s(call) + _REPLY_GRACE_S

    def _run_within_s(self, call: Call) -> float:
        return call.timeout_s or (
            self.settings.command_timeout_s if call.kind in ("execute_command", "batch") else 60.0
        )

    def _attempt(
        self,
        target: Target,
        call: Call,
        op_id: str,
        args: dict[str, Any],
        packed: _Packed,
        queue_s: float,
        tries: Tries,
    ) -> Steps[str]:
        """Record and publish one op id and wait for its reply JSON."""
        tries.recorded = False
        reader = self._reader or (yield Do(self.reader))
        pending: Pending = reader.expect(op_id, recorded=False)
        try:
            recorded: Recorded = yield Do(lambda: self._record_or_drop(target, call, op_id, args, packed, queue_s))
            tries.recorded = True
            if recorded.status == "duplicate":
                if recorded.reply is not None:
                    return recorded.reply
                if recorded.state in ("done", "closed"):
                    raise self._nobody_knows(call, op_id)
                pending.foreign = True
            pending.now_recorded()
            within_s = queue_s + self._run_within_s(call) + _REPLY_GRACE_S
            try:
                payload = yield Wait(pending, within_s)
            except TimeoutError:
                raise ReplyTimeout(
                    f"no answer to {call.kind} within {within_s:.0f} s; the operation may still run: "
                    f"`sandfleet story {op_id}` tells, `sandfleet cancel {op_id}` ends it",
                    op_id=op_id,
                ) from None
        finally:
            reader.forget(op_id, pending)
        if payload is None:
            raise self._nobody_knows(call, op_id)
        return str(payload)

    @staticmethod
    def _nobody_knows(call: Call, op_id: str) -> SandfleetError:
        if not OPS[call.kind].effect:
            return NotStarted(
                f"the record of {call.kind} {op_id} is gone; it has no effect and may be repeated",
                op_id=op_id,
            )
        return OutcomeUnknown(
            f"the record of {call.kind} {op_id} is gone (lost by Redis, or ended long ago); look before you repeat it",
            op_id=op_id,
        )

    def _record_or_drop(
        self, target: Target, call: Call, op_id: str, args: dict[str, Any], packed: _Packed, queue_s: float
    ) -> Recorded:
        """`_record`; what was refused gives its bytes back."""
        try:
            return self._record(target, call, op_id, args, packed, queue_s)
        except StoreUnavailable:
            raise  # it may have got in
        except SandfleetError:
            self._drop(packed)
            raise

    def _record(
        self,
        target: Target,
        call: Call,
        op_id: str,
        args: dict[str, Any],
        packed: _Packed,
        queue_s: float,
    ) -> Recorded:
        """Record at the sandbox's current node; looks the route up again when it is stale."""
        identity = self.identity_of(target)
        for _ in range(4):
            route = target.route or self._look_up(target)
            message = self._message(call, op_id, identity, route, args, packed, queue_s)
            record = OpRecord(
                op_id=op_id,
                kind=call.kind,
                route=route,
                owner=identity.digest,
                start_by_ms=message.start_by_ms,
                deadline_ms=message.deadline_ms,
                reply_to=self.id,
                describe=describe(call.kind, args, target.sandbox_id),
                effect=OPS[call.kind].effect,
            )
            queue = node_queue(route.node_id)
            recorded = self._publish(record, task_name(call.kind), message.to_wire(), queue, self.settings.max_queue)
            self.learn_clock(recorded.now_ms)
            if recorded.status in ("recorded", "duplicate"):
                target.route = route
                return recorded
            if recorded.status != "moved":
                raise refusal(recorded.status, target.sandbox_id, op_id)
            target.route = recorded.route
        raise NotStarted(f"sandbox {target.sandbox_id} changes its node faster than it can be addressed", op_id=op_id)

    def _message(
        self,
        call: Call,
        op_id: str,
        identity: Identity,
        route: Route,
        args: dict[str, Any],
        packed: _Packed,
        queue_s: float,
    ) -> OpMessage:
        now_ms = self.now_ms()
        start_by_ms = now_ms + int(queue_s * 1000)
        return OpMessage(
            op_id=op_id,
            kind=call.kind,
            identity=identity,
            route=route,
            lanes=lanes_of(call.kind, args, route.sandbox_id, call.caller or self.id),
            args=packed.args,
            content=packed.content,
            start_by_ms=start_by_ms,
            deadline_ms=start_by_ms + int(self._run_within_s(call) * 1000),
            reply_to=self.id,
            sent_at_ms=now_ms,
            beside=call.kind == "execute_command",
        )

    def identity_of(self, target: Target) -> Identity:
        """Whom the sandbox belongs to, looked up when the handle came from a bare id.

        Raises:
            SandboxNotFound: Nobody knows the id.
        """
        if target.identity is None:
            info = self.store.sandbox(target.sandbox_id)
            if info is None:
                raise refusal("not_found", target.sandbox_id, "")
            target.identity = Identity(info.thread_id, info.user_id)
        return target.identity

    def _look_up(self, target: Target) -> Route:
        route = self.store.route(target.sandbox_id)
        if route is None:
            info = self.store.sandbox(target.sandbox_id)
            raise refusal("not_found" if info is None else "lost", target.sandbox_id, "")
        return route

    def _decode(self, op_id: str, reply: str, started: float) -> Answer:
        """The answer of a reply JSON; blobs are fetched and given back."""
        data = json.loads(reply)
        if "error" in data:
            raise from_wire(data["error"])
        value = blobs.unpack_json(self.store, data.get("ok"))
        reference = data.get("content")
        content = blobs.unpack_bytes(self.store, reference)
        blobs.drop(self.store, reference)
        if "beside" in data:
            value, content = take_beside(value, data["beside"], content or b""), None
        spent = data.get("t") or (None, None, None)
        timings = Timings(spent[0], spent[1], spent[2], (time.monotonic() - started) * 1000)
        return Answer(op_id, value, content, timings)
