"""Settings from all their sources: arguments, environment, the file's profile, the file, defaults; in this order."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sandfleet.config.document import Item, find_file, read_file
from sandfleet.config.environ import from_text
from sandfleet.config.found import Found, Layer, Notice, nearest
from sandfleet.config.keys import ENV_PREFIX, Leaf, leaf_by_name, leaves
from sandfleet.config.layers import read_layer
from sandfleet.config.models import parse_bytes
from sandfleet.config.seeds import backend_of_class, class_notice
from sandfleet.config.settings import Settings
from sandfleet.errors import ConfigError

__all__ = ["Loaded", "load_settings"]

log = logging.getLogger("sandfleet.config")

_PROFILE = ENV_PREFIX + "ENV"
#: What is known to read no more than the table of settings says. Others may read what they like.
_BUILT_IN = frozenset({"local", "host", "mock", "docker", "aio", "kubernetes"})
#: Settings whose silence could be taken for protection.
_PROTECTING = ("_bytes", "cpus", "pids", "disk_inodes", "network_mode", "runtime", "preset")
_INSTEAD = {"image_pull_secrets": " (Docker takes the registries' credentials from `sandbox.registry_config`)"}
_CONTAINERS = frozenset({"docker", "aio"})
_NO_EGRESS_RULES = "nodes refuse `network_mode: restricted`: this version has no rules for it; choose none, or full"
_NOTHING_INHERITED = "sandboxes have no variable of this process unless `env_inherit` names it, and it names none"
_told: set[str] = set()
_told_lock = threading.Lock()


@dataclass(frozen=True)
class Loaded:
    """Settings, and how they came to be.

    Attributes:
        settings: The settings.
        found: Short name → where it was said; what nobody said is not in it.
        notices: What was accepted and deserves a word.
        file: The file that was read.
        profile: The profile that was chosen; empty when none was.
    """

    settings: Settings
    found: Mapping[str, Found]
    notices: tuple[Notice, ...]
    file: Path | None
    profile: str

    def source(self, name: str) -> str:
        """Where a setting comes from, in words: ``default``, ``SANDFLEET_REPLICAS``, ``sandfleet.yaml:12``…"""
        found = self.found.get(name)
        if found is None:
            return "default"
        return found.source if found.line is None else f"{found.source}:{found.line}"


def load_settings(
    environ: Mapping[str, str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    log_notices: bool = True,
    **given: Any,
) -> Loaded:
    """What `Settings.load` gives, with the source of every setting and the notices.

    Args:
        log_notices: Log them, each once per process; False leaves it to the caller to show them.

    Raises:
        ConfigError: As there.
    """
    search = environ is None
    environ = os.environ if environ is None else environ
    path = find_file(environ, named=config, search=search)
    layers, profile = _file_layers(path, environ)
    layers += [_understood(_environment(environ)), _understood(_arguments(given))]
    found, notices = _merged(layers)
    _choose_backend(found, notices)
    _keep_held(found, notices)
    _inherit(found, environ, notices)
    settings = _validated(found)
    notices += _without_effect(settings, found)
    if log_notices:
        _tell(notices)
    return Loaded(settings, found, tuple(notices), path, profile)


# --- the layers --------------------------------------------------------------------------------


def _file_layers(path: Path | None, environ: Mapping[str, str]) -> tuple[list[Layer], str]:
    wanted = environ.get(_PROFILE, "")
    if path is None:
        if wanted:
            raise ConfigError(
                f"{_PROFILE}={wanted} asks for a profile, but there is no configuration file; name one with "
                f"{ENV_PREFIX}CONFIG, or unset {_PROFILE}",
                key="profiles",
            )
        return [], ""
    sections = read_file(path)
    profiles = _profiles(sections.pop("profiles", None), path)
    layers = [read_layer(sections, path, environ)]
    # The others are read too: a mistake in `production` should not wait for production.
    for name, profile in profiles.items():
        if name != wanted:
            read_layer(profile, path, environ, profile=name, only_keys=True)
    if wanted:
        if wanted not in profiles:
            known = ", ".join(profiles) or "none"
            raise ConfigError(
                f"{_PROFILE}={wanted}: {path} has no such profile; it has: {known}{nearest(wanted, profiles)}",
                key="profiles",
                file=str(path),
            )
        layers.append(read_layer(profiles[wanted], path, environ, profile=wanted))
    return layers, wanted


def _profiles(item: Item | None, path: Path) -> dict[str, dict[str, Item]]:
    if item is None or item.value is None:
        return {}
    if not isinstance(item.value, dict):
        raise ConfigError(f"{path}:{item.line}: profiles: must be a mapping of names to sections", key="profiles")
    for name, profile in item.value.items():
        if not isinstance(profile.value, dict | None) or "profiles" in (profile.value or ()):
            raise ConfigError(
                f"{path}:{profile.line}: profiles.{name}: must hold sections such as `sandbox:`",
                key=f"profiles.{name}",
                file=str(path),
                line=profile.line,
            )
    return {name: profile.value or {} for name, profile in item.value.items()}


def _environment(environ: Mapping[str, str]) -> Layer:
    layer = Layer()
    if environ.get("REDIS_URL"):
        layer.values["redis_url"] = Found(environ["REDIS_URL"], "REDIS_URL", "redis_url")
    for leaf in leaves():
        text = environ.get(leaf.env)
        if text:
            layer.values[leaf.name] = Found(from_text(leaf, text), leaf.env, leaf.name)
    return layer


def _arguments(given: Mapping[str, Any]) -> Layer:
    layer = Layer()
    groups = {leaf.path[0] for leaf in leaves() if len(leaf.path) > 1}
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name in groups and value is not None:
            inner = (
                value if isinstance(value, Mapping) else {key: getattr(value, key) for key in value.model_fields_set}
            )
            flat.update(inner)
        elif value is not None:
            flat[name] = value
    for name, value in flat.items():
        if name not in leaf_by_name():
            hint = nearest(name, leaf_by_name())
            raise ConfigError(f"setting {name} is not known{hint}", key=name)
        layer.values[name] = Found(value, "argument", name)
    return layer


def _understood(layer: Layer) -> Layer:
    """A seed's class path outside the file is an alias too."""
    said = layer.values.get("use")
    backend = backend_of_class(said.value) if said is not None and isinstance(said.value, str) else None
    if said is not None and backend is not None:
        layer.values["use"] = dataclasses.replace(said, value="")
        if backend:
            layer.values.setdefault("backend", dataclasses.replace(said, value=backend))
            layer.notices.append(Notice(said.key, class_notice(said.value, backend)))
    return layer


