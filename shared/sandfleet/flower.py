"""``python -m sandfleet.flower``: Celery's Flower for a fleet, with a password, on loopback unless told otherwise.

`sandfleet up --flower` and `sandfleet flower` start it. User, password and the Redis URL come in by environment
variables, so that no process list shows them. Flower's own ``FLOWER_…`` variables work beside ours, except for those
that say where it listens and who may log in.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from sandfleet.config import Settings
from sandfleet.errors import ConfigError, SandfleetError

__all__ = ["DEFAULT_PORT", "check_flower", "free_port", "hears", "new_password", "run_flower"]

DEFAULT_PORT = 5555
_COLUMNS = "name,args,kwargs,worker,state,result,runtime,started,uuid"
_PURGE_AFTER_S = 600
_TASKS_KEPT = 20_000


def check_flower() -> None:
    """Refuse early where Flower is not installed.

    Raises:
        ConfigError: It is not; the message says what to type.
    """
    if importlib.util.find_spec("flower") is None:
        raise ConfigError("Flower is not installed: pip install 'sandfleet[flower]'", key="flower")


def new_password() -> str:
    """A password nobody knows yet."""
    return secrets.token_urlsafe(15)


def free_port(port: int, address: str = "127.0.0.1") -> int:
    """``port`` if nobody listens on it there, or any free one for 0.

    Raises:
        ConfigError: Somebody does, or the address is not this machine's.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # As Flower will: a port whose last connections linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return int(probe.getsockname()[1])
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            what = f"port {port} is taken, and Flower wants it; choose another with --flower-port (of sandfleet up) or "
            raise ConfigError(what + "--port (of sandfleet flower)", key="flower_port") from exc
        raise ConfigError(f"Flower cannot listen on {address} port {port}: {exc.strerror}", key="flower_port") from exc


def hears(port: int, workers: Iterable[str]) -> bool:
    """Whether a Flower on this machine has heard of every worker; what it missed before that it never shows.

    Its metrics need no password: they name workers and tasks.

    Args:
        workers: Names, or what they begin with: ``node-1@``.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=1.0) as answer:
            told = answer.read(10_000_000).decode()
            return all(f'flower_worker_online{{worker="{name}' in told for name in workers)
    except (urllib.error.URLError, OSError):
        return False


def run_flower(settings: Settings, *, address: str, port: int) -> int:
    """Run Flower in this process until it is told to stop; the exit code.

    Raises:
        ConfigError: It is not installed, there is no password, or it cannot listen there.
    """
    check_flower()
    port = free_port(port, address)
    if not settings.flower_password:
        raise ConfigError("Flower needs a password: set SANDFLEET_FLOWER_PASSWORD", key="flower_password")
    # Celery takes a third of a second to import, and `check_flower` does without it.
    from flower.options import options  # noqa: PLC0415  (an extra)

    from sandfleet.celery_app import celery_app  # noqa: PLC0415

    for name in ("FLOWER_BASIC_AUTH", "FLOWER_ADDRESS", "FLOWER_PORT", "FLOWER_UNIX_SOCKET"):
        os.environ.pop(name, None)
    # A flowerconfig.py that happens to lie in the working directory would be run.
    os.environ.setdefault("FLOWER_CONF", os.devnull)
    options.basic_auth = [f"{settings.flower_user}:{settings.flower_password}"]
    options.address, options.port = address, port
    # Flower's own variables are read after this and win.
    options.tasks_columns = _COLUMNS
    options.purge_offline_workers = _PURGE_AFTER_S
    options.max_tasks = _TASKS_KEPT
    app = celery_app(settings, name="sandfleet-flower")
    start: Callable[[list[str]], object] = app.start  # by the stubs it never returns
    code = start(["flower"])
    return code if isinstance(code, int) else 0


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments and run until stopped."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.flower", description="Run Flower for a sandfleet fleet.")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    options = parser.parse_args(argv)
    try:
        return run_flower(Settings.load(), address=options.address, port=options.port)
    except SandfleetError as exc:
        sys.stderr.write(f"sandfleet flower: {exc}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
