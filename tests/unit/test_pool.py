"""`LanePool` with a node and Celery requests that do what the test says; its work is run on our thread."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore
from celery.worker import state

from sandfleet.errors import Busy, Cancelled, InvalidArgument, NotStarted, SandfleetError
from sandfleet_workers.jobs import Job, Plan
from sandfleet_workers.pool import JobHandle, LanePool, outcome_of
from tests.services import wait_until


class Request:
    """What the pool uses of a Celery request."""

    def __init__(self, op_id: str, *, ignore_result: bool = True, callbacks: Any = None) -> None:
        self.id = op_id
        self.name = "sandbox.noop"
        self.task = SimpleNamespace(is_operation=True)
        self.args, self.kwargs = ({},), {}
        self._payload = (self.args, self.kwargs, {"callbacks": callbacks})
        self.ignore_result = ignore_result
        self._already_revoked = False
        self.accepted: list[float] = []
        self.acknowledged = False
        self.done: list[tuple[int, Any, float]] = []
        state.requests[op_id] = self

    def acknowledge(self) -> None:
        self.acknowledged = True

    def on_accepted(self, _pid: int, at: float) -> None:
        self.accepted.append(at)

    def on_success(self, outcome: tuple[int, Any, float]) -> None:
        self.done.append(outcome)
        state.requests.pop(self.id, None)


def tracer(_name: str, task_id: str, _request: Any, _body: Any, _type: Any, _encoding: Any) -> tuple[int, Any, float]:
    """What Celery's tracer does with a task body."""
    try:
        return 0, outcome_of(task_id), 0.0
    except Ignore:
        return 0, "ignored", 0.0
    except Exception as exc:  # noqa: BLE001  (as the tracer)
        return 1, exc, 0.0


class Node:
    """An engine that begins and then waits to be told."""

    def __init__(self, pool: LanePool) -> None:
        self.pool = pool
        self.plans: dict[str, Plan | SandfleetError] = {}
        self.begun: list[str] = []
        self.refused: list[tuple[str, SandfleetError]] = []
        self.cancelled: list[str] = []
        self.jobs: dict[str, Job] = {}

    def plan(self, job: Job) -> Plan:
        plan = self.plans.get(job.op_id) or Plan(exclusive=("lane",))
        if isinstance(plan, SandfleetError):
            raise plan
        return plan

    def begin(self, job: Job) -> None:
        self.jobs[job.op_id] = job
        if job.cancelled:
            job.failure = Cancelled("before it began")
            self.pool.complete(job)
            return
        self.begun.append(job.op_id)
        self.pool.accepted(job)

    def refuse(self, job: Job, error: SandfleetError) -> None:
        self.refused.append((job.op_id, error))
        job.failure = error
        self.pool.complete(job)

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job.op_id)

    def finish(self, op_id: str, result: Any = "done") -> None:
        self.jobs[op_id].result = result
        self.pool.complete(self.jobs[op_id])


class World:
    """A pool without threads of its own: `work` runs what its threads would."""

    def __init__(self, **limits: int) -> None:
        self.pool = LanePool(limit=1)
        self.node = Node(self.pool)
        self.pool.attach(
            self.node, **{"max_lane": 100, "max_jobs": 100, "max_bytes": 1000, **limits, "lifecycle_threads": 0}
        )
        self.handles: list[JobHandle | None] = []

    def deliver(self, op_id: str, plan: Plan | SandfleetError | None = None, **request: Any) -> Request:
        if plan is not None:
            self.node.plans[op_id] = plan
        made = Request(op_id, **request)
        args = (made.name, op_id, {}, b"", "application/json", "utf-8")
        self.handles.append(self.pool.on_apply(tracer, args, accept_callback=made.on_accepted))
        return made

    def work(self, queue: Any = None) -> int:
        """Run what is queued, and what that queues; how much there was."""
        queue, ran = queue or self.pool._work, 0
        while True:
            try:
                item: Callable[[], None] = queue.get_nowait()
            except Empty:
                return ran
            item()
            ran += 1

    def started(self, *op_ids: str, **request: Any) -> list[Request]:
        requests = [self.deliver(op_id, **request) for op_id in op_ids]
        self.work()
        return requests


@pytest.fixture
def world() -> Iterator[World]:
    yield World()
    state.requests.clear()
    state.revoked.clear()


# --- lanes and phases ------------------------------------------------------------------------------------


