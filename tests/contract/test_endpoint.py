"""The worker's side of sandboxd's HTTP, against a real sandboxd without walls around it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Completion, Liveness, Operation
from sandfleet.errors import FileTooLarge, NotStarted, OutcomeUnknown, SandboxLost
from sandfleet_workers import endpoint, endpoint_channel, endpoint_socket
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import TcpEndpoint
from tests.contract.endpoint_served import Sandboxd, op, sockets_of
from tests.services import wait_until

MIB = 1024 * 1024


@pytest.fixture
def sandboxd(tmp_path: Path) -> Iterator[Sandboxd]:
    made = Sandboxd(tmp_path, "--socket", str(tmp_path / "s"))
    yield made
    made.kill()


@pytest.fixture
def connection(sandboxd: Sandboxd) -> Iterator[EndpointConnection]:
    made = sandboxd.connect()
    yield made
    made.close()


def test_fifty_mebibytes_round_trip_in_about_their_own_memory(connection: EndpointConnection) -> None:
    content = os.urandom(MIB) * 50
    tracemalloc.start()
    written = connection.perform(op("write_file", content, path="big"))
    assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    tracemalloc.reset_peak()
    read = connection.perform(op("read_file", path="big"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written.value["size"] == len(content)
    assert read.content == content
    assert peak < 1.2 * len(content)


def test_a_piece_of_a_large_write_fits_twice_into_the_sockets_buffer(connection: EndpointConnection) -> None:
    # The kernel gives one piece half of it, and what is larger waits for the reader in between.
    assert connection.perform(op("write_file", bytes(MIB), path="big")).error is None
    for sock in sockets_of(connection):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * endpoint_channel._SEND


def test_large_and_odd_output_comes_back_whole(connection: EndpointConnection) -> None:
    command = "head -c 8000000 /dev/zero | tr '\\0' x"
    value = connection.perform(op("execute_command", command=command, max_output_bytes=16 * MIB)).value
    assert (len(value["stdout"]), value["truncated"]) == (8_000_000, False)
    flood = op("execute_command", command="yes | head -c 12000000", max_output_bytes=5 * MIB)
    value = connection.perform(flood).value
    assert value["truncated"] is True
    assert "bytes discarded" in value["stdout"]
    value = connection.perform(op("execute_command", command="printf '\\377\\0\\033'")).value
    assert value["stdout"] == "\ufffd\0\033"


def test_names_that_are_not_utf8_go_and_come(connection: EndpointConnection, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / "sub").mkdir()
    assert connection.perform(op("write_file", b"x", path=f"sub/{name}")).error is None
    assert connection.perform(op("read_file", path=f"sub/{name}")).content == b"x"
    listed = connection.perform(op("list_dir", path="sub", max_depth=1)).value["entries"]
    assert [entry["name"] for entry in listed] == [name]


def test_names_cannot_smuggle_a_request(connection: EndpointConnection) -> None:
    path = "a HTTP/1.1\r\nContent-Length: 0\r\n\r\nGET /v1/sandbox?b=%41&c#d"
    assert connection.perform(op("write_file", b"x", path=path, make_parents=True)).error is None
    assert connection.perform(op("read_file", path=path)).content == b"x"


def test_a_command_whose_connection_broke_is_found_again(connection: EndpointConnection, tmp_path: Path) -> None:
    ended: list[Completion] = []
    connection.start(op("execute_command", command="echo once >> count; sleep 0.3; echo done"), ended.append)
    wait_until((tmp_path / "count").exists, 5)
    for sock in sockets_of(connection):
        sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: ended, 5)
    assert ended[0].value["stdout"] == "done\n"
    assert (tmp_path / "count").read_text() == "once\n"


def test_a_sandbox_that_dies_leaves_commands_in_doubt_and_reads_lost(
    sandboxd: Sandboxd, connection: EndpointConnection
) -> None:
    ended: list[Completion] = []
    connection.start(op("execute_command", command="sleep 60"), ended.append)
    connection.perform(op("health"))
    sandboxd.kill()
    wait_until(lambda: ended, 5)
    assert isinstance(ended[0].error, OutcomeUnknown)
    assert isinstance(connection.perform(op("stat", path=".")).error, SandboxLost)
    assert isinstance(connection.perform(op("execute_command", command="true")).error, SandboxLost)


def test_a_frozen_sandboxd_is_given_up_at_the_guard(
    sandboxd: Sandboxd, connection: EndpointConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandfleet_workers.endpoint_ops._GUARD_EXTRA_S", 0.1)
    connection.perform(op("health"))
    os.kill(sandboxd.process.pid, signal.SIGSTOP)
    try:
        late = connection.perform(op("execute_command", command="true", timeout_s=0.1), 5)
        assert isinstance(late.error, OutcomeUnknown)
    finally:
        os.kill(sandboxd.process.pid, signal.SIGCONT)
    assert connection.perform(op("health")).error is None


def test_closing_completes_what_runs(connection: EndpointConnection) -> None:
    ended: list[Completion] = []
    connection.start(op("execute_command", command="sleep 60"), ended.append)
    connection.perform(op("health"))
    connection.close()
    wait_until(lambda: ended, 5)
    assert isinstance(ended[0].error, OutcomeUnknown)
    assert isinstance(connection.perform(op("stat", path=".")).error, NotStarted)


def test_sockets_are_kept_and_shared(connection: EndpointConnection) -> None:
    for _ in range(20):
        assert connection.perform(op("stat", path=".")).error is None
    assert len(sockets_of(connection)) == 1
    ended: list[Completion] = []
    for _ in range(60):
        connection.start(op("execute_command", command="sleep 0.05"), ended.append)
    wait_until(lambda: len(ended) == 60, 20)
    assert [completion.error for completion in ended] == [None] * 60
    assert len(sockets_of(connection)) <= 33


def test_many_threads_may_use_one_connection(connection: EndpointConnection) -> None:
    wrong: list[object] = []

    def work(n: int) -> None:
        for i in range(30):
            text = f"{n}-{i}".encode()
            connection.perform(op("write_file", text, path=f"f{n}"))
            if connection.perform(op("read_file", path=f"f{n}")).content != text:
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_batch_can_be_cancelled(connection: EndpointConnection) -> None:
    ended: list[Completion] = []
    items = [{"kind": "execute_command", "args": {"command": "sleep 60"}}, {"kind": "noop", "args": {}}]
    batch = Operation("b1", "batch", {"ops": items, "stop_on_error": False})
    connection.start(batch, ended.append)
    assert connection.cancel("b1") is True
    wait_until(lambda: ended, 5)
    assert ended[0].value["results"][0]["ok"]["cancelled"] is True
    assert ended[0].value["results"][1]["error"]["code"] == "cancelled"
    assert ended[0].value["stopped_at"] == 1


def test_a_session_that_was_lost_is_told_once_and_then_new(connection: EndpointConnection) -> None:
    connection.perform(op("execute_command", command="X=1", session="s"))
    connection.perform(op("execute_command", command="kill -9 $$", session="s"))
    first = connection.perform(op("execute_command", command="echo $X.", session="s"))
    again = connection.perform(op("execute_command", command="echo $X.", session="s"))
    told = first if first.error is None else again
    assert told.value["stdout"] == ".\n"
    if first.error is not None:
        assert first.error.code == "session_lost"


# --- limits, and what must end whatever happens ----------------------------------------------


def test_a_file_above_the_limit_of_one_operation_is_refused_before_its_bytes_move(
    connection: EndpointConnection, tmp_path: Path
) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(100 * MIB + 1)
    tracemalloc.start()
    for args in ({}, {"max_bytes": 200 * MIB}):
        refused = connection.perform(op("read_file", path="big", **args)).error
        assert isinstance(refused, FileTooLarge)
        assert refused.facts["limit"] == 100 * MIB
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    head = connection.perform(op("read_file", path="big", max_bytes=10))
    assert (head.content, head.value["truncated"]) == (bytes(10), True)


def test_a_node_without_descriptors_left_says_that_nothing_has_begun(
    connection: EndpointConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_args: Any, **_kwargs: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(endpoint_socket.socket, "socket", none_left)
        assert isinstance(connection.perform(op("execute_command", command="true"), 5).error, NotStarted)
    assert connection.perform(op("execute_command", command="true")).error is None


def test_an_operation_ends_whatever_goes_wrong_when_it_is_sent(
    connection: EndpointConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(connection._waiter, "register", full)
        ended: list[Completion] = []
        connection.start(op("execute_command", command="true"), ended.append)
        wait_until(lambda: ended, 5)
    assert isinstance(ended[0].error, NotStarted)
    assert sockets_of(connection) == []
    assert connection.perform(op("execute_command", command="true")).error is None
    assert len(ended) == 1


def test_an_operation_ends_though_nobody_can_tell_whether_its_sandbox_lives(
    sandboxd: Sandboxd, connection: EndpointConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Liveness:
        raise RuntimeError("a bug in a backend")

    monkeypatch.setattr(connection, "_liveness", broken)
    sandboxd.kill()
    assert isinstance(connection.perform(op("stat", path="."), 5).error, NotStarted)


def test_cancelling_what_runs_no_more_gives_up_at_once(
    connection: EndpointConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = op("execute_command", command="true")
    connection.perform(done)
    connection._commands.add(done.op_id)  # as between the sandbox's answer and its completion
    asked: list[str] = []
    kill = connection._kill
    monkeypatch.setattr(connection, "_kill", lambda op_id, until: asked.append(op_id) or kill(op_id, until))
    assert connection.cancel(done.op_id) is False
    assert asked == [done.op_id]


def test_cancelling_in_a_sandbox_that_knows_of_nothing_takes_a_second_at_most(connection: EndpointConnection) -> None:
    connection.perform(op("health"))
    connection._commands.add("never-came")
    began = time.monotonic()
    assert connection.cancel("never-came") is False
    assert time.monotonic() - began < 2


def test_tcp_with_a_token_works_alike(tmp_path: Path) -> None:
    served = Sandboxd(tmp_path, "--tcp", "127.0.0.1:0", token="t0ken")
    endpoint = TcpEndpoint("127.0.0.1", int(served.ready[1]), served.key, "t0ken")
    connection = EndpointConnection(endpoint, sandbox_id="ab", liveness=served.liveness)
    assert connection.perform(op("execute_command", command="echo hi")).value["stdout"] == "hi\n"
    impostor = TcpEndpoint("127.0.0.1", int(served.ready[1]), b"other key", "t0ken")
    other = EndpointConnection(impostor, sandbox_id="ab", liveness=served.liveness)
    ended = other.perform(op("stat", path=".")).error
    assert isinstance(ended, SandboxLost)
    served.kill()
    assert isinstance(connection.perform(op("stat", path=".")).error, SandboxLost)
    connection.close()
    other.close()


def test_a_sandbox_that_is_not_used_keeps_a_connection(sandboxd: Sandboxd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TOUCH_S", 0.05)
    connection = sandboxd.connect()
    wait_until(lambda: sockets_of(connection), 5)
    connection.close()
    assert sockets_of(connection) == []
