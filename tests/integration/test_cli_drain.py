"""``sandfleet drain`` on machines that share no disk: what runs finishes, data is saved, threads go on elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Stack]:
    """Two nodes, each with a data root of its own, and one place for checkpoints."""
    require("redis")
    require("bwrap")
    pytest.importorskip("fsspec")
    roots = {name: {"SANDFLEET_DATA_ROOT": str(tmp_path / name)} for name in ("node-1", "node-2")}
    saved = (tmp_path / "saved").as_uri()
    with Stack(nodes=2, node_env=roots, backend="local", lease_s=3.0, checkpoint_url=saved) as stack:
        yield stack


@pytest.fixture
def run(machines: Stack, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["--redis-url", machines.settings.redis_url, *words])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_a_drained_node_lets_a_job_finish_saves_its_data_and_its_thread_goes_on_elsewhere(
    run: Run, machines: Stack, tmp_path: Path
) -> None:
    line = "echo begun > file; until [ -e go ]; do sleep 0.1; done; echo done > file; exit 5"
    code, out, err = run("exec", "-t", "moves", "--background", "--", line)
    assert code == 0, err
    job_id = out.strip()
    [sandbox] = json.loads(run("ls", "--thread", "moves", "--json")[1])["sandboxes"]
    node_id = sandbox["node_id"]
    assert run("drain", node_id, "--timeout", "30", "--wait", "0")[0] == 0
    assert "draining" in run("nodes")[1]
    assert [one["job_id"] for one in json.loads(run("jobs", "--json")[1])["jobs"]] == [job_id]

    # It takes no operation any more; its machine's disk is at hand here.
    (tmp_path / node_id / "threads" / "moves" / "user-data" / "workspace" / "go").touch()
    wait_until(lambda: machines.nodes[node_id].poll() is not None, 40)
    assert "saved the data of 1 of 1 sandboxes" in run("nodes")[1]
    assert run("logs", "-f", job_id)[0] == 5, "the job was not let finish"
    assert json.loads(run("nodes", "--json")[1])["nodes"][int(node_id[-1]) - 1]["state"] == "gone"

    code, out, err = run("exec", "-t", "moves", "--on-lost", "restore", "--", "cat file")
    assert (code, out) == (0, "done\n"), err
    [sandbox] = json.loads(run("ls", "--thread", "moves", "--json")[1])["sandboxes"]
    assert sandbox["node_id"] != node_id
    assert sandbox["restored"]["files"] == 2


def test_a_drain_that_is_waited_for_tells_what_was_answered_and_saved(run: Run) -> None:
    assert run("exec", "-t", "one", "--", "echo kept > file")[0] == 0
    [sandbox] = json.loads(run("ls", "--thread", "one", "--json")[1])["sandboxes"]
    code, out, err = run("drain", sandbox["node_id"])
    assert code == 0, err
    assert "nothing was in flight; it saved the data of 1 of 1 sandboxes" in out
