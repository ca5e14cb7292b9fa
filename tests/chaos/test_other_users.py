"""Promises about another user's sandbox: for everybody else it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from sandfleet import CommandResult
from sandfleet.errors import SandboxNotFound
from sandfleet.ids import Identity, new_op_id
from sandfleet.store.base import Push
from tests.chaos.fleet import (
    Answers,
    Fleet,
    Gate,
    errors,
    lane_is_held,
    note,
    unique,
    wait_in_lane,
)
from tests.chaos.forging import N1, a_command, envelope, record_of, route_of
from tests.services import wait_until


def test_another_users_sandbox_is_not_found_by_any_method(fleet: Fleet) -> None:
    thread = unique("private")
    path = "/mnt/user-data/workspace/secret.txt"
    with fleet.provider() as provider, fleet.provider() as theirs:
        own = provider.get(provider.acquire(thread, user_id="alice"))
        assert own is not None
        own.write_file(path, "secret")
        for user in ("mallory", None):
            sandbox = theirs.get(own.id, thread_id=thread, user_id=user)
            assert sandbox is not None
            calls: dict[str, Callable[[], Any]] = {
                "run": lambda s=sandbox: s.run("cat secret.txt"),
                "execute_command": lambda s=sandbox: s.execute_command("cat secret.txt"),
                "session": lambda s=sandbox: s.run("cat secret.txt", session="x"),
                "close_session": lambda s=sandbox: s.close_session("x"),
                "read_file": lambda s=sandbox: s.read_file(path),
                "download_file": lambda s=sandbox: s.download_file(path),
                "write_file": lambda s=sandbox: s.write_file(path, "mine"),
                "append": lambda s=sandbox: s.write_file(path, "mine", True),
                "update_file": lambda s=sandbox: s.update_file(path, b"mine"),
                "str_replace": lambda s=sandbox: s.str_replace(path, "secret", "mine"),
                "list_dir": lambda s=sandbox: s.list_dir("/mnt/user-data/workspace"),
                "list_files": lambda s=sandbox: s.list_files("/mnt/user-data/workspace"),
                "glob": lambda s=sandbox: s.glob("/mnt/user-data/workspace", "*"),
                "grep": lambda s=sandbox: s.grep("/mnt/user-data/workspace", "secret"),
                "stat": lambda s=sandbox: s.stat(path),
                "exists": lambda s=sandbox: s.exists(path),
                "make_dir": lambda s=sandbox: s.make_dir("/mnt/user-data/workspace/d"),
                "remove": lambda s=sandbox: s.remove(path),
                "move": lambda s=sandbox: s.move(path, path + ".mine"),
                "health": lambda s=sandbox: s.health(),
                "noop": lambda s=sandbox: s.noop(),
                "cancel": lambda s=sandbox: s.cancel(new_op_id()),
            }
            for name, call in calls.items():
                with pytest.raises(SandboxNotFound):
                    print(f"{user} got through {name}: {call()!r}")
        assert theirs.acquire(thread, user_id="mallory") != own.id
        theirs.release(own.id)
        assert own.read_file(path) == "secret"
        assert fleet.store.sandbox(own.id).agents == 1  # type: ignore[union-attr]


def test_another_users_operation_cannot_be_cancelled_even_by_its_id(fleet: Fleet) -> None:
    thread = unique("cancel")
    answers: Answers[CommandResult] = Answers(fleet)
    with fleet.provider() as provider, fleet.provider() as theirs:
        own = provider.get(provider.acquire(thread))
        foreign = theirs.get(theirs.acquire(thread, user_id="mallory"))
        assert own is not None
        assert foreign is not None
        gate = Gate(fleet, thread)
        lane_is_held(fleet, answers, own, gate)
        op_ids = wait_in_lane(fleet, answers, own, [1])
        assert foreign.cancel(op_ids[1]) is False
        pretender = theirs.get(own.id, thread_id=thread, user_id="mallory")
        assert pretender is not None
        with pytest.raises(SandboxNotFound):
            pretender.cancel(op_ids[1])
        gate.open()
        assert not errors(answers.all())
        assert fleet.numbers(thread) == [1]


def test_another_users_sandbox_is_not_reached_by_forged_messages(fleet: Fleet, broker: redis.Redis) -> None:
    thread = unique("forge")
    with fleet.provider() as provider, fleet.provider() as theirs:
        own = provider.get(provider.acquire(thread, user_id="alice"))
        other = theirs.get(theirs.acquire(thread, user_id="mallory"))
        assert own is not None
        assert other is not None
        route, foreign = route_of(fleet, own.id), route_of(fleet, other.id)
        mallory = Identity(thread, "mallory")

        # Recorded as mallory for alice's sandbox: refused by the store.
        forged = replace(a_command(fleet, thread, route, note(1)), identity=mallory)
        assert fleet.store.record(record_of(forged), Push(N1, envelope(forged))).status == "not_found"
        # Recorded for mallory's own sandbox, sent for alice's, as mallory and as alice.
        for owner in (["mallory", thread], ["alice", thread]):
            message = replace(a_command(fleet, thread, foreign, note(2)), identity=mallory)
            wire = envelope(message, sid=route.sandbox_id, inc=route.incarnation, epoch=route.epoch, owner=owner)
            assert fleet.store.record(record_of(message), Push(N1, wire)).status == "recorded"
            view = wait_until(
                lambda o=message.op_id: (v := fleet.store.op(o)) and v.state in ("done", "closed") and v,
                10,
                fleet.story,
            )
            assert (view.outcome, view.claimed_at_ms) != ("ok", None)
            assert view.claimed_at_ms is None, "its effect never began"
        assert own.run(note(7)).exit_code == 0
        log = fleet.workspace(thread, "alice") / "log"
        assert log.read_text() == "7\n"
