"""Jobs, terminals and what is remembered of changes, as sandboxd's routes tell it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet_workers.sandboxd import sandboxd
from tests.sandboxd.conftest import Answer, Sandboxd, alive, wait_until

MIB = 1024 * 1024


def output(box: Sandboxd, **fields: Any) -> tuple[Any, bytes, bytes]:
    head, _, follow = box.post("bash/output", encoding="raw", **fields).body.partition(b"\n")
    data = json.loads(head)["data"]
    cut = data["raw"][0]
    return data, follow[:cut], follow[cut:]


def asked(box: Sandboxd, op_id: str, **fields: Any) -> Answer:
    return box.post("sandfleet/op", op_id=op_id, **fields)


# --- changes ---------------------------------------------------------------------------------------


def test_a_repeated_change_gets_the_first_answer_and_is_not_made_again(box: Sandboxd, work: Path) -> None:
    query = "&append=1&op_id=append-1"
    answers = [box.put(work / "f", b"line\n", query).data for _ in range(3)]
    assert (work / "f").read_bytes() == b"line\n"
    assert answers[0]["size"] == 5
    assert answers == [answers[0]] * 3
    assert asked(box, "append-1").data == answers[0]


def test_a_refusal_is_remembered_as_well(box: Sandboxd, work: Path) -> None:
    fields = {"old": "a", "new": "b", "op_id": "replace-1"}
    assert box.fs("str_replace", work / "f", **fields).code == "path_not_found"
    (work / "f").write_text("a")
    assert box.fs("str_replace", work / "f", **fields).code == "path_not_found"
    assert (work / "f").read_text() == "a"
    assert box.fs("str_replace", work / "f", **{**fields, "op_id": "replace-2"}).data["count"] == 1


def test_one_id_is_one_operation(box: Sandboxd, work: Path) -> None:
    box.fs("make_dir", work / "d", op_id="one")
    assert box.fs("make_dir", work / "e", op_id="one").code == "op_exists"
    assert box.put(work / "f", b"x", "&op_id=one").code == "op_exists"
    assert box.exec("true", op_id="one").code == "op_exists"
    box.run("true", op_id="a-command")
    assert box.fs("make_dir", work / "e", op_id="a-command").code == "op_exists"
    assert box.fs("make_dir", work / "e", op_id="a b").code == "invalid_argument"
    assert not (work / "e").exists()


def test_reads_take_no_id(box: Sandboxd, work: Path) -> None:
    (work / "f").write_text("1")
    assert box.fs("read", work / "f", op_id="read-1").data["content"] == "1"
    (work / "f").write_text("2")
    assert box.fs("read", work / "f", op_id="read-1").data["content"] == "2"


def test_a_change_that_is_being_made_is_joined(box: Sandboxd, work: Path) -> None:
    for folder in range(40):
        (work / "tree" / str(folder)).mkdir(parents=True)
        for file in range(50):
            (work / "tree" / str(folder) / str(file)).touch()
    answers: list[Answer] = []

    def remove() -> None:
        body = {"do": "remove", "path": str(work / "tree"), "recursive": True, "op_id": "rm-1"}
        answers.append(box.request("POST", "/v1/sandfleet/fs", body, alone=True))

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.data for answer in answers] == [answers[0].data] * 4
    assert answers[0].data["removed"] is True
    assert asked(box, "rm-1", wait=True).data["removed"] is True


def test_an_answer_is_kept_small(box: Sandboxd, work: Path) -> None:
    path = work / ("d" * 200) / ("é" * 100) / ("x" * 250)
    deep = "/".join(["y" * 240] * 10)
    first = box.fs("make_dir", path / deep, op_id="deep-1").data
    assert first["path"].endswith(deep)
    again = asked(box, "deep-1")
    assert len(again.body) < 2048
    assert again.data["created"] is True


def test_an_upload_lands_once(box: Sandboxd, work: Path) -> None:
    upload = box.post("sandfleet/upload/begin", path=str(work / "f"), append=True).data["upload_id"]
    box.request("PUT", f"/v1/sandfleet/upload/chunk?id={upload}&offset=0", b"abc")
    answers = [box.post("sandfleet/upload/commit", id=upload, size=3, op_id="commit-1").data for _ in range(2)]
    assert answers[0] == answers[1]
    assert (work / "f").read_bytes() == b"abc"


def test_what_was_given_up_does_not_begin(box: Sandboxd, work: Path) -> None:
    for op_id in ("never-1", "never-2", "never-3"):
        assert asked(box, op_id).code == "op_not_found"
        assert asked(box, op_id, refuse=True).code == "op_refused"
        assert asked(box, op_id).code == "op_refused"
    assert box.exec("touch ran", op_id="never-1").code == "op_refused"
    assert box.exec("touch ran", op_id="never-1", session_id="s").code == "op_refused"
    assert box.put(work / "ran", b"", "&op_id=never-2").code == "op_refused"
    assert box.fs("make_dir", work / "ran", op_id="never-3").code == "op_refused"
    assert box.fs("make_dir", work / "ran", op_id="never-3.7").code == "op_refused", "a part of it"
    assert not (work / "ran").exists()


def test_what_has_begun_is_not_refused(box: Sandboxd) -> None:
    box.run("echo one", op_id="begun-1")
    assert asked(box, "begun-1", refuse=True).data["stdout"] == "one\n"
    assert asked(box, "begun-1.r1", refuse=True).code == "op_refused"
    box.run("true", op_id="batch-1.2")
    assert asked(box, "batch-1", refuse=True).code == "op_forgotten"
    assert asked(box, "batch-1.3", refuse=True).code == "op_refused"


def test_what_is_over_for_long_is_not_taken_for_what_never_began(start: Callable[..., Sandboxd]) -> None:
    box = start(limits={"keep_ops": 3, "keep_changes": 3})
    for number in range(8):
        box.run("true", op_id=f"c{number}")
        box.fs("make_dir", box.work / f"d{number}", op_id=f"d{number}")
    box.fs("make_dir", box.work / "part", op_id="b.0")
    for number in range(8, 13):
        box.fs("make_dir", box.work / f"d{number}", op_id=f"d{number}")
    wait_until(lambda: len(box.request("GET", "/v1/sandfleet/ops").data["ops"]) <= 6)
    for op_id in ("c0", "d0", "b.0", "b"):
        assert asked(box, op_id, refuse=True).code == "op_forgotten", op_id
    assert box.stats()["changes_kept"] <= 3


names = st.text("ab.0123", min_size=1, max_size=4)


@given(st.lists(names, max_size=40), st.integers(1, 8))
def test_traces_know_the_last_of_what_ended(ended: list[str], most: int) -> None:
    traces = sandboxd.Traces(most)
    for when, name in enumerate(ended):
        traces.add(name, when)
    assert all(name in traces for name in ended[-most:])
    assert len(traces.rows) == min(len(ended), most) * traces.ROW
    assert traces.lost_at == (len(ended) - most - 1 if len(ended) > most else float("-inf"))
    kept = set(ended[-most:])
    assert not any(name in traces for name in set(ended) - kept)


def test_what_left_no_trace_is_forgotten_for_an_hour() -> None:
    changes = sandboxd.Changes(dict(sandboxd.LIMITS))
    changes.past = sandboxd.Traces(2)
    assert changes.refuse("new", begun=False).code == "op_refused"
    for name in ("a", "b", "c"):
        changes.past.add(name, sandboxd.time.monotonic())
    assert changes.refuse("other", begun=False).code == "op_forgotten"
    assert changes.refuse("new", begun=False).code == "op_refused", "of that it is still certain"


def test_everything_remembered_is_listed(start: Callable[..., Sandboxd]) -> None:
    box = start()
    box.run("true", op_id="command-1", note="ünote")
    box.exec("sleep 60", op_id="job-1", async_mode=True)
    box.fs("make_dir", box.work / "d", op_id="change-1")
    listed = {each["op_id"]: each for each in box.request("GET", "/v1/sandfleet/ops").data["ops"]}
    assert {name: (each["kind"], each["running"], each["note"]) for name, each in listed.items()} == {
        "command-1": ("command", False, "ünote"),
        "job-1": ("command", True, ""),
        "change-1": ("change", False, ""),
    }
    assert (listed["command-1"]["background"], listed["job-1"]["background"]) == (False, True)
    assert box.exec("true", note="x" * 4097).code == "invalid_argument"
    assert box.exec("true", note=5).code == "invalid_argument"
    box.post("bash/kill", op_id="job-1", signal="SIGKILL")


# --- output ----------------------------------------------------------------------------------------


def test_raw_output_begins_at_any_byte(box: Sandboxd) -> None:
    box.run("printf 'a\\377\\200b'; printf 'err' >&2", op_id="raw-1")
    data, out, err = output(box, op_id="raw-1", offset=1, stderr_offset=2)
    assert (out, err) == (b"\xff\x80b", b"r")
    assert (data["offset"], data["stderr_offset"], data["stdout"]) == (4, 3, None)
    data, out, err = output(box, op_id="raw-1", offset=1, stderr_offset=0, max_bytes=2)
    assert (out, err, data["offset"], data["stderr_offset"]) == (b"\xff\x80", b"er", 3, 2)
    data, out, err = output(box, op_id="raw-1", offset=10**9, stderr_offset=3)
    assert (out, err, data["offset"], data["status"]) == (b"", b"", 4, "completed")


def test_output_is_gathered_for_a_moment(box: Sandboxd) -> None:
    box.exec("printf a; sleep 0.1; printf b; sleep 60", op_id="settle-1", async_mode=True)
    _, out, _ = output(box, op_id="settle-1", wait=True, settle=1.0)
    assert out == b"ab"
    box.post("bash/kill", op_id="settle-1", signal="SIGKILL")


def test_a_lot_of_output_is_not_waited_for(box: Sandboxd) -> None:
    box.exec("head -c 200000 /dev/zero; sleep 60", op_id="lot-1", async_mode=True)
    wait_until(lambda: asked(box, "lot-1", encoding="none").data["stdout_bytes"] == 200_000)
    _, out, _ = output(box, op_id="lot-1", wait=True, settle=1.0)
    assert len(out) == 200_000
    box.post("bash/kill", op_id="lot-1", signal="SIGKILL")


@given(st.lists(st.integers(0, 70_000), max_size=12), st.integers(1, 3000), st.integers(0, 3000), st.data())
def test_a_window_keeps_at_least_what_it_promises(
    pieces: list[int], cap: int, window: int, data: st.DataObject
) -> None:
    stream, whole = sandboxd.Stream(cap, window), b""
    for number, size in enumerate(pieces):
        piece = bytes([number]) * size
        stream.feed(piece)
        whole += piece
    assert stream.kept() == (whole if len(whole) <= cap else whole[: cap - cap // 2] + whole[len(whole) - cap // 2 :])
    assert stream.discarded == len(whole) - len(stream.kept())
    offset = data.draw(st.integers(0, len(whole) + 5))
    found, at, skipped = stream.since(offset, 10**6)
    assert found == whole[at : at + len(found)]
    assert skipped == max(0, at - offset)
    if len(whole) - offset <= max(window, cap // 2):
        assert (skipped, found) == (0, whole[offset:])


def test_a_stdin_write_is_taken_once(box: Sandboxd) -> None:
    box.exec("cat", op_id="cat-1", async_mode=True, stdin_open=True)
    for _ in range(3):
        assert box.post("bash/write", op_id="cat-1", input="x", change_id="w1").data["accepted_bytes"] == 1
    box.post("bash/write", op_id="cat-1", input="y", eof=True, change_id="w2")
    assert asked(box, "cat-1", wait=True).data["stdout"] == "xy"
    assert box.post("bash/kill", op_id="cat-1", change_id="w2").code == "op_exists"


# --- terminals -------------------------------------------------------------------------------------


def test_a_terminal_command_has_one_stream_and_a_window(box: Sandboxd) -> None:
    data = box.run("tty >&2; stty size; exit 4", pty={"rows": 7, "cols": 9})
    assert data["stdout"].startswith("/dev/pts/")
    assert data["stdout"].endswith("\r\n7 9\r\n")
    assert (data["stderr"], data["exit_code"]) == ("", 4)
    for size in ({}, {"rows": 0, "cols": 1}, {"rows": 1, "cols": 10**6}, {"rows": "1", "cols": 1}):
        assert box.exec("true", pty=size).code == "invalid_argument", size
    assert box.exec("true", pty=[1]).code == "invalid_argument"
    assert box.exec("true", pty={"rows": 1, "cols": 1}, session_id="s").code == "invalid_argument"


def test_terminals_leave_no_descriptors_and_processes_behind(start: Callable[..., Sandboxd]) -> None:
    box = start()
    size = {"rows": 2, "cols": 2}
    box.run("true", pty=size)
    before = box.stats()["fds"]
    for _ in range(20):
        box.run("true", pty=size)
        box.exec(None, argv=["none"], pty=size)
        box.exec("true", pty=size, exec_dir="/none")
    box.exec("sleep 65.5", pty=size, op_id="t1", async_mode=True)
    pid = asked(box, "t1").data["pid"]
    box.post("bash/kill", op_id="t1", signal="SIGHUP")
    assert asked(box, "t1", wait=True).data["signal"] == "SIGHUP"
    wait_until(lambda: not alive(pid))
    wait_until(lambda: box.stats()["fds"] == before, story=box.stats)
    assert box.stats()["zombies"] == 0


def test_a_sandbox_without_terminals_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(sandboxd.os, "openpty", none)
    with pytest.raises(sandboxd.ApiError) as caught:
        sandboxd.open_terminal(2, 2)
    assert (caught.value.code, caught.value.status) == ("not_supported", 501)


# --- processes and orphans -------------------------------------------------------------------------


def test_processes_below_it_are_listed_and_no_others(box: Sandboxd) -> None:
    box.exec("sleep 66.5 & exec -a 'odd name' sleep 66.5", op_id="p1", async_mode=True, shell="bash")

    def listed() -> Any:
        return box.request("GET", "/v1/sandfleet/processes").data["processes"]

    sleepers = {"sleep 66.5", "odd name 66.5"}
    wait_until(lambda: {each["command"] for each in listed() if "66.5" in each["command"]} == sleepers, story=listed)
    found = listed()
    assert found[0]["pid"] == box.process.pid
    assert all(len(each["command"]) <= 200 and each["cpu_s"] >= 0 for each in found)
    assert os.getpid() not in [each["pid"] for each in found]
    box.post("bash/kill", op_id="p1", signal="SIGKILL")


@pytest.mark.slow
def test_a_sandbox_nobody_comes_back_to_ends_with_all_it_runs(start: Callable[..., Sandboxd]) -> None:
    box = start(orphan_s=0.5)
    pid = box.exec("sleep 67.5", op_id="o1", async_mode=True).data["pid"]
    assert box.client is not None
    with pytest.raises(subprocess.TimeoutExpired):
        # It looks every 5 s. As long as a connection is open, however idle, somebody is there.
        box.process.wait(6.0)
    box.client.close()
    box.client = None
    assert box.process.wait(20) == 0
    wait_until(lambda: not alive(pid))


def test_a_signal_number_is_a_signal(box: Sandboxd) -> None:
    box.exec("sleep 60", op_id="s1", async_mode=True)
    assert box.post("bash/kill", op_id="s1", signal=int(signal.SIGKILL)).data["signalled"] is True
