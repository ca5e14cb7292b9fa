"""Sandboxes in containers of an AIO image (``ghcr.io/agent-infra/sandbox`` and its like): the image's own HTTP server
on its port, nothing of ours inside but the thread's directories and the mounts.

The Docker SDK is an extra: importing this package does not need it, using the backend does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandfleet.errors import ConfigError

if TYPE_CHECKING:
    from sandfleet_workers.backends.aio.backend import AioBackend

__all__ = ["AioBackend"]


def __getattr__(name: str) -> Any:
    if name != "AioBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from sandfleet_workers.backends.aio.backend import AioBackend  # noqa: PLC0415  (it needs the extra)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in {"docker", "requests"}:
            raise
        raise ConfigError(
            "the aio backend needs the Docker SDK: pip install 'sandfleet[docker]'", key="sandbox.backend"
        ) from exc
    return AioBackend
