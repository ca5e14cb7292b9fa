"""A provider class of the caller's own, named in the configuration by ``sandbox.use``."""

from __future__ import annotations

import importlib
from typing import TypeVar

from sandfleet.errors import ConfigError

__all__ = ["provider_class"]

T = TypeVar("T")


def provider_class(path: str, base: type[T]) -> type[T]:
    """The class that ``package.module:Class`` names.

    Raises:
        ConfigError: It cannot be imported, is no class, or does not derive from ``base``.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        raise ConfigError(
            f"sandbox.use: {module_name} cannot be imported ({type(exc).__name__}: {exc}); install the package, or "
            "leave `use` out for sandfleet's own provider",
            key="sandbox.use",
        ) from exc
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"sandbox.use: {module_name} has no class {name}", key="sandbox.use")
    if not issubclass(found, base):
        raise ConfigError(
            f"sandbox.use: {path} does not derive from sandfleet.{base.__name__}; it must", key="sandbox.use"
        )
    return found
