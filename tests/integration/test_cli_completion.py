"""Completion as a shell asks for it: click's protocol, ids from the fleet, silence when the fleet is away."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from sandfleet.cli import completing, main
from sandfleet.cli.context import Cli
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store import Store
from sandfleet.store.base import NodeRecord
from sandfleet.testing import MemoryStore

_AWAY = ["--redis-url", "redis://127.0.0.1:1/0"]


def complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, shell: str = "bash"
) -> list[str]:
    """What the shell is told for the last of ``words``."""
    line = ["sandfleet", *words]
    monkeypatch.setenv("_SANDFLEET_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(line))
    monkeypatch.setenv("COMP_CWORD", str(len(line) - 1) if shell != "fish" else words[-1])
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [line for line in out.splitlines() if line]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A fleet with node-1 and node-2, and a sandbox of each of two threads."""
    made = MemoryStore()
    for node in ("node-1", "node-2"):
        made.announce(NodeRecord(node, f"{node}-i", 4, "data", ("mock",), host="here"), lease_s=60)
    for thread in ("alice", "bob"):
        reserved = made.reserve(
            Identity(thread),
            SandboxSpec("mock"),
            node_id="node-1",
            incarnation="node-1-i",
            data_id="data",
            expires_s=60,
        )
        assert reserved.route is not None
        made.created(reserved.route)
    monkeypatch.setattr("sandfleet.cli.context.open_store", lambda *_, **__: made)
    monkeypatch.setattr(made, "close", lambda: None)
    return made


def test_commands_and_options_complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "plain,cordon" in complete(monkeypatch, capsys, "co")
    assert complete(monkeypatch, capsys, "exec", "--env-f") == ["plain,--env-file"]
    assert complete(monkeypatch, capsys, "completion", "z") == ["plain,zsh"]


def test_ids_of_the_fleet_complete(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(monkeypatch, capsys, "exec", "--thread", "al") == ["plain,alice"]
    assert complete(monkeypatch, capsys, "exec", "-t", "") == ["plain,alice", "plain,bob"]
    assert complete(monkeypatch, capsys, "ls", "--node", "node-") == ["plain,node-1", "plain,node-2"]
    ids = [f"plain,{info.sandbox_id}" for info in store.sandboxes()]
    assert complete(monkeypatch, capsys, "destroy", "") == sorted(ids)
    assert complete(monkeypatch, capsys, "drain", "node-2") == ["plain,node-2"]
    assert set(complete(monkeypatch, capsys, "story", "")) == {*ids, "plain,node-1", "plain,node-2"}


def test_zsh_and_fish_are_also_told_what_an_id_is(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = complete(monkeypatch, capsys, "exec", "--thread", "al", shell="zsh")
    assert told == ["plain", "alice", "warm on node-1"]


def test_the_url_typed_before_is_the_one_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(Cli, "store", lambda self: asked.append(self.redis_url))
    for words in (["--redis-url", "redis://x/0", "drain", ""], ["drain", "--redis-url", "redis://x/0", ""]):
        assert complete(monkeypatch, capsys, *words) == []
    assert asked == ["redis://x/0", "redis://x/0"]


def test_a_fleet_that_is_away_completes_to_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(monkeypatch, capsys, *_AWAY, "drain", "") == []
    assert complete(monkeypatch, capsys, "--redis-url", "nonsense", "drain", "") == []


def test_a_fleet_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completing, "_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        began = time.monotonic()
        assert complete(monkeypatch, capsys, "--redis-url", url, "drain", "") == []
        assert time.monotonic() - began < 1.0


def test_remarks_of_the_configuration_do_not_end_up_in_the_line_that_is_typed(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("sandbox:\n  use: deerflow.sandbox.local:LocalSandboxProvider\nmodels: []\n")
    monkeypatch.setenv("SANDFLEET_CONFIG", str(tmp_path / "config.yaml"))
    assert complete(monkeypatch, capsys, "drain", "node-2") == ["plain,node-2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_calls_us_back(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert f"_SANDFLEET_COMPLETE={shell}_complete" in out
    assert err == ""
