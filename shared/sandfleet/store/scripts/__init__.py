"""The Lua scripts: one file per transition, shared parts under ``lib/`` named by a ``--@use`` line."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

__all__ = ["Script", "load", "names"]

_USE = re.compile(r"^--@use (.+)$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
_HEAD = "local P, A, call = KEYS[1], ARGV, redis.call\n"


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the server gets it; ``sha`` is how it is called."""

    name: str
    text: str
    sha: str


@functools.cache
def load(name: str) -> Script:
    """The script of that name with its shared parts in front."""
    folder = resources.files(__name__)
    body = folder.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    use = _USE.search(body)
    parts = use.group(1).split() if use else []
    libs = [folder.joinpath("lib", f"{part}.lua").read_text(encoding="utf-8") for part in parts]
    text = _HEAD + _COMMENT.sub("", "\n".join([*libs, body]))
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def names() -> list[str]:
    """Every script there is."""
    return sorted(f.name.removesuffix(".lua") for f in resources.files(__name__).iterdir() if f.name.endswith(".lua"))