def test_operations_of_one_lane_begin_one_after_the_other(world: World) -> None:
    world.started("a", "b", "c")
    assert world.node.begun == ["a"]
    world.node.finish("a")
    world.work()
    assert world.node.begun == ["a", "b"]
    assert world.pool.counts() == (2, 1)


def test_operations_of_different_lanes_run_beside_each_other_and_hold_no_thread(world: World) -> None:
    for n in range(50):
        world.deliver(f"op-{n}", Plan(exclusive=(f"lane-{n}",)))
    assert world.work() == 50
    assert len(world.node.begun) == 50


def test_the_tracer_runs_at_the_end_with_the_outcome_and_the_true_runtime(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sandfleet_workers.pool.time", SimpleNamespace(monotonic=lambda: now[0]))
    [request] = world.started("a")
    assert request.accepted == [100.0]
    assert request.done == []
    now[0] += 7.5
    world.node.finish("a", {"exit_code": 0})
    assert request.done == [(0, {"exit_code": 0}, 7.5)]


def test_a_failure_reaches_the_tracer_as_an_exception(world: World) -> None:
    [request] = world.started("a")
    world.node.jobs["a"].failure = InvalidArgument("no")
    world.pool.complete(world.node.jobs["a"])
    [(failed, value, _runtime)] = request.done
    assert failed
    assert isinstance(value, InvalidArgument)


def test_a_result_that_is_stored_is_traced_on_a_pool_thread_and_an_ignored_one_at_once(world: World) -> None:
    # Storing blocks on Redis, and `complete` is called by the one thread that waits for every command.
    world.node.plans = {name: Plan(exclusive=(name,)) for name in "abc"}
    [ignored] = world.started("a")
    [stored] = world.started("b", ignore_result=False)
    [linked] = world.started("c", callbacks=[{"task": "next"}])
    for op_id in "abc":
        world.node.finish(op_id)
    assert [bool(request.done) for request in (ignored, stored, linked)] == [True, False, False]
    world.work()
    assert [bool(request.done) for request in (ignored, stored, linked)] == [True, True, True]


def test_completing_twice_counts_once(world: World) -> None:
    [request] = world.started("a")
    world.node.finish("a")
    world.node.finish("a")
    assert len(request.done) == 1


def test_a_job_that_somebody_else_answered_is_ignored_by_celery(world: World) -> None:
    [request] = world.started("a")
    world.pool.drop(world.node.jobs["a"])
    assert request.done == [(0, "ignored", 0.0)] or request.done[0][1] == "ignored"


def test_a_job_that_celery_revoked_stores_no_success(world: World) -> None:
    [request] = world.started("a")
    request._already_revoked = True
    world.node.finish("a", "success")
    assert request.done[0][1] == "ignored"


def test_a_tracer_that_fails_frees_the_lane_all_the_same(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_args: Any) -> Any:
        raise RuntimeError("a bug in the tracer")

    request = Request("a")
    with caplog.at_level(logging.CRITICAL, "sandfleet.node"):
        world.pool.on_apply(broken, ("n", "a", {}, b"", "", ""), accept_callback=request.on_accepted)
        world.deliver("b")
        world.work()
        world.node.finish("a")
        world.work()
    assert world.node.begun == ["a", "b"]
    assert "a" not in state.requests


def test_a_result_that_could_not_be_stored_is_kept_and_stored_when_the_pool_is_told_to(world: World) -> None:
    """A plain Celery caller waits for it, and the effect must not run again to make it anew."""
    away = True

    def storing_tracer(*args: Any) -> tuple[int, Any, float]:
        return (1, ConnectionError("the result backend is away"), 0.0) if away else tracer(*args)

    request = Request("a", ignore_result=False)
    args = (request.name, "a", {}, b"", "application/json", "utf-8")
    world.handles.append(world.pool.on_apply(storing_tracer, args, accept_callback=request.on_accepted))
    world.work()
    world.node.finish("a", "the result")
    world.work()
    assert request.done == []
    world.pool.tell_again()
    world.work()
    assert request.done == [], "it is still away"
    away = False
    world.pool.tell_again()
    world.work()
    ((failed, value, _),) = request.done
    assert (failed, value) == (0, "the result")
    world.pool.tell_again()
    assert world.work() == 0
    assert world.node.begun == ["a"]


def test_the_runtime_told_ends_with_the_answer_however_late_the_tracer_runs(world: World) -> None:
    (request,) = world.started("a", ignore_result=False)
    job = world.node.jobs["a"]
    job.shown = "exit 0"
    world.node.finish("a", {"stdout": "all of the output", "exit_code": 0})
    assert request.done == [], "the tracer stores the result, on a thread of the pool"
    assert job.started_at is not None
    assert job.finished_at is not None
    job.started_at -= 5.0
    job.finished_at -= 1.0  # the tracer's turn comes a second after the answer
    world.work()
    ((failed, shown, runtime_s),) = request.done
    assert (failed, shown) == (0, "exit 0"), "events carry a few words, not the output"
    assert 4.0 <= runtime_s < 4.5


def test_lifecycle_work_has_threads_of_its_own(world: World) -> None:
    world.deliver("create", Plan(exclusive=("life",), lifecycle=True))
    assert world.work() == 0
    assert world.work(world.pool._slow) == 1
    assert world.node.begun == ["create"]


# --- second deliveries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running", "finished"])
def test_a_second_delivery_starts_nothing(world: World, when: str, caplog: pytest.LogCaptureFixture) -> None:
    if when == "waiting":
        world.started("before")
    [first] = world.started("a")
    if when == "finished":
        world.node.finish("a")
    begun = list(world.node.begun)
    with caplog.at_level(logging.CRITICAL, "sandfleet.node"):
        [second] = world.started("a")
    assert world.handles[-1] is None
    assert world.node.begun == begun
    assert second.done == []
    assert second.acknowledged, "kombu would restore it with every broken connection"
    assert state.requests.get("a") is (None if when == "finished" else first), "the first delivery can be revoked"


# --- refusals --------------------------------------------------------------------------------------------


def test_a_job_whose_plan_is_refused_is_answered_and_holds_no_lane(world: World) -> None:
    [request] = [world.deliver("a", InvalidArgument("malformed"))]
    world.deliver("b")
    world.work()
    assert [(op_id, type(error)) for op_id, error in world.node.refused] == [("a", InvalidArgument)]
    assert request.done[0][0] == 1
    assert world.node.begun == ["b"]


def test_a_plan_that_raises_anything_is_answered_and_does_not_reach_celery_s_main_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_job: Job) -> Plan:
        raise TypeError("a hostile message")

    monkeypatch.setattr(world.node, "plan", broken)
    world.deliver("a")
    world.work()
    assert [op_id for op_id, _ in world.node.refused] == ["a"]
    assert not world.pool.holds("a")


