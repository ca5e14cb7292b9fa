"""Which sandbox an agent's run holds: acquired on first use, once, and again when it was lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sandfleet.aio import AsyncSandboxProvider
from sandfleet.config import Settings
from sandfleet.errors import (
    InvalidArgument,
    NotStarted,
    SandboxLost,
    SandboxNotFound,
    SandboxStopping,
    SandfleetError,
)
from sandfleet.tools.effects import Effect, Effects, carry_out, carry_out_async
from sandfleet.tools.failures import InitFailed
from sandfleet.tools.runtime import Runtime, is_ours, is_set_up, provider_of, settings_of, thread_of

__all__ = ["ToolCall", "ensure", "ensure_sandbox_initialized", "ensure_sandbox_initialized_async", "let_go"]

#: What is known not to have begun. `OutcomeUnknown` is not among them: repeating it might do it twice.
_REPEATABLE = (NotStarted, SandboxLost, SandboxNotFound, SandboxStopping)

_SANDBOX, _HELD_ID, _HOLD = "sandbox", "sandbox_id", "sandbox_hold"


@dataclass(frozen=True, slots=True)
class _Hold:
    """A sandbox one run of one agent acquired and has to release.

    Kept in the run's context. A context that was copied (a subagent's, made from its parent's) holds nothing by that,
    which ``context`` tells: the id of the object the hold was put into.
    """

    sandbox_id: str
    epoch: int | None
    context: int


class ToolCall:
    """What the body of a tool works with: its runtime, its provider, the settings, and the sandbox behind them.

    Args:
        runtime: As the framework gave it.
        provider: Bound to the tool, or None.
        settings: Bound to the tool, or None.
    """

    def __init__(self, runtime: Runtime, *, provider: Any = None, settings: Settings | None = None) -> None:
        if getattr(runtime, "state", None) is None:
            raise InvalidArgument("Tool runtime not available: it needs a state", argument="runtime")
        self.runtime = runtime
        self.provider = provider_of(runtime, provider)
        self.settings = settings_of(self.provider, settings)
        self._acquired_again = False

    def on(self, method: str, *args: Any, **kwargs: Any) -> Effects[Any]:
        """Call a method of the run's sandbox, acquiring it first if need be.

        A sandbox that is gone is acquired again, once per tool call, and only what is known not to have begun is
        repeated.
        """
        sandbox_id = yield from ensure(self)
        hold = self._hold()
        try:
            return (yield Effect("call", (sandbox_id, method, args, kwargs)))
        except _REPEATABLE:
            if self._acquired_again or self._identity() is None:
                raise
            self._acquired_again = True
            sandbox_id = yield from self._acquire_again(hold)
            return (yield Effect("call", (sandbox_id, method, args, kwargs)))

    def lock(self, path: str) -> Effects[None]:
        """Hold the lock of a file until the tool is done."""
        sandbox_id = yield from ensure(self)
        yield Effect("lock", (sandbox_id, path))

    # --- what the run holds ------------------------------------------------------------------

    def held(self) -> str | None:
        """The sandbox this run holds, if it does and nobody in this process has released it."""
        hold = self._hold()
        if hold is not None:
            # With another epoch it is another sandbox, which another agent of this process acquired and counts on.
            current = hold.epoch in (None, _epoch(self.provider, hold.sandbox_id) or hold.epoch)
            return hold.sandbox_id if current and self.provider.get(hold.sandbox_id) is not None else None
        if self._context() is not None:
            return None
        # Without a context that can be written to, the state is all there is to remember by.
        sandbox_id = _state_id(self.runtime)
        if sandbox_id is None or self.provider.get(sandbox_id) is None:
            return None
        held = not is_ours(self.provider) or sandbox_id in self.provider._client().holds
        return sandbox_id if held else None

    def keep(self, sandbox_id: str) -> None:
        """Remember that this run acquired the sandbox."""
        self.note(sandbox_id)
        context = self._context()
        if context is not None:
            context[_HELD_ID] = sandbox_id
            context[_HOLD] = _Hold(sandbox_id, _epoch(self.provider, sandbox_id), id(context))

    def note(self, sandbox_id: str) -> None:
        """Put the sandbox's id into the agent's state, as the reference does."""
        state = self.runtime.state
        if _state_id(self.runtime) != sandbox_id or not isinstance(state.get(_SANDBOX), Mapping):
            state[_SANDBOX] = {"sandbox_id": sandbox_id}

    def forget(self) -> str | None:
        """Remember it no longer; the id of what has to be released."""
        held = self.held()
        context = self._context()
        if context is not None:
            if self._hold() is not None:
                context.pop(_HELD_ID, None)
            context.pop(_HOLD, None)
        return held

    def _hold(self) -> _Hold | None:
        context = self._context()
        hold = context.get(_HOLD) if context is not None else None
        return hold if isinstance(hold, _Hold) and hold.context == id(context) else None

    def _context(self) -> MutableMapping[str, Any] | None:
        context = getattr(self.runtime, "context", None)
        return context if isinstance(context, MutableMapping) else None

    def _identity(self) -> tuple[str, str | None] | None:
        """(thread, user) whose sandbox it is.

        A sandbox in the state that this process knows comes first: a subagent works in its parent's, under whatever
        thread its own runtime names.
        """
        sandbox_id = _state_id(self.runtime)
        if sandbox_id is not None and is_set_up(self.provider):
            known = self.provider._target(sandbox_id).identity
            if known is not None:
                return known.thread_id, known.user_id
        thread_id, user_id = thread_of(self.runtime)
        return (thread_id, user_id) if thread_id is not None else None

    def _key(self) -> tuple[int, int]:
        context = self._context()
        return id(self.runtime.state if context is None else context), id(self.provider)

    def _acquire_again(self, lost: _Hold | None) -> Effects[str]:
        dropped = None
        with _mutex:
            # Another call of this run may have done it already.
            if self._hold() is lost:
                dropped = lost
                context = self._context()
                if context is None:
                    self.runtime.state.pop(_SANDBOX, None)
                else:
                    context.pop(_HOLD, None)
        sandbox_id = yield from ensure(self)
        now = self._hold()
        if dropped and now and dropped.epoch is not None and (now.sandbox_id, now.epoch) == _of(dropped):
            # It was there all the time: acquired twice, it would not be released with one release.
            yield Effect("release", (sandbox_id,))
        return sandbox_id


# --- one call acquires, the others wait --------------------------------------------------------

_mutex = threading.Lock()
_arriving: dict[tuple[int, int], Future[Exception | None]] = {}


def ensure(call: ToolCall) -> Effects[str]:
    """The id of the run's sandbox, acquired on first use. Several calls at once acquire it once.

    Raises:
        InitFailed: For a reason that is no `SandfleetError`; the cause has it.
    """
    while True:
        held = call.held()
        if held is not None:
            call.note(held)
            return held
        key = call._key()
        with _mutex:
            arrival = _arriving.get(key)
            leads = arrival is None
            if arrival is None:
                arrival = _arriving[key] = Future()
        if not leads:
            failure = yield Effect("wait", (arrival,))
            if failure is not None:
                raise failure
            continue
        outcome: Exception | None = None
        try:
            return (yield from _acquire(call))
        except Exception as exc:
            outcome = exc
            raise
        finally:
            # Also when this call is cancelled: the next one leads then.
            with _mutex:
                _arriving.pop(key, None)
            arrival.set_result(outcome)


def _acquire(call: ToolCall) -> Effects[str]:
    identity = call._identity()
    if identity is None:
        sandbox_id = _state_id(call.runtime)
        if sandbox_id is not None and call.provider.get(sandbox_id) is not None:
            return sandbox_id
        raise InvalidArgument(
            "Thread ID not available in runtime context; put thread_id into runtime.context or config['configurable']",
            argument="thread_id",
        )
    try:
        sandbox_id = yield Effect("acquire", identity)
    except SandfleetError:
        raise
    except Exception as exc:
        raise InitFailed(str(exc)) from exc
    call.keep(sandbox_id)
    return str(sandbox_id)


def let_go(call: ToolCall) -> Effects[str | None]:
    """Release what the run holds; its id, or None when it holds nothing."""
    sandbox_id = call.forget()
    if sandbox_id is not None:
        yield Effect("release", (sandbox_id,))
    return sandbox_id


def _of(hold: _Hold) -> tuple[str, int | None]:
    return hold.sandbox_id, hold.epoch


def _epoch(provider: Any, sandbox_id: str) -> int | None:
    if not is_set_up(provider):
        return None
    route = provider._target(sandbox_id).route
    return route.epoch if route is not None else None


def _state_id(runtime: Runtime) -> str | None:
    """The id in the agent's state: ``state["sandbox"]["sandbox_id"]``, or ``state["sandbox_id"]`` as in seed 000."""
    found = runtime.state.get(_SANDBOX)
    if isinstance(found, Mapping):
        found = found.get("sandbox_id")
    if not isinstance(found, str):
        found = runtime.state.get("sandbox_id")
    return found if isinstance(found, str) and found else None


