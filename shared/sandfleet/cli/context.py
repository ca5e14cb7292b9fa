"""What every command shares: where the fleet is, how to speak, and how a failure ends."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from sandfleet.acquiring import ON_LOST
from sandfleet.cli.output import show
from sandfleet.cli.running import find_running
from sandfleet.config import Loaded, Settings, load_settings
from sandfleet.config.environ import NO_FILE
from sandfleet.config.found import Found
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

__all__ = ["Cli", "advice", "exit_code", "fleet_command", "on_lost_option", "pass_cli", "signals_as_interrupt"]

_CONFIG = "SANDFLEET_CONFIG"
_RUNNING = "your running `sandfleet up`"

F = TypeVar("F", bound=Callable[..., Any])


class Cli:
    """The state of one invocation: the global options and what they lead to."""

    def __init__(self) -> None:
        self.redis_url: str | None = None
        self.prefix: str | None = None
        self.json = False

    def settings(self, **given: Any) -> Settings:
        """Settings from the options, the environment, the file, or the running ``sandfleet up``, in this order.

        Raises:
            ConfigError: One of them is wrong.
        """
        return self.loaded(**given).settings

    def loaded(self, **given: Any) -> Loaded:
        """The same, with where each comes from."""
        loaded = load_settings(**{"redis_url": self.redis_url, "prefix": self.prefix, **given})
        if "redis_url" in loaded.found:
            return loaded
        running = find_running(loaded.settings.run_root)
        if running is None:
            return loaded
        told = {
            name: str(running[name]) for name in ("redis_url", "prefix", "backend", "data_root") if running.get(name)
        }
        taken = {name: value for name, value in told.items() if name not in loaded.found}
        meant = {name: value for name, value in given.items() if value is not None}
        loaded = load_settings(**{"prefix": self.prefix, **taken, **meant})
        found = {name: Found(value, _RUNNING, name) for name, value in taken.items()}
        return dataclasses.replace(loaded, found={**loaded.found, **found})

    def named_redis(self, **given: Any) -> str | None:
        """The Redis that an option, a variable or the file names; None when none of them does."""
        loaded = load_settings(**{"redis_url": self.redis_url, **given})
        return loaded.settings.redis_url if "redis_url" in loaded.found else None

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


on_lost_option = click.option(
    "--on-lost",
    type=click.Choice(ON_LOST),
    help="When the machine with the thread's files is away: wait for it, begin with its newest checkpoint, or with "
    "nothing.  [the setting on_lost]",
)


def fleet_command(name: str, **attributes: Any) -> Callable[[F], click.Command]:
    """A command that also takes the global options after its name."""

    def decorate(function: F) -> click.Command:
        command: click.Command = click.command(name, cls=click.Command, **attributes)(function)
        command.params.extend(global_options())
        return command

    return decorate


def global_options() -> list[click.Option]:
    """``--config``, ``--redis-url``, ``--prefix`` and ``--json``, which work before and after a command's name."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            setattr(ctx.ensure_object(Cli), str(param.name), value)

    def name_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value:
            ctx.find_root().call_on_close(_name_file(value))

    shared: dict[str, Any] = {"expose_value": False, "callback": keep, "is_eager": True}
    return [
        click.Option(
            ["--config"],
            metavar="FILE",
            help="Configuration file.  [SANDFLEET_CONFIG, ./sandfleet.yaml, ~/.config/sandfleet/config.yaml]",
            **{**shared, "callback": name_file},
        ),
        click.Option(
            ["--redis-url"],
            metavar="URL",
            help="Redis of the fleet; `ps` shows everybody a password that stands here, not one in a variable or "
            "the file.  [SANDFLEET_REDIS_URL, REDIS_URL, the file's, that of your `sandfleet up`]",
            **shared,
        ),
        click.Option(["--prefix"], metavar="TEXT", help="Prefix of the fleet's keys (SANDFLEET_PREFIX).", **shared),
        click.Option(["--json"], is_flag=True, help="Print one JSON document.", **shared),
    ]


def _name_file(file: str) -> Callable[[], None]:
    """Name the file in this process' environment, where every part and every child looks; how to take it back."""
    before = os.environ.get(_CONFIG)
    os.environ[_CONFIG] = os.path.abspath(os.path.expanduser(file)) if file != NO_FILE else file

    def take_back() -> None:
        if before is None:
            os.environ.pop(_CONFIG, None)
        else:
            os.environ[_CONFIG] = before

    return take_back


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
        return "put the password in the URL: SANDFLEET_REDIS_URL=redis://:PASSWORD@HOST:6379/0"
    if "sandfleet " in error.message:
        return None
    if error.code == "no_checkpoint":
        return "`sandfleet checkpoints --thread T` lists what was saved, `sandfleet snapshot --thread T` saves"
    if error.code == "home_unavailable":
        return (
            "start the node that has its files, or go on without: --on-lost restore (its checkpoint) or --on-lost fresh"
        )
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
