"""Commands that go on by themselves, on pipes and on terminals, through the worker's way into a sandbox."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Completion
from sandfleet.errors import InvalidArgument, JobNotFound, OutcomeUnknown
from sandfleet_workers.endpoint import EndpointConnection
from tests.contract.endpoint_served import Sandboxd, op, sockets_of
from tests.services import wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

KIB = 1024


@pytest.fixture
def sandboxd(tmp_path: Path) -> Iterator[Sandboxd]:
    made = Sandboxd(tmp_path, "--socket", str(tmp_path / "s"), env={"TERM": None})
    yield made
    made.kill()


@pytest.fixture
def box(sandboxd: Sandboxd) -> Iterator[EndpointConnection]:
    made = sandboxd.connect()
    yield made
    made.close()


class Job:
    """A job and what was read of it so far."""

    def __init__(self, box: EndpointConnection, command: str, **args: Any) -> None:
        self.box, self.out, self.err, self.skipped, self.running = box, b"", b"", 0, True
        self.at = {"offset": 0, "stderr_offset": 0}
        started = self.do("execute_command", command=command, background=True, **args)
        self.id = started["job_id"]
        assert started["pid"] > 0

    def do(self, kind: str, content: bytes | None = None, **args: Any) -> Any:
        done = self.box.perform(op(kind, content, **args))
        assert done.error is None, repr(done.error)
        return done.value

    def read(self, wait_s: float = 5.0, **args: Any) -> None:
        done = self.box.perform(op("job_output", op_id=self.id, wait_s=wait_s, **self.at, **args))
        assert done.error is None, repr(done.error)
        value, content = done.value, done.content or b""
        assert value["stdout_bytes"] + value["stderr_bytes"] == len(content)
        self.out += content[: value["stdout_bytes"]]
        self.err += content[value["stdout_bytes"] :]
        self.skipped += value["skipped"] + value["stderr_skipped"]
        self.at = {name: value[name] for name in self.at}
        self.running = value["running"]

    def until(self, text: bytes) -> bytes:
        deadline = time.monotonic() + 20
        while text not in self.out:
            assert time.monotonic() < deadline, self.out
            self.read(1.0)
        return self.out

    def rest(self) -> bytes:
        while self.running:
            self.read()
        before = -1
        while before != len(self.out) + len(self.err):
            before = len(self.out) + len(self.err)
            self.read()
        return self.out

    def tell(self, data: bytes, **args: Any) -> None:
        self.do("write_stdin", data, job_id=self.id, **args)


def final(job: Job) -> Any:
    ended: list[Completion] = []
    job.box.recall(replace(op("execute_command"), op_id=job.id), ended.append)
    wait_until(lambda: ended, 20)
    assert ended[0].error is None, repr(ended[0].error)
    return ended[0].value


def test_a_job_is_answered_at_once_and_its_result_comes_later(box: EndpointConnection) -> None:
    job = Job(box, "read line; echo got $line; echo bad >&2; exit 3", stdin_open=True)
    listed = job.do("list_jobs")["jobs"]
    assert [(known["job_id"], known["running"], known["exit_code"]) for known in listed] == [(job.id, True, None)]
    assert job.do("poll_job", job_id=job.id)["running"] is True
    job.tell(b"it\n")
    value = final(job)
    assert (value["stdout"], value["stderr"], value["exit_code"]) == ("got it\n", "bad\n", 3)
    assert (job.rest(), job.err) == (b"got it\n", b"bad\n")
    polled = job.do("poll_job", job_id=job.id)
    assert (polled["running"], polled["exit_code"], polled["stdout_bytes"]) == (False, 3, 7)


def test_a_foreground_command_is_no_job(box: EndpointConnection) -> None:
    box.perform(op("execute_command", command="true"))
    assert box.perform(op("list_jobs")).value == {"jobs": []}


def test_stdin_ends_when_it_is_said_and_each_byte_goes_once(box: EndpointConnection) -> None:
    job = Job(box, "wc -c", stdin_open=True)
    one = op("write_stdin", b"12345", job_id=job.id)
    for _ in range(3):
        assert box.perform(one).error is None
    job.tell(b"", eof=True)
    assert final(job)["stdout"].strip() == "5"
    assert isinstance(box.perform(op("write_stdin", b"x", job_id=job.id)).error, InvalidArgument)


def test_a_follower_who_keeps_up_sees_every_byte(box: EndpointConnection) -> None:
    lines = "".join(f"{n}\n" for n in range(1, 60_001)).encode()
    job = Job(box, "for i in $(seq 1 60); do seq $(($i * 1000 - 999)) $(($i * 1000)); read x; done",
              stdin_open=True, max_output_bytes=1000)  # fmt: skip
    for number in range(1, 61):
        job.until(b"%d\n" % (number * 1000))
        job.tell(b"go\n")
    assert job.rest() == lines
    assert job.skipped == 0
    assert final(job)["truncated"] is True


def test_a_follower_who_is_late_is_told_what_is_missing(box: EndpointConnection) -> None:
    job = Job(box, "head -c 3000000 /dev/zero", max_output_bytes=1000)
    final(job)
    out = job.rest()
    assert len(out) + job.skipped == 3_000_000
    assert len(out) >= 256 * KIB


def test_reading_goes_on_where_it_ended_though_the_connection_breaks(box: EndpointConnection) -> None:
    job = Job(box, "for i in $(seq 1 200); do echo line $i; sleep 0.005; done")
    while job.running:
        job.read(0.2, max_bytes=100)
        for sock in sockets_of(box):
            sock.shutdown(2)
    assert job.rest() == "".join(f"line {n}\n" for n in range(1, 201)).encode()


def test_output_comes_in_batches(box: EndpointConnection) -> None:
    job = Job(box, "for i in $(seq 1 100); do echo $i; sleep 0.002; done")
    reads = 0
    while job.running:
        job.read(settle_s=0.05)
        reads += 1
    assert len(job.rest().split()) == 100
    assert reads < 60


def test_a_job_can_be_killed_with_all_it_started(box: EndpointConnection) -> None:
    job = Job(box, "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    job.until(b"ready")
    assert job.do("kill_job", job_id=job.id, signal="SIGTERM") == {"found": True, "running": True}
    assert final(job)["stdout"] == "ready\ncaught\n"
    assert job.do("kill_job", job_id=job.id, signal="SIGTERM") == {"found": False, "running": False}


def test_the_deadline_of_a_job_is_kept(box: EndpointConnection) -> None:
    job = Job(box, "echo begun; sleep 60", timeout_s=0.3)
    value = final(job)
    assert (value["timed_out"], value["stdout"]) == (True, "begun\n")


def test_what_is_no_job_is_told(box: EndpointConnection) -> None:
    for kind, args in (
        ("poll_job", {}),
        ("kill_job", {}),
        ("write_stdin", {}),
        ("resize_job", {"rows": 1, "cols": 1}),
        ("job_output", {"op_id": "none"}),
    ):
        assert isinstance(box.perform(op(kind, job_id="none", **args)).error, JobNotFound), kind
    refused = box.perform(op("execute_command", command="true", session="s", background=True)).error
    assert isinstance(refused, InvalidArgument)


def test_processes_are_told(box: EndpointConnection) -> None:
    job = Job(box, "exec sleep 61.5")
    wait_until(lambda: any("sleep" in p["command"] for p in job.do("list_processes")["processes"]), 10)
    found = job.do("list_processes")["processes"]
    sleeper = next(process for process in found if process["command"] == "sleep 61.5")
    assert sleeper["ppid"] == found[0]["pid"]
    assert sleeper["state"] == "S"
    assert sleeper["memory_bytes"] > 0
    assert 0 <= sleeper["started_s"] < 60
    assert len(found) == 2, found


# --- terminals -----------------------------------------------------------------------------------


def test_a_terminal_is_one(box: EndpointConnection) -> None:
    job = Job(box, "tty && echo $TERM && stty size && exec 3</dev/tty && echo mine", pty={"rows": 33, "cols": 111})
    out = job.rest().decode()
    assert re.fullmatch(r"/dev/pts/\d+\r\nxterm-256color\r\n33 111\r\nmine\r\n", out), out
    assert (final(job)["exit_code"], job.err) == (0, b"")


def test_a_shell_on_a_terminal_can_be_used(box: EndpointConnection) -> None:
    job = Job(box, "exec sh", pty={"rows": 24, "cols": 80}, env={"TERM": "dumb"})
    job.tell(b"echo $TERM $((6 * 7))\n")
    job.until(b"dumb 42\r\n")
    job.tell(b"sleep 60\n")
    wait_until(lambda: any("sleep 60" in p["command"] for p in job.do("list_processes")["processes"]), 10)
    job.tell(b"\x03")  # what a terminal makes SIGINT of
    job.tell(b"echo on; stty size\n")
    job.until(b"24 80")
    job.do("resize_job", job_id=job.id, rows=50, cols=132)
    job.tell(b"stty size\n")
    job.until(b"50 132")
    job.tell(b"", eof=True)
    assert final(job)["exit_code"] in (0, 130)


def test_the_end_of_a_terminal_ends_what_runs_on_it(box: EndpointConnection) -> None:
    job = Job(box, "sleep 62.5 & sleep 0.2; echo bye", pty={"rows": 24, "cols": 80})
    assert job.rest() == b"bye\r\n"
    wait_until(lambda: not any("62.5" in p["command"] for p in job.do("list_processes")["processes"]), 10)


def test_killing_a_terminal_kills_every_group_on_it(box: EndpointConnection) -> None:
    job = Job(box, "set -m; sleep 63.5 & sleep 63.5 & echo up; wait", pty={})
    job.until(b"up")
    assert job.do("kill_job", job_id=job.id, signal="SIGKILL")["found"] is True
    assert final(job)["signal"] == "SIGKILL"
    wait_until(lambda: not any("63.5" in p["command"] for p in job.do("list_processes")["processes"]), 10)


def test_a_command_without_a_terminal_has_no_size(box: EndpointConnection) -> None:
    job = Job(box, "sleep 60")
    assert isinstance(box.perform(op("resize_job", job_id=job.id, rows=2, cols=2)).error, InvalidArgument)
    job.do("kill_job", job_id=job.id, signal="SIGKILL")


def test_a_program_that_is_missing_ends_a_terminal_too(box: EndpointConnection) -> None:
    done = box.perform(op("execute_command", argv=["no-such-program"], pty={"rows": 24, "cols": 80})).value
    assert done["exit_code"] == 127


def test_a_large_paste_reaches_the_program(box: EndpointConnection) -> None:
    job = Job(box, "stty raw -echo; echo up; head -c 300000 | wc -c", pty={})
    job.until(b"up")
    job.tell(b"x" * 300_000)
    assert b"300000" in job.until(b"300000")


# --- answers of an enemy -----------------------------------------------------------------------


def lie(**fields: Any) -> dict[str, Any]:
    return {"status": "running", "offset": 3, "stderr_offset": 0, "skipped": 0, "stderr_skipped": 0, **fields}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"raw": [3, 0], "offset": 2}, b"abc"),
        ({"raw": [3, 0], "offset": 2**70}, b"abc"),
        ({"raw": [3, 0], "offset": -3}, b"abc"),
        ({"raw": [3, 0], "skipped": 1}, b"abc"),
        ({"raw": [2, 0]}, b"abc"),
        ({"raw": [4, 0]}, b"abc"),
        ({"raw": [4, -1]}, b"abc"),
        ({"raw": [True, 2]}, b"abc"),
        ({"raw": "ab"}, b"abc"),
        ({"raw": [3, 0], "status": 7}, b"abc"),
        ({"raw": [0, 0], "offset": 3}, b""),
        ({"raw": [200, 0], "offset": 200}, b"x" * 200),
    ],
)
def test_lies_about_output_are_refused(
    box: EndpointConnection, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], content: bytes
) -> None:
    job = Job(box, "sleep 60")
    real = box.on_reply

    def forged(channel: Any, call: Any, reply: Any, *, reusable: bool) -> None:
        body = json.dumps({"success": True, "data": lie(**fields)}).encode() + b"\n" + content
        real(channel, call, replace(reply, body=body), reusable=reusable)

    with monkeypatch.context() as patched:
        patched.setattr(box, "on_reply", forged)
        ended = box.perform(op("job_output", op_id=job.id, offset=0, stderr_offset=0, wait_s=0, max_bytes=100))
    assert ended.error is not None
    assert ended.error.code == "internal"
    job.do("kill_job", job_id=job.id, signal="SIGKILL")


def test_a_job_whose_sandbox_dies_is_in_doubt(sandboxd: Sandboxd, box: EndpointConnection) -> None:
    job = Job(box, "sleep 60")
    ended: list[Completion] = []
    box.recall(replace(op("execute_command"), op_id=job.id), ended.append)
    job.do("poll_job", job_id=job.id)
    sandboxd.kill()
    wait_until(lambda: ended, 20)
    assert isinstance(ended[0].error, OutcomeUnknown)
