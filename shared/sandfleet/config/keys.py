"""The one table of settings: each has one key in the file and one environment variable.

Loading, ``sandfleet config``, docs/configuration.md and the environment of child processes are made from it. A field
that is added to `Settings` is in it at once, below the section its name begins with, else below ``node``; give it a
better place in ``_PLACES``.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sandfleet.config.models import Mount
from sandfleet.config.settings import Settings

__all__ = ["ENV_PREFIX", "SECTIONS", "Leaf", "leaf_by_env", "leaf_by_key", "leaf_by_name", "leaves"]

ENV_PREFIX = "SANDFLEET_"

#: Sections in the order in which they are shown.
SECTIONS = {
    "redis": "Where the fleet's state and queues are.",
    "sandbox": "What a sandbox is and how many there may be. DeerFlow's names are understood too.",
    "node": "What one machine of the fleet does.",
    "checkpoints": "Copies of threads' data that outlive their machine.",
    "local": "Sandboxes of the `local` backend.",
    "client": "The process that uses sandboxes.",
    "tools": "Limits of the agent tools.",
    "read_before_write": "A gate before the writing tools.",
    "skills": "The directory of skills that sandboxes see read-only.",
    "metrics": "Prometheus.",
    "flower": "The task dashboard.",
}

# Section -> key -> field. A key that is the field's own name is given as it is.
_PLACES: dict[str, tuple[str, ...]] = {
    "redis": ("url=redis_url", "allow_insecure=allow_insecure_redis", "prefix"),
    "sandbox": (
        "use", "backend", "replicas", "overflow_policy", "acquire_timeout_s", "on_lost", "burst_limit", "max_per_user",
        "idle_timeout_s", "active_idle_timeout_s", "max_age_s", "lifecycle", "destroy_on_release",
        "blank_pool", "reserve_free", "command_timeout_s", "max_job_s", "output_bytes", "tmp_bytes", "nofile",
        "allow_host_bash", "mounts", "environment", "env_inherit", "env_whitelist", "env_blacklist",
        "bash_output_max_chars", "read_file_output_max_chars", "ls_output_max_chars",
        # Of containers: what runs, what it may take, what it may reach, who may ask for more, how it is made.
        "image", "image_pull_policy", "registry_config", "runtime", "preset", "container_user",
        "memory_bytes", "cpus", "pids", "disk_bytes", "disk_inodes", "network_mode", "docker_network",
        "allowed_images", "allowed_options", "docker_host", "container_prefix", "temp_dir", "port=container_port",
    ),
    "node": (
        "id=node_id", "backends", "labels", "data_root", "run_root", "concurrency", "start_concurrency",
        "start_timeout_s", "max_queue", "max_lane", "max_queue_bytes", "lease_s", "drain_timeout_s",
        "detach_s", "cordon_after_failures", "min_free_bytes",
    ),
    "checkpoints": (
        "url=checkpoint_url", "options=checkpoint_options", "on_release=checkpoint_on_release",
        "every_s=checkpoint_every_s", "keep=checkpoint_keep", "max_bytes=checkpoint_max_bytes",
    ),
    "local": ("uid_base", "uid_count", "max_nproc"),
    "client": ("queue_timeout_s", "agent_ttl_s", "client_bytes", "fleet_bytes", "publish"),
    "tools": (
        "glob.max_results=glob_max_results", "grep.max_results=grep_max_results",
        "write_file.max_bytes=write_file_max_bytes",
    ),
    "read_before_write": ("enabled=read_before_write",),
    "skills": ("path=skills_path", "container_path=skills_container_path"),
    "metrics": ("address=metrics_address",),
    "flower": ("task_events",),
}  # fmt: skip

# Fields of these groups stand directly below `sandbox:`.
_FLAT_GROUPS = ("container", "cloud", "guard")
#: Settings that not every backend of their group reads; those that none reads yet have none.
_READ_BY: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(
        (
            "registry_config", "allowed_images", "allowed_options", "runtime", "container_user", "docker_host",
            "docker_network",
        ),
        ("docker", "aio"),
    ),
    "preset": ("docker",),
    "container_port": ("aio", "kubernetes"),
    **dict.fromkeys(
        (
            "image_pull_secrets", "memory_request_bytes", "cpu_request", "provisioner_url", "provisioner_api_key",
            "kubeconfig_path",
        ),
        ("kubernetes",),
    ),
    **dict.fromkeys(("allowed_domains", "blocked_domains", "http_proxy"), ()),
    # By the node, whatever its backends.
    **dict.fromkeys(("persistent_volume", "restore_on_start"), None),
}  # fmt: skip
_SECRET_WORDS = ("password", "secret", "token", "api_key", "access_key")

Shape = Literal["scalar", "list", "mapping", "mounts"]


@dataclass(frozen=True)
class Leaf:
    """One setting.

    Attributes:
        path: Where it lies in `Settings`: one field, or a group and its field.
        key: Its dotted key in the file.
        info: The field: type, default, description.
        used_by: Backends that alone read it; None when every process may.
    """

    path: tuple[str, ...]
    key: str
    info: FieldInfo
    used_by: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Its short name, which no other setting has: ``image``."""
        return self.path[-1]

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def secret(self) -> bool:
        """Whether its value must not be shown."""
        named_so = self.shape == "scalar" and any(word in self.name for word in _SECRET_WORDS)
        return not self.info.repr or named_so

    @property
    def shape(self) -> Shape:
        """How it is written: one value, a list, a mapping, or the list of mounts."""
        kind = _plain(self.info.annotation)
        if typing.get_origin(kind) is tuple:
            return "mounts" if typing.get_args(kind)[0] is Mount else "list"
        return "mapping" if typing.get_origin(kind) in (Mapping, dict) else "scalar"

    @property
    def takes_text(self) -> bool:
        """Whether a number in the file is meant as it is written (`1.10`, not 1.1)."""
        return _plain(self.info.annotation) is str

    @property
    def is_flag(self) -> bool:
        """Whether it is true or false."""
        return _plain(self.info.annotation) is bool

    @property
    def is_path(self) -> bool:
        """Whether it is a path on this machine."""
        return _type_name(_plain(self.info.annotation)) == "Path"

    @property
    def type_text(self) -> str:
        """Its type, as the documentation tells it."""
        kind = _plain(self.info.annotation)
        if typing.get_origin(kind) is Literal:
            return ", ".join(f"`{value}`" for value in typing.get_args(kind))
        if self.name.endswith("_bytes"):
            return "size"
        shapes = {"list": "list of text", "mapping": "mapping of text", "mounts": "list of mounts"}
        words = {"str": "text", "bool": "true or false", "int": "number", "float": "number", "Path": "path"}
        return shapes.get(self.shape) or words[_type_name(kind)]

    def of(self, settings: Settings) -> Any:
        """Its value in ``settings``."""
        value: Any = settings
        for part in self.path:
            value = getattr(value, part)
        return value

    def default(self) -> Any:
        """What it is when nobody says otherwise, on this machine."""
        return self.info.get_default(call_default_factory=True, validated_data={})


