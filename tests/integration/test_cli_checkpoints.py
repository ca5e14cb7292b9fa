"""``snapshot``, ``checkpoints``, ``restore`` and ``fork`` against a fleet that saves threads' data."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator

import pytest

from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.services import require

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def saving_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require("redis")
    require("bwrap")
    pytest.importorskip("fsspec")
    where = tmp_path_factory.mktemp("checkpoints")
    with Stack(nodes=1, backend="local", lease_s=3.0, checkpoint_url=where.as_uri()) as stack:
        yield stack


@pytest.fixture
def run(saving_fleet: Stack, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["--redis-url", saving_fleet.settings.redis_url, *words])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_files_come_back_as_they_were_saved_and_what_did_not_is_told(run: Run) -> None:
    assert run("exec", "-t", "alice", "--", "echo first > plan; mkfifo pipe")[0] == 0
    code, out, err = run("snapshot", "-t", "alice", "--name", "before")
    assert code == 0, err
    assert "1 files" in out
    assert "pipe" in err, "what was left away is not told"
    assert run("exec", "-t", "alice", "--", "echo second > plan; touch more")[0] == 0

    found = json.loads(run("checkpoints", "-t", "alice", "--json")[1])["checkpoints"]
    [saved] = [one for one in found if one["name"] == "before"]
    shown = run("checkpoints", "-t", "alice")[1]
    assert saved["id"] in shown
    assert "before" in shown

    code, out, err = run("restore", "-t", "alice", "--checkpoint", saved["id"], "--yes")
    assert code == 0, err
    assert "processes, memory" in out
    assert "pipe: a pipe" in out, "what was left away does not come back"
    sandbox_id = json.loads(run("exec", "-t", "alice", "--json", "--", "true")[1])["sandbox_id"]
    assert saved["id"] in run("inspect", sandbox_id)[1]
    assert run("exec", "-t", "alice", "--", "cat plan; ls")[1] == "first\nplan\n"


def test_a_fork_begins_with_a_copy_and_shares_nothing(run: Run) -> None:
    assert run("exec", "-t", "bob", "--", "echo common > a")[0] == 0
    assert run("snapshot", "-t", "bob")[0] == 0
    code, out, err = run("fork", "-t", "bob", "--to", "bob-2", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["thread_id"] == "bob-2"
    assert told["restored"]["files"] == 1
    assert run("exec", "-t", "bob-2", "--", "cat a; echo changed > a")[1] == "common\n"
    assert run("exec", "-t", "bob", "--", "cat a")[1] == "common\n"


def test_a_thread_without_checkpoints_is_told_how_to_make_one(run: Run) -> None:
    assert run("exec", "-t", "carol", "--", "true")[0] == 0
    code, out, _ = run("checkpoints", "-t", "nobody")
    assert code == 0
    assert "sandfleet snapshot --thread nobody" in out
    code, _, err = run("restore", "-t", "nobody", "--yes")
    assert code == 4
    assert "checkpoint" in err


def test_nothing_is_replaced_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("exec", "-t", "dave", "--", "echo kept > a")[0] == 0
    assert run("snapshot", "-t", "dave")[0] == 0
    assert run("exec", "-t", "dave", "--", "echo newer > a")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, _, err = run("restore", "-t", "dave")
    assert code != 0
    assert "Replace" in err
    assert run("exec", "-t", "dave", "--", "cat a")[1] == "newer\n"
