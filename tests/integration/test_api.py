"""The public API over a real fleet: real Redis, real Celery workers, real bubblewrap sandboxes."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading

import pytest

from sandfleet import AsyncSandboxProvider, Batch, Sandbox, SandboxProvider
from sandfleet.errors import (
    AmbiguousMatch,
    CommandFailed,
    CommandTimeout,
    DigestMismatch,
    InvalidArgument,
    NoMatch,
    PathNotFound,
    QueueTimeout,
    SandboxNotFound,
)
from sandfleet.stack import Stack

HOME = "/mnt/user-data/workspace"


@pytest.fixture
def sandbox(provider: SandboxProvider, request: pytest.FixtureRequest) -> Sandbox:
    thread_id = "api-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    found = provider.get(provider.acquire(thread_id))
    assert found is not None
    return found


def test_a_command_gives_streams_exit_code_and_timings(sandbox: Sandbox) -> None:
    result = sandbox.run("echo out; echo err >&2; exit 3", env={"A": "b"})
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert result["exit_code"] == 3
    assert result.timings.total_ms is not None
    with pytest.raises(CommandFailed):
        result.check()
    assert sandbox.execute_command("echo out; echo err >&2; exit 3") == "out\n\nStd Error:\nerr\n\nExit Code: 3"
    assert sandbox.execute_command("true") == "(no output)"


def test_argv_stdin_cwd_and_env_reach_the_command(sandbox: Sandbox) -> None:
    assert sandbox.run(["printf", "%s|", "a b", "$HOME"]).stdout == "a b|$HOME|"
    assert sandbox.run("cat; pwd; echo $A", stdin="in\n", cwd="/tmp", env={"A": "b"}).stdout == "in\n/tmp\nb\n"


def test_a_timeout_keeps_the_partial_output_and_the_sandbox_goes_on(sandbox: Sandbox) -> None:
    result = sandbox.run("echo before; sleep 60", timeout_s=0.5)
    assert (result.timed_out, result.stdout, result.exit_code) == (True, "before\n", None)
    with pytest.raises(CommandTimeout):
        result.check()
    assert sandbox.run("echo after").stdout == "after\n"


def test_one_shot_commands_share_nothing_and_a_session_keeps_everything(sandbox: Sandbox) -> None:
    sandbox.run("cd /tmp; export A=b")
    assert sandbox.run("pwd; echo [$A]").stdout == f"{HOME}\n[]\n"
    sandbox.run("cd /tmp; export A=b", session="one")
    assert sandbox.run("pwd; echo [$A]", session="one").stdout == "/tmp\n[b]\n"
    assert sandbox.run("echo [$A]", session="two").stdout == "[]\n"
    sandbox.close_session("one")
    assert sandbox.run("echo [$A]", session="one").stdout == "[]\n"


def test_files_are_written_read_edited_searched_and_moved(sandbox: Sandbox) -> None:
    path = f"{HOME}/src/main.py"
    sandbox.write_file(path, "import os\nprint('one')\nprint('two')\n")
    assert sandbox.read_file(path, 2, 2) == "print('one')\n"
    with pytest.raises(AmbiguousMatch) as several:
        sandbox.str_replace(path, "print", "log")
    assert several.value.facts["lines"] == [2, 3]
    with pytest.raises(NoMatch):
        sandbox.str_replace(path, "absent", "x")
    assert sandbox.str_replace(path, "print", "log", replace_all=True) == 2
    assert sandbox.glob(HOME, "**/*.py") == ([path], False)
    matches, more = sandbox.grep(HOME, r"log\(")
    assert ([(match.path, match.line_number) for match in matches], more) == ([(path, 2), (path, 3)], False)
    assert sandbox.list_dir(HOME) == [f"{HOME}/src/", path]
    sandbox.write_file(path, "# end\n", append=True)
    assert sandbox.read_file(path).endswith("log('two')\n# end\n")
    sandbox.move(path, f"{HOME}/moved.py")
    assert not sandbox.exists(path)
    sandbox.remove(f"{HOME}/moved.py")
    with pytest.raises(FileNotFoundError) as gone:
        sandbox.read_file(f"{HOME}/moved.py")
    assert isinstance(gone.value, PathNotFound)
    assert sandbox.health().ok


def test_a_write_that_expects_another_content_is_refused(sandbox: Sandbox) -> None:
    path = f"{HOME}/a"
    sandbox.write_file(path, "one", if_digest="")
    sandbox.write_file(path, "two", if_digest=hashlib.sha256(b"one").hexdigest())
    with pytest.raises(DigestMismatch):
        sandbox.write_file(path, "three", if_digest=hashlib.sha256(b"one").hexdigest())
    assert sandbox.read_file(path) == "two"


def test_bytes_above_the_inline_limit_round_trip_and_leave_no_blob(fleet: Stack, sandbox: Sandbox) -> None:
    data = random.Random(7).randbytes(5 * 1024 * 1024)
    sandbox.update_file(f"{HOME}/big", data)
    assert sandbox.download_file(f"{HOME}/big") == data
    assert sandbox.run("sha256sum", stdin=data).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    result = sandbox.run("yes | head -c 1000000", max_output_bytes=2_000_000)
    assert (len(result.stdout), result.truncated) == (1_000_000, False)
    # Control characters grow sixfold as JSON: they must not overflow a message.
    sandbox.update_file(f"{HOME}/nul", bytes(200_000))
    assert sandbox.download_file(f"{HOME}/nul") == bytes(200_000)
    kept = fleet.store.keys()
    assert [key for key in kept if ":blob:" in key] == []


def test_a_batch_is_one_operation_with_each_items_own_outcome(sandbox: Sandbox) -> None:
    batch = Batch().write_file(f"{HOME}/n", "41").run("expr $(cat n) + 1").read_file(f"{HOME}/n").run("exit 4")
    wrote, added, read, failed = sandbox.batch(batch)
    assert (wrote["size"], added.stdout, read, failed.exit_code) == (2, "42\n", b"41", 4)
    stopped = sandbox.batch(Batch().read_file("/nowhere").run("echo never"))
    assert len(stopped) == 1
    assert isinstance(stopped[0], PathNotFound)


def test_the_same_op_id_never_starts_a_second_effect(sandbox: Sandbox) -> None:
    first = sandbox.run("date +%N >> log; cat log", op_id=f"once-{sandbox.id}")
    again = sandbox.run("date +%N >> log; cat log", op_id=f"once-{sandbox.id}")
    assert first.stdout == again.stdout
    assert len(sandbox.read_file(f"{HOME}/log").splitlines()) == 1


def test_commands_of_one_handle_keep_their_order_and_another_handle_runs_beside(
    provider: SandboxProvider, sandbox: Sandbox
) -> None:
    beside = provider.get(sandbox.id)
    assert beside is not None
    slow = threading.Thread(target=lambda: sandbox.run("until test -e go; do sleep 0.02; done; echo slow >> order"))
    slow.start()
    beside.run("echo beside >> order; touch go", queue_timeout_s=15)
    slow.join(20)
    assert sandbox.read_file(f"{HOME}/order") == "beside\nslow\n"


def test_a_command_that_waits_too_long_for_its_lane_is_told_so_and_never_runs(sandbox: Sandbox) -> None:
    wait = "until test -e free; do sleep 0.02; done"
    blocker = threading.Thread(target=lambda: sandbox.run(wait, op_id=f"b-{sandbox.id}"))
    blocker.start()
    while not any(op.op_id == f"b-{sandbox.id}" and op.state == "claimed" for op in _ops(sandbox)):
        pass
    with pytest.raises(QueueTimeout):
        sandbox.run("touch ran", queue_timeout_s=0.5)
    sandbox.write_file(f"{HOME}/free", "")
    blocker.join(20)
    assert not sandbox.exists(f"{HOME}/ran")


def _ops(sandbox: Sandbox) -> list[object]:
    return list(sandbox._provider._client().store.ops())


def test_wrong_arguments_are_refused_before_anything_is_sent(sandbox: Sandbox) -> None:
    for wrong in ("a\0b", ""):
        with pytest.raises(InvalidArgument):
            sandbox.read_file(wrong)
    with pytest.raises(InvalidArgument):
        sandbox.run("true", env={"A=B": "c"})
    with pytest.raises(InvalidArgument):
        sandbox.run("true", timeout_s=-1)


def test_a_released_sandbox_is_warm_and_comes_back_with_its_files(provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("api-warm", user_id="u1")
    held = provider.get(sandbox_id)
    assert held is not None
    held.write_file(f"{HOME}/kept", "yes")
    provider.release(sandbox_id)
    assert provider.get(sandbox_id) is None
    assert {info.sandbox_id: info.state for info in provider.list()}[sandbox_id] == "warm"
    assert provider.acquire("api-warm", user_id="u1") == sandbox_id
    again = provider.get(sandbox_id)
    assert again is not None
    assert again.read_file(f"{HOME}/kept") == "yes"
    assert provider.acquire("api-warm", user_id="u2") != sandbox_id


def test_a_destroyed_sandbox_is_gone_and_its_data_stays_unless_told_otherwise(provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("api-destroy")
    held = provider.get(sandbox_id)
    assert held is not None
    held.write_file(f"{HOME}/kept", "yes")
    provider.destroy(sandbox_id)
    with pytest.raises(SandboxNotFound):
        held.run("true")
    assert provider.acquire("api-destroy") == sandbox_id
    again = provider.get(sandbox_id)
    assert again is not None
    assert again.read_file(f"{HOME}/kept") == "yes"
    provider.destroy(sandbox_id, delete_data=True)
    provider.acquire("api-destroy")
    fresh = provider.get(sandbox_id)
    assert fresh is not None
    assert fresh.list_dir(HOME) == []


def test_the_first_of_two_agents_to_finish_does_not_release_it_under_the_other(provider: SandboxProvider) -> None:
    sandbox_id = provider.acquire("api-shared")
    assert provider.acquire("api-shared") == sandbox_id
    provider.release(sandbox_id)
    assert {info.sandbox_id: info.state for info in provider.list()}[sandbox_id] == "live"
    provider.release(sandbox_id)
    assert {info.sandbox_id: info.state for info in provider.list()}[sandbox_id] == "warm"


def test_the_async_twin_does_many_things_at_once(fleet: Stack) -> None:
    async def one(provider: AsyncSandboxProvider, number: int) -> str:
        sandbox = provider.get(await provider.acquire(f"api-async-{number}"))
        assert sandbox is not None
        await sandbox.write_file(f"{HOME}/n", str(number))
        result = await sandbox.run("cat n")
        assert await sandbox.read_file(f"{HOME}/n") == result.stdout
        return result.stdout

    async def run() -> list[str]:
        async with AsyncSandboxProvider(fleet.settings) as provider:
            return await asyncio.gather(*(one(provider, number) for number in range(6)))

    assert asyncio.run(run()) == [str(number) for number in range(6)]


def test_kombus_own_publish_carries_operations_too(fleet: Stack) -> None:
    settings = fleet.settings.model_copy(update={"publish": "kombu"})
    with SandboxProvider(settings) as provider:
        sandbox = provider.get(provider.acquire("api-kombu"))
        assert sandbox is not None
        assert sandbox.run("echo by kombu").stdout == "by kombu\n"
        assert sandbox.run("echo once", op_id="kombu-1").stdout == sandbox.run("echo twice", op_id="kombu-1").stdout
