"""The AIO API's own client (`agent-sandbox`) drives sandboxd, over a unix socket and over TCP.

Every answer goes through the client's pydantic models, so a field that is missing or of another type fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_sandbox import AsyncSandbox, Sandbox
from agent_sandbox.core.api_error import ApiError

from tests.sandboxd.conftest import TOKEN, Sandboxd, wait_until

WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module", params=["unix", "tcp"])
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxd]:
    server = Sandboxd(tmp_path_factory.mktemp("client"), tcp=request.param == "tcp")
    yield server
    server.stop()


def _address(box: Sandboxd) -> str:
    return f"http://127.0.0.1:{box.port}" if box.tcp else "http://sandboxd"


@pytest.fixture(scope="module")
def client(box: Sandboxd) -> Iterator[Sandbox]:
    transport = httpx.HTTPTransport(uds=None if box.tcp else box.socket)
    with httpx.Client(transport=transport, timeout=30) as http:
        yield Sandbox(base_url=_address(box), headers=WITH_TOKEN, httpx_client=http)


def _code(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        call(**arguments)
    return caught.value.status_code or 0, caught.value.body["error"]["code"]


def test_the_context_tells_where_one_is(box: Sandboxd, client: Sandbox) -> None:
    context = client.sandbox.get_context()
    assert (context.success, context.workspace) == (True, str(box.work))
    assert context.detail.system.os == "Linux"


async def test_the_asynchronous_client_understands_the_same_answers(box: Sandboxd) -> None:
    transport = httpx.AsyncHTTPTransport(uds=None if box.tcp else box.socket)
    async with httpx.AsyncClient(transport=transport, timeout=30) as http:
        client = AsyncSandbox(base_url=_address(box), headers=WITH_TOKEN, httpx_client=http)
        assert (await client.bash.exec(command="echo $MARK")).data.stdout == "set\n"
        await client.file.write_file(file=f"{box.work}/async", content="ä")
        assert b"".join([part async for part in client.file.download_file(path=f"{box.work}/async")]) == "ä".encode()


def test_a_token_is_asked_for(box: Sandboxd) -> None:
    transport = httpx.HTTPTransport(uds=None if box.tcp else box.socket)
    with httpx.Client(transport=transport) as http:
        stranger = Sandbox(base_url=_address(box), httpx_client=http)
        assert _code(stranger.sandbox.get_context) == (401, "permission_denied")


# --- shell -----------------------------------------------------------------------------------


def test_shell_exec_has_output_and_code(client: Sandbox) -> None:
    result = client.shell.exec_command(command="echo out; echo err >&2; exit 3").data
    assert (result.status, result.output, result.exit_code) == ("completed", "out\nerr\n", 3)
    assert [(record.command, record.output) for record in result.console] == [(result.command, result.output)]
    ended = client.shell.exec_command(command="echo partly; sleep 60", hard_timeout=0.2).data
    assert (ended.status, ended.output, ended.exit_code) == ("hard_timeout", "partly\n", None)
    assert client.shell.exec_command(command="sleep 0.5", timeout=0.05).data.status == "running"


def test_shell_sessions_keep_their_state_and_are_listed(box: Sandboxd, client: Sandbox) -> None:
    made = client.shell.create_session(id="kept", exec_dir=str(box.work)).data
    assert (made.session_id, made.working_dir) == ("kept", str(box.work))
    client.shell.exec_command(id="kept", command="N=7; cd /tmp", strict=True, no_change_timeout=9, truncate=False)
    assert client.shell.exec_command(id="kept", command="echo $N $PWD").data.output == "7 /tmp\n"
    assert client.shell.list_sessions().data.sessions["kept"].working_dir == "/tmp"
    assert client.shell.get_session_stats().data.total_sessions >= 1
    assert client.shell.cleanup_session("kept").success is True
    assert "kept" not in client.shell.list_sessions().data.sessions
    assert _code(client.shell.view, id="kept") == (404, "session_not_found")


def test_a_running_shell_command_is_watched_written_to_and_killed(client: Sandbox) -> None:
    started = client.shell.exec_command(id="live", command="read a; echo got $a; sleep 60", async_mode=True).data
    assert (started.status, started.exit_code) == ("running", None)
    assert client.shell.write_to_process(id="live", input="word", press_enter=True).data.status == "running"
    wait_until(lambda: client.shell.view(id="live").data.output == "got word\n")
    assert client.shell.wait_for_process(id="live", seconds=0).data.status == "running"
    assert client.shell.kill_process(id="live").data.status == "terminated"
    assert client.shell.wait_for_process(id="live", seconds=5).data.status == "terminated"
    assert client.shell.cleanup_all_sessions().success is True
    assert client.shell.list_sessions().data.sessions == {}


# --- bash ------------------------------------------------------------------------------------


def test_bash_exec_has_two_streams_a_code_and_an_environment(box: Sandboxd, client: Sandbox) -> None:
    command = "echo out $A ${MARK-unset} $PWD; echo err >&2; exit 3"
    result = client.bash.exec(command=command, env={"A": "1", "MARK": None}, exec_dir=str(box.work)).data
    assert (result.status, result.exit_code) == ("completed", 3)
    assert (result.stdout, result.stderr) == (f"out 1 unset {box.work}\n", "err\n")
    assert (result.offset, result.stderr_offset) == (len(result.stdout), 4)
    assert client.bash.exec(command="sleep 60", hard_timeout=0.1).data.status == "timed_out"
    cut = client.bash.exec(command="head -c 100000 /dev/zero | tr '\\0' x", max_output_length=1000).data
    assert 1000 <= len(cut.stdout) < 1200


def test_a_running_bash_command_is_followed_written_to_and_killed(client: Sandbox) -> None:
    client.bash.create_session(session_id="b", exec_dir="/tmp")
    command = client.bash.exec(session_id="b", command="read l; echo got $l; sleep 60", async_mode=True).data
    assert client.bash.write(session_id="b", input="line\n", command_id=command.command_id).success is True
    seen = client.bash.output(session_id="b", offset=0, stderr_offset=0, wait=True, wait_timeout=10).data
    assert (seen.stdout, seen.offset, seen.command.status) == ("got line\n", 9, "running")
    (session,) = (one for one in client.bash.sessions().data if one.session_id == "b")
    assert (session.status, session.current_command) == ("busy", command.command)
    assert client.bash.kill(session_id="b", signal="SIGKILL").success is True
    wait_until(lambda: client.bash.output(session_id="b").data.command.status == "killed")
    assert client.bash.exec(session_id="b", command="pwd").data.stdout == "/tmp\n"
    assert client.bash.close_session("b").success is True
    assert _code(client.bash.close_session, session_id="b") == (404, "session_not_found")


def test_a_bash_session_without_a_name_gets_one(client: Sandbox) -> None:
    session = client.bash.create_session().data
    assert client.bash.exec(session_id=session.session_id, command="true").data.session_id == session.session_id
    client.bash.close_session(session.session_id)


# --- files -----------------------------------------------------------------------------------


@pytest.fixture
def folder(box: Sandboxd, request: pytest.FixtureRequest) -> Path:
    name = "".join(letter for letter in request.node.name if letter.isalnum())
    path = box.work / name
    path.mkdir()
    return path


def test_texts_are_written_read_replaced_and_searched(client: Sandbox, folder: Path) -> None:
    file = f"{folder}/a.txt"
    assert client.file.write_file(file=file, content="one\ntwo\nthree\n").data.bytes_written == 14
    client.file.write_file(file=file, content="four", append=True, trailing_newline=True, sudo=False)
    assert client.file.read_file(file=file).data.content == "one\ntwo\nthree\nfour\n"
    assert client.file.read_file(file=file, start_line=1, end_line=3).data.content == "two\nthree\n"
    assert client.file.replace_in_file(file=file, old_str="two", new_str="2").data.replaced_count == 1
    found = client.file.search_in_file(file=file, regex="^t").data
    assert (found.matches, found.line_numbers) == (["three"], [3])
    client.file.write_file(file=f"{folder}/b.bin", content="AP8=", encoding="base64")
    assert (folder / "b.bin").read_bytes() == b"\0\xff"
    assert _code(client.file.read_file, file=f"{folder}/none") == (404, "path_not_found")
    assert _code(client.file.write_file, file=str(folder), content="") == (400, "is_directory")


def test_the_tree_is_listed_and_searched(client: Sandbox, folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "a.py").write_text("import os\n")
    (folder / "b.txt").write_text("import nothing\n")
    listed = client.file.list_path(path=str(folder), recursive=True, max_depth=2, include_size=True).data
    assert {entry.path: entry.is_directory for entry in listed.files} == {
        f"{folder}/b.txt": False, f"{folder}/src": True, f"{folder}/src/a.py": False,
    }  # fmt: skip
    assert (listed.total_count, listed.directory_count, listed.file_count) == (3, 1, 2)
    assert client.file.find_files(path=str(folder), glob="*.py").data.files == [f"{folder}/src/a.py"]
    globbed = client.file.glob_files(path=str(folder), pattern="**/*.py", files_only=True, include_metadata=True).data
    assert [(file.name, file.size) for file in globbed.files] == [("a.py", 10)]
    matches = client.file.grep_files(
        path=str(folder), pattern="IMPORT", include=["*.py"], case_insensitive=True, fixed_strings=True, max_results=5
    ).data.matches
    assert [(match.file, match.line_number, match.line_content) for match in matches] == [
        (f"{folder}/src/a.py", 1, "import os")
    ]
    assert _code(client.file.list_path, path=f"{folder}/none") == (404, "path_not_found")


def test_bytes_are_uploaded_and_downloaded(client: Sandbox, folder: Path) -> None:
    content = bytes(range(256)) * 8000
    done = client.file.upload_file(file=("up.bin", content), path=f"{folder}/up.bin").data
    assert (done.file_path, done.file_size, done.success) == (f"{folder}/up.bin", len(content), True)
    assert b"".join(client.file.download_file(path=f"{folder}/up.bin")) == content
    with pytest.raises(ApiError) as caught:
        b"".join(client.file.download_file(path=f"{folder}/none"))
    assert caught.value.status_code == 404