@functools.cache
def leaves() -> tuple[Leaf, ...]:
    """Every setting, in the order in which they are shown."""
    places = {name: f"{section}.{key}" for section, key, name in _places()}
    found = list(_walk(places))
    order = {section: number for number, section in enumerate(SECTIONS)}
    position = {name: number for number, name in enumerate(places)}

    def rank(leaf: Leaf) -> tuple[int, bool, int]:
        section = order.get(leaf.key.partition(".")[0], len(order))
        return section, leaf.used_by is not None, position.get(leaf.name, len(position))

    return tuple(sorted(found, key=rank))


@functools.cache
def leaf_by_key() -> dict[str, Leaf]:
    """Key in the file -> setting."""
    return {leaf.key: leaf for leaf in leaves()}


@functools.cache
def leaf_by_name() -> dict[str, Leaf]:
    """Short name -> setting."""
    return {leaf.name: leaf for leaf in leaves()}


@functools.cache
def leaf_by_env() -> dict[str, Leaf]:
    """Environment variable -> setting."""
    return {leaf.env: leaf for leaf in leaves()}


def _places() -> Iterator[tuple[str, str, str]]:
    for section, entries in _PLACES.items():
        for entry in entries:
            key, _, name = entry.partition("=")
            yield section, key, name or key


def _walk(places: Mapping[str, str]) -> Iterator[Leaf]:
    for name, info in Settings.model_fields.items():
        kind = info.annotation
        if name in _FLAT_GROUPS or (isinstance(kind, type) and issubclass(kind, BaseModel)):
            used_by = getattr(kind, "used_by", None)
            section = "sandbox" if name in _FLAT_GROUPS else name
            for inner, inner_info in typing.cast(type[BaseModel], kind).model_fields.items():
                key = places.get(inner) or f"{section}.{inner}"
                yield Leaf((name, inner), key, inner_info, _READ_BY.get(inner, used_by))
        else:
            yield Leaf((name,), places.get(name) or _guess(name), info)


def _guess(name: str) -> str:
    section, _, rest = name.partition("_")
    return f"{section}.{rest}" if rest and section in SECTIONS else f"node.{name}"


def _plain(annotation: Any) -> Any:
    """The type without ``| None``."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    return annotation


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
