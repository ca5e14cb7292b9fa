"""How the systems before sandfleet spell their configuration, and what that means here: DeerFlow and AgentSDK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandfleet.config.models import parse_bytes

__all__ = [
    "ALIASES",
    "CLASSES",
    "FOREIGN_SECTIONS",
    "KINDS",
    "NO_EFFECT",
    "TOOLS_LIST",
    "Alias",
    "backend_of_class",
    "class_notice",
]

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Alias:
    """Another key of a setting.

    Attributes:
        name: The setting's short name.
        convert: Turns the seed's unit into ours; raises ValueError where it cannot.
        told: The seed's unit or meaning, for the documentation.
    """

    name: str
    convert: Callable[[Any], Any] | None = None
    told: str = ""


def _mib(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number of MB")
    if isinstance(value, str) and not value.strip().isdigit():
        return parse_bytes(value)
    return int(float(value) * _MIB)


_HELD_TOO = "0, or more than the default of `active_idle_timeout_s`, counts for that too, if it is not given"

#: Key -> the setting it means. DeerFlow's first, then the documents' `aio_sandbox` block, then AgentSDK's `config`.
ALIASES: dict[str, Alias] = {
    "sandbox.idle_timeout": Alias("idle_timeout_s", told=_HELD_TOO),
    "sandbox.acquire_timeout": Alias("acquire_timeout_s"),
    "sandbox.bash_command_timeout": Alias("command_timeout_s"),
    "sandbox.mode": Alias("lifecycle"),
    "sandbox.aio_sandbox.host": Alias("docker_host"),
    "sandbox.aio_sandbox.image": Alias("image"),
    "sandbox.aio_sandbox.keep_alive_seconds": Alias("max_age_s", told="the container's lifetime"),
    "sandbox.aio_sandbox.env_inherit": Alias("env_inherit"),
    "sandbox.aio_sandbox.provisioner_url": Alias("provisioner_url"),
    "sandbox.aio_sandbox.kubeconfig_path": Alias("kubeconfig_path"),
    "sandbox.config.mode": Alias("lifecycle"),
    "sandbox.config.timeout": Alias("command_timeout_s"),
    "sandbox.config.idle_timeout": Alias("idle_timeout_s", told=_HELD_TOO),
    "sandbox.config.auto_destroy": Alias("destroy_on_release"),
    "sandbox.config.image": Alias("image"),
    "sandbox.config.image_pull_policy": Alias("image_pull_policy"),
    "sandbox.config.image_pull_secrets": Alias("image_pull_secrets"),
    "sandbox.config.memory": Alias("memory_bytes", told="such as 512m"),
    "sandbox.config.memory_limit": Alias("memory_bytes", _mib, "MB"),
    "sandbox.config.memory_request": Alias("memory_request_bytes", _mib, "MB"),
    "sandbox.config.cpu": Alias("cpus"),
    "sandbox.config.cpu_limit": Alias("cpus"),
    "sandbox.config.cpu_request": Alias("cpu_request"),
    "sandbox.config.disk_limit": Alias("disk_bytes", _mib, "MB"),
    "sandbox.config.max_disk_usage": Alias("disk_bytes", told="bytes"),
    "sandbox.config.network_mode": Alias("network_mode"),
    "sandbox.config.allowed_domains": Alias("allowed_domains"),
    "sandbox.config.blocked_domains": Alias("blocked_domains"),
    "sandbox.config.http_proxy": Alias("http_proxy"),
    "sandbox.config.persistent_volume": Alias("persistent_volume"),
    "sandbox.config.restore_on_start": Alias("restore_on_start"),
    "sandbox.config.temp_dir": Alias("temp_dir"),
    "sandbox.config.region": Alias("region"),
    "sandbox.config.access_key": Alias("access_key"),
    "sandbox.config.access_key_id": Alias("access_key"),
    "sandbox.config.secret_key": Alias("secret_key"),
    "sandbox.config.secret_access_key": Alias("secret_key"),
    "sandbox.config.instance_type": Alias("instance_type"),
    "sandbox.config.allowed_commands": Alias("allowed_commands"),
    "sandbox.config.blocked_commands": Alias("blocked_commands"),
    "sandbox.config.readonly_paths": Alias("readonly_paths"),
    "sandbox.config.blocked_paths": Alias("blocked_paths"),
    "sandbox.config.env_whitelist": Alias("env_whitelist"),
    "sandbox.config.env_blacklist": Alias("env_blacklist"),
    "sandbox.config.alert_cpu_threshold": Alias("alert_cpu_threshold"),
    "sandbox.config.alert_memory_threshold": Alias("alert_memory_threshold"),
    "sandbox.config.alert_disk_threshold": Alias("alert_disk_threshold"),
    "sandbox.config.alert_webhook": Alias("alert_webhook"),
}

#: Keys that are accepted and change nothing, with what they would have to be, and why they do nothing.
NO_EFFECT: dict[str, tuple[type, str]] = {
    "sandbox.thread_data_mounts": (bool, "uploads always go to the node that holds the thread's data"),
    "sandbox.health_check_skip_seconds": (
        float,
        "the node that owns a sandbox records its death at once, so a reused one is not probed",
    ),
    "sandbox.auto_start": (bool, "a sandbox is started when a thread acquires it"),
    "sandbox.base_url": (str, "sandboxes are found through Redis, not at a fixed address"),
    "sandbox.work_dir": (
        str,
        "commands begin in /mnt/user-data/workspace, which is /workspace too; `run(cwd=…)` names another directory",
    ),
    "sandbox.config.auto_clean": (bool, "temporary files end with their sandbox"),
    "sandbox.config.auto_clean_temp": (bool, "temporary files end with their sandbox"),
    "sandbox.config.clean_on_stop": (
        bool,
        "a thread's files outlive its sandbox until `destroy(delete_data=True)` deletes them",
    ),
    "skills.use": (str, "skills are a directory here"),
    "skills.deferred_discovery": (bool, "discovering skills is the agent's business"),
}

#: Said of DeerFlow's list of tools.
TOOLS_LIST = (
    "tools are not loaded from a list, `sandfleet.tools.get_tools()` gives them; `max_results` of glob and grep counts"
)

#: AgentSDK's `kind` -> backend.
KINDS = {
    "local": "local",
    "mock": "mock",
    "docker": "docker",
    "k8s": "kubernetes",
    "aliyun": "aliyun",
    "volcengine": "volcengine",
}

#: Class names of the seeds' providers -> backend. Their packages are `deerflow…` and, in older documents, `src…`.
CLASSES = {"LocalSandboxProvider": "local", "AioSandboxProvider": "aio"}
_SEED_PACKAGES = ("deerflow", "src")
#: sandfleet's own provider, spelt out.
_OURS = ("sandfleet:SandboxProvider", "sandfleet.provider:SandboxProvider")


def backend_of_class(path: str) -> str | None:
    """The backend that a provider's class path stands for: "" for sandfleet's own, None for one that is no alias."""
    if path in _OURS:
        return ""
    module, _, name = path.partition(":")
    return CLASSES.get(name) if module.split(".")[0] in _SEED_PACKAGES else None


def class_notice(path: str, backend: str) -> str:
    """What a seed's class path was understood as."""
    about = {
        "local": ": commands run in bubblewrap sandboxes; `backend: host` is the host mode",
        "aio": ": all-in-one containers on the fleet's nodes",
    }
    return f"{path} is understood as `backend: {backend}`{about.get(backend, '')}"


#: DeerFlow's sections that do not concern sandboxes. A file that has one of them may have further ones.
FOREIGN_SECTIONS = frozenset({
    "acp_agents", "agents_api", "auth", "channel_connections", "channels", "checkpointer", "circuit_breaker",
    "config_version", "database", "extensions", "guardrails", "input_polish", "log_level", "logging",
    "loop_detection", "max_recursion_limit", "mcp_servers", "memory", "models", "run_events",
    "safety_finish_reason", "skill_evolution", "stream_bridge", "subagents", "suggestions", "summarization",
    "title", "token_budget", "token_usage", "tool_groups", "tool_output", "tool_progress", "tool_search", "uploads",
})  # fmt: skip
