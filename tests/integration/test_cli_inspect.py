"""``sandfleet inspect`` against a real fleet: everything that is known of one sandbox."""

from __future__ import annotations

import json

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack


def shown(fleet: Stack, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["--redis-url", fleet.settings.redis_url, "inspect", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_tells_whose_a_sandbox_is_how_it_is_isolated_and_that_it_answers(
    fleet: Stack, provider: SandboxProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox_id = provider.acquire("dora", user_id="7")
    code, out, _ = shown(fleet, capsys, sandbox_id)
    facts = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0
    assert (facts["thread"], facts["user"], facts["backend"]) == ("dora", "7", "local (namespaces)")
    assert facts["state"].startswith("live, 1 agents")
    assert facts["node"].startswith("node-")
    assert facts["health"].startswith("alive: sandboxd ")
    assert "processes" in facts["uses"]


def test_the_document_has_the_registrys_the_nodes_and_the_sandboxs_own_word(
    fleet: Stack, provider: SandboxProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox_id = provider.acquire("emil")
    provider.release(sandbox_id)
    code, out, _ = shown(fleet, capsys, sandbox_id, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["sandbox"]["state"], told["sandbox"]["thread_id"]) == ("warm", "emil")
    assert told["node"]["state"] == "ready"
    assert told["health"]["status"] == "alive"
    assert told["metrics"]["pids"] >= 1
    assert told["ops"] == []


def test_a_sandbox_that_is_not_there_is_told_as_such(fleet: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = shown(fleet, capsys, "00000000")
    assert (code, out) == (4, "")
    assert "sandfleet ls" in err


def test_ls_nodes_and_top_say_what_isolates_and_count_blanks(
    fleet: Stack, provider: SandboxProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.acquire("dora")
    capsys.readouterr()
    for words in (["ls"], ["nodes"], ["top", "--once"]):
        assert main(["--redis-url", fleet.settings.redis_url, *words]) == 0
        out = capsys.readouterr().out
        assert "local (namespaces)" in out, words
        assert words == ["ls"] or " BLANK " in out, words
