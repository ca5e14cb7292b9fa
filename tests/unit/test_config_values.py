"""What a file says: mistakes and their messages, `$NAME`, profiles, and who wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sandfleet.config import Loaded, Settings, load_settings
from sandfleet.config.environ import to_environ
from sandfleet.errors import ConfigError


def load(tmp_path: Path, text: str, **environ: str) -> Loaded:
    file = tmp_path / "sandfleet.yaml"
    file.write_text(text)
    return load_settings(environ, config=file)


def refusal(tmp_path: Path, text: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text, **environ)
    assert str(tmp_path / "sandfleet.yaml") in str(refused.value)
    assert refused.value.code == "config_invalid"
    return refused.value


# --- what is wrong in it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "line", "hint"),
    [
        ("sandbox:\n  replicsa: 3\n", "sandbox.replicsa", 2, "did you mean `replicas`?"),
        ("sandbox:\n  idle_timout: 3\n", "sandbox.idle_timout", 2, "did you mean `idle_timeout`?"),
        ("redis:\n  ulr: x\n", "redis.ulr", 2, "did you mean `url`?"),
        ("sandbx:\n  replicas: 3\n", "sandbx", 1, "did you mean `sandbox`?"),
        ("profile:\n  dev: {}\n", "profile", 1, "did you mean `profiles`?"),
        ("sandbox:\n  lease_s: 3\n", "sandbox.lease_s", 2, "did you mean `node.lease_s`, indented below `node:`?"),
        ("replicas: 3\n", "replicas", 1, "did you mean `sandbox.replicas`, indented below `sandbox:`?"),
        ("sandbox:\n  config: {memory_limt: 3}\n", "sandbox.config.memory_limt", 2, "`memory_limit`"),
        ("sandbox:\n  aio_sandbox:\n    imag: x\n", "sandbox.aio_sandbox.imag", 3, "`image`"),
        ("tools:\n  glob: {max_result: 3}\n", "tools.glob.max_result", 2, "`max_results`"),
        ("node:\n  quux: 3\n", "node.quux", 2, "`sandfleet config show` lists all of them"),
        ("sandbox:\n  config:\n    volumes: [{sorce: /a}]\n", "sandbox.config.volumes[0].sorce", 3, "`source`"),
        ("sandbox:\n  mounts:\n    - host_pth: /a\n", "sandbox.mounts[0].host_pth", 3, "`host_path`"),
        ("sandbox:\n  mounts:\n    - {readonly: y}\n", "sandbox.mounts[0].readonly", 3, "`read_only`"),
        ("sandbox:\n  mounts: [/a]\n", "sandbox.mounts[0]", 2, "must be a mapping of host_path"),
        ("sandbox:\n  mounts: [{host_path: /a}]\n", "sandbox.mounts[0].container_path", 2, "Field required"),
        ("node:\n  id: a b\n", "node.id", 2, "a node id is"),
        ("metrics:\n  address: everywhere\n", "metrics.address", 2, "is not HOST:PORT"),
        ("sandbox: 3\n", "sandbox", 1, "must be a mapping"),
        ("sandbox:\n  aio_sandbox: yes\n", "sandbox.aio_sandbox", 2, "must be a mapping"),
        ("sandbox:\n  replicas: many\n", "sandbox.replicas", 2, "valid integer"),
        ("sandbox:\n  replicas: 0\n", "sandbox.replicas", 2, "greater than or equal to 1"),
        ("sandbox:\n  replicas: yes\n", "sandbox.replicas", 2, "not true or false"),
        ("sandbox:\n  replicas: [3]\n", "sandbox.replicas", 2, "must be one value"),
        ("sandbox:\n  allow_host_bash: perhaps\n", "sandbox.allow_host_bash", 2, "boolean"),
        ("sandbox:\n  idle_timeout: .inf\n", "sandbox.idle_timeout", 2, "finite"),
        ("sandbox:\n  overflow_policy: explode\n", "sandbox.overflow_policy", 2, "'wait', 'reject' or 'burst'"),
        ("sandbox:\n  image_pull_policy: Sometimes\n", "sandbox.image_pull_policy", 2, "'Always'"),
        ("sandbox:\n  memory_bytes: plenty\n", "sandbox.memory_bytes", 2, "such as 512m"),
        ("sandbox:\n  config: {memory_limit: [1]}\n", "sandbox.config.memory_limit", 2, "must be one value"),
        ("sandbox:\n  environment: [A]\n", "sandbox.environment", 2, "must be a mapping of text"),
        ("sandbox:\n  environment: {A-B: x}\n", "sandbox.environment.A-B", 2, "match pattern"),
        ("sandbox:\n  environment: {A: {b: c}}\n", "sandbox.environment.A", 2, "must be text"),
        ("sandbox:\n  allowed_domains: {a: b}\n", "sandbox.allowed_domains", 2, "must be a list of text"),
        ("sandbox:\n  mounts: /a\n", "sandbox.mounts", 2, "list"),
        ("sandbox:\n  use_docker: true\n", "sandbox.use_docker", 2, "below `sandbox.config:`"),
        ("sandbox:\n  thread_data_mounts: maybe\n", "sandbox.thread_data_mounts", 2, "must be true or false"),
        ("sandbox:\n  config: {use_docker: 3}\n", "sandbox.config.use_docker", 2, "must be true or false"),
    ],
)
def test_a_mistake_is_told_with_file_line_key_and_what_would_be_right(
    tmp_path: Path, text: str, key: str, line: int, hint: str
) -> None:
    error = refusal(tmp_path, text)
    assert hint in str(error)
    assert f":{line}: {key}" in str(error)
    assert (error.facts["key"], error.facts["line"]) == (key, line)
    assert error.facts["file"] == str(tmp_path / "sandfleet.yaml")


@pytest.mark.parametrize(
    ("text", "size"), [("512m", 512 << 20), ("1.5 GiB", 3 << 29), ("4194304", 4 << 20), ("1tb", 1 << 40)]
)
def test_sizes_may_be_written_with_units(tmp_path: Path, text: str, size: int) -> None:
    assert load(tmp_path, f"sandbox:\n  memory_bytes: {text}\n").settings.container.memory_bytes == size
    assert Settings.load({"SANDFLEET_MEMORY_BYTES": text}).container.memory_bytes == size


def test_paths_are_relative_to_the_file_and_a_tilde_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = load(tmp_path, "node: {data_root: ./data}\nskills: {path: ~/skills}\n").settings
    assert (settings.data_root, settings.skills_path) == (tmp_path / "data", Path("/home/somebody/skills"))


def test_text_stays_as_it_is_written(tmp_path: Path) -> None:
    text = "node: {id: 007, labels: {zone: 1_000, on: yes}}\nsandbox: {image: 1.10}\n"
    settings = load(tmp_path, text).settings
    assert (settings.node_id, settings.labels) == ("007", {"zone": "1_000", "on": "yes"})
    assert settings.container.image == "1.10"


# --- $NAME ---------------------------------------------------------------------------------------


def test_a_whole_value_may_be_a_variable(tmp_path: Path) -> None:
    text = "redis: {url: $URL}\nsandbox: {replicas: '${N}', allowed_domains: $HOSTS, environment: {A: $URL}}\n"
    settings = load(tmp_path, text, URL="redis://r/1", N="7", HOSTS="a.example, b.example").settings
    assert (settings.redis_url, settings.replicas) == ("redis://r/1", 7)
    assert settings.container.allowed_domains == ("a.example", "b.example")
    assert settings.environment == {"A": "redis://r/1"}


def test_a_variable_that_is_not_set_is_an_error_that_names_key_and_variable(tmp_path: Path) -> None:
    error = refusal(tmp_path, "redis:\n  url: $NOWHERE\n")
    assert "redis.url: the environment variable NOWHERE is not set" in str(error)
    assert error.facts["variable"] == "NOWHERE"


def test_a_variable_within_a_value_is_refused_at_its_beginning_and_literal_elsewhere(tmp_path: Path) -> None:
    assert "only a whole value" in str(refusal(tmp_path, "node:\n  data_root: $HOME/data\n", HOME="/h"))
    assert load(tmp_path, "sandbox: {environment: {A: a$HOME, B: $$HOME, C: $}}\n").settings.environment == {
        "A": "a$HOME",
        "B": "$HOME",
        "C": "$",
    }


def test_inherited_variables_are_copied_within_what_the_lists_allow(tmp_path: Path) -> None:
    text = """
