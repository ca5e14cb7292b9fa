"""The part of the backend contract about jobs and terminals (`Capability.JOBS`, `Capability.PTY`)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from sandfleet.backends import Capability, Completion, Connection, Operation
from sandfleet.errors import JobNotFound, NotStarted, NotSupported
from sandfleet.ids import new_op_id
from sandfleet.testing.backend_world import World, wait_for

__all__ = ["JobContract"]

_FOLLOW_S = 40.0


class _Job:
    """A job, and what was read of it so far."""

    def __init__(self, world: World, connection: Connection, command: str, **args: Any) -> None:
        self.world, self.connection = world, connection
        self.out, self.err, self.running = b"", b"", True
        self._at = {"offset": 0, "stderr_offset": 0}
        started = world.value(connection, "execute_command", command=command, background=True, **args)
        assert set(started) == {"job_id", "pid"}
        self.id: str = started["job_id"]

    def read(self, wait_s: float = 1.0) -> None:
        op = Operation(new_op_id(), "job_output", {"op_id": self.id, "wait_s": wait_s, "max_bytes": 65536, **self._at})
        completion = self.connection.perform(op)
        assert completion.error is None, repr(completion.error)
        value, content = completion.value, completion.content or b""
        cut = value["stdout_bytes"]
        assert len(content) == cut + value["stderr_bytes"]
        assert (value["skipped"], value["stderr_skipped"]) == (0, 0)
        self.out, self.err = self.out + content[:cut], self.err + content[cut:]
        self._at = {name: value[name] for name in self._at}
        self.running = value["running"]

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + _FOLLOW_S
        while text not in self.out:
            assert self.running or time.monotonic() < deadline, f"no {text!r} in {self.out!r}"
            self.read()

    def all(self) -> bytes:
        deadline, known = time.monotonic() + _FOLLOW_S, -1
        while self.running or known < len(self.out) + len(self.err):
            assert time.monotonic() < deadline, self.out
            known = len(self.out) + len(self.err)
            self.read()
        return self.out

    def tell(self, data: bytes, **args: Any) -> None:
        assert self.world.value(self.connection, "write_stdin", data, job_id=self.id, **args) == {}

    def result(self) -> Any:
        return _recalled(self.connection, self.world.operation("execute_command", op_id=self.id, command="-")).value


def _recalled(connection: Connection, op: Operation) -> Completion:
    ended: list[Completion] = []
    connection.recall(op, ended.append)
    wait_for(lambda: ended, "the end of the operation")
    return ended[0]


class JobContract:
    """Mixed into `BackendContract`, which gives the fixtures."""

    @pytest.fixture
    def jobs(self, world: World, connection: Connection) -> Connection:
        """A fresh sandbox of a backend that runs jobs."""
        if Capability.JOBS not in world.backend.capabilities:
            pytest.skip(f"the backend does not declare {Capability.JOBS}")
        return connection

    @pytest.fixture
    def terminals(self, world: World, jobs: Connection) -> Connection:
        """A fresh sandbox of a backend that has terminals."""
        if Capability.PTY not in world.backend.capabilities:
            pytest.skip(f"the backend does not declare {Capability.PTY}")
        return jobs

    def test_without_jobs_they_are_refused(self, world: World, connection: Connection) -> None:
        if Capability.JOBS in world.backend.capabilities or Capability.COMMANDS not in world.backend.capabilities:
            pytest.skip("the backend has jobs, or not even commands")
        op = world.operation("execute_command", command="true", background=True)
        assert isinstance(connection.perform(op).error, NotSupported)

    def test_a_job_answers_when_it_runs_and_is_told_what_it_needs(self, world: World, jobs: Connection) -> None:
        job = _Job(world, jobs, "read line; echo got $line; echo bad >&2; exit 3", stdin_open=True)
        assert world.value(jobs, "poll_job", job_id=job.id)["running"] is True
        assert [known["job_id"] for known in world.value(jobs, "list_jobs")["jobs"]] == [job.id]
        job.tell(b"it\n")
        value = job.result()
        assert (value["stdout"], value["stderr"], value["exit_code"]) == ("got it\n", "bad\n", 3)
        assert (job.all(), job.err) == (b"got it\n", b"bad\n")
        told = world.value(jobs, "poll_job", job_id=job.id)
        assert (told["running"], told["exit_code"]) == (False, 3)
        assert world.code(jobs, "poll_job", job_id="no-such-job") == JobNotFound.code

    def test_the_output_of_a_job_is_followed_byte_by_byte(self, world: World, jobs: Connection) -> None:
        job = _Job(world, jobs, "for n in 1 2 3 4 5 6 7 8; do printf 'part %s\\377\\n' $n; sleep 0.05; done")
        assert job.all() == b"".join(b"part %d\xff\n" % n for n in range(1, 9))

    def test_a_job_hears_signals_and_ends_with_all_it_started(self, world: World, jobs: Connection) -> None:
        job = _Job(world, jobs, "trap 'echo heard' USR1; echo up; while :; do sleep 0.05; done")
        job.until(b"up\n")
        world.value(jobs, "kill_job", job_id=job.id, signal="SIGUSR1")
        job.until(b"heard\n")
        assert world.value(jobs, "kill_job", job_id=job.id, signal="SIGKILL")["found"] is True
        value = job.result()
        assert (value["exit_code"], value["signal"]) == (None, "SIGKILL")
        names = [process["command"] for process in world.value(jobs, "list_processes")["processes"]]
        assert not any("while" in name for name in names), names

    def test_the_deadline_holds_for_jobs(self, world: World, jobs: Connection) -> None:
        assert _Job(world, jobs, "sleep 60", timeout_s=0.2).result()["timed_out"] is True

    def test_what_has_not_begun_can_be_given_up_for_good(self, world: World, jobs: Connection) -> None:
        op = world.operation("execute_command", command="touch ran")
        assert isinstance(_recalled(jobs, op).error, NotStarted)
        assert isinstance(jobs.perform(op).error, NotStarted), "its request came late and was carried out"
        assert world.code(jobs, "stat", path="ran") == "path_not_found"

    def test_commands_are_remembered_with_their_note(self, world: World, jobs: Connection) -> None:
        op = world.operation("execute_command", command="true")
        jobs.perform(replace(op, note="a note"))
        assert [(each.running, each.note) for each in jobs.remembered() if each.op_id == op.op_id] == [
            (False, "a note")
        ]

    def test_a_change_repeated_under_its_id_is_made_once(self, world: World, jobs: Connection) -> None:
        op = world.operation("write_file", b"line\n", path="f", append=True)
        first = jobs.perform(op)
        assert jobs.perform(op).value == first.value
        assert _recalled(jobs, op).value == first.value
        assert world.read(jobs, "f") == b"line\n"

    def test_a_terminal_has_a_size_and_sends_signals(self, world: World, terminals: Connection) -> None:
        job = _Job(world, terminals, "stty size; exec sh", pty={"rows": 31, "cols": 99})
        job.until(b"31 99")
        world.value(terminals, "resize_job", job_id=job.id, rows=40, cols=120)
        job.tell(b"stty size\n")
        job.until(b"40 120")
        job.tell(b"sleep 64.5; echo $((6 * 7))\n")
        wait_for(
            lambda: [
                process
                for process in world.value(terminals, "list_processes")["processes"]
                if process["command"] == "sleep 64.5"
            ],
            "the command on the terminal",
        )
        job.tell(b"\x03")
        job.tell(b"echo $((60 + 7)) $TERM\n")
        job.until(b"67 xterm-256color")
        job.tell(b"exit 5\n")
        assert job.result()["exit_code"] == 5
        assert job.err == b""
