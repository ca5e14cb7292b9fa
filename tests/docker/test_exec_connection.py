"""Sandboxes whose image has no Python: every operation is a ``docker exec``. Debian proves that it works with GNU's
tools and bash, busybox that it needs no more than POSIX and what both have."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandfleet.backends import Capability, Completion, Connection, SandboxBackend
from sandfleet.errors import NotStarted, OutcomeUnknown, SandboxLost
from sandfleet.testing.backend_contract import BackendContract
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.docker.images import BUSYBOX, DEBIAN, require_image
from tests.docker.sandboxes import docker_settings, docker_world
from tests.services import require, wait_until

pytestmark = pytest.mark.docker
EMPTY = "find /mnt/user-data/workspace /mnt/user-data/outputs /tmp -mindepth 1 -maxdepth 1 -exec rm -rf {} +"


class ExecBackend(DockerBackend):
    """The Docker backend as far as it goes without Python."""

    capabilities: ClassVar[frozenset[Capability]] = DockerBackend.capabilities - {
        Capability.SESSIONS,
        Capability.JOBS,
        Capability.PTY,
        Capability.SURVIVES_NODE,  # it does; these sandboxes are shared by all tests, and test_docker_attach shows it
    }


class ExecContract(BackendContract):
    """The suite every backend passes, over ``docker exec``."""

    image: ClassVar[str]

    # One backend and one sandbox for all tests that need no other: each would cost a second, and each is emptied.
    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Connection, Path]]:
        require("docker")
        require_image(cls.image)
        deaths: list[tuple[str, str]] = []
        root = tmp_path_factory.mktemp("exec")
        settings = docker_settings(root, container={"image": cls.image})
        backend = ExecBackend(settings, lambda *death: deaths.append(death))
        world = World(backend, root, deaths)
        plan = world.plan()
        try:
            yield world, backend.create(plan), plan.user_data
        finally:
            backend.close()
        assert backend.running() == []

    @pytest.fixture
    def world(self, shared: tuple[World, Connection, Path]) -> World:
        return shared[0]

    @pytest.fixture
    def connection(self, shared: tuple[World, Connection, Path]) -> Iterator[Connection]:
        world, connection, user_data = shared
        yield connection
        world.value(connection, "execute_command", command=EMPTY)
        assert not list((user_data / "workspace").iterdir())

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        assert isinstance(backend, DockerBackend)
        subprocess.run(["docker", "kill", backend.container_of(sandbox_id)], check=True, capture_output=True)


class TestDebian(ExecContract):
    image = DEBIAN


class TestBusybox(ExecContract):
    image = BUSYBOX


# --- beyond the suite --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[DEBIAN, BUSYBOX], ids=["debian", "busybox"])
def sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, Connection]]:
    """A sandbox of each image, shared; tests take a directory of their own."""
    require("docker")
    require_image(request.param)
    with docker_world(tmp_path_factory.mktemp("exec"), container={"image": request.param, "pids": 64}) as world:
        plan = world.plan()
        connection = world.backend.create(plan)
        assert isinstance(world.backend, DockerBackend)
        assert world.backend.transport_of(plan.sandbox_id) == "exec"
        yield world, connection


def run(sandbox: tuple[World, Connection], command: str, content: bytes | None = None, **args: Any) -> Any:
    world, connection = sandbox
    return world.value(connection, "execute_command", content, command=command, **args)


def code(sandbox: tuple[World, Connection], kind: str, **args: Any) -> str:
    world, connection = sandbox
    return world.code(connection, kind, **args)


@pytest.mark.parametrize(
    ("command", "exit_code", "signal"),
    [("exit 137", 137, None), ("kill -9 $$", None, "SIGKILL"), ("kill -TERM $$", None, "SIGTERM"), ("nix", 127, None)],
)
def test_a_signal_is_told_from_an_exit_status_of_the_same_number(
    sandbox: tuple[World, Connection], command: str, exit_code: int | None, signal: str | None
) -> None:
    value = run(sandbox, command)
    assert (value["exit_code"], value["signal"]) == (exit_code, signal)
    assert (value["timed_out"], value["cancelled"]) == (False, False)


def test_a_command_ends_with_its_direct_child_whoever_holds_its_streams(sandbox: tuple[World, Connection]) -> None:
    value = run(sandbox, "sleep 55 & echo started; echo too >&2", timeout_s=15.0)
    assert (value["stdout"], value["stderr"], value["exit_code"]) == ("started\n", "too\n", 0)
    assert value["timed_out"] is False
    run(sandbox, "kill -9 $(pidof sleep); true")


def test_the_deadline_keeps_what_was_written_and_ends_the_whole_group(sandbox: tuple[World, Connection]) -> None:
    value = run(sandbox, "echo before; (sleep 54; echo after) & sleep 54", timeout_s=0.5)
    assert (value["stdout"], value["timed_out"], value["signal"]) == ("before\n", True, "SIGKILL")
    assert run(sandbox, "ps 2>/dev/null || cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"].count("sleep 54") == 0


def test_the_deadline_holds_when_what_was_left_behind_keeps_the_streams(sandbox: tuple[World, Connection]) -> None:
    value = run(sandbox, "echo before; setsid sleep 53 & sleep 53", timeout_s=0.5)
    assert (value["stdout"], value["timed_out"], value["exit_code"]) == ("before\n", True, None)
    run(sandbox, "kill -9 $(pidof sleep); true")


def test_the_deadline_ends_a_command_that_took_every_process_there_is(sandbox: tuple[World, Connection]) -> None:
    run(sandbox, "true")  # from now on there is a shell that can end others
    value = run(sandbox, "(while :; do sleep 52 & done) 2>/dev/null; while :; do :; done", timeout_s=3.0)
    assert (value["timed_out"], value["exit_code"]) == (True, None)
    assert run(sandbox, "echo alive")["stdout"] == "alive\n"


def test_a_cancelled_command_ends_though_the_sandbox_stopped_what_kills(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    killers = "for p in /proc/[0-9]*; do grep -q 'read -r [g]' $p/cmdline && echo ${p#/proc/}; done; true"
    wait_until(lambda: run(sandbox, killers)["stdout"].split(), deadline_s=30)
    for pid in run(sandbox, killers)["stdout"].split():
        run(sandbox, f"kill -STOP {pid}")
    ended: list[Completion] = []
    op = world.operation("execute_command", command="echo on; sleep 48")
    connection.start(op, ended.append)
    wait_until(lambda: "sleep 48" in run(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"], deadline_s=30)
    assert connection.cancel(op.op_id) is True
    wait_until(lambda: ended, deadline_s=30)
    assert (ended[0].value["stdout"], ended[0].value["cancelled"]) == ("on\n", True)


def test_bytes_go_in_and_come_out_as_they_are(sandbox: tuple[World, Connection]) -> None:
    content = bytes(range(256)) * 8192
    value = run(sandbox, "cat", content, as_bytes=True, max_output_bytes=4 << 20)
    assert base64.b64decode(value["stdout"]) == content
    assert run(sandbox, "cat >/dev/null; exec 0<&-; head -c 70000 /dev/zero | wc -c", content)["exit_code"] == 0
    # Nobody reads it.
    assert run(sandbox, "echo done", content)["stdout"] == "done\n"


def test_long_commands_and_arguments_arrive_whole(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    text = "x'\"\\$(é)\n" * 40_000
    value = run(sandbox, f"cat <<'END' | wc -c\n{text}END\n")
    assert value["stdout"].split() == [str(len(text.encode()))]
    words = ["é" * 50_000] * 5
    value = world.value(connection, "execute_command", argv=["printf", "%s", *words], max_output_bytes=1 << 20)
    assert value["stdout"] == "".join(words)
    assert world.code(connection, "execute_command", argv=["echo", "x" * 200_000]) == "invalid_argument"


@pytest.mark.parametrize(
    ("cwd", "wanted"),
    [("/proc/self/fd/7", "path_not_found"), ("/proc/1", "invalid_argument"), ("/etc/../sys", "invalid_argument"),
     ("/sys", "invalid_argument"), ("/dev", "invalid_argument"), ("/etc/passwd", "not_directory")],
)  # fmt: skip
def test_case_e7_no_command_starts_where_the_runtime_could_be_reached(
    sandbox: tuple[World, Connection], cwd: str, wanted: str
) -> None:
    assert code(sandbox, "execute_command", command="pwd", cwd=cwd) == wanted


def test_case_e7_a_link_does_not_help(sandbox: tuple[World, Connection]) -> None:
    run(sandbox, "ln -sfn /proc/self link")
    assert code(sandbox, "execute_command", command="pwd", cwd="link") == "invalid_argument"


def test_sessions_are_refused_with_what_to_do(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    error = world.do(connection, "execute_command", command="cd /", session="s").error
    assert error is not None
    assert error.code == "not_supported"
    assert "Python 3" in error.message


def test_secrets_of_a_command_are_nowhere_to_be_inspected(sandbox: tuple[World, Connection]) -> None:
    world, _connection = sandbox
    assert run(sandbox, 'echo "$TOKEN"', env={"TOKEN": "s3cr3t-\n-ü"})["stdout"] == "s3cr3t-\n-ü\n"
    assert isinstance(world.backend, DockerBackend)
    container = world.backend.container_of(world.backend.running()[0])
    told = subprocess.run(["docker", "inspect", container], check=True, capture_output=True).stdout
    assert b"s3cr3t" not in told


def test_what_is_no_file_answers_at_once(sandbox: tuple[World, Connection]) -> None:
    run(sandbox, "mkfifo odd-fifo; ln -sf /dev/zero odd-zero; dd if=/dev/null of=odd-giant bs=1 seek=15000000000000")
    for path, wanted in (("odd-fifo", "not_regular_file"), ("odd-zero", "not_regular_file"),
                         ("odd-giant", "file_too_large")):  # fmt: skip
        assert code(sandbox, "read_file", path=path) == wanted
    assert code(sandbox, "read_file", path="odd-giant", as_text=True) == "file_too_large"
    assert code(sandbox, "str_replace", path="odd-giant", old="a", new="b") == "file_too_large"
    for path in ("odd-fifo", "odd-zero"):
        assert code(sandbox, "write_file", path=path) == "not_regular_file"
    world, connection = sandbox
    end = world.value(connection, "stat", path="odd-giant")["size"]
    tail = world.do(connection, "read_file", path="odd-giant", offset=end - 3, max_bytes=10)
    assert tail.content == b"\0\0\0"
    found = world.value(connection, "grep", path=".", pattern="x", glob="odd-*")
    assert (found["matches"], found["skipped"]["large"]) == ([], 1)
    run(sandbox, "rm odd-*")


NAMES = [
    "-rf",
    "a b",
    "quo'te\"",
    "$(id)",
    "new\nline",
    "back\\slash",
    "\udcff\udcfe",
    "ü\u202e",
    "//\n".strip("/"),
    "*",
]


def test_names_are_only_names(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    for name in NAMES:
        world.value(connection, "write_file", repr(name).encode(), path=f"names/{name}")
        world.value(connection, "make_link", path=f"names/l{name}", target=f"./{name}")
    listed = world.value(connection, "list_dir", path="names")["entries"]
    assert {entry["name"] for entry in listed} == {*NAMES, *(f"l{name}" for name in NAMES)}
    assert {entry["name"]: entry["target"] for entry in listed if entry["type"] == "symlink"} == {
        f"l{name}": f"./{name}" for name in NAMES
    }
    globbed = world.value(connection, "glob", path="names", pattern="[!l]*")["paths"]
    assert set(globbed) == {f"/mnt/user-data/workspace/names/{name}" for name in NAMES}
    found = world.value(connection, "grep", path="names", pattern=".", glob="[!l]*", max_results=1000)["matches"]
    assert {match[0].rpartition("names/")[2] for match in found} == set(NAMES)
    for name in NAMES:
        assert world.read(connection, f"names/l{name}") == repr(name).encode()
        world.value(connection, "move", path=f"names/{name}", new_path=f"names/m{name}")
        world.value(connection, "remove", path=f"names/m{name}")
    world.value(connection, "remove", path="names", recursive=True)


def test_a_search_that_takes_too_long_is_ended(sandbox: tuple[World, Connection]) -> None:
    assert code(sandbox, "glob", path="/", pattern="**/none", timeout_s=0.001) == "search_timeout"


def test_lines_are_found_as_everywhere(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    text = b"One1 two\r\nthree [x]\nGR\xc3\x9cN\n" + b"y" * 3000 + b"\n\xff one2\n"
    world.value(connection, "write_file", text, path="grep/a:1:b.txt")
    world.value(connection, "write_file", b"one\0\n", path="grep/binary")

    def lines(pattern: str, **args: Any) -> list[int]:
        found = world.value(connection, "grep", path="grep", pattern=pattern, **args)
        assert {match[0] for match in found["matches"]} <= {"/mnt/user-data/workspace/grep/a:1:b.txt"}
        return [match[1] for match in found["matches"]]

    for pattern, wanted in ((r"one\d", [1, 5]), (r"two$", [1]), (r"^(?:one1|three)\b", [1, 2]), (r"\[x\]", [2]),
                            (r"[\w.-]+ \S{3}", [1, 2]), (r"e{2}?", [2]), ("gr.+n$", [3]), ("y", [])):  # fmt: skip
        assert lines(pattern) == wanted, pattern
    assert lines("[x]", literal=True) == [2]
    assert lines("one", case_sensitive=True) == [5]
    assert world.value(connection, "grep", path="grep", pattern="one")["skipped"]["binary"] == 1
    single = world.value(connection, "grep", path="grep/a:1:b.txt", pattern="two")["matches"]
    assert single == [["/mnt/user-data/workspace/grep/a:1:b.txt", 1, "One1 two"]]
    world.value(connection, "remove", path="grep", recursive=True)


def test_a_write_that_broke_off_changes_nothing(sandbox: tuple[World, Connection]) -> None:
    world, connection = sandbox
    world.value(connection, "write_file", b"before", path="whole/f", mode=0o640)
    assert code(sandbox, "write_file", path="whole/f", if_digest="0" * 64) == "digest_mismatch"
    assert code(sandbox, "write_file", path="/etc/passwd") in ("read_only", "permission_denied")
    assert code(sandbox, "write_file", path="whole/f/below") == "not_directory"
    world.value(connection, "write_file", b"after", path="whole/f")
    assert world.value(connection, "stat", path="whole/f")["mode"] == 0o640
    assert [entry["name"] for entry in world.value(connection, "list_dir", path="whole")["entries"]] == ["f"]
    world.value(connection, "remove", path="whole", recursive=True)


@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX], ids=["debian", "busybox"])
def test_a_command_that_kills_all_there_is_gets_a_typed_answer(image: str, tmp_path: Path) -> None:
    require("docker")
    require_image(image)
    with docker_world(tmp_path, container={"image": image}) as world:
        plan = world.plan()
        connection = world.backend.create(plan)
        assert world.value(connection, "execute_command", command="true")["exit_code"] == 0
        error = world.do(connection, "execute_command", command="kill -9 -1; sleep 49").error
        assert isinstance(error, OutcomeUnknown), error
        wait_until(lambda: plan.sandbox_id in [death[0] for death in world.deaths], deadline_s=30)
        assert isinstance(world.do(connection, "stat", path=".").error, SandboxLost | NotStarted)
