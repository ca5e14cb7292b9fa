"""Sandbox technologies of a node, found by name.

A backend is declared under the entry point group ``sandfleet.backends``; those that come with
sandfleet resolve without an installed distribution, so a source tree works as it lies.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from sandfleet.backends import SandboxBackend
from sandfleet.errors import ConfigError

__all__ = ["GROUP", "known_backends", "load_backend"]

GROUP = "sandfleet.backends"

_BUILT_IN = {
    "aio": "sandfleet_workers.backends.aio:AioBackend",
    "docker": "sandfleet_workers.backends.docker:DockerBackend",
    "host": "sandfleet_workers.backends.host:HostBackend",
    "local": "sandfleet_workers.backends.local:LocalBackend",
    "mock": "sandfleet.testing.backend:MockBackend",
}


def _declared() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def known_backends() -> list[str]:
    """The names `load_backend` knows here and now, sorted."""
    return sorted({*_BUILT_IN, *_declared()})


def load_backend(name: str) -> type[SandboxBackend]:
    """The backend class of that name.

    Raises:
        ConfigError: No such name, or what is declared under it cannot be used.
    """
    if name in _BUILT_IN:
        # A distribution cannot take the place of a built-in name.
        module, _, attribute = _BUILT_IN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        found = _load_declared(name)
    if not (isinstance(found, type) and issubclass(found, SandboxBackend)):
        raise ConfigError(f"sandbox.backend {name!r} names {found!r}, which is no SandboxBackend class")
    return found


def _load_declared(name: str) -> object:
    entry = _declared().get(name)
    if entry is None:
        raise ConfigError(
            f"unknown sandbox.backend {name!r}; known here: {', '.join(known_backends())}", key="sandbox.backend"
        )
    try:
        return entry.load()
    except Exception as exc:  # importing foreign code may fail in any way
        raise ConfigError(f"sandbox.backend {name!r} ({entry.value}) cannot be imported: {exc!r}") from exc
