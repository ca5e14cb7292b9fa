"""``docker exec`` through an engine that is reached over TLS, where no half of a connection can be closed."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from docker.tls import TLSConfig

from sandfleet.backends import Connection, Liveness
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends.docker.exec_connection import ExecConnection
from tests.docker.images import BUSYBOX, require_image
from tests.services import require

pytestmark = pytest.mark.docker
SOCKET = "/var/run/docker.sock"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The machine's engine behind TLS."""
    require("docker")
    if shutil.which("openssl") is None or not Path(SOCKET).exists():
        pytest.skip("needs openssl and the engine's usual socket")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, context), daemon=True).start()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # they would be believed instead of ours
        monkeypatch.delenv(name, raising=False)
    address = f"https://localhost:{listener.getsockname()[1]}"
    client: Any = docker.APIClient(address, tls=TLSConfig(ca_cert=str(certificate), verify=True), version="auto")
    yield client
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _serve(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_forward, args=(context, plain), daemon=True).start()


def _forward(context: ssl.SSLContext, plain: socket.socket) -> None:
    with context.wrap_socket(plain, server_side=True) as client, socket.socket(socket.AF_UNIX) as engine:
        engine.connect(SOCKET)
        upwards = threading.Thread(target=_copy, args=(client, engine), daemon=True)
        upwards.start()
        _copy(engine, client)
        upwards.join(10)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@pytest.fixture
def connection(api: Any) -> Iterator[Connection]:
    require_image(BUSYBOX)
    container = api.create_container(BUSYBOX, ["sleep", "600"], host_config=api.create_host_config(init=True))["Id"]
    api.start(container)
    engine: Any = SimpleNamespace(api=api)
    connection = ExecConnection(engine, container, sandbox_id="0" * 8, uid="0", env={}, liveness=lambda: Liveness.ALIVE)
    yield connection
    connection.close()
    api.remove_container(container, force=True)


def test_commands_and_files_go_over_tls(connection: Connection, tmp_path: Path) -> None:
    world: Any = World(None, tmp_path, [])  # type: ignore[arg-type]  # only its words are needed
    world.value(connection, "make_dir", path="/mnt/user-data/workspace")
    value = world.value(connection, "execute_command", command="echo out; echo err >&2; exit 4")
    assert (value["stdout"], value["stderr"], value["exit_code"]) == ("out\n", "err\n", 4)
    content = os.urandom(3_000_000)
    world.value(connection, "write_file", content, path="f")
    assert world.read(connection, "f") == content
    late = world.value(connection, "execute_command", command="echo before; sleep 50", timeout_s=0.5)
    assert (late["stdout"], late["timed_out"]) == ("before\n", True)
    assert world.code(connection, "execute_command", b"in", command="cat") == "not_supported"
