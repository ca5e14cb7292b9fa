"""A real sandboxd process over a real socket, and a raw HTTP client for it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sandfleet_workers.sandboxd import PATH

KEY = "00112233445566778899aabbccddeeff"
TOKEN = "the-token-of-the-tests"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("sandboxd", timeout=30)
        self.unix_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.unix_path)


class Answer:
    """One answer: its HTTP status, headers, raw body, and what the JSON in it says."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> Any:
        assert self.status == 200, self.body[:2000]
        return self.json["data"]

    @property
    def error(self) -> Any:
        assert self.status >= 400, self.body[:2000]
        return self.json["error"]

    @property
    def code(self) -> str:
        return str(self.error["code"])


class Sandboxd:
    """A server in ``home`` that is ended, with all it started, by `stop`."""

    def __init__(self, home: Path, *, tcp: bool = False, **config: Any) -> None:
        self.home, self.tcp = home, tcp
        self.work = home / "work"
        self.work.mkdir()
        self.socket = str(home / "sandboxd.sock")
        where = ["--tcp", "127.0.0.1:0"] if tcp else ["--socket", self.socket]
        command = [sys.executable, "-I", "-S", "-B", str(PATH), *where, "--log", str(home / "log")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        settings = {"key": KEY, "token": TOKEN, "env": {"MARK": "set"}, "cwd": str(self.work), **config}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.close()
        ready = self.process.stdout.readline().split()
        self.process.stdout.close()
        assert ready[:1] == [b"ready"], ready
        self.port = int(ready[1]) if tcp else 0
        self.client: http.client.HTTPConnection | None = None

    def connection(self) -> http.client.HTTPConnection:
        if self.tcp:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        return UnixConnection(self.socket)

    def raw_socket(self) -> socket.socket:
        connection = self.connection()
        connection.connect()
        assert connection.sock is not None
        return connection.sock

    def request(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, alone: bool = False
    ) -> Answer:
        """Ask once; ``alone`` on a connection of its own, so that threads may do so at the same time."""
        if self.client is None or alone:
            client = self.connection()
            if not alone:
                self.client = client
        else:
            client = self.client
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        client.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **(headers or {})})
        answer = Answer(client.getresponse())
        if alone:
            client.close()
        return answer

    def exec(self, command: str | None = None, *, alone: bool = False, **fields: Any) -> Answer:
        body = {"command": command, **fields}
        return self.request("POST", "/v1/bash/exec", body, alone=alone)

    def run(self, command: str | None = None, **fields: Any) -> Any:
        return self.exec(command, **fields).data

    def fs(self, do: str, path: str | Path, **fields: Any) -> Answer:
        return self.request("POST", "/v1/sandfleet/fs", {"do": do, "path": str(path), **fields})

    def post(self, route: str, **fields: Any) -> Answer:
        return self.request("POST", "/v1/" + route, fields)

    def put(self, path: str | Path, body: bytes, query: str = "") -> Answer:
        return self.request("PUT", f"/v1/sandfleet/file?path={quote(str(path))}{query}", body)

    def get(self, path: str | Path, query: str = "") -> Answer:
        return self.request("GET", f"/v1/sandfleet/file?path={quote(str(path))}{query}")

    def stats(self) -> Any:
        return self.request("GET", "/v1/sandfleet/stats").data

    def story(self) -> str:
        log = self.home / "log"
        return log.read_text() if log.exists() else "(no log)"

    def stop(self) -> None:
        try:
            if self.process.poll() is None:
                self.request("POST", "/v1/sandfleet/shutdown", {}, alone=True)
        except (OSError, http.client.HTTPException):
            pass  # it may be gone before its answer is
        finally:
            if self.client is not None:
                self.client.close()
            self.process.kill()
            self.process.wait(10)


def wait_until(fact: Callable[[], Any], deadline_s: float = 10.0, story: Callable[[], Any] = str) -> Any:
    """Wait for a fact; fail with ``story`` when it does not come true in time."""
    until = time.monotonic() + deadline_s
    while True:
        value = fact()
        if value:
            return value
        assert time.monotonic() < until, f"not in {deadline_s} s: {story()}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def from_base64(text: str) -> bytes:
    return base64.b64decode(text)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Sandboxd]]:
    """Start servers with settings of their own."""
    servers: list[Sandboxd] = []

    def begin(**config: Any) -> Sandboxd:
        home = tmp_path / f"server{len(servers)}"
        home.mkdir()
        servers.append(Sandboxd(home, **config))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxd]:
    server = Sandboxd(tmp_path_factory.mktemp("sandboxd"))
    yield server
    server.stop()


@pytest.fixture
def box(shared_server: Sandboxd) -> Iterator[Sandboxd]:
    """One server for the tests of a module; it must still be well, and have logged nothing, after each."""
    log = os.path.getsize(shared_server.home / "log")
    yield shared_server
    assert shared_server.request("GET", "/v1/sandfleet/hello").status == 200
    assert os.path.getsize(shared_server.home / "log") == log, shared_server.story()


@pytest.fixture
def work(box: Sandboxd, request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own inside the sandbox's working directory."""
    folder = box.work / f"t{abs(hash(request.node.name)):x}"
    folder.mkdir()
    return folder