# --- for code of one's own -----------------------------------------------------------------------


def ensure_sandbox_initialized(runtime: Runtime, *, provider: Any = None) -> Any:
    """The run's sandbox: the one it holds, otherwise its thread's, acquired now. Safe to call from several threads.

    Its id is in ``runtime.state["sandbox"]["sandbox_id"]`` from then on.

    Raises:
        InvalidArgument: The runtime names no thread.
        SandfleetError: There is no sandbox to be had; see `SandboxProvider.acquire`.
    """
    call = ToolCall(runtime, provider=provider)
    try:
        sandbox_id = carry_out(ensure(call), call.provider)
    except InitFailed as exc:
        raise exc.__cause__ or exc from None
    return call.provider.get(sandbox_id)


async def ensure_sandbox_initialized_async(runtime: Runtime, *, provider: Any = None) -> Any:
    """`ensure_sandbox_initialized` for event loops; an `AsyncSandbox` over a `SandboxProvider`."""
    call = ToolCall(runtime, provider=provider)
    try:
        sandbox_id = await carry_out_async(ensure(call), call.provider)
    except InitFailed as exc:
        raise exc.__cause__ or exc from None
    if is_ours(call.provider):
        return AsyncSandboxProvider.over(call.provider).get(sandbox_id)
    return call.provider.get(sandbox_id)
