"""A real sandboxd without walls around it, and the worker's way to it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from sandfleet.backends import Liveness, Operation
from sandfleet_workers.backends.local_host import Python, sandboxd_program
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import UnixEndpoint


class Sandboxd:
    def __init__(self, root: Path, *listen: str, **config: Any) -> None:
        self.key = secrets.token_bytes(16)
        self.root = root
        program, suffix = sandboxd_program(Python(sys.executable, None))  # compiled: a second less for each test
        (root / f"sandboxd{suffix}").write_bytes(program)
        argv = [sys.executable, "-I", "-S", "-B", str(root / f"sandboxd{suffix}"), *listen]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"key": self.key.hex(), "cwd": str(root), **config}).encode() + b"\n")
        self.process.stdin.close()
        self.ready = self.process.stdout.readline().split()
        self.process.stdout.close()

    def liveness(self) -> Liveness:
        return Liveness.ALIVE if self.process.poll() is None else Liveness.DEAD

    def connect(self) -> EndpointConnection:
        endpoint = UnixEndpoint(
            os.open(self.root, os.O_PATH | os.O_DIRECTORY), "s", self.key, os.getuid(), self.process.pid
        )
        return EndpointConnection(endpoint, sandbox_id="ab", liveness=self.liveness, guard_tick_s=0.05)

    def kill(self) -> None:
        """End it and, as no namespace does it here, what it started."""
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        self.process.kill()  # first: it must not live to tell how its children ended
        self.process.wait()
        for child in children:
            child.kill()


def op(kind: str, content: bytes | None = None, **args: Any) -> Operation:
    return Operation(secrets.token_hex(8), kind, args, content)


def sockets_of(connection: EndpointConnection) -> list[socket.socket]:
    return [channel._sock for channel in connection._channels]
