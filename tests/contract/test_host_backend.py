"""Host mode is judged by the suite every backend is judged by; what is its own comes after."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sandfleet.backends import Capability, Connection, SandboxBackend, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.testing.backend_contract import BackendContract
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import host, load_backend
from sandfleet_workers.backends.host import HostBackend
from tests.services import wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only a root worker can give sandboxes uids of their own")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory that the sandboxes' users can walk to; pytest's own are closed."""
    path = Path(tempfile.mkdtemp(prefix="sf-host-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


class TestHostBackend(BackendContract):
    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        return HostBackend(SimpleNamespace(allow_host_bash=True), on_death)

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, HostBackend)
        os.kill(backend.pid_of(sandbox_id), signal.SIGKILL)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    deaths: list[tuple[str, str]] = []
    backend = HostBackend(SimpleNamespace(allow_host_bash=True), lambda *death: deaths.append(death))
    yield World(backend, tmp_path, deaths)
    backend.close()


@pytest.fixture
def plan(world: World) -> SandboxPlan:
    return world.plan("mine")


def shell(world: World, connection: Connection, command: str, **args: Any) -> str:
    value = world.value(connection, "execute_command", command=command, **args)
    return str(value["stdout"]) + str(value["stderr"])


def test_it_is_known_by_name_and_says_that_it_does_not_isolate() -> None:
    assert load_backend("host") is HostBackend
    assert HostBackend.isolation.startswith("none (host mode")
    assert Capability.PROCESS_ISOLATION not in HostBackend.capabilities


def test_no_command_ever_sees_or_shows_the_hosts_path_of_its_directories(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    shown = shell(
        world,
        connection,
        "pwd; pwd -P; echo $PWD:$HOME:$TMPDIR; readlink -f /mnt/user-data/outputs; ls $PWD/none; "
        "F=file; echo x$PWD -I$PWD $F://$PWD; printf 'a\\n%s' $PWD",
    )
    assert str(plan.user_data.parent) not in shown
    assert str(plan.run_dir) not in shown
    assert shown.splitlines()[:3] == ["/mnt/user-data/workspace"] * 2 + [
        "/mnt/user-data/workspace:/mnt/user-data/workspace:/tmp"
    ]


def test_what_lies_above_its_directories_and_other_spellings_are_not_shown_either(
    world: World, plan: SandboxPlan
) -> None:
    connection = world.backend.create(plan)
    shown = shell(
        world,
        connection,
        "dirname $HOME; dirname $(dirname $HOME); dirname $TMPDIR; tr '\\0' ' ' < $P/$PPID/cmdline; "
        "echo $PWD | sed 's,/,\\\\/,g'; echo $PWD | sed 's,/,%2F,g'; cat $P/self/mountinfo | grep user-data",
        env={"P": "/proc"},
    )
    assert shown.splitlines()[:3] == ["/mnt/user-data", "/mnt", "/.sandfleet/run"]
    assert "\\/mnt\\/user-data\\/workspace\n%2Fmnt%2Fuser-data%2Fworkspace\n" in shown
    assert plan.user_data.parent.parent.parent.name not in shown


@pytest.mark.parametrize("as_bytes", [False, True])
def test_output_that_is_cut_in_the_middle_of_a_path_shows_no_part_of_it(
    world: World, plan: SandboxPlan, as_bytes: bool
) -> None:
    connection = world.backend.create(plan)
    for size in (8, 20, 40, 60):
        value = world.value(
            connection, "execute_command", command="pwd; pwd; pwd; pwd", max_output_bytes=size, as_bytes=as_bytes
        )
        shown = base64.b64decode(value["stdout"]).decode() if as_bytes else value["stdout"]
        assert value["truncated"]
        assert "/tmp" not in shown
        assert "/threads" not in shown
    text = f"pwd; printf %s $PWD | head -c {len(str(plan.user_data)) - 3}; sleep 60"
    late = world.value(connection, "execute_command", command=text, timeout_s=0.5)
    assert (late["timed_out"], late["stdout"]) == (True, "/mnt/user-data/workspace\n")


def test_output_asked_for_as_bytes_is_masked_too(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    value = world.value(connection, "execute_command", command="pwd; pwd >&2; printf '\\377'", as_bytes=True)
    assert base64.b64decode(value["stdout"]) == b"/mnt/user-data/workspace\n\xff"
    assert base64.b64decode(value["stderr"]) == b"/mnt/user-data/workspace\n"
    large = world.value(connection, "execute_command", command="pwd", max_output_bytes=64 * 1024 * 1024)
    assert large["stdout"] == "/mnt/user-data/workspace\n"


def test_paths_in_commands_arguments_environment_and_cwd_are_understood(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    world.value(connection, "write_file", b"#!/bin/sh\necho ran $1\n", path="/mnt/user-data/uploads/tool")
    assert shell(world, connection, "chmod +x /mnt/user-data/uploads/tool; PATH=/mnt/user-data/uploads:$PATH tool 1")
    value = world.value(
        connection,
        "execute_command",
        argv=["/mnt/user-data/uploads/tool", "/mnt/user-data/outputs"],
    )
    assert value["stdout"] == "ran /mnt/user-data/outputs\n"
    listed = shell(world, connection, 'ls "$WHERE"; pwd', env={"WHERE": "/workspace/../uploads"}, cwd="/mnt/user-data")
    assert listed == "tool\n/mnt/user-data\n"
    assert shell(world, connection, "pwd", session="s", cwd="/mnt/user-data/outputs") == "/mnt/user-data/outputs\n"
    assert world.code(connection, "execute_command", command="pwd", session="s", cwd="none") == "path_not_found"


def test_contents_of_files_are_rewritten_in_neither_direction(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    text = f"/mnt/user-data/workspace {plan.user_data}\n".encode()
    world.value(connection, "write_file", text, path="f")
    assert world.read(connection, "f") == text
    assert (plan.user_data / "workspace" / "f").read_bytes() == text
    value = world.value(connection, "execute_command", text, command="cat > /mnt/user-data/workspace/g")
    assert value["exit_code"] == 0
    assert world.read(connection, "g") == text
    (match,) = world.value(connection, "grep", path=".", pattern="user-data", glob="f")["matches"]
    assert str(plan.user_data) not in match[2], "what a search shows is masked"


def test_a_shell_that_is_not_sandboxds_own_runs_the_commands(
    world: World, plan: SandboxPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zsh = tmp_path / "zsh"
    zsh.write_text('#!/bin/sh\necho "zsh $1"\nexec /bin/sh "$@"\n')
    zsh.chmod(0o755)
    monkeypatch.setattr(host, "choose_shell", lambda *_: str(zsh))
    connection = world.backend.create(plan)
    assert shell(world, connection, "echo $SHELL; pwd") == f"zsh -c\n{zsh}\n/mnt/user-data/workspace\n"
    assert shell(world, connection, "pwd", session="s") == "/mnt/user-data/workspace\n", "sessions need bash or sh"


@as_root
def test_each_identity_has_a_uid_and_its_directories_are_closed_to_others(world: World, plan: SandboxPlan) -> None:
    other = world.plan("other")
    mine, theirs = world.backend.create(plan), world.backend.create(other)
    assert shell(world, mine, "id -u") != shell(world, theirs, "id -u")
    world.value(theirs, "write_file", b"theirs", path="secret")
    value = world.value(mine, "execute_command", b"%b/workspace/secret" % bytes(other.user_data), command="xargs cat")
    assert "Permission denied" in value["stderr"]


@as_root
def test_a_directory_the_sandboxs_user_cannot_reach_is_refused_with_what_to_do(world: World, plan: SandboxPlan) -> None:
    plan.user_data.parent.chmod(0o700)
    with pytest.raises(StartFailed, match=r"chmod o\+x") as failed:
        world.backend.create(plan)
    assert failed.value.facts["reason"] == "host_path_closed"
    assert str(plan.user_data.parent.parent) not in str(failed.value.to_wire()), "that is for the node's log"
    assert not plan.run_dir.exists()
    assert world.backend.running() == []


def test_a_host_path_that_a_shell_would_read_otherwise_is_refused(world: World, plan: SandboxPlan) -> None:
    odd = plan.user_data.parent / "with space"
    odd.mkdir()
    with pytest.raises(StartFailed) as failed:
        world.backend.create(replace(plan, mounts=((odd, "/mnt/odd", False),)))
    assert failed.value.facts["reason"] == "host_path"
    assert str(odd) not in str(failed.value.to_wire())


def test_mounts_are_seen_and_kept_read_only_by_file_operations(world: World, plan: SandboxPlan, tmp_path: Path) -> None:
    skills, data = tmp_path / "skills", tmp_path / "data"
    for directory in (skills, data):
        directory.mkdir()
        (directory / "f").write_text("here")
    data.chmod(0o777)
    mounts = ((skills, "/mnt/skills", True), (data, "/mnt/data", False))
    connection = world.backend.create(replace(plan, mounts=mounts))
    assert world.read(connection, "/mnt/skills/f") == b"here"
    assert shell(world, connection, "cat /mnt/skills/f /mnt/data/f") == "herehere"
    for kind, args in (
        ("write_file", {"path": "/mnt/skills/f"}),
        ("write_file", {"path": "/mnt/skills/f", "append": True}),
        ("str_replace", {"path": "/mnt/skills/f", "old": "h", "new": "x"}),
        ("make_dir", {"path": "/mnt/skills/d"}),
        ("remove", {"path": "/mnt/skills/f"}),
        ("move", {"path": "/mnt/skills/f", "new_path": "f"}),
        ("move", {"path": "/mnt/data/f", "new_path": "/mnt/skills/g"}),
    ):
        error = world.do(connection, kind, b"", **args).error
        assert error is not None
        assert error.code == "read_only", (kind, args)
        assert str(error).startswith("Write access to skills path is not allowed: /mnt/skills/")
    world.value(connection, "write_file", b"new", path="/mnt/data/g")
    assert (data / "g").read_bytes() == b"new"
    assert (skills / "f").read_text() == "here"


def test_the_end_of_a_sandbox_is_the_end_of_everything_it_started(world: World, plan: SandboxPlan) -> None:
    for end in ("destroy", "crash"):
        connection = world.backend.create(plan)
        shell(
            world, connection, "sleep 301 & setsid nohup sleep 302 >/dev/null 2>&1 & (setsid sleep 303 &) ; sleep 0.1"
        )
        assert isinstance(world.backend, HostBackend)
        pid = world.backend.pid_of(plan.sandbox_id)
        wait_until(lambda pid=pid: len(psutil.Process(pid).children(recursive=True)) == 3, 10)  # type: ignore[misc]
        started = psutil.Process(pid).children(recursive=True)
        if end == "destroy":
            world.backend.destroy(plan.sandbox_id)
        else:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda started=started: not [p for p in started if p.is_running()], 10)  # type: ignore[misc]
        wait_until(lambda: not plan.run_dir.exists(), 10)


NEST = 'python3 -c \'import os\nos.chdir(os.environ["W"])\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\''


def test_directories_nested_without_end_do_not_outlive_the_sandbox(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    for place in ("/tmp", "/mnt/user-data/workspace"):
        assert shell(world, connection, NEST, env={"W": place}) == ""
    assert world.value(connection, "remove", path="d", recursive=True) == {}
    world.backend.destroy(plan.sandbox_id)
    assert not plan.run_dir.exists()


def test_sandboxes_that_came_and_went_leave_no_descriptor(world: World, plan: SandboxPlan) -> None:
    def once() -> None:
        connection = world.backend.create(plan)
        world.value(connection, "health")
        world.backend.destroy(plan.sandbox_id)
        with pytest.raises(StartFailed):
            world.backend.create(replace(plan, mounts=((Path("/nowhere"), "/mnt/x", True),)))
        assert not plan.run_dir.exists()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_sandboxes_end_with_the_thread_that_spawns_them(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    shell(world, connection, "setsid sleep 304 &")
    assert isinstance(world.backend, HostBackend)
    daemon = psutil.Process(world.backend.pid_of(plan.sandbox_id))
    wait_until(lambda: daemon.children(recursive=True), 10)
    family = [daemon, *daemon.children(recursive=True)]
    world.backend._spawner.close()
    wait_until(lambda: not [process for process in family if _runs(process)], 10)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
