"""What Celery's events and `inspect` tell of a task: lines for people, whatever the sender put into the message."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu.message import Message

from sandfleet.errors import OperationFailed, PathNotFound
from sandfleet.task_request import FleetRequest, PlainRequest, shown_call

SECRET = "hunter2"


class Eventer:
    """Celery's dispatcher of events, as far as a request uses it."""

    enabled = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


def request(kind: type[FleetRequest], body: object, eventer: Eventer | None = None) -> Any:
    app = Celery(set_as_current=False)
    headers = {
        "id": "o1", "task": "sandbox.execute_command", "argsrepr": "the sender's", "kwargsrepr": f"{{'env': {SECRET}}}",
    }  # fmt: skip
    text = json.dumps(body) if not isinstance(body, bytes) else body.decode()
    message = Message(text, content_type="application/json", content_encoding="utf-8", headers=headers)
    message.accept = {"application/json"}
    task = SimpleNamespace(ignore_result=False, send_events=True)
    return kind(message, app=app, task=task, eventer=eventer, headers=headers)


def test_a_plain_call_is_shown_by_its_line_and_whose_it_is() -> None:
    kwargs = {"thread_id": "alice", "user_id": "u1", "command": f"TOKEN={SECRET} make", "env": {"K": SECRET}}
    told = request(PlainRequest, [[], kwargs, {}])
    assert (told.argsrepr, told.kwargsrepr) == ("bash: TOKEN=[redacted] make", "thread alice · user u1")
    # The tracer logs and sends on what lies here.
    shown = {key: told._request_dict[key] for key in ("argsrepr", "kwargsrepr")}
    assert shown == {"argsrepr": told.argsrepr, "kwargsrepr": told.kwargsrepr}


@pytest.mark.parametrize(
    "body",
    [
        [[SECRET], {"thread_id": "alice"}, {}],
        [[], {"thread_id": ["alice"], "command": {"a": 1}, "x": SECRET}, {}],
        [[], [SECRET], {}],
        [SECRET, SECRET, SECRET],
    ],
)
def test_a_call_that_is_none_is_shown_without_what_is_in_it(body: object) -> None:
    told = request(PlainRequest, body)
    assert SECRET not in told.argsrepr + told.kwargsrepr


def test_wrong_types_are_no_reason_to_fail_before_the_task_can_tell() -> None:
    assert shown_call("batch", (), {"ops": 5, "thread_id": "alice"}) == ("batch", "thread alice")
    assert shown_call("batch", (), {"ops": [1, 2], "sandbox_id": "3f9a1c22"}) == ("batch of 2 · 3f9a1c22", "")
    assert shown_call("stat", (), {"path": "/a\x1b[2Jb", "sandbox_id": "../x"}) == ("stat: /a [2Jb", "")


def test_whoever_lists_active_tasks_sees_lines_not_arguments() -> None:
    told = request(FleetRequest, [[{"args": {"env": {"K": SECRET}}}], {}, {}])
    for listed in (told.info(), told.info(safe=False), told.info(safe=True)):
        assert (listed["args"], listed["id"]) == ("the sender's", "o1")


def test_a_refusal_is_told_without_a_traceback_and_a_fault_of_ours_with_one() -> None:
    eventer = Eventer()
    told = request(FleetRequest, [[], {}, {}], eventer)
    failure = OperationFailed(json.dumps(PathNotFound("no /x").to_wire()))
    trace = f"Traceback (most recent call last):\n  File …\n{OperationFailed.__module__}.OperationFailed: {failure}"
    told.send_event("task-failed", exception=repr(failure), traceback=trace)
    told.send_event("task-failed", exception="KeyError('a')", traceback="Traceback …\nKeyError: 'a'")
    told.send_event("task-succeeded", result="'placed on node-1'", runtime=1.0)
    told.send_event("task-succeeded", result="'", runtime=1.0)
    fields = [fields for _, fields in eventer.sent]
    assert fields[0]["exception"] == "path_not_found: no /x"
    assert fields[0]["traceback"] == ""
    assert "KeyError" in fields[1]["traceback"]
    assert [field["result"] for field in fields[2:]] == ["placed on node-1", "'"]
