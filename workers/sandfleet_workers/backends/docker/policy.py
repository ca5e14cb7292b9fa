"""What a container may be: the node's settings, and what of a caller's wishes they allow. Pure.

A caller may always ask for less: smaller limits, no network, the stricter preset. It may ask for more, for another
runtime or another image only where the operator's ``allowed_options`` or ``allowed_images`` name it. Whatever else a
container can be given (``privileged``, volumes, capabilities, devices, host namespaces, labels…) is no option at all.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandfleet.config.models import ContainerSettings
from sandfleet.errors import ConfigError, InvalidArgument

__all__ = ["DEFAULT_IMAGE", "OPTIONS", "NodeRules", "Policy", "check_rules", "digest_of", "resolve"]

#: Made by images/sandbox/Dockerfile.
DEFAULT_IMAGE = "sandfleet/sandbox:latest"
#: A registry's name, path, tag and digest; nothing that could be read as an option or another path.
_IMAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?(/[A-Za-z0-9][A-Za-z0-9._-]*)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """One container, as far as it does not depend on its place.

    Attributes:
        image: What it is made of.
        user: ``uid:gid`` inside.
        memory_bytes: Memory, and memory with swap.
        cpus: CPU cores.
        pids: Processes and threads.
        nofile: Open files per process.
        tmp_bytes: Size of ``/tmp``; ``/run`` and ``/dev/shm`` get a quarter each. All of it counts as memory.
        temp_dir: Where programs put temporary files.
        preset: ``strict`` (read-only root) or ``developer``.
        runtime: OCI runtime; empty is the engine's default.
        network_mode: ``none`` or ``full``.
        cap_add: Capabilities beyond none.
    """

    image: str
    user: str
    memory_bytes: int
    cpus: float
    pids: int
    nofile: int
    tmp_bytes: int
    temp_dir: str = "/tmp"
    preset: str = "strict"
    runtime: str = ""
    network_mode: str = "none"
    cap_add: tuple[str, ...] = ()

    @property
    def read_only_root(self) -> bool:
        """Whether only the mounts and the tmpfs can be written."""
        return self.preset == "strict"


@dataclass(frozen=True, slots=True)
class NodeRules:
    """What a node's operator decided, and what its engine has.

    Attributes:
        container: The settings.
        user: ``uid:gid`` inside, already chosen.
        nofile: Open files per process.
        tmp_bytes: Size of ``/tmp``.
        runtimes: Names of the engine's OCI runtimes.
        default_image: When the settings name none.
        cap_add: Capabilities the backend's kind of image cannot do without.
    """

    container: ContainerSettings
    user: str
    nofile: int
    tmp_bytes: int
    runtimes: frozenset[str]
    default_image: str = DEFAULT_IMAGE
    cap_add: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        """The node's own image."""
        return self.container.image or self.default_image


def check_rules(rules: NodeRules) -> None:
    """Whether a node can keep what its settings promise.

    Raises:
        ConfigError: It cannot; the message names the key.
    """
    container = rules.container
    if container.runtime and container.runtime not in rules.runtimes:
        raise ConfigError(
            f"sandbox.runtime {container.runtime!r} is unknown to this Docker engine, which has "
            f"{', '.join(sorted(rules.runtimes))}; install it and name it in daemon.json. Sandboxes never fall back "
            "to a weaker one",
            key="sandbox.runtime",
        )
    if container.network_mode == "restricted":
        raise ConfigError(
            "sandbox.network_mode restricted cannot be enforced by this backend yet; choose none, or full",
            key="sandbox.network_mode",
        )
    if container.network_mode == "full" and container.blocked_domains:
        raise ConfigError(
            "sandbox.blocked_domains cannot be enforced by this backend yet; choose network_mode none, or leave "
            "them out",
            key="sandbox.blocked_domains",
        )
    if unknown := sorted(set(container.allowed_options) - set(OPTIONS)):
        raise ConfigError(
            f"sandbox.allowed_options names {', '.join(unknown)}, which no caller can be given; "
            f"there are {', '.join(OPTIONS)}",
            key="sandbox.allowed_options",
        )
    if not _IMAGE.fullmatch(rules.image):
        raise ConfigError(f"sandbox.image {rules.image!r} is no name of an image", key="sandbox.image")


