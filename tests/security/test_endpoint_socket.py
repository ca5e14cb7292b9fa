"""The socket of a sandbox lies where the sandbox can write: whatever it puts there, the node stays with the right
sandbox, gets no nonsense for an answer and waits for nobody (catalogue E10, F8)."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sandfleet.backends import Completion, Liveness, Operation
from sandfleet.errors import InternalError, NotStarted, OutcomeUnknown, SandboxLost
from sandfleet_workers import endpoint_files, endpoint_ops
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import UnixEndpoint
from sandfleet_workers.waiter import Waiter

KEY = b"k" * 16
Behaviour = Callable[[socket.socket, bytes], object]
STAT = Operation("op", "stat", {"path": "x"})
EXEC = Operation("op", "execute_command", {"command": "true", "timeout_s": 5.0})


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def data(fields: object) -> bytes:
    return http(json.dumps({"success": True, "data": fields}).encode())


class Server:
    """What listens at a socket: says hello with ``key`` and then behaves as told."""

    def __init__(self, path: Path, behave: Behaviour | None = None, key: bytes = KEY) -> None:
        self.behave = behave or (lambda sock, _: sock.sendall(data({"whose": str(path)})))
        self.key = key
        self.requests: list[bytes] = []
        self._stop = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        folder = os.open(path.parent, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(5)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while (head := sock.recv(65536)) and not self._stop.is_set():
                self.requests.append(head)
                target = head.split()[1].decode()
                if target.startswith("/v1/sandfleet/hello?"):
                    challenge = bytes.fromhex(parse_qs(urlsplit(target).query)["challenge"][0])
                    sock.sendall(data({"proof": hmac.new(self.key, challenge, "sha256").hexdigest()}))
                else:
                    self.behave(sock, head)

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Sandbox:
    """A directory with a socket in it, and the node's connection to that."""

    def __init__(self, root: Path, waiter: Waiter) -> None:
        self.root = root
        self.path = root / "s"
        self._waiter = waiter
        self._stack = contextlib.ExitStack()

    def serve(self, behave: Behaviour | None = None, path: Path | None = None, key: bytes = KEY) -> Server:
        server = Server(path or self.path, behave, key)
        self._stack.callback(server.close)
        return server

    def connect(self, liveness: Liveness = Liveness.ALIVE, **rules: Any) -> EndpointConnection:
        rules = {"uid": os.getuid(), "pid": os.getpid(), **rules}
        times = {name: rules.pop(name) for name in ("hello_s", "guard_tick_s") if name in rules}
        endpoint = UnixEndpoint(os.open(self.root, os.O_PATH | os.O_DIRECTORY), "s", KEY, **rules)
        made = EndpointConnection(endpoint, sandbox_id="ab", liveness=lambda: liveness, waiter=self._waiter, **times)
        self._stack.callback(made.close)
        return made

    def ask(self, op: Operation = STAT, **rules: Any) -> Completion:
        return self.connect(**rules).perform(op, 10)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    waiter = Waiter()
    made = Sandbox(tmp_path, waiter)
    yield made
    made.close()
    waiter.close()


def assert_replaced(completion: Completion) -> None:
    assert isinstance(completion.error, SandboxLost), completion
    assert completion.error.facts["reason"] == "endpoint_replaced"


# --- something else in the socket's place --------------------------------------------------------


def test_a_symlink_to_another_sandboxs_socket_is_not_followed(sandbox: Sandbox, tmp_path: Path) -> None:
    neighbour = sandbox.serve(path=tmp_path / "neighbour")
    sandbox.path.symlink_to(tmp_path / "neighbour")
    assert_replaced(sandbox.ask())
    assert neighbour.requests == []


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, Path.mkdir], ids=["file", "fifo", "directory"])
def test_what_is_no_socket_is_refused_at_once(sandbox: Sandbox, make: Callable[[Path], object]) -> None:
    make(sandbox.path)
    began = time.monotonic()
    assert_replaced(sandbox.ask())
    assert time.monotonic() - began < 1


def test_another_sandboxs_socket_moved_here_gets_no_request(sandbox: Sandbox) -> None:
    neighbour = sandbox.serve(key=b"another key")
    assert_replaced(sandbox.ask(pid=None))
    assert all(request.startswith(b"GET /v1/sandfleet/hello") for request in neighbour.requests)


