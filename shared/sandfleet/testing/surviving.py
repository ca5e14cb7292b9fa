"""A mock backend whose sandboxes outlive it, as containers do: they live in a `MockEngine`, for as long as that does.

::

    engine = MockEngine()
    first = SurvivingMockBackend(settings, engine=engine)
    connection = first.create(plan)
    ticket = first.ticket(plan.sandbox_id)
    first.detach()
    again = SurvivingMockBackend(settings, engine=engine).attach(plan.sandbox_id, ticket)
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sandfleet.backends import Capability, Completion, Connection, Done, Operation, Remembered, SandboxPlan
from sandfleet.errors import NotStarted, OutcomeUnknown, StartFailed
from sandfleet.testing.backend import MockBackend, MockConnection

__all__ = ["MockEngine", "MockSandbox", "SurvivingMockBackend"]


@dataclass(slots=True)
class _Op:
    """An effect as the sandbox remembers it."""

    note: str
    completion: Completion | None = None
    waiting: list[Done] = field(default_factory=list)


def _batch_of(op_id: str) -> str:
    """The batch that an op id of the form ``batch.3`` is a part of."""
    head, _, tail = op_id.rpartition(".")
    return head if tail.isdigit() else ""


class MockSandbox(MockConnection):
    """A mock sandbox that remembers its commands and changes, whoever is connected to it.

    Attributes:
        name: What `MockEngine` and `SurvivingMockBackend.remove_leftover` call it.
        began: The op ids whose effects began, in their order.
    """

    name = ""
    node = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began: list[str] = []
        self._ops: dict[str, _Op] = {}
        self._refused: set[str] = set()
        self._told = threading.Lock()

    def begin(self, op: Operation, done: Done) -> None:
        """Begin an operation once; a second time it only waits for its end."""
        with self._told:
            refused, known = op.op_id in self._refused, self._ops.get(op.op_id)
            if not refused and known is None:
                self._ops[op.op_id] = _Op(op.note, None, [done])
                self.began.append(op.op_id)
        if refused:
            done(Completion(error=NotStarted("it was given up", reason="op_refused", op_id=op.op_id)))
        elif known is not None:
            self.recall(op, done)
        else:
            super().start(op, lambda completion: self._ended(op.op_id, completion))

    def _ended(self, op_id: str, completion: Completion) -> None:
        with self._told:
            op = self._ops[op_id]
            op.completion, waiting, op.waiting = completion, op.waiting, []
        for done in waiting:
            done(completion)

    def recall(self, op: Operation, done: Done) -> None:
        with self._told:
            known = self._ops.get(op.op_id)
            if known is None and any(_batch_of(began) == op.op_id for began in self._ops):
                answer: Completion | None = Completion(error=OutcomeUnknown("a part of it began", op_id=op.op_id))
            elif known is None:
                self._refused.add(op.op_id)
                answer = Completion(error=NotStarted("it has not begun", op_id=op.op_id))
            else:
                answer = known.completion
                if answer is None:
                    known.waiting.append(done)
        if answer is not None:
            done(answer)

    def remembered(self) -> list[Remembered]:
        with self._told:
            return [Remembered(op_id, op.completion is None, op.note) for op_id, op in self._ops.items()]


class _Way(Connection):
    """One node's connection to a sandbox; when it is closed, what it waits for is unknown to it."""

    def __init__(self, sandbox: MockSandbox) -> None:
        self._sandbox = sandbox
        self._waiting: dict[int, tuple[str, Done]] = {}
        self._lock = threading.Lock()
        self._turn = 0

    def _mine(self, op_id: str, done: Done) -> Done:
        with self._lock:
            self._turn += 1
            turn = self._turn
            self._waiting[turn] = (op_id, done)

        def once(completion: Completion) -> None:
            with self._lock:
                waits = self._waiting.pop(turn, None)
            if waits is not None:
                done(completion)

        return once

    def start(self, op: Operation, done: Done) -> None:
        self._sandbox.begin(op, self._mine(op.op_id, done))

    def recall(self, op: Operation, done: Done) -> None:
        self._sandbox.recall(op, self._mine(op.op_id, done))

    def remembered(self) -> list[Remembered]:
        return self._sandbox.remembered()

    def cancel(self, op_id: str) -> bool:
        return self._sandbox.cancel(op_id)

    def close(self) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for op_id, done in waiting:
            done(Completion(error=OutcomeUnknown("the connection was closed", op_id=op_id)))


