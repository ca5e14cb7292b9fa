"""Settings as environment variables, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sandfleet.config.keys import ENV_PREFIX, Leaf, leaf_by_env, leaves
from sandfleet.config.settings import Settings

__all__ = ["NO_FILE", "from_text", "is_setting", "to_environ"]

#: As a name of the configuration file: there is none, and none is looked for.
NO_FILE = os.devnull


def from_text(leaf: Leaf, text: str) -> Any:
    """What a variable's text says: JSON, or ``key=value,key=value``, or ``a,b``; else the text itself.

    A text that is none of these is given back as it is, and refused where its type is checked.
    """
    if leaf.shape == "scalar":
        return text
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if leaf.shape == "list":
        return parts
    if leaf.shape == "mapping" and all("=" in part for part in parts):
        pairs = (part.partition("=") for part in parts)
        return {key.strip(): value.strip() for key, _, value in pairs}
    # A pair without "=" would be an entry that silently is none.
    return text


def is_setting(variable: str) -> bool:
    """Whether an environment variable says something to `Settings.load`."""
    return variable in leaf_by_env() or variable in (ENV_PREFIX + "CONFIG", ENV_PREFIX + "ENV", "REDIS_URL")


def to_environ(settings: Settings) -> dict[str, str]:
    """The variables from which `Settings.load` reads exactly these settings back, without any file."""
    environ = {ENV_PREFIX + "CONFIG": NO_FILE}
    for leaf in leaves():
        value = leaf.of(settings)
        if value is None or (value == leaf.default() and not value):
            continue
        environ[leaf.env] = _as_text(value)
    return environ


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, tuple):
        return json.dumps([_plain(item) for item in value])
    return str(value)


def _plain(item: Any) -> Any:
    if isinstance(item, BaseModel):
        return item.model_dump(mode="json")
    return str(item) if isinstance(item, Path) else item
