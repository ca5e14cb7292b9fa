"""What a tool is given beside its arguments: the agent's state, its context and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sandfleet.config import Settings
from sandfleet.errors import InvalidArgument
from sandfleet.provider import SandboxProvider, get_sandbox_provider

__all__ = ["Runtime", "ToolRuntime", "is_ours", "is_set_up", "provider_of", "settings_of", "thread_of"]

_SEED_METHODS = ("acquire", "get", "release")


@runtime_checkable
class Runtime(Protocol):
    """What the tools need of an agent framework's runtime; LangGraph's ``ToolRuntime`` has it.

    ``state`` is the agent's state, a mutable mapping. The tools keep ``state["sandbox"] = {"sandbox_id": …}`` in it,
    ``state["file_reads"]`` when writes need a read before, and ``state["artifacts"]`` when files are presented.

    ``context`` is a mapping that lives as long as one run of one agent, or None. The tools read

    - ``thread_id`` and ``user_id``: whose sandbox (``config["configurable"]`` is looked at next),
    - ``sandbox_provider``: instead of the process' provider,
    - ``sandbox_env``: environment of every command; values of 8 characters or more never appear in its output,

    and write ``sandbox_id`` and ``sandbox_hold`` into it when it is mutable: so `SandboxMiddleware` releases what this
    run acquired, and nothing that belongs to another agent of the same thread.

    ``config`` is the framework's configuration of the run, a mapping, or None.
    """

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The agent's state."""

    @property
    def context(self) -> Any:
        """What lives as long as one run: a mapping or None."""

    @property
    def config(self) -> Any:
        """The run's configuration: a mapping or None."""


@dataclass(slots=True)
class ToolRuntime:
    """A runtime for agents without a framework: ``ToolRuntime(context={"thread_id": "t1"})``."""

    state: MutableMapping[str, Any] = field(default_factory=dict)
    context: MutableMapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def mapping_of(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def thread_of(runtime: Runtime) -> tuple[str | None, str | None]:
    """(thread id, user id) of the runtime: from its context, otherwise from ``config["configurable"]``."""
    context = mapping_of(getattr(runtime, "context", None))
    configurable = mapping_of(mapping_of(getattr(runtime, "config", None)).get("configurable"))
    thread_id = context.get("thread_id") or configurable.get("thread_id")
    user_id = context.get("user_id") or configurable.get("user_id")
    return (str(thread_id) if thread_id else None, str(user_id) if user_id else None)


def provider_of(runtime: Runtime, bound: Any = None) -> Any:
    """The provider a tool uses: the one it is bound to, its context's, otherwise the process' own.

    An async provider is taken for the sync one it stands on: the tools choose the side themselves.
    """
    provider = bound or mapping_of(getattr(runtime, "context", None)).get("sandbox_provider") or get_sandbox_provider()
    return getattr(provider, "_sync", provider)


def settings_of(provider: Any, bound: Settings | None = None) -> Settings:
    """The settings that limit the tools: given ones, otherwise the provider's, otherwise the defaults."""
    if bound is not None:
        return bound
    settings = getattr(provider, "settings", None)
    return settings if isinstance(settings, Settings) else Settings()


def is_set_up(provider: Any) -> bool:
    """Whether it is a `SandboxProvider` that knows its sandboxes; a class written for the seeds never calls our
    ``__init__``."""
    return isinstance(provider, SandboxProvider) and "_targets" in vars(provider)


def is_ours(provider: Any) -> bool:
    """Whether its sandboxes are had in our way, and not by methods of its own: then it has an async twin too."""
    return is_set_up(provider) and all(
        getattr(type(provider), name) is getattr(SandboxProvider, name) for name in _SEED_METHODS
    )


def host_bash_refused(settings: Settings, provider: Any = None) -> bool:
    """Whether commands are refused: sandboxes in host mode, and nobody allowed that."""
    spec = provider.spec if is_set_up(provider) else None
    backend = spec.backend if spec is not None else settings.backend
    return "host" in (backend, settings.backend) and not settings.allow_host_bash


def env_of(runtime: Runtime) -> dict[str, str]:
    """The environment of this run's commands.

    Raises:
        InvalidArgument: ``sandbox_env`` is no mapping of texts.
    """
    env = mapping_of(getattr(runtime, "context", None)).get("sandbox_env")
    if env is None:
        return {}
    if not isinstance(env, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in env.items()):
        raise InvalidArgument("sandbox_env must map names to texts", argument="sandbox_env")
    return dict(env)
