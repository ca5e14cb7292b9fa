"""Plain Celery callers: ``send_task`` with a thread id and nothing of ours in between, on a real fleet."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states
from celery.contrib.testing.worker import start_worker
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult, GroupResult

from sandfleet.celery_app import celery_app
from sandfleet.errors import (
    InvalidArgument,
    NoCapacity,
    OperationFailed,
    PathNotFound,
    SandboxNotFound,
    SandfleetError,
    UnknownOperation,
)
from sandfleet.ids import Identity, sandbox_id_candidates
from sandfleet.ops import OPS
from sandfleet.provider import SandboxProvider
from sandfleet.stack import Stack
from sandfleet.wire import OPS_QUEUE
from tests.services import require, wait_until

# Celery 5.7 stores results with a command that redis-py 8 calls deprecated; here it does so in our own process.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

SOON_S = 20.0
REDUCE = "test.reduce"


@pytest.fixture(scope="module")
def app(fleet: Stack) -> Iterator[Celery]:
    """What a caller writes: one line, and only if the broker's address is not known otherwise."""
    made = celery_app(fleet.settings)
    yield made
    # Results that the traceback of a failed test keeps are collected when the fleet is gone, and ask Redis then.
    made.backend.remove_pending_result = lambda result: result
    made.close()


@pytest.fixture(scope="module")
def reducer(fleet: Stack) -> Iterator[str]:
    """A stock Celery worker of the caller's own, whose task a chord may end in; the name of task and queue."""
    worker_app = celery_app(fleet.settings, name="callers-own")

    @worker_app.task(name=REDUCE, shared=False)
    def reduce(results: list[dict[str, Any]]) -> list[str]:
        return sorted(result["stdout"].strip() for result in results)

    with start_worker(worker_app, pool="solo", loglevel="CRITICAL", perform_ping_check=False, queues=[REDUCE]):
        yield REDUCE
    worker_app.close()


def command(app: Celery, line: str, **whose: Any) -> AsyncResult[Any]:
    result: AsyncResult[Any] = app.send_task("sandbox.execute_command", kwargs={"command": line, **whose})
    return result


def shell(app: Celery, line: str, **whose: Any) -> Any:
    """The immutable signature of a command, for groups, chains and chords."""
    return app.signature("sandbox.execute_command", kwargs={"command": line, **whose}, immutable=True)


def failure_of(result: AsyncResult[Any]) -> SandfleetError:
    with pytest.raises(OperationFailed) as failed:
        result.get(timeout=SOON_S)
    assert result.state == states.FAILURE
    return failed.value.error


# --- one call --------------------------------------------------------------------------------------------


def test_a_command_runs_in_the_thread_s_sandbox_and_get_gives_its_result(app: Celery) -> None:
    result = command(app, "echo out; echo err >&2; exit 3", thread_id="plain-1").get(timeout=SOON_S)
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)


def test_files_written_by_one_task_are_there_for_the_next(app: Celery) -> None:
    whose = {"thread_id": "plain-files", "path": "/mnt/user-data/workspace/a.txt"}
    app.send_task("sandbox.write_file", kwargs={**whose, "content": "é\n"}).get(timeout=SOON_S)
    read = app.send_task("sandbox.read_file", kwargs=whose).get(timeout=SOON_S)
    assert read["content"] == "é\n"
    coded = base64.b64encode(b"bytes").decode()
    app.send_task("sandbox.write_file", kwargs={**whose, "content_b64": coded, "append": True}).get(timeout=SOON_S)
    shown = command(app, "cat a.txt", thread_id="plain-files").get(timeout=SOON_S)
    assert shown["stdout"] == "é\nbytes"


def test_the_task_keeps_its_id_on_its_way_through_the_gateway(app: Celery, fleet: Stack) -> None:
    result = command(app, "true", thread_id="plain-1")
    result.get(timeout=SOON_S)
    view = fleet.store.op(result.id)
    assert view is not None
    assert (view.kind, view.outcome, view.describe.partition(" · ")[0]) == ("execute_command", "ok", "bash: true")


def test_the_same_thread_of_two_users_is_two_sandboxes(app: Celery) -> None:
    for user in ("u1", "u2"):
        command(app, f"echo {user} >> who", thread_id="plain-shared", user_id=user).get(timeout=SOON_S)
    seen = command(app, "cat who", thread_id="plain-shared", user_id="u1").get(timeout=SOON_S)
    assert seen["stdout"] == "u1\n"


