"""How sandfleet reaches Redis: safe URLs only, no silent retries, errors that say what to do."""

from __future__ import annotations

import ipaddress
import os
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from sandfleet.config.urls import redis_url_problem
from sandfleet.errors import ConfigError, InsecureRedis, InternalError, SandfleetError, StoreUnavailable

__all__ = ["ALLOW_INSECURE", "check_server", "check_url", "connect", "redacted", "translate"]

ALLOW_INSECURE = "SANDFLEET_ALLOW_INSECURE_REDIS"
SOCKET_TIMEOUT_S = 5.0
_OLDEST = (6, 2)


def check_url(url: str, *, allow_insecure: bool = False) -> None:
    """Refuse a Redis that anybody on the network could command.

    Whoever reaches it can run a shell in every sandbox, so a URL must be loopback, a unix socket or
    carry a password.

    Raises:
        InsecureRedis: It is none of these and nobody allowed it.
        ConfigError: It is not a Redis URL.
    """
    parts = _split(url)
    if allow_insecure or os.environ.get(ALLOW_INSECURE, "").lower() in ("1", "true", "yes"):
        return
    if parts.scheme == "unix" or parts.password or parse_qs(parts.query).get("password"):
        return
    if not _is_loopback(parts.hostname or "localhost"):
        raise InsecureRedis(
            f"{redacted(url)} is reachable from the network and has no password; whoever reaches it commands "
            f"every sandbox. Put one in the URL (redis://:PASSWORD@{parts.hostname}:{parts.port or 6379}/0) "
            f"or set {ALLOW_INSECURE}=1 if the network itself is private.",
            url=redacted(url),
        )


def connect(url: str, *, blocking: bool = False, name: str = "", decode: bool = True) -> redis.Redis:
    """A client that never repeats a command on its own.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        blocking: For commands that wait in the server: no socket timeout, so give it a connection of its own.
        name: Shown by ``CLIENT LIST``.
        decode: Answers as text; False gives bytes.

    Raises:
        ConfigError: It is not a Redis URL.
    """
    _split(url)
    try:
        options = _options(blocking=blocking, name=name, decode=decode)
        if url.startswith("unix:"):
            for tcp_only in ("socket_keepalive", "maint_notifications_config"):
                del options[tcp_only]
        client: redis.Redis = redis.Redis.from_url(url, **options)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{redacted(url)} cannot be used as a Redis URL: {exc}") from exc
    return client


def _options(*, blocking: bool, name: str, decode: bool) -> dict[str, Any]:
    return {
        "decode_responses": decode,
        "encoding_errors": "replace",
        "protocol": 3,
        "socket_timeout": None if blocking else SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 0,
        # A command whose answer got lost may have run; only the caller knows whether it may run again.
        "retry": Retry(NoBackoff(), 0),
        "client_name": name or None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def check_server(info: dict[str, Any], url: str) -> None:
    """Refuse a server that the scripts do not work on, from its ``INFO``.

    Raises:
        ConfigError: A cluster, or older than 6.2.
    """
    if int(info.get("cluster_enabled", 0) or 0):
        raise ConfigError(
            f"{redacted(url)} is a Redis Cluster; sandfleet's transitions span keys and neither Celery nor its "
            "scripts work there. Use one Redis or Valkey server, if need be behind Sentinel."
        )
    version = str(info.get("redis_version", "0"))
    if tuple(int(n) for n in version.split(".")[:2] if n.isdigit()) < _OLDEST:
        raise ConfigError(f"{redacted(url)} runs Redis {version}; sandfleet needs 6.2 or newer.")


def translate(exc: redis.RedisError, url: str) -> SandfleetError:
    """What a redis-py error means for the caller."""
    where, text = redacted(url), str(exc)
    if isinstance(exc, redis.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return StoreUnavailable(f"Redis at {where} refuses the credentials: {text}", reason="auth")
    if isinstance(exc, redis.BusyLoadingError) or text.startswith("LOADING"):
        return StoreUnavailable(f"Redis at {where} is loading its data", retry_after_s=1.0, reason="loading")
    if isinstance(exc, redis.OutOfMemoryError) or text.startswith("OOM") or "OOM command" in text:
        return StoreUnavailable(f"Redis at {where} is full (maxmemory reached)", retry_after_s=5.0, reason="full")
    if isinstance(exc, redis.ReadOnlyError) or "READONLY" in text:
        return StoreUnavailable(f"Redis at {where} is a read-only replica; use the primary", reason="read_only")
    if text.startswith(("MOVED", "CROSSSLOT", "CLUSTERDOWN")):
        return ConfigError(f"{where} is a Redis Cluster, which sandfleet cannot use")
    if "MISCONF" in text:
        return StoreUnavailable(f"Redis at {where} cannot persist and refuses writes: {text}", reason="misconf")
    if "NOPERM" in text:
        return ConfigError(f"the Redis user at {where} lacks a permission: {text}")
    if isinstance(exc, redis.TimeoutError):
        return StoreUnavailable(f"Redis at {where} did not answer in time", retry_after_s=1.0, reason="timeout")
    if isinstance(exc, redis.ConnectionError):
        reason = "refused" if "refused" in text else "connection"
        return StoreUnavailable(f"Redis at {where} cannot be reached: {text}", retry_after_s=1.0, reason=reason)
    return InternalError(f"{type(exc).__name__}: {text}")


def redacted(url: str) -> str:
    """The URL without credentials, for messages and logs."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return f"unix://{unquote(parts.path)}"
        host = parts.hostname or "localhost"
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 6379}{parts.path}"
    except ValueError:
        return "the Redis URL"


def _split(url: str) -> Any:
    problem = redis_url_problem(url)
    if problem:
        raise ConfigError(f"the Redis URL cannot be used: {problem}", key="redis_url")
    return urlsplit(url)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
