"""What one layer of the configuration says: a file, or a profile in it, as settings with the place of each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandfleet.config.document import Item
from sandfleet.config.environ import from_text
from sandfleet.config.found import Found, Layer, Notice, nearest
from sandfleet.config.keys import Leaf, leaf_by_key, leaf_by_name
from sandfleet.config.models import Mount
from sandfleet.config.seeds import (
    ALIASES,
    FOREIGN_SECTIONS,
    KINDS,
    NO_EFFECT,
    TOOLS_LIST,
    backend_of_class,
    class_notice,
)
from sandfleet.errors import ConfigError

__all__ = ["read_layer"]

_REFERENCE = re.compile(r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})", re.ASCII)
_TOOLS = {"glob": "glob_max_results", "grep": "grep_max_results"}
_OWNERSHIP_SECONDS, _OWNERSHIP_TIMES = 30.0, 4.0


def read_layer(
    sections: Mapping[str, Item],
    path: Path,
    environ: Mapping[str, str],
    *,
    profile: str = "",
    only_keys: bool = False,
) -> Layer:
    """What ``sections`` say, the seeds' spellings understood and ``$VAR`` replaced.

    Args:
        path: The file, for messages and for paths that are relative to it.
        profile: The profile that ``sections`` are, if they are one.
        only_keys: It is not in force, so variables need not be set here; what can be checked without them is.

    Raises:
        ConfigError: A key is unknown, given under two names, or of the wrong shape; a variable is missing.
    """
    reader = _Reader(path, environ, profile, set(sections), only_keys=only_keys)
    for name, item in sections.items():
        reader.section(name, item)
    return reader.layer


class _Reader:
    def __init__(
        self, path: Path, environ: Mapping[str, str], profile: str, sections: set[str], *, only_keys: bool
    ) -> None:
        self.layer = Layer()
        self._only_keys = only_keys
        self._path = path
        self._environ = environ
        self._source = f"{path} profile {profile}" if profile else str(path)
        self._before = f"profiles.{profile}." if profile else ""
        self._profile = profile
        # A new version of DeerFlow may have sections that this list does not know yet.
        self._foreign = bool(sections & FOREIGN_SECTIONS)
        #: A provider class of the user's own may have keys of its own below `sandbox:`.
        self._own_class = ""
        self._special: dict[str, Callable[[str, Item], None]] = {
            "sandbox.use": self._use,
            "sandbox.kind": self._kind,
            "sandbox.ownership": self._ownership,
            "sandbox.config.volumes": self._volumes,
            "sandbox.config.use_docker": self._use_docker,
        }
        self._known = {*leaf_by_key(), *ALIASES, *NO_EFFECT, *self._special}
        self._prefixes = {key.rsplit(".", depth)[0] for key in self._known for depth in range(1, key.count(".") + 1)}

    def section(self, name: str, item: Item) -> None:
        if name == "sandbox" and isinstance(item.value, dict):
            use = item.value.get("use")
            if use is not None and isinstance(use.value, str) and backend_of_class(use.value) is None:
                self._own_class = use.value
        if name == "tools" and isinstance(item.value, list):
            self._tools(item)
        elif name in self._prefixes:
            self._walk(name, item)
        elif name in FOREIGN_SECTIONS or (self._foreign and not nearest(name, self._prefixes)):
            self._tell(name, f"`{name}` does not concern sandboxes and is passed over")
        else:
            raise self._unknown(name, item)

    # --- what a key may be -------------------------------------------------------------------

    def _walk(self, key: str, item: Item) -> None:
        if key in self._known and self._is_unknown(item):
            return
        if key in self._special:
            if item.value is not None:
                self._special[key](key, item)
        elif key in NO_EFFECT:
            self._no_effect(key, item)
        elif key in leaf_by_key():
            self._take(leaf_by_key()[key], key, item)
        elif key in ALIASES:
            alias = ALIASES[key]
            self._take(leaf_by_name()[alias.name], key, item, alias.convert)
        elif key not in self._prefixes:
            wrong = self._unknown(key, item)
            if not (self._own_class and key.startswith("sandbox.")):
                raise wrong
            self._tell(key, f"{wrong.message.partition(': ')[2]}; it is left to {self._own_class}", warning=True)
        elif isinstance(item.value, dict):
            for name, child in item.value.items():
                self._walk(f"{key}.{name}", child)
        elif item.value is not None:
            raise self._wrong(key, item, "must be a mapping: its keys stand below it, indented")

    def _unknown(self, key: str, item: Item) -> ConfigError:
        parent, _, last = key.rpartition(".")
        before = f"{parent}." if parent else ""
        here = {name.removeprefix(before).partition(".")[0] for name in self._known if name.startswith(before)}
        elsewhere = sorted(name for name in self._known if name.rpartition(".")[2] == last)
        if elsewhere:
            below = elsewhere[0].rpartition(".")[0]
            hint = f"; did you mean `{elsewhere[0]}`, indented below `{below}:`?"
        else:
            hint = nearest(last, here if parent else {*here, "profiles"})
        return self._wrong(key, item, f"is no setting{hint or '; `sandfleet config show` lists all of them'}")

    def _take(self, leaf: Leaf, key: str, item: Item, convert: Callable[[Any], Any] | None = None) -> None:
        if item.value is None:
            # An empty value is none, as in DeerFlow; in a profile it takes the file's value back.
            self.layer.unset.add(leaf.name)
            return
        value = self._value(leaf, key, item)
        if convert is not None:
            try:
                value = convert(value)
            except ValueError as exc:
                raise self._wrong(key, item, str(exc)) from None
        self._put(leaf.name, value, key, item)

    def _put(self, name: str, value: Any, key: str, item: Item) -> None:
        earlier = self.layer.values.get(name)
        if name == "backend" and self.layer.backend_by_class:
            self.layer.backend_by_class = False  # a backend that is named wins over a class that stands for one
        elif earlier is not None:
            raise self._wrong(key, item, f"is the same setting as `{earlier.key}` in line {earlier.line}; keep one")
        self.layer.values[name] = Found(value, self._source, self._before + key, item.line)

    def _is_unknown(self, item: Item) -> bool:
        """Whether it is a variable of a profile that is only checked, and so without a value to check."""
        return self._only_keys and isinstance(item.value, str) and _REFERENCE.fullmatch(item.value) is not None

    # --- values ------------------------------------------------------------------------------

    def _value(self, leaf: Leaf, key: str, item: Item) -> Any:
        if leaf.shape == "mapping" and isinstance(item.value, dict):
            lenient = leaf.name == "environment"
            return {name: self._text(f"{key}.{name}", child, lenient) for name, child in item.value.items()}
        if leaf.shape == "mounts" and isinstance(item.value, list):
            return [self._mount(f"{key}[{n}]", child) for n, child in enumerate(item.value)]
        if leaf.shape == "list" and isinstance(item.value, list):
            return [self._text(f"{key}[{n}]", child, False) for n, child in enumerate(item.value)]
        value = self._expand(key, item)
        if leaf.shape != "scalar":
            if not isinstance(value, str):
                raise self._wrong(key, item, f"must be a {leaf.type_text}")
            listed = from_text(leaf, value)
            if isinstance(listed, str):
                raise self._wrong(key, item, f"must be a {leaf.type_text}")
            return listed
        if isinstance(value, dict | list):
            raise self._wrong(key, item, "must be one value")
        if isinstance(value, bool) and not leaf.is_flag and not leaf.takes_text:
            # `replicas: yes` would otherwise be 1.
            raise self._wrong(key, item, f"must be a {leaf.type_text}, not true or false")
        if leaf.takes_text and not isinstance(value, str):
            return item.text
        return self._local_path(value) if leaf.is_path and isinstance(value, str) else value

    def _mount(self, key: str, item: Item) -> Any:
        if not isinstance(item.value, dict):
            raise self._wrong(key, item, "must be a mapping of host_path, container_path and read_only")
        for name, child in item.value.items():
            if name not in Mount.model_fields:
                raise self._wrong(f"{key}.{name}", child, f"is no setting{nearest(name, Mount.model_fields)}")
        return self._expand(key, item)

    def _text(self, key: str, item: Item, lenient: bool) -> str:
        """A value that is text whatever it looks like: `1.10` and `yes` stay as they are written."""
        if isinstance(item.value, dict | list):
            raise self._wrong(key, item, "must be text")
        if item.value is None:
            return ""
        value = self._expand(key, item, lenient=lenient)
        return value if isinstance(value, str) else item.text or ""

    def _expand(self, key: str, item: Item, *, lenient: bool = False) -> Any:
        if isinstance(item.value, dict):
            return {name: self._expand(f"{key}.{name}", child) for name, child in item.value.items()}
        if isinstance(item.value, list):
            return [self._expand(f"{key}[{n}]", child) for n, child in enumerate(item.value)]
        if not isinstance(item.value, str) or not item.value.startswith("$"):
            return item.value
        if item.value.startswith("$$"):
            return item.value[1:]
        found = _REFERENCE.fullmatch(item.value)
        if found is None:
            if re.match(r"\$[\w{]", item.value):
                raise self._wrong(key, item, "only a whole value may be a variable; write `$$` for a plain `$`")
            return item.value
        name = found["name"] or found["braced"]
        if name in self._environ:
            return self._environ[name]
        if self._only_keys:
            return ""
        if lenient:
            self._tell(key, f"the variable {name} is not set in this process; {key} is empty", warning=True)
            return ""
        raise self._wrong(key, item, f"the environment variable {name} is not set", variable=name)

    def _local_path(self, text: str) -> str:
        path = Path(text).expanduser() if text.startswith("~") else Path(text)
        return str(path if path.is_absolute() else Path(os.path.abspath(self._path.parent / path)))

    # --- the seeds' shapes -------------------------------------------------------------------

    def _use(self, key: str, item: Item) -> None:
        path = self._expand(key, item)
        backend = backend_of_class(path) if isinstance(path, str) else None
        if backend is None:
            self._take(leaf_by_key()[key], key, item)
            return
        self._put("use", "", key, item)
        if backend and "backend" not in self.layer.values:
            self._put("backend", backend, key, item)
            self.layer.backend_by_class = True
            self._tell(key, class_notice(path, backend))

    def _kind(self, key: str, item: Item) -> None:
        kind = self._expand(key, item)
        if kind not in KINDS:
            known = ", ".join(KINDS)
            raise self._wrong(key, item, f"must be one of {known}{nearest(str(kind), KINDS)}")
        self._backend_of_kind(KINDS[kind], key, item)

    def _use_docker(self, key: str, item: Item) -> None:
        if not isinstance(item.value, bool):
            raise self._wrong(key, item, "must be true or false")
        if item.value:
            self._backend_of_kind("docker", key, item)

    def _backend_of_kind(self, backend: str, key: str, item: Item) -> None:
        named = self.layer.values.get("backend")
        if named is not None and named.key.endswith((".kind", ".use_docker")):
            if backend != "docker":
                return  # `use_docker` came first and is the more special
            del self.layer.values["backend"]
            self.layer.notices = [notice for notice in self.layer.notices if notice.key != named.key]
        self._put("backend", backend, key, item)
        self._tell(key, f"understood as `backend: {backend}`")

    def _volumes(self, key: str, item: Item) -> None:
        volumes = self._expand(key, item)
        names = {"source": "host_path", "target": "container_path", "readonly": "read_only"}
        if not isinstance(volumes, list) or not all(isinstance(one, dict) for one in volumes):
            raise self._wrong(key, item, "must be a list of source, target and readonly")
        for number, volume in enumerate(volumes):
            for name in volume.keys() - names.keys():
                raise self._wrong(f"{key}[{number}].{name}", item, f"is no setting{nearest(name, names)}")
        mounts = [{names[name]: value for name, value in volume.items()} for volume in volumes]
        self._put("mounts", mounts, key, item)

    def _ownership(self, key: str, item: Item) -> None:
        """DeerFlow's record of who owns a sandbox. Ours is in Redis anyway: its place and its patience count."""
        known = ("type", "redis_url", "renewal_interval_seconds", "ttl_multiplier", "key_prefix")
        if not isinstance(item.value, dict):
            raise self._wrong(key, item, "must be a mapping")
        for name, child in item.value.items():
            if name not in known:
                raise self._wrong(f"{key}.{name}", child, f"is no setting{nearest(name, known)}")
        given = {name: child for name, child in item.value.items() if child.value is not None}
        kind = given.get("type")
        if kind is not None and not self._is_unknown(kind):
            named = self._expand(f"{key}.type", kind)
            if named not in ("memory", "redis"):
                hint = nearest(str(named), ("memory", "redis"))
                raise self._wrong(f"{key}.type", kind, f"must be memory or redis{hint}")
        self._tell(f"{key}.type", "who owns a sandbox is always kept in Redis, by its node")
        if "redis_url" in given:
            self._take(leaf_by_name()["redis_url"], f"{key}.redis_url", given["redis_url"])
        if "key_prefix" in given:
            text = self._text(f"{key}.key_prefix", given["key_prefix"], False)
            self._put("prefix", text if text.endswith(":") else f"{text}:", f"{key}.key_prefix", given["key_prefix"])
        if given.keys() & {"renewal_interval_seconds", "ttl_multiplier"}:
            seconds = self._number(f"{key}.renewal_interval_seconds", given, _OWNERSHIP_SECONDS, least=0.001)
            times = self._number(f"{key}.ttl_multiplier", given, _OWNERSHIP_TIMES, least=2)
            said = next(name for name in ("renewal_interval_seconds", "ttl_multiplier") if name in given)
            self._put("agent_ttl_s", seconds * times, f"{key}.{said}", given[said])

    def _number(self, key: str, given: Mapping[str, Item], default: float, *, least: float) -> float:
        item = given.get(key.rpartition(".")[2])
        if item is None or self._is_unknown(item):
            return default
        value = self._expand(key, item)
        try:
            number = float(value) if not isinstance(value, bool) else -1.0
        except (TypeError, ValueError):
            number = -1.0
        if not least <= number < 1e9:
            raise self._wrong(key, item, f"must be a number of at least {least:g}")
        return number

    def _tools(self, item: Item) -> None:
        """DeerFlow's list of tools: the two caps in it count, the rest is its own business."""
        for number, entry in enumerate(item.value):
            key = f"tools[{number}]"
            if not isinstance(entry.value, dict) or "name" not in entry.value:
                raise self._wrong(key, entry, "must be a mapping with a `name`")
            cap = entry.value.get("max_results")
            name = _TOOLS.get(str(entry.value["name"].value))
            if name is not None and cap is not None:
                self._cap(leaf_by_name()[name], f"{key}.max_results", cap)
        self._tell("tools", TOOLS_LIST)

    def _cap(self, leaf: Leaf, key: str, item: Item) -> None:
        value = self._value(leaf, key, item)
        most = next(bound.le for bound in leaf.info.metadata if hasattr(bound, "le"))
        if isinstance(value, int) and value <= 0:
            self._tell(key, f"{value} stands for the default")
        elif isinstance(value, int) and value > most:
            self._tell(key, f"{value} is above the limit; it is {most}")
            self._put(leaf.name, most, key, item)
        else:
            self._put(leaf.name, value, key, item)

    # --- words -------------------------------------------------------------------------------

    def _no_effect(self, key: str, item: Item) -> None:
        kind, why = NO_EFFECT[key]
        if item.value is None:
            return
        value = self._expand(key, item)
        fits = isinstance(value, int | float) and not isinstance(value, bool) if kind is float else None
        if not (fits if fits is not None else isinstance(value, kind)):
            names = {bool: "true or false", float: "a number", str: "text", list: "a list"}
            raise self._wrong(key, item, f"must be {names[kind]}")
        self._tell(key, f"`{key}` has no effect: {why}")

    def _tell(self, key: str, text: str, *, warning: bool = False) -> None:
        self.layer.notices.append(Notice(self._before + key, text, warning))

    def _wrong(self, key: str, item: Item, what: str, **facts: Any) -> ConfigError:
        return ConfigError(
            f"{self._path}:{item.line}: {self._before}{key}: {what}",
            key=self._before + key,
            file=str(self._path),
            line=item.line,
            **facts,
        )
