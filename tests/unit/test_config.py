"""Settings: where they come from and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sandfleet.config import Settings
from sandfleet.connection import check_url, connect
from sandfleet.errors import ConfigError, InsecureRedis


def test_without_anything_there_are_working_defaults() -> None:
    settings = Settings.load({})
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert settings.backend == "local"
    assert settings.offered == ("local",)
    assert settings.node_id is None
    assert settings.data_root.is_absolute()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("REPLICAS", "3", 3),
        ("LEASE_S", "2.5", 2.5),
        ("TASK_EVENTS", "true", True),
        ("BACKEND", "mock", "mock"),
        ("BACKENDS", "local, mock,", ("local", "mock")),
        ("LABELS", "zone=a,gpu=1=x", {"zone": "a", "gpu": "1=x"}),
        ("LABELS", "zone=a, gpu=1", {"zone": "a", "gpu": "1"}),
        ("DATA_ROOT", "/srv/data", Path("/srv/data")),
        ("NODE_ID", "node-7", "node-7"),
        ("PUBLISH", "kombu", "kombu"),
    ],
)
def test_every_setting_can_come_from_the_environment(name: str, text: str, value: Any) -> None:
    assert getattr(Settings.load({f"SANDFLEET_{name}": text}), name.lower()) == value


def test_an_argument_wins_over_the_environment_and_none_does_not() -> None:
    environ = {"SANDFLEET_REPLICAS": "3", "SANDFLEET_NODE_ID": "from-env"}
    settings = Settings.load(environ, replicas=5, node_id=None)
    assert (settings.replicas, settings.node_id) == (5, "from-env")


def test_redis_url_is_the_fallback_of_sandfleet_redis_url() -> None:
    assert Settings.load({"REDIS_URL": "redis://a/1"}).redis_url == "redis://a/1"
    both = {"REDIS_URL": "redis://a/1", "SANDFLEET_REDIS_URL": "redis://b/2"}
    assert Settings.load(both).redis_url == "redis://b/2"
    assert Settings.load({"SANDFLEET_REDIS_URL": "", "REDIS_URL": "redis://a/1"}).redis_url == "redis://a/1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("REPLICAS", "many"),
        ("REPLICAS", "0"),
        ("LEASE_S", "0"),
        ("LEASE_S", "-1"),
        ("PUBLISH", "pigeon"),
        ("REDIS_URL", "http://127.0.0.1"),
        ("TASK_EVENTS", "perhaps"),
        ("LABELS", "zone"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load({f"SANDFLEET_{name}": text})
    assert f"SANDFLEET_{name}" in str(refused.value)
    assert refused.value.facts["key"] == name.lower()


@pytest.mark.parametrize(
    "name", ["LEASE_S", "COMMAND_TIMEOUT_S", "QUEUE_TIMEOUT_S", "ACQUIRE_TIMEOUT_S", "AGENT_TTL_S"]
)
@pytest.mark.parametrize("text", ["inf", "nan"])
def test_a_duration_is_a_finite_number(name: str, text: str) -> None:
    # int(inf * 1000) raises far away from here, in the first call.
    with pytest.raises(ConfigError):
        Settings.load({f"SANDFLEET_{name}": text})


def test_a_refusal_does_not_repeat_a_password() -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load({"SANDFLEET_REDIS_URL": "rediz://:hunter2@host/0"})
    assert "hunter2" not in str(refused.value.to_wire())


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@h:6379/0",
        "redis://:hunter2#x@h:6379/0",
        "redis://:hunter2?x@h:6379/0",
        "redis://:12345/hunter2@h:6379/0",
        "redis://:12345#hunter2@h:6379/0",
        "redis://:12345?hunter2@h:6379/0",
        "redis://h:6379/hunter2",
        "redis://:hunter2@h:99999/0",
        "redis://:hunter2@[::1/0",
    ],
)
def test_a_password_that_breaks_its_url_is_refused_when_settings_are_loaded_and_not_repeated(url: str) -> None:
    for use in (lambda: Settings.load({}, redis_url=url), lambda: connect(url), lambda: check_url(url)):
        with pytest.raises(ConfigError) as refused:
            use()
        assert "hunter2" not in f"{refused.value} {refused.value.facts}"
        assert "%2F" in str(refused.value)


@pytest.mark.parametrize("url", ["redis://h", "redis://:p%2Fw@h:1/15", "unix:///run/r.sock", "rediss://h/0?db=3"])
def test_a_url_that_redis_takes_is_taken(url: str) -> None:
    assert Settings.load({}, redis_url=url).redis_url == url


def test_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(ConfigError, match="replica"):
        Settings.load({}, replica=3)


def test_settings_do_not_change() -> None:
    settings = Settings.load({})
    with pytest.raises(ValidationError):
        settings.replicas = 3  # type: ignore[misc]


def test_a_node_offers_its_list_of_backends_or_else_the_one_asked_for() -> None:
    assert Settings.load({}, backend="mock").offered == ("mock",)
    assert Settings.load({}, backend="mock", backends=("local", "mock")).offered == ("local", "mock")


# --- who may be reached ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://localhost/0",
        "redis://[::1]:6379/0",
        "redis://:secret@redis.example/0",
        "rediss://user:secret@redis.example/0",
        "unix:///run/redis.sock",
    ],
)
def test_a_loopback_or_protected_redis_is_accepted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDFLEET_ALLOW_INSECURE_REDIS", raising=False)
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example/0",
        "redis://10.0.0.1/0",
        "redis://0.0.0.0/0",
        "redis://user@redis.example/0",
        "redis://:@h/0",
    ],
)
def test_an_open_redis_on_the_network_is_refused_unless_allowed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDFLEET_ALLOW_INSECURE_REDIS", raising=False)
    with pytest.raises(InsecureRedis):
        check_url(url)
    check_url(url, allow_insecure=True)
    monkeypatch.setenv("SANDFLEET_ALLOW_INSECURE_REDIS", "1")
    check_url(url)
