"""A third party's backend: written against the public contract only, found by its entry point.

It keeps its sandboxes in a dict, offers files and no commands, and borrows the tree of `sandfleet.testing`.
"""

from __future__ import annotations

from typing import Any

from sandfleet.backends import (
    Capability,
    Completion,
    Connection,
    Done,
    Liveness,
    Operation,
    SandboxBackend,
    SandboxPlan,
)
from sandfleet.errors import NotSupported, SandboxLost
from sandfleet.testing import MockConnection
from sandfleet.testing.files import MemoryFiles


class SampleConnection(Connection):
    def __init__(self, files: MemoryFiles) -> None:
        self._inner = MockConnection("sample", files)
        self.alive = True

    def start(self, op: Operation, done: Done) -> None:
        if not self.alive:
            done(Completion(error=SandboxLost("gone")))
        elif op.kind in {"execute_command", "close_session"}:
            done(Completion(error=NotSupported("this backend runs no commands")))
        else:
            self._inner.start(op, done)

    def cancel(self, op_id: str) -> bool:
        return False

    def close(self) -> None:
        self.alive = False


class SampleBackend(SandboxBackend):
    name = "sample"
    capabilities = frozenset({Capability.FILES, Capability.BINARY})
    isolation = "none (a sample)"

    def __init__(self, settings: Any, on_death: Any) -> None:
        super().__init__(settings, on_death)
        self._connections: dict[str, SampleConnection] = {}
        self._files: dict[str, MemoryFiles] = {}

    def create(self, plan: SandboxPlan) -> Connection:
        self.destroy(plan.sandbox_id)
        files = self._files.setdefault(plan.identity.digest, MemoryFiles())
        made = self._connections[plan.sandbox_id] = SampleConnection(files)
        return made

    def destroy(self, sandbox_id: str) -> None:
        if connection := self._connections.pop(sandbox_id, None):
            connection.close()

    def probe(self, sandbox_id: str) -> Liveness:
        return Liveness.ALIVE if sandbox_id in self._connections else Liveness.DEAD

    def running(self) -> list[str]:
        return list(self._connections)

    def close(self) -> None:
        for sandbox_id in self.running():
            self.destroy(sandbox_id)
