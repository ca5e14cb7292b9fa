"""Output of a command while somebody waits for its result: callbacks, on a thread or on an event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sandfleet.client import Answer, Call, Client
from sandfleet.errors import StoreUnavailable
from sandfleet.ids import new_op_id, new_token
from sandfleet.job_values import OutputChunk, OutputEnd, OutputGap
from sandfleet.reading import Reading
from sandfleet.steps import Listen, Sleep, Steps, drive, drive_async
from sandfleet.store.base import Output

__all__ = ["Callbacks", "OnGap", "OnOutput", "followed", "followed_async"]

log = logging.getLogger("sandfleet.client")

#: Called with each piece of output, as bytes; on an event loop it may be a coroutine function.
OnOutput = Callable[[bytes], Any]
#: Called where output is missing, in its place among the pieces.
OnGap = Callable[[OutputGap], Any]

#: A call that fails before its command began may wait for one of these.
_SLICE_S = 0.25
#: How long output is still looked for when the result is there and Redis is not.
_LAST_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Who is told what comes of a command."""

    out: OnOutput | None
    err: OnOutput | None
    gap: OnGap | None = None

    def tell(self, record: OutputChunk | OutputGap, op_id: str) -> Any:
        """Call the one it is for; what that gives, which on an event loop may have to be awaited."""
        try:
            if isinstance(record, OutputGap):
                if self.gap is not None:
                    return self.gap(record)
                facts = {"op_id": op_id, "stream": record.stream, "bytes": record.missing}
                log.warning("output.gap", extra=facts)
                return None
            callback = self.out if record.stream == "stdout" else self.err
            return callback(record.data) if callback is not None else None
        except Exception:  # it is the caller's, and must not cost the caller the result
            log.exception("output.callback_failed", extra={"op_id": op_id})
            return None


class _Listening:
    """One command's output on its way to its callbacks; `records` until `finish`, and then what is still there."""

    def __init__(self, client: Client, stream: str) -> None:
        self._store = client.store
        self._stream = stream
        self._reader = new_token()
        self._reading = Reading()
        self._finished_at: float | None = None

    def finish(self) -> None:
        """The command is over: nothing more will come than is in the stream."""
        self._finished_at = time.monotonic()
        self._store.drop_reader(self._reader)

    def close(self) -> None:
        self._store.drop_reader(self._reader)

    def _read(self) -> list[Output]:
        block_s = 0.0 if self._finished_at is not None else _SLICE_S
        at = self._reading.read_from
        return self._store.read_output(self._stream, *at, block_s=block_s, reader=self._reader)

    def records(self) -> Steps[list[OutputChunk | OutputGap]]:
        """What came since; empty when there is no more."""
        while not self._reading.ended:
            over, before = self._finished_at, self._reading.read_from
            try:
                entries: list[Output] = yield Listen(self._read)
            except StoreUnavailable as exc:
                if over is not None and time.monotonic() - over > _LAST_LOOK_S:
                    log.warning("output.not_read", extra={"op_id": self._stream, "error": str(exc)})
                    return []
                yield Sleep(0.2)
                continue
            records = self._reading.take(entries)
            if found := [record for record in records if not isinstance(record, OutputEnd)]:
                return found
            if not entries and over is not None and self._reading.read_from == before:
                return []
        return []


def followed(client: Client, run: Callable[[Call], Steps[Answer]], call: Call, callbacks: Callbacks) -> Answer:
    """Carry a command through while a thread hands its output to the callbacks; all of it is before this returns."""
    call = _with_stream(call)
    listening = _Listening(client, call.args["stream"])

    def listen() -> None:
        while records := drive(listening.records()):
            for record in records:
                callbacks.tell(record, str(call.op_id))

    thread = threading.Thread(target=listen, name="sandfleet-output", daemon=True)
    thread.start()
    patient = True
    try:
        return drive(run(call))
    except (KeyboardInterrupt, SystemExit):
        patient = False  # it may be a callback that hangs
        raise
    finally:
        listening.finish()
        if patient:
            thread.join()
        listening.close()


async def followed_async(
    client: Client, run: Callable[[Call], Steps[Answer]], call: Call, callbacks: Callbacks
) -> Answer:
    """The same on the running event loop, on which the callbacks are called (and awaited, if that is what they are)."""
    call = _with_stream(call)
    listening = _Listening(client, call.args["stream"])

    async def listen() -> None:
        while records := await drive_async(listening.records()):
            for record in records:
                told = callbacks.tell(record, str(call.op_id))
                try:
                    if inspect.isawaitable(told):
                        await told
                except Exception:  # as in `tell`
                    log.exception("output.callback_failed", extra={"op_id": call.op_id})

    listener = asyncio.ensure_future(listen())
    try:
        return await drive_async(run(call))
    except asyncio.CancelledError:
        listener.cancel()
        raise
    finally:
        listening.finish()
        await asyncio.gather(listener, return_exceptions=True)
        listening.close()


def _with_stream(call: Call) -> Call:
    op_id = call.op_id or new_op_id()
    return replace(call, op_id=op_id, args={**call.args, "stream": op_id})
