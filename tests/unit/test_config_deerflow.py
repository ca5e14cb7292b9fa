"""DeerFlow's own config.yaml, key by key: what its reference lists, its lists and its other sections."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandfleet.config import Loaded, load_settings
from sandfleet.errors import ConfigError


def load(tmp_path: Path, text: str, **environ: str) -> Loaded:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_settings(environ, config=file)


def told(loaded: Loaded) -> str:
    return "\n".join(f"{notice.key}: {notice.text}" for notice in loaded.notices)


EVERY_KEY = """
config_version: 33
models:
  - {name: m, use: "langchain_openai:ChatOpenAI", api_key: $SURELY_NOT_SET}
title: {enabled: true}
memory: {enabled: false}
sandbox:
  use: deerflow.community.aio_sandbox:AioSandboxProvider
  allow_host_bash: false
  image: registry.example.com/sandbox:1.11.0
  port: 8090
  replicas: 3
  overflow_policy: burst
  acquire_timeout: 12
  burst_limit: 2
  container_prefix: deer-flow-sandbox
  idle_timeout: 0
  health_check_skip_seconds: 1.5
  thread_data_mounts: true
  ownership:
    type: redis
    redis_url: redis://redis:6379/3
    renewal_interval_seconds: 20
    ttl_multiplier: 3
    key_prefix: deerflow:sandbox:owner
  mounts: []
  environment: {DEBUG: false, PORT: 8080, RATE: 1.10, EMPTY:}
  bash_output_max_chars: 0
  read_file_output_max_chars: 40000
  ls_output_max_chars: 10000
  bash_command_timeout: 900
  provisioner_url: ""
  provisioner_api_key: $PROVISIONER_API_KEY
tools:
  - {name: web_search, group: web, use: "deerflow.community.jina_ai.tools:web_fetch_tool", max_results: 5}
  - {name: glob, group: "file:read", use: "deerflow.sandbox.tools:glob_tool", max_results: 150}
  - {name: grep, group: "file:read", use: "deerflow.sandbox.tools:grep_tool", max_results: 9000}
