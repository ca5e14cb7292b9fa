"""The server itself: who may speak to it, and what hostile or clumsy clients cannot do to it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandfleet_workers.sandboxd import PATH, compile_for, version
from tests.sandboxd.conftest import KEY, TOKEN, Sandboxd, wait_until

AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()


def until_closed(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)


def test_hello_proves_knowledge_of_the_key(box: Sandboxd) -> None:
    data = box.request("GET", "/v1/sandfleet/hello?challenge=c0ffee").data
    assert data["proof"] == hmac.new(bytes.fromhex(KEY), b"\xc0\xff\xee", hashlib.sha256).hexdigest()
    assert data["version"] == version()
    assert data["pid"] == box.process.pid
    for bad in ("xyz", "", "00" * 65):
        assert box.request("GET", f"/v1/sandfleet/hello?challenge={bad}").code == "invalid_argument"


def test_the_aio_readiness_route_has_the_clients_shape(box: Sandboxd) -> None:
    data = box.request("GET", "/v1/sandbox").json
    assert data["success"]
    assert data["workspace"] == str(box.work)
    assert set(data["detail"]) == {"system", "runtime", "utils"}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
def test_a_wrong_token_opens_no_route(box: Sandboxd, header: dict[str, str]) -> None:
    for method, path in (("GET", "/v1/sandbox"), ("POST", "/v1/bash/exec"), ("GET", "/no/such")):
        with ExitStack() as stack:
            client = box.connection()
            stack.callback(client.close)
            client.request(method, path, b"{}", header)
            answer = client.getresponse()
            assert answer.status == 401
            assert json.loads(answer.read())["error"]["code"] == "permission_denied"


def test_everything_works_over_tcp_with_a_token(start: Callable[..., Sandboxd]) -> None:
    box = start(tcp=True)
    assert box.run("echo tcp")["stdout"] == "tcp\n"
    body = os.urandom(3_000_000)
    box.put("f", body)
    assert box.get("f").body == body
    client = box.connection()
    client.request("GET", "/v1/sandbox", headers={"Authorization": "Bearer wrong"})
    assert client.getresponse().status == 401
    client.close()


def test_tcp_without_a_token_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", "-B", str(PATH), "--tcp", "127.0.0.1:0"]
    done = subprocess.run(command, input=b'{"key": "00"}\n', capture_output=True, timeout=10)
    assert done.returncode == 2
    assert b"token" in done.stderr


def test_shutdown_without_a_token_is_refused(start: Callable[..., Sandboxd]) -> None:
    assert start(token=None).post("sandfleet/shutdown").code == "permission_denied"


def test_the_socket_belongs_to_its_user_alone_and_a_stale_one_is_replaced(start: Callable[..., Sandboxd]) -> None:
    box = start()
    assert os.stat(box.socket).st_mode & 0o777 == 0o600
    settings = json.dumps({"key": KEY, "token": TOKEN, "cwd": str(box.work)}).encode() + b"\n"
    command = [sys.executable, "-I", "-S", "-B", str(PATH), "--socket"]
    in_the_way = subprocess.run([*command, str(box.work)], input=settings, capture_output=True, timeout=10)
    assert in_the_way.returncode == 2


def test_it_cannot_be_traced_or_dumped_by_its_own_user(box: Sandboxd) -> None:
    assert os.stat(f"/proc/{box.process.pid}/mem").st_uid == 0


def test_pipelined_requests_are_answered_in_order(box: Sandboxd) -> None:
    with box.raw_socket() as sock:
        parts = []
        for i in range(20):
            body = json.dumps({"command": f"sleep 0.0{9 - i % 10}; echo n{i}", "shell": "sh"}).encode()
            parts.append(b"POST /v1/bash/exec HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (AUTH, len(body)) + body)
        sock.sendall(b"".join(parts) + b"GET /v1/sandbox HTTP/1.1\r\n" + AUTH + b"Connection: close\r\n\r\n")
        text = until_closed(sock)
    places = [text.index(b'"stdout": "n%d\\n"' % i) for i in range(20)]
    assert places == sorted(places)
    assert text.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v1/sandbox HTTP/1.1\r\nX: " + b"x" * 70000, 431),
        (b"POST /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"Content-Length: 200000000\r\n\r\n", 413),
        (b"PUT /v1/sandfleet/file?path=x HTTP/1.1\r\n" + AUTH + b"Content-Length: 9000000\r\n\r\n", 413),
        (b"POST /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"Content-Length: -1\r\n\r\n", 400),
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (b"GET /v1/sandbox HTTP/1.1\r\n" + AUTH + b"\r\n", 200),
        (b"GET /nothing HTTP/1.1\r\n" + AUTH + b"\r\n", 404),
        (b"GET /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"\r\n", 405),
        (b"POST /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"Content-Length: 1\r\n\r\n{", 400),
        (b"POST /v1/bash/exec HTTP/1.1\r\n" + AUTH + b"Content-Length: 100000\r\n\r\n" + b"[" * 100000, 400),
    ],
)
def test_a_malformed_request_is_answered_and_harms_nobody(box: Sandboxd, request_bytes: bytes, status: int) -> None:
    with box.raw_socket() as sock:
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        assert until_closed(sock).startswith(b"HTTP/1.1 %d " % status)


def test_a_client_may_wait_for_leave_to_send_its_body(box: Sandboxd) -> None:
    with box.raw_socket() as sock:
        head = b"PUT /v1/sandfleet/file?path=expected HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
        sock.sendall(head + AUTH + b"\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"ok")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_two_hundred_connections_and_some_that_never_speak_are_served(box: Sandboxd) -> None:
    before = box.stats()["connections"]
    with ExitStack() as stack:
        socks = [stack.enter_context(box.raw_socket()) for _ in range(200)]
        for i, sock in enumerate(socks):
            sock.sendall(b"GET /v1/sandbox HTTP/1.1\r\n" + AUTH + (b"\r\n" if i % 2 else b"X-Slow: "))
        for sock in socks[1::2]:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert box.run("echo served")["stdout"] == "served\n"
    wait_until(lambda: box.stats()["connections"] == before)


def test_beyond_the_limit_the_idlest_connection_makes_room(start: Callable[..., Sandboxd]) -> None:
    box = start(limits={"max_connections": 5})
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(box.raw_socket())
        assert box.exec("true", alone=True).status == 200
        assert json.loads(box.request("GET", "/v1/sandfleet/stats", alone=True).body)["data"]["connections"] <= 5


def test_a_reader_that_stops_reading_does_not_stop_the_others(box: Sandboxd) -> None:
    box.put("large", b"x" * 8_000_000)
    with box.raw_socket() as sock:
        sock.sendall(b"GET /v1/sandfleet/file?path=large HTTP/1.1\r\n" + AUTH + b"\r\n")
        assert sock.recv(1000)
        assert box.run("echo others")["stdout"] == "others\n"


def test_bodies_in_flight_have_a_common_limit(start: Callable[..., Sandboxd]) -> None:
    box = start(limits={"max_inflight_bytes": 4_000_000})
    head = b"PUT /v1/sandfleet/file?path=%d HTTP/1.1\r\n" + AUTH + b"Content-Length: 3000000\r\n\r\n"
    with box.raw_socket() as first, box.raw_socket() as second:
        first.sendall(head % 1 + b"x" * 10)
        wait_until(lambda: box.stats()["connections"] >= 3)
        second.sendall(head % 2)
        assert until_closed(second).startswith(b"HTTP/1.1 503")
    wait_until(lambda: box.put("f", b"x" * 3_000_000).status == 200)


def test_its_byte_code_runs_in_its_place(start: Callable[..., Sandboxd], tmp_path: Path) -> None:
    target = tmp_path / "sandboxd.pyc"
    compile_for(sys.executable, target)
    command = [sys.executable, "-I", "-S", "-B", str(target), "--tcp", "127.0.0.1:0"]
    done = subprocess.run(command, input=b'{"key": "00"}\n', capture_output=True, timeout=10)
    assert b"token" in done.stderr


def test_a_fork_bomb_is_ended_by_its_deadline_while_others_are_served(box: Sandboxd) -> None:
    bomb = (
        "f() { f | f & }; ulimit -u 400 2>/dev/null; n=0; while [ $n -lt 60 ]; do sleep 80.5 & n=$((n+1)); done; wait"
    )
    op = box.run(bomb, async_mode=True, hard_timeout=0.5)["op_id"]
    assert box.run("echo served")["stdout"] == "served\n"
    result = box.post("sandfleet/op", op_id=op, wait=True).data
    assert result["timed_out"]
    wait_until(lambda: box.stats()["zombies"] == 0)
