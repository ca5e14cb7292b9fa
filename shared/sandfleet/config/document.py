"""The configuration file: found, read within bounds, and taken apart with the line of every value.

What it says is hostile until it is checked: no tag constructs an object, aliases cannot multiply without end,
a key cannot be given twice, and no message repeats a value.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sandfleet.config.environ import NO_FILE
from sandfleet.errors import ConfigError

__all__ = ["Item", "default_places", "find_file", "read_document", "read_file"]

_MAX_BYTES = 256 * 1024
_MAX_ITEMS = 5_000
_MAX_DEPTH = 32
#: What plain YAML is made of. A tag that somebody wrote asks for more.
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
)
_INIT = "`sandfleet config init` writes one to begin with"


@dataclass(frozen=True, slots=True)
class Item:
    """One value of the file.

    Attributes:
        value: A scalar, a list of items, or a mapping of text to items.
        line: Where it stands, from 1.
        text: A scalar as it was written (``1.10``); None for the others.
    """

    value: Any
    line: int
    text: str | None = None

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def default_places(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a file is looked for when nobody names one, best first."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
    return Path("sandfleet.yaml"), Path(base).expanduser() / "sandfleet" / "config.yaml"


def find_file(environ: Mapping[str, str], *, named: str | os.PathLike[str] | None = None, search: bool) -> Path | None:
    """The file to read: ``named``, else what ``SANDFLEET_CONFIG`` names, else (``search``) one of the usual places.

    Raises:
        ConfigError: The file found at a usual place belongs to somebody else, or others may write to it.
    """
    told = os.fspath(named) if named is not None else environ.get("SANDFLEET_CONFIG", "")
    if told:
        return None if told == NO_FILE else Path(told).expanduser()
    for place in default_places(environ) if search else ():
        try:
            status = place.stat()
        except (OSError, RuntimeError):
            continue
        if _is_trusted(status):
            return place
        raise ConfigError(
            f"{place.absolute()} belongs to somebody else, or everybody may write to it; whoever did would "
            f"command your sandboxes. If you trust it, name it: --config {place}, or SANDFLEET_CONFIG",
            key="config",
            file=str(place),
        )
    return None


def _is_trusted(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & stat.S_IWOTH


def read_file(path: Path) -> dict[str, Item]:
    """The sections of a configuration file.

    Raises:
        ConfigError: It is missing, no regular file, unreadable, too large, not UTF-8, or `read_document` refuses it.
    """
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        _refuse(path, f"does not exist; {_INIT}")
    except (OSError, ValueError) as exc:
        _refuse(path, f"cannot be read: {getattr(exc, 'strerror', None) or exc}")
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            _refuse(path, "is a directory; name a file in it")
        if not stat.S_ISREG(mode):
            _refuse(path, "is no regular file")
        with open(fd, "rb", closefd=False) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        _refuse(path, f"cannot be read: {exc.strerror}")
    finally:
        os.close(fd)
    if len(content) > _MAX_BYTES:
        _refuse(path, f"is larger than {_MAX_BYTES // 1024} KiB; that is no configuration file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        _refuse(path, f"is not UTF-8 (byte {exc.start + 1}, line {line}); save it as UTF-8", line=line)
    return read_document(text, path)


def read_document(text: str, path: Path) -> dict[str, Item]:
    """The sections of a configuration's text; ``path`` is only for messages.

    Raises:
        ConfigError: It is empty, no YAML, no mapping, gives a key twice, or is too big or deep when its aliases are
            followed. The message says the file, and the line where there is one.
    """
    try:
        node = _Bounded(text, path).get_single_node()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = mark.line + 1 if mark else None
        # Without the snippet that PyYAML would add: the line may hold a password.
        what = exc.problem or exc.context or "it does not parse"
        _refuse(path, f"is not valid YAML: {what}", line=line)
    except yaml.YAMLError:
        _refuse(path, "is not valid YAML: it contains characters that YAML does not allow")
    except RecursionError:
        _refuse(path, f"is nested deeper than {_MAX_DEPTH} levels")
    if node is None or _is_null(node):
        _refuse(path, f"is empty; {_INIT}")
    if not isinstance(node, yaml.MappingNode):
        _refuse(path, "is no mapping: it must begin with a section such as `sandbox:`", line=node.start_mark.line + 1)
    found: dict[str, Item] = _Reader(path).item(node, ()).value
    return found


class _Bounded(yaml.SafeLoader):
    """Gives up as soon as there is too much, which is long before all of it was read."""

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self._path = path
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        # A mapping has two nodes for each value.
        if self._nodes > 2 * _MAX_ITEMS:
            _refuse(self._path, f"holds more than {_MAX_ITEMS} values", line=self.get_mark().line + 1)
        return super().compose_node(parent, index)


class _Reader:
    """Walks the nodes once, counting: an alias costs as much as what it stands for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._items = 0
        self._scalars = yaml.SafeLoader("")

    def item(self, node: yaml.Node, where: tuple[str, ...]) -> Item:
        line = node.start_mark.line + 1
        self._items += 1
        if self._items > _MAX_ITEMS:
            _refuse(self._path, f"holds more than {_MAX_ITEMS} values when its aliases are followed", line=line)
        if len(where) > _MAX_DEPTH:
            _refuse(self._path, f"is nested deeper than {_MAX_DEPTH} levels", line=line)
        if node.tag not in _TAGS:
            kind = node.tag.rpartition(":")[2]
            _refuse(self._path, f"the tag {kind} of {_dotted(where)} means nothing here; take it out", line=line)
        if isinstance(node, yaml.MappingNode):
            return Item(self._mapping(node, where), line)
        if isinstance(node, yaml.SequenceNode):
            return Item([self.item(child, (*where, f"[{n}]")) for n, child in enumerate(node.value)], line)
        return Item(self._scalar(node, where), line, node.value)

    def _mapping(self, node: yaml.MappingNode, where: tuple[str, ...]) -> dict[str, Item]:
        found: dict[str, Item] = {}
        merged: dict[str, Item] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._merge(value_node, where, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse(self._path, f"a key below {_dotted(where)} is no text", line=line)
            key = key_node.value
            if key in found:
                first = found[key].line
                _refuse(self._path, f"{_dotted((*where, key))} is given twice, in line {first} too", line=line, key=key)
            # The key's line, which is where a person looks; the value may begin further down.
            found[key] = dataclasses.replace(self.item(value_node, (*where, key)), line=line)
        return {**merged, **found}

    def _merge(self, node: yaml.Node, where: tuple[str, ...], into: dict[str, Item]) -> None:
        """``<<``: what a mapping, or the first of several, says where the mapping itself is silent."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                line = node.start_mark.line + 1
                _refuse(self._path, f"`<<` below {_dotted(where)} needs a mapping", line=line)
            for key, item in self.item(source, (*where, "<<")).value.items():
                into.setdefault(key, item)

    def _scalar(self, node: yaml.Node, where: tuple[str, ...]) -> Any:
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            line = node.start_mark.line + 1
            kind = node.tag.rpartition(":")[2]
            _refuse(self._path, f"{_dotted(where)} cannot be read as {kind}; put it in quotes", line=line)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _dotted(where: tuple[str, ...]) -> str:
    return ".".join(where).replace(".[", "[") or "the top level"


def _refuse(path: Path, what: str, *, line: int | None = None, key: str = "config") -> NoReturn:
    place = f"{path}:{line}" if line else f"{path}"
    separator = ":" if line else ""
    facts = {"line": line} if line else {}
    raise ConfigError(f"configuration file {place}{separator} {what}", key=key, file=str(path), **facts)
