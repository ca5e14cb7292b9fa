"""The command line against a real fleet."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandfleet import CommandResult, SandboxProvider
from sandfleet.cli import main
from sandfleet.errors import InvalidArgument
from sandfleet.stack import Stack
from tests.services import require, wait_until

Run = Callable[..., tuple[int, str, str]]
Ask = Callable[..., dict[str, Any]]

SANDFLEET = (sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())")
_NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture
def run(fleet: Stack, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command against the fleet: its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["--redis-url", fleet.settings.redis_url, *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def ask(run: Run) -> Ask:
    """Run a command with ``--json`` that must succeed; its document."""

    def call(name: str, *words: str) -> dict[str, Any]:
        code, out, err = run(name, "--json", *words)
        assert code == 0, out + err
        document: dict[str, Any] = json.loads(out)
        return document

    return call


@pytest.fixture
def runaway(fleet: Stack, provider: SandboxProvider) -> Iterator[tuple[str, str, Any]]:
    """A command that runs until it is ended: its op id, its node and the future of its result."""
    sandbox = provider.get(provider.acquire("runaway"))
    assert sandbox is not None
    op_id = os.urandom(8).hex()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: sandbox.run("sleep 50", op_id=op_id, timeout_s=55))
        try:
            wait_until(lambda: (view := fleet.store.op(op_id)) is not None and view.state == "claimed", 10)
            info = fleet.store.sandbox(sandbox.id)
            assert info is not None
            yield op_id, info.node_id, future
        finally:
            if not future.done():
                sandbox.cancel(op_id)


# --- exec --------------------------------------------------------------------------------------


def test_exec_gives_both_streams_and_the_exit_code_of_its_command(run: Run, ask: Ask) -> None:
    assert run("exec", "--thread", "alice", "--", "echo out; echo err >&2; exit 5") == (5, "out\n", "err\n")
    [sandbox] = ask("ls", "--thread", "alice")["sandboxes"]
    assert sandbox["state"] == "warm", "exec did not release its sandbox"


def test_exec_takes_an_argv_literally(run: Run) -> None:
    code, out, _ = run(
        "exec", "-t", "alice", "--cwd", "/tmp", "--env", "K=a b", "--", "sh", "-c", 'echo "$K" $1; pwd', "sh", "*"
    )
    assert (code, out) == (0, "a b *\n/tmp\n")


def test_exec_tells_a_timeout_with_124_and_a_signal_with_128_more(run: Run) -> None:
    code, out, err = run("exec", "-t", "alice", "--timeout", "0.3", "--", "echo begun; sleep 20")
    assert (code, out) == (124, "begun\n")
    assert "timeout" in err
    assert run("exec", "-t", "alice", "--", "kill -KILL $$")[0] == 137


def test_exec_passes_on_what_is_piped_in(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text("one\ntwo\n")
    with (tmp_path / "in").open() as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert run("exec", "-t", "alice", "--", "wc -l")[1].strip() == "2"
    with (tmp_path / "in").open() as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert run("exec", "-t", "alice", "--no-stdin", "--", "wc -l")[1].strip() == "0"


def test_exec_as_json_is_one_document(run: Run) -> None:
    code, out, err = run("exec", "--json", "--user", "u1", "--thread", "alice", "--", "echo out; exit 3")
    told = json.loads(out)
    assert (code, err) == (3, "")
    assert (told["stdout"], told["exit_code"], told["exit_status"], told["user_id"]) == ("out\n", 3, 3, "u1")


def test_exec_passes_bytes_through_in_both_directions(fleet: Stack) -> None:
    data = bytes(range(256)) * 40
    done = subprocess.run(
        [
            *SANDFLEET,
            "--redis-url",
            fleet.settings.redis_url,
            "exec",
            "-t",
            "bytes",
            "--",
            "cat; head -c 3 >&2 /dev/zero",
        ],
        input=data,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"\0\0\0")


def test_exec_reads_a_terminal_when_told_to(fleet: Stack) -> None:
    ours, terminal = pty.openpty()
    words = [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "exec", "-i", "-t", "alice", "--", "wc -w"]
    with subprocess.Popen(words, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        os.close(terminal)
        os.write(ours, b"three words typed\n\x04")
        try:
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    os.close(ours)
    assert (child.returncode, out.strip(), err) == (0, "3", "")


def test_output_that_is_not_text_is_given_whole_to_who_asks_for_it(provider: SandboxProvider) -> None:
    sandbox = provider.get(provider.acquire("not-text"))
    assert sandbox is not None
    command = "printf 'a\\377\\000'"
    assert sandbox.run(command).stdout == "a\ufffd\0"
    lossless = sandbox.run(command, errors="surrogateescape")
    assert lossless.stdout.encode("utf-8", "surrogateescape") == b"a\xff\0"
    with pytest.raises(InvalidArgument, match="surrogateescape"):
        sandbox.run(command, errors="strict")


def test_exec_in_a_session_goes_on_where_the_last_one_stopped(run: Run) -> None:
    assert run("exec", "-t", "alice", "--session", "s", "--", "cd /tmp && export MODE=debug")[0] == 0
    assert run("exec", "-t", "alice", "--session", "s", "--", "pwd; echo $MODE")[1] == "/tmp\ndebug\n"
    assert run("exec", "-t", "alice", "--", "pwd")[1] == "/mnt/user-data/workspace\n"


def test_exec_tells_a_command_its_variables_and_nobody_else(
    run: Run, fleet: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = os.urandom(8).hex()
    (tmp_path / "job.env").write_text(f"FROM_FILE={secret}\n")
    monkeypatch.setenv("FROM_HERE", secret)
    code, out, err = run(
        "exec", "-t", "alice", "--env-file", str(tmp_path / "job.env"), "--env", "FROM_HERE", "--", "env | grep ^FROM_"
    )
    assert (code, sorted(out.splitlines()), err) == (0, [f"FROM_FILE={secret}", f"FROM_HERE={secret}"], "")
    logs = "".join(path.read_text() for path in fleet.log_dir.glob("*.log"))
    assert secret not in logs
    for info in fleet.store.sandboxes(thread_id="alice"):
        assert secret not in json.dumps(fleet.store.story(info.sandbox_id))


def test_exec_says_when_output_was_dropped(run: Run) -> None:
    words = ("-t", "alice", "--max-output", "1k", "--", "head -c 5000 /dev/zero | tr '\\0' x")
    code, out, err = run("exec", "--json", *words)
    assert code == 0
    assert "bytes discarded" in out
    assert "not complete" in err
    assert run("exec", *words) == (0, "x" * 5000, ""), "it was passed on as it came"
    assert len(run("exec", "-t", "alice", "--", "head -c 3000000 /dev/zero | tr '\\0' x")[1]) == 3_000_000


def test_ctrl_c_cancels_the_command_and_exits_with_130(fleet: Stack) -> None:
    command = [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "exec", "-t", "ctrl-c", "--", "sleep 47"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            running = wait_until(lambda: [op for op in fleet.store.ops() if "sleep 47" in op.describe], 20)
            wait_until(lambda: _state(fleet, running[0].op_id) == "claimed", 10)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=20)
        finally:
            child.kill()
    assert (child.returncode, err.strip()) == (130, "cancelling …")
    assert _state(fleet, running[0].op_id) == "done"


def _state(fleet: Stack, op_id: str) -> str:
    view = fleet.store.op(op_id)
    return view.state if view is not None else "gone"


def test_long_output_arrives_whole_and_a_reader_that_has_enough_is_no_failure_to_tell(fleet: Stack) -> None:
    words = [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "exec", "-t", "alice", "--", "seq 1000000"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a single write takes only what fits into the pipe then
    whole = subprocess.run(words, capture_output=True, env=env, timeout=30, check=True)
    assert whole.stdout.endswith(b"\n1000000\n")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"1\n"
        child.stdout.close()
        assert child.wait(20) == 141
        assert child.stderr.read() == b""


# --- looking -----------------------------------------------------------------------------------


def test_ls_nodes_and_story_tell_of_a_sandbox(run: Run, ask: Ask) -> None:
    told = json.loads(run("exec", "--json", "-t", "looked-at", "--", "true")[1])
    code, out, _ = run("ls")
    assert code == 0
    assert any(line.split()[:2] == [told["sandbox_id"], "looked-at"] for line in out.splitlines())
    assert "`sandfleet ls` lists all there are" in run("ls", "--thread", "nobody-of-that-name")[1]
    nodes = ask("nodes")["nodes"]
    assert {node["node_id"]: node["alive"] for node in nodes} == {"node-1": True, "node-2": True}
    story = ask("story", told["sandbox_id"])
    assert story["kind"] == "sandbox"
    assert [event["event"] for event in story["events"]][:3] == ["reserved", "live", "warm"]
    assert "announced" in run("story", "node-1")[1]


def test_what_nobody_knows_is_told_with_what_to_type(run: Run) -> None:
    for words in (["story", "feedfeed"], ["release", "feedfeed"], ["destroy", "feedfeed"], ["cancel", "feedfeed"]):
        code, out, err = run(*words)
        assert (code, out) == (4, "")
        assert err.startswith("sandfleet: ")
        assert "`sandfleet " in err
        assert "Traceback" not in err
    code, out, _ = run("story", "feedfeed", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (4, "sandbox_not_found")


# --- intervening -------------------------------------------------------------------------------


def test_cancel_ends_a_running_operation(run: Run, ask: Ask, runaway: tuple[str, str, Any]) -> None:
    op_id, node_id, future = runaway
    [shown] = [op for op in ask("ops")["ops"] if op["op_id"] == op_id]
    assert (shown["node_id"], shown["state"]) == (node_id, "claimed")
    assert "sleep 50" in run("story", op_id)[1]
    code, out, _ = run("cancel", op_id)
    assert code == 0
    assert "was ended" in out
    result = future.result(timeout=5)
    assert isinstance(result, CommandResult)
    assert result.cancelled
    assert "already ended" in run("cancel", op_id)[1]


def test_release_says_who_is_still_in_it_and_destroy_ends_it(
    run: Run, ask: Ask, fleet: Stack, provider: SandboxProvider
) -> None:
    sandbox_id = provider.acquire("in-use")
    code, out, _ = run("release", sandbox_id)
    assert code == 3
    assert "still in use by 1 process" in out
    provider.release(sandbox_id)
    assert run("release", sandbox_id) == (0, f"sandbox {sandbox_id} is warm\n", "")
    data = fleet.settings.data_root / "threads" / "in-use"
    assert data.is_dir()
    assert ask("destroy", sandbox_id, "--delete-data")["data_deleted"] is True
    assert fleet.store.sandbox(sandbox_id) is None
    assert not data.exists()


def test_a_cordoned_node_is_shown_with_its_reason_and_opened_again(run: Run, ask: Ask) -> None:
    assert run("cordon", "node-1", "--reason", "new disk")[0] == 0
    node = next(node for node in ask("nodes")["nodes"] if node["node_id"] == "node-1")
    assert (node["state"], node["reason"]) == ("cordoned", "new disk")
    shown = run("nodes")[1].splitlines()
    assert shown[0].endswith("REASON")
    assert shown[1].endswith("new disk")
    assert ask("uncordon", "node-1")["state"] == "ready"
    assert "REASON" not in run("nodes")[1]
    assert run("cordon", "node-1")[0] == 0
    assert ask("cordon", "node-1", "--undo")["state"] == "ready"
    assert run("uncordon", "nobody")[0] == 2


@pytest.mark.slow  # a node is started anew twice
def test_drain_waits_until_the_node_left_and_tells_what_was_answered(
    ask: Ask, run: Run, fleet: Stack, runaway: tuple[str, str, Any]
) -> None:
    _, node_id, future = runaway
    told = ask("drain", node_id, "--timeout", "1")  # the node's own drain_timeout_s is half a minute
    assert told["left"] is True
    assert sum(told["answered"].values()) == 1
    assert future.exception(timeout=30) is not None or not future.result().ok
    assert wait_until(lambda: fleet.nodes[node_id].poll() is not None, 10)
    code, _, err = run("drain", node_id)
    assert code == 2
    assert "takes nothing" in err
    fleet.start_node(node_id)
    wait_until(lambda: any(node.node_id == node_id and node.alive for node in fleet.store.nodes()), 20)
    told = ask("drain", node_id, "--wait", "0")
    assert told["left"] is False
    assert wait_until(lambda: fleet.nodes[node_id].poll() is not None, 20)
    fleet.start_node(node_id)


# --- doctor, and no fleet at all ---------------------------------------------------------------


def test_doctor_finds_a_fleet_in_order(ask: Ask) -> None:
    told = ask("doctor")
    assert told["ok"] is True
    found = {check["name"]: check for check in told["checks"]}
    assert found["nodes"]["found"].startswith("2 alive")
    assert found["scheduler"]["status"] == "ok"
    assert found["redis eviction"]["found"] == "noeviction"
    assert all(check["advice"] for check in told["checks"] if check["status"] != "ok")


def test_without_redis_every_command_says_how_to_start_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["ls"],
        ["nodes"],
        ["ops"],
        ["exec", "-t", "a", "--", "ls"],
        ["cancel", "x"],
        ["drain", "n"],
        ["worker"],
        ["scheduler"],
    ):
        assert main(["--redis-url", _NOBODY, *words]) == 3, words
        assert "sandfleet up" in capsys.readouterr().err
    assert main(["ls", "--json", "--redis-url", _NOBODY]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "store_unavailable"
    assert main(["doctor", "--redis-url", _NOBODY]) == 1
    assert "sandfleet up" in capsys.readouterr().out


# --- completion --------------------------------------------------------------------------------


def test_bash_completes_the_threads_of_the_fleet(run: Run, fleet: Stack, tmp_path: Path) -> None:
    assert run("exec", "-t", "completed-to", "--", "true")[0] == 0
    program = tmp_path / "sandfleet"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom sandfleet.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    typed = "sandfleet exec --thread completed-"
    script = (
        'eval "$(sandfleet completion bash)"; complete -p sandfleet >/dev/null && '
        f"COMP_WORDS=({typed}) && COMP_CWORD=3 && _sandfleet_completion sandfleet; echo ${{COMPREPLY[@]}}"
    )
    env = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SANDFLEET_REDIS_URL": fleet.settings.redis_url,
    }
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("completed-to\n", "")


# --- up ----------------------------------------------------------------------------------------


@pytest.fixture
def run_root() -> Iterator[Path]:
    """A private run root with a short path."""
    path = Path(tempfile.mkdtemp(prefix="sf-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_up_is_found_by_other_commands_and_leaves_nothing_when_told_to_end(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("redis")
    for name in ("REDIS_URL", "SANDFLEET_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SANDFLEET_RUN_ROOT", str(run_root))
    options = ["up", "--json", "--backend", "mock", "--data-root", str(run_root / "data")]
    up = subprocess.Popen([*SANDFLEET, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        facts = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
        assert facts["nodes"] == ["node-1"]
        assert main(["nodes", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["nodes"][0]["alive"] is True
        # `gc` finds the data root of the running fleet too.
        assert main(["gc", "--json", "--thread-data", "--older-than", "0"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["found"], told["removed"]) == ([], 0)
        assert main(["up"]) == 2
        assert str(up.pid) in capsys.readouterr().err
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) == 3
    finally:
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=30)
    assert up.returncode == 0, err
    assert not [child for child in children if child.is_running()]
    assert main(["nodes", "--redis-url", _NOBODY]) == 3