def test_a_sandbox_can_be_addressed_by_its_id(app: Celery, fleet: Stack) -> None:
    command(app, "true", thread_id="plain-1").get(timeout=SOON_S)
    sandbox_id = sandbox_id_candidates(Identity("plain-1").digest)[0]
    assert command(app, "echo here", sandbox_id=sandbox_id).get(timeout=SOON_S)["stdout"] == "here\n"


def test_a_plain_call_holds_nothing_afterwards(app: Celery, fleet: Stack) -> None:
    command(app, "true", thread_id="plain-held").get(timeout=SOON_S)

    def is_warm() -> bool:
        [info] = fleet.store.sandboxes(thread_id="plain-held")
        return (info.state, info.agents, info.ops) == ("warm", 0, 0)

    wait_until(is_warm, 5.0, story=lambda: fleet.store.sandboxes(thread_id="plain-held"))


def test_an_app_that_knows_nothing_of_us_can_call_through_the_shared_queue(fleet: Stack) -> None:
    url = fleet.settings.redis_url
    with Celery("bare", broker=url, backend=url, set_as_current=False) as bare:
        kwargs = {"thread_id": "plain-bare", "command": "echo bare"}
        result = bare.send_task("sandbox.execute_command", kwargs=kwargs, queue=OPS_QUEUE)
        assert result.get(timeout=SOON_S)["stdout"] == "bare\n"


# --- canvas ----------------------------------------------------------------------------------------------


def test_a_group_maps_a_script_over_many_threads(app: Celery) -> None:
    calls = group(shell(app, f"echo {n}", thread_id=f"map-{n}") for n in range(12))
    results: GroupResult = calls.apply_async()
    assert [r["stdout"].strip() for r in results.get(timeout=SOON_S)] == [str(n) for n in range(12)]
    assert results.successful()


def test_a_group_can_be_picked_up_again_by_its_id(app: Celery) -> None:
    results: GroupResult = group(shell(app, f"echo {n}", thread_id="plain-1") for n in range(3)).apply_async()
    results.save()
    again = GroupResult.restore(results.id, app=app)
    assert [r["stdout"] for r in again.get(timeout=SOON_S)] == ["0\n", "1\n", "2\n"]
    again.delete()


def test_a_group_tells_which_of_its_calls_failed(app: Celery) -> None:
    calls = [shell(app, "echo fine", thread_id="plain-1"), shell(app, "echo", thread_id="not/valid")]
    fine, wrong = group(calls).apply_async().results
    assert fine.get(timeout=SOON_S)["stdout"] == "fine\n"
    assert isinstance(failure_of(wrong), InvalidArgument)


def test_a_chord_s_callback_gets_the_results_of_all_its_threads(app: Celery, reducer: str) -> None:
    calls = [shell(app, f"echo {n:02}", thread_id=f"map-{n}") for n in range(12)]
    callback = app.signature(reducer, queue=reducer)
    assert chord(calls)(callback).get(timeout=SOON_S) == [f"{n:02}" for n in range(12)]


def test_a_chord_with_a_call_that_fails_fails(app: Celery, reducer: str) -> None:
    calls = [shell(app, "echo 1", thread_id="plain-1"), shell(app, "echo", thread_id="not/valid")]
    result = chord(calls)(app.signature(reducer, queue=reducer))
    with pytest.raises((ChordError, OperationFailed)):
        result.get(timeout=SOON_S)
    assert isinstance(failure_of(result.parent.results[1]), InvalidArgument)


def test_a_chain_runs_its_calls_one_after_the_other(app: Celery) -> None:
    calls = [shell(app, f"echo {n} >> chain; cat chain", thread_id="plain-chain") for n in range(3)]
    assert chain(*calls).apply_async().get(timeout=SOON_S)["stdout"] == "0\n1\n2\n"


# --- ending what runs ------------------------------------------------------------------------------------


def test_revoke_with_terminate_kills_a_running_command(app: Celery, fleet: Stack) -> None:
    result = command(app, "echo $$ > pid; exec sleep 300", thread_id="plain-revoke")

    def runs() -> bool:
        return command(app, "cat pid", thread_id="plain-revoke").get(timeout=SOON_S)["exit_code"] == 0

    wait_until(runs, SOON_S, story=lambda: fleet.store.op(result.id))
    app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=SOON_S)

    def is_gone() -> bool:
        found = command(app, "kill -0 $(cat pid)", thread_id="plain-revoke").get(timeout=SOON_S)
        return bool(found["exit_code"] != 0)

    wait_until(is_gone, SOON_S)
    view = wait_until(lambda: (v := fleet.store.op(result.id)) and v.state == "done" and v, 5.0)
    assert view is not None
    assert fleet.store.ops() == []


