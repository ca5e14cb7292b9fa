"""The agent's run as a sandbox sees it: acquired before or at first use, released after."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from sandfleet.errors import SandfleetError
from sandfleet.tools.effects import Effects, carry_out, carry_out_async
from sandfleet.tools.holding import ToolCall, ensure, let_go

__all__ = ["SandboxMiddleware"]

log = logging.getLogger("sandfleet.client")


class SandboxMiddleware:
    """Gives a run of an agent its sandbox and takes it back at the run's end. Its hooks have LangChain's names.

    A hook takes the agent's state, and a runtime (``context``, ``config``) or a configuration (a mapping with
    ``configurable``). What is released is what this very run acquired: agents that share a sandbox each hold it, and
    the first to finish does not take it from the others.

    Args:
        lazy_init: Acquire at the first tool call instead of before the run: an agent that only talks needs no sandbox.
        provider: Whose sandboxes; by default the runtime's or the process' provider.
    """

    def __init__(self, lazy_init: bool = True, *, provider: Any = None) -> None:
        self.lazy_init = lazy_init
        self._provider = provider

    def before_agent(self, state: MutableMapping[str, Any], runtime: Any = None) -> dict[str, Any] | None:
        """Acquire, unless lazy; what the state gains, or None.

        Raises:
            SandfleetError: There is no sandbox to be had; see `SandboxProvider.acquire`.
        """
        if self.lazy_init:
            return None
        call = self._call(state, runtime)
        return {"sandbox": {"sandbox_id": carry_out(ensure(call), call.provider)}}

    async def abefore_agent(self, state: MutableMapping[str, Any], runtime: Any = None) -> dict[str, Any] | None:
        """`before_agent` for event loops."""
        if self.lazy_init:
            return None
        call = self._call(state, runtime)
        return {"sandbox": {"sandbox_id": await carry_out_async(ensure(call), call.provider)}}

    def after_agent(self, state: MutableMapping[str, Any], runtime: Any = None) -> None:
        """Release what the run holds. Failing to is logged, not raised: the hold expires, the answer is worth more."""
        call = self._call(state, runtime)
        carry_out(_release(call), call.provider)

    async def aafter_agent(self, state: MutableMapping[str, Any], runtime: Any = None) -> None:
        """`after_agent` for event loops."""
        call = self._call(state, runtime)
        await carry_out_async(_release(call), call.provider)

    def _call(self, state: MutableMapping[str, Any], runtime: Any) -> ToolCall:
        if isinstance(runtime, Mapping):
            # A bare configuration: nothing in it lives as long as the run, so the state alone remembers.
            seen: Any = _Configured(state, runtime.get("context"), runtime)
        else:
            seen = _Configured(state, getattr(runtime, "context", None), getattr(runtime, "config", None))
        return ToolCall(seen, provider=self._provider)


class _Configured:
    """A hook's arguments in the form of a `Runtime`."""

    def __init__(self, state: MutableMapping[str, Any], context: Any, config: Any) -> None:
        self.state = state
        self.context = context
        self.config = config


def _release(call: ToolCall) -> Effects[None]:
    try:
        yield from let_go(call)
    except SandfleetError as exc:
        log.warning("tools.release_failed", extra={"error": str(exc)})