def resolve(rules: NodeRules, image: str, options: Mapping[str, Any]) -> Policy:
    """The container a caller gets who asks for ``image`` (empty: the node's) with ``options``.

    Raises:
        InvalidArgument: An option is unknown, has no sensible value or is not allowed; says what would be.
    """
    container = rules.container
    unknown = sorted(str(name) for name in set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgument(
            f"sandboxes have no option {', '.join(unknown)}; there are {', '.join(OPTIONS)}", argument=unknown[0]
        )
    wanted: dict[str, Any] = {}
    for name, value in options.items():
        own = _own(rules, name)
        OPTIONS[name](name, value)
        if name == "runtime":
            _check_runtime(value, rules)
        if value != own and not _is_tighter(name, value, own) and name not in container.allowed_options:
            raise InvalidArgument(
                f"{name}={value!r} goes beyond what this node allows ({own!r}); the operator can allow it by "
                f"sandbox.allowed_options: [{name}]",
                argument=name,
                allowed_options=sorted(container.allowed_options),
            )
        wanted[name] = value
    return Policy(
        image=_image(rules, image),
        user=rules.user,
        temp_dir=container.temp_dir,
        cap_add=rules.cap_add,
        **{name: wanted.get(name, _own(rules, name)) for name in OPTIONS},
    )


def digest_of(
    policy: Policy, *, env: Mapping[str, str], mounts: Sequence[tuple[str, str, bool]], image_id: str, program: str
) -> str:
    """32 hex digits that containers share which are alike: policy, environment, mounts, image and what runs in them."""
    facts = {
        **asdict(policy),
        "env": dict(env),
        "mounts": sorted(list(mount) for mount in mounts),
        "image_id": image_id,
        "program": program,
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# --- options -------------------------------------------------------------------------------------


def _whole(least: int, unit: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"{name} must be a whole number of {unit}, at least {least}", argument=name)

    return check


def _cores(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1024:
        raise InvalidArgument(f"{name} must be a number of cores, at least 0.01", argument=name)


def _one_of(*values: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if value not in values:
            raise InvalidArgument(f"{name} must be one of {', '.join(values)}", argument=name, allowed=list(values))

    return check


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a text", argument=name)


def _network(name: str, value: object) -> None:
    if value == "restricted":
        raise InvalidArgument(
            "network_mode restricted cannot be enforced by this backend yet; ask for none, or full",
            argument=name,
            allowed=["none", "full"],
        )
    _one_of("none", "full")(name, value)


#: What a caller may ask for, and what its values look like.
OPTIONS: dict[str, Callable[[str, object], None]] = {
    "cpus": _cores,
    "memory_bytes": _whole(16 * _MIB, "bytes"),
    "network_mode": _network,
    "nofile": _whole(64, "files"),
    "pids": _whole(8, "processes"),
    "preset": _one_of("strict", "developer"),
    "runtime": _text,
    "tmp_bytes": _whole(_MIB, "bytes"),
}
_LIMITS = frozenset({"cpus", "memory_bytes", "nofile", "pids", "tmp_bytes"})
_TIGHTEST = {"network_mode": "none", "preset": "strict"}


def _own(rules: NodeRules, name: str) -> Any:
    return getattr(rules if name in {"nofile", "tmp_bytes"} else rules.container, name)


def _is_tighter(name: str, value: Any, own: Any) -> bool:
    return bool(value <= own) if name in _LIMITS else _TIGHTEST.get(name) == value


def _check_runtime(value: str, rules: NodeRules) -> None:
    if value and value not in rules.runtimes:
        raise InvalidArgument(
            f"this node has no runtime {value!r}; it has {', '.join(sorted(rules.runtimes))}",
            argument="runtime",
            allowed=sorted(rules.runtimes),
        )


def _image(rules: NodeRules, image: str) -> str:
    if image in ("", rules.image):
        return rules.image
    if not _IMAGE.fullmatch(image):
        raise InvalidArgument(f"{image[:200]!r} is no name of an image", argument="image")
    allowed = rules.container.allowed_images
    if not any(fnmatch.fnmatchcase(image, pattern) for pattern in allowed):
        raise InvalidArgument(
            f"image {image} is not allowed on this node; the operator can allow it by sandbox.allowed_images",
            argument="image",
            allowed_images=list(allowed),
        )
    return image
