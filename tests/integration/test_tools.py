"""The tools over a real fleet: the golden answers, the gate's races, losses, and locks across processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet import Sandbox, SandboxProvider, Settings
from sandfleet.stack import Stack
from sandfleet.tools import (
    SandboxMiddleware,
    Tool,
    ToolRuntime,
    ensure_sandbox_initialized,
    get_file_operation_lock,
    get_tools,
    list_outputs,
    present_files,
    upload_to_thread,
)
from tests.golden.cases import CASES, FILE, HOME, Case
from tests.services import require

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

_SPAWN = multiprocessing.get_context("spawn")
_CLEAN = "cd /mnt/user-data; chmod -R u+rwX . ; find workspace outputs uploads -mindepth 1 -delete"


@pytest.fixture(scope="module", params=["local", "host"])
def shared(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    """One client for all golden cases: over bubblewrap, and over host mode, whose paths must look the same."""
    if request.param == "local":
        with SandboxProvider(request.getfixturevalue("fleet").settings) as made:
            yield made
        return
    require("redis")
    with Stack(nodes=1, backend="host", allow_host_bash=True) as stack, SandboxProvider(stack.settings) as made:
        yield made


@pytest.fixture
def sandbox(shared: SandboxProvider) -> Sandbox:
    """The golden cases' sandbox, emptied."""
    found = shared.get(shared.acquire("tools-golden"))
    assert found is not None
    found.run(_CLEAN).check()
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.real], ids=lambda case: case.name)
def test_the_answer_over_a_real_sandbox_is_the_golden_one(
    case: Case, sandbox: Sandbox, shared: SandboxProvider
) -> None:
    case.prepare(sandbox)
    if case.shell:
        sandbox.run(case.shell).check()
    base = shared.settings
    if "backend" in case.settings:
        base = base.model_copy(update={"allow_host_bash": False})
    tool = case.tool(base, shared)
    assert tool.invoke(case.runtime("tools-golden"), **case.arguments()) == case.expected
    if case.name.partition("/")[0] in ("bash", "ls", "glob", "grep", "read_file"):
        assert asyncio.run(tool.ainvoke(case.runtime("tools-golden"), **case.arguments())) == case.expected
    if case.after is not None:
        path, text = case.after
        assert sandbox.read_file(path) == text


