"""One process of a container whose other end does what it likes: nothing it writes keeps us from a deadline."""

from __future__ import annotations

import os
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet.backends import Completion, Liveness, Operation

stream = pytest.importorskip("sandfleet_workers.backends.docker.exec_stream")
exec_connection = pytest.importorskip("sandfleet_workers.backends.docker.exec_connection")

FRAME = struct.pack(">BxxxI", 1, 8192) + b"x" * 8192
MOST_READS = 20_000


class Flood(ssl.SSLSocket):
    """A socket whose other end writes faster than anybody reads."""

    def __new__(cls, *_: Any) -> Flood:
        return super().__new__(cls)

    def __init__(self, fd: int) -> None:
        self.fd, self.reads = fd, 0

    def fileno(self) -> int:
        return self.fd

    def recv(self, *_: Any) -> bytes:
        self.reads += 1
        assert self.reads < MOST_READS, "it reads on for ever"
        return FRAME

    def pending(self) -> int:
        return 0


@pytest.fixture
def flooded() -> Iterator[Any]:
    """A process that floods us; its descriptor can always be read."""
    there, ours = os.pipe()
    os.write(ours, b"x")
    process = stream.ExecProcess.__new__(stream.ExecProcess)
    process._socket = Flood(there)
    process._frames, process._half_open, process._lock = stream._Frames(b""), False, threading.Lock()
    yield process
    os.close(there)
    os.close(ours)


def test_a_flood_over_tls_does_not_outlast_the_deadline(flooded: Any) -> None:
    looks = iter([time.monotonic() + 60] * 3)
    got: list[int] = []
    end = flooded.pump(lambda _stream, data: got.append(len(data)), lambda: next(looks, 0.0))
    assert end is stream.End.LATE
    assert got == [8192] * 3


def test_a_process_that_has_nothing_to_say_and_floods_us_is_not_written_to(flooded: Any) -> None:
    assert flooded.write(b"12\n") is False


def test_an_operation_that_gets_no_thread_ends_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine: Any = SimpleNamespace(api=None)
    connection = exec_connection.ExecConnection(
        engine, "c", sandbox_id="ab", uid="1", env={}, liveness=lambda: Liveness.ALIVE
    )
    ended: list[Completion] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for number in range(100):
            connection.start(Operation(f"o{number}", "execute_command", {"command": "true"}), ended.append)
    assert [completion.error.code for completion in ended if completion.error] == ["not_started"] * 100
    assert connection.cancel("o1") is False
