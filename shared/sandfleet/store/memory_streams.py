"""Output streams and background jobs in memory: the twin of `sandfleet.store.redis_streams`."""

from __future__ import annotations

import time
from dataclasses import replace

from sandfleet.errors import StoreUnavailable
from sandfleet.model import SandboxState
from sandfleet.store.base import OpRecord, Output, Pushed, Route, Store, wants_errors_only
from sandfleet.store.codec import check_reply, ms_of
from sandfleet.store.memory_state import DAY_MS, Op
from sandfleet.store.memory_steps import MemorySteps

_PAGE = 16
_BUSY_GRACE_MS = 30_000


class MemoryStreams(MemorySteps, Store):
    """The part of `MemoryStore` about commands that are followed while they run."""

    def started(self, op_id: str, route: Route, *, reply: str, lasts_s: float) -> bool:
        check_reply(reply)
        with self._lock:
            op = self._ops.get(op_id)
            if op is None or op.state != "claimed":
                return False
            at, client = op.record.route, op.record.reply_to
            if (at.node_id, at.incarnation) != (route.node_id, route.incarnation):
                return False
            if not op.job:
                deadline_ms = self._now() + ms_of(lasts_s)
                op.job, op.reply = True, reply
                op.record = replace(op.record, deadline_ms=deadline_ms, reply_to="")
                self._ops.touch(op_id, ms_of(lasts_s) + DAY_MS)
                self._busy[at.sandbox_id][op_id] = deadline_ms + _BUSY_GRACE_MS
                if not wants_errors_only(client):
                    self._send(client, op_id, reply)
            return True

    def job_again(self, op_id: str, route: Route, *, reply: str, describe: str, lasts_s: float) -> bool:
        check_reply(reply)
        with self._lock:
            sandbox = self._ours(route, SandboxState.LIVE)
            if op_id in self._ops or sandbox is None or self._leases.get(route.node_id) != route.incarnation:
                return False
            now, lasts_ms = self._now(), ms_of(lasts_s)
            record = OpRecord(op_id, "execute_command", route, sandbox.owner, now, now + lasts_ms, describe=describe)
            op = Op(record, now, state="claimed", claimed_ms=now, reply=reply, job=True)
            self._ops.put(op_id, op, lasts_ms + DAY_MS)
            self._inflight[route.node_id][op_id] = None
            self._busy[route.sandbox_id][op_id] = now + lasts_ms + _BUSY_GRACE_MS
            self._warm[route.node_id].pop(route.sandbox_id, None)
            return True

    def push_output(self, stream: str, output: Output, *, keep_bytes: int, ttl_s: float, anew: bool = False) -> Pushed:
        with self._lock:
            entries = self._outputs.get(stream) or []
            out_at, err_at = _end(entries[-1]) if entries else (0, 0)
            if entries and entries[-1].end is not None:
                return Pushed("ended", out_at, err_at)
            if not anew and (output.out_at > out_at or output.err_at > err_at):
                return Pushed("ok" if entries else "gone", out_at, err_at)
            to = _end(output)
            if sum(to) <= out_at + err_at:
                return Pushed("ok", out_at, err_at)
            kept = [entry for entry in [*entries, output] if sum(_end(entry)) >= sum(to) - keep_bytes]
            self._outputs.put(stream, kept, ms_of(ttl_s))
            self._arrived.notify_all()
            return Pushed("ok", *to)

    def read_output(
        self, stream: str, out_at: int, err_at: int, *, block_s: float, reader: str, only_end: bool = False
    ) -> list[Output]:
        until = time.monotonic() + block_s
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed", reason="closed")
            self._reading.add(reader)

            def arrived() -> list[Output]:
                found = self._outputs.get(stream) or []
                if only_end:
                    return [entry for entry in found if entry.end is not None]
                beyond = out_at + err_at
                return [entry for entry in found if entry.end is not None or sum(_end(entry)) > beyond][:_PAGE]

            def over() -> bool:
                return self._closed or reader not in self._reading or bool(arrived())

            self._arrived.wait_for(over, max(0.0, until - time.monotonic()))
            return arrived() if reader in self._reading else []

    def drop_reader(self, reader: str) -> None:
        with self._lock:
            self._reading.discard(reader)
            self._arrived.notify_all()


def _end(output: Output) -> tuple[int, int]:
    return output.out_at + len(output.out), output.err_at + len(output.err)
