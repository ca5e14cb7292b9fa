"""The settings of a process: where Redis is, where data lies, how much a node holds.

Today they come from ``SANDFLEET_…`` environment variables and from keyword arguments.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sandfleet.errors import ConfigError

__all__ = ["INLINE_BYTES", "Settings"]

#: Arguments and results up to this size travel inside messages; above it they become blobs.
INLINE_BYTES = 256 * 1024

_ENV_PREFIX = "SANDFLEET_"


def _default_data_root() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or (Path.home() / ".local" / "share")
    return Path(base) / "sandfleet"


class Settings(BaseModel):
    """Everything a client, a scheduler or a node may be told. Immutable.

    Every field can be set by the environment variable ``SANDFLEET_<FIELD>``; mappings and lists as
    ``key=value,key=value`` or ``a,b``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="Redis that holds state, queues and replies."
    )
    allow_insecure_redis: bool = Field(
        default=False,
        description="Accept a non-loopback Redis without a password. Whoever reaches it owns the fleet.",
    )
    prefix: str = Field(
        default="sandfleet:",
        description="Prefix of every key. Celery's queues have none: give each deployment its own Redis database.",
    )
    data_root: Path = Field(default_factory=_default_data_root, description="Thread data and node identity lie here.")
    run_root: Path = Field(
        default_factory=lambda: (
            Path(tempfile.gettempdir()) / f"sandfleet-{os.getuid() if hasattr(os, 'getuid') else 0}"
        ),
        description="Sockets of local sandboxes; keep the path short.",
    )
    backend: str = Field(default="local", description="What kind of sandbox is asked for: local or mock.")
    backends: tuple[str, ...] = Field(default=(), description="Backends a node offers; empty means just `backend`.")
    labels: Mapping[str, str] = Field(default_factory=dict, description="Labels of a node, or wanted of one.")

    node_id: str | None = Field(default=None, description="Id of this node; None takes the first free one.")
    replicas: int = Field(default=16, ge=1, le=100_000, description="Sandboxes a node holds at most.")
    concurrency: int = Field(default=8, ge=1, le=256, description="Threads that start operations on a node.")
    start_concurrency: int = Field(default=4, ge=1, le=64, description="Sandboxes a node starts at once.")
    max_queue: int = Field(default=20_000, ge=1, description="Operations a node holds, waiting and running.")
    max_lane: int = Field(default=10_000, ge=1, description="Operations that may wait in one lane.")
    max_queue_bytes: int = Field(
        default=512 * 1024 * 1024, ge=1, description="Bytes of waiting operations a node holds."
    )
    lease_s: float = Field(default=10.0, gt=0, description="How long a node may be silent before it counts as dead.")
    drain_timeout_s: float = Field(default=30.0, ge=0, description="How long a drain waits for what runs.")
    idle_timeout_s: float = Field(default=600.0, ge=0, description="Warm sandboxes end after this long; 0 keeps them.")

    uid_base: int = Field(default=1_900_000_000, ge=1000, description="First uid of local sandboxes (root only).")
    uid_count: int = Field(default=100_000_000, ge=1, description="How many uids there are from uid_base on.")
    max_nproc: int = Field(default=512, ge=8, description="Processes of a local sandbox (root workers only).")
    nofile: int = Field(default=4096, ge=64, description="Open files per process in a local sandbox.")
    tmp_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024, description="Size of /tmp in a local sandbox.")
    start_timeout_s: float = Field(default=15.0, gt=0, description="How long the start of a sandbox may take.")

    acquire_timeout_s: float = Field(default=30.0, gt=0, description="How long acquire waits for a sandbox.")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="How long an operation may wait for its lane.")
    command_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of a command that names none.")
    agent_ttl_s: float = Field(default=60.0, gt=0, description="How long a silent client keeps its sandboxes in use.")
    client_bytes: int = Field(default=128 * 1024 * 1024, gt=0, description="Blob bytes one client may have in flight.")
    fleet_bytes: int = Field(default=512 * 1024 * 1024, gt=0, description="Blob bytes the fleet may have in flight.")
    publish: str = Field(
        default="script",
        pattern="^(script|kombu)$",
        description="script: record and message in one Lua call; kombu: record, then Celery's own publish.",
    )
    task_events: bool = Field(default=False, description="Send Celery task events (Flower needs them; 20-30 % CPU).")

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return url

    @property
    def offered(self) -> tuple[str, ...]:
        """The backends a node with these settings offers."""
        return self.backends or (self.backend,)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from the environment, with ``given`` (None values ignored) on top.

        ``REDIS_URL`` is used where ``SANDFLEET_REDIS_URL`` is not set.

        Raises:
            ConfigError: Names the key, where it came from and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        if environ.get("REDIS_URL"):
            values["redis_url"] = environ["REDIS_URL"]
        for name in cls.model_fields:
            text = environ.get(_ENV_PREFIX + name.upper())
            if text:
                values[name] = _parse(name, text)
        values.update({key: value for key, value in given.items() if value is not None})
        try:
            return cls(**values)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"setting {key} ({_ENV_PREFIX}{key.upper()}): {first['msg']}; see `sandfleet worker --help`",
                key=key,
            ) from None


def _parse(name: str, text: str) -> Any:
    if name == "labels":
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        # A pair without "=" would be a label that silently is none: the text itself is refused as no mapping.
        return {k.strip(): v.strip() for k, _, v in pairs} if all(sep for _, sep, _ in pairs) else text
    if name == "backends":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
