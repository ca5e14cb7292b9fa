"""Commands that run processes: ``up``, ``scheduler``, ``worker``."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from sandfleet.backends import shown_backend
from sandfleet.cli.context import Cli, fleet_command, pass_cli, signals_as_interrupt
from sandfleet.cli.output import note
from sandfleet.cli.running import Announcement
from sandfleet.config import Settings
from sandfleet.connection import redacted
from sandfleet.errors import ConfigError
from sandfleet.flower import DEFAULT_PORT, check_flower, new_password
from sandfleet.installed_backends import backend_class
from sandfleet.model import SandboxSpec
from sandfleet.stack import Stack, child_environ
from sandfleet.store import open_store

__all__ = ["COMMANDS"]

_WATCH_S = 0.5


@fleet_command("up", short_help="Run a whole fleet on this machine.")
@click.option("--nodes", type=click.IntRange(1, 64), default=1, show_default=True, help="Node processes to run.")
@click.option("--replicas", type=click.IntRange(1, 100_000), help="Sandboxes each node holds at most.  [16]")
@click.option("--backend", help="What a sandbox is: docker, aio, local (bubblewrap), host (not isolated).  [local]")
@click.option("--data-root", type=click.Path(file_okay=False, path_type=Path), help="Where threads' files lie.")
@click.option("--durable", is_flag=True, help="The private Redis writes every change to disk.")
@click.option("--flower", is_flag=True, help="Run Flower too: every task in a browser.")
@click.option("--flower-port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@pass_cli
def up(cli: Cli, /, nodes: int, durable: bool, flower: bool, flower_port: int, **given: Any) -> int:
    """Run a whole fleet on this machine, in the foreground: Redis, a scheduler and nodes.

    A private Redis is started unless an option, a variable or the configuration file names one. While it runs, your
    other sandfleet commands find it by themselves. Ctrl-C ends everything.

    \b
    Examples:
      sandfleet up --nodes 2
      sandfleet up --backend docker
      sandfleet exec --thread alice -- uname -a       # in another terminal
      sandfleet up --flower
    """
    return _up(cli, nodes, durable, flower_port if flower else None, given)


@fleet_command("scheduler", short_help="Run one scheduler.")
@click.option("--loglevel", default="INFO", show_default=True)
@pass_cli
def scheduler(cli: Cli, loglevel: str) -> NoReturn:
    """Run one scheduler. Any number may run; they share their work.

    It gives threads their places, answers for nodes that died, and takes what plain Celery callers send.

    \b
    Examples:
      export SANDFLEET_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379/0
      sandfleet scheduler
    """
    _become("sandfleet_scheduler", cli.settings(), ["--loglevel", loglevel])


@fleet_command("worker", short_help="Run one node, which holds sandboxes.")
@click.option("--node-id", metavar="ID", help="This node's id.  [first free <host>-<n>]")
@click.option("--replicas", type=click.IntRange(1, 100_000), help="Sandboxes this node holds at most.  [16]")
@click.option("--backend", "backends", multiple=True, help="A backend to offer; may be repeated.  [local]")
@click.option("--data-root", type=click.Path(file_okay=False, path_type=Path), help="Where threads' files lie.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="What placement may ask for.")
@click.option("--concurrency", type=click.IntRange(1, 256), help="Threads that start operations.  [8]")
@click.option("--loglevel", default="INFO", show_default=True)
@pass_cli
def worker(cli: Cli, /, loglevel: str, backends: tuple[str, ...], labels: tuple[str, ...], **given: Any) -> NoReturn:
    """Run one node: it takes sandboxes for as long as it runs. It only dials out, to Redis.

    Any machine that reaches Redis joins like this, also behind NAT. SIGTERM ends it in order: `sandfleet drain`.

    \b
    Examples:
      export SANDFLEET_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379/0
      sandfleet worker --replicas 32
      sandfleet worker --node-id gpu-1 --label gpu=yes --label zone=a
    """
    wrong = [label for label in labels if not re.fullmatch(r"[^=,]+=[^,]*", label)]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE (without commas)", param_hint="--label")
    if backends:
        given.update(backend=backends[0], backends=backends)
    if labels:
        given["labels"] = dict(label.split("=", 1) for label in labels)
    settings = cli.settings(**given)
    # In the environment too, but `ps` should tell nodes apart.
    named = ["--node-id", settings.node_id] if settings.node_id else []
    _become("sandfleet_workers", settings, [*named, "--loglevel", loglevel])


@fleet_command("flower", short_help="Run Flower: every task in a browser.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--user", "flower_user", help="Who may log in.  [sandfleet]")
@pass_cli
def flower(cli: Cli, address: str, port: int, flower_user: str | None) -> NoReturn:
    """Run Flower for a fleet, with a password: SANDFLEET_FLOWER_PASSWORD, or a new one that is printed once.

    Nodes and schedulers send what it shows when they run with SANDFLEET_TASK_EVENTS=1. Put TLS in front of it before
    it listens on anything but loopback.

    \b
    Examples:
      export SANDFLEET_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379/0
      sandfleet flower
    """
    check_flower()
    settings = cli.settings(flower_user=flower_user)
    if not settings.flower_password:
        settings = settings.model_copy(update={"flower_password": new_password()})
        note(f"Flower's password for {settings.flower_user}, told this once: {settings.flower_password}")
    note(f"Flower at http://{address}:{port}/")
    _become("sandfleet.flower", settings, ["--address", address, "--port", str(port)])


def _become(package: str, settings: Settings, arguments: list[str]) -> NoReturn:
    """Turn this process into a role, which signals and supervisors then see as the command they started."""
    store = open_store(settings.redis_url, settings.prefix, allow_insecure=settings.allow_insecure_redis)
    try:
        store.now_ms()  # a Redis that is away is told better from here
    finally:
        store.close()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", package, *arguments], child_environ(settings))


# --- up ----------------------------------------------------------------------------------------


def _up(cli: Cli, nodes: int, durable: bool, flower_port: int | None, given: dict[str, Any]) -> int:
    settings = Settings.load(redis_url=cli.redis_url, prefix=cli.prefix, **given)
    _check_backends(settings)
    redis_url = cli.named_redis(**given)
    prefix = "node" if redis_url is None else _host()
    announcement = Announcement(settings.run_root)
    try:
        with signals_as_interrupt():
            stack = Stack(
                [f"{prefix}-{n + 1}" for n in range(nodes)],
                redis_url=redis_url,
                durable=durable,
                # A node id cannot begin with a dot, so no node's directory is in the way.
                state_dir=settings.run_root / ".up",
                flower_port=flower_port,
                **{**given, "prefix": cli.prefix, "data_root": settings.data_root, "run_root": settings.run_root},
            )
            also = "" if flower_port is None else " and Flower"
            note(f"starting {'' if redis_url else 'Redis, '}a scheduler, {nodes} node{'s'[: nodes > 1]}{also} …")
            try:
                stack.start()
                facts = _facts(stack)
                announcement.tell(facts)
                new = not settings.flower_password
                cli.show(
                    {**facts, **_flower_facts(stack, new=new)},
                    lambda: _welcome(stack, own_redis=redis_url is None, new_password=new),
                )
                sys.stdout.flush()
                return _watch(stack)
            except KeyboardInterrupt:
                return 0
            finally:
                note("stopping …")
                stack.stop()
    finally:
        announcement.close()


def _check_backends(settings: Settings) -> None:
    """Look before anything is started: nodes would end one after the other and tell it in their logs.

    Raises:
        ConfigError: A backend cannot run here; the message says what to do.
    """
    for name in settings.offered:
        kind = backend_class(name)
        problems = list(kind.check())
        found = [] if problems else kind.examine(settings)
        problems += [f"{each.found}: {each.advice}" for each in found if each.status == "fail" and not each.ready]
        if problems:
            raise ConfigError(f"sandboxes of the backend {name} cannot run here: {problems[0]}", key="sandbox.backend")


def _host() -> str:
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")[:32]
    return name or "host"


def _facts(stack: Stack) -> dict[str, Any]:
    settings = stack.settings
    return {
        "pid": os.getpid(),
        "redis_url": settings.redis_url,
        "prefix": settings.prefix,
        "backend": settings.backend,
        "isolation": backend_class(settings.backend).isolation,
        "nodes": list(stack.node_ids),
        "data_root": str(settings.data_root),
        "log_dir": str(stack.log_dir),
    }


def _flower_facts(stack: Stack, *, new: bool) -> dict[str, Any]:
    """Where Flower is; a password that was made for this run is told here and nowhere else."""
    if stack.flower_port is None:
        return {}
    facts = {"flower_url": f"http://127.0.0.1:{stack.flower_port}/", "flower_user": stack.settings.flower_user}
    return {**facts, "flower_password": stack.settings.flower_password} if new else facts


def _welcome(stack: Stack, *, own_redis: bool, new_password: bool) -> None:
    settings = stack.settings
    if stack.redis is not None:
        click.echo(f"Redis      pid {stack.redis.pid:<8} {redacted(settings.redis_url)}")
    else:
        click.echo(f"Redis      {redacted(settings.redis_url)}")
    click.echo(f"scheduler  pid {stack.scheduler.pid}")
    for node_id, process in stack.nodes.items():
        click.echo(
            f"{node_id:<10} pid {process.pid:<8} {settings.replicas} sandboxes at most, "
            f"backend {shown_backend(settings.backend)}"
        )
    click.echo(f"isolation  {backend_class(settings.backend).isolation}")
    if stack.flower_port is not None:
        secret = f"password {settings.flower_password} (told this once)" if new_password else "your password"
        click.echo(f"Flower     http://127.0.0.1:{stack.flower_port}/  user {settings.flower_user}, {secret}")
    click.echo(f"data in    {settings.data_root}")
    click.echo(f"logs in    {stack.log_dir}")
    click.echo("")
    click.echo("In another terminal:")
    click.echo("  sandfleet exec --thread alice -- python3 -c 'print(6 * 7)'")
    click.echo("  sandfleet ls")
    if own_redis:
        click.echo("For an agent backend (the URL holds the password):")
        click.echo(f"  export SANDFLEET_REDIS_URL={settings.redis_url}")
    if settings.backend != SandboxSpec().backend:
        click.echo(f"  export SANDFLEET_BACKEND={settings.backend}")
    click.echo("Ctrl-C ends it all.")


def _watch(stack: Stack) -> int:
    """Until interrupted: say when a process ended by itself; without Redis or any node there is nothing left to do."""
    told: set[str] = set()
    never = threading.Event()
    while True:
        crashed: Mapping[str, str] = stack.crashed()
        for name in crashed.keys() - told:
            told.add(name)
            note(
                f"sandfleet: {name} ended by itself ({crashed[name]}); "
                f"the end of {stack.log(name)}:\n{stack.tail(name)}"
            )
        if "redis" in crashed or "scheduler" in crashed or all(node in crashed for node in stack.node_ids):
            return 3
        never.wait(_WATCH_S)


COMMANDS = (up, scheduler, worker, flower)
