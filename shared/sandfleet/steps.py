"""Client logic written once for threads and event loops.

A generator yields `Do`, `Wait` and `Sleep` and gets the results sent back; `drive` runs it on a thread,
`drive_async` on an event loop. What a step raises is thrown into the generator, which decides.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from sandfleet.replies import Pending

__all__ = ["Do", "Sleep", "Steps", "Wait", "aside", "drive", "drive_async"]

log = logging.getLogger("sandfleet.client")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Do:
    """Run a short blocking function; its result is sent back into the generator."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a reply; its payload is sent back, or TimeoutError is thrown in."""

    pending: Pending
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Do nothing for a while."""

    seconds: float


Steps = Generator[Do | Wait | Sleep, Any, T]


def aside(run: Callable[[], None]) -> None:
    """Run a short blocking function from a generator that is being closed: at once, or, on an event loop, beside it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run()
    else:
        threading.Thread(target=run, name="sandfleet-aside", daemon=True).start()


def drive(steps: Steps[T]) -> T:
    """Run ``steps`` on this thread."""
    try:
        step = next(steps)
        while True:
            try:
                value: Any = None
                if isinstance(step, Do):
                    value = step.run()
                elif isinstance(step, Wait):
                    value = step.pending.wait(step.timeout_s)
                else:
                    time.sleep(step.seconds)
            except Exception as exc:  # noqa: BLE001  (it goes into the generator, which decides)
                step = steps.throw(exc)
            else:
                step = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # After an interrupt the generator is suspended, and a traceback may keep it alive for long.
        steps.close()


async def drive_async(steps: Steps[T]) -> T:
    """Run ``steps`` on the running event loop; its thread never blocks on Redis or on a reply."""
    loop = asyncio.get_running_loop()
    try:
        step = next(steps)
        while True:
            try:
                value: Any = None
                if isinstance(step, Do):
                    value = await loop.run_in_executor(None, step.run)
                elif isinstance(step, Wait):
                    value = await _wait_async(loop, step)
                else:
                    await asyncio.sleep(step.seconds)
            except Exception as exc:  # noqa: BLE001  (it goes into the generator, which decides)
                step = steps.throw(exc)
            else:
                step = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # A cancelled asyncio task leaves the generator suspended: its `finally` forgets the pending reply.
        steps.close()


async def _wait_async(loop: asyncio.AbstractEventLoop, step: Wait) -> str | None:
    future: asyncio.Future[str | None] = loop.create_future()

    def deliver(payload: str | None) -> None:
        def resolve() -> None:
            if not future.done():
                future.set_result(payload)

        try:
            loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            log.info("replies.loop_closed", extra={"op_id": step.pending.op_id})

    step.pending.forward(deliver)
    return await asyncio.wait_for(future, max(0.0, step.timeout_s))
