"""What every command shares: where the fleet is, how to speak, and how a failure ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from sandfleet.cli.output import show
from sandfleet.cli.running import find_running
from sandfleet.config import Settings
from sandfleet.errors import (
    CapacityError,
    ConfigError,
    RequestRejected,
    SandfleetError,
    StoreUnavailable,
    Unavailable,
)
from sandfleet.provider import SandboxProvider
from sandfleet.store import Store, open_store

__all__ = ["Cli", "advice", "exit_code", "fleet_command", "pass_cli", "signals_as_interrupt"]

F = TypeVar("F", bound=Callable[..., Any])


class Cli:
    """The state of one invocation: the global options and what they lead to."""

    def __init__(self) -> None:
        self.redis_url: str | None = None
        self.prefix: str | None = None
        self.json = False

    def settings(self, **given: Any) -> Settings:
        """Settings from the options, the environment, or the running ``sandfleet up``, in this order.

        Raises:
            ConfigError: One of them is wrong.
        """
        settings = Settings.load(**{"redis_url": self.redis_url, "prefix": self.prefix, **given})
        if self.redis_url or os.environ.get("SANDFLEET_REDIS_URL") or os.environ.get("REDIS_URL"):
            return settings
        running = find_running(settings.run_root)
        if running is None:
            return settings
        return Settings.load(
            **{
                "redis_url": str(running.get("redis_url")),
                "prefix": self.prefix or str(running.get("prefix")),
                "backend": running.get("backend") if not os.environ.get("SANDFLEET_BACKEND") else None,
                **given,
            }
        )

    @contextmanager
    def store(self) -> Iterator[Store]:
        """The fleet's state."""
        settings = self.settings()
        store = open_store(settings.redis_url, settings.prefix, allow_insecure=settings.allow_insecure_redis)
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def provider(self, **given: Any) -> Iterator[SandboxProvider]:
        """A provider whose holds end with the command."""
        # The provider would wait for a Redis that is away; a person wants to know at once.
        with self.store() as store:
            store.now_ms()
        with SandboxProvider(self.settings(**given)) as provider:
            yield provider

    def show(self, document: dict[str, Any], text: Callable[[], None]) -> None:
        """Print the document, or let ``text`` print for a person."""
        show(document, text, as_json_document=self.json)


pass_cli = click.make_pass_decorator(Cli, ensure=True)


def fleet_command(name: str, **attributes: Any) -> Callable[[F], click.Command]:
    """A command that also takes the global options after its name."""

    def decorate(function: F) -> click.Command:
        command: click.Command = click.command(name, cls=click.Command, **attributes)(function)
        command.params.extend(global_options())
        return command

    return decorate


def global_options() -> list[click.Option]:
    """``--redis-url``, ``--prefix`` and ``--json``, which work before and after a command's name."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Cli), str(param.name), value)

    shared: dict[str, Any] = {"expose_value": False, "callback": keep, "is_eager": True}
    return [
        click.Option(
            ["--redis-url"],
            metavar="URL",
            help="Redis of the fleet.  [SANDFLEET_REDIS_URL, REDIS_URL, or that of your running `sandfleet up`]",
            **shared,
        ),
        click.Option(["--prefix"], metavar="TEXT", help="Prefix of the fleet's keys (SANDFLEET_PREFIX).", **shared),
        click.Option(["--json"], is_flag=True, help="Print one JSON document.", **shared),
    ]


def exit_code(error: SandfleetError) -> int:
    """2: mend configuration or call · 3: the fleet is away or full · 4: the sandbox, file or command."""
    if isinstance(error, ConfigError | RequestRejected):
        return 2
    if isinstance(error, Unavailable | CapacityError):
        return 3
    return 4


def advice(error: SandfleetError) -> str | None:
    """What to type next, where the message does not say it."""
    if isinstance(error, StoreUnavailable) and error.facts.get("reason") in ("refused", "connection", "timeout"):
        return "start a fleet here with `sandfleet up`, or name a running one: --redis-url redis://HOST:6379/0"
    if isinstance(error, StoreUnavailable) and error.facts.get("reason") == "auth":
        return "put the password in the URL: --redis-url redis://:PASSWORD@HOST:6379/0"
    if "sandfleet " in error.message:
        return None
    if error.code in ("sandbox_not_found", "sandbox_lost"):
        return "`sandfleet ls` lists the sandboxes there are"
    if isinstance(error, Unavailable | CapacityError):
        return "`sandfleet doctor` looks for the reason"
    return None


class signals_as_interrupt:  # noqa: N801  (reads as a statement)
    """SIGTERM and SIGHUP end a command as Ctrl-C does: in order, with nothing left behind.

    SIGINT too, because a shell starts its background jobs with SIGINT ignored.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._interrupt) for number in self._NUMBERS}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt
