"""What the worker makes of an answer to a command, which code in the sandbox may have written."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from sandfleet.backends import Completion, Operation
from sandfleet.errors import InvalidArgument
from sandfleet_workers.endpoint_http import BadReply, Reply
from sandfleet_workers.endpoint_ops import SandboxdDialect

MIB = 1024 * 1024
DATA = {
    "status": "completed",
    "exit_code": 0,
    "signal": None,
    "duration_s": 0.1,
    "timed_out": False,
    "truncated": False,
    "cancelled": False,
    "stdout": None,
    "stderr": None,
    "stdout_bytes": 0,
    "stderr_bytes": 0,
    "stdout_discarded": 0,
    "stderr_discarded": 0,
}


def body(raw: object, follows: bytes = b"", **data: Any) -> bytes:
    """A success with ``raw`` as the lengths of what follows it."""
    return json.dumps({"success": True, "data": {**DATA, **data, "raw": raw}}).encode() + b"\n" + follows


def answered(content: bytes, status: int = 200, **args: Any) -> Completion:
    """How a command ends that is answered so."""
    steps = SandboxdDialect().steps(Operation("op", "execute_command", {"command": "x", **args}))
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send(Reply(status, b"", content))
    completion: Completion = ended.value.value
    return completion


def test_output_is_the_bytes_behind_the_json() -> None:
    value = answered(body([4, 3], b"a\n\xff\0err")).value
    assert (value["stdout"], value["stderr"]) == ("a\n\ufffd\0", "err")
    value = answered(body([2, 1], b"\xff\0e"), as_bytes=True).value
    assert [base64.b64decode(value[name]) for name in ("stdout", "stderr")] == [b"\xff\0", b"e"]


def test_a_gap_is_shown_where_it_is() -> None:
    value = answered(body([4, 0], b"abcd", stdout_discarded=7, stdout_gap_at=2, truncated=True)).value
    assert value["stdout"] == "ab\n... [7 bytes discarded] ...\ncd"
    beyond = answered(body([4, 0], b"abcd", stdout_discarded=7, stdout_gap_at=99, truncated=True)).value
    assert beyond["stdout"].startswith("abcd\n... [7 ")


def test_a_failure_is_told_without_anything_behind_it() -> None:
    told = json.dumps({"success": False, "error": {"code": "invalid_argument", "message": "no"}}).encode()
    with pytest.raises(InvalidArgument, match="no"):
        answered(told, 400)


@pytest.mark.parametrize(
    "content",
    [
        body([4, 0], b"abc"),
        body([4, 0], b"abcde"),
        body([5, -1], b"abcd"),
        body([-4, 8], b"abcd"),
        body([4], b"abcd"),
        body([4, 0, 0], b"abcd"),
        body([4.0, 0], b"abcd"),
        body([True, 3], b"abcd"),
        body(["4", "0"], b"abcd"),
        body([2**70, -(2**70) + 4], b"abcd"),
        body([None, None]),
        body(4, b"abcd"),
        body(None, b"abcd"),
        body({"0": 4}, b"abcd"),
        body([4, 0], b"abcd", stdout_discarded=7),
        body([4, 0], b"abcd", stdout_discarded=7, stdout_gap_at=-1),
        body([4, 0], b"abcd", stdout_discarded=-1),
        body([0, 0], exit_code=256),
        b"\n" + body([0, 0]),
        b"{\n}" + b"x",
        b"[" * 100_000 + b"\n",
        b"no JSON",
        b"",
    ],
)
def test_what_does_not_add_up_is_no_answer(content: bytes) -> None:
    steps = SandboxdDialect().steps(Operation("op", "execute_command", {"command": "x"}))
    next(steps)
    with pytest.raises(BadReply):
        steps.send(Reply(200, b"", content))


@pytest.mark.parametrize("keep", [0, 1, MIB, 64 * MIB])
def test_an_answer_may_be_as_large_as_both_streams_and_no_larger(keep: int) -> None:
    steps = SandboxdDialect().steps(Operation("op", "execute_command", {"command": "x", "max_output_bytes": keep}))
    request = next(steps)
    assert request.find is not None
    assert 2 * keep < request.cap == request.find.cap <= 2 * keep + MIB
