"""``sandfleet gc`` on a fleet with leftovers of every kind, and beside what must stay."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

Run = Callable[..., tuple[int, str, str]]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two nodes with mock sandboxes on one data root; the tests end one of them."""
    require("redis")
    with Stack(nodes=2, backend="mock", lease_s=2.0) as made:
        yield made


@pytest.fixture
def run(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        roots = ["--data-root", str(stack.settings.data_root), "--run-root", str(stack.settings.run_root)]
        code = main(["--redis-url", stack.settings.redis_url, "gc", *roots, *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def ask(run: Run) -> Ask:
    def call(*words: str) -> dict[str, Any]:
        code, out, err = run("--json", *words)
        assert code == 0, out + err
        document: dict[str, Any] = json.loads(out)
        return document

    return call


def kinds(told: dict[str, Any]) -> set[tuple[str, str]]:
    return {(item["kind"], Path(item["id"]).name) for item in told["found"]}


def test_a_fleet_in_order_has_nothing_to_collect(run: Run, stack: Stack) -> None:
    with SandboxProvider(stack.settings) as provider:
        provider.acquire("lives")
        assert run() == (0, "Nothing to collect.\n", "")
        assert run("--yes") == (0, "Nothing to collect.\n", "")


def test_what_a_killed_node_left_is_told_then_removed_and_the_living_stay(ask: Ask, run: Run, stack: Stack) -> None:
    with SandboxProvider(stack.settings) as provider:
        for n in range(6):
            provider.acquire(f"thread-{n}")
        infos = {info.sandbox_id: info for info in stack.store.sandboxes()}
        dying = {sid for sid, info in infos.items() if info.node_id == "node-2"}
        staying = set(infos) - dying
        assert dying
        assert staying
        stack.kill_node("node-2")
        wait_until(
            lambda: all(info.state == "lost" for info in stack.store.sandboxes() if info.sandbox_id in dying), 15
        )
        told = ask("--older-than", "0")
        expected = {("lost", sid) for sid in dying} | {("node", "node-2")}
        [run_dir] = [item for item in told["found"] if item["kind"] == "run directory"]
        assert Path(run_dir["id"]).name.startswith("node-2-")
        assert kinds(told) - {("run directory", Path(run_dir["id"]).name)} == expected
        assert told["removed"] == 0
        assert len(stack.store.nodes()) == 2
        assert Path(run_dir["id"]).exists()
        assert run("--older-than", "0")[1].endswith("Nothing was removed. `sandfleet gc --yes` does it.\n")

        done = ask("--yes", "--older-than", "0")
        # Once its record is gone, what the node wrote down is nobody's.
        assert kinds(done) == kinds(told) | {("node directory", "node-2")}
        assert done["removed"] == len(done["found"])
        assert [node.node_id for node in stack.store.nodes()] == ["node-1"]
        assert {info.sandbox_id for info in stack.store.sandboxes()} == staying
        assert all(info.agents == infos[info.sandbox_id].agents for info in stack.store.sandboxes())
        assert not Path(run_dir["id"]).exists()
        assert ask("--older-than", "0")["found"] == []
    stack.start_node("node-2")


def test_old_data_of_threads_without_a_sandbox_is_removed_and_no_other(ask: Ask, run: Run, stack: Stack) -> None:
    with SandboxProvider(stack.settings) as provider:
        held = provider.acquire("held", user_id="acme")
        for thread, user in (("old", "acme"), ("old", None), ("young", None)):
            provider.destroy(provider.acquire(thread, user_id=user))
        root = stack.settings.data_root
        for path in (root / "users/acme/threads/held", root / "users/acme/threads/old", root / "threads/old"):
            assert path.is_dir()
            for place, folders, names in os.walk(path):
                for name in [".", *folders, *names]:
                    os.utime(Path(place, name), (1, 1), follow_symlinks=False)
        told = ask("--thread-data", "--older-than", "30d")
        assert {item["id"] for item in told["found"] if item["kind"] == "thread data"} == {"acme/old", "old"}
        assert (root / "threads/old").is_dir()
        ask("--yes", "--thread-data", "--older-than", "30d")
        assert not (root / "threads/old").exists()
        assert not (root / "users/acme/threads/old").exists()
        assert (root / "users/acme/threads/held/user-data").is_dir()
        assert (root / "threads/young").is_dir()
        assert stack.store.sandbox(held) is not None
        provider.acquire("old")  # begins anew
        assert (root / "threads/old").is_dir()


def test_each_user_keeps_the_data_of_the_threads_that_were_used_last(ask: Ask, stack: Stack) -> None:
    root = stack.settings.data_root / "users" / "keeper" / "threads"
    with SandboxProvider(stack.settings) as provider:
        for n in range(4):
            provider.destroy(provider.acquire(f"t{n}", user_id="keeper"))
            for place, folders, names in os.walk(root / f"t{n}"):
                for name in [".", *folders, *names]:
                    os.utime(Path(place, name), (1000 + n, 1000 + n), follow_symlinks=False)
    told = ask("--thread-data", "--keep-threads", "2", "--user", "keeper")
    rows = {item["id"]: item for item in told["found"] if item["kind"] == "thread data"}
    assert set(rows) == {"keeper/t0", "keeper/t1"}
    assert rows["keeper/t0"]["node"] == told["nodes"][0]["node"]
    done = ask("--yes", "--thread-data", "--keep-threads", "2", "--user", "keeper")
    assert done["nodes"][0]["removed"] == 2
    assert sorted(path.name for path in root.iterdir()) == ["t2", "t3"]


def test_without_an_age_or_a_count_nobodys_files_are_looked_for(run: Run) -> None:
    code, _, err = run("--thread-data", "--yes")
    assert code == 2
    assert "--keep-threads" in err
