"""The table of operations: validation, lanes, and what people get to see of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.errors import InvalidArgument, UnknownOperation
from sandfleet.ops import CONTENT_KINDS, OPS, describe, lanes_of, parse_args, task_name

SANDBOX = "3f9a1c22"

GOOD: dict[str, list[dict[str, Any]]] = {
    "execute_command": [
        {"command": "ls"},
        {"command": ""},
        {"argv": ["ls", "-la"]},
        {"command": "x", "cwd": "/tmp", "env": {"A": "b", "_": ""}, "timeout_s": 1.5, "session": "s.1-a_B"},
        {"command": "x", "timeout_s": 86400, "max_output_bytes": 0},
        {"command": "x", "background": True, "pty": {"rows": 40, "cols": 120}, "stream": "a.r1"},
        {"command": "x", "stdin_open": True},
    ],
    "close_session": [{"session": "s"}],
    "read_file": [
        {"path": "/a"},
        {"path": "/a", "start_line": 1, "end_line": 2},
        {"path": "/a", "offset": 5, "max_bytes": 0},
        {"path": "/\udcff", "as_text": True, "lenient": True, "max_chars": 1},
    ],
    "write_file": [
        {"path": "/a"},
        {"path": "/a", "append": True, "if_digest": ""},
        {"path": "/a", "append": True, "if_size": 0, "mode": 0o640},
    ],
    "str_replace": [{"path": "/a", "old": "x", "new": "", **more} for more in ({}, {"if_digest": "0" * 64})],
    "list_dir": [{"path": "/a", "max_depth": 64}],
    "glob": [{"path": "/a", "pattern": "**/*.py"}],
    "grep": [{"path": "/a", "pattern": "x", "glob": "*.py", "literal": True}],
    "stat": [{"path": "/a"}, {"path": "/a", "follow": False}],
    "make_dir": [{"path": "/a", "parents": False}, {"path": "/a", "mode": 0o755}],
    "make_link": [{"path": "/a", "target": "../b\udcff", "overwrite": True}],
    "remove": [{"path": "/a", "recursive": True}],
    "move": [{"path": "/a", "new_path": "/b"}, {"path": "/a", "new_path": "/b", "overwrite": True, "follow": True}],
    "kill_job": [{"job_id": "x"}, {"job_id": "x", "signal": "SIGKILL"}],
    "write_stdin": [{"job_id": "x"}, {"job_id": "x.r1", "eof": True}],
    "resize_job": [{"job_id": "x", "rows": 24, "cols": 80}],
    "poll_job": [{"job_id": "x"}],
    "list_jobs": [{}],
    "list_processes": [{}],
    "cancel": [{"op_id": "x"}],
    "health": [{}],
    "metrics": [{}],
    "noop": [{}],
    "checkpoint": [{}, {"name": "before the change"}, {"name": None}],
    "batch": [{"ops": [{"kind": "noop"}, {"kind": "write_file", "args": {"path": "/a"}, "content": "x"}]}],
}

BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "execute_command": [
        ({}, "command or argv"),
        ({"command": "x", "argv": ["x"]}, "command or argv"),
        ({"argv": []}, "argv"),
        ({"command": "a\0b"}, "NUL"),
        ({"argv": ["a", "b\0"]}, "NUL"),
        ({"command": 7}, "command"),
        ({"command": "x", "env": {"A=B": "c"}}, "env"),
        ({"command": "x", "env": {"A\n": "c"}}, "env"),
        ({"command": "x", "env": {"": "c"}}, "env"),
        ({"command": "x", "env": {"A": "b\0"}}, "NUL"),
        ({"command": "x", "env": {"A": 1}}, "env"),
        ({"command": "x", "timeout_s": 0}, "timeout_s"),
        ({"command": "x", "timeout_s": -1}, "timeout_s"),
        ({"command": "x", "timeout_s": float("nan")}, "timeout_s"),
        ({"command": "x", "timeout_s": float("inf")}, "timeout_s"),
        ({"command": "x", "timeout_s": 86401}, "timeout_s"),
        ({"command": "x", "timeout_s": "5"}, "timeout_s"),
        ({"command": "x", "session": "a/b"}, "session"),
        ({"command": "x", "session": "a\n"}, "session"),
        ({"command": "x", "session": ""}, "session"),
        ({"command": "x", "cwd": "a\0"}, "cwd"),
        ({"command": "x", "timeout": 5}, "timeout"),
        ({"command": "x", "max_output_bytes": -1}, "max_output_bytes"),
        ({"command": "x", "session": "s", "background": True}, "session"),
        ({"command": "x", "pty": {"rows": 0}}, "pty"),
        ({"command": "x", "stream": "a|b"}, "stream"),
    ],
    "close_session": [({}, "session"), ({"session": "é"}, "session")],
    "read_file": [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "a\0b"}, "NUL"),
        ({"path": "x" * 4097}, "path"),
        ({"path": "/a", "start_line": 0}, "start_line"),
        ({"path": "/a", "start_line": True}, "start_line"),
        ({"path": b"/a"}, "path"),
        ({"path": "/a", "as_text": True, "max_chars": 0}, "max_chars"),
        ({"path": "/a", "offset": -1}, "offset"),
    ],
    "write_file": [
        ({"path": "/a", "content": "x"}, "content"),
        ({"path": "/a", "append": 1}, "append"),
        ({"path": "/a", "if_size": 1}, "if_size"),
        ({"path": "/a", "mode": 0o1777}, "mode"),
        ({"path": "/a", "if_digest": "x" * 65}, "if_digest"),
    ],
    "str_replace": [
        ({"path": "/a", "old": "", "new": "x"}, "old"),
        ({"path": "/a", "old": "x"}, "new"),
        ({"path": "/a", "old": "x", "new": "", "if_digest": "x" * 65}, "if_digest"),
    ],
    "list_dir": [({"path": "/a", "max_depth": 0}, "max_depth"), ({"path": "/a", "max_depth": 65}, "max_depth")],
    "glob": [({"path": "/a", "pattern": ""}, "pattern"), ({"path": "/a", "pattern": "x", "max_results": 0}, "max")],
    "grep": [({"path": "/a", "pattern": "x" * 10_001}, "pattern")],
    "stat": [({}, "path")],
    "make_dir": [({"path": "/a", "mode": -1}, "mode"), ({"path": "/a", "mode": 0o2000}, "mode")],
    "make_link": [
        ({"path": "/a"}, "target"),
        ({"path": "/a", "target": ""}, "target"),
        ({"path": "/a", "target": "b\0"}, "NUL"),
    ],
    "remove": [({"path": "/a", "recursive": "yes"}, "recursive")],
    "move": [({"path": "/a"}, "new_path"), ({"path": "/a", "new_path": "b\0"}, "NUL")],
    "kill_job": [({}, "job_id"), ({"job_id": "x", "signal": "SIGNOPE"}, "signal"), ({"job_id": "a b"}, "job_id")],
    "write_stdin": [({}, "job_id"), ({"job_id": "x", "data": "y"}, "data")],
    "resize_job": [({"job_id": "x", "rows": 0, "cols": 80}, "rows"), ({"job_id": "x", "rows": 24}, "cols")],
    "poll_job": [({}, "job_id")],
    "list_jobs": [({"path": "/"}, "path")],
    "list_processes": [({"pid": 1}, "pid")],
    "cancel": [({}, "op_id"), ({"op_id": "x" * 81}, "op_id")],
    "health": [({"x": 1}, "x")],
    "metrics": [({"x": 1}, "x")],
    "noop": [({"x": 1}, "x")],
    "checkpoint": [({"name": ""}, "name"), ({"name": "a\nb"}, "name"), ({"name": "x" * 101}, "name")],
    "batch": [
        ({"ops": []}, "ops"),
        ({"ops": [{"kind": "noop"}] * 201}, "ops"),
        ({"ops": ["noop"]}, "ops"),
        ({"ops": [{"kind": "batch", "args": {"ops": [{"kind": "noop"}]}}]}, "batch"),
        ({"ops": [{"kind": "read_file", "args": {}}]}, "path"),
        ({"ops": [{"kind": "read_file", "args": [1]}]}, "args"),
    ],
}


def test_every_kind_has_good_and_bad_examples_here() -> None:
    assert set(GOOD) == set(BAD) == set(OPS)


@pytest.mark.parametrize(("kind", "args"), [(kind, args) for kind, many in GOOD.items() for args in many])
def test_good_arguments_are_taken_and_come_back_as_given(kind: str, args: dict[str, Any]) -> None:
    assert parse_args(kind, args).model_dump(exclude_unset=True) == args


@pytest.mark.parametrize(("kind", "args", "names"), [(kind, *bad) for kind, many in BAD.items() for bad in many])
def test_bad_arguments_are_refused_by_name(kind: str, args: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_args(kind, args)
    assert names in str(refused.value)
    assert refused.value.facts["operation"] in OPS
    assert len(str(refused.value)) < 500


def test_a_refusal_does_not_repeat_secret_values() -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_args("execute_command", {"command": "x", "env": {"TOKEN": "hunter2\0"}})
    assert "hunter2" not in str(refused.value.to_wire())


@pytest.mark.parametrize("kind", ["", "nope", "execute_command ", "x" * 1000])
def test_an_unknown_kind_is_refused_alone_and_in_a_batch(kind: str) -> None:
    with pytest.raises(UnknownOperation) as refused:
        parse_args(kind, {})
    assert len(str(refused.value)) < 500
    with pytest.raises(UnknownOperation):
        parse_args("batch", {"ops": [{"kind": kind}]})


@pytest.mark.parametrize("content", [5, 10**12, ["x"], {"a": 1}])
def test_the_content_of_a_batch_item_is_text_or_nothing(content: object) -> None:
    # bytes(10**12) would be a terabyte of zeros on the node.
    with pytest.raises(InvalidArgument):
        parse_args("batch", {"ops": [{"kind": "write_file", "args": {"path": "/a"}, "content": content}]})


def test_task_names_are_fixed_words() -> None:
    assert {task_name(kind) for kind in OPS} == {f"sandbox.{kind}" for kind in OPS}
    assert task_name("execute_command") == "sandbox.execute_command"


# --- lanes -----------------------------------------------------------------------------------------------

ITEM = {kind: good[0] for kind, good in GOOD.items() if kind not in ("batch", "checkpoint")}


@pytest.mark.parametrize(
    ("kind", "args", "lanes"),
    [
        ("execute_command", {"command": "x"}, (f"{SANDBOX}/shell/me",)),
        ("execute_command", {"command": "x", "session": "s"}, (f"{SANDBOX}/session/s",)),
        ("close_session", {"session": "s"}, (f"{SANDBOX}/session/s",)),
        ("write_file", {"path": "/a"}, (f"{SANDBOX}/files",)),
        ("str_replace", {"path": "/a"}, (f"{SANDBOX}/files",)),
        ("remove", {"path": "/a"}, (f"{SANDBOX}/files",)),
        ("move", {"path": "/a"}, (f"{SANDBOX}/files",)),
        ("make_dir", {"path": "/a"}, (f"{SANDBOX}/files",)),
        ("read_file", {"path": "/a"}, ()),
        ("grep", {"path": "/a"}, ()),
        ("cancel", {"op_id": "x"}, ()),
        ("noop", {}, ()),
    ],
)
def test_the_lanes_of_each_kind(kind: str, args: dict[str, Any], lanes: tuple[str, ...]) -> None:
    assert lanes_of(kind, args, SANDBOX, "me") == lanes


def test_commands_of_two_callers_share_no_lane() -> None:
    mine = lanes_of("execute_command", {"command": "x"}, SANDBOX, "me")
    theirs = lanes_of("execute_command", {"command": "x"}, SANDBOX, "you")
    assert not set(mine) & set(theirs)


def test_every_kind_that_changes_files_takes_the_lane_of_files() -> None:
    changing = {kind for kind, op in OPS.items() if op.lane == "files"}
    assert changing == {"write_file", "str_replace", "make_dir", "make_link", "remove", "move"}
    assert all(OPS[kind].effect for kind in changing)


@settings(deadline=None)
@given(kinds=st.lists(st.sampled_from(sorted(ITEM)), min_size=1, max_size=8))
def test_a_batch_takes_the_lanes_of_all_its_items_once_and_sorted(kinds: list[str]) -> None:
    ops = [{"kind": kind, "args": ITEM[kind]} for kind in kinds]
    lanes = lanes_of("batch", {"ops": ops}, SANDBOX, "me")
    assert list(lanes) == sorted(set(lanes))
    assert set(lanes) == {lane for kind in kinds for lane in lanes_of(kind, ITEM[kind], SANDBOX, "me")}


# --- what people see -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "args", "shown"),
    [
        ("execute_command", {"command": "ls  -la\n pwd"}, "bash: ls -la pwd · 3f9a1c22"),
        ("execute_command", {"argv": ["ls", "-la"]}, "bash: ls -la · 3f9a1c22"),
        ("read_file", {"path": "/a"}, "read: /a · 3f9a1c22"),
        ("grep", {"path": "/a", "pattern": "x"}, "grep: x in /a · 3f9a1c22"),
        ("batch", {"ops": [{}, {}]}, "batch of 2 · 3f9a1c22"),
        ("from_the_future", {}, "from_the_future · 3f9a1c22"),
    ],
)
def test_flower_shows_one_readable_line(kind: str, args: dict[str, Any], shown: str) -> None:
    assert describe(kind, args, SANDBOX) == shown


@pytest.mark.parametrize("kind", sorted(OPS))
def test_what_is_shown_never_holds_environment_values_or_contents(kind: str) -> None:
    secret = "hunter2"
    for args in GOOD[kind]:
        told = describe(
            kind, {**args, "env": {"TOKEN": secret}, "old": secret, "new": secret, "content": secret}, SANDBOX
        )
        assert secret not in told
    items = [{"kind": "write_file", "args": {"path": "/a"}, "content": secret}]
    assert secret not in describe("batch", {"ops": items}, SANDBOX)


@settings(deadline=None)
@given(text=st.text(max_size=300))
def test_what_is_shown_is_one_short_printable_line_whatever_the_command(text: str) -> None:
    for told in (
        describe("execute_command", {"command": text}, SANDBOX),
        describe("grep", {"path": text, "pattern": text}, SANDBOX),
    ):
        assert told.isprintable(), "a terminal or a log would obey what a sandbox's user wrote"
        assert len(told) < 200


def test_only_commands_and_writes_carry_bytes() -> None:
    assert {"execute_command", "write_file", "write_stdin"} == CONTENT_KINDS