@pytest.mark.parametrize("rule", [{"pid": 1}, {"uid": 12345}])
def test_another_process_or_user_gets_nothing(sandbox: Sandbox, rule: dict[str, int]) -> None:
    server = sandbox.serve()
    assert_replaced(sandbox.ask(**rule))
    assert server.requests == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a pid namespace without a user namespace")
@pytest.mark.parametrize("mine", [True, False])
def test_a_worker_in_a_container_cannot_see_the_pid_and_still_checks_the_user(sandbox: Sandbox, *, mine: bool) -> None:
    """The kernel names process 0 when the other end is in a pid namespace that ours cannot see."""
    sandbox.serve()
    code = (
        "import os, sys; from sandfleet_workers.endpoint_socket import UnixEndpoint\n"
        "directory = os.open(sys.argv[1], os.O_PATH | os.O_DIRECTORY)\n"
        "UnixEndpoint(directory, 's', b'k', uid=int(sys.argv[2]), pid=4_000_000).connect().close()\n"
    )
    uid = os.getuid() if mine else 12345
    argv = ["unshare", "--pid", "--fork", sys.executable, "-c", code, str(sandbox.root), str(uid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode == 0) is mine, done.stderr
    assert mine or "another user's process listens there" in done.stderr


def test_the_name_is_looked_up_in_the_pinned_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    mine, pinned = Sandbox(root, sandbox._waiter), tmp_path / "moved"
    mine.serve(lambda sock, _: sock.sendall(data({"do": "right"})))
    connection = mine.connect()
    root.rename(pinned)
    root.mkdir()
    impostor = sandbox.serve(path=root / "s")
    connection.perform(STAT, 10)
    assert impostor.requests == []
    mine.close()


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path, sandbox: Sandbox) -> None:
    root = tmp_path / ("long" * 40)
    root.mkdir()
    deep = Sandbox(root, sandbox._waiter)
    deep.serve(lambda sock, _: sock.sendall(data({"proof": None, "ops_running": 0, "sessions": 0, "version": "1"})))
    assert deep.ask(Operation("op", "health", {})).error is None
    deep.close()


def test_a_missing_socket_is_told_by_whether_the_sandbox_lives(sandbox: Sandbox) -> None:
    assert isinstance(sandbox.ask(liveness=Liveness.ALIVE).error, NotStarted)
    assert isinstance(sandbox.ask(liveness=Liveness.UNKNOWN).error, NotStarted)
    assert isinstance(sandbox.ask(liveness=Liveness.DEAD).error, SandboxLost)
    assert isinstance(sandbox.ask(EXEC, liveness=Liveness.DEAD).error, SandboxLost)


# --- answers -------------------------------------------------------------------------------------

