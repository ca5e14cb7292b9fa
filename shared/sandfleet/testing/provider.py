"""A provider without a fleet: real handles, real validation, real errors, and a `MockBackend` in this process."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandfleet.backends import Completion, Connection, Operation, SandboxPlan
from sandfleet.client import Answer, Call, Target
from sandfleet.config import Settings
from sandfleet.errors import SandboxLost, SandboxNotFound
from sandfleet.ids import Identity, check_op_id, new_op_id
from sandfleet.model import SandboxInfo, SandboxState, Timings
from sandfleet.ops import parse_args
from sandfleet.provider import SandboxProvider, list_type
from sandfleet.steps import Do, Steps
from sandfleet.store.base import Route
from sandfleet.testing.backend import MockBackend
from sandfleet.testing.jobs import MockJobs

__all__ = ["MockSandboxProvider"]


class MockSandboxProvider(SandboxProvider):
    """For unit tests of code that is given a provider: no Redis, no processes, microseconds per call.

    ::

        provider = MockSandboxProvider()
        provider.backend.set_output("go test", "PASS")
        sandbox = provider.get(provider.acquire("thread-1"))
        assert sandbox.run("go test").stdout == "PASS"

    Files are kept per thread in memory. What a fleet adds (lanes, leases, several processes) is not there: test that
    with a real one (`sandfleet.stack.Stack`).

    Args:
        factory: Makes the backend; inject one of your own to prepare outputs and failures.
    """

    def __init__(self, *, factory: Callable[[], MockBackend] = MockBackend) -> None:
        super().__init__(Settings(backend="mock"))
        self.backend = factory()
        self._local = _InProcess(self.backend, self.settings)

    def _client(self) -> Any:
        return self._local

    def _acquire(
        self,
        thread_id: str | None,
        user_id: str | None,
        timeout_s: float | None,
        on_lost: str | None = None,
        restore: Mapping[str, Any] | None = None,
    ) -> Steps[str]:
        identity = Identity.anonymous(user_id) if thread_id is None else Identity(thread_id, user_id)
        route: Route = yield Do(lambda: self._local.acquire(identity))
        self._remember(identity, route)
        return route.sandbox_id

    def _release(self, sandbox_id: str, *, all_of_them: bool) -> Steps[None]:
        yield Do(lambda: self._local.release(sandbox_id, all_of_them=all_of_them))
        if sandbox_id not in self._local.holds:
            with self._lock:
                self._released[sandbox_id] = None
                self._targets.pop(sandbox_id, None)

    def _destroy(self, sandbox_id: str, delete_data: bool) -> Steps[None]:
        yield Do(lambda: self._local.destroy(sandbox_id))

    def _list(self) -> Steps[list_type[SandboxInfo]]:
        found: list_type[SandboxInfo] = yield Do(self._local.list)
        return found

    def _cancel(self, target: Target, op_id: str) -> Steps[bool]:
        found: bool = yield Do(lambda: self.backend.connection(target.sandbox_id).cancel(op_id))
        return found

    def _shutdown(self) -> Steps[None]:
        yield Do(self._local.close)


class _InProcess:
    """Stands in for `sandfleet.client.Client`: operations go straight to the backend's connections."""

    id = "in-process"

    def __init__(self, backend: MockBackend, settings: Settings) -> None:
        self._backend = backend
        self._sandboxes: dict[str, SandboxInfo] = {}
        self._epochs = itertools.count(1)
        self._root = Path(tempfile.mkdtemp(prefix="sandfleet-mock-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self.settings = settings
        self.store = MockJobs()
        #: How often each sandbox was acquired and not yet released.
        self.holds: Counter[str] = Counter()

    def acquire(self, identity: Identity) -> Route:
        sandbox_id = identity.digest[:8]
        if sandbox_id not in self._backend.running():
            plan = SandboxPlan(
                sandbox_id=sandbox_id,
                identity=identity,
                epoch=next(self._epochs),
                user_data=self._root / identity.digest,
                run_dir=self._root,
            )
            # Files live in memory, but the backend knows a thread's by its directory, as it does on a node.
            plan.user_data.mkdir(exist_ok=True)
            self._backend.create(plan)
            now = time.time()
            self._sandboxes[sandbox_id] = SandboxInfo(
                sandbox_id=sandbox_id,
                thread_id=identity.thread_id,
                user_id=identity.user_id,
                state=SandboxState.LIVE,
                node_id="in-process",
                incarnation="in-process",
                epoch=plan.epoch,
                backend="mock",
                created_at=now,
                used_at=now,
            )
        self.holds[sandbox_id] += 1
        return Route(sandbox_id, "in-process", "in-process", self._sandboxes[sandbox_id].epoch)

    def release(self, sandbox_id: str, *, all_of_them: bool) -> None:
        self.holds[sandbox_id] -= 1
        if all_of_them or self.holds[sandbox_id] <= 0:
            del self.holds[sandbox_id]

    def identity_of(self, target: Target) -> Identity:
        if target.identity is None:
            info = self._sandboxes.get(target.sandbox_id)
            if info is None:
                raise SandboxNotFound(f"no sandbox {target.sandbox_id}", sandbox_id=target.sandbox_id)
            target.identity = Identity(info.thread_id, info.user_id)
        return target.identity

    def destroy(self, sandbox_id: str) -> None:
        del self.holds[sandbox_id]
        if self._sandboxes.pop(sandbox_id, None) is None:
            raise SandboxNotFound(f"no sandbox {sandbox_id}", sandbox_id=sandbox_id)
        self._backend.destroy(sandbox_id)

    def close(self) -> None:
        self._backend.close()
        self._remove()

    def list(self) -> list_type[SandboxInfo]:
        return [self._sandboxes[sandbox_id] for sandbox_id in sorted(self._sandboxes)]

    def _perform(self, connection: Connection, sandbox_id: str, operation: Operation) -> Completion:
        if self.store.answers(operation.kind):
            return Completion(self.store.answer(connection, sandbox_id, operation))
        if operation.kind == "execute_command":
            return self.store.run(connection, sandbox_id, operation)
        return connection.perform(operation, timeout_s=3600.0)

    def call(self, target: Target, call: Call) -> Steps[Answer]:
        op_id = check_op_id(call.op_id) if call.op_id is not None else new_op_id()
        args = parse_args(call.kind, call.args).model_dump(exclude_unset=True)
        info = self._sandboxes.get(target.sandbox_id)
        if info is None or target.identity not in (None, Identity(info.thread_id, info.user_id)):
            raise SandboxNotFound(f"no sandbox {target.sandbox_id} of yours", sandbox_id=target.sandbox_id)
        if target.sandbox_id not in self._backend.running():
            raise SandboxLost(f"sandbox {target.sandbox_id} died; acquire again", sandbox_id=target.sandbox_id)
        began = time.monotonic()
        operation = Operation(op_id, call.kind, args, call.content)
        connection = self._backend.connection(target.sandbox_id)
        completion: Completion = yield Do(lambda: self._perform(connection, target.sandbox_id, operation))
        if completion.error is not None:
            raise completion.error
        took_ms = (time.monotonic() - began) * 1000
        return Answer(op_id, completion.value, completion.content, Timings(run_ms=took_ms, total_ms=took_ms))
