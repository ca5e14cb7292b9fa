"""Settings for people: what is in force and where it came from, secrets hidden; and a file to begin with."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from sandfleet.config.keys import SECTIONS, Leaf, leaves
from sandfleet.config.loading import Loaded
from sandfleet.config.urls import HIDDEN, scrubbed

__all__ = ["HIDDEN", "as_document", "as_yaml", "default_text", "scrubbed", "starter"]

_COLUMN = 46
#: Defaults that differ from machine to machine, as they are told.
_DEFAULTS = {
    "data_root": "~/.local/share/sandfleet",
    "run_root": "/tmp/sandfleet-UID",
}
_HEAD = """\
# The configuration of sandfleet: https://yaml.org, one file for clients, schedulers and nodes.
# Found as ./sandfleet.yaml or ~/.config/sandfleet/config.yaml; --config FILE or SANDFLEET_CONFIG names another.
# Lines that begin with `#` are the defaults: take the `#` away to change one. What an environment variable in
# brackets says wins over this file. `sandfleet config check` reads it, `sandfleet config show` tells what is in force.
#
# A value that is a whole `$NAME` is taken from the environment: password-free files can be committed.
"""
_TAIL = """\
# Chosen by SANDFLEET_ENV and laid over what stands above:
# profiles:
#   dev:
#     sandbox:
#       replicas: 2
"""


def as_document(loaded: Loaded) -> dict[str, Any]:
    """What is in force, as JSON: each key with its value, where it came from and its variable."""
    settings = {}
    for leaf in leaves():
        value, hidden = _shown(leaf, leaf.of(loaded.settings))
        settings[leaf.key] = {"value": value, "hidden": hidden, "source": loaded.source(leaf.name), "env": leaf.env}
    return {
        "file": str(loaded.file) if loaded.file else None,
        "profile": loaded.profile or None,
        "settings": settings,
        "notices": [{"key": note.key, "text": note.text, "warning": note.warning} for note in loaded.notices],
    }


def as_yaml(loaded: Loaded, *, only_set: bool = False) -> str:
    """What is in force, as a file that loads again: each key with its source in a comment, hidden ones as comments.

    Args:
        only_set: Leave out what is at its default.
    """
    lines: list[str] = []
    for section, members in _sections():
        shown = [leaf for leaf in members if not only_set or leaf.name in loaded.found]
        if shown:
            lines += [f"{section}:", *_nested(shown, lambda leaf: _line(leaf, loaded))]
    return "\n".join(lines) + "\n" if lines else "{}\n"


def starter() -> str:
    """A file to begin with: every key with its description and its default, all but the first commented out."""
    parts = [_HEAD]
    for section, members in _sections():
        lines = [f"# {SECTIONS.get(section, '')}".rstrip(), f"{section}:"]
        parts.append("\n".join([*lines, *_nested(members, _offered)]) + "\n")
    return "\n".join([*parts, _TAIL])


def default_text(leaf: Leaf) -> str:
    """The default as it would be written in the file."""
    return _DEFAULTS.get(leaf.name) or _yaml(_plain(leaf.default()))


def _sections() -> Iterable[tuple[str, list[Leaf]]]:
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves():
        found.setdefault(leaf.key.partition(".")[0], []).append(leaf)
    return found.items()


def _nested(members: list[Leaf], write: Any) -> list[str]:
    """The lines of a section, its inner mappings (`tools.glob.max_results`) opened where they begin."""
    lines: list[str] = []
    inside = ""
    for leaf in members:
        between = leaf.key.split(".")[1:-1]
        if between and between[0] != inside:
            lines.append(f"  {between[0]}:")
        inside = between[0] if between else ""
        lines += ["  " * (1 + len(between)) + line for line in write(leaf)]
    return lines


def _line(leaf: Leaf, loaded: Loaded) -> list[str]:
    value, hidden = _shown(leaf, leaf.of(loaded.settings))
    last = leaf.key.rpartition(".")[2]
    source = loaded.source(leaf.name)
    if hidden and isinstance(value, dict):
        return [_commented(f"# {last}:", source), *(f"#   {name}: {HIDDEN}" for name in value)]
    if hidden:
        return [_commented(f"# {last}: {value}", source)]
    return [_commented(f"{last}: {_yaml(value)}", source)]


def _commented(text: str, comment: str) -> str:
    return f"{text.ljust(_COLUMN)}  # {comment}"


def _offered(leaf: Leaf) -> list[str]:
    words = f"{leaf.info.description} [{leaf.env}]"
    if leaf.used_by is not None:
        words = f"{words} {about(leaf)}"
    last = leaf.key.rpartition(".")[2]
    mark = "" if leaf.name == "backend" else "# "
    return [*(f"# {line}" for line in textwrap.wrap(words, 112)), f"{mark}{last}: {default_text(leaf)}"]


def about(leaf: Leaf) -> str:
    """Who reads a setting that not every process does, in words; empty for the others."""
    if leaf.used_by is None:
        return ""
    if not leaf.used_by:
        return "Checked, not enforced by this version."
    return f"For the backend{'s'[: len(leaf.used_by) > 1]} {', '.join(leaf.used_by)}."


def _shown(leaf: Leaf, value: Any) -> tuple[Any, bool]:
    """The value as it may be shown, and whether something is hidden in it."""
    plain = _plain(value)
    if not plain:
        return plain, False
    if isinstance(plain, str) and (leaf.name.endswith("_url") or leaf.name in ("http_proxy", "docker_host")):
        return scrubbed(plain), scrubbed(plain) != plain
    if not leaf.secret:
        return plain, False
    return (dict.fromkeys(plain, HIDDEN) if isinstance(plain, dict) else HIDDEN), True


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(_escaped(value), default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _escaped(value: Any) -> Any:
    """A `$` at the beginning would be read as a variable."""
    if isinstance(value, str):
        return f"${value}" if value.startswith("$") else value
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value
