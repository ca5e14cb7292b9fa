"""What ``gc`` takes for a leftover, by names alone and on disk, and what it must leave alone."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest

from sandfleet.cli import main
from sandfleet.cli.collecting import candidates, seconds
from sandfleet.cli.retaining import one_of_each_data_root
from sandfleet.errors import ConfigError
from sandfleet.leftover_dirs import data_id_of, remove_run_dir, run_dirs, thread_data
from sandfleet.model import NodeState, NodeView, SandboxInfo, SandboxState
from sandfleet.store.collecting import Leftover

DATA_ID = "0123456789abcdef0123456789abcdef"


def sandbox(sandbox_id: str, state: SandboxState = SandboxState.LIVE) -> SandboxInfo:
    return SandboxInfo(sandbox_id, "t", None, state, "n1", "i", 1, "mock", 0.0, 0.0)


def node(node_id: str, state: NodeState, *, alive: bool) -> NodeView:
    return NodeView(node_id, "i", state, alive, 4, 0, 0, DATA_ID)


def test_names_of_what_lives_are_no_candidates() -> None:
    keys = ["p:agents:aa", "p:busy:aa", "p:blob:b", "p:blob:b:0", "p:node:n1", "p:warm:n1", "p:stopping:n2", "p:op:x"]
    nodes = [node("n1", NodeState.READY, alive=True), node("n2", NodeState.DRAINING, alive=False)]
    assert candidates(keys, "p:", [sandbox("aa")], nodes) == []


def test_names_without_their_owner_are_candidates_once_each() -> None:
    keys = ["p:agents:bb", "p:busy:bb", "p:blob:b:0", "p:blob:b:1", "p:warm:n9", "p:node:n3"]
    found = candidates(keys, "p:", [sandbox("aa", SandboxState.LOST)], [node("n3", NodeState.GONE, alive=False)])
    assert found == [
        Leftover("chunk", "b:0"),
        Leftover("chunk", "b:1"),
        Leftover("lost", "aa"),
        Leftover("marks", "bb"),
        Leftover("node", "n3"),
        Leftover("node", "n9"),
    ]


@pytest.mark.parametrize(("text", "found"), [("90", 90), ("15m", 900), ("12h", 43_200), ("30D", 2_592_000), ("0", 0)])
def test_ages_are_read_as_people_write_them(text: str, found: float) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "-1", "1w", "1.5h", "h", "1 h", "9" * 10])
def test_a_wrong_age_says_what_is_right(text: str) -> None:
    with pytest.raises(click.BadParameter, match="30d"):
        seconds(text)


@pytest.mark.parametrize("what", ["--thread-data", "--checkpoints"])
def test_what_people_made_is_never_looked_for_without_an_age_or_a_count(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", what]) == 2
    assert "--older-than" in capsys.readouterr().err


def test_of_nodes_that_share_a_data_root_one_that_lives_is_asked() -> None:
    nodes = [
        node("n1", NodeState.GONE, alive=False),
        node("n3", NodeState.READY, alive=True),
        node("n2", NodeState.CORDONED, alive=True),
        replace(node("m1", NodeState.READY, alive=True), data_id="f" * 32),
    ]
    assert [view.node_id for view in one_of_each_data_root(nodes)] == ["m1", "n2"]


# --- on disk -----------------------------------------------------------------------------------


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "nodes" / "n1").mkdir(parents=True)
    (root / "data-id").write_text(f"{DATA_ID}\n")
    return root


def make_thread(data_root: Path, path: str, *, days_old: float) -> Path:
    top = data_root / path
    (top / "user-data" / "workspace" / "deep").mkdir(parents=True)
    (top / "user-data" / "workspace" / "deep" / "file").write_text("x" * 5000)
    (top / "user-data" / "workspace" / "out").symlink_to("/")
    for place, folders, names in os.walk(top, topdown=False):
        for name in [*names, *folders, "."]:
            os.utime(Path(place, name), (0, 0), follow_symlinks=False)
    touched = top / "user-data" / "workspace" / "deep" / "file"
    when = time.time() - days_old * 86_400
    os.utime(touched, (when, when))
    return top


def test_the_age_of_data_is_that_of_its_newest_file_however_deep(data_root: Path) -> None:
    make_thread(data_root, "threads/old", days_old=40)
    make_thread(data_root, "users/acme/threads/new", days_old=1)
    (data_root / "threads" / "not a thread").mkdir()
    (data_root / "threads" / "link").symlink_to("/")
    found = {(data.user_id, data.thread_id): data for data in thread_data(data_root, now_s=time.time())}
    assert set(found) == {(None, "old"), ("acme", "new")}
    assert 39 < found[None, "old"].idle_s / 86_400 < 41
    assert 0.9 < found["acme", "new"].idle_s / 86_400 < 1.1
    assert found[None, "old"].size_bytes >= 5000


def test_the_run_directory_of_a_node_that_runs_is_left_alone(data_root: Path, tmp_path: Path) -> None:
    run_root = tmp_path / "run"
    for name in (f"n1-{DATA_ID[:8]}", "n1-ffffffff", ".up"):
        (run_root / name / "3f9a1c22.1").mkdir(parents=True)
    lock = data_root / "nodes" / "n1" / "lock"
    lock.touch()
    held = os.open(lock, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert list(run_dirs(run_root, data_root, DATA_ID, now_s=time.time())) == []
    os.close(held)
    [found] = run_dirs(run_root, data_root, DATA_ID, now_s=time.time())
    held = os.open(lock, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert not remove_run_dir(found, data_root), "the node started after we looked"
    assert found.path.exists()
    os.close(held)
    assert remove_run_dir(found, data_root)
    assert sorted(path.name for path in run_root.iterdir()) == [".up", "n1-ffffffff"]


def test_a_directory_that_is_no_data_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data root"):
        data_id_of(tmp_path)