class MockEngine:
    """Where mock sandboxes live, by name. Thread-safe enough for tests."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, MockSandbox] = {}

    def end(self, name: str) -> None:
        """End one as if by itself; nobody is told."""
        sandbox = self.sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.die()


class SurvivingMockBackend(MockBackend):
    """A `MockBackend` with `Capability.SURVIVES_NODE` and blank sandboxes.

    Args:
        settings, on_death: As for every backend.
        engine: Where its sandboxes live; several backends on one are several runs, or several nodes.
    """

    capabilities: ClassVar[frozenset[Capability]] = MockBackend.capabilities | {
        Capability.SURVIVES_NODE,
        Capability.BLANKS,
    }

    def __init__(
        self,
        settings: Any = None,
        on_death: Callable[[str, str], None] = lambda _id, _reason: None,
        *,
        engine: MockEngine | None = None,
    ) -> None:
        super().__init__(settings, on_death)
        self.engine = engine or MockEngine()
        self._node = str(getattr(settings, "node_id", None) or "")
        self._detached = False
        self._ways: dict[str, tuple[MockSandbox, _Way]] = {}

    def sandbox(self, sandbox_id: str) -> MockSandbox:
        """What runs under that id.

        Raises:
            KeyError: Nothing does.
        """
        return self._ways[sandbox_id][0]

    def _hold(self, sandbox_id: str, sandbox: MockSandbox) -> _Way:
        way = _Way(sandbox)
        self._ways[sandbox_id] = (sandbox, way)
        with self._lock:
            self._connections[sandbox_id] = sandbox
        return way

    def create(self, plan: SandboxPlan) -> Any:
        if self._detached:
            raise StartFailed("the node is being stopped", reason="closing")
        self.destroy(plan.sandbox_id)
        if self.fail_create is not None:
            raise self.fail_create
        sandbox = MockSandbox(plan.sandbox_id, self._files_of(plan.user_data), self._outputs, self.calls)
        sandbox.name, sandbox.node = f"mock-{secrets.token_hex(4)}", self._node
        self.engine.sandboxes[sandbox.name] = sandbox
        return self._hold(plan.sandbox_id, sandbox)

    def claim(self, blank_id: str, sandbox_id: str) -> Connection:
        found = self._ways.pop(blank_id, None)
        if found is None:
            raise StartFailed(f"there is no blank sandbox {blank_id}", reason="blank_gone")
        with self._lock:
            self._connections.pop(blank_id, None)
        found[0].sandbox_id = sandbox_id
        return self._hold(sandbox_id, found[0])

    def ticket(self, sandbox_id: str) -> dict[str, Any]:
        return {"name": self._ways[sandbox_id][0].name}

    def attach(self, sandbox_id: str, ticket: Mapping[str, Any]) -> Connection:
        sandbox = self.engine.sandboxes.get(str(ticket.get("name")))
        if sandbox is None or sandbox.node != self._node:
            raise StartFailed("it does not run any more", reason="gone")
        return self._hold(sandbox_id, sandbox)

    def leftovers(self) -> dict[str, list[str]]:
        held = {sandbox.name for sandbox, _ in self._ways.values()}
        found: dict[str, list[str]] = {}
        for name, sandbox in self.engine.sandboxes.items():
            if name not in held:
                found.setdefault(sandbox.node, []).append(name)
        return found

    def remove_leftover(self, name: str) -> None:
        if name not in {sandbox.name for sandbox, _ in self._ways.values()}:
            self.engine.end(name)

    def kill(self, sandbox_id: str, reason: str = "killed") -> None:
        self.engine.end(self._ways.pop(sandbox_id)[0].name)
        super().kill(sandbox_id, reason)

    def destroy(self, sandbox_id: str) -> None:
        found = self._ways.pop(sandbox_id, None)
        super().destroy(sandbox_id)
        if found is not None:
            self.engine.end(found[0].name)

    def detach(self) -> None:
        self._detached = True
        ways, self._ways = list(self._ways.values()), {}
        with self._lock:
            self._connections.clear()
        for _, way in ways:
            way.close()

    def close(self) -> None:
        for sandbox_id in list(self._ways):
            self.destroy(sandbox_id)