NONSENSE = {
    "no http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "old http": b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    "endless length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000,
    "more than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}",
    "early information": b"HTTP/1.1 100 Continue\r\n\r\n",
    "no json": http(b"\xff\xfe"),
    "deep json": http(b"[" * 100_000),
    "no object": http(b"[]"),
    "no data": http(b'{"success": true}'),
    "wrong fields": data({"path": 1, "name": [], "type": "dir"}),
    "wrong numbers": data({"path": "x", "name": "x", "type": "file", "size": -1, "mode": 1e400, "mtime": 0}),
    "failure without code": http(b'{"success": false}', "500 No"),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_an_error_that_says_what_is_known(sandbox: Sandbox, answer: bytes) -> None:
    sandbox.serve(lambda sock, _: sock.sendall(answer))
    assert isinstance(sandbox.ask(STAT).error, InternalError)
    ended = sandbox.ask(EXEC).error
    # A well-formed refusal is an answer; anything else leaves open whether the command ran.
    assert isinstance(ended, InternalError if b"false" in answer else OutcomeUnknown)


@pytest.mark.parametrize("code", ["lease_lost", "config_invalid", "node_id_in_use", "sandbox_lost", "made_up", ""])
def test_a_sandbox_cannot_speak_for_the_fleet(sandbox: Sandbox, code: str) -> None:
    error = {"code": code, "message": "x" * 10_000_0, "facts": {"self": 1, "message": 2, "op_id": "y", "n": [1, {}]}}
    sandbox.serve(lambda sock, _: sock.sendall(http(json.dumps({"success": False, "error": error}).encode(), "409 No")))
    ended = sandbox.ask(STAT).error
    assert type(ended) is InternalError
    assert len(str(ended)) < 5000


def test_facts_cannot_upset_an_errors_constructor(sandbox: Sandbox) -> None:
    facts = {"self": 1, "retry_after_s": "soon", "path": "p", "lines": list(range(1000)), "x y": 1, "big": "b" * 9999}
    error = {"code": "path_not_found", "message": "gone", "facts": facts}
    sandbox.serve(lambda sock, _: sock.sendall(http(json.dumps({"success": False, "error": error}).encode(), "404 No")))
    ended = sandbox.ask(STAT).error
    assert ended is not None
    assert ended.code == "path_not_found"
    assert ended.facts["path"] == "p"
    assert len(ended.facts["lines"]) == 20
    assert "self" not in ended.facts


# --- breaking off and keeping silent -------------------------------------------------------------


def test_a_read_is_asked_once_more_when_the_connection_breaks(sandbox: Sandbox) -> None:
    answers = iter([b"", data({"ops_running": 0, "sessions": 0, "version": "1"})])

    def behave(sock: socket.socket, _head: bytes) -> None:
        if answer := next(answers):
            sock.sendall(answer)
        else:
            sock.shutdown(socket.SHUT_RDWR)

    sandbox.serve(behave)
    assert sandbox.ask(Operation("op", "health", {})).error is None


def test_a_read_is_not_asked_for_ever(sandbox: Sandbox) -> None:
    server = sandbox.serve(lambda sock, _: sock.shutdown(socket.SHUT_RDWR))
    assert isinstance(sandbox.ask(STAT).error, NotStarted)
    assert sum(request.startswith(b"POST") for request in server.requests) == 2


def test_an_effect_whose_connection_breaks_is_asked_for_under_its_id_and_no_more(sandbox: Sandbox) -> None:
    server = sandbox.serve(lambda sock, _: sock.shutdown(socket.SHUT_RDWR))
    assert isinstance(sandbox.ask(Operation("op", "remove", {"path": "x"})).error, OutcomeUnknown)
    assert isinstance(sandbox.ask(EXEC).error, OutcomeUnknown)
    targets = [request.split()[1] for request in server.requests if request.startswith(b"POST")]
    # sandboxd carries a change out once under one op id, so that it may be sent again; a command is only asked about.
    assert targets == [b"/v1/sandfleet/fs"] * 2 + [b"/v1/bash/exec", b"/v1/sandfleet/op"]


def test_a_server_that_never_proves_itself_holds_nothing(sandbox: Sandbox) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(sandbox.path))
    listener.listen()
    ended = sandbox.ask(EXEC, hello_s=0.1, guard_tick_s=0.05).error
    assert isinstance(ended, NotStarted)
    assert ended.facts["reason"] == "no_answer"
    listener.close()


def test_a_server_that_never_answers_ends_in_doubt(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_ops, "_GUARD_EXTRA_S", 0.1)
    monkeypatch.setattr(endpoint_files, "_GUARD_EXTRA_S", 0.1)
    sandbox.serve(lambda _sock, _head: None)
    op = Operation("op", "execute_command", {"command": "true", "timeout_s": 0.1})
    assert isinstance(sandbox.ask(op, guard_tick_s=0.05).error, OutcomeUnknown)
    search = Operation("op", "glob", {"path": ".", "pattern": "*", "timeout_s": 0.1})
    assert isinstance(sandbox.ask(search, guard_tick_s=0.05).error, NotStarted)


def test_a_slow_answer_does_not_delay_other_sandboxes(sandbox: Sandbox, tmp_path: Path) -> None:
    release = threading.Event()
    sandbox.serve(lambda sock, _: (sock.sendall(b"HTTP/1.1 200 OK\r\n"), release.wait(5)))
    slow, ended = sandbox.connect(), list[Completion]()
    slow.start(STAT, ended.append)
    (tmp_path / "other").mkdir()
    other = Sandbox(tmp_path / "other", sandbox._waiter)
    other.serve(lambda sock, _: sock.sendall(data({"ops_running": 0, "sessions": 0, "version": "1"})))
    assert other.ask(Operation("op", "health", {})).error is None
    assert ended == []
    slow.close()
    assert isinstance(ended[0].error, NotStarted)
    release.set()
    other.close()
