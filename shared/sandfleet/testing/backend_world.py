"""Talking to the sandboxes of a backend under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandfleet.backends import Completion, Connection, Operation, SandboxBackend, SandboxPlan
from sandfleet.ids import Identity, new_op_id
from sandfleet.ops import parse_args

__all__ = ["World", "wait_for"]

_WAIT_S = 40.0


class World:
    """A backend under test, with what it reported and a way to talk to its sandboxes."""

    def __init__(self, backend: SandboxBackend, root: Path, deaths: list[tuple[str, str]]) -> None:
        self.backend = backend
        self.deaths = deaths
        self.root = root

    def plan(self, thread_id: str | None = None) -> SandboxPlan:
        """The plan of a thread's sandbox (a fresh thread's if none is named), its directory made."""
        identity = Identity(thread_id) if thread_id else Identity.anonymous()
        user_data = self.root / "threads" / identity.thread_id / "user-data"
        for name in ("workspace", "uploads", "outputs"):
            (user_data / name).mkdir(parents=True, exist_ok=True)
        run_dir = self.root / "run" / identity.digest[:12]
        return SandboxPlan(identity.digest[:12], identity, 1, user_data, run_dir)

    @staticmethod
    def operation(kind: str, content: bytes | None = None, op_id: str | None = None, **args: Any) -> Operation:
        """An operation as the node would hand it on: its arguments validated and complete."""
        return Operation(op_id or new_op_id(), kind, parse_args(kind, args).model_dump(), content)

    def do(self, connection: Connection, kind: str, content: bytes | None = None, **args: Any) -> Completion:
        """Carry out one operation and return its completion, whatever it is."""
        return connection.perform(self.operation(kind, content, **args), _WAIT_S)

    def value(self, connection: Connection, kind: str, content: bytes | None = None, **args: Any) -> Any:
        """The value of an operation that must succeed."""
        completion = self.do(connection, kind, content, **args)
        assert completion.error is None, f"{kind} {args}: {completion.error!r}"
        return completion.value

    def code(self, connection: Connection, kind: str, content: bytes | None = None, **args: Any) -> str:
        """The error code of an operation that must fail."""
        completion = self.do(connection, kind, content, **args)
        assert completion.error is not None, f"{kind} {args} succeeded: {completion.value!r}"
        assert completion.value is None
        return completion.error.code

    def read(self, connection: Connection, path: str) -> bytes:
        """A file's bytes."""
        completion = self.do(connection, "read_file", path=path)
        assert completion.error is None, repr(completion.error)
        assert completion.content is not None
        return completion.content


def wait_for(fact: Callable[[], object], what: str) -> None:
    """Return once ``fact()`` is true.

    Raises:
        AssertionError: It was not for forty seconds; the message says ``what`` was waited for.
    """
    deadline = time.monotonic() + _WAIT_S
    while not fact():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {_WAIT_S} s: {what}")
        time.sleep(0.002)
