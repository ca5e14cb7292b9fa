"""Attacks on host mode. File operations hold; commands are refused, and where they are allowed nothing is promised.

The numbers are those of the attack catalogue: F files and paths, E execution.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.backends import Completion, Connection, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.host import HostBackend
from tests.services import wait_until

CANARY = "canary-91d0c7"
HOME = "/mnt/user-data/workspace"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only a root worker can give sandboxes uids of their own")


@pytest.fixture
def root() -> Iterator[Path]:
    """A data root the sandboxes' users can walk to, with a secret beside it that everybody may read."""
    # Not below /tmp, a name that sandboxes have too.
    path = Path(tempfile.mkdtemp(prefix="sf-host-", dir="/var/tmp"))
    path.chmod(0o755)
    (path / "secret").write_text(CANARY)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def worlds(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    for name in ("SANDFLEET_REDIS_URL", "OPENAI_API_KEY", "MY_BROKER"):
        monkeypatch.setenv(name, f"redis://:{CANARY}@localhost/0")
    made: list[HostBackend] = []

    def make(*, allow_host_bash: bool) -> World:
        made.append(HostBackend(SimpleNamespace(allow_host_bash=allow_host_bash), lambda *_: None))
        return World(made[-1], root, [])

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    """Commands are allowed, so that a test can play the enemy inside."""
    return worlds(allow_host_bash=True)


@pytest.fixture
def plan(world: World) -> SandboxPlan:
    return world.plan("mine")


@pytest.fixture
def connection(world: World, plan: SandboxPlan) -> Connection:
    return world.backend.create(plan)


def told(completion: Completion) -> str:
    """Everything a completion says."""
    error = completion.error.to_wire() if completion.error is not None else None
    return f"{completion.value!r} {completion.content!r} {error!r}"


READS: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {}),
    ("read_file", {"start_line": 1}),
    ("read_file", {"as_text": True}),
    ("list_dir", {}),
    ("glob", {"pattern": "*"}),
    ("grep", {"pattern": "."}),
]


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../../../../../../etc/passwd", "/mnt/user-data/../../etc/passwd", "..\\..\\etc\\passwd", "/",
     "//etc/passwd", "/proc/self/environ", "/mnt/user-data/./../../etc/passwd", "/workspace/../../etc/passwd"],
)  # fmt: skip
def test_f1_a_path_that_leads_out_is_refused_by_every_operation(
    world: World, connection: Connection, path: str
) -> None:
    writes: list[tuple[str, dict[str, Any]]] = [
        ("write_file", {}),
        ("str_replace", {"old": "root", "new": "x"}),
        ("make_dir", {}),
        ("remove", {"recursive": True}),
        ("move", {"new_path": "x"}),
        ("stat", {}),
    ]
    for kind, args in [*READS, *writes]:
        completion = world.do(connection, kind, b"", path=path, **args)
        assert completion.error is not None, kind
        assert completion.error.code == "permission_denied", kind
        assert "root:" not in told(completion)
    world.value(connection, "write_file", b"x", path="x")
    assert world.code(connection, "move", path="x", new_path=path) == "permission_denied"


def test_f1_a_nul_in_a_path_is_refused_on_the_way(world: World) -> None:
    with pytest.raises(ValueError, match="NUL"):
        world.operation("read_file", path="a\0b")


def test_sandboxd_itself_refuses_what_the_worker_would_not_have_sent(world: World, connection: Connection) -> None:
    """The look at the path is for the message; the boundary is behind it."""
    from sandfleet_workers.endpoint import EndpointConnection  # noqa: PLC0415

    for path in ("/etc/passwd", "../../../etc/passwd", str(world.root / "secret"), "/mnt/user-data/../../etc/passwd"):
        ended: list[Completion] = []
        EndpointConnection.start(connection, world.operation("read_file", path=path), ended.append)  # type: ignore[arg-type]
        wait_until(lambda ended=ended: ended, 10)  # type: ignore[misc]
        assert ended[0].error is not None
        assert ended[0].error.code == "permission_denied"


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/etc", "../../../../secret", "{root}/secret", "/proc/self/root", "{root}"]
)
def test_f2_a_planted_symlink_leads_nowhere(
    world: World, connection: Connection, plan: SandboxPlan, root: Path, target: str
) -> None:
    link = plan.user_data / "workspace" / "link"
    link.symlink_to(target.format(root=root))
    for path in ("link", "link/passwd", "link/secret", "link/etc/passwd"):
        for kind, args in [*READS, ("write_file", {}), ("stat", {}), ("make_dir", {})]:
            completion = world.do(connection, kind, b"overwritten", path=path, **args)
            assert completion.error is not None, (path, kind)
            assert CANARY not in told(completion)
    assert world.code(connection, "execute_command", command="pwd", cwd="link") in (
        "permission_denied",
        "path_not_found",
    )
    found = world.value(connection, "grep", path=".", pattern=CANARY)
    assert found["matches"] == []
    assert (root / "secret").read_text() == CANARY
    assert world.value(connection, "remove", path="link") == {}