sandbox:
  env_inherit: [LANG, AWS_SECRET, OTHER, MISSING_LC, OWN]
  env_whitelist: [LANG, "*_LC", "AWS_*", OWN]
  env_blacklist: ["AWS_*"]
  environment: {OWN: mine}
"""
    loaded = load(tmp_path, text, LANG="C", AWS_SECRET="hunter2", OTHER="x", OWN="theirs")
    assert loaded.settings.environment == {"LANG": "C", "OWN": "mine"}
    told = {notice.text for notice in loaded.notices}
    assert told == {
        "AWS_SECRET is not copied: env_blacklist",
        "OTHER is not copied: env_whitelist does not have it",
        "MISSING_LC is not copied: it is not set in this process",
    }


# --- who wins ------------------------------------------------------------------------------------


def test_arguments_win_over_the_environment_over_the_profile_over_the_file(tmp_path: Path) -> None:
    text = """
sandbox: {replicas: 1, burst_limit: 1, max_per_user: 1, idle_timeout_s: 1}
profiles:
  big: {sandbox: {replicas: 2, burst_limit: 2, max_per_user: 2}}
"""
    file = tmp_path / "sandfleet.yaml"
    file.write_text(text)
    environ = {"SANDFLEET_ENV": "big", "SANDFLEET_REPLICAS": "3", "SANDFLEET_BURST_LIMIT": "3"}
    loaded = load_settings(environ, config=file, replicas=4)
    settings = loaded.settings
    assert (settings.replicas, settings.burst_limit, settings.max_per_user) == (4, 3, 2)
    assert (settings.idle_timeout_s, settings.max_age_s) == (1, 0)
    assert loaded.source("replicas") == "argument"
    assert loaded.source("burst_limit") == "SANDFLEET_BURST_LIMIT"
    assert loaded.source("max_per_user") == f"{file} profile big:4"
    assert loaded.source("idle_timeout_s") == f"{file}:2"
    assert loaded.source("max_age_s") == "default"


def test_redis_url_stands_between_sandfleet_redis_url_and_the_file(tmp_path: Path) -> None:
    text = "redis: {url: redis://file/0}\n"
    assert load(tmp_path, text).settings.redis_url == "redis://file/0"
    assert load(tmp_path, text, REDIS_URL="redis://general/0").settings.redis_url == "redis://general/0"
    both = load(tmp_path, text, REDIS_URL="redis://general/0", SANDFLEET_REDIS_URL="redis://ours/0")
    assert both.settings.redis_url == "redis://ours/0"


PROFILES = """
sandbox:
  idle_timeout: 600
  environment: {A: file, B: file}
  allowed_domains: [a.example]
  mounts: [{host_path: /a, container_path: /mnt/a}]