def test_a_file_goes_in_is_worked_on_and_comes_out(provider: SandboxProvider) -> None:
    tools = {tool.name: tool for tool in get_tools(provider=provider)}
    runtime = ToolRuntime(context={"thread_id": "tools-files"})
    path = upload_to_thread("tools-files", "data.csv", b"a,b\n1,2\n", provider=provider)
    assert tools["read_file"](runtime, "t", path, 2) == "1,2"
    command = f"mkdir -p ../outputs && sort {path} > ../outputs/sorted.csv"
    assert tools["bash"](runtime, "t", command) == "(no output)"
    presented = "/mnt/user-data/outputs/sorted.csv"
    present = present_files.bound(provider=provider)
    assert present(runtime, [presented]) == "Successfully presented files"
    provider.get(runtime.state["sandbox"]["sandbox_id"]).run(  # type: ignore[union-attr]
        "ln -s /etc/passwd ../outputs/link; ln -s /etc ../outputs/etc"
    ).check()
    for link in ("link", "etc/passwd"):
        answer = present(runtime, [f"/mnt/user-data/outputs/{link}"])
        assert answer.startswith("Error: Only regular files can be presented, not a symlink: ")
    assert runtime.state["artifacts"] == [presented]
    assert [entry.path for entry in list_outputs("tools-files", provider=provider)] == [presented]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_first_calls_at_once_acquire_one_sandbox_and_one_release_gives_it_back(
    asynchronous: bool, fleet: Stack
) -> None:
    with SandboxProvider(fleet.settings) as provider:
        runtime = ToolRuntime(context={"thread_id": f"tools-first-{asynchronous}"})
        bash = get_tools(provider=provider)[0]
        if asynchronous:
            answers = asyncio.run(_together(bash, runtime))
        else:
            answers = []
            threads = [
                threading.Thread(target=lambda: answers.append(bash(runtime, "test", "echo hello"))) for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert answers == ["hello\n"] * 6
        sandbox_id = runtime.state["sandbox"]["sandbox_id"]
        assert provider._client().holds._held[sandbox_id].count == 1
        SandboxMiddleware(provider=provider).after_agent(runtime.state, runtime)
        [info] = [info for info in provider.list() if info.sandbox_id == sandbox_id]
        assert (info.state, info.agents) == ("warm", 0)


async def _together(bash: Tool, runtime: ToolRuntime) -> list[str]:
    return await asyncio.gather(*(bash.ainvoke(runtime, description="t", command="echo hello") for _ in range(6)))


def test_a_destroyed_sandbox_is_acquired_again_once_and_the_command_runs_once(provider: SandboxProvider) -> None:
    runtime = ToolRuntime(context={"thread_id": "tools-lost"})
    bash = get_tools(provider=provider)[0]
    assert bash(runtime, "test", "echo first >> log") == "(no output)"
    before = provider.get(runtime.state["sandbox"]["sandbox_id"])
    assert before is not None
    provider.destroy(before.id)
    assert bash(runtime, "test", "echo second >> log; cat log") == "first\nsecond\n"


def test_agents_that_share_a_sandbox_release_it_with_the_last(provider: SandboxProvider) -> None:
    parent = ToolRuntime(context={"thread_id": "tools-shared"})
    sandbox = ensure_sandbox_initialized(parent, provider=provider)
    # A subagent begins with its parent's state and a copy of its context.
    child = ToolRuntime(state=dict(parent.state), context=dict(parent.context))
    assert ensure_sandbox_initialized(child, provider=provider).id == sandbox.id
    middleware = SandboxMiddleware(provider=provider)
    middleware.after_agent(child.state, child)
    assert sandbox.run("echo still here").stdout == "still here\n"
    [info] = [info for info in provider.list() if info.sandbox_id == sandbox.id]
    assert info.agents == 1
    middleware.after_agent(parent.state, parent)
    [info] = [info for info in provider.list() if info.sandbox_id == sandbox.id]
    assert info.agents == 0


def test_the_gate_lets_nobody_write_over_a_version_that_was_not_read(provider: SandboxProvider) -> None:
    settings = provider.settings.model_copy(update={"read_before_write": True})
    tools = {tool.name: tool for tool in get_tools(settings, provider=provider)}
    runtime = ToolRuntime(context={"thread_id": "tools-gate"})
    sandbox = ensure_sandbox_initialized(runtime, provider=provider)
    sandbox.write_file(FILE, "one")
    blocked = tools["write_file"](runtime, "t", FILE, "mine")
    assert blocked.startswith("Error: write_file blocked")
    assert tools["read_file"](runtime, "t", FILE) == "one"
    sandbox.run(f"printf two > {FILE}").check()  # behind the tools' back
    assert tools["write_file"](runtime, "t", FILE, "mine").startswith("Error: write_file blocked")
    assert sandbox.read_file(FILE) == "two"
    assert tools["read_file"](runtime, "t", FILE) == "two"
    assert tools["write_file"](runtime, "t", FILE, "mine") == "OK"
    assert tools["str_replace"](runtime, "t", FILE, "mine", "x").startswith("Error: str_replace blocked")
    assert tools["read_file"](runtime, "t", FILE) == "mine"
    sandbox.run(f"printf ' and more' >> {FILE}").check()
    assert tools["str_replace"](runtime, "t", FILE, "mine", "x").startswith("Error: str_replace blocked")
    assert sandbox.read_file(FILE) == "mine and more"
    assert tools["read_file"](runtime, "t", FILE) == "mine and more"
    assert tools["str_replace"](runtime, "t", FILE, "mine", "yours") == "OK"
    assert sandbox.read_file(FILE) == "yours and more"


def _add_up(settings: Settings, sandbox_id: str, path: str, times: int) -> None:
    with SandboxProvider(settings) as provider:
        sandbox = provider.get(sandbox_id)
        assert sandbox is not None
        for _ in range(times):
            with get_file_operation_lock(sandbox, path):
                sandbox.write_file(FILE, str(int(sandbox.read_file(FILE)) + 1))


@pytest.mark.parametrize("make", [threading.Thread, pytest.param(_SPAWN.Process, marks=pytest.mark.slow)])
def test_read_modify_write_under_the_lock_loses_nothing_between_clients(make: Any, provider: SandboxProvider) -> None:
    """Clients in one process, and (slow: each imports everything anew) in processes of their own."""
    sandbox = ensure_sandbox_initialized(ToolRuntime(context={"thread_id": "tools-lock"}), provider=provider)
    sandbox.write_file(FILE, "0")
    # Three spellings of one file.
    workers = [
        make(target=_add_up, args=(provider.settings, sandbox.id, path, 10))
        for path in (FILE, f"{HOME}//./file.txt", "file.txt")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(45)
    assert sandbox.read_file(FILE) == "30"
