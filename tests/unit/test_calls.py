"""The text shape of ``execute_command`` and the mapping of answers, golden strings and all."""

from __future__ import annotations

import base64
import codecs
from dataclasses import replace
from typing import Any

import pytest

from sandfleet import calls
from sandfleet.client import Answer
from sandfleet.errors import FileTooLarge, InternalError, InvalidArgument, PathNotFound
from sandfleet.model import CommandResult, GrepMatch, SandboxMetrics, TextRead, Timings
from sandfleet.ops import parse_args

OK = CommandResult(stdout="", stderr="", exit_code=0, duration_s=0.5)
TIMED_OUT = (
    "Command timed out after 600 seconds and was terminated. To run a long-lived process such as a web server, "
    "start it in the background and redirect its output, e.g. "
    "`your-command > /mnt/user-data/workspace/server.log 2>&1 &`."
)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, "(no output)"),
        ({"stdout": "out\n"}, "out\n"),
        ({"stderr": "err\n"}, "err\n"),
        ({"stdout": "out\n", "stderr": "err\n"}, "out\n\nStd Error:\nerr\n"),
        ({"stdout": "out\n", "exit_code": 3}, "out\n\nExit Code: 3"),
        ({"exit_code": 3}, "\nExit Code: 3"),
        ({"stderr": "err", "exit_code": 1}, "err\nExit Code: 1"),
        ({"stdout": "out", "stderr": "err", "exit_code": 127}, "out\nStd Error:\nerr\nExit Code: 127"),
        ({"exit_code": None, "signal": "SIGKILL"}, "\nExit Code: SIGKILL"),
        ({"exit_code": None, "timed_out": True, "duration_s": 600.0}, TIMED_OUT),
        ({"stdout": "part", "exit_code": None, "timed_out": True, "duration_s": 600.0}, f"part\n{TIMED_OUT}"),
    ],
)
def test_the_text_an_agent_sees(result: dict[str, Any], text: str) -> None:
    assert calls.shown(replace(OK, **result)) == text


def test_the_text_names_the_timeout_not_the_milliseconds_it_took() -> None:
    # A command whose deadline is 5 s is ended after 5.0031 s, and the agent asked for 5.
    text = calls.shown(replace(OK, exit_code=None, timed_out=True, duration_s=5.00312345))
    assert "timed out after 5 seconds" in text or "timed out after 5.0 seconds" in text


def answer(value: Any, content: bytes | None = None) -> Answer:
    return Answer("op-1", value, content, Timings(total_ms=1.0))


def test_a_command_answer_becomes_a_result_with_its_op_and_timings() -> None:
    value = {"stdout": "a", "stderr": "b", "exit_code": None, "duration_s": 1.0, "signal": "SIGTERM", "cancelled": True}
    result = calls.command_result(answer(value))
    assert result == CommandResult(
        "a", "b", None, 1.0, signal="SIGTERM", cancelled=True, op_id="op-1", timings=Timings(total_ms=1.0)
    )


def test_a_timeout_tells_the_limit_and_not_how_long_the_kill_took() -> None:
    late = replace(OK, stdout="", timed_out=True, exit_code=None, duration_s=600.25)
    assert calls.shown(late, 600).startswith("Command timed out after 600 seconds and was terminated.")
    assert calls.shown(late).startswith("Command timed out after 600.2 seconds")
    # The fleet's own limit came first.
    assert calls.shown(late, 900).startswith("Command timed out after 600.2 seconds")


def test_every_call_passes_its_own_validation() -> None:
    run: dict[str, Any] = dict.fromkeys(
        ("cwd", "env", "user", "stdin", "timeout_s", "session", "max_output_bytes", "queue_timeout_s", "op_id")
    )
    many = [
        calls.execute("ls", **run),
        calls.execute(["ls"], **{**run, "env": {"A": "b"}, "timeout_s": 5, "stdin": "x", "cwd": "/tmp"}),
        calls.read("/a", 1, 2),
        calls.read_file("/a"),
        calls.read_file("/a", 1, 2),
        calls.read_text("/a", None, 2, 100),
        calls.write("/a", "x", True),
        calls.write("/a", b"x", if_digest=""),
        calls.replace_text("/a", "x", "y", True),
        calls.replace_text("/a", "x", "y", False, "0" * 64),
        calls.list_call("/a", 3),
        calls.glob("/a", "*", True, 5),
        calls.grep("/a", "x", None, True, False, 5),
        calls.grep("/a", "x", "*.py", True, False, 5),
    ]
    for call in [*many, calls.batch(many, stop_on_error=False, timeout_s=None)]:
        parse_args(call.kind, call.args)


