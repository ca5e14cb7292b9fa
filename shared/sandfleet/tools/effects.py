"""A tool's logic written once: a generator of effects, carried out on a thread or on an event loop.

`Effect` names a method of `Blocking` and of `Looping`; `carry_out` and `carry_out_async` drive the generator.
What an effect raises is thrown into the generator, which decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sandfleet import steps
from sandfleet.aio import AsyncSandboxProvider
from sandfleet.errors import SandboxNotFound
from sandfleet.tools.locks import FileOperationLock, get_file_operation_lock
from sandfleet.tools.plain import taken
from sandfleet.tools.runtime import is_ours

__all__ = ["Blocking", "Effect", "Effects", "Looping", "carry_out", "carry_out_async"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing to be done outside: ``name`` is a method of `Blocking` and `Looping`; its result is sent back."""

    name: str
    args: tuple[Any, ...] = ()


Effects = Generator[Effect, Any, T]


class Blocking:
    """Carries effects out on the calling thread, over any provider with the seeds' methods."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._ours = is_ours(provider)
        self._locks: list[FileOperationLock] = []

    def acquire(self, thread_id: str, user_id: str | None) -> str:
        """The id of the thread's sandbox."""
        return str(_acquire(self._provider, thread_id, user_id))

    def release(self, sandbox_id: str) -> None:
        """Count one acquire less."""
        self._provider.release(sandbox_id)

    def call(self, sandbox_id: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the sandbox."""
        called = getattr(_handle(self._provider, sandbox_id), method)
        return called(*args, **(kwargs if self._ours else taken(called, kwargs)))

    def lock(self, sandbox_id: str, path: str) -> None:
        """Hold the file's lock until the tool is done."""
        lock = get_file_operation_lock(_handle(self._provider, sandbox_id), path)
        lock.acquire()
        self._locks.append(lock)

    def wait(self, arrival: Future[Exception | None]) -> Exception | None:
        """Wait until another call of the same agent has a sandbox (None), or failed to get one (why)."""
        return arrival.result()

    def finish(self) -> None:
        """Give the locks back."""
        while self._locks:
            self._locks.pop().release()


class Looping:
    """`Blocking` for event loops: natively over a `SandboxProvider`, on threads over a provider of another kind."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._twin = AsyncSandboxProvider.over(provider) if is_ours(provider) else None
        self._locks: list[FileOperationLock] = []

    async def acquire(self, thread_id: str, user_id: str | None) -> str:
        """The id of the thread's sandbox."""
        if self._twin is None:
            return str(await asyncio.to_thread(_acquire, self._provider, thread_id, user_id))
        return await self._twin.acquire(thread_id, user_id=user_id)

    async def release(self, sandbox_id: str) -> None:
        """Count one acquire less."""
        if self._twin is None:
            await asyncio.to_thread(self._provider.release, sandbox_id)
        else:
            await self._twin.release(sandbox_id)

    async def call(self, sandbox_id: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the sandbox."""
        if self._twin is None:
            called = getattr(_handle(self._provider, sandbox_id), method)
            return await asyncio.to_thread(called, *args, **taken(called, kwargs))
        return await getattr(_handle(self._twin, sandbox_id), method)(*args, **kwargs)

    async def lock(self, sandbox_id: str, path: str) -> None:
        """Hold the file's lock until the tool is done."""
        lock = get_file_operation_lock(_handle(self._provider, sandbox_id), path)
        await lock.acquire_async()
        self._locks.append(lock)

    async def wait(self, arrival: Future[Exception | None]) -> Exception | None:
        """Wait until another call of the same agent has a sandbox (None), or failed to get one (why)."""
        # Shielded: cancelling this call must not cancel what all the others wait for.
        return await asyncio.shield(asyncio.wrap_future(arrival))

    async def finish(self) -> None:
        """Give the locks back, even while the task is being cancelled."""
        locks, self._locks = self._locks, []
        if locks:
            await asyncio.shield(asyncio.gather(*(lock.release_async() for lock in locks)))


def carry_out(effects: Effects[T], provider: Any) -> T:
    """Run the generator on this thread."""
    hands = Blocking(provider)
    try:
        return steps.carry_out(effects, lambda effect: getattr(hands, effect.name)(*effect.args))
    finally:
        hands.finish()


async def carry_out_async(effects: Effects[T], provider: Any) -> T:
    """Run the generator on the running event loop, which is never blocked."""
    hands = Looping(provider)
    try:
        return await steps.carry_out_async(effects, lambda effect: getattr(hands, effect.name)(*effect.args))
    finally:
        await hands.finish()


def _acquire(provider: Any, thread_id: str, user_id: str | None) -> Any:
    # The seeds' acquire takes a thread only.
    return provider.acquire(thread_id) if user_id is None else provider.acquire(thread_id, user_id=user_id)


def _handle(provider: Any, sandbox_id: str) -> Any:
    sandbox = provider.get(sandbox_id)
    if sandbox is None:
        raise SandboxNotFound(f"no sandbox {sandbox_id[:64]}; acquire again", sandbox_id=sandbox_id[:64])
    return sandbox
