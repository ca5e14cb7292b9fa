"""What a sandbox tells a worker that did not begin what runs there: another connection, or another process."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Completion, Operation, Remembered
from sandfleet.errors import DigestMismatch, NotStarted, OutcomeUnknown, PathNotFound, SandfleetError
from sandfleet_workers import endpoint, endpoint_recall
from sandfleet_workers.endpoint import EndpointConnection
from tests.contract.endpoint_served import Sandboxd, op, sockets_of
from tests.services import wait_until


@pytest.fixture
def sandboxd(tmp_path: Path) -> Iterator[Sandboxd]:
    made = Sandboxd(tmp_path, "--socket", str(tmp_path / "s"))
    yield made
    made.kill()


@pytest.fixture
def dead(sandboxd: Sandboxd) -> Iterator[EndpointConnection]:
    """The connection of a worker that is going to die."""
    made = sandboxd.connect()
    yield made
    made.close()


@pytest.fixture
def later(sandboxd: Sandboxd) -> Iterator[EndpointConnection]:
    """The connection of its successor."""
    made = sandboxd.connect()
    yield made
    made.close()


def recalled(connection: EndpointConnection, asked: Operation, deadline_s: float = 10.0) -> Completion:
    ended: list[Completion] = []
    connection.recall(asked, ended.append)
    wait_until(lambda: ended, deadline_s)
    return ended[0]


def test_a_command_that_outlived_its_worker_gives_its_result_to_the_next(
    dead: EndpointConnection, later: EndpointConnection, tmp_path: Path
) -> None:
    begun = replace(op("execute_command", command="echo x >> count; until [ -e go ]; do sleep 0.05; done; echo done"))
    lost: list[Completion] = []
    dead.start(replace(begun, note='{"kind": "execute_command"}'), lost.append)
    wait_until((tmp_path / "count").exists, 5)
    dead.close()
    assert later.remembered() == [Remembered(begun.op_id, True, '{"kind": "execute_command"}')]
    ended: list[Completion] = []
    later.recall(Operation(begun.op_id, "execute_command", {"max_output_bytes": 1000}), ended.append)
    (tmp_path / "go").touch()
    wait_until(lambda: ended, 10)
    assert (ended[0].value["stdout"], ended[0].value["exit_code"]) == ("done\n", 0)
    assert (tmp_path / "count").read_text() == "x\n"
    assert [known.running for known in later.remembered()] == [False]
    assert isinstance(lost[0].error, OutcomeUnknown)


def test_a_recall_waits_longer_than_one_question(
    dead: EndpointConnection, later: EndpointConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_recall, "_SLICE_S", 0.05)
    begun = op("execute_command", command="echo 12345; until [ -e go ]; do sleep 0.05; done")
    dead.start(begun, lambda _: None)
    wait_until(dead.remembered, 5)
    ended: list[Completion] = []
    later.recall(begun, ended.append)
    for sock in sockets_of(later):
        sock.shutdown(socket.SHUT_RDWR)  # and its connection may break meanwhile
    wait_until(lambda: any(channel.call for channel in later._channels), 5)
    assert ended == []
    (tmp_path / "go").touch()
    wait_until(lambda: ended, 10)
    assert ended[0].value["stdout"] == "12345\n"


def test_a_recalled_command_can_be_cancelled(dead: EndpointConnection, later: EndpointConnection) -> None:
    begun = op("execute_command", command="sleep 60")
    dead.start(begun, lambda _: None)
    wait_until(dead.remembered, 5)
    ended: list[Completion] = []
    later.recall(begun, ended.append)
    assert later.cancel(begun.op_id) is True
    wait_until(lambda: ended, 5)
    assert ended[0].value["cancelled"] is True


def test_what_never_began_is_not_started_and_never_will(dead: EndpointConnection, later: EndpointConnection) -> None:
    late = op("execute_command", command="touch ran")
    write = op("write_file", b"late", path="ran")
    for never in (late, write):
        assert isinstance(recalled(later, never).error, NotStarted)
        assert isinstance(recalled(later, never).error, NotStarted)
    for never in (late, write):
        assert isinstance(dead.perform(never).error, NotStarted), "the dead worker's request came after all"
    assert isinstance(later.perform(op("stat", path="ran")).error, PathNotFound)


CHANGES: list[tuple[str, bytes | None, dict[str, Any]]] = [
    ("write_file", b"abc", {"path": "new/f"}),
    ("write_file", b"abc", {"path": "f", "append": True}),
    ("write_file", b"x" * (5 * 1024 * 1024), {"path": "large"}),
    ("write_file", b"x" * (5 * 1024 * 1024), {"path": "f", "append": True}),
    ("str_replace", None, {"path": "f", "old": "one", "new": "two"}),
    ("make_dir", None, {"path": "d"}),
    ("make_link", None, {"path": "l", "target": "f"}),
    ("move", None, {"path": "f", "new_path": "g"}),
    ("remove", None, {"path": "tree", "recursive": True}),
    ("remove", None, {"path": "none"}),
    ("write_file", b"abc", {"path": "f", "if_digest": "0" * 64}),
]


@pytest.mark.parametrize(("kind", "content", "args"), CHANGES)
def test_a_change_is_made_once_and_its_answer_remembered(
    dead: EndpointConnection, later: EndpointConnection, kind: str, content: bytes | None, args: dict[str, Any]
) -> None:
    dead.perform(op("write_file", b"one", path="f"))
    dead.perform(op("write_file", b"one", path="tree/f"))
    change = op(kind, content, **args)
    first = dead.perform(change)
    again = recalled(later, Operation(change.op_id, kind, args))
    repeated = later.perform(change) if content is None or len(content) < 1000 else again
    for other in (again, repeated):
        assert other.value == first.value
        assert repr(other.error) == repr(first.error)
    assert change.op_id in [known.op_id for known in later.remembered()]


def test_an_appended_line_is_there_once_though_its_connection_broke(
    dead: EndpointConnection, later: EndpointConnection
) -> None:
    written = 0
    for _ in range(30):
        line = op("write_file", b"line\n", path="f", append=True)
        ended: list[Completion] = []
        dead.start(line, ended.append)
        for sock in sockets_of(dead):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is connecting, or has gone
                pass
        wait_until(lambda now=ended: now, 10)
        # It broke before the line was sent, or sandboxd was asked again.
        assert ended[0].error is None or isinstance(ended[0].error, NotStarted)
        written += ended[0].error is None
    assert later.perform(op("write_file", b"end", path="f", append=True)).error is None
    assert later.perform(op("read_file", path="f")).content == b"line\n" * written + b"end"


def test_of_a_batch_it_is_known_whether_it_began(dead: EndpointConnection, later: EndpointConnection) -> None:
    items = [{"kind": "noop", "args": {}}, {"kind": "make_dir", "args": {"path": "d"}}]
    begun, never = op("batch", ops=items), op("batch", ops=items)
    assert dead.perform(begun).value["stopped_at"] is None
    assert isinstance(recalled(later, Operation(begun.op_id, "batch", {})).error, OutcomeUnknown)
    assert isinstance(recalled(later, Operation(never.op_id, "batch", {})).error, NotStarted)
    late = dead.perform(never).value
    assert (late["stopped_at"], late["results"][1]["error"]["code"]) == (1, "not_started")


def test_what_is_forgotten_is_not_taken_for_what_never_began(tmp_path: Path) -> None:
    served = Sandboxd(tmp_path, "--socket", str(tmp_path / "s"), limits={"keep_ops": 2, "keep_changes": 2})
    connection = served.connect()
    first, change = op("execute_command", command="true"), op("make_dir", path="d")
    for begun in (first, change):
        connection.perform(begun)
    for number in range(4):
        connection.perform(op("execute_command", command="true"))
        connection.perform(op("make_dir", path=f"d{number}"))
    wait_until(lambda: first.op_id not in [known.op_id for known in connection.remembered()], 10)
    assert isinstance(recalled(connection, first).error, OutcomeUnknown)
    assert isinstance(recalled(connection, change).error, OutcomeUnknown)
    connection.close()
    served.kill()


def test_an_id_of_another_kind_is_no_answer(dead: EndpointConnection, later: EndpointConnection) -> None:
    command, change = op("execute_command", command="true"), op("make_dir", path="d")
    dead.perform(command)
    dead.perform(change)
    assert isinstance(recalled(later, Operation(change.op_id, "execute_command", {})).error, OutcomeUnknown)
    assert isinstance(recalled(later, Operation(command.op_id, "write_file", {})).error, OutcomeUnknown)
    assert later.perform(Operation(command.op_id, "make_dir", {"path": "e"})).error is not None


def test_a_dead_sandbox_leaves_the_outcome_unknown(sandboxd: Sandboxd, later: EndpointConnection) -> None:
    later.perform(op("health"))
    sandboxd.kill()
    assert isinstance(recalled(later, op("execute_command", command="true")).error, OutcomeUnknown)
    with pytest.raises(SandfleetError):
        later.remembered()


# --- answers of an enemy -----------------------------------------------------------------------


def told(**fields: Any) -> dict[str, Any]:
    return {"op_id": "x", "running": True, "note": "", **fields}


@pytest.mark.parametrize(
    "ops",
    [
        "none",
        [1],
        [told(op_id=1)],
        [told(running="yes")],
        [told(note=None)],
        [told() for _ in range(5000)],
    ],
)
def test_lies_about_what_is_remembered_are_refused(
    later: EndpointConnection, monkeypatch: pytest.MonkeyPatch, ops: object
) -> None:
    monkeypatch.setattr(endpoint_recall, "json_of", lambda _reply: {"ops": ops})
    with pytest.raises(SandfleetError):
        later.remembered()


def test_a_note_is_never_longer_than_it_may_be(
    later: EndpointConnection, monkeypatch: pytest.MonkeyPatch, dead: EndpointConnection
) -> None:
    monkeypatch.setattr(endpoint_recall, "json_of", lambda _reply: {"ops": [told(note="x" * 10**6)]})
    assert [len(known.note) for known in later.remembered()] == [4096]
    refused = dead.perform(replace(op("execute_command", command="true"), note="é" * 4000))
    assert refused.error is not None
    assert refused.error.code == "invalid_argument"


@pytest.mark.parametrize(
    "answer",
    [
        {"success": True, "data": {"status": "running"}},
        {"success": True, "data": {"status": 5}},
        {"success": True, "data": []},
        {"success": False, "error": {"code": "lease_lost", "message": "", "facts": {}}},
        {"success": True, "data": {"status": "completed", "raw": [2**40, -1]}},
    ],
)
def test_no_answer_keeps_a_recall_from_ending(
    later: EndpointConnection, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr(endpoint_recall, "_MAX_SLICES", 20)
    monkeypatch.setattr(endpoint, "_RECALL_RETRY_S", 0.01)
    real: Callable[..., None] = later.on_reply

    def forged(channel: Any, call: Any, reply: Any, *, reusable: bool) -> None:
        real(channel, call, replace(reply, status=200, body=json.dumps(answer).encode()), reusable=reusable)

    monkeypatch.setattr(later, "on_reply", forged)
    error = recalled(later, op("execute_command", command="true")).error
    assert error is not None
    assert error.code in ("outcome_unknown", "internal")


def test_a_digest_that_did_not_fit_is_told_again(dead: EndpointConnection, later: EndpointConnection) -> None:
    dead.perform(op("write_file", b"1", path="f"))
    change = op("write_file", b"2", path="f", if_digest="0" * 64)
    assert isinstance(dead.perform(change).error, DigestMismatch)
    assert isinstance(recalled(later, change).error, DigestMismatch)
