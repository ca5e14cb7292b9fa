"""What a child of the stack reads from its environment is what its parent meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandfleet.config import Settings
from sandfleet.embedded_redis import redis_config
from sandfleet.stack import Stack, child_environ


def test_settings_come_through_the_environment_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/0")
    monkeypatch.setenv("SANDFLEET_REPLICAS", "3")
    meant = Settings(
        redis_url="redis://:secret@127.0.0.1:7000/0",
        labels={"zone": "a", "disk": "fast"},
        backends=("mock", "local"),
        data_root=Path("/data"),
        lease_s=2.5,
        task_events=True,
    )
    environ = child_environ(meant, {"EXTRA": "1"})
    assert Settings.load(environ) == meant
    assert environ["EXTRA"] == "1"
    assert "REDIS_URL" not in environ


def test_a_stack_names_its_nodes_unless_told() -> None:
    assert Stack(nodes=2).node_ids == ("node-1", "node-2")
    assert Stack(nodes=["left", "right"]).node_ids == ("left", "right")


def test_an_unstarted_stack_is_stopped_without_harm() -> None:
    Stack(nodes=1).stop()


def test_the_private_redis_keeps_its_port_and_password(tmp_path: Path) -> None:
    config, url = redis_config(tmp_path / "redis", durable=False)
    assert redis_config(tmp_path / "redis", durable=False) == (config, url)
    assert config.stat().st_mode & 0o077 == 0
    assert url.split("@")[0].rpartition(":")[2] in config.read_text()
    assert "bind 127.0.0.1\n" in config.read_text()
