"""Sandboxes to attack: those of a node with its defaults, one backend after the other.

A case of the catalogue takes ``box``, which is each of them in turn, or says by `on` which ones it is about.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandfleet.backends import Completion, Connection, SandboxBackend, SandboxPlan
from sandfleet.config import Settings
from sandfleet.model import SandboxSpec
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import load_backend
from tests.docker.sandboxes import docker_settings
from tests.services import require

__all__ = [
    "KINDS",
    "WORKSPACE",
    "Box",
    "Boxes",
    "MemoryWatch",
    "as_root",
    "docker",
    "inspected",
    "median_s",
    "on",
    "opened",
]

WORKSPACE = "/mnt/user-data/workspace"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="the case needs a root worker's powers over files")

#: Name: (backend, what its container settings say beyond the defaults).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "docker": ("docker", {}),
    "docker-full": ("docker", {"network_mode": "full"}),
    "local": ("local", {}),
}


def on(*kinds: str) -> pytest.MarkDecorator:
    """The case is about these alone."""
    return pytest.mark.parametrize("boxes", [param(kind) for kind in kinds], indirect=True)


def param(kind: str) -> Any:
    """A parameter for the fixture ``boxes``."""
    return pytest.param(kind, marks=[pytest.mark.docker] if KINDS[kind][0] == "docker" else [])


@dataclass(eq=False)
class Box:
    """One running sandbox.

    Attributes:
        boxes: Its siblings, and the backend that holds it.
        plan: What it was made from.
        connection: The node's way in.
    """

    boxes: Boxes
    plan: SandboxPlan
    connection: Connection

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.plan.sandbox_id

    @property
    def workspace(self) -> Path:
        """Its workspace, as the host sees it."""
        return self.plan.user_data / "workspace"

    @property
    def pid(self) -> int:
        """Its process 1, as the host numbers it."""
        return int(self.boxes.backend.pid_of(self.id))  # type: ignore[attr-defined]

    @property
    def container(self) -> str:
        """The id of its container; of a local sandbox there is none."""
        return str(self.boxes.backend.container_of(self.id))  # type: ignore[attr-defined]

    def result(self, command: str | None = None, **args: Any) -> dict[str, Any]:
        """What became of a command."""
        given = args if command is None else {"command": command, **args}
        value: dict[str, Any] = self.boxes.world.value(self.connection, "execute_command", **given)
        return value

    def run(self, command: str, **args: Any) -> str:
        """Both streams of a command, one after the other."""
        value = self.result(command, **args)
        return str(value["stdout"]) + str(value["stderr"])

    def python(self, script: str, *argv: str, **args: Any) -> str:
        """Both streams of a Python program that runs in the sandbox."""
        value = self.result(argv=["python3", "-c", script, *argv], **args)
        return str(value["stdout"]) + str(value["stderr"])

    def do(self, kind: str, content: bytes | None = None, **args: Any) -> Completion:
        """An operation's completion, whatever it is."""
        return self.boxes.world.do(self.connection, kind, content, **args)

    def value(self, kind: str, content: bytes | None = None, **args: Any) -> Any:
        """The value of an operation that must succeed."""
        return self.boxes.world.value(self.connection, kind, content, **args)

    def code(self, kind: str, content: bytes | None = None, **args: Any) -> str:
        """The error code of an operation that must fail."""
        return self.boxes.world.code(self.connection, kind, content, **args)

    def read(self, path: str) -> bytes:
        """A file's bytes, as the node reads them."""
        return self.boxes.world.read(self.connection, path)

    def begin(self, command: str, timeout_s: float) -> Callable[[], dict[str, Any]]:
        """Start a command; what comes back waits for its result."""
        ended = threading.Event()
        told: list[Completion] = []

        def keep(completion: Completion) -> None:
            told.append(completion)
            ended.set()

        op = self.boxes.world.operation("execute_command", command=command, timeout_s=timeout_s)
        self.connection.start(op, keep)

        def result() -> dict[str, Any]:
            assert ended.wait(timeout_s + 30), f"{command!r} has not ended"
            assert told[0].error is None, repr(told[0].error)
            return dict(told[0].value)

        return result

    def host_pids(self) -> set[int]:
        """Everything that runs in it, as the host numbers it: all that shares process 1's pid namespace."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = set()
        for pid in psutil.pids():
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == space:
                    found.add(pid)
            except OSError:
                continue  # gone, or not ours to look at
        return found


class Boxes:
    """A node's backend with its defaults, and the sandboxes made on it.

    Attributes:
        kind: One of `KINDS`.
        backend: The backend.
        world: It, for those who talk to sandboxes by themselves.
    """

    def __init__(self, kind: str, backend: SandboxBackend, root: Path, deaths: list[tuple[str, str]]) -> None:
        self.kind = kind
        self.backend = backend
        self.world = World(backend, root, deaths)
        self.root = root
        self._first: Box | None = None
        self._second: Box | None = None

    @property
    def box(self) -> Box:
        """One that all cases of a module share; a case that ends it gets the next one a new one."""
        self._first = self._living(self._first)
        return self._first

    @property
    def neighbour(self) -> Box:
        """Another thread's, that nobody attacks from within."""
        self._second = self._living(self._second)
        return self._second

    def _living(self, box: Box | None) -> Box:
        return box if box is not None and box.id in self.backend.running() else self.made()

    def made(self, thread_id: str | None = None, **spec: Any) -> Box:
        """A new sandbox. ``spec``: fields of `SandboxSpec`, and ``mounts``."""
        mounts = spec.pop("mounts", ())
        plan = replace(self.world.plan(thread_id), mounts=mounts, spec=SandboxSpec(self.backend.name, **spec))
        return Box(self, plan, self.backend.create(plan))

    @contextmanager
    def one(self, thread_id: str | None = None, **spec: Any) -> Iterator[Box]:
        """A new sandbox of the case's own."""
        box = self.made(thread_id, **spec)
        try:
            yield box
        finally:
            self.backend.destroy(box.id)


@contextmanager
def opened(kind: str, root: Path, **given: Any) -> Iterator[Boxes]:
    """A backend of that kind, closed at the end. ``given``: further settings."""
    name, container = KINDS[kind]
    require({"docker": "docker", "local": "bwrap"}[name])
    deaths: list[tuple[str, str]] = []
    wanted = {**container, **given.pop("container", {})}
    settings: Settings = docker_settings(root, node_id="n1", container=wanted, backend=name, **given)
    backend = load_backend(name)(settings, lambda *death: deaths.append(death))
    try:
        yield Boxes(kind, backend, root, deaths)
    finally:
        backend.close()


def median_s(work: Callable[[], object], times: int = 9) -> float:
    """How long ``work`` takes, in seconds: the median."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


class MemoryWatch:
    """How far this process, the worker, grows within a block: ``grown_bytes``, looked at all the time."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._before = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            last = self._over.wait(0.01)
            self.grown_bytes = max(self.grown_bytes, self._process.memory_info().rss - self._before)
            if last:
                return


def docker(*argv: str) -> str:
    """What Docker's command line says."""
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout.strip()


def inspected(box: Box) -> dict[str, Any]:
    """What the engine knows of a box's container."""
    found: dict[str, Any] = json.loads(docker("inspect", box.container))[0]
    return found
