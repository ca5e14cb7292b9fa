"""Which Redis URLs are accepted, and what redis-py's errors become."""

from __future__ import annotations

import pytest
import redis

from sandfleet.config.sentinel import parse_sentinels
from sandfleet.config.urls import HIDDEN, scrubbed
from sandfleet.connection import check_server, check_url, connect, redacted, translate
from sandfleet.errors import ConfigError, InsecureRedis, InternalError, StoreUnavailable
from sandfleet.store import MemoryStore, RedisStore, open_store


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost/0",
        "redis://127.0.0.1:6379/0",
        "redis://127.9.9.9",
        "redis://[::1]:6379/0",
        "redis://",
        "unix:///run/redis.sock",
        "redis://:secret@redis.example.com/0",
        "rediss://user:secret@10.0.0.1:6380/0",
        "redis://10.0.0.1/0?password=secret",
    ],
)
def test_loopback_sockets_and_passwords_are_fine(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    ["redis://redis:6379/0", "redis://10.0.0.1", "redis://0.0.0.0", "rediss://redis.example.com", "redis://user@redis"],
)
def test_a_server_on_the_network_needs_a_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDFLEET_ALLOW_INSECURE_REDIS", raising=False)
    with pytest.raises(InsecureRedis) as refused:
        check_url(url)
    assert "SANDFLEET_ALLOW_INSECURE_REDIS=1" in str(refused.value)
    check_url(url, allow_insecure=True)
    monkeypatch.setenv("SANDFLEET_ALLOW_INSECURE_REDIS", "1")
    check_url(url)


@pytest.mark.parametrize("url", ["", "valkey://localhost", "localhost:6379", "http://x", "redis://x:notaport/0"])
def test_what_is_no_redis_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        check_url(url)


def test_credentials_are_not_shown() -> None:
    assert redacted("redis://user:secret@redis.example.com:7000/2?password=other") == "redis://redis.example.com:7000/2"
    assert redacted("unix://user:secret@/run/redis.sock") == "unix:///run/redis.sock"


def test_a_client_never_repeats_a_command_and_a_blocking_one_never_gives_up() -> None:
    plain, blocking = connect("redis://localhost"), connect("redis://localhost", blocking=True, name="reader")
    assert plain.connection_pool.connection_kwargs["retry"].get_retries() == 0
    assert plain.connection_pool.connection_kwargs["socket_timeout"] == 5.0
    assert blocking.connection_pool.connection_kwargs["socket_timeout"] is None
    assert blocking.connection_pool.connection_kwargs["client_name"] == "reader"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (redis.ConnectionError("Error 111 connecting to localhost:6379. Connection refused."), "refused"),
        (redis.ConnectionError("Connection closed by server."), "connection"),
        (redis.TimeoutError("Timeout reading from socket"), "timeout"),
        (redis.AuthenticationError("invalid password"), "auth"),
        (redis.ResponseError("NOAUTH Authentication required."), "auth"),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), "loading"),
        (redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
        (redis.ResponseError("OOM command not allowed script: abc"), "full"),
        (redis.ReadOnlyError("You can't write against a read only replica."), "read_only"),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "misconf"),
    ],
)
def test_each_trouble_is_told_apart(error: redis.RedisError, reason: str) -> None:
    told = translate(error, "redis://:secret@localhost")
    assert isinstance(told, StoreUnavailable)
    assert told.facts["reason"] == reason
    assert "secret" not in str(told)


def test_the_rest_is_a_config_error_or_a_bug() -> None:
    assert isinstance(translate(redis.ResponseError("MOVED 1 host:1"), "redis://x"), ConfigError)
    assert isinstance(translate(redis.ResponseError("NOPERM no permission"), "redis://x"), ConfigError)
    assert isinstance(translate(redis.ResponseError("ERR user_script:1: boom"), "redis://x"), InternalError)


def test_clusters_and_old_servers_are_refused() -> None:
    check_server({"cluster_enabled": "0", "redis_version": "6.2.0"}, "redis://x")
    check_server({"redis_version": "7.2.4"}, "redis://x")
    with pytest.raises(ConfigError, match="Cluster"):
        check_server({"cluster_enabled": "1", "redis_version": "7.0.0"}, "redis://x")
    with pytest.raises(ConfigError, match=r"6\.2"):
        check_server({"redis_version": "6.0.16"}, "redis://x")


def test_open_store_judges_the_url_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDFLEET_ALLOW_INSECURE_REDIS", raising=False)
    with pytest.raises(InsecureRedis):
        open_store("redis://redis.example.com")
    store = open_store("redis://localhost")
    assert isinstance(store, RedisStore)
    store.close()
    assert isinstance(open_store("memory://"), MemoryStore)


# -- Sentinel ---------------------------------------------------------------------------------------------

SENTINELS = "sentinel://user:p%40ss@s1:26379,s2,[::1]:7000/3?service=main&sentinel_password=other"


def test_a_sentinel_url_names_hosts_service_and_both_logins() -> None:
    found = parse_sentinels(SENTINELS)
    assert found.hosts == (("s1", 26379), ("s2", 26379), ("::1", 7000))
    assert (found.db, found.service) == (3, "main")
    assert (found.username, found.password, found.sentinel_password) == ("user", "p@ss", "other")
    assert found.as_celery_spells_it().split(";") == [
        f"sentinel://user:p%40ss@{place}/3" for place in ("s1:26379", "s2:26379", "[::1]:7000")
    ]


def test_the_logins_of_a_sentinel_url_are_not_shown() -> None:
    shown = "sentinel://s1:26379,s2:26379,[::1]:7000/3?service=main"
    assert redacted(SENTINELS) == shown
    assert scrubbed(SENTINELS) == shown.replace("//", "//***@")
    assert scrubbed("sentinel://s1/0?service=main") == "sentinel://s1/0?service=main"
    assert scrubbed("sentinel://:a/b@s1/0?service=main") == HIDDEN


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://s1:26379/0",
        "sentinel://s1/0?service=",
        "sentinel://s1/x?service=main",
        "sentinel://s1,,s2/0?service=main",
        "sentinel://:pa/ss@s1/0?service=main",
        "sentinel://s1:port/0?service=main",
        "sentinel://s1/0?service=a&service=b",
        "sentinel://s1/0?service=a&master_name=b",
    ],
)
def test_a_sentinel_url_with_a_mistake_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_url(url)
    assert "pa/ss" not in str(refused.value)
    assert "sentinel" in str(refused.value)


def test_sentinels_on_the_network_need_the_password_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDFLEET_ALLOW_INSECURE_REDIS", raising=False)
    check_url("sentinel://127.0.0.1:1,localhost/0?service=main")
    check_url(SENTINELS)
    with pytest.raises(InsecureRedis):
        check_url("sentinel://127.0.0.1,10.0.0.1/0?service=main&sentinel_password=other")


def test_sentinels_of_which_none_answers_are_told_as_such() -> None:
    client = connect("sentinel://127.0.0.1:1,127.0.0.1:2/0?service=main")
    with pytest.raises(redis.RedisError) as failed:
        client.ping()
    told = translate(failed.value, "sentinel://127.0.0.1:1/0?service=main")
    assert isinstance(told, StoreUnavailable)
    assert (told.facts["reason"], told.retry_after_s) == ("no_primary", 1.0)
