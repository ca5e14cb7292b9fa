"""What the worker makes of AIO servers as they are: with one shell, with broken sessions, with answers made to harm."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Completion, Liveness, Operation
from sandfleet.ids import new_op_id
from sandfleet.ops import parse_args
from sandfleet_workers.backends.aio.connection import AioConnection, AioDialect
from sandfleet_workers.backends.aio.endpoint import AioEndpoint
from tests.aio_stand_in import BROKEN, StandIn, _Handler, stand_in
from tests.services import wait_until

pytestmark = pytest.mark.slow  # make check runs it

EXEC = {False: "/v1/shell/exec", True: "/v1/bash/exec"}


class World:
    def __init__(self, server: StandIn, env: dict[str, str] | None = None) -> None:
        self.server = server
        endpoint = AioEndpoint("127.0.0.1", server.port, server.hostname.encode(), None)
        self.connection = AioConnection(
            endpoint,
            sandbox_id="ab",
            liveness=lambda: Liveness.ALIVE,
            dialect=AioDialect(env or {}),
            guard_tick_s=0.05,
        )

    def operation(self, kind: str, content: bytes | None = None, **args: Any) -> Operation:
        return Operation(new_op_id(), kind, parse_args(kind, args).model_dump(), content)

    def do(self, kind: str, content: bytes | None = None, **args: Any) -> Completion:
        return self.connection.perform(self.operation(kind, content, **args), 20)

    def value(self, kind: str, content: bytes | None = None, **args: Any) -> Any:
        completion = self.do(kind, content, **args)
        assert completion.error is None, repr(completion.error)
        return completion.value

    def run(self, command: str, **args: Any) -> Any:
        return self.value("execute_command", command=command, **args)

    def code(self, kind: str, content: bytes | None = None, **args: Any) -> str:
        completion = self.do(kind, content, **args)
        assert completion.error is not None, completion.value
        return completion.error.code


@contextmanager
def world_of(root: Path, *, bash: bool, env: dict[str, str] | None = None) -> Iterator[World]:
    with stand_in(root, bash=bash) as server:
        world = World(server, env)
        try:
            yield world
        finally:
            world.connection.close()


@pytest.fixture(params=[True, False], ids=["bash", "shell"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with world_of(tmp_path, bash=request.param) as made:
        yield made


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[World]:
    """An image that has only the one shell."""
    with world_of(tmp_path, bash=False) as made:
        yield made


def _effects(world: World) -> list[str]:
    path = world.server.root / "effects"
    return path.read_text().split() if path.exists() else []


# --- commands --------------------------------------------------------------------------------


def test_commands_and_files_work_with_both_routes(world: World) -> None:
    assert world.value("health") == {"status": "alive", "detail": "AIO server 1.0.0.150"}
    assert world.run("echo out; exit 3")["stdout"] == "out\n"
    assert world.run("exit 3")["exit_code"] == 3
    assert world.value("execute_command", argv=["printf", "%s", "$HOME;'"])["stdout"] == "$HOME;'"
    assert world.run("wc -c", content=b"x" * 300_000)["stdout"].split() == ["300000"]
    assert world.run("echo " + "ä" * 200_000)["stdout"] == "ä" * 200_000 + "\n"
    content = bytes(range(256)) * 8000
    world.value("write_file", content, path="deep/f", mode=0o600)
    assert world.do("read_file", path="deep/f").content == content
    assert world.value("stat", path="deep/f")["mode"] == 0o600
    world.value("write_file", b"eins zwei", path="g")
    world.value("str_replace", path="g", old="zwei", new="drei")
    assert world.do("read_file", path="g").content == b"eins drei"
    home = "/mnt/user-data/workspace"
    assert world.value("grep", path=home, pattern="DREI")["matches"] == [[f"{home}/g", 1, "eins drei"]]
    assert [entry["name"] for entry in world.value("list_dir", path=".")["entries"]] == ["deep", "f", "g"]
    assert world.code("read_file", path="none") == "path_not_found"
    assert list((world.server.root / "tmp").iterdir()) == [], "temporary files are left"


def test_answers_may_come_in_chunks(world: World) -> None:
    world.server.chunked = True
    content = bytes(range(256)) * 8000
    world.value("write_file", content, path="f")
    assert world.do("read_file", path="f").content == content
    assert world.run("echo out")["stdout"] == "out\n"


def test_variables_reach_commands_and_no_command_line(tmp_path: Path) -> None:
    for bash in (True, False):
        with world_of(tmp_path / str(bash), bash=bash, env={"ALL": "of them"}) as world:
            seen = world.run("echo $ALL $SECRET", env={"SECRET": "s3cret"})["stdout"]
            assert seen == ("\n" if bash else "of them s3cret\n")  # the stand-in's newer route drops what it is given
            assert not any("s3cret" in line for line in world.server.lines)


def test_a_named_session_keeps_its_state_until_it_is_closed(world: World) -> None:
    world.run("cd /tmp; N=5", session="s")
    assert world.run("echo $N $PWD", session="s")["stdout"] == "5 /tmp\n"
    assert world.run("echo $N", session="t")["stdout"] == "\n"
    assert world.value("close_session", session="s") == {}
    assert world.code("close_session", session="s") == "session_not_found"
    assert world.run("echo $N", session="s")["stdout"] == "\n"


def test_a_session_the_server_put_out_is_made_anew(world: World) -> None:
    world.run("N=5", session="s")
    for name in list(world.server._sessions):
        world.server._close(name)
    assert world.run('echo "now $N"', session="s")["stdout"] == "now \n"
    assert world.run("echo one-shot")["stdout"] == "one-shot\n"


def test_commands_take_turns_in_the_one_shell(shell: World) -> None:
    ended: list[Completion] = []
    shell.run("true")  # from here on it is known that there is only the shell
    shell.server.most_at_once = 0
    for number in range(12):
        command = f"echo {number} >> /mnt/user-data/order; echo {number}"
        shell.connection.start(shell.operation("execute_command", command=command), ended.append)
    wait_until(lambda: len(ended) == 12, 20)
    assert [completion.value["stdout"] for completion in ended] == [f"{number}\n" for number in range(12)]
    order = (shell.server.root / "user-data/order").read_text().split()
    assert order == [str(number) for number in range(12)], "the lane is first in, first out"
    assert shell.server.most_at_once == 1


def test_first_commands_that_race_find_the_older_route_and_still_take_turns(shell: World) -> None:
    ended: list[Completion] = []
    for number in range(8):
        shell.connection.start(shell.operation("execute_command", command=f"echo {number}"), ended.append)
    wait_until(lambda: len(ended) == 8, 20)
    assert sorted(completion.value["stdout"] for completion in ended) == [f"{number}\n" for number in range(8)]


def test_what_waits_for_the_shell_can_be_cancelled_and_what_runs_can_be_killed(shell: World) -> None:
    shell.run("true")
    ended: dict[str, Completion] = {}
    ops = [shell.operation("execute_command", command=command) for command in ("sleep 60", "touch /mnt/user-data/ran")]
    for op in ops:
        shell.connection.start(op, lambda completion, op_id=op.op_id: ended.update({op_id: completion}))  # type: ignore[misc]
    assert shell.connection.cancel(ops[1].op_id) is True
    assert ended[ops[1].op_id].error is not None
    assert ended[ops[1].op_id].error.code == "cancelled"  # type: ignore[union-attr]
    wait_until(lambda: any("sleep 60" in line for line in shell.server.lines), 10)
    assert shell.connection.cancel(ops[0].op_id) is True
    wait_until(lambda: ops[0].op_id in ended, 10)
    assert ended[ops[0].op_id].value["cancelled"] is True
    assert not (shell.server.root / "user-data/ran").exists()
    assert shell.run("echo again")["stdout"] == "again\n"


def test_what_is_about_to_leave_the_line_can_be_cancelled(shell: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run("true")
    connection, due, tried = shell.connection, list[Callable[[], None]](), threading.Event()
    kill = connection._kill
    monkeypatch.setattr(connection, "_kill", lambda *args: (tried.set(), kill(*args))[1])
    ended: dict[str, Completion] = {}
    ops = [shell.operation("execute_command", command=command) for command in ("sleep 0.2", "sleep 59")]
    with monkeypatch.context() as patched:
        patched.setattr(connection._waiter, "call_soon", due.append)
        for op in ops:
            connection.start(op, lambda completion, op_id=op.op_id: ended.update({op_id: completion}))  # type: ignore[misc]
        wait_until(lambda: due, 10)
    told: list[bool] = []
    canceller = threading.Thread(target=lambda: told.append(connection.cancel(ops[1].op_id)))
    canceller.start()
    wait_until(lambda: tried.is_set() or not canceller.is_alive(), 10)
    due[0]()
    canceller.join(20)
    assert told == [True]
    wait_until(lambda: len(ended) == 2, 10)
    assert ended[ops[1].op_id].value["cancelled"] is True


def test_closing_completes_what_runs_and_what_waits(shell: World) -> None:
    shell.run("true")
    ended: list[Completion] = []
    for _ in range(3):
        shell.connection.start(shell.operation("execute_command", command="sleep 60"), ended.append)
    wait_until(lambda: any("sleep 60" in line for line in shell.server.lines), 10)
    shell.connection.close()
    wait_until(lambda: len(ended) == 3, 10)
    codes = sorted(completion.error.code for completion in ended if completion.error is not None)
    assert codes == ["not_started", "not_started", "outcome_unknown"]


# --- broken sessions -------------------------------------------------------------------------


def _broken_answer(bash: bool, **changes: Any) -> dict[str, Any]:
    data = {"session_id": "x", "command_id": "c", "command": "", "status": "completed", "exit_code": None}
    said = {"stdout": BROKEN, "stderr": ""} if bash else {"output": BROKEN}
    return {"success": True, "message": "ok", "data": {**data, **said, **changes}}


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"exit_code": 1},
        {"exit_code": "0"},
        {"exit_code": 4096, "output": "", "stdout": ""},
        {"status": "running", "output": "", "stdout": ""},
        {"status": "made up", "exit_code": 0, "output": "", "stdout": ""},
    ],
)
def test_a_corrupted_answer_is_an_unknown_outcome_and_nothing_is_sent_again(
    tmp_path: Path, session: str | None, answer: dict[str, Any]
) -> None:
    for bash in (True, False):
        with world_of(tmp_path / str(bash), bash=bash) as world:
            world.run("true", session=session)
            made, effect = len(world.server.made), f"echo done >> {world.server.root}/effects"
            told = _broken_answer(bash, **answer)

            def corrupted(handler: _Handler, told: dict[str, Any] = told, effect: str = effect) -> None:
                subprocess.run(effect, shell=True, check=True)  # it did run
                handler.reply(200, json.dumps(told).encode())

            world.server.faults[EXEC[bash]] = corrupted
            completion = world.do("execute_command", command=effect, session=session)
            assert completion.error is not None
            assert completion.error.code == "outcome_unknown"
            assert _effects(world) == ["done"]
            assert world.run("echo well", session=session)["stdout"] == "well\n"
            assert _effects(world) == ["done"], "the command was sent again"
            wait_until(lambda world=world: world.server.closed, 10)  # type: ignore[misc]
            assert len(world.server.made) > made, "the session was not made anew"


def test_a_server_error_that_names_the_broken_shell_is_one_too(shell: World) -> None:
    shell.run("N=1", session="s")
    body = ('{"success": false, "message": "' + BROKEN + '", "data": null}').encode()
    shell.server.faults["/v1/shell/exec"] = lambda handler: handler.reply(500, body)
    assert shell.code("execute_command", command="echo", session="s") == "outcome_unknown"
    assert shell.run("echo ${N-new}", session="s")["stdout"] == "new\n"


def test_two_commands_that_did_meet_in_a_shell_are_unknown(shell: World) -> None:
    """What the lane prevents for ours, another program in the sandbox may still do."""
    shell.run("true", session="s")
    (name,) = (made for made in shell.server.made if made in shell.server._sessions)
    busy = threading.Thread(target=shell.server._run, args=(name, "sleep 1"))
    busy.start()
    wait_until(lambda: "sleep 1" in shell.server.lines, 10)
    assert shell.code("execute_command", command="true", session="s") == "outcome_unknown"
    busy.join()


def test_a_connection_that_breaks_after_the_command_went_out_is_an_unknown_outcome(world: World) -> None:
    world.run("true")
    lines = len(world.server.lines)
    for path in EXEC.values():
        world.server.faults[path] = lambda handler: None
    assert world.code("execute_command", command="true") == "outcome_unknown"
    assert len(world.server.lines) == lines + 1


# --- hostile answers -------------------------------------------------------------------------


def _flood(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")
    for _ in range(100_000):
        handler.wfile.write(b"x" * 65536)


def _endless_header(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100_000):
        handler.wfile.write(b"X: y\r\n" * 1000)


def _endless_chunks(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(100_000):
        handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def _no_chunks(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n" + b"x" * 5000)


@pytest.mark.parametrize(
    "harm",
    [_flood, _endless_header, _endless_chunks, _no_chunks, lambda handler: handler.wfile.write(b"SSH-2.0-hi\r\n\r\n")],
)
@pytest.mark.parametrize(
    ("path", "kind", "args"),
    [
        ("/v1/bash/exec", "execute_command", {"command": "true"}),
        ("/v1/bash/exec", "stat", {"path": "."}),
        ("/v1/bash/sessions/create", "execute_command", {"command": "true"}),
        ("/v1/file/grep", "grep", {"path": ".", "pattern": "x"}),
        ("/v1/file/download", "read_file", {"path": "big"}),
    ],
)
def test_an_answer_made_to_harm_ends_its_operation_and_no_other(
    tmp_path: Path, harm: Callable[[_Handler], None], path: str, kind: str, args: dict[str, Any]
) -> None:
    with world_of(tmp_path, bash=True) as world:
        (tmp_path / "user-data/workspace/big").write_bytes(b"x" * 2_000_000)
        world.server.faults[path] = harm
        assert world.code(kind, **args) in ("outcome_unknown", "internal", "not_started")
        assert world.run("echo well")["stdout"] == "well\n"


@pytest.mark.parametrize(
    ("path", "kind", "args", "answers"),
    [
        ("/v1/bash/exec", "stat", {"path": "."}, ["ZGEA", "x", "", ":", "ZAAtMQA5OQB4ADA=", "é", "A" * 100_000]),
        ("/v1/bash/exec", "list_dir", {"path": "."}, ["ZGEA:1", "x:y", ":-1", ":99999999999999999999", "AAA:"]),
        ("/v1/bash/exec", "read_file", {"path": "f"}, ["-1:", "x", "5:!", ":", "99999999999999999999:"]),
        ("/v1/bash/exec", "write_file", {"path": "f"}, ["", "x y", "-1 " + "a" * 64, "1 zz"]),
        ("/v1/bash/exec", "metrics", {}, ["memory_bytes -1\npids x\n" + "disk_bytes 1 " * 1000, "\0"]),
    ],
)
def test_lies_of_a_script_are_typed_errors_or_harmless(
    tmp_path: Path, path: str, kind: str, args: dict[str, Any], answers: list[str]
) -> None:
    with world_of(tmp_path, bash=True) as world:
        for stdout in answers:
            world.server.lies[path] = _broken_answer(True, exit_code=0, stdout=stdout)
            completion = world.do(kind, b"x" if kind == "write_file" else None, **args)
            if completion.error is not None:
                assert completion.error.code in ("internal", "outcome_unknown", "file_too_large"), stdout
            else:
                assert kind in ("metrics", "list_dir"), (stdout, completion.value)


@pytest.mark.parametrize(
    "lie",
    [
        [], None, "x", {}, {"success": True}, {"success": True, "data": []}, {"success": "yes", "data": {}},
        {"success": True, "data": {"matches": [{"file": "x"}]}}, {"success": True, "data": {"matches": "x"}},
        {"success": True, "data": {"matches": [{"file": "a", "line_number": -1, "line_content": "x"}]}},
        {"success": False, "message": {"a": 1}}, {"success": False, "error": {"code": "lease_lost"}},
    ],
)  # fmt: skip
def test_lies_of_a_route_are_typed_errors(tmp_path: Path, lie: Any) -> None:
    with world_of(tmp_path, bash=True) as world:
        world.server.lies["/v1/file/grep"] = lie
        assert world.code("grep", path=".", pattern="x") == "internal"


def test_another_servers_address_is_not_spoken_to(tmp_path: Path) -> None:
    with world_of(tmp_path, bash=True) as world:
        world.server.hostname = "somebody-else"
        completion = world.do("execute_command", command="true")
        assert completion.error is not None
        assert (completion.error.code, completion.error.facts["reason"]) == ("sandbox_lost", "endpoint_replaced")
        assert world.server.lines == []


def test_a_server_without_any_command_route_is_told_so(tmp_path: Path) -> None:
    with world_of(tmp_path, bash=False) as world:
        for path in ("/v1/shell/sessions/create", "/v1/bash/sessions/create"):
            world.server.faults[path] = lambda handler: handler.reply(404, b'{"detail": "Not Found"}')
        completion = world.do("execute_command", command="true")
        assert completion.error is not None
        assert completion.error.facts["reason"] == "no_route"


@pytest.mark.parametrize(
    ("route", "kind", "content"),
    [("/v1/file/grep", "grep", None), ("/v1/file/write", "write_file", b"x" * 100_000)],
)
def test_a_server_without_a_route_for_files_is_asked_once(
    world: World, route: str, kind: str, content: bytes | None
) -> None:
    world.value("noop")
    world.server.missing.add(route)
    args = {"path": ".", "pattern": "x"} if kind == "grep" else {"path": "f"}
    assert world.code(kind, content, **args) == "internal"
    assert world.server.asked[route] <= 2, "once for either way of running commands"
    assert world.run("echo fine")["stdout"] == "fine\n"


def test_many_operations_at_once_come_back_whole(world: World) -> None:
    world.run("true")
    ended: list[tuple[int, Completion]] = []
    for number in range(16):
        op = (
            world.operation("execute_command", command=f"echo {number}")
            if number % 2
            else world.operation("write_file", f"{number}".encode(), path=f"f{number}")
        )
        with suppress(AssertionError):
            world.connection.start(op, lambda completion, number=number: ended.append((number, completion)))  # type: ignore[misc]
    wait_until(lambda: len(ended) == 16, 40)
    for number, completion in ended:
        assert completion.error is None, (number, completion.error)
        assert completion.value.get("stdout", f"{number}\n") == f"{number}\n"