def _merged(layers: list[Layer]) -> tuple[dict[str, Found], list[Notice]]:
    """Later layers win. Of mappings in the file the profile's keys win, the others stay."""
    found: dict[str, Found] = {}
    notices: list[Notice] = []
    for layer in layers:
        for name in layer.unset:
            found.pop(name, None)
        for name, value in layer.values.items():
            below = found.get(name)
            over = value.line is not None and isinstance(value.value, Mapping)
            if over and below is not None and isinstance(below.value, Mapping):
                found[name] = dataclasses.replace(value, value={**below.value, **value.value})
            else:
                found[name] = value
        notices += layer.notices
    return found, notices


# --- what follows from several settings -----------------------------------------------------------


def _choose_backend(found: dict[str, Found], notices: list[Notice]) -> None:
    """A non-empty ``provisioner_url`` selects Kubernetes, unless another backend was named outright."""
    url = found.get("provisioner_url")
    if url is None or not url.value:
        return
    named = found.get("backend")
    if named is None or named.value == "aio":
        found["backend"] = Found("kubernetes", url.source, url.key, url.line)
        notices.append(Notice(url.key, "a provisioner_url is set, so the backend is kubernetes"))
    elif named.value != "kubernetes":
        notices.append(Notice(url.key, f"provisioner_url has no effect: the backend is {named.value}, by {named.key}"))


def _keep_held(found: dict[str, Found], notices: list[Notice]) -> None:
    """The seeds' one `idle_timeout` counts for what is held too: nothing held may end earlier than it says."""
    said = found.get("idle_timeout_s")
    if said is None or not said.key.endswith(".idle_timeout") or "active_idle_timeout_s" in found:
        return
    default = leaf_by_name()["active_idle_timeout_s"].default()
    if isinstance(said.value, int | float) and (said.value == 0 or said.value > default):
        found["active_idle_timeout_s"] = said
        notices.append(Notice(said.key, f"counts for held sandboxes too: `active_idle_timeout_s: {said.value:g}`"))


def _inherit(found: dict[str, Found], environ: Mapping[str, str], notices: list[Notice]) -> None:
    wanted = found.get("env_inherit")
    if wanted is None or not isinstance(wanted.value, list | tuple):
        return
    allowed, denied = (_names(found.get(name)) for name in ("env_whitelist", "env_blacklist"))
    copied: dict[str, str] = {}
    for name in (str(item) for item in wanted.value):
        if any(fnmatch.fnmatchcase(name, glob) for glob in denied):
            notices.append(Notice(wanted.key, f"{name} is not copied: env_blacklist", warning=True))
        elif allowed and not any(fnmatch.fnmatchcase(name, glob) for glob in allowed):
            notices.append(Notice(wanted.key, f"{name} is not copied: env_whitelist does not have it", warning=True))
        elif name in environ:
            copied[name] = environ[name]
        else:
            notices.append(Notice(wanted.key, f"{name} is not copied: it is not set in this process", warning=True))
    own = found.get("environment")
    if copied and (own is None or isinstance(own.value, Mapping)):
        value = {**copied, **(own.value if own else {})}
        place = own or wanted
        found["environment"] = Found(value, place.source, place.key, place.line)


