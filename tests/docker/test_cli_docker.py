"""The command line and the reaper with containers: large transfers, ends by age and idleness, hard ends of ``up``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

Run = Callable[..., subprocess.CompletedProcess[bytes]]
SANDFLEET = (sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())")
MIB = 1024 * 1024


def containers(data_root: Path) -> set[str]:
    """Names of the containers of this data root's nodes, running or not."""
    data_id = (data_root / "data-id").read_text().strip()
    argv = ["docker", "ps", "-a", "--format", "{{.Names}}", "--filter", f"label=sandfleet.deployment={data_id}"]
    return set(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split())


@contextmanager
def fleet_of_one(**settings: Any) -> Iterator[Stack]:
    require("docker")
    require("redis")
    given = {"lease_s": 3.0, "acquire_timeout_s": 60.0, "blank_pool": 0, **settings}
    with Stack(1, backend="docker", **given) as stack:
        yield stack


# --- transfers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    with fleet_of_one(replicas=2) as stack:
        yield stack


@pytest.fixture
def run(fleet: Stack) -> Run:
    """Run the command line as a process of its own, against the fleet."""

    def call(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "SANDFLEET_REDIS_URL": fleet.settings.redis_url, "SANDFLEET_BACKEND": "docker"}
        return subprocess.run([*SANDFLEET, *words], input=given, capture_output=True, check=False, timeout=100, env=env)

    return call


def test_50_mib_of_standard_input_arrive(run: Run) -> None:
    data = os.urandom(MIB) * 50
    done = run("exec", "-t", "big", "--", "sha256sum", given=data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_bytes_come_back_as_they_were_given(run: Run) -> None:
    data = bytes(range(256)) * 4096
    done = run("exec", "-t", "big", "--", "cat", given=data)
    assert (done.returncode, done.stdout == data, done.stderr) == (0, True, b"")


def test_500_kib_of_arguments_arrive(run: Run) -> None:
    words = [letter * (100 * 1024) for letter in "abcde"]
    program = "import sys; print([(a[0], len(a)) for a in sys.argv[1:]])"
    done = run("exec", "-n", "-t", "big", "--", "python3", "-c", program, *words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().strip() == str([(letter, 100 * 1024) for letter in "abcde"])


def test_a_tree_of_50_mib_goes_in_and_comes_out_as_it_was(run: Run, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    for number in range(25):
        (tree / "sub" / f"file-{number}").write_bytes(os.urandom(2 * MIB))
    (tree / "sub" / "ü").write_text("x")
    (tree / "sub" / "ü").chmod(0o750)
    (tree / "link").symlink_to("sub/file-1")
    assert run("cp", "-r", str(tree), "big:").returncode == 0
    done = run("cp", "big:tree", str(tmp_path / "back"))
    assert (done.returncode, done.stderr) == (0, b"")
    assert subprocess.run(["diff", "-r", tree, tmp_path / "back"], check=False).returncode == 0
    assert (tmp_path / "back" / "link").readlink() == Path("sub/file-1")
    assert (tmp_path / "back" / "sub" / "ü").stat().st_mode & 0o777 == 0o750


# --- ends ----------------------------------------------------------------------------------------


def told(stack: Stack, sandbox_id: str) -> str:
    return json.dumps([str(event) for event in stack.store.story(sandbox_id)])


def test_the_one_that_was_idle_longest_makes_room() -> None:
    with fleet_of_one(replicas=2) as stack, SandboxProvider(stack.settings) as provider:
        first, second = provider.acquire("first"), provider.acquire("second")
        before = containers(stack.settings.data_root)
        provider.get(first).run("touch /tmp/same").check()  # type: ignore[union-attr]
        for sandbox_id in (second, first):
            provider.release(sandbox_id)
        third = provider.acquire("third")
        assert {info.sandbox_id for info in provider.list()} == {first, third}
        after = containers(stack.settings.data_root)
        assert (len(before), len(after), len(before & after)) == (2, 2, 1), "one went, one came"
        assert provider.get(provider.acquire("first")).run("test -e /tmp/same").exit_code == 0  # type: ignore[union-attr]


def test_idle_and_old_ones_end_with_their_containers_and_the_files_stay() -> None:
    with fleet_of_one(replicas=2, idle_timeout_s=2, max_age_s=8) as stack, SandboxProvider(stack.settings) as provider:
        held, idle = provider.acquire("held"), provider.acquire("idle")
        provider.get(held).write_file("/mnt/user-data/workspace/kept", "mine")  # type: ignore[union-attr]
        provider.release(idle)
        wait_until(lambda: [info.sandbox_id for info in stack.store.sandboxes()] == [held], 30)
        assert "idle" in told(stack, idle)
        wait_until(lambda: not containers(stack.settings.data_root), 30)
        assert "maximum age" in told(stack, held)
        kept = stack.settings.data_root / "threads" / "held" / "user-data" / "workspace" / "kept"
        assert kept.read_text() == "mine"


# --- up ------------------------------------------------------------------------------------------


@pytest.fixture
def up_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Environment of an ``up`` of its own, with short paths, which commands of this process find too."""
    require("docker")
    require("redis")
    root = tempfile.mkdtemp(prefix="sf-")
    for name in ("REDIS_URL", "SANDFLEET_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SANDFLEET_RUN_ROOT", f"{root}/run")
    monkeypatch.setenv("SANDFLEET_DATA_ROOT", f"{root}/data")
    yield dict(os.environ)
    if left := containers(Path(root) / "data") if (Path(root) / "data" / "data-id").exists() else set():
        subprocess.run(["docker", "rm", "--force", *left], check=True, capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


@contextmanager
def up(env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running ``up``, one of whose threads has a container."""
    process = subprocess.Popen([*SANDFLEET, "up", "--backend", "docker"], stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout is not None
        assert any(b"Ctrl-C" in line for line in process.stdout)
        assert main(["exec", "-n", "-t", "alice", "--", "true"]) == 0
        yield process
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_is_away_is_told_before_anything_is_started(up_env: dict[str, str]) -> None:
    env = {**up_env, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run(
        [*SANDFLEET, "up", "--backend", "docker"], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "no Docker engine answers at unix:///nowhere/docker.sock" in line
    assert "sandbox.docker_host" in line


def test_two_interrupts_leave_no_container(up_env: dict[str, str]) -> None:
    data_root = Path(up_env["SANDFLEET_DATA_ROOT"])
    with up(up_env) as process:
        assert containers(data_root)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert containers(data_root) == set()


def test_what_a_killed_fleet_left_is_told_by_doctor_with_what_to_type(
    up_env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    data_root = Path(up_env["SANDFLEET_DATA_ROOT"])
    with up(up_env) as process:
        held = containers(data_root)
        assert held
        assert not held & set(leftovers(capsys)), "its node runs"
        process.kill()
        process.wait()
        wait_until(lambda: set(leftovers(capsys)) >= containers(data_root), 20)
        assert containers(data_root), "nobody removed them"
        shutil.rmtree(data_root / "nodes")
        assert set(leftovers(capsys)) >= containers(data_root), "no node will ever come back"


def leftovers(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The containers that ``doctor`` says to remove."""
    capsys.readouterr()
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    command = checks.get("docker leftovers", {}).get("advice", "")
    return command.partition("docker rm --force ")[2].split()
