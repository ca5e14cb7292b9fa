"""The part of the backend contract about sandboxes that outlive their node (`Capability.SURVIVES_NODE`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Capability, Completion, Liveness, Operation, SandboxBackend, SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet.ids import new_op_id
from sandfleet.testing.backend_world import World, wait_for

__all__ = ["SurvivalContract"]

_TICKET_BYTES = 16 * 1024


class SurvivalContract:
    """Mixed into `BackendContract`, which gives the fixtures. `make_backend` with the same ``root`` once more is the
    next run of the same node."""

    make_backend: Callable[[Path, Callable[[str, str], None]], SandboxBackend]
    teach: Callable[..., None]
    end_sandbox: Callable[[SandboxBackend, str], None]

    @pytest.fixture
    def surviving(self, world: World) -> World:
        """A backend whose sandboxes outlive it."""
        if Capability.SURVIVES_NODE not in world.backend.capabilities:
            pytest.skip(f"the backend does not declare {Capability.SURVIVES_NODE}")
        return world

    @contextmanager
    def next_run(self, world: World) -> Iterator[World]:
        """The node's next run, after the one of ``world`` has let go of everything."""
        world.backend.detach()
        world.backend.close()
        deaths: list[tuple[str, str]] = []
        backend = self.make_backend(world.root, lambda *death: deaths.append(death))
        try:
            yield World(backend, world.root, deaths)
        finally:
            backend.close()

    def test_a_ticket_is_small_json_and_only_of_what_runs(self, surviving: World) -> None:
        plan = surviving.plan()
        surviving.backend.create(plan)
        ticket = surviving.backend.ticket(plan.sandbox_id)
        text = json.dumps(ticket)
        assert len(text) <= _TICKET_BYTES
        assert json.loads(text) == ticket
        surviving.backend.destroy(plan.sandbox_id)
        with pytest.raises(KeyError):
            surviving.backend.ticket(plan.sandbox_id)

    def test_the_next_run_of_a_node_has_its_sandboxes_with_their_files(self, surviving: World) -> None:
        kept, left = surviving.plan(), surviving.plan()
        connections = [surviving.backend.create(plan) for plan in (kept, left)]
        for connection in connections:
            surviving.value(connection, "write_file", b"mine", path="/tmp/only-here")
        ticket = json.loads(json.dumps(surviving.backend.ticket(kept.sandbox_id)))
        with self.next_run(surviving) as world:
            assert surviving.backend.running() == []
            before = sum(map(len, world.backend.leftovers().values()))
            connection = world.backend.attach(kept.sandbox_id, ticket)
            assert world.backend.running() == [kept.sandbox_id]
            assert world.backend.probe(kept.sandbox_id) is Liveness.ALIVE
            assert world.read(connection, "/tmp/only-here") == b"mine"
            assert world.backend.ticket(kept.sandbox_id) == ticket
            leftovers = [name for names in world.backend.leftovers().values() for name in names]
            assert len(leftovers) == before - 1, "what is attached is nobody's leftover, what is not is one"
            for name in leftovers:
                world.backend.remove_leftover(name)
            assert world.read(connection, "/tmp/only-here") == b"mine"
            world.backend.destroy(kept.sandbox_id)
            assert world.backend.leftovers() == {}
            assert not kept.run_dir.exists()
            assert world.deaths == []
        assert surviving.deaths == [], "nothing has died"

    def test_a_command_goes_on_and_its_result_comes_to_the_next_run(self, surviving: World) -> None:
        plan = surviving.plan()
        connection = surviving.backend.create(plan)
        command = "until [ -e /tmp/go ]; do sleep 0.05; done; echo done; exit 3"
        self.teach(surviving.backend, command, stdout="done\n", exit_code=3, delay_s=1.5)
        began = replace(surviving.operation("execute_command", command=command), note='{"for": "the next run"}')
        never = surviving.operation("execute_command", command="echo never")
        ended: list[Completion] = []
        connection.start(began, ended.append)
        surviving.value(connection, "health")
        wait_for(lambda: began.op_id in [each.op_id for each in connection.remembered()], "the command to begin")
        ticket = surviving.backend.ticket(plan.sandbox_id)
        with self.next_run(surviving) as world:
            assert len(ended) <= 1
            connection = world.backend.attach(plan.sandbox_id, ticket)
            (found,) = [each for each in connection.remembered() if each.op_id == began.op_id]
            assert (found.running, found.note) == (True, began.note)
            results: list[Completion] = []
            connection.recall(began, results.append)
            world.value(connection, "write_file", b"", path="/tmp/go")
            wait_for(lambda: results, "its result")
            assert results[0].error is None
            assert (results[0].value["stdout"], results[0].value["exit_code"]) == ("done\n", 3)
            assert self._recalled(connection, began).value["exit_code"] == 3, "it is remembered when it has ended, too"
            error = self._recalled(connection, never).error
            assert error is not None
            assert error.code == "not_started"
            late = connection.perform(never)
            assert late.error is not None, "what was said not to have begun never does"
            world.backend.destroy(plan.sandbox_id)

    def _recalled(self, connection: Any, op: Operation) -> Completion:
        box: list[Completion] = []
        connection.recall(op, box.append)
        wait_for(lambda: box, "how it ended")
        return box[0]

    def test_a_claimed_sandbox_is_found_again_under_its_threads_id(self, surviving: World) -> None:
        if Capability.BLANKS not in surviving.backend.capabilities:
            pytest.skip(f"the backend does not declare {Capability.BLANKS}")
        thread, slot = surviving.plan(), "b1a2c3d4e5f60718"
        connection = surviving.backend.create(_blank(surviving, slot))
        surviving.value(connection, "write_file", b"mine", path="/tmp/only-here")
        early = surviving.backend.ticket(slot)
        surviving.backend.claim(slot, thread.sandbox_id)
        ticket = surviving.backend.ticket(thread.sandbox_id)
        assert early == ticket, "the one that was written before the claim is as good"
        with self.next_run(surviving) as world:
            connection = world.backend.attach(thread.sandbox_id, ticket)
            assert world.backend.running() == [thread.sandbox_id]
            assert world.read(connection, "/tmp/only-here") == b"mine"
            world.backend.destroy(thread.sandbox_id)

    def test_the_death_of_an_attached_sandbox_is_told(self, surviving: World) -> None:
        plan = surviving.plan()
        surviving.backend.create(plan)
        ticket = surviving.backend.ticket(plan.sandbox_id)
        with self.next_run(surviving) as world:
            world.backend.attach(plan.sandbox_id, ticket)
            self.end_sandbox(world.backend, plan.sandbox_id)
            wait_for(lambda: world.deaths, "a report of the death")
            assert [death[0] for death in world.deaths] == [plan.sandbox_id]
            assert world.backend.running() == []
        assert surviving.deaths == []

    def test_what_is_gone_or_no_ticket_is_not_attached(self, surviving: World) -> None:
        plan = surviving.plan()
        surviving.backend.create(plan)
        ticket = surviving.backend.ticket(plan.sandbox_id)
        surviving.backend.destroy(plan.sandbox_id)
        with self.next_run(surviving) as world:
            for given, reasons in (
                (ticket, ["gone"]),
                ({}, ["gone", "unreachable"]),
                ({"v": "9"}, ["gone", "unreachable"]),
            ):
                with pytest.raises(StartFailed) as caught:
                    world.backend.attach(plan.sandbox_id, given)
                assert caught.value.facts["reason"] in reasons
            assert world.backend.running() == []
            assert world.backend.leftovers() == {}

    def test_nothing_is_started_once_a_node_has_let_go(self, surviving: World) -> None:
        with self.next_run(surviving) as world:
            plan = world.plan()
            with pytest.raises(StartFailed):
                surviving.backend.create(plan)
            assert world.backend.leftovers() == {}


def _blank(world: World, slot: str) -> SandboxPlan:
    """The plan of a sandbox that belongs to nobody."""
    return replace(world.plan(f"blank-{new_op_id()[:8]}"), sandbox_id=slot, identity=None, epoch=0)
