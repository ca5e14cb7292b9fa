"""How sandfleet reaches Redis: safe URLs only, no silent retries, errors that say what to do."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from sandfleet.config.sentinel import SCHEME, Sentinels, parse_sentinels
from sandfleet.config.urls import redis_url_problem
from sandfleet.errors import ConfigError, InsecureRedis, InternalError, SandfleetError, StoreUnavailable

__all__ = ["ALLOW_INSECURE", "check_server", "check_url", "connect", "redacted", "sentinel_options", "translate"]

ALLOW_INSECURE = "SANDFLEET_ALLOW_INSECURE_REDIS"
SOCKET_TIMEOUT_S = 5.0
#: A Sentinel answers from memory, and there are others.
_SENTINEL_TIMEOUT_S = 1.0
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
    if url.startswith(SCHEME):
        _check_sentinels(parse_sentinels(url))
    elif not _is_loopback(parts.hostname or "localhost"):
        raise InsecureRedis(
            f"{redacted(url)} is reachable from the network and has no password; whoever reaches it commands "
            f"every sandbox. Put one in the URL (redis://:PASSWORD@{parts.hostname}:{parts.port or 6379}/0) "
            f"or set {ALLOW_INSECURE}=1 if the network itself is private.",
            url=redacted(url),
        )


def _check_sentinels(found: Sentinels) -> None:
    if not found.password and not all(_is_loopback(host) for host, _ in found.hosts):
        raise InsecureRedis(
            f"{found.shown()} names Sentinels on the network and no password of Redis; whoever reaches that commands "
            f"every sandbox. Put it in the URL (sentinel://:PASSWORD@…) or set {ALLOW_INSECURE}=1 if the network "
            "itself is private.",
            url=found.shown(),
        )


def connect(url: str, *, blocking: bool = False, name: str = "", decode: bool = True) -> redis.Redis:
    """A client that never repeats a command on its own.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, or ``sentinel://``: each connection then asks the Sentinels for
            the primary of this moment.
        blocking: For commands that wait in the server: no socket timeout, so give it a connection of its own.
        name: Shown by ``CLIENT LIST``.
        decode: Answers as text; False gives bytes.

    Raises:
        ConfigError: It is not a Redis URL.
    """
    _split(url)
    options = _options(blocking=blocking, name=name, decode=decode)
    if url.startswith(SCHEME):
        return _by_sentinel(parse_sentinels(url), options)
    try:
        if url.startswith("unix:"):
            for tcp_only in ("socket_keepalive", "maint_notifications_config"):
                del options[tcp_only]
        client: redis.Redis = redis.Redis.from_url(url, **options)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{redacted(url)} cannot be used as a Redis URL: {exc}") from exc
    return client


def _by_sentinel(found: Sentinels, options: dict[str, Any]) -> redis.Redis:
    login = {"username": found.username or None, "password": found.password or None}
    how = {"sentinel_kwargs": sentinel_options(found), "db": found.db, **login, **options}
    asking = Sentinel(list(found.hosts), **how)  # type: ignore[no-untyped-call]
    client: redis.Redis = asking.master_for(found.service)  # type: ignore[no-untyped-call]
    return client


def sentinel_options(found: Sentinels) -> dict[str, Any]:
    """How the Sentinels themselves are asked, as redis-py takes it."""
    return {
        "socket_timeout": _SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
        # The next one is asked instead.
        "retry": Retry(NoBackoff(), 0),
        "username": found.sentinel_username or None,
        "password": found.sentinel_password or None,
    }


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


#: What a server refuses everything for while its state lasts: redis-py's class of it or a word in it, how long, why.
_STATES: tuple[tuple[type[redis.RedisError] | None, str, float | None, str, str], ...] = (
    (MasterNotFoundError, "", 1.0, "no_primary", "cannot be found: no Sentinel answers or knows a primary that works"),
    (redis.AuthenticationError, "NOAUTH|WRONGPASS", None, "auth", "refuses the credentials: {text}"),
    (redis.BusyLoadingError, "LOADING", 1.0, "loading", "is loading its data"),
    (redis.OutOfMemoryError, "OOM", 5.0, "full", "is full (maxmemory reached)"),
    (redis.ReadOnlyError, "READONLY", None, "read_only", "is a read-only replica; use the primary"),
    (None, "NOREPLICAS", 1.0, "no_replicas", "has too few replicas and refuses writes (min-replicas-to-write)"),
    (None, "BUSY", 1.0, "busy", "is busy with somebody's script"),
    (None, "MISCONF", None, "misconf", "cannot persist and refuses writes: {text}"),
    (redis.TimeoutError, "", 1.0, "timeout", "did not answer in time"),
)


def translate(exc: redis.RedisError, url: str) -> SandfleetError:
    """What a redis-py error means for the caller."""
    where, text = redacted(url), str(exc)
    for kind, words, retry_after_s, reason, why in _STATES:
        # Behind a script's own words the code stands anywhere.
        if (kind is not None and isinstance(exc, kind)) or (words and re.search(rf"\b(?:{words})\b", text)):
            return StoreUnavailable(
                f"Redis at {where} {why.format(text=text)}", retry_after_s=retry_after_s, reason=reason
            )
    if text.startswith(("MOVED", "CROSSSLOT", "CLUSTERDOWN")):
        return ConfigError(f"{where} is a Redis Cluster, which sandfleet cannot use")
    if "NOPERM" in text:
        return ConfigError(f"the Redis user at {where} lacks a permission: {text}")
    if isinstance(exc, redis.ConnectionError):
        reason = "refused" if "refused" in text else "connection"
        return StoreUnavailable(f"Redis at {where} cannot be reached: {text}", retry_after_s=1.0, reason=reason)
    return InternalError(f"{type(exc).__name__}: {text}")


def redacted(url: str) -> str:
    """The URL without credentials, for messages and logs."""
    try:
        if url.startswith(SCHEME):
            return parse_sentinels(url).shown()
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