def _names(found: Found | None) -> list[str]:
    return [str(item) for item in found.value] if found and isinstance(found.value, list | tuple) else []


def _without_effect(settings: Settings, found: Mapping[str, Found]) -> list[Notice]:
    """A word for every setting that was given and that nothing here reads."""
    notices = []
    offered = {settings.backend, *settings.offered}
    for leaf in leaves():
        said = found.get(leaf.name)
        value = leaf.of(settings)
        # The environment of a child has every setting, the defaults too.
        if said is None or leaf.used_by is None or not value or (said.line is None and value == leaf.default()):
            continue
        if not leaf.used_by:
            text = f"`{said.key}` is checked but not enforced by this version"
            notices.append(Notice(said.key, text, warning=True))
        elif offered <= _BUILT_IN and offered.isdisjoint(leaf.used_by):
            readers, instead = ", ".join(leaf.used_by), _INSTEAD.get(leaf.name, "")
            text = f"`{said.key}` has no effect with the backend {settings.backend}; it is for {readers}{instead}"
            notices.append(Notice(said.key, text, warning=leaf.name.endswith(_PROTECTING)))
    return notices + _without_their_other_half(settings, found)


def _without_their_other_half(settings: Settings, found: Mapping[str, Found]) -> list[Notice]:
    """The same for settings that need another one beside them."""
    offered = (settings.backend, *settings.offered)
    if settings.container.network_mode == "restricted" and not _CONTAINERS.isdisjoint(offered):
        restricted = [Notice(found["network_mode"].key, _NO_EGRESS_RULES, warning=True)]
    else:
        restricted = []
    reasons = {
        "allow_host_bash": settings.allow_host_bash
        and "host" not in offered
        and f"sandboxes of the backend {settings.backend} run commands anyway; `backend: host` is the host mode",
        "env_whitelist": settings.env_whitelist and not settings.env_inherit and _NOTHING_INHERITED,
        "env_blacklist": settings.env_blacklist and not settings.env_inherit and _NOTHING_INHERITED,
        "overflow_policy": settings.overflow_policy == "burst"
        and not settings.burst_limit
        and "`burst` is as good as `wait` where nodes have no `burst_limit`, and it is 0 here",
    }
    return restricted + [
        Notice(found[name].key, why if name == "overflow_policy" else f"`{found[name].key}` has no effect: {why}")
        for name, why in reasons.items()
        if why and name in found
    ]


# --- the result --------------------------------------------------------------------------------


def _validated(found: Mapping[str, Found]) -> Settings:
    values: dict[str, Any] = {}
    for leaf in leaves():
        if leaf.name not in found:
            continue
        said = found[leaf.name]
        value = said.value
        if leaf.name.endswith("_bytes"):
            try:
                value = parse_bytes(value)
            except ValueError as exc:
                raise _wrong(leaf, said, (), str(exc)) from None
        into = values
        for part in leaf.path[:-1]:
            into = into.setdefault(part, {})
        into[leaf.name] = value
    try:
        return Settings(**values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = tuple(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
    at = _leaf_at(where) or _leaf_in(message)
    if at is None or at.name not in found:
        raise ConfigError(f"setting {'.'.join(map(str, where))}: {message}", key=".".join(map(str, where)))
    raise _wrong(at, found[at.name], where[len(at.path) :], message)


def _leaf_at(where: tuple[int | str, ...]) -> Leaf | None:
    return next((leaf for leaf in leaves() if where[: len(leaf.path)] == leaf.path), None)


def _leaf_in(message: str) -> Leaf | None:
    """The setting that a check of several settings begins its message with."""
    return leaf_by_name().get(message.partition("[")[0])


def _wrong(leaf: Leaf, said: Found, inner: tuple[int | str, ...], message: str) -> ConfigError:
    within = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner if part != "[key]")
    if not inner and message.startswith(f"{leaf.name}["):
        # A check of several settings, which named the one at fault itself.
        within, _, message = message.removeprefix(leaf.name).partition(": ")
    if said.line is None:
        where = "" if said.source == "argument" else f" ({said.source})"
        return ConfigError(f"setting {leaf.name}{within}{where}: {message}", key=leaf.name)
    return ConfigError(
        f"{said.source}:{said.line}: {said.key}{within}: {message}",
        key=f"{said.key}{within}",
        file=said.source,
        line=said.line,
    )


def _tell(notices: list[Notice]) -> None:
    """Log each notice once per process: settings are loaded again and again."""
    for notice in notices:
        with _told_lock:
            if notice.text in _told:
                continue
            _told.add(notice.text)
        level = logging.WARNING if notice.warning else logging.INFO
        log.log(level, "config.notice %s: %s", notice.key, notice.text)
