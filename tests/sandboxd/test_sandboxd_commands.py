"""One-shot commands: what they answer, what they leave behind, and what may not happen twice."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.sandboxd.conftest import Sandboxd, alive, from_base64, wait_until


def test_a_command_answers_with_its_streams_and_exit_code(box: Sandboxd) -> None:
    result = box.run("echo out; echo err >&2; exit 3")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)
    assert result["status"] == "completed"
    assert not result["truncated"]
    assert result["duration_s"] > 0


def test_commands_start_in_the_configured_directory_with_the_configured_environment(box: Sandboxd) -> None:
    assert box.run("pwd; echo $MARK $MORE", env={"MORE": "m"})["stdout"] == f"{box.work}\nset m\n"
    assert box.run("echo [${MARK-gone}]", env={"MARK": None})["stdout"] == "[gone]\n"
    assert box.run("pwd", exec_dir="/usr")["stdout"] == "/usr\n"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"exec_dir": "/nowhere/at/all"}, "path_not_found"),
        ({"exec_dir": "/proc/self"}, "invalid_argument"),
        ({"exec_dir": "/a\0b"}, "invalid_argument"),
        ({"env": {"A=B": "x"}}, "invalid_argument"),
        ({"env": {"A": "\0"}}, "invalid_argument"),
        ({"argv": ["true"]}, "invalid_argument"),
        ({"command": ["true"]}, "invalid_argument"),
        ({"command": "a\0b"}, "invalid_argument"),
        ({"hard_timeout": float("nan")}, "invalid_argument"),
        ({"shell": "/no/such/shell"}, "path_not_found"),
        ({"hard_timeout": "soon"}, "invalid_argument"),
        ({"op_id": "white space"}, "invalid_argument"),
        ({"encoding": "latin-1"}, "invalid_argument"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(box: Sandboxd, fields: dict[str, Any], code: str) -> None:
    assert box.exec(**{"command": "true", **fields}).code == code


def test_an_argv_needs_no_shell_and_a_missing_program_ends_as_127(box: Sandboxd) -> None:
    assert box.run(argv=["printf", "%s|", "$HOME", "-rf", "a b\n"])["stdout"] == "$HOME|-rf|a b\n|"
    missing = box.run(argv=["no-such-program"])
    assert missing["exit_code"] == 127
    assert "no-such-program" in missing["stderr"]
    assert box.run(argv=["/etc"])["exit_code"] == 126


def test_a_command_far_longer_than_one_kernel_argument_runs(box: Sandboxd) -> None:
    for shell in ("bash", "sh"):
        assert box.run(f"printf %s {'x' * 500_000} | wc -c", shell=shell)["stdout"].strip() == "500000"
    many = ["x" * 1000] * 500
    assert box.run(argv=["sh", "-c", "echo $#", "sh", *many])["stdout"] == "500\n"
    assert box.run("echo ${#V3}", env={f"V{i}": "x" * 100_000 for i in range(5)})["stdout"] == "100000\n"


def test_fifty_mebibytes_of_stdin_reach_the_command_and_end(box: Sandboxd) -> None:
    text = "0123456789abcde\n" * (50 * 65536)
    result = box.run("sha256sum", stdin=text)
    assert result["stdout"].split()[0] == hashlib.sha256(text.encode()).hexdigest()


def test_stdin_is_at_its_end_when_none_is_given(box: Sandboxd) -> None:
    assert box.run("cat; echo done", hard_timeout=5)["stdout"] == "done\n"


def test_a_background_child_neither_holds_the_answer_nor_dies_with_it(box: Sandboxd) -> None:
    begun = time.monotonic()
    result = box.run("sleep 71.5 & echo $!")
    assert time.monotonic() - begun < 1
    pid = int(result["stdout"])
    assert alive(pid)
    assert box.post("bash/kill", op_id=result["op_id"], signal="SIGKILL").data["signalled"]
    wait_until(lambda: not alive(pid))


def test_a_background_child_may_go_on_writing_to_the_commands_pipes(box: Sandboxd) -> None:
    # Far more than a pipe holds: it would block if nobody read, and die of SIGPIPE if the pipe were closed.
    result = box.run("(sleep 0.3; head -c 300000 /dev/zero; echo $? > survived) & true")
    survived = box.work / "survived"
    wait_until(lambda: survived.exists() and survived.read_text())
    assert survived.read_text() == "0\n"
    assert result["exit_code"] == 0
    wait_until(lambda: box.stats()["orphan_pipes"] == 0)


def test_the_deadline_kills_the_whole_group_and_keeps_the_partial_output(box: Sandboxd) -> None:
    result = box.run("sleep 72.5 & echo $!; trap '' TERM; sleep 73.5", hard_timeout=0.3)
    assert result["timed_out"]
    assert result["status"] == "timed_out"
    assert result["exit_code"] is None
    wait_until(lambda: not alive(int(result["stdout"])))
    assert not alive(result["pid"])


def test_the_deadline_reaches_children_in_other_groups_of_the_session(box: Sandboxd) -> None:
    result = box.run("set -m; sleep 74.5 & echo $!; wait", hard_timeout=0.3)
    assert result["timed_out"]
    wait_until(lambda: not alive(int(result["stdout"].split()[0])))


def test_a_hundred_megabytes_of_output_are_capped_with_flat_memory(box: Sandboxd) -> None:
    before = box.stats()["rss_bytes"]
    result = box.run("head -c 100000000 /dev/zero | tr '\\0' a; echo END", max_output_length=65536)
    assert result["stdout_bytes"] == 100_000_004
    assert result["truncated"]
    assert result["stdout_discarded"] == 100_000_004 - 65536
    assert f"[{result['stdout_discarded']} bytes discarded]" in result["stdout"]
    assert result["stdout"].endswith("END\n")
    assert box.stats()["rss_bytes"] - before < 16 * 1024 * 1024


def test_raw_bytes_come_back_as_base64(box: Sandboxd) -> None:
    result = box.run("printf '\\377\\000x'", encoding="base64")
    assert from_base64(result["stdout"]) == b"\xff\0x"
    assert box.run("printf '\\377x'")["stdout"] == "\ufffdx"


def test_streams_can_be_combined_in_their_true_order(box: Sandboxd) -> None:
    assert box.run("echo 1; echo 2 >&2; echo 3", combine=True)["stdout"] == "1\n2\n3\n"


def test_a_command_given_twice_with_one_op_id_runs_once(box: Sandboxd) -> None:
    marks = box.work / "marks"
    command, answers = f"echo x >> {marks}; sleep 0.3; echo done", []
    threads = [
        threading.Thread(target=lambda: answers.append(box.run(command, op_id="twice", alone=True))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.append(box.run(command, op_id="twice"))
    assert marks.read_text() == "x\n"
    assert len({answer["pid"] for answer in answers}) == 1
    assert [answer["stdout"] for answer in answers] == ["done\n"] * 4
    assert box.exec("another", op_id="twice").code == "op_exists"


def test_an_op_outlives_its_output_so_that_it_still_never_runs_twice(start: Callable[..., Sandboxd]) -> None:
    box = start(limits={"keep_bytes": 100_000})
    big = "echo x >> marks; head -c 90000 /dev/zero | tr '\\0' a"
    assert len(box.run(big, op_id="first")["stdout"]) == 90_000
    assert len(box.run(big, op_id="second")["stdout"]) == 90_000
    wait_until(lambda: box.stats()["ops_kept_bytes"] <= 100_000)
    again = box.run(big, op_id="first")
    assert again["output_dropped"]
    assert again["exit_code"] == 0
    assert (box.work / "marks").read_text() == "x\n" * 2


def test_a_lost_connection_does_not_stop_the_command_and_its_answer_is_kept(box: Sandboxd) -> None:
    with box.raw_socket() as sock:
        body = b'{"command": "sleep 0.2; echo kept", "op_id": "left"}'
        head = "POST /v1/bash/exec HTTP/1.1\r\nAuthorization: Bearer the-token-of-the-tests\r\n"
        sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: "left" in [op["op_id"] for op in box.request("GET", "/v1/sandfleet/ops").data["ops"]])
    assert box.post("sandfleet/op", op_id="left", wait=True).data["stdout"] == "kept\n"
    assert box.post("sandfleet/op", op_id="never-seen").code == "op_not_found"


def test_a_soft_timeout_only_holds_the_answer(box: Sandboxd) -> None:
    first = box.run("echo a; sleep 0.3; echo b", timeout=0.1)
    assert first["status"] == "running"
    assert first["stdout"] == "a\n"
    assert box.post("sandfleet/op", op_id=first["op_id"], wait=True).data["stdout"] == "a\nb\n"


def test_output_is_followed_while_it_comes_and_never_inside_a_character(box: Sandboxd) -> None:
    command = "for i in 1 2 3; do printf '\\303'; sleep 0.05; printf '\\244'; done"
    op = box.run(command, async_mode=True)
    assert op["status"] == "running"
    text, offset = "", 0
    while True:
        answer = box.post("bash/output", op_id=op["op_id"], offset=offset, wait=True, wait_timeout=5).data
        text, offset = text + answer["stdout"], answer["offset"]
        if answer["status"] != "running" and not answer["stdout"]:
            break
    assert text == "äää"
    assert answer["exit_code"] == 0


def test_stdin_that_was_left_open_can_be_written_and_ended(box: Sandboxd) -> None:
    op = box.run("cat; echo over", async_mode=True, stdin_open=True)["op_id"]
    assert box.post("bash/write", op_id=op, input="one\n").data["accepted_bytes"] == 4
    assert box.post("bash/output", op_id=op, wait=True).data["stdout"] == "one\n"
    box.post("bash/write", op_id=op, input="two\n", eof=True)
    assert box.post("sandfleet/op", op_id=op, wait=True).data["stdout"] == "one\ntwo\nover\n"
    assert box.post("bash/write", op_id=op, input="x").code == "invalid_argument"


def test_a_cancelled_command_says_so_to_whoever_waits(box: Sandboxd) -> None:
    op = box.run("echo begun; sleep 75.5", async_mode=True)["op_id"]
    box.post("bash/output", op_id=op, wait=True)
    assert box.post("bash/kill", op_id=op, signal="SIGKILL").data["signalled"]
    result = box.post("sandfleet/op", op_id=op, wait=True).data
    assert (result["status"], result["cancelled"], result["signal"]) == ("killed", True, "SIGKILL")
    assert (result["exit_code"], result["stdout"]) == (137, "begun\n")
    assert box.post("bash/kill", op_id="never-seen").code == "op_not_found"


def test_two_hundred_commands_leave_no_descriptor_and_no_zombie(box: Sandboxd) -> None:
    box.run("true")
    wait_until(lambda: box.stats()["orphan_pipes"] == 0)
    before = box.stats()["fds"]
    for i in range(200):
        assert box.run(f"(true; exec true) & exit {i % 5}", stdin="x", shell="sh")["exit_code"] == i % 5
    wait_until(lambda: box.stats()["zombies"] == 0 and box.stats()["orphan_pipes"] == 0, story=box.stats)
    assert box.stats()["fds"] == before


def test_children_get_plain_signals_no_stray_descriptors_and_a_session_of_their_own(box: Sandboxd) -> None:
    names = box.run(argv=["ls", "/proc/self/fd"])["stdout"].split()
    assert names == ["0", "1", "2", "3"]  # 3 is the directory that ls reads
    status = box.run(argv=["cat", "/proc/self/status"])["stdout"]
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigIgn", "SigBlk")))
    # glibc's posix_spawn leaves its two internal signals, 32 and 33, ignored; nobody may use them anyway.
    assert {int(mask, 16) & 0x7FFFFFFF for mask in masks.values()} == {0}
    fields = box.run(argv=["cat", "/proc/self/stat"])["stdout"].split()
    assert fields[0] == fields[4] == fields[5]


def test_orphans_of_double_forks_are_reaped(box: Sandboxd) -> None:
    pid = int(box.run("(setsid sh -c 'echo $$; exec sleep 0.1' &) ; sleep 0.05")["stdout"])
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_child_that_closes_its_output_is_still_waited_for(box: Sandboxd) -> None:
    result = box.run("exec >&- 2>&-; sleep 0.2; exit 9")
    assert result["exit_code"] == 9
    assert result["duration_s"] >= 0.2


def test_signals_that_would_end_an_ordinary_process_are_ignored(box: Sandboxd) -> None:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        box.process.send_signal(sig)
    assert box.run("echo well")["stdout"] == "well\n"


def test_more_commands_than_allowed_are_refused_as_busy(start: Callable[..., Sandboxd]) -> None:
    box = start(limits={"max_ops": 2})
    for _ in range(2):
        box.run("sleep 76.5", async_mode=True)
    refused = box.exec("true")
    assert (refused.status, refused.code) == (503, "too_busy")
    assert refused.error["facts"] == {"limit": "max_ops"}


def test_a_flood_of_output_does_not_delay_other_commands(box: Sandboxd) -> None:
    flood = box.run("yes", async_mode=True, hard_timeout=20)["op_id"]
    slowest = max(box.run("true")["duration_s"] for _ in range(20))
    box.post("bash/kill", op_id=flood, signal="SIGKILL")
    assert slowest < 2


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "false",
        "ls -la /usr",
        "pwd",
        "echo a  b",
        "nosuchprogram x",
        "/etc/hostname",
        "printf %s x",
        "cd /",
        "exit 3",
    ],
)
def test_a_command_without_shell_syntax_ends_as_it_does_in_the_shell(box: Sandboxd, command: str) -> None:
    short = box.run(command)
    by_shell = box.run(command, shell="bash")
    for field in ("stdout", "stderr", "exit_code"):
        assert short[field] == by_shell[field]