profiles:
  dev:
    sandbox: {idle_timeout_s: 60, environment: {B: dev, C: dev}, allowed_domains: [b.example], mounts: }
  production: {sandbox: {environment: {KEY: $PRODUCTION_KEY}}, redis: {url: $PRODUCTION_URL}}
  nothing:
"""


def test_a_profile_is_laid_over_the_file(tmp_path: Path) -> None:
    settings = load(tmp_path, PROFILES, SANDFLEET_ENV="dev").settings
    assert settings.idle_timeout_s == 60  # under its other name in the file
    assert settings.environment == {"A": "file", "B": "dev", "C": "dev"}
    assert settings.container.allowed_domains == ("b.example",)
    assert settings.mounts == ()  # an empty value takes the file's back
    assert load(tmp_path, PROFILES, SANDFLEET_ENV="nothing").settings == load(tmp_path, PROFILES).settings


def test_no_profile_is_chosen_unless_somebody_does(tmp_path: Path) -> None:
    loaded = load(tmp_path, PROFILES)
    assert (loaded.profile, loaded.settings.idle_timeout_s) == ("", 600)


def test_the_variables_of_a_profile_are_needed_only_where_it_is_chosen(tmp_path: Path) -> None:
    assert load(tmp_path, PROFILES, SANDFLEET_ENV="dev").profile == "dev"
    assert "PRODUCTION_URL" in str(refusal(tmp_path, PROFILES, SANDFLEET_ENV="production"))


def test_a_profile_that_is_not_chosen_is_checked_as_far_as_it_goes_without_its_variables(tmp_path: Path) -> None:
    profile = """
profiles:
  other:
    sandbox:
      kind: $KIND
      replicas: $N
      mounts: [{host_path: $PLACE, container_path: /data}]
      environment: $MAPPING
      allowed_domains: $LIST
      config: {memory_limit: $MB, use_docker: $FLAG}
      ownership: {type: $TYPE, ttl_multiplier: $TIMES, redis_url: $URL}
      thread_data_mounts: $FLAG
    tools: [{name: glob, max_results: $N}]
