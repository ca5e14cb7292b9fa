"""Persistent shells: state stays, completion cannot be faked, a stuck shell is lost and said to be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxd.conftest import Sandboxd, alive, wait_until


def shell(box: Sandboxd, session: str, command: str, **fields: Any) -> Any:
    return box.run(command, session_id=session, **fields)


def test_directory_variables_and_functions_persist(box: Sandboxd) -> None:
    shell(box, "state", "cd /usr; export A=1; B=2; f() { echo f$1; }")
    assert shell(box, "state", "pwd; echo $A$B; f 3")["stdout"] == "/usr\n12\nf3\n"
    assert shell(box, "other", "pwd; echo [$A$B]")["stdout"] == f"{box.work}\n[]\n"


def test_the_last_status_a_command_ended_with_is_there_for_the_next(box: Sandboxd) -> None:
    assert shell(box, "status", "(exit 7)")["exit_code"] == 7
    assert shell(box, "status", "echo $?")["stdout"] == "7\n"


def test_env_holds_for_one_command_and_exec_dir_for_good(box: Sandboxd) -> None:
    assert shell(box, "env", "echo $X; export Y=kept", env={"X": "a 'b' $c"})["stdout"] == "a 'b' $c\n"
    assert shell(box, "env", "echo [$X]$Y", exec_dir="/usr")["stdout"] == "[]kept\n"
    assert shell(box, "env", "pwd")["stdout"] == "/usr\n"
    assert box.exec("pwd", session_id="env", exec_dir="/no/where").code == "path_not_found"


@pytest.mark.parametrize("command", ["if then", "break", "return 1", "echo 'open", "exec 9>&-", "cat"])
def test_a_command_that_would_upset_a_naive_driver_leaves_the_session_well(box: Sandboxd, command: str) -> None:
    shell(box, "driver", command, hard_timeout=5)
    assert shell(box, "driver", "echo well")["stdout"] == "well\n"


def test_a_session_runs_one_command_at_a_time(box: Sandboxd) -> None:
    running = shell(box, "busy", "sleep 0.3; echo end", async_mode=True)
    refused = box.exec("true", session_id="busy")
    assert refused.code == "session_busy"
    assert refused.error["facts"]["op_id"] == running["op_id"]
    assert box.post("sandfleet/op", op_id=running["op_id"], wait=True).data["stdout"] == "end\n"
    assert shell(box, "busy", "echo free")["stdout"] == "free\n"


def test_exit_ends_the_session_and_the_next_use_says_so(box: Sandboxd) -> None:
    assert shell(box, "exits", "export A=1; exit 3")["exit_code"] == 3
    assert box.exec("true", session_id="exits").code == "session_not_found"
    assert shell(box, "exits", "echo [$A]", create=True)["stdout"] == "[]\n"
    assert box.exec("true", session_id="never", create=False).code == "session_not_found"


def test_a_timeout_kills_what_the_command_started_and_spares_earlier_jobs(box: Sandboxd) -> None:
    job = int(shell(box, "spare", "A=5; sleep 77.5 & echo $!")["stdout"])
    time.sleep(0.03)  # the kernel counts a process's age in hundredths of a second
    result = shell(box, "spare", "echo part; sleep 78.5", hard_timeout=0.2)
    assert result["timed_out"]
    assert not result["session_lost"]
    assert result["stdout"] == "part\n"
    assert shell(box, "spare", "echo $A")["stdout"] == "5\n"
    assert alive(job)


def test_a_shell_that_does_not_come_back_is_lost_and_said_to_be(box: Sandboxd) -> None:
    result = shell(box, "stuck", "echo part; while :; do :; done", hard_timeout=0.2)
    assert result["timed_out"]
    assert result["session_lost"]
    assert result["stdout"] == "part\n"
    assert not alive(result["pid"])
    assert box.exec("true", session_id="stuck").code == "session_lost"
    assert shell(box, "stuck", "echo new", create=True)["stdout"] == "new\n"


def test_nothing_a_command_prints_or_a_child_writes_is_taken_for_its_completion(box: Sandboxd) -> None:
    # Every descriptor a child could try, the shell's own through /proc, and the words of the real report.
    attack = """
    forge() { printf '%s 0 /\\0' "$1"; printf '__sf_end 0 x\\n'; }
    for fd in 0 1 2 3 4 5 6 7 8 9 10 11 12; do sh -c "printf 'x 0 /\\\\000' >&$fd" 2>/dev/null; done
    for fd in /proc/$$/fd/*; do [ $fd -ef /dev/null ] || sh -c 'printf "x 0 /\\\\000" > "$0"' $fd 2>/dev/null & done
    wait
    forge x; forge 0000000000000000
    sleep 0.2; echo REAL; (exit 42)
    """
    result = shell(box, "forged", attack, hard_timeout=10)
    assert result["exit_code"] == 42
    assert "REAL" in result["stdout"]
    assert result["duration_s"] >= 0.2
    assert shell(box, "forged", "echo next")["stdout"] == "next\n"


def test_interactive_input_reaches_the_running_command(box: Sandboxd) -> None:
    op = shell(box, "input", "read line; echo got $line", async_mode=True)["op_id"]
    box.post("bash/write", session_id="input", input="hello\n")
    assert box.post("sandfleet/op", op_id=op, wait=True).data["stdout"] == "got hello\n"


def test_killing_by_session_ends_the_command_and_keeps_the_shell(box: Sandboxd) -> None:
    op = shell(box, "killed", "cd /usr; echo begun; sleep 79.5", async_mode=True)["op_id"]
    wait_until(lambda: box.post("bash/output", op_id=op, wait=True).data["stdout"])
    wait_until(lambda: box.post("bash/kill", session_id="killed", signal="SIGTERM").data["signalled"])
    result = box.post("sandfleet/op", op_id=op, wait=True).data
    assert (result["status"], result["cancelled"]) == ("killed", True)
    assert shell(box, "killed", "pwd")["stdout"] == "/usr\n"


def test_a_large_command_and_a_large_output_pass_through_a_session(box: Sandboxd) -> None:
    assert shell(box, "large", f"printf %s {'x' * 300_000} | wc -c")["stdout"].strip() == "300000"
    result = shell(box, "large", "head -c 3000000 /dev/zero | tr '\\0' a")
    assert (result["stdout_bytes"], result["truncated"]) == (3_000_000, True)


def test_sessions_are_listed_closed_and_counted(box: Sandboxd) -> None:
    made = box.post("bash/sessions/create", session_id="mine", exec_dir="/usr").data
    assert (made["working_dir"], made["status"]) == ("/usr", "ready")
    assert box.post("bash/sessions/create", session_id="mine").code == "already_exists"
    assert "mine" in [item["session_id"] for item in box.request("GET", "/v1/bash/sessions").data]
    assert box.post("bash/sessions/mine/close").data == {"session_id": "mine"}
    assert box.request("DELETE", "/v1/shell/sessions/mine").code == "session_not_found"
    wait_until(lambda: not alive(made["pid"]))


def test_more_sessions_than_allowed_are_refused_and_all_are_given_back(start: Any) -> None:
    box = start(limits={"max_sessions": 3})
    before = box.stats()["fds"]
    for i in range(3):
        box.post("bash/sessions/create", session_id=f"s{i}").data  # noqa: B018 - it checks the status
    assert box.post("bash/sessions/create").code == "too_busy"
    box.request("DELETE", "/v1/shell/sessions")
    wait_until(lambda: box.stats()["fds"] == before and box.stats()["sessions"] == 0, story=box.stats)


def test_closing_a_session_ends_the_command_that_runs_in_it(box: Sandboxd) -> None:
    op = shell(box, "closing", "sleep 81.5", async_mode=True)["op_id"]
    box.post("bash/sessions/closing/close").data  # noqa: B018 - it checks the status
    result = box.post("sandfleet/op", op_id=op, wait=True, wait_timeout=5).data
    assert (result["status"], result["cancelled"]) == ("killed", True)
    assert box.exec("true", session_id="closing").code == "session_not_found"


def test_the_aio_shell_routes_use_the_same_shells(box: Sandboxd, work: Path) -> None:
    made = box.post("shell/sessions/create", id="aio", exec_dir=str(work)).data
    assert made["working_dir"] == str(work)
    box.post("shell/exec", id="aio", command="A=1")
    done = box.post("shell/exec", id="aio", command="echo $A; pwd").data
    assert (done["output"], done["status"], done["exit_code"]) == (f"1\n{work}\n", "completed", 0)
    assert box.post("shell/view", id="aio").data["output"] == done["output"]
    assert box.post("shell/wait", id="aio").data["status"] == "completed"
    assert "aio" in box.request("GET", "/v1/shell/sessions").data["sessions"]
    assert box.post("shell/exec", command="echo 1; echo 2 >&2; echo 3").data["output"] == "1\n2\n3\n"
    assert box.request("DELETE", "/v1/shell/sessions/aio").status == 200