def test_text_is_sent_as_utf8_and_lone_surrogates_do_not_raise() -> None:
    assert calls.write("/a", "é").content == "é".encode()
    assert calls.write("/a", "\ud800").content == b"\xed\xa0\x80"
    assert (
        calls.execute(
            "cat",
            **dict.fromkeys(
                ("cwd", "env", "user", "timeout_s", "session", "max_output_bytes", "queue_timeout_s", "op_id")
            ),
            stdin="é",
        ).content
        == "é".encode()
    )


def test_bytes_that_are_no_text_read_with_replacement() -> None:
    assert calls.text_of(answer({}, b"a\xffb")) == "a\ufffdb"
    assert calls.text_of(answer({}, None)) == ""


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_says_how_to_read_and_is_left_out(mark: bytes, encoding: str) -> None:
    assert calls.text_of(answer({}, mark + "grün\r\n".encode(encoding))) == "grün\r\n"


def test_a_range_that_did_not_fit_is_no_text() -> None:
    with pytest.raises(FileTooLarge):
        calls.text_of(answer({"truncated": True, "encoding": "utf-8"}, b"part"), "/a")


READ = {"start_line": 1, "end_line": 1, "total_lines": 3, "total_chars": 9, "truncated": True, "cut_line": False,
        "encoding": "utf-16-le", "size_bytes": 20, "digest": "d"}  # fmt: skip


def test_a_text_read_says_what_is_left() -> None:
    read = calls.text_read(answer(READ, "zwölf\n".encode()))
    assert read == TextRead("zwölf\n", 1, 1, 3, 9, True, False, "utf-16-le", 20, "d")
    (batched,) = calls.batch_results(
        answer({"results": [{"ok": READ, "content_b64": base64.b64encode("zwölf\n".encode()).decode()}]})
    )
    assert batched == read


def test_metrics_that_nobody_knows_are_none() -> None:
    found = calls.metrics(answer({"pids": 3, "something_newer": 1}))
    assert found == SandboxMetrics(pids=3)


ENTRY = {"path": "/a/b", "name": "b", "type": "dir", "size": 1, "mode": 0o755, "modified_at": 1.0}


def test_directories_are_listed_with_a_slash() -> None:
    listed = calls.entries(answer({"entries": [ENTRY, {**ENTRY, "type": "file"}], "truncated": False}), "/a", 2)
    assert calls.names(listed) == ["/a/b/", "/a/b"]


def test_a_part_of_a_listing_never_looks_like_the_whole() -> None:
    with pytest.raises(InvalidArgument, match="more than 1 entries"):
        calls.entries(answer({"entries": [ENTRY], "truncated": True}), "/a", 2)


def test_glob_and_grep_say_whether_there_is_more() -> None:
    assert calls.glob_answer(answer({"paths": ["/a"], "truncated": True})) == (["/a"], True)
    found = calls.grep_answer(answer({"matches": [["/a", 3, "x"]], "truncated": False}))
    assert found == ([GrepMatch("/a", 3, "x")], False)


def test_a_batch_gives_one_value_per_item_and_errors_unraised() -> None:
    command = {"stdout": "a", "stderr": "", "exit_code": 0, "duration_s": 1.0}
    items = [
        {"ok": command},
        {"ok": {"size": 3}, "content_b64": base64.b64encode(b"\xff\0a").decode()},
        {"ok": {"count": 2}},
        {"error": PathNotFound("gone", path="/x").to_wire()},
        {"ok": None},
        {},
    ]
    one, two, three, four, five, six = calls.batch_results(answer({"results": items, "stopped_at": None}))
    assert (one.stdout, one.op_id) == ("a", "op-1")
    assert two == b"\xff\0a"
    assert three == {"count": 2}
    assert isinstance(four, PathNotFound)
    assert five is None
    assert isinstance(six, InternalError)


def test_a_batch_carries_text_as_text_and_bytes_as_base64() -> None:
    batch = calls.batch([calls.write("/a", "é"), calls.write("/b", b"\xff")], stop_on_error=True, timeout_s=1)
    assert [item.get("content") for item in batch.args["ops"]] == ["é", None]
    assert [item.get("content_b64") for item in batch.args["ops"]] == [None, "/w=="]
