"""A node over a store in memory, without threads of its own: time and queued work move when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

from sandfleet.backends import Completion
from sandfleet.config import Settings
from sandfleet.errors import LeaseLost
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec
from sandfleet.store.base import NodeRecord, OpRecord, Route, Waiter
from sandfleet.store.memory import MemoryStore
from sandfleet.testing import ManualClock
from sandfleet.testing.backend import MockBackend
from sandfleet.wire import OpMessage
from sandfleet_workers.lease import Lease
from sandfleet_workers.node import Node
from sandfleet_workers.pool import LanePool

__all__ = ["ALICE", "DATA_ID", "LONG_S", "World"]

ALICE = Identity("alice")
LONG_S = 36_000.0
DATA_ID = "0123456789abcdef" * 2


class World:
    """A node over a store, without threads of its own."""

    def __init__(self, root: Path, clock: ManualClock, **given: Any) -> None:
        self.clock = clock
        self.store = MemoryStore(now_ms=lambda: int(clock.now() * 1000))
        given = {"backend": "mock", "idle_timeout_s": 60, "replicas": 4, **given}
        settings = Settings.load({}, data_root=root / "data", run_root=root / "run", **given)
        self.pool = LanePool(limit=1)
        self.node = Node(settings, self.store, self.pool, "n1")
        self.node.finish = lambda job, completion: job.ended.append(completion)  # type: ignore[method-assign, attr-defined]
        self.life = self.node.lifecycle
        self.life.data_id = DATA_ID
        self.lost: list[LeaseLost] = []
        self.lease = self.node.lease = Lease(
            self.store,
            NodeRecord("n1", self.node.incarnation, settings.replicas, DATA_ID, ("mock",)),
            lease_s=LONG_S,
            on_tick=self.life.tick,
            on_lost=self.lost.append,
            on_forgotten=self.life.upkeep.forgotten,
        )
        self.lease.announce()
        self.life.load()
        self.life.open()
        self.pool.attach(self.node, max_lane=9, max_jobs=9, max_bytes=999, lifecycle_threads=0)
        self.completions: list[Completion] = []

    @property
    def backend(self) -> MockBackend:
        backend = self.life._backends["mock"]
        assert isinstance(backend, MockBackend)
        return backend

    # --- short ways ---------------------------------------------------------------------------

    def reserved(self, identity: Identity = ALICE) -> Route:
        reserved = self.store.reserve(
            identity,
            SandboxSpec(backend="mock"),
            node_id="n1",
            incarnation=self.node.incarnation,
            data_id=DATA_ID,
            expires_s=LONG_S,
        )
        assert reserved.status == "reserved", reserved
        assert reserved.route is not None
        return reserved.route

    def record(self, route: Route, op_id: str, kind: str = "execute_command", expect: str = "live") -> None:
        until = self.store.now_ms() + int(LONG_S * 1000)
        op = OpRecord(op_id, kind, route, ALICE.digest, until, until, "client", "", expect)
        assert self.store.record(op, None).status == "recorded"

    def run(self, kind: str, route: Route, identity: Identity = ALICE, **args: Any) -> Completion:
        """Carry out a lifecycle operation as the pool does; its completion."""
        args = {"spec": SandboxSpec(backend="mock").to_wire(), **args}
        message = OpMessage("op", kind, identity, route, (), args, None, 0, 0, "client", 0)
        job = SimpleNamespace(op_id="op", ended=[])
        self.life.run(job, message)  # type: ignore[arg-type]
        completion: Completion = job.ended[0]
        return completion

    def live(self, identity: Identity = ALICE, agent: str = "agent") -> Route:
        route = self.reserved(identity)
        completion = self.run("node.create", route, identity)
        assert completion.error is None, completion.error
        if agent:
            self.store.acquire(identity, Waiter("a", "client", agent, LONG_S), wait_s=1, push=None)
        return route

    def stopping(self) -> Route:
        route = self.live()
        self.store.begin_stop(route.sandbox_id, owner=None, force=True, reason="test")
        return route

    def tick(self, after_s: float = 0.0) -> None:
        """One round of the lease's thread, ``after_s`` later."""
        self.clock.advance(after_s)
        self.lease._renew()
        self.life.tick(self.store.now_ms())

    def work(self) -> int:
        """Run the lifecycle work that is queued; how much there was."""
        for ran in range(100):
            try:
                item: Callable[[], None] | None = self.pool._slow.get_nowait()
            except Empty:
                return ran
            assert item is not None
            item()
        raise AssertionError("endless work")

    def state(self, route: Route) -> str | None:
        info = self.store.sandbox(route.sandbox_id)
        return str(info.state) if info is not None and info.epoch == route.epoch else None

    def outcome(self, op_id: str) -> tuple[str, str]:
        view = self.store.op(op_id)
        assert view is not None
        return view.state, view.outcome