read_before_write: {enabled: true}
skills: {path: ../skills, container_path: /mnt/skills}
something_of_a_later_version: {a: 1}
"""


def test_every_key_of_its_sandbox_section_is_taken(tmp_path: Path) -> None:
    loaded = load(tmp_path, EVERY_KEY, PROVISIONER_API_KEY="hunter2")
    settings = loaded.settings
    assert (settings.backend, settings.replicas, settings.overflow_policy, settings.burst_limit) == (
        "aio",
        3,
        "burst",
        2,
    )
    assert (settings.acquire_timeout_s, settings.idle_timeout_s, settings.command_timeout_s) == (12, 0, 900)
    assert (settings.container.container_port, settings.container.container_prefix) == (8090, "deer-flow-sandbox")
    assert settings.container.provisioner_api_key == "hunter2"
    assert (settings.redis_url, settings.prefix) == ("redis://redis:6379/3", "deerflow:sandbox:owner:")
    assert settings.agent_ttl_s == 60.0
    assert (settings.bash_output_max_chars, settings.read_file_output_max_chars) == (0, 40_000)
    assert (settings.glob_max_results, settings.grep_max_results) == (150, 500)
    assert settings.read_before_write is True
    assert settings.skills_path == tmp_path.parent / "skills"


def test_values_of_the_environment_are_text_as_they_are_written(tmp_path: Path) -> None:
    environment = load(tmp_path, EVERY_KEY, PROVISIONER_API_KEY="x").settings.environment
    assert environment == {"DEBUG": "false", "PORT": "8080", "RATE": "1.10", "EMPTY": ""}


def test_what_does_not_concern_sandboxes_is_passed_over_with_a_word(tmp_path: Path) -> None:
    words = told(load(tmp_path, EVERY_KEY, PROVISIONER_API_KEY="x"))
    for key in ("models", "title", "memory", "config_version", "something_of_a_later_version"):
        assert f"`{key}` does not concern sandboxes" in words
    assert "`sandbox.thread_data_mounts` has no effect" in words
    assert "`sandbox.health_check_skip_seconds` has no effect" in words
    assert "tools[2].max_results: 9000 is above the limit; it is 500" in words
    assert "always kept in Redis" in words
    assert "hunter2" not in words


def test_a_section_nobody_knows_is_passed_over_only_beside_one_of_deerflow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="something_of_a_later_version"):
        load(tmp_path, "sandbox: {}\nsomething_of_a_later_version: {}\n")
    with pytest.raises(ConfigError, match="did you mean `sandbox`"):
        load(tmp_path, "models: []\nsandbx: {}\n")


def test_ownership_in_memory_changes_nothing_but_is_told(tmp_path: Path) -> None:
    loaded = load(tmp_path, "sandbox:\n  ownership: {type: memory}\n")
    assert loaded.settings.agent_ttl_s == 60.0
    assert "always kept in Redis" in told(loaded)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ("{type: postgres}", "sandbox.ownership.type"),
        ("{ttl_multiplier: 1}", "sandbox.ownership.ttl_multiplier"),
        ("{renewal_interval_seconds: soon}", "sandbox.ownership.renewal_interval_seconds"),
        ("{tpye: redis}", "sandbox.ownership.tpye"),
        ("redis", "sandbox.ownership"),
    ],
)
def test_a_wrong_ownership_is_named(tmp_path: Path, block: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f"sandbox:\n  ownership: {block}\n")
    assert refused.value.facts["key"] == key
    assert refused.value.facts["line"] == 2


def test_a_cap_of_zero_or_less_stands_for_the_default(tmp_path: Path) -> None:
    loaded = load(tmp_path, "tools:\n  - {name: glob, max_results: 0}\n")
    assert loaded.settings.glob_max_results == 200
    assert "stands for the default" in told(loaded)


@pytest.mark.parametrize("entry", ["glob", "{max_results: 3}", "{name: glob, max_results: many}"])
def test_a_wrong_entry_of_the_tools_is_named(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f"tools:\n  - {entry}\n")
    assert str(refused.value.facts["key"]).startswith("tools[0]")


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        ("deerflow.sandbox.local:LocalSandboxProvider", "local"),
        ("deerflow.sandbox.local.local_sandbox_provider:LocalSandboxProvider", "local"),
        ("deerflow.community.aio_sandbox:AioSandboxProvider", "aio"),
        ("src.community.aio_sandbox.aio_sandbox_provider:AioSandboxProvider", "aio"),
        ("sandfleet:SandboxProvider", "local"),
    ],
)
def test_a_class_path_is_understood_in_the_file_and_in_the_environment(tmp_path: Path, path: str, backend: str) -> None:
    in_file = load(tmp_path, f"sandbox:\n  use: {path}\n").settings
    in_environment = load_settings({"SANDFLEET_USE": path}).settings
    assert (in_file.use, in_file.backend) == ("", backend)
    assert (in_environment.use, in_environment.backend) == ("", backend)


def test_a_backend_that_is_named_wins_over_the_class_before_or_after_it(tmp_path: Path) -> None:
    use = "use: deerflow.sandbox.local:LocalSandboxProvider"
    for lines in (f"{use}\n  backend: host", f"backend: host\n  {use}"):
        assert load(tmp_path, f"sandbox:\n  {lines}\n").settings.backend == "host"


@pytest.mark.parametrize("named", ["docker", "mock"])
def test_a_provisioner_does_not_override_another_backend_that_is_named(tmp_path: Path, named: str) -> None:
    loaded = load(tmp_path, f"sandbox:\n  backend: {named}\n  provisioner_url: http://p:8002\n")
    assert loaded.settings.backend == named
    assert "provisioner_url has no effect" in told(loaded)


def test_a_class_of_ones_own_may_have_keys_of_its_own(tmp_path: Path) -> None:
    loaded = load(tmp_path, "sandbox:\n  use: mine.sandboxes:Provider\n  colour: green\n  replicas: 2\n")
    assert (loaded.settings.use, loaded.settings.replicas) == ("mine.sandboxes:Provider", 2)
    assert "sandbox.colour" in told(loaded)
    assert "left to mine.sandboxes:Provider" in told(loaded)
    with pytest.raises(ConfigError, match="colour"):
        load(tmp_path, "sandbox:\n  colour: green\n")


@pytest.mark.parametrize("path", ["no colon", "a:b:c", "a.b:", ":Class"])
def test_a_class_path_that_is_none_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f'sandbox:\n  use: "{path}"\n')
    assert refused.value.facts["key"] == "sandbox.use"


def test_an_unknown_kind_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.kind: must be one of local, mock.*did you mean `aliyun`"):
        load(tmp_path, "sandbox:\n  kind: aliyn\n")
