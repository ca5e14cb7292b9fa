"""`Settings`: every setting with its type, bounds and default. `sandfleet.config.loading` reads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sandfleet.config.models import CloudSettings, ContainerSettings, GuardSettings, Mount
from sandfleet.config.mounts import check_container_path, check_mounts
from sandfleet.config.urls import redis_url_problem
from sandfleet.errors import ConfigError
from sandfleet.ids import check_node_id

__all__ = ["INLINE_BYTES", "Mount", "Settings"]

#: Arguments and results up to this size travel inside messages; above it they become blobs.
INLINE_BYTES = 256 * 1024

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
Variable = Annotated[str, Field(pattern=_VARIABLE)]


def _default_data_root() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or (Path.home() / ".local" / "share")
    return Path(base) / "sandfleet"


class Settings(BaseModel):
    """Everything a client, a scheduler or a node may be told. Immutable.

    `load` takes them from keyword arguments, the environment variables ``SANDFLEET_<FIELD>`` (mappings and lists as
    ``key=value,key=value`` or ``a,b``, or as JSON) and one YAML file; docs/configuration.md lists its keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,
        description="Redis (or sentinel://…) that holds state, queues and replies.",
    )
    allow_insecure_redis: bool = Field(
        default=False,
        description="Accept a non-loopback Redis without a password. Whoever reaches it owns the fleet.",
    )
    prefix: str = Field(
        default="sandfleet:",
        min_length=1,
        description="Prefix of every key. Celery's queues have none: give each deployment its own Redis database.",
    )
    data_root: Path = Field(default_factory=_default_data_root, description="Thread data and node identity lie here.")
    run_root: Path = Field(
        default_factory=lambda: (
            Path(tempfile.gettempdir()) / f"sandfleet-{os.getuid() if hasattr(os, 'getuid') else 0}"
        ),
        description="Sockets of local sandboxes; keep the path short.",
    )
    use: str = Field(
        default="",
        pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$",
        description="A provider class of your own, as `package.module:Class`; empty is sandfleet's.",
    )
    backend: str = Field(
        default="local",
        min_length=1,
        description="What kind of sandbox is asked for: docker, aio, local, host, mock or a plugin's.",
    )
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
    detach_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a node that is told to end keeps its containers for its next run; 0: it ends them.",
    )
    burst_limit: int = Field(default=0, ge=0, description="Places above replicas for callers whose policy is burst.")
    idle_timeout_s: float = Field(default=600.0, ge=0, description="Warm sandboxes end after this long; 0 keeps them.")
    active_idle_timeout_s: float = Field(
        default=3600.0, ge=0, description="Held sandboxes end after this long without any operation; 0 keeps them."
    )
    max_age_s: float = Field(
        default=0.0, ge=0, description="Sandboxes older than this end when no operation runs in them; 0: no limit."
    )
    max_job_s: float = Field(default=86400.0, gt=0, le=86400, description="How long a background job may run at most.")
    output_bytes: int = Field(
        default=1024 * 1024, ge=64 * 1024, description="Live output of one command that Redis keeps for late readers."
    )
    checkpoint_url: str = Field(
        default="", repr=False, description="Where threads' data is saved: a directory, s3://…, gs://…; empty: nowhere."
    )
    checkpoint_options: Mapping[str, Any] = Field(
        default_factory=dict, repr=False, description="fsspec's options for that place (keys, endpoints); never shown."
    )
    checkpoint_on_release: bool = Field(default=True, description="Save a thread's data when nobody uses it any more.")
    checkpoint_every_s: float = Field(
        default=0.0, ge=0, description="Save what changed in sandboxes in use so often; 0: only when they are released."
    )
    checkpoint_keep: int = Field(
        default=5, ge=1, description="Checkpoints kept of each thread, and as many that have names; older ones go."
    )
    checkpoint_max_bytes: int = Field(
        default=10 * 1024**3, ge=0, description="Data of a thread above this is not saved; 0: no limit."
    )
    blank_pool: int = Field(
        default=2, ge=0, le=1000, description="Sandboxes a node keeps started ahead, where its backend can; 0: none."
    )
    reserve_free: int = Field(default=1, ge=0, description="Places that blank sandboxes leave free.")
    min_free_bytes: int = Field(
        default=256 * 1024 * 1024, ge=0, description="A node with less free disk at its data root takes nothing new."
    )
    lifecycle: Literal["session", "task", "pool"] = Field(
        default="session",
        description="session: a released sandbox stays warm for its thread; task, pool: it ends with its last release.",
    )
    cordon_after_failures: int = Field(
        default=3, ge=0, description="A node cordons itself when creates of this many threads in a row fail; 0: never."
    )
    allow_host_bash: bool = Field(
        default=False, description="Allow commands in host mode, which is no security boundary."
    )
    mounts: tuple[Mount, ...] = Field(default=(), description="Directories of the node's host its sandboxes see.")
    skills_path: Path | None = Field(default=None, description="Directory of skills on the node, seen read-only.")
    skills_container_path: str = Field(default="/mnt/skills", description="Where sandboxes see the skills.")
    metrics_address: str = Field(
        default="", description="HOST:PORT of Prometheus' /metrics on scheduler and nodes; port 0 takes a free one."
    )

    uid_base: int = Field(default=1_900_000_000, ge=1000, description="First uid of local sandboxes (root only).")
    uid_count: int = Field(default=100_000_000, ge=1, description="How many uids there are from uid_base on.")
    max_nproc: int = Field(default=512, ge=8, description="Processes of a local sandbox (root workers only).")
    nofile: int = Field(default=4096, ge=64, description="Open files per process in a sandbox.")
    tmp_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024, description="Size of /tmp in a sandbox.")
    start_timeout_s: float = Field(default=15.0, gt=0, description="How long the start of a sandbox may take.")

    acquire_timeout_s: float = Field(default=30.0, gt=0, description="How long acquire waits for a sandbox.")
    on_lost: Literal["wait_for_home", "restore", "fresh"] = Field(
        default="wait_for_home",
        description="When the node with a thread's data is away: wait for it, go on elsewhere with the newest "
        "checkpoint once it is gone, or begin with nothing. For acquires that do not say.",
    )
    overflow_policy: Literal["wait", "reject", "burst"] = Field(
        default="wait",
        description="When every place is taken: wait in line, be refused at once, or use burst places, then wait.",
    )
    max_per_user: int = Field(default=0, ge=0, description="Places a user's sandboxes may take; 0: no limit.")
    destroy_on_release: bool = Field(
        default=False, description="End a sandbox with its last release, not keep it warm."
    )
    environment: Mapping[Variable, str] = Field(
        default_factory=dict,
        repr=False,
        description="Environment of every command in the sandboxes that this process has made; never shown.",
    )
    env_inherit: tuple[Variable, ...] = Field(
        default=(), description="Variables of this process copied into `environment` when settings are loaded."
    )
    env_whitelist: tuple[str, ...] = Field(
        default=(), description="Which of `env_inherit` may be copied, as globs; empty: all."
    )
    env_blacklist: tuple[str, ...] = Field(
        default=(), description="Which of `env_inherit` are not copied, as globs (`AWS_*`); wins."
    )
    bash_output_max_chars: int = Field(default=20_000, ge=0, description="bash tool: middle cut out; 0: no limit.")
    read_file_output_max_chars: int = Field(default=50_000, ge=0, description="read_file tool; 0: no limit.")
    ls_output_max_chars: int = Field(default=20_000, ge=0, description="ls tool; 0: no limit.")
    glob_max_results: int = Field(default=200, ge=1, le=1000, description="Most paths the glob tool shows.")
    grep_max_results: int = Field(default=100, ge=1, le=500, description="Most matches the grep tool shows.")
    write_file_max_bytes: int = Field(default=81_920, description="write_file tool, one call; 0 or less: no limit.")
    read_before_write: bool = Field(
        default=False, description="write_file and str_replace refuse an existing file not read since its last change."
    )
    queue_timeout_s: float = Field(default=60.0, gt=0, description="How long an operation may wait for its lane.")
    command_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of a command that names none.")
    agent_ttl_s: float = Field(default=60.0, gt=0, description="How long a silent client keeps its sandboxes in use.")
    client_bytes: int = Field(default=128 * 1024 * 1024, gt=0, description="Blob bytes one client may have in flight.")
    fleet_bytes: int = Field(default=512 * 1024 * 1024, gt=0, description="Blob bytes the fleet may have in flight.")
    publish: Literal["script", "kombu"] = Field(
        default="script",
        description="script: record and message in one Lua call; kombu: record, then Celery's own publish.",
    )
    container: ContainerSettings = Field(
        default_factory=ContainerSettings, description="How sandboxes that are containers or pods are made."
    )
    cloud: CloudSettings = Field(default_factory=CloudSettings, description="Access to sandboxes of a cloud.")
    guard: GuardSettings = Field(default_factory=GuardSettings, description="Rules and alarms around what runs.")
    task_events: bool = Field(default=False, description="Send Celery task events (Flower needs them; 20-30 % CPU).")
    flower_user: str = Field(
        default="sandfleet", pattern="^[^:]+$", description="Who may log in to Flower; without a colon."
    )
    flower_password: str = Field(
        default="",
        repr=False,
        description="Password of Flower's user, never shown; empty: a new one is made and told once at start.",
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        problem = redis_url_problem(url)
        if problem:
            raise ValueError(problem)
        return url

    @field_validator("node_id")
    @classmethod
    def _node_id(cls, node_id: str | None) -> str | None:
        return None if node_id is None else check_node_id(node_id)

    @field_validator("metrics_address")
    @classmethod
    def _metrics_address(cls, address: str) -> str:
        if address:
            from sandfleet.metrics import parse_address  # noqa: PLC0415  (an HTTP server, which few processes need)

            parse_address(address)
        return address

    @field_validator("skills_container_path")
    @classmethod
    def _skills(cls, path: str) -> str:
        return check_container_path(path)

    @field_validator("environment", "labels")
    @classmethod
    def _no_nul(cls, values: Mapping[str, str]) -> Mapping[str, str]:
        if any("\0" in name or "\0" in value for name, value in values.items()):
            raise ValueError("must not contain a NUL")
        return values

    @model_validator(mode="after")
    def _mounts(self) -> Settings:
        try:
            check_mounts(self.mounts, self.skills_container_path)
        except ConfigError as exc:
            raise ValueError(exc.message) from None
        return self

    @property
    def ends_on_release(self) -> bool:
        """Whether a sandbox ends with its last release."""
        return self.destroy_on_release or self.lifecycle != "session"

    @property
    def offered(self) -> tuple[str, ...]:
        """The backends a node with these settings offers."""
        return self.backends or (self.backend,)

    @classmethod
    def load(
        cls, environ: Mapping[str, str] | None = None, *, config: str | os.PathLike[str] | None = None, **given: Any
    ) -> Settings:
        """Settings from ``given`` (None values ignored), ``SANDFLEET_…``, the file's profile, the file and defaults.

        ``REDIS_URL`` is used where ``SANDFLEET_REDIS_URL`` is not set. What deserves a word (an alias that was
        understood, a key without effect) is logged once per process; `sandfleet config check` shows it.

        Args:
            environ: Instead of this process' environment. A file is then read only if ``SANDFLEET_CONFIG`` in it
                names one.
            config: The file to read instead of the one that would be found.

        Raises:
            ConfigError: Names the key, where it came from and what is allowed.
        """
        from sandfleet.config.loading import load_settings  # noqa: PLC0415  (it builds upon this class)

        return load_settings(environ, config=config, **given).settings