def test_f3_a_symlink_that_flips_while_it_is_read_gives_no_secret(
    world: World, connection: Connection, plan: SandboxPlan, root: Path
) -> None:
    work, secret, stop = plan.user_data / "workspace", root / "secret", threading.Event()
    (work / "plain").write_text("plain")
    (work / "dir").mkdir()
    (work / "dir" / "secret").write_text("plain")

    def flip() -> None:
        while not stop.is_set():
            for name, target in (
                ("flip", secret),
                ("flip", work / "plain"),
                ("flipdir", root),
                ("flipdir", work / "dir"),
            ):
                os.symlink(target, work / "next")
                os.rename(work / "next", work / name)

    enemy = threading.Thread(target=flip)
    enemy.start()
    try:
        until, seen, refused = time.monotonic() + 1.5, 0, 0
        while time.monotonic() < until:
            for path in ("flip", "flipdir/secret"):
                completion = world.do(connection, "read_file", path=path)
                assert CANARY.encode() not in (completion.content or b"")
                seen += completion.content == b"plain"
                refused += completion.error is not None
            listed = world.do(connection, "list_dir", path="flipdir")
            assert "threads" not in told(listed)
            world.do(connection, "write_file", b"plain", path="flip")
            world.do(connection, "write_file", b"plain", path="flipdir/secret", append=True)
            assert secret.read_text() == CANARY
        assert seen > 0
        assert refused > 0
    finally:
        stop.set()
        enemy.join()


def test_f6_a_hard_link_is_replaced_and_never_written_through(
    world: World, connection: Connection, plan: SandboxPlan, root: Path
) -> None:
    (plan.user_data / "workspace" / "hard").hardlink_to(root / "secret")
    (root / "secret").chmod(0o666)
    assert world.code(connection, "write_file", b"x", path="hard", append=True) == "permission_denied"
    world.value(connection, "write_file", b"mine", path="hard")
    assert world.read(connection, "hard") == b"mine"
    assert (root / "secret").read_text() == CANARY


def test_fifos_devices_and_sockets_do_not_hang_it(world: World, connection: Connection, plan: SandboxPlan) -> None:
    os.mkfifo(plan.user_data / "workspace" / "fifo")
    os.chmod(plan.user_data / "workspace" / "fifo", 0o666)
    began = time.monotonic()
    for kind, args in (("read_file", {}), ("write_file", {}), ("str_replace", {"old": "a", "new": "b"})):
        assert world.code(connection, kind, b"", path="fifo", **args) == "not_regular_file"
    assert world.value(connection, "grep", path=".", pattern="x")["matches"] == []
    assert time.monotonic() - began < 5


def test_another_threads_directory_is_not_there(world: World, connection: Connection, root: Path) -> None:
    other = world.plan("other")
    theirs = world.backend.create(other)
    world.value(theirs, "write_file", CANARY.encode(), path="f")
    host = str(other.user_data / "workspace" / "f")
    for path in (host, "../../../other/user-data/workspace/f", "/mnt/user-data/../../other/user-data/workspace/f"):
        assert world.code(connection, "read_file", path=path) == "permission_denied"
    assert world.code(connection, "execute_command", command=f"cat {host}") == "permission_denied"


@pytest.mark.parametrize("session", [None, "s"])
def test_e_commands_are_refused_unless_the_node_allows_them(worlds: Callable[..., World], session: str | None) -> None:
    world = worlds(allow_host_bash=False)
    plan = world.plan("mine")
    connection = world.backend.create(plan)
    touch = {"command": "touch started", "session": session}
    completion = world.do(connection, "execute_command", **touch)
    assert completion.error is not None
    assert completion.error.code == "host_bash_disabled"
    assert "allow_host_bash: true" in str(completion.error)
    value = world.value(connection, "batch", ops=[{"kind": "execute_command", "args": touch}])
    assert value["results"][0]["error"]["code"] == "host_bash_disabled"
    assert world.code(connection, "execute_command", argv=["touch", "started"]) == "host_bash_disabled"
    # Files go on working, and nothing ran.
    world.value(connection, "write_file", b"x", path="f")
    assert os.listdir(plan.user_data / "workspace") == ["f"]


def test_e_the_workers_secrets_are_in_no_commands_environment(world: World, connection: Connection) -> None:
    value = world.value(connection, "execute_command", command="env; set")
    assert "PATH=" in value["stdout"]
    assert CANARY not in told(Completion(value))


def test_e_a_command_holds_no_descriptor_of_the_workers_or_of_its_own_roots(
    world: World, connection: Connection
) -> None:
    value = world.value(
        connection,
        "execute_command",
        command="for fd in $(ls $P/fd); do readlink $P/fd/$fd; done",
        env={"P": "/proc/self"},
    )
    held = [line for line in value["stdout"].split() if not line.startswith(("pipe:", "/dev/null", "/proc/"))]
    assert held == []


def test_what_lies_in_the_run_directory_is_never_written_into(
    world: World, plan: SandboxPlan, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the sandbox's user that outlived the last one could plant links there while the next one starts."""
    prepare = local_dirs.prepare_run_dir

    def planted(path: Path, uid: int | None) -> int:
        fd = prepare(path, uid)
        (path / "hostd.py").symlink_to(root / "secret")
        return fd

    monkeypatch.setattr(local_dirs, "prepare_run_dir", planted)
    with pytest.raises(StartFailed):
        world.backend.create(plan)
    assert (root / "secret").read_text() == CANARY
    assert not plan.run_dir.exists()


@as_root
def test_e_a_root_workers_commands_run_as_nobody_of_the_hosts(world: World, connection: Connection, root: Path) -> None:
    (root / "secret").chmod(0o600)
    value = world.value(
        connection, "execute_command", f"{root}/secret /etc/shadow".encode(), command="id -u; id -G; xargs cat"
    )
    uid, groups = value["stdout"].split()[:2]
    assert int(uid) >= 1_900_000_000
    assert groups == uid
    assert value["stderr"].count("Permission denied") == 2
    status = world.value(connection, "execute_command", command="cat $F", env={"F": "/proc/self/status"})["stdout"]
    assert "CapEff:\t0000000000000000" in status
