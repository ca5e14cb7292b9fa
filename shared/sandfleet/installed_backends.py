"""The sandbox technologies that are installed on this machine, by the entry points they declare."""

from __future__ import annotations

from importlib.metadata import entry_points

from sandfleet.backends import SandboxBackend
from sandfleet.errors import ConfigError

__all__ = ["backend_class", "backend_names"]

_GROUP = "sandfleet.backends"


def backend_names() -> list[str]:
    """Their names, sorted."""
    return sorted({entry.name for entry in entry_points(group=_GROUP)})


def backend_class(name: str) -> type[SandboxBackend]:
    """The backend of that name. What else its import raises is its own affair.

    Raises:
        ConfigError: None is installed.
    """
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        known = ", ".join(backend_names())
        raise ConfigError(f"no backend {name!r}; there are {known} (SANDFLEET_BACKEND)", key="backend")
    kind: type[SandboxBackend] = found[0].load()
    return kind
