"""Client logic written once for threads and event loops.

A generator yields `Do`, `Listen`, `Wait` and `Sleep` and gets the results sent back; `drive` runs it on a thread,
`drive_async` on an event loop. What a step raises is thrown into the generator, which decides.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from sandfleet.replies import Pending

__all__ = ["Do", "Listen", "Sleep", "Steps", "Wait", "aside", "carry_out", "carry_out_async", "drive", "drive_async"]

log = logging.getLogger("sandfleet.client")

_MOST_LISTENERS = 64

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Do:
    """Run a short blocking function; its result is sent back into the generator."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Listen:
    """Run a function that waits for seconds; on an event loop it has a thread that others do not wait for."""

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


Step = Do | Listen | Wait | Sleep
Steps = Generator[Step, Any, T]


def aside(run: Callable[[], None]) -> None:
    """Run a short blocking function from a generator that is being closed: at once, or, on an event loop, beside it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run()
    else:
        threading.Thread(target=run, name="sandfleet-aside", daemon=True).start()


def carry_out(steps: Generator[S, Any, T], carry: Callable[[S], Any]) -> T:
    """Run a generator on this thread: ``carry`` does what it yields; what that gives or raises goes back into it."""
    try:
        step = next(steps)
        while True:
            try:
                value = carry(step)
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


async def carry_out_async(steps: Generator[S, Any, T], carry: Callable[[S], Awaitable[Any]]) -> T:
    """The same on the running event loop."""
    try:
        step = next(steps)
        while True:
            try:
                value = await carry(step)
            except Exception as exc:  # noqa: BLE001  (it goes into the generator, which decides)
                step = steps.throw(exc)
            else:
                step = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # A cancelled asyncio task leaves the generator suspended: its `finally` lets go of what waits.
        steps.close()


def drive(steps: Steps[T]) -> T:
    """Run ``steps`` on this thread."""
    return carry_out(steps, _carry)


async def drive_async(steps: Steps[T]) -> T:
    """Run ``steps`` on the running event loop; its thread never blocks on Redis or on a reply."""
    return await carry_out_async(steps, _carry_async)


def _carry(step: Step) -> Any:
    if isinstance(step, Do | Listen):
        return step.run()
    if isinstance(step, Wait):
        return step.pending.wait(step.timeout_s)
    time.sleep(step.seconds)
    return None


async def _carry_async(step: Step) -> Any:
    loop = asyncio.get_running_loop()
    if isinstance(step, Do):
        return await loop.run_in_executor(None, step.run)
    if isinstance(step, Listen):
        return await loop.run_in_executor(_listeners(), step.run)
    if isinstance(step, Wait):
        return await _wait_async(loop, step)
    return await asyncio.sleep(step.seconds)


@functools.cache
def _listeners() -> ThreadPoolExecutor:
    """Threads for what waits in Redis for long: the loop's own are few, and everything else runs on them."""
    return ThreadPoolExecutor(_MOST_LISTENERS, thread_name_prefix="sandfleet-listener")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listeners.cache_clear)


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
