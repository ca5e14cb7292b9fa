"""Promises about a Redis behind Sentinels whose primary dies: the replica may lack what was written a moment before."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from sandfleet import SandboxProvider
from sandfleet.celery_app import celery_app
from sandfleet.cli import main
from sandfleet.errors import SandfleetError
from tests.chaos.fleet import Fleet, unique
from tests.chaos.load import Load
from tests.sentinels import PASSWORD, Sentineled
from tests.services import require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.fixture(scope="module")
def redises(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentineled]:
    require("redis")
    running = Sentineled(tmp_path_factory.mktemp("redises"))
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def fleet(redises: Sentineled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require("bwrap")
    running = Fleet(tmp_path_factory.mktemp("sentinel-fleet"), redises.url)
    try:
        running.start_scheduler()
        running.nodes("s1", "s2")
        yield running
    finally:
        running.close()


def test_a_fleet_behind_sentinels_works_for_everybody_and_shows_no_password(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet.provider(label="") as provider:
        sandbox = provider.get(provider.acquire(unique("plain")))
        assert sandbox is not None
        assert sandbox.run("echo $((6 * 7))").stdout == "42\n"
    app = celery_app(fleet.settings(label=""))
    asked = app.send_task("sandbox.execute_command", kwargs={"thread_id": unique("plain"), "command": "echo by celery"})
    assert asked.get(timeout=30)["stdout"] == "by celery\n"
    app.close()
    assert main(["--redis-url", fleet.redis_url, "doctor"]) == 0, capsys.readouterr()
    assert main(["--redis-url", fleet.redis_url, "config", "show"]) == 0
    told = "".join(capsys.readouterr())
    assert "sentinel://" in told
    assert PASSWORD not in told
    assert PASSWORD.replace("/", "%2F") not in told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs and wakes up as a primary"])
def test_a_failover_under_load_costs_typed_errors_at_most_and_nothing_runs_twice(
    fleet: Fleet, redises: Sentineled, how: signal.Signals
) -> None:
    before = {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive}
    with fleet.provider(label="") as provider:
        idle = unique("idle")  # somebody holds it, and asks nothing of it meanwhile
        held = {idle: provider.acquire(idle)}
        owners = {info.sandbox_id: (info.node_id, info.epoch) for info in fleet.store.sandboxes()}
        loads = [Load(fleet, unique("load")) for _ in range(3)]

        def told() -> str:
            last = (repr(list(load.answers.items())[-3:]) for load in loads)
            return "\n".join([fleet.story(), *last, redises.told()])

        try:
            wait_until(lambda: all(load.good >= 5 for load in loads), 40, story=told)
            lost = redises.lose_primary(how)
            reached = [load.good for load in loads]
            if how is signal.SIGSTOP:
                lost.send(signal.SIGCONT)
            else:
                lost.start()
            wait_until(lambda: all(n.good >= m + 5 for n, m in zip(loads, reached, strict=True)), 60, story=told)
            wait_until(redises.in_order, 40, story=told)
        finally:
            for load in loads:
                load.join()
        for load in loads:
            load.judge()
        wait_until(lambda: works(provider, held[idle]), 30, story=told)
        assert owners.items() <= {i.sandbox_id: (i.node_id, i.epoch) for i in fleet.store.sandboxes()}.items(), told()
        assert {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive} == before, told()
        threads = [info.thread_id for info in fleet.store.sandboxes()]
        assert len(threads) == len(set(threads)), "one sandbox per thread"


def works(provider: SandboxProvider, sandbox_id: str) -> bool:
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None
    try:
        return sandbox.run("true").exit_code == 0
    except SandfleetError as exc:
        raise AssertionError(repr(exc)) from exc