def test_a_pool_that_is_full_is_busy_and_takes_again_when_there_is_room(world: World) -> None:
    world = World(max_jobs=2)
    world.started("a", "b", "c")
    assert [(op_id, type(error)) for op_id, error in world.node.refused] == [("c", Busy)]
    assert world.node.refused[0][1].retry_after_s
    world.node.finish("a")
    world.started("d")
    assert len(world.node.refused) == 1


def test_a_pool_is_bounded_in_bytes(world: World) -> None:
    world = World(max_bytes=100)
    world.deliver("a", Plan(exclusive=("a",), size=80))
    world.deliver("b", Plan(exclusive=("b",), size=30))
    world.deliver("c", Plan(exclusive=("c",), size=20))
    world.work()
    assert [op_id for op_id, _ in world.node.refused] == ["b"]
    world.node.finish("a")
    world.node.finish("c")
    assert world.pool._bytes == 0


def test_a_full_lane_is_busy_and_gives_its_bytes_back(world: World) -> None:
    world = World(max_lane=1)
    for op_id in ("runs", "waits", "refused"):
        world.deliver(op_id, Plan(exclusive=("lane",), size=10))
    world.work()
    assert [op_id for op_id, _ in world.node.refused] == ["refused"]
    assert world.pool._bytes == 20


def test_before_it_has_a_node_the_pool_takes_nothing() -> None:
    pool, request = LanePool(limit=1), Request("a")
    pool.on_apply(tracer, ("n", "a", {}, b"", "", ""), accept_callback=request.on_accepted)
    assert isinstance(request.done[0][1], NotStarted)


# --- cancel, expire, drain -------------------------------------------------------------------------------


def test_a_waiting_job_that_is_cancelled_is_answered_at_once_and_its_successor_keeps_its_turn(world: World) -> None:
    _, waiting, _ = world.started("a", "b", "c")
    assert world.pool.cancel("b") is True
    world.work()
    assert isinstance(waiting.done[0][1], Cancelled)
    assert world.node.begun == ["a"]
    world.node.finish("a")
    world.work()
    assert world.node.begun == ["a", "c"]