def test_a_call_that_waits_for_its_session_can_be_revoked_and_never_runs(app: Celery, fleet: Stack) -> None:
    whose = {"thread_id": "plain-session", "session": "s"}
    running = command(app, "sleep 300", **whose)
    wait_until(lambda: (v := fleet.store.op(running.id)) and v.state == "claimed", SOON_S)
    waiting = command(app, "touch must-not-exist", **whose)
    wait_until(lambda: fleet.store.op(waiting.id), SOON_S)
    app.control.revoke(waiting.id, terminate=True)
    with pytest.raises((TaskRevokedError, OperationFailed)):
        waiting.get(timeout=SOON_S)
    app.control.revoke(running.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        running.get(timeout=SOON_S)
    found = command(app, "ls must-not-exist", thread_id="plain-session").get(timeout=SOON_S)
    assert found["exit_code"] != 0


# --- calls that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "names"),
    [
        ({"thread_id": "plain-1", "command": "x", "tiemout_s": 5}, InvalidArgument, "tiemout_s"),
        ({"thread_id": "plain-1"}, InvalidArgument, "command"),
        ({"command": "x"}, InvalidArgument, "thread_id"),
        ({"command": "x", "thread_id": "../x"}, InvalidArgument, "thread_id"),
        ({"command": "x", "thread_id": 7}, InvalidArgument, "thread_id"),
        ({"command": "x", "thread_id": "plain-1", "user_id": "a b"}, InvalidArgument, "user_id"),
        ({"command": "x", "sandbox_id": "00000000"}, SandboxNotFound, "00000000"),
        ({"command": "x", "sandbox_id": "no/such"}, SandboxNotFound, "no/such"),
        ({"command": "x", "thread_id": "plain-1", "queue_timeout_s": "soon"}, InvalidArgument, "queue_timeout_s"),
        ({"command": "x", "thread_id": "plain-1", "content_b64": "é"}, InvalidArgument, "content_b64"),
        ({"command": "x", "thread_id": "plain-1", "content": 7}, InvalidArgument, "content"),
    ],
    ids=lambda value: None if isinstance(value, type | str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_a_wrong_call_fails_with_a_typed_error(
    app: Celery, kwargs: dict[str, Any], error: type[SandfleetError], names: str
) -> None:
    failed = failure_of(app.send_task("sandbox.execute_command", kwargs=kwargs))
    assert type(failed) is error
    assert names in str(failed)


def test_positional_arguments_are_refused_with_what_is_taken(app: Celery) -> None:
    failed = failure_of(app.send_task("sandbox.execute_command", args=["ls"]))
    assert isinstance(failed, InvalidArgument)
    assert "thread_id" in str(failed)


def test_content_for_an_operation_that_takes_none_is_refused_and_not_ignored(app: Celery) -> None:
    kwargs = {"thread_id": "plain-1", "path": "/mnt/user-data/workspace", "content": "x"}
    assert isinstance(failure_of(app.send_task("sandbox.list_dir", kwargs=kwargs)), InvalidArgument)


def test_an_error_of_the_sandbox_is_a_failure_that_carries_it(app: Celery) -> None:
    kwargs = {"thread_id": "plain-1", "path": "/mnt/user-data/workspace/nope"}
    failed = failure_of(app.send_task("sandbox.read_file", kwargs=kwargs))
    assert isinstance(failed, PathNotFound)
    assert isinstance(failed, FileNotFoundError)
    assert failed.facts["path"].endswith("nope")


def test_somebody_else_s_sandbox_cannot_be_reached_by_naming_it(app: Celery) -> None:
    command(app, "true", thread_id="plain-1").get(timeout=SOON_S)
    sandbox_id = sandbox_id_candidates(Identity("plain-1").digest)[0]
    failed = failure_of(command(app, "id", sandbox_id=sandbox_id, thread_id="mallory"))
    assert isinstance(failed, SandboxNotFound)


def test_a_batch_with_an_unknown_operation_is_refused_as_a_whole(app: Celery) -> None:
    ops = [{"kind": "execute_command", "args": {"command": "touch ran"}}, {"kind": "nope"}]
    failed = failure_of(app.send_task("sandbox.batch", kwargs={"thread_id": "plain-batch", "ops": ops}))
    assert isinstance(failed, InvalidArgument | UnknownOperation)


def test_every_operation_has_a_task(fleet: Stack, app: Celery) -> None:
    registered = app.control.inspect(timeout=1.0).registered() or {}
    ours = {name: set(tasks) for name, tasks in registered.items() if name.startswith(("scheduler-", "node-"))}
    assert len(ours) == 3
    for worker, tasks in ours.items():
        assert {f"sandbox.{kind}" for kind in OPS} <= tasks, worker


# --- more callers than threads ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    """A scheduler with two threads and a node with one place: plain calls must wait for it one after the other."""
    require("redis")
    with Stack(nodes=1, backend="mock", lease_s=3.0, concurrency=2, replicas=1) as stack:
        yield stack


@pytest.fixture(scope="module")
def narrow_app(narrow: Stack) -> Iterator[Celery]:
    made = celery_app(narrow.settings)
    yield made
    made.backend.remove_pending_result = lambda result: result
    made.close()


@pytest.mark.slow
def test_a_chord_of_calls_that_wait_for_a_place_keeps_its_ids_and_calls_back_once(
    narrow: Stack, narrow_app: Celery
) -> None:
    header = [narrow_app.signature("sandbox.noop", kwargs={"thread_id": f"wide-{n}"}) for n in range(6)]
    after = narrow_app.signature("sandbox.noop", kwargs={"thread_id": "wide-after"}, immutable=True)
    result = chord(header)(after)
    ids = [member.id for member in result.parent.results]
    result.get(timeout=60.0)
    assert [member.id for member in result.parent.results] == ids
    assert result.parent.successful()
    for op_id in [*ids, result.id]:
        view = narrow.store.op(op_id)
        assert view is not None
        assert (view.state, view.outcome) == ("done", "ok")


@pytest.mark.slow
def test_an_sdk_client_is_served_while_plain_calls_wait_for_a_place(narrow: Stack, narrow_app: Celery) -> None:
    with SandboxProvider(narrow.settings) as provider:
        held = provider.acquire("holds-the-only-place")
        waiting = [narrow_app.send_task("sandbox.noop", kwargs={"thread_id": f"stuck-{n}"}) for n in range(6)]
        wait_until(lambda: {r.state for r in waiting} & {"RETRY"}, SOON_S, story=lambda: [r.state for r in waiting])
        for n in range(3):
            started = time.monotonic()
            with pytest.raises(NoCapacity):
                provider.acquire(f"asks-{n}", timeout_s=1.0)
            assert time.monotonic() - started < 3.0, "the scheduler answered, and not the client's clock"
        provider.release(held)
        for result in waiting:
            result.get(timeout=60.0)


def test_a_call_that_is_delivered_twice_runs_once_and_does_not_fail(app: Celery) -> None:
    kwargs = {"command": "echo ran >> twice; sleep 0.5; cat twice", "thread_id": "plain-twice"}
    first = app.send_task("sandbox.execute_command", kwargs=kwargs)
    app.send_task("sandbox.execute_command", kwargs=kwargs, task_id=first.id)
    assert first.get(timeout=SOON_S)["stdout"] == "ran\n"
    app.send_task("sandbox.execute_command", kwargs=kwargs, task_id=first.id)
    assert command(app, "cat twice", thread_id="plain-twice").get(timeout=SOON_S)["stdout"] == "ran\n"
    assert first.state == states.SUCCESS


def test_a_background_job_is_a_success_as_soon_as_it_runs(app: Celery, fleet: Stack) -> None:
    whose = {"thread_id": "plain-job"}
    begun = command(app, "until [ -e go ]; do sleep 0.05; done; exit 4", background=True, **whose).get(timeout=SOON_S)
    job = {"job_id": begun["job_id"], **whose}
    poll = app.send_task("sandbox.poll_job", kwargs=job).get(timeout=SOON_S)
    assert (poll["running"], begun["pid"]) == (True, poll["pid"])
    command(app, "touch go", **whose).get(timeout=SOON_S)
    with SandboxProvider(fleet.settings) as provider:
        sandbox = provider.get(provider.acquire("plain-job"))
        assert sandbox is not None
        assert sandbox.job(begun["job_id"]).wait(SOON_S).exit_code == 4


def test_a_job_that_runs_is_ended_by_kill_job_and_not_by_revoke(app: Celery) -> None:
    whose = {"thread_id": "plain-kill"}
    begun = command(app, "sleep 600", background=True, **whose).get(timeout=SOON_S)
    job = {"job_id": begun["job_id"], **whose}
    app.control.revoke(begun["job_id"], terminate=True)
    assert app.send_task("sandbox.poll_job", kwargs=job).get(timeout=SOON_S)["running"]
    killed = app.send_task("sandbox.kill_job", kwargs={**job, "signal": "SIGKILL"}).get(timeout=SOON_S)
    assert killed["found"]

    def over() -> bool:
        return not app.send_task("sandbox.poll_job", kwargs=job).get(timeout=SOON_S)["running"]

    wait_until(over, SOON_S)
