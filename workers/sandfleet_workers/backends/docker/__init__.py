"""Sandboxes in containers of a Docker engine (or of Podman's, which speaks the same API).

The Docker SDK is an extra: importing this package does not need it, using the backend does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandfleet.errors import ConfigError

if TYPE_CHECKING:
    from sandfleet_workers.backends.docker.backend import DockerBackend

__all__ = ["DockerBackend"]


def __getattr__(name: str) -> Any:
    if name != "DockerBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from sandfleet_workers.backends.docker.backend import DockerBackend  # noqa: PLC0415  (it needs the extra)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in {"docker", "requests"}:
            raise
        raise ConfigError(
            "the docker backend needs the Docker SDK: pip install 'sandfleet[docker]'", key="sandbox.backend"
        ) from exc
    return DockerBackend
