"""Long commands on the command line: live output, background jobs, logs, signals, processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.integration.test_cli_completion import complete
from tests.services import wait_until

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]

SANDFLEET = (sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())")


@pytest.fixture
def run(fleet: Stack, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command against the fleet: its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["--redis-url", fleet.settings.redis_url, *words])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def open_exec(fleet: Stack) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `sandfleet WORDS` beside the test; its streams are pipes that nothing blocks on."""
    opened: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*SANDFLEET, "--redis-url", fleet.settings.redis_url, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        opened.append(process)
        return process

    yield start
    for process in opened:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.read() or b""


def job_in(run: Run, thread: str, command: str) -> str:
    code, out, err = run("exec", "--thread", thread, "--background", "--", command)
    assert code == 0, err
    return out.strip()


# --- exec --------------------------------------------------------------------------------------


def test_exec_prints_what_a_command_writes_while_it_runs(
    open_exec: Callable[..., subprocess.Popen[bytes]], provider: SandboxProvider
) -> None:
    process = open_exec(
        "exec", "-t", "live", "--", "echo first; until [ -e go ]; do sleep 0.1; done; echo last; exit 4"
    )
    assert wait_until(lambda: read(process), 20) == b"first\n"
    assert process.poll() is None
    sandbox = provider.get(provider.acquire("live"))
    assert sandbox is not None
    sandbox.write_file("/mnt/user-data/workspace/go", "")
    assert process.wait(20) == 4
    assert read(process) == b"last\n"


def test_exec_loses_and_doubles_no_byte_however_much_comes_at_once(fleet: Stack) -> None:
    # More than the stream keeps, and faster than it is read: what did not come live comes with the result.
    line = "head -c 6000000 /dev/zero | tr '\\0' x; echo; seq 1 20000; echo done >&2"
    done = subprocess.run(
        [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "exec", "-t", "much", "--", line],
        capture_output=True, timeout=50, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"x" * 6_000_000 + b"\n" + b"".join(b"%d\n" % n for n in range(1, 20_001))
    assert done.stderr == b"done\n"


# --- jobs --------------------------------------------------------------------------------------


def test_a_background_command_gives_an_id_by_which_everything_else_finds_it(run: Run) -> None:
    job_id = job_in(run, "job-1", "echo begun; trap 'echo told; exit 6' TERM; while :; do sleep 0.1; done")
    [listed] = [one for one in json.loads(run("jobs", "--json")[1])["jobs"] if one["job_id"] == job_id]
    assert (listed["thread_id"], listed["user_id"]) == ("job-1", None)
    assert job_id in run("jobs")[1]
    wait_until(lambda: run("logs", job_id)[1] == "begun\n", 20)
    assert "sleep" in run("ps", "--thread", "job-1")[1]
    code, out, _ = run("kill", job_id)
    assert code == 0
    assert "SIGTERM" in out
    code, out, _ = run("logs", "--follow", job_id)
    assert (code, out) == (6, "begun\ntold\n")
    remembered = json.loads(run("jobs", "--json", "--thread", "job-1")[1])["jobs"]
    assert [(one["job_id"], one["state"], one["exit_code"]) for one in remembered] == [(job_id, "exited", 6)]
    assert "had ended" in run("kill", job_id)[1]


def test_a_log_goes_on_where_an_earlier_one_stopped(run: Run) -> None:
    job_id = job_in(run, "job-2", "echo one; echo two >&2; until [ -e go ]; do sleep 0.1; done; echo three")

    def records() -> list[dict[str, Any]]:
        return [json.loads(line) for line in run("logs", "--json", job_id)[1].splitlines()]

    wait_until(lambda: {one.get("stream") for one in records()} == {"stdout", "stderr"}, 20)
    cursor = records()[-1]["cursor"]
    assert run("exec", "-t", "job-2", "--", "touch go")[0] == 0
    assert run("logs", "-f", "--after", cursor, job_id) == (0, "three\n", "")
    assert run("logs", job_id)[1:] == ("one\nthree\n", "two\n")


def test_ctrl_c_leaves_a_job_that_is_followed_running_and_says_where_to_go_on(
    run: Run, open_exec: Callable[..., subprocess.Popen[bytes]]
) -> None:
    job_id = job_in(run, "job-3", "echo begun; sleep 300")
    process = open_exec("logs", "-f", job_id)
    wait_until(lambda: read(process), 20)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.stderr is not None
    assert b"sandfleet logs -f --after" in (process.stderr.read() or b"")
    assert run("kill", "-s", "9", job_id)[0] == 0
    assert run("logs", "-f", job_id)[0] == 137


def test_jobs_that_run_complete(
    run: Run, fleet: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job_id = job_in(run, "job-4", "sleep 300")
    found = complete(monkeypatch, capfd, "--redis-url", fleet.settings.redis_url, "logs", job_id[:8])
    assert found == [f"plain,{job_id}"]
    monkeypatch.delenv("_SANDFLEET_COMPLETE")
    assert run("kill", "-s", "KILL", job_id)[0] == 0


def test_what_is_no_job_or_signal_is_told_with_what_to_type(run: Run, tmp_path: Path) -> None:
    for words in (("logs", "nothing"), ("kill", "nothing"), ("shell", "--job", "nothing")):
        code, _, err = run(*words)
        assert code == (2 if words[0] == "shell" else 4)
        assert "sandfleet" in err
    code, _, err = run("kill", "--signal", "TERMINATE", "nothing")
    assert code == 2
    assert "TERMINATE" in err
    code, _, err = run("ps", "--thread", "has-no-sandbox")
    assert code == 4
    assert "sandfleet exec --thread has-no-sandbox" in err
