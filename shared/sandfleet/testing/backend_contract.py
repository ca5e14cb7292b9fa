"""What every backend must do, as tests. Needs pytest.

::

    from sandfleet.testing.backend_contract import BackendContract

    class TestMyBackend(BackendContract):
        def make_backend(self, root, on_death):
            return MyBackend(settings, on_death)

A test that needs a capability the backend does not declare is skipped; nothing else is.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet.backends import Capability, Completion, Connection, Liveness, SandboxBackend
from sandfleet.errors import NotStarted, OutcomeUnknown, SandboxLost
from sandfleet.testing.backend_jobs import JobContract
from sandfleet.testing.backend_survival import SurvivalContract
from sandfleet.testing.backend_texts import TextContract
from sandfleet.testing.backend_world import World, wait_for

__all__ = ["BackendContract"]


class BackendContract(TextContract, SurvivalContract, JobContract):
    """The suite. Override `make_backend`, and `teach` or `end_sandbox` where the backend needs them."""

    def make_backend(self, root: Path, on_death: Callable[[str, str], None]) -> SandboxBackend:
        """The backend under test; ``root`` is an empty directory of its own."""
        raise NotImplementedError

    def teach(self, backend: SandboxBackend, command: str, **answer: Any) -> None:
        """Prepare a driver that does not really run commands: ``command`` is about to be run and must
        answer ``stdout``, ``stderr``, ``exit_code`` after ``delay_s``. Others ignore it."""

    def end_sandbox(self, backend: SandboxBackend, sandbox_id: str) -> None:
        """Let a sandbox die by itself, as by a crash."""
        pytest.skip("this suite was not told how a sandbox of this backend dies")

    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[World]:
        """The backend, closed at the end."""
        deaths: list[tuple[str, str]] = []
        held: list[str] = []

        def heard(sandbox_id: str, reason: str) -> None:
            held.extend(name for name in backend.running() if name == sandbox_id)
            deaths.append((sandbox_id, reason))

        backend = self.make_backend(tmp_path, heard)
        try:
            if problems := type(backend).check():
                pytest.skip("; ".join(problems))
            yield World(backend, tmp_path, deaths)
            assert not held, "running() says otherwise when a death is told: the node takes it for late news"
        finally:
            backend.close()
        assert backend.running() == []

    @pytest.fixture
    def connection(self, world: World) -> Iterator[Connection]:
        """A fresh sandbox."""
        plan = world.plan()
        yield world.backend.create(plan)
        world.backend.destroy(plan.sandbox_id)

    @pytest.fixture
    def commands(self, world: World, connection: Connection) -> Connection:
        """A fresh sandbox of a backend that runs commands."""
        return self._needs(world, Capability.COMMANDS, connection)

    @pytest.fixture
    def files(self, world: World, connection: Connection) -> Connection:
        """A fresh sandbox of a backend that has files."""
        return self._needs(world, Capability.FILES, connection)

    @staticmethod
    def _needs(world: World, capability: Capability, connection: Connection) -> Connection:
        if capability not in world.backend.capabilities:
            pytest.skip(f"the backend does not declare {capability}")
        return connection

    def _run(self, world: World, connection: Connection, command: str, answer: dict[str, Any], **args: Any) -> Any:
        self.teach(world.backend, command, **answer)
        return world.value(connection, "execute_command", command=command, **args)

    # --- a sandbox's life ----------------------------------------------------------------------

    def test_a_created_sandbox_answers(self, world: World) -> None:
        plan = world.plan()
        connection = world.backend.create(plan)
        assert plan.sandbox_id in world.backend.running()
        assert world.backend.probe(plan.sandbox_id) is Liveness.ALIVE
        assert world.value(connection, "health")["status"] == "alive"
        assert world.value(connection, "noop") == {}
        world.backend.destroy(plan.sandbox_id)

    def test_a_destroyed_sandbox_is_gone_and_nobody_is_told(self, world: World) -> None:
        plan = world.plan()
        connection = world.backend.create(plan)
        world.backend.destroy(plan.sandbox_id)
        assert plan.sandbox_id not in world.backend.running()
        assert world.backend.probe(plan.sandbox_id) is Liveness.DEAD
        assert not plan.run_dir.exists()
        assert isinstance(world.do(connection, "stat", path=".").error, SandboxLost | NotStarted)
        assert plan.sandbox_id not in [death[0] for death in world.deaths]

    def test_destroying_an_unknown_sandbox_is_fine(self, world: World) -> None:
        world.backend.destroy("00000000")
        assert world.backend.probe("00000000") is not Liveness.ALIVE

    def test_creating_an_id_again_replaces_the_sandbox(self, world: World) -> None:
        plan = world.plan()
        world.backend.create(plan)
        second = world.backend.create(plan)
        assert world.backend.running().count(plan.sandbox_id) == 1
        assert world.value(second, "health")["status"] == "alive"
        world.backend.destroy(plan.sandbox_id)

    def test_a_sandbox_that_dies_is_reported_once(self, world: World) -> None:
        plan = world.plan()
        connection = world.backend.create(plan)
        self.end_sandbox(world.backend, plan.sandbox_id)
        wait_for(lambda: plan.sandbox_id in [death[0] for death in world.deaths], "a report of the death")
        assert world.backend.probe(plan.sandbox_id) is Liveness.DEAD
        assert plan.sandbox_id not in world.backend.running()
        assert isinstance(world.do(connection, "stat", path=".").error, SandboxLost | NotStarted)
        world.backend.destroy(plan.sandbox_id)
        assert [death[0] for death in world.deaths].count(plan.sandbox_id) == 1

    def test_a_threads_files_outlive_its_sandbox(self, world: World) -> None:
        plan = world.plan()
        connection = self._needs(world, Capability.FILES, world.backend.create(plan))
        world.value(connection, "write_file", b"kept", path="/mnt/user-data/outputs/a")
        world.backend.destroy(plan.sandbox_id)
        again = world.backend.create(plan)
        assert world.read(again, "/mnt/user-data/outputs/a") == b"kept"
        world.backend.destroy(plan.sandbox_id)

    def test_sandboxes_do_not_share_files(self, world: World, files: Connection) -> None:
        plan = world.plan()
        other = world.backend.create(plan)
        for path in ("/mnt/user-data/workspace/secret", "/tmp/secret"):
            world.value(files, "write_file", b"mine", path=path)
            assert world.code(other, "read_file", path=path) == "path_not_found"
        world.backend.destroy(plan.sandbox_id)

    # --- commands ------------------------------------------------------------------------------

    def test_a_command_has_two_streams_and_a_code(self, world: World, commands: Connection) -> None:
        answer = {"stdout": "out\n", "stderr": "err\n", "exit_code": 3}
        value = self._run(world, commands, "echo out; echo err >&2; exit 3", answer)
        assert value["stdout"] == "out\n"
        assert value["stderr"] == "err\n"
        assert value["exit_code"] == 3
        assert (value["timed_out"], value["truncated"], value["cancelled"]) == (False, False, False)
        assert value["signal"] is None
        assert value["duration_s"] >= 0

    def test_an_argv_meets_no_shell(self, world: World, commands: Connection) -> None:
        self.teach(world.backend, "printf %s $HOME;id", stdout="$HOME;id")
        value = world.value(commands, "execute_command", argv=["printf", "%s", "$HOME;id"])
        assert value["stdout"] == "$HOME;id"

    def test_commands_start_in_the_workspace_and_cd_does_not_last(self, world: World, commands: Connection) -> None:
        self._run(world, commands, "cd /tmp", {})
        value = self._run(world, commands, "pwd", {"stdout": "/mnt/user-data/workspace\n"})
        assert value["stdout"] == "/mnt/user-data/workspace\n"
        assert world.code(commands, "execute_command", command="pwd", cwd="/nowhere") == "path_not_found"

    def test_env_and_stdin_reach_the_command(self, world: World, commands: Connection) -> None:
        value = self._run(world, commands, 'echo "$COLOUR"', {"stdout": "grün\n"}, env={"COLOUR": "grün"})
        assert value["stdout"] == "grün\n"
        value = self._run(world, commands, "wc -c", {"stdout": "300000\n"}, content=b"x" * 300_000)
        assert value["stdout"].split() == ["300000"]

    def test_the_deadline_ends_a_command_and_is_no_error(self, world: World, commands: Connection) -> None:
        value = self._run(world, commands, "sleep 60", {"delay_s": 60.0}, timeout_s=0.1)
        assert value["timed_out"] is True
        assert value["exit_code"] is None

    def test_output_is_capped_and_says_so(self, world: World, commands: Connection) -> None:
        flood = "head -c 100000 /dev/zero | tr '\\0' x"
        value = self._run(world, commands, flood, {"stdout": "x" * 100_000}, max_output_bytes=1000)
        assert value["truncated"] is True
        assert 1000 <= len(value["stdout"]) < 1200
        value = self._run(world, commands, flood, {"stdout": "x" * 100_000}, max_output_bytes=0)
        assert (value["stdout"], value["truncated"]) == ("", True)

    def test_start_does_not_wait_and_done_comes_once(self, world: World, commands: Connection) -> None:
        # None of them ends before all have begun; how long a backend takes to start them is another matter.
        command = (
            "echo > here$N; until [ -e here1 ] && [ -e here2 ] && [ -e here3 ] && [ -e here4 ]; do sleep 0.05; done"
        )
        self.teach(world.backend, command, delay_s=1.0)
        ended: list[Completion] = []
        for number in range(1, 5):
            assert ended == [], "it waited for the end"
            op = world.operation("execute_command", command=command, env={"N": str(number)}, timeout_s=30.0)
            commands.start(op, ended.append)
        wait_for(lambda: len(ended) == 4, "four completions")
        assert [completion.value["exit_code"] for completion in ended] == [0, 0, 0, 0], "one after the other"

    def test_a_cancelled_command_still_completes(self, world: World, commands: Connection) -> None:
        self._needs(world, Capability.CANCEL, commands)
        self.teach(world.backend, "sleep 61", delay_s=61.0)
        ended: list[Completion] = []
        op = world.operation("execute_command", command="sleep 61")
        commands.start(op, ended.append)
        assert commands.cancel(op.op_id) is True
        wait_for(lambda: ended, "the completion")
        assert ended[0].value["cancelled"] is True
        assert ended[0].value["exit_code"] is None
        assert commands.cancel(op.op_id) is False
        assert commands.cancel("never-heard-of") is False

    def test_destroying_under_a_running_command_completes_it(self, world: World, commands: Connection) -> None:
        self.teach(world.backend, "sleep 62", delay_s=62.0)
        plan, ended = world.plan(), list[Completion]()
        connection = world.backend.create(plan)
        world.value(connection, "health")
        op = world.operation("execute_command", command="sleep 62")
        connection.start(op, ended.append)
        world.value(connection, "health")
        world.backend.destroy(plan.sandbox_id)
        wait_for(lambda: ended, "the completion")
        assert isinstance(ended[0].error, OutcomeUnknown | SandboxLost)
        assert len(ended) == 1

    def test_a_session_keeps_its_state(self, world: World, commands: Connection) -> None:
        self._needs(world, Capability.SESSIONS, commands)
        self._run(world, commands, "cd /tmp; N=5", {}, session="s1")
        value = self._run(world, commands, 'echo "$N $PWD"', {"stdout": "5 /tmp\n"}, session="s1")
        assert value["stdout"] == "5 /tmp\n"
        assert world.value(commands, "close_session", session="s1") == {}
        assert world.code(commands, "close_session", session="s1") == "session_not_found"
        value = self._run(world, commands, "echo anew", {"stdout": "anew\n"}, session="s1")
        assert value["stdout"] == "anew\n"

    # --- files ---------------------------------------------------------------------------------

    def test_bytes_come_back_as_they_went(self, world: World, files: Connection) -> None:
        content = bytes(range(256)) * 40
        value = world.value(files, "write_file", content, path="deep/er/file.bin")
        assert value == {"size": len(content), "digest": hashlib.sha256(content).hexdigest()}
        assert world.read(files, "/mnt/user-data/workspace/deep/er/file.bin") == content
        assert world.read(files, "/workspace/deep/er/file.bin") == content
        world.value(files, "write_file", b"more", path="deep/er/file.bin", append=True)
        assert world.read(files, "deep/er/file.bin") == content + b"more"

    def test_a_large_file_round_trips(self, world: World, files: Connection) -> None:
        content = b"0123456789abcde\n" * (5 * 1024 * 1024 // 16 + 1)
        assert world.value(files, "write_file", content, path="large")["size"] == len(content)
        completion = world.do(files, "read_file", path="large")
        assert completion.content == content
        assert completion.value == {"size": len(content), "total_lines": len(content) // 16, "truncated": False}

    def test_ranges_are_lines_from_one_to_the_end_inclusive(self, world: World, files: Connection) -> None:
        world.value(files, "write_file", "eins\nzwei\ndreiß".encode(), path="lines")
        for start, end, wanted in ((2, None, "zwei\ndreiß"), (None, 1, "eins\n"), (2, 2, "zwei\n"), (9, None, "")):
            completion = world.do(files, "read_file", path="lines", start_line=start, end_line=end)
            assert completion.content == wanted.encode(), (start, end)
        assert world.do(files, "read_file", path="lines").value["total_lines"] == 3
        assert world.code(files, "read_file", path="lines", start_line=3, end_line=2) == "invalid_argument"
        cut = world.do(files, "read_file", path="lines", max_bytes=4)
        assert (cut.content, cut.value["truncated"], cut.value["size"]) == (b"eins", True, 16)

    def test_if_digest_writes_only_what_was_read(self, world: World, files: Connection) -> None:
        first = world.value(files, "write_file", b"1", path="f", if_digest="")["digest"]
        assert world.code(files, "write_file", b"2", path="f", if_digest="") == "digest_mismatch"
        assert world.code(files, "write_file", b"2", path="f", if_digest="0" * 64) == "digest_mismatch"
        world.value(files, "write_file", b"2", path="f", if_digest=first)
        assert world.read(files, "f") == b"2"

    def test_str_replace_is_exact(self, world: World, files: Connection) -> None:
        world.value(files, "write_file", b"a\nb\na\n", path="f")
        ambiguous = world.do(files, "str_replace", path="f", old="a", new="c").error
        assert ambiguous is not None
        assert (ambiguous.code, ambiguous.facts["lines"]) == ("ambiguous_match", [1, 3])
        assert world.code(files, "str_replace", path="f", old="z", new="c") == "no_match"
        value = world.value(files, "str_replace", path="f", old="a", new="ä", replace_all=True)
        assert value == {"count": 2, "digest": hashlib.sha256("ä\nb\nä\n".encode()).hexdigest()}

    def test_the_tree_can_be_listed_changed_and_told(self, world: World, files: Connection) -> None:
        world.value(files, "make_dir", path="d/e")
        world.value(files, "write_file", b"12345", path="d/f")
        listed = world.value(files, "list_dir", path="/mnt/user-data/workspace", max_depth=2)
        assert [(entry["path"], entry["type"]) for entry in listed["entries"]] == [
            ("/mnt/user-data/workspace/d", "dir"),
            ("/mnt/user-data/workspace/d/e", "dir"),
            ("/mnt/user-data/workspace/d/f", "file"),
        ]
        assert listed["truncated"] is False
        assert world.value(files, "list_dir", path="d", max_entries=1)["truncated"] is True
        info = world.value(files, "stat", path="/mnt/user-data/workspace/d/f")
        assert (info["name"], info["type"], info["size"]) == ("f", "file", 5)
        assert abs(info["modified_at"] - time.time()) < 60
        world.value(files, "move", path="d/f", new_path="d/g")
        assert world.read(files, "d/g") == b"12345"
        world.value(files, "remove", path="d", recursive=True)
        assert world.code(files, "stat", path="d") == "path_not_found"

    def test_glob_and_grep_find_the_same_everywhere(self, world: World, files: Connection) -> None:
        top = "/mnt/user-data/workspace"
        for path, text in (
            ("a.py", "import os\nX = 1\n"),
            ("src/b.py", "x = 2\n"),
            ("src/deep/c.txt", "nothing\nX\n"),
            ("node_modules/d.py", "x\n"),
        ):
            world.value(files, "write_file", text.encode(), path=path)
        for pattern, wanted in (
            ("*.py", ["a.py", "src/b.py"]),
            ("src/**/*.txt", ["src/deep/c.txt"]),
            ("src/*", ["src/b.py"]),
            ("[ab].py", ["a.py", "src/b.py"]),
        ):
            found = world.value(files, "glob", path=top, pattern=pattern)
            assert found == {"paths": [f"{top}/{name}" for name in wanted], "truncated": False}, pattern
        assert (
            world.value(files, "glob", path=top, pattern="src/*", include_dirs=True)["paths"][-1] == f"{top}/src/deep"
        )
        assert world.value(files, "glob", path=top, pattern="*.py", max_results=1)["truncated"] is True
        found = world.value(files, "grep", path=top, pattern=r"^x\b")
        assert found["matches"] == [
            [f"{top}/a.py", 2, "X = 1"],
            [f"{top}/src/b.py", 1, "x = 2"],
            [f"{top}/src/deep/c.txt", 2, "X"],
        ]
        exact = world.value(files, "grep", path=top, pattern="X", case_sensitive=True, glob="*.txt")
        assert [match[0] for match in exact["matches"]] == [f"{top}/src/deep/c.txt"]
        assert world.value(files, "grep", path=top, pattern="x", max_results=1)["truncated"] is True

    @pytest.mark.parametrize(
        ("kind", "args", "code"),
        [
            ("read_file", {"path": "none"}, "path_not_found"),
            ("read_file", {"path": "dir"}, "is_directory"),
            ("read_file", {"path": "file/below"}, "not_directory"),
            ("write_file", {"path": "dir"}, "is_directory"),
            ("write_file", {"path": "no/parent", "make_parents": False}, "path_not_found"),
            ("str_replace", {"path": "none", "old": "a", "new": "b"}, "path_not_found"),
            ("list_dir", {"path": "none"}, "path_not_found"),
            ("list_dir", {"path": "file"}, "not_directory"),
            ("glob", {"path": "none", "pattern": "*"}, "path_not_found"),
            ("glob", {"path": ".", "pattern": "/etc/*"}, "invalid_pattern"),
            ("glob", {"path": ".", "pattern": "../*"}, "invalid_pattern"),
            ("grep", {"path": ".", "pattern": "("}, "invalid_pattern"),
            ("stat", {"path": "none"}, "path_not_found"),
            ("make_dir", {"path": "dir", "exist_ok": False}, "already_exists"),
            ("make_dir", {"path": "no/parent", "parents": False}, "path_not_found"),
            ("remove", {"path": "none"}, "path_not_found"),
            ("remove", {"path": "dir"}, "invalid_argument"),
            ("move", {"path": "none", "new_path": "x"}, "path_not_found"),
            ("move", {"path": "file", "new_path": "dir/inner"}, "already_exists"),
        ],
    )
    def test_file_errors_have_their_own_codes(
        self, world: World, files: Connection, kind: str, args: dict[str, Any], code: str
    ) -> None:
        world.value(files, "write_file", b"x", path="file")
        world.value(files, "write_file", b"x", path="dir/inner")
        assert world.code(files, kind, b"", **args) == code

    def test_what_may_be_missing_may_be_missing(self, world: World, files: Connection) -> None:
        assert world.value(files, "remove", path="none", missing_ok=True) == {}
        assert world.value(files, "make_dir", path="uploads", exist_ok=True) == {}
        assert world.value(files, "make_dir", path="uploads", exist_ok=True) == {}

    # --- batches -------------------------------------------------------------------------------

    def test_a_batch_runs_in_order_and_stops_at_the_first_error(self, world: World, files: Connection) -> None:
        ops = [
            {"kind": "write_file", "args": {"path": "f"}, "content_b64": base64.b64encode(b"\xff1").decode()},
            {"kind": "read_file", "args": {"path": "f"}},
            {"kind": "read_file", "args": {"path": "none"}},
            {"kind": "remove", "args": {"path": "f"}},
        ]
        value = world.value(files, "batch", ops=ops)
        assert value["stopped_at"] == 2
        assert value["results"][1]["ok"]["size"] == 2
        assert base64.b64decode(value["results"][1]["content_b64"]) == b"\xff1"
        assert value["results"][2]["error"]["code"] == "path_not_found"
        assert len(value["results"]) == 3
        value = world.value(files, "batch", ops=ops[1:], stop_on_error=False)
        assert value["stopped_at"] is None
        assert [sorted(result) for result in value["results"]] == [["content_b64", "ok"], ["error"], ["ok"]]
