"""Every configuration block of the seeds loads as it is, and means what it meant there.

The blocks are quoted in `seed_configs/`: 000, 001 and 003 are DeerFlow's, 004 is AgentSDK's, written as YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandfleet.config import Loaded, load_settings
from sandfleet.config.found import Notice
from sandfleet.config.keys import leaf_by_name

BLOCKS = Path(__file__).parent / "seed_configs"
ALL_IN_ONE = "enterprise-public-cn-beijing.cr.volces.com/vefaas-public/all-in-one-sandbox:latest"
MIB = 1024 * 1024
VARIABLES = {
    "MY_API_KEY": "the-key",
    "OPENAI_API_KEY": "openai",
    "ANTHROPIC_API_KEY": "anthropic",
    "ALIYUN_ACCESS_KEY_ID": "ali-id",
    "ALIYUN_ACCESS_KEY_SECRET": "ali-secret",
    "VOLC_ACCESS_KEY_ID": "volc-id",
    "VOLC_SECRET_ACCESS_KEY": "volc-secret",
}
PROJECTS = {"host_path": "/home/user/projects", "container_path": "/mnt/projects", "read_only": False}

# Block -> what it sets. What is not named here must stay at its default.
MEANING: dict[str, dict[str, Any]] = {
    "000-provider": {"backend": "aio", "image": ALL_IN_ONE, "replicas": 3},
    "000-local": {"backend": "local", "image": ALL_IN_ONE, "replicas": 3},
    "000-mounts": {"mounts": [PROJECTS]},
    "000-backend": {
        "backend": "aio",
        "image": ALL_IN_ONE,
        "container_prefix": "deer-flow-sandbox",
        "replicas": 3,
        "mounts": [PROJECTS],
        "environment": {"NODE_ENV": "production", "API_KEY": "the-key"},
    },
    "000-custom": {"use": "my_package:MySandboxProvider"},
    "001-local": {"backend": "local"},
    "001-docker": {
        "backend": "aio",
        "docker_host": "unix:///var/run/docker.sock",
        "image": "bytedance/deerflow-sandbox:latest",
        "max_age_s": 3600,
        "env_inherit": ["OPENAI_API_KEY", "ANTHROPIC_API_KEY"],
        "environment": {"OPENAI_API_KEY": "openai", "ANTHROPIC_API_KEY": "anthropic"},
    },
    "001-kubernetes": {
        "backend": "kubernetes",
        "provisioner_url": "http://provisioner:8002",
        "kubeconfig_path": Path("/path/to/kubeconfig"),
    },
    "003-local": {"backend": "local", "allow_host_bash": False},
    "003-aio": {
        "backend": "aio",
        "image": ALL_IN_ONE,
        "replicas": 3,
        "container_prefix": "deer-flow-sandbox",
        "mounts": [{"host_path": "/path/on/host", "container_path": "/home/user/shared", "read_only": False}],
        "environment": {"API_KEY": "the-key"},
    },
    "003-provisioner": {"backend": "kubernetes", "provisioner_url": "http://provisioner:8002"},
    "003-mounts": {
        "backend": "local",
        "mounts": [{"host_path": "/home/user/my-project", "container_path": "/mnt/my-project", "read_only": True}],
    },
    "003-truncation": {
        "bash_output_max_chars": 20_000,
        "read_file_output_max_chars": 50_000,
        "ls_output_max_chars": 20_000,
    },
    "003-host-bash": {"allow_host_bash": True},
    "004-local": {"backend": "local"},
    "004-local-docker": {"backend": "docker", "image": "golang:1.21", "memory_bytes": 512 * MIB, "cpus": 1.0},
    "004-aliyun": {
        "backend": "aliyun",
        "region": "cn-hangzhou",
        "access_key": "ali-id",
        "secret_key": "ali-secret",
        "command_timeout_s": 300,
        "memory_bytes": 1024 * MIB,
        "cpus": 2.0,
        "network_mode": "restricted",
    },
    "004-volcengine": {
        "backend": "volcengine",
        "region": "cn-beijing",
        "access_key": "volc-id",
        "secret_key": "volc-secret",
        "instance_type": "standard",
        "command_timeout_s": 600,
        "destroy_on_release": True,
    },
    "004-mock": {"backend": "mock"},
    "004-limits": {
        "backend": "aliyun",
        "cpus": 2.0,
        "cpu_request": 1.0,
        "memory_bytes": 2048 * MIB,
        "memory_request_bytes": 1024 * MIB,
        "disk_bytes": 10_240 * MIB,
        "command_timeout_s": 600,
        "idle_timeout_s": 300,
    },
    "004-network": {
        "network_mode": "restricted",
        "allowed_domains": ["api.github.com", "registry.example.org"],
        "blocked_domains": ["*.internal.com"],
        "http_proxy": "http://proxy.example.com:8080",
    },
    "004-volumes": {
        "mounts": [{"host_path": "/host/data", "container_path": "/workspace/data", "read_only": False}],
        "persistent_volume": "/mnt/agent-state",
        "restore_on_start": True,
    },
    "004-image": {
        "image": "my-registry.com/agent-runtime:v1.0",
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": ["my-registry-secret"],
    },
    "004-paths": {"readonly_paths": ["/etc", "/usr"], "blocked_paths": ["/proc", "/sys"], "temp_dir": "/tmp/agent"},
    "004-commands": {
        "allowed_commands": ["ls", "cat", "echo", "go", "python3", "node", "git", "npm", "pip"],
        "blocked_commands": ["rm", "dd", "mkfs", "sudo", "su"],
    },
    "004-variables": {"env_whitelist": ["PATH", "HOME", "LANG"], "env_blacklist": ["AWS_*", "GITHUB_TOKEN"]},
    "004-alerts": {
        "alert_cpu_threshold": 80.0,
        "alert_memory_threshold": 90.0,
        "alert_disk_threshold": 95.0,
        "alert_webhook": "https://alerts.example.com/webhook",
    },
    "004-cleaning": {"disk_bytes": 5 * 1024 * MIB},
    "004-timeout-30": {"command_timeout_s": 30},
    "004-timeout-600": {"command_timeout_s": 600},
    "004-timeout-3600": {"command_timeout_s": 3600},
}

# Block -> words that a notice of it must say: what is understood otherwise, or has no effect, is never silent.
TOLD = {
    "000-provider": ["`backend: aio`"],
    "000-local": ["`backend: local`", "`sandbox.image` has no effect with the backend local"],
    "001-kubernetes": ["the backend is kubernetes"],
    "004-local": ["`backend: local`", "`sandbox.work_dir` has no effect"],
    "004-local-docker": ["`backend: docker`"],
    "004-network": ["`sandbox.config.network_mode` has no effect with the backend local"],
    "004-paths": ["`sandbox.config.readonly_paths` is checked but not enforced", "auto_clean_temp` has no effect"],
    "004-commands": ["`sandbox.config.blocked_commands` is checked but not enforced"],
    "004-alerts": ["`sandbox.config.alert_cpu_threshold` is checked but not enforced"],
    "004-variables": ["`sandbox.config.env_whitelist` has no effect"],
    "003-host-bash": ["`sandbox.allow_host_bash` has no effect"],
    "004-cleaning": ["`sandbox.config.clean_on_stop` has no effect", "`sandbox.config.auto_clean` has no effect"],
}


def load(name: str, environ: dict[str, str] | None = None) -> Loaded:
    return load_settings(VARIABLES if environ is None else environ, config=BLOCKS / f"{name}.yaml")


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.model_dump() | {"host_path": str(value.host_path)} if hasattr(value, "host_path") else value


def test_there_is_a_meaning_for_every_block_and_a_block_for_every_meaning() -> None:
    assert {path.stem for path in BLOCKS.glob("*.yaml")} == set(MEANING)
    assert set(TOLD) <= set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_a_block_of_the_seeds_sets_what_it_says_and_nothing_else(name: str) -> None:
    loaded = load(name)
    for leaf in leaf_by_name().values():
        wanted = MEANING[name].get(leaf.name, plain(leaf.default()))
        assert plain(leaf.of(loaded.settings)) == wanted, leaf.key


@pytest.mark.parametrize("name", TOLD)
def test_what_is_understood_otherwise_is_told(name: str) -> None:
    told = [notice.text for notice in load(name).notices]
    for words in TOLD[name]:
        assert any(words in text for text in told), told


def test_a_block_that_is_taken_literally_needs_no_words() -> None:
    assert load("000-mounts").notices == ()


def test_a_secret_of_the_environment_that_is_not_set_here_is_empty_and_told() -> None:
    # A node reads the same file as its clients and need not hold their secrets.
    loaded = load("000-backend", {})
    assert loaded.settings.environment == {"NODE_ENV": "production", "API_KEY": ""}
    assert "MY_API_KEY is not set" in " ".join(notice.text for notice in loaded.notices if notice.warning)


def test_rules_that_no_backend_enforces_are_warned_of() -> None:
    by_key = {notice.key: notice for notice in load("004-commands").notices}
    assert by_key["sandbox.config.blocked_commands"] == Notice(
        "sandbox.config.blocked_commands",
        "`sandbox.config.blocked_commands` is checked but not enforced by this version",
        warning=True,
    )


# --- what containers make of it --------------------------------------------------------------------


def told(tmp_path: Path, text: str) -> dict[str, Notice]:
    file = tmp_path / "sandfleet.yaml"
    file.write_text(text)
    return {notice.key: notice for notice in load_settings({}, config=file).notices}


@pytest.mark.parametrize("place", ["mode: {}", "config: {{mode: {}}}"])
@pytest.mark.parametrize("mode", ["session", "task", "pool"])
def test_agentsdks_modes_are_lifecycles(tmp_path: Path, place: str, mode: str) -> None:
    file = tmp_path / "sandfleet.yaml"
    file.write_text(f"sandbox:\n  kind: local\n  {place.format(mode)}\n")
    settings = load_settings({}, config=file).settings
    assert settings.lifecycle == mode
    assert settings.ends_on_release is (mode != "session")


def test_what_docker_sandboxes_have_needs_no_words(tmp_path: Path) -> None:
    limits = "memory: 512m, cpu: '1.0', disk_limit: 1024, image: 'golang:1.21', image_pull_policy: Always"
    assert told(tmp_path, f"sandbox: {{kind: docker, config: {{{limits}, network_mode: full}}}}").keys() == {
        "sandbox.kind"
    }


def test_a_limit_that_only_containers_have_is_warned_of_elsewhere(tmp_path: Path) -> None:
    text = "sandbox: {backend: local, memory_bytes: 1g, pids: 64, runtime: runsc, preset: developer, image: x}"
    found = told(tmp_path, text)
    assert {key: notice.warning for key, notice in found.items()} == {
        "sandbox.memory_bytes": True,
        "sandbox.pids": True,
        "sandbox.runtime": True,
        "sandbox.preset": True,
        "sandbox.image": False,
    }


def test_what_only_kubernetes_reads_is_told_with_docker(tmp_path: Path) -> None:
    found = told(tmp_path, "sandbox: {backend: docker, image_pull_secrets: [mine], cpu_request: 0.5}")
    assert "it is for kubernetes" in found["sandbox.cpu_request"].text
    assert "`sandbox.registry_config`" in found["sandbox.image_pull_secrets"].text


def test_a_node_that_offers_several_backends_reads_what_any_of_them_does(tmp_path: Path) -> None:
    text = "sandbox: {backend: local, runtime: runsc}\nnode: {backends: [local, docker]}"
    assert told(tmp_path, text) == {}


def test_a_plugin_may_read_what_it_likes(tmp_path: Path) -> None:
    assert told(tmp_path, "sandbox: {backend: my-own, image: x, image_pull_secrets: [y], runtime: z}") == {}


@pytest.mark.parametrize("backend", ["docker", "aio"])
def test_restricted_networks_are_said_to_be_refused(tmp_path: Path, backend: str) -> None:
    text = f"sandbox: {{backend: {backend}, network_mode: restricted, allowed_domains: [example.org]}}"
    found = told(tmp_path, text)
    assert found["sandbox.network_mode"].warning
    assert "nodes refuse" in found["sandbox.network_mode"].text
    assert "not enforced" in found["sandbox.allowed_domains"].text
