"""A tool as an agent framework takes it: a name, a description, a JSON schema, and two ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from sandfleet.config import Settings
from sandfleet.tools.arguments import parse, schema_of
from sandfleet.tools.effects import Effects, carry_out, carry_out_async
from sandfleet.tools.failures import Failures
from sandfleet.tools.holding import ToolCall
from sandfleet.tools.runtime import Runtime, provider_of

__all__ = ["Tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One of the agent's tools. Its answer is always a text; a failure is a text that begins with ``Error:``.

    ``tool(runtime, "why", …)`` takes the arguments in the seeds' order, `invoke` and `ainvoke` by name.

    Attributes:
        name: What the model calls it.
        description: What the model is told about it.
        args_model: The pydantic model of its arguments.
        failures: How it tells its failures.
        provider: Whose sandboxes it works in; None: the runtime's, otherwise the process' provider.
        settings: Its limits; None: the provider's settings.
    """

    name: str
    description: str
    args_model: type[BaseModel]
    body: Callable[[ToolCall, Any], Effects[str]]
    failures: Failures
    provider: Any = None
    settings: Settings | None = None

    def bound(self, *, provider: Any = None, settings: Settings | None = None) -> Tool:
        """The same tool over a provider and with limits of one's own."""
        return replace(self, provider=provider or self.provider, settings=settings or self.settings)

    # --- running -----------------------------------------------------------------------------

    def __call__(self, runtime: Runtime, *args: Any, **kwargs: Any) -> str:
        """Run it on this thread; arguments by position or by name."""
        return self.run(runtime, self._by_name(args, kwargs))

    def invoke(self, runtime: Runtime, **args: Any) -> str:
        """Run it on this thread. Do not call it on an event loop's thread: use `ainvoke` there."""
        return self.run(runtime, args)

    async def ainvoke(self, runtime: Runtime, **args: Any) -> str:
        """Run it on an event loop."""
        return await self.arun(runtime, args)

    async def _coroutine(self, runtime: Runtime, *args: Any, **kwargs: Any) -> str:
        return await self.arun(runtime, self._by_name(args, kwargs))

    def run(self, runtime: Runtime, args: Mapping[str, Any]) -> str:
        """Run it with the arguments a model wrote, whatever they are."""
        try:
            return carry_out(self._steps(runtime, args), provider_of(runtime, self.provider))
        except Exception as exc:  # noqa: BLE001  (a tool answers in text, whatever happened)
            return self.failures.text(exc)

    async def arun(self, runtime: Runtime, args: Mapping[str, Any]) -> str:
        """`run` for event loops."""
        try:
            return await carry_out_async(self._steps(runtime, args), provider_of(runtime, self.provider))
        except Exception as exc:  # noqa: BLE001  (a tool answers in text, whatever happened)
            return self.failures.text(exc)

    def _steps(self, runtime: Runtime, args: Mapping[str, Any]) -> Effects[str]:
        parsed = parse(self.name, self.args_model, args)
        try:
            call = ToolCall(runtime, provider=self.provider, settings=self.settings)
            return (yield from self.body(call, parsed))
        except Exception as exc:  # noqa: BLE001  (a tool answers in text, whatever happened)
            return self.failures.text(exc, getattr(parsed, "path", ""))

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = list(self.args_model.model_fields)
        if len(args) > len(names):
            raise TypeError(f"{self.name} takes {len(names)} arguments beside the runtime: {', '.join(names)}")
        twice = set(names[: len(args)]) & set(kwargs)
        if twice:
            raise TypeError(f"{self.name} got {', '.join(sorted(twice))} twice")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    # --- for frameworks ----------------------------------------------------------------------

    @property
    def func(self) -> Callable[..., str]:
        """The plain function, as `Tool` itself is called: ``func(runtime, "why", …)``."""
        return self.__call__

    @property
    def coroutine(self) -> Callable[..., Coroutine[Any, Any, str]]:
        """The coroutine function: ``await coroutine(runtime, "why", …)``."""
        return self._coroutine

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return schema_of(self.args_model)

    def to_openai(self) -> dict[str, Any]:
        """The tool as an entry of ``tools`` in OpenAI's chat API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def to_anthropic(self) -> dict[str, Any]:
        """The tool as an entry of ``tools`` in Anthropic's messages API."""
        return {"name": self.name, "description": self.description, "input_schema": self.parameters}