def test_a_running_job_that_is_cancelled_is_ended_by_the_node(world: World) -> None:
    world.started("a")
    assert world.pool.cancel("a") is True
    world.work()
    assert world.node.cancelled == ["a"]
    assert world.node.jobs["a"].cancelled


def test_cancelling_what_is_not_here_says_so(world: World) -> None:
    world.started("a")
    world.node.finish("a")
    assert world.pool.cancel("a") is False
    assert world.pool.cancel("nobody") is False


def test_revoke_with_terminate_ends_the_job_through_its_handle(world: World) -> None:
    world.started("a")
    handle = world.handles[0]
    assert handle is not None
    handle.terminate("SIGTERM")
    world.work()
    assert world.node.cancelled == ["a"]


def test_a_job_that_was_revoked_while_it_waited_does_not_begin(world: World) -> None:
    _, waiting = world.started("a", "b")
    state.revoked.add("b")
    world.node.finish("a")
    world.work()
    assert world.node.begun == ["a"]
    assert isinstance(waiting.done[0][1], Cancelled)


def test_celery_can_keep_a_handle_weakly_for_as_long_as_the_job_lives(world: World) -> None:
    world.started("a")
    handle = weakref.ref(world.handles.pop())  # type: ignore[arg-type]
    gc.collect()
    assert handle() is not None
    job = weakref.ref(world.node.jobs["a"])
    world.node.finish("a")
    world.node.jobs.clear()
    gc.collect()
    assert handle() is None
    assert job() is None, "the pool remembers finished jobs by id alone"


def test_jobs_that_waited_too_long_are_begun_at_once_to_be_answered(world: World) -> None:
    world.started("a", "b", "c")
    world.pool.expire(lambda job: job.op_id == "b")
    world.work()
    assert world.node.jobs["b"].expired
    assert "c" not in world.node.jobs


def test_on_a_drain_what_has_not_begun_is_given_back_in_the_order_it_came(world: World) -> None:
    world.node.plans = {"y1": Plan(exclusive=("y",)), "y2": Plan(exclusive=("y",))}
    world.started("x1", "y1", "x2", "y2", "x3")
    waiting = world.pool.refuse_new()
    assert [job.op_id for job in waiting] == ["x2", "y2", "x3"]
    world.node.finish("x1")
    world.node.finish("y1")
    world.work()
    assert world.node.begun == ["x1", "y1"], "a lane that came free started what was given back"
    [late] = world.started("z")
    assert isinstance(late.done[0][1], NotStarted)


def test_the_pool_tells_what_it_holds(world: World) -> None:
    world.started("a", "b")
    info = world.pool._get_info()
    assert (info["operations"], info["waiting"]) == (2, 1)
    assert world.pool.holds("b")
    assert not world.pool.holds("c")


def test_its_threads_run_work_survive_a_bug_in_it_and_end(caplog: pytest.LogCaptureFixture) -> None:
    pool = LanePool(limit=2)
    pool.on_start()
    ran = threading.Event()

    def broken() -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.CRITICAL, "sandfleet.node"):
        for _ in range(4):
            pool.run(broken)
        pool.run(ran.set)
        assert ran.wait(5.0)
    pool.on_stop()
    wait_until(lambda: not any(thread.is_alive() for thread in pool._threads), 5.0)


def test_a_task_that_is_no_operation_runs_as_in_any_pool(world: World) -> None:
    ran: list[Any] = []
    plain = Request("celery-task")
    plain.task = SimpleNamespace()
    world.pool.on_apply(lambda *args: ran.append(args), (1, 2), {}, lambda _result: None, plain.on_accepted)
    world.work()
    assert ran == [(1, 2)]


# --- what runs without a job -----------------------------------------------------------------


def test_a_lane_that_is_occupied_moves_on_when_it_is_vacated(world: World) -> None:
    world.pool.occupy("earlier", ("s/shell/x",), ("s",))
    world.pool.occupy("earlier", ("s/shell/x",), ("s",))
    world.deliver("a", Plan(exclusive=("s/shell/x",)))
    world.deliver("b", Plan(exclusive=("s/shell/y",)))
    world.work()
    assert world.node.begun == ["b"]
    world.pool.vacate("nobody")
    world.pool.vacate("earlier")
    world.work()
    assert world.node.begun == ["b", "a"]