"""
    text = "sandbox: {replicas: 3}" + profile
    assert load(tmp_path, text).settings.replicas == 3
    assert "must be a size, not true or false" in str(refusal(tmp_path, text.replace("$MB", "true")))


@pytest.mark.parametrize(
    ("text", "env", "words"),
    [
        (PROFILES, "prodution", "it has: dev, production, nothing; did you mean `production`?"),
        ("sandbox: {}\n", "dev", "it has: none"),
        ("profiles: [dev]\n", "dev", "must be a mapping of names to sections"),
        ("profiles: {dev: 3}\n", "dev", "must hold sections"),
        ("profiles: {dev: {profiles: {}}}\n", "dev", "must hold sections"),
        ("profiles: {dev: {sandbox: {replicsa: 3}}}\n", "", "profiles.dev.sandbox.replicsa: is no setting"),
        ("profiles: {dev: {sandbox: {replicas: x}}}\n", "dev", "profiles.dev.sandbox.replicas: Input should be"),
    ],
)
def test_a_wrong_profile_is_named(tmp_path: Path, text: str, env: str, words: str) -> None:
    assert words in str(refusal(tmp_path, text, SANDFLEET_ENV=env))


def test_a_profile_without_a_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_settings({"SANDFLEET_ENV": "production"})


# --- notices -------------------------------------------------------------------------------------


def test_a_notice_is_logged_once_however_often_settings_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"sandbox:\n  environment: {{A: ${tmp_path.name.upper().replace('-', '_')}}}\n"
    for _ in range(3):
        load(tmp_path, text)
    assert [record.levelname for record in caplog.records if record.name == "sandfleet.config"] == ["WARNING"]


# --- what changes nothing says so ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sandbox: {image: x}\n", "has no effect with the backend local"),
        ("sandbox: {allow_host_bash: true}\n", "`backend: host` is the host mode"),
        ("sandbox: {env_whitelist: [A]}\n", "unless `env_inherit` names it"),
        ("sandbox: {env_blacklist: [A]}\n", "unless `env_inherit` names it"),
        ("sandbox: {overflow_policy: burst}\n", "no `burst_limit`"),
        ("sandbox: {blocked_paths: [/a]}\n", "not enforced"),
    ],
)
def test_a_setting_without_effect_is_told_wherever_it_comes_from(tmp_path: Path, text: str, words: str) -> None:
    [(name, value)] = yaml.safe_load(text)["sandbox"].items()
    as_text = value[0] if isinstance(value, list) else str(value).lower()
    for loaded in (
        load(tmp_path, text),
        load_settings({f"SANDFLEET_{name.upper()}": as_text}),
        load_settings({}, **{name: value}),
    ):
        assert [words in notice.text for notice in loaded.notices] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "sandbox: {backend: host, allow_host_bash: true}\n",
        "sandbox: {allow_host_bash: true}\nnode: {backends: [local, host]}\n",
        "sandbox: {env_whitelist: [PATH], env_inherit: [PATH]}\n",
        "sandbox: {overflow_policy: burst, burst_limit: 2}\n",
    ],
)
def test_a_setting_with_effect_needs_no_word(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text, PATH="/bin").notices == ()


def test_what_a_child_is_handed_needs_no_words() -> None:
    assert load_settings(to_environ(Settings())).notices == ()


@pytest.mark.parametrize(
    ("text", "held_s", "told"),
    [
        ("idle_timeout: 0", 0.0, True),
        ("idle_timeout: 7200", 7200.0, True),
        ("idle_timeout: 60", 3600.0, False),
        ("idle_timeout: 0, active_idle_timeout_s: 9", 9.0, False),
        ("idle_timeout_s: 0", 3600.0, False),
        ("config: {idle_timeout: 0}", 0.0, True),
    ],
)
def test_the_idle_timeout_of_the_seeds_ends_nothing_held_earlier_than_it_says(
    tmp_path: Path, text: str, held_s: float, told: bool
) -> None:
    loaded = load(tmp_path, f"sandbox: {{{text}}}\n")
    assert loaded.settings.active_idle_timeout_s == held_s
    assert [notice.key for notice in loaded.notices] == [loaded.found["idle_timeout_s"].key] * told


@pytest.mark.parametrize("make", [lambda: {"replica": 3}, lambda: {"container": {"imag": "x"}}])
def test_an_argument_that_is_no_setting_is_an_error(make: Callable[[], dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load_settings({}, **make())


def test_a_group_may_be_given_as_an_argument() -> None:
    settings = load_settings({"SANDFLEET_IMAGE": "env", "SANDFLEET_CPUS": "3"}, container={"image": "given"}).settings
    assert (settings.container.image, settings.container.cpus) == ("given", 3)
    again = load_settings({}, container=settings.container).settings
    assert again.container == settings.container
