"""``sandfleet config``: what is in force, whether a file is right, and a file to begin with."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import note, printable
from sandfleet.config.environ import is_setting
from sandfleet.config.found import Notice, nearest
from sandfleet.config.keys import ENV_PREFIX, leaf_by_env
from sandfleet.config.loading import Loaded, load_settings
from sandfleet.config.mounts import check_local_mounts, check_mounts_exist
from sandfleet.config.seeds import CLASSES, KINDS
from sandfleet.config.showing import as_document, as_yaml, starter
from sandfleet.errors import ConfigError

__all__ = ["COMMANDS"]

_DEFAULT_FILE = Path("sandfleet.yaml")
# Read by other parts than `Settings`.
_OTHER_VARIABLES = frozenset(f"{ENV_PREFIX}{name}" for name in ("LOG_FORMAT", "FLOWER_USER", "FLOWER_PASSWORD"))


@click.group("config", short_help="Show, check or begin the configuration.")
def config() -> None:
    """Show, check or begin the configuration.

    One YAML file configures clients, schedulers and nodes. It is found as ./sandfleet.yaml or
    ~/.config/sandfleet/config.yaml; --config or SANDFLEET_CONFIG names another. Environment variables win over it.

    \b
    Examples:
      sandfleet config init
      sandfleet config check
      sandfleet config show --set
    """


@fleet_command("show", short_help="Show what is in force, and where it comes from.")
@click.option("--set", "only_set", is_flag=True, help="Leave out what is at its default.")
@pass_cli
def show(cli: Cli, only_set: bool) -> None:
    """Show every setting that is in force and where it comes from, secrets hidden.

    What is printed is a configuration file itself, but for the hidden values.

    \b
    Examples:
      sandfleet config show
      sandfleet config show --set
      sandfleet config show --json
    """
    loaded = cli.loaded()
    cli.show(as_document(loaded), lambda: click.echo(_readable(as_yaml(loaded, only_set=only_set)), nl=False))


@fleet_command("check", short_help="Check a configuration file.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@pass_cli
def check(cli: Cli, file: Path | None) -> None:
    """Read a configuration file as a process would: the first error, or what deserves a word.

    Without FILE it is the one that would be found. The exit code is 2 for a file that cannot be used.

    \b
    Examples:
      sandfleet config check
      sandfleet config check /etc/sandfleet/config.yaml
      SANDFLEET_ENV=production sandfleet config check
    """
    loaded = load_settings(config=file, log_notices=False)
    settings = loaded.settings
    # Nodes with local sandboxes refuse these, and nobody else: the file can be read, but is of no use there.
    check_local_mounts(settings.mounts, settings.skills_container_path, settings.offered)
    absent = [*_absent_backends(loaded), *_absent_class(loaded), *_absent_directories(loaded)]
    loaded = dataclasses.replace(loaded, notices=(*loaded.notices, *absent))
    strays = _stray_variables()
    document: dict[str, Any] = {
        "ok": True,
        "file": str(loaded.file) if loaded.file else None,
        "profile": loaded.profile or None,
        "notices": as_document(loaded)["notices"],
        "unknown_variables": strays,
    }
    cli.show(document, lambda: _tell(loaded, strays))


@fleet_command("init", short_help="Write a commented configuration file.")
@click.argument("file", required=False, type=click.Path(path_type=Path), default=_DEFAULT_FILE)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@pass_cli
def init(cli: Cli, file: Path, force: bool) -> None:
    """Write a configuration file that has every key with its meaning and its default, commented out.

    \b
    Examples:
      sandfleet config init
      sandfleet config init ~/.config/sandfleet/config.yaml
    """
    _write(file, starter(), force=force)
    document = {"file": str(file), "written": True}
    cli.show(document, lambda: click.echo(f"wrote {printable(str(file))}; `sandfleet config check {file}` reads it"))


def _write(file: Path, text: str, *, force: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        if not file.parent.is_dir():
            file.parent.mkdir(parents=True)
        # For its owner alone: a password may be written into it.
        with open(os.open(file, flags, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError as exc:
        if exc.filename != str(file):
            raise ConfigError(f"{file} cannot be written: {exc.filename} is no directory", key="config") from None
        raise ConfigError(f"{file} is there already; --force writes over it", key="config", file=str(file)) from None
    except OSError as exc:
        raise ConfigError(f"{file} cannot be written: {exc.strerror}", key="config", file=str(file)) from None


def _tell(loaded: Loaded, strays: dict[str, str]) -> None:
    profile = f", profile {loaded.profile}" if loaded.profile else ""
    if loaded.file is None:
        click.echo("no configuration file: defaults and environment variables; `sandfleet config init` writes one")
    else:
        click.echo(f"{printable(str(loaded.file))}{profile} is fine")
    for notice in loaded.notices:
        click.echo(printable(f"{'warning' if notice.warning else 'note'}: {notice.key}: {notice.text}"))
    for variable, hint in strays.items():
        note(printable(f"warning: the environment variable {variable} is no setting{hint}"))


def _absent_backends(loaded: Loaded) -> list[Notice]:
    """A word for each backend that is asked for and that no package here brings. It may be there on the nodes."""
    known = {point.name for point in entry_points(group="sandfleet.backends")}
    key = loaded.found["backend"].key if "backend" in loaded.found else "sandbox.backend"
    return [
        Notice(key, f"no backend {name} is installed on this machine{_meant(name, known)}", warning=True)
        for name in dict.fromkeys((loaded.settings.backend, *loaded.settings.offered))
        if name not in known
    ]


def _meant(name: str, known: Iterable[str]) -> str:
    """The backend that a misspelt one may be; of one that is spelt right, but not here, none."""
    return "" if name in {*KINDS.values(), *CLASSES.values()} else nearest(name, known)


def _absent_class(loaded: Loaded) -> list[Notice]:
    """A word for a provider class whose package is not here. It may be where the agents run."""
    package = loaded.settings.use.partition(":")[0].partition(".")[0]
    if not package or importlib.util.find_spec(package):
        return []
    text = f"{loaded.settings.use}: there is no package {package} on this machine; where agents run, there must be"
    return [Notice(loaded.found["use"].key, text, warning=True)]


def _absent_directories(loaded: Loaded) -> list[Notice]:
    """A word for the first mount, or the skills, whose directory is not here. It may be there on the nodes."""
    try:
        check_mounts_exist(loaded.settings.mounts, loaded.settings.skills_path)
    except ConfigError as exc:
        return [Notice(loaded.found[str(exc.facts["key"])].key, exc.message, warning=True)]
    return []


def _stray_variables() -> dict[str, str]:
    """Variables that look like settings and are none, each with the one that may have been meant.

    They are no errors: a newer or older version may know them.
    """
    found = [name for name in os.environ if name.startswith(ENV_PREFIX)]
    return {
        name: nearest(name, leaf_by_env())
        for name in sorted(found)
        if not is_setting(name) and name not in _OTHER_VARIABLES
    }


def _readable(text: str) -> str:
    return "".join(f"{printable(line)}\n" for line in text.splitlines())


for command in (show, check, init):
    config.add_command(command)

COMMANDS = (config,)
