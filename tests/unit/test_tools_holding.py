"""Which sandbox a run of an agent holds: acquired once, again when lost, released by whoever acquired it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet import SandboxProvider, Settings, set_sandbox_provider
from sandfleet.errors import InvalidArgument, NoCapacity, NotStarted, OutcomeUnknown
from sandfleet.testing import MockSandboxProvider
from sandfleet.tools import (
    SandboxMiddleware,
    Tool,
    ToolRuntime,
    bash_tool,
    ensure_sandbox_initialized,
    ensure_sandbox_initialized_async,
    ls_tool,
    read_file_tool,
    str_replace_tool,
    write_file_tool,
)
from tests.services import wait_until


class Watched(MockSandboxProvider):
    """Counts acquires, holds them up, and lets operations fail."""

    def __init__(self) -> None:
        super().__init__()
        self.acquired: list[tuple[str | None, str | None]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refuses: Exception | None = None
        self.fails: list[Exception] = []
        answer = self._local.call

        def call(target: Any, wanted: Any) -> Any:
            if self.fails:
                raise self.fails.pop(0)
            return answer(target, wanted)

        self._local.call = call  # type: ignore[method-assign]

    def _acquire(
        self, thread_id: str | None, user_id: str | None, timeout_s: float | None, on_lost: str | None = None
    ) -> Any:
        self.acquired.append((thread_id, user_id))
        self.gate.wait(10)
        if self.refuses is not None:
            raise self.refuses
        return (yield from super()._acquire(thread_id, user_id, timeout_s, on_lost))

    def count(self, runtime: ToolRuntime) -> int:
        """How often the runtime's sandbox is held."""
        return int(self._local.holds[runtime.state["sandbox"]["sandbox_id"]])


@pytest.fixture
def provider() -> Iterator[Watched]:
    with Watched() as made:
        yield made


@pytest.fixture
def bash(provider: Watched) -> Tool:
    return bash_tool.bound(provider=provider)


@pytest.fixture
def runtime() -> ToolRuntime:
    return ToolRuntime(context={"thread_id": "t1"})


def _run(bash: Tool, runtime: Any) -> str:
    return bash(runtime, "test", "id")


ANSWER = "Mock output for: id"


# --- acquiring ---------------------------------------------------------------------------------


def test_the_first_call_acquires_and_all_further_ones_use_what_is_held(
    bash: Tool, provider: Watched, runtime: ToolRuntime
) -> None:
    assert [_run(bash, runtime) for _ in range(3)] == [ANSWER] * 3
    assert provider.acquired == [("t1", None)]
    assert runtime.context["sandbox_id"] == runtime.state["sandbox"]["sandbox_id"]


def test_thread_and_user_may_come_from_the_configuration(bash: Tool, provider: Watched) -> None:
    assert _run(bash, ToolRuntime(config={"configurable": {"thread_id": "t2", "user_id": "u"}})) == ANSWER
    assert provider.acquired == [("t2", "u")]


def test_a_runtime_without_a_thread_gets_no_anonymous_sandbox(bash: Tool, provider: Watched) -> None:
    assert _run(bash, ToolRuntime()).startswith("Error: Thread ID not available in runtime context")
    assert provider.acquired == []


@pytest.mark.parametrize("runtime", [None, SimpleNamespace(context=None)])
def test_no_runtime_or_one_without_state_is_an_error_text(bash: Tool, runtime: Any) -> None:
    assert _run(bash, runtime) == "Error: Tool runtime not available: it needs a state"


def test_the_provider_may_come_from_the_context_or_be_the_process_own(provider: Watched) -> None:
    assert _run(bash_tool, ToolRuntime(context={"thread_id": "t1", "sandbox_provider": provider})) == ANSWER
    set_sandbox_provider(provider)
    try:
        assert _run(bash_tool, ToolRuntime(context={"thread_id": "t2"})) == ANSWER
    finally:
        set_sandbox_provider(None)
    assert provider.acquired == [("t1", None), ("t2", None)]


def test_an_id_in_the_state_that_this_run_does_not_hold_is_acquired(bash: Tool, provider: Watched) -> None:
    """A state restored in another process: without a hold of its own, the sandbox could be reaped between two calls."""
    known = ToolRuntime(context={"thread_id": "t1"})
    _run(bash, known)
    restored = ToolRuntime(state={"sandbox": dict(known.state["sandbox"])}, context={"thread_id": "t1"})
    assert _run(bash, restored) == ANSWER
    assert provider.count(restored) == 2


def test_a_subagent_works_in_its_parents_sandbox_whatever_its_own_thread_is(bash: Tool, provider: Watched) -> None:
    parent = ToolRuntime(context={"thread_id": "t1"})
    _run(bash, parent)
    child = ToolRuntime(state={"sandbox_id": parent.state["sandbox"]["sandbox_id"]}, context={"thread_id": "sub"})
    assert _run(bash, child) == ANSWER
    assert provider.acquired == [("t1", None), ("t1", None)]


def test_a_context_that_cannot_be_written_to_leaves_it_to_the_state(bash: Tool, provider: Watched) -> None:
    seen = SimpleNamespace(state={}, context=None, config={"configurable": {"thread_id": "t1"}})
    assert [_run(bash, seen) for _ in range(2)] == [ANSWER] * 2
    assert provider.acquired == [("t1", None)]
    SandboxMiddleware(provider=provider).after_agent(seen.state, {"configurable": {"thread_id": "t1"}})
    assert provider._local.holds == {}
    assert _run(bash, seen) == ANSWER
    assert len(provider.acquired) == 2


# --- several calls at once ---------------------------------------------------------------------


def test_calls_on_several_threads_acquire_once(bash: Tool, provider: Watched, runtime: ToolRuntime) -> None:
    provider.gate.clear()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(_run(bash, runtime))) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: provider.acquired, 5)
    provider.gate.set()
    for thread in threads:
        thread.join(10)
    assert answers == [ANSWER] * 5
    assert (len(provider.acquired), provider.count(runtime)) == (1, 1)


async def test_calls_on_an_event_loop_acquire_once(bash: Tool, provider: Watched, runtime: ToolRuntime) -> None:
    calls = [bash.ainvoke(runtime, description="t", command="id") for _ in range(5)]
    assert await asyncio.gather(*calls) == [ANSWER] * 5
    assert (len(provider.acquired), provider.count(runtime)) == (1, 1)


async def test_all_that_wait_are_told_why_the_one_acquire_failed(
    bash: Tool, provider: Watched, runtime: ToolRuntime
) -> None:
    provider.refuses = NoCapacity("every place is taken", retry_after_s=2.0)
    answers = await asyncio.gather(*(bash.ainvoke(runtime, description="t", command="id") for _ in range(3)))
    assert set(answers) == {"Error: every place is taken (try again in 2 s)"}
    provider.refuses = None
    assert await bash.ainvoke(runtime, description="t", command="id") == ANSWER


async def test_when_the_acquiring_call_is_cancelled_another_one_acquires(
    bash: Tool, provider: Watched, runtime: ToolRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up, entered = asyncio.Event(), asyncio.Event()
    twin_acquire = "sandfleet.aio.AsyncSandboxProvider.acquire"
    turns = iter([True, False])

    async def acquire(self: Any, thread_id: str, *, user_id: str | None = None) -> str:
        if next(turns):
            entered.set()
            await held_up.wait()
        return await asyncio.to_thread(provider.acquire, thread_id, user_id=user_id)

    monkeypatch.setattr(twin_acquire, acquire)
    first = asyncio.create_task(bash.ainvoke(runtime, description="t", command="id"))
    await entered.wait()
    second = asyncio.create_task(bash.ainvoke(runtime, description="t", command="id"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ANSWER
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_nobody_expected_tells_that_it_was_the_initialisation(
    asynchronous: bool, bash: Tool, provider: Watched, runtime: ToolRuntime
) -> None:
    provider.refuses = RuntimeError("boom")
    if asynchronous:
        answer = asyncio.run(bash.ainvoke(runtime, description="t", command="id"))
    else:
        answer = _run(bash, runtime)
    assert answer == "Error: Unexpected error initializing sandbox: RuntimeError: boom"
    with pytest.raises(RuntimeError, match="boom"):
        ensure_sandbox_initialized(runtime, provider=provider)


# --- losing it ---------------------------------------------------------------------------------


def test_a_lost_sandbox_is_acquired_again_and_the_call_repeated(
    bash: Tool, provider: Watched, runtime: ToolRuntime
) -> None:
    _run(bash, runtime)
    provider.backend.kill(runtime.state["sandbox"]["sandbox_id"])
    assert _run(bash, runtime) == ANSWER
    assert len(provider.acquired) == 2


def test_what_is_known_not_to_have_begun_is_repeated_once_and_counts_one_hold(
    bash: Tool, provider: Watched, runtime: ToolRuntime
) -> None:
    _run(bash, runtime)
    provider.fails = [NotStarted("the node is draining")]
    assert _run(bash, runtime) == ANSWER
    assert provider.count(runtime) == 1
    provider.fails = [NotStarted("the node is draining")] * 2
    assert _run(bash, runtime) == "Error: the node is draining"
    assert provider.fails == []


def test_what_may_have_happened_is_never_repeated(bash: Tool, provider: Watched, runtime: ToolRuntime) -> None:
    _run(bash, runtime)
    provider.fails = [OutcomeUnknown("nobody knows how it ended"), RuntimeError("a second try")]
    assert _run(bash, runtime) == "Error: nobody knows how it ended"
    assert len(provider.fails) == 1
    assert len(provider.acquired) == 1


# --- releasing ---------------------------------------------------------------------------------


def test_the_middleware_releases_what_tools_acquired(bash: Tool, provider: Watched, runtime: ToolRuntime) -> None:
    middleware = SandboxMiddleware(provider=provider)
    assert middleware.before_agent(runtime.state, runtime) is None
    assert provider.acquired == []
    _run(bash, runtime)
    middleware.after_agent(runtime.state, runtime)
    assert provider._local.holds == {}
    middleware.after_agent(runtime.state, runtime)  # twice is once
    assert "sandbox_hold" not in runtime.context


async def test_an_eager_middleware_acquires_before_the_agent(provider: Watched, runtime: ToolRuntime) -> None:
    middleware = SandboxMiddleware(lazy_init=False, provider=provider)
    gained = await middleware.abefore_agent(runtime.state, runtime)
    assert gained == {"sandbox": {"sandbox_id": runtime.state["sandbox"]["sandbox_id"]}}
    assert middleware.before_agent(runtime.state, runtime) == gained
    assert len(provider.acquired) == 1
    await middleware.aafter_agent(runtime.state, runtime)
    assert provider._local.holds == {}


def test_the_middleware_takes_the_seeds_arguments(provider: Watched) -> None:
    state: dict[str, Any] = {}
    middleware = SandboxMiddleware(lazy_init=False, provider=provider)
    middleware.before_agent(state, {"configurable": {"thread_id": "t1"}})
    assert provider.acquired == [("t1", None)]
    middleware.after_agent(state)
    assert provider._local.holds == {}


def test_a_copied_context_does_not_release_its_originals_sandbox(bash: Tool, provider: Watched) -> None:
    parent = ToolRuntime(context={"thread_id": "t1"})
    _run(bash, parent)
    child = ToolRuntime(state=dict(parent.state), context=dict(parent.context))
    SandboxMiddleware(provider=provider).after_agent(child.state, child)
    assert provider.count(parent) == 1


def test_an_agent_whose_sandbox_died_does_not_release_anothers_new_one(bash: Tool, provider: Watched) -> None:
    first, second = ToolRuntime(context={"thread_id": "t1"}), ToolRuntime(context={"thread_id": "t1"})
    _run(bash, first)
    _run(bash, second)
    sandbox_id = first.state["sandbox"]["sandbox_id"]
    provider.backend.kill(sandbox_id)
    del provider._local.holds[sandbox_id]  # as a client forgets holds of another epoch
    assert _run(bash, second) == ANSWER
    SandboxMiddleware(provider=provider).after_agent(first.state, first)
    assert provider.count(second) == 1


def test_a_failing_release_does_not_cost_the_agent_its_answer(
    bash: Tool,
    provider: Watched,
    runtime: ToolRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _run(bash, runtime)

    def refuse(_id: str) -> None:
        raise NoCapacity("not now")

    monkeypatch.setattr(provider, "release", refuse)
    SandboxMiddleware(provider=provider).after_agent(runtime.state, runtime)
    assert "tools.release_failed" in caplog.text


# --- providers of another kind -------------------------------------------------------------------


class SeedSandbox:
    """What seed 000 tells to write: synchronous, and no more than the interface."""

    id = "local"

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def execute_command(self, command: str, env: Any = None, timeout: float | None = None) -> str:
        return f"ran {command}"

    def write_file(self, path: str, content: str, append: bool = False) -> None:
        self.files[path] = content

    def read_file(self, path: str) -> str:
        return self.files[path]

    def list_dir(self, path: str, max_depth: int = 2) -> list[str]:
        return sorted(self.files)


class SeedProvider:
    """The seeds' three methods."""

    def __init__(self) -> None:
        self.sandbox = SeedSandbox()
        self.released: list[str] = []

    def acquire(self, thread_id: str | None = None) -> str:
        return "local"

    def get(self, sandbox_id: str) -> SeedSandbox | None:
        return self.sandbox if sandbox_id == "local" else None

    def release(self, sandbox_id: str) -> None:
        self.released.append(sandbox_id)


async def test_the_tools_work_over_a_provider_with_the_seeds_methods_only(runtime: ToolRuntime) -> None:
    provider = SeedProvider()
    assert _run(bash_tool.bound(provider=provider), runtime) == "ran id"
    assert await bash_tool.bound(provider=provider).ainvoke(runtime, description="t", command="id") == "ran id"
    assert write_file_tool.bound(provider=provider)(runtime, "t", "/mnt/user-data/a", "x") == "OK"
    assert await ls_tool.bound(provider=provider).ainvoke(runtime, description="t", path="/mnt") == "/mnt/user-data/a"
    replace, read = (tool.bound(provider=provider) for tool in (str_replace_tool, read_file_tool))
    provider.sandbox.files["/mnt/user-data/a"] = "one\ntwo\none\n"
    assert "occurs 2 times in file: /mnt/user-data/a (lines 1, 3)" in replace(
        runtime, "t", "/mnt/user-data/a", "one", "1"
    )
    assert replace(runtime, "t", "/mnt/user-data/a", "two", "2") == "OK"
    assert read(runtime, "t", "/mnt/user-data/a", 2) == "2\none"
    SandboxMiddleware(provider=provider).after_agent(runtime.state, runtime)
    assert provider.released == ["local"]


def test_the_gate_stays_closed_over_a_provider_that_cannot_compare_and_write(runtime: ToolRuntime) -> None:
    provider, path = SeedProvider(), "/mnt/user-data/a"
    provider.sandbox.files[path] = "one"
    gate = Settings(read_before_write=True)
    read, write, replace = (
        tool.bound(provider=provider, settings=gate) for tool in (read_file_tool, write_file_tool, str_replace_tool)
    )
    assert read(runtime, "t", path) == "one"
    assert write(runtime, "t", path, "x").startswith("Error: Failed to write file")
    assert replace(runtime, "t", path, "one", "x").startswith("Error: Unexpected error replacing string")
    assert provider.sandbox.files == {path: "one"}


async def test_code_of_ones_own_gets_the_same_sandbox_on_both_sides(provider: Watched, runtime: ToolRuntime) -> None:
    sandbox = ensure_sandbox_initialized(runtime, provider=provider)
    twin = await ensure_sandbox_initialized_async(runtime, provider=provider)
    assert sandbox.id == twin.id
    assert (await twin.run("id")).stdout == sandbox.run("id").stdout == ANSWER
    assert isinstance(provider, SandboxProvider)
    with pytest.raises(InvalidArgument, match="Thread ID not available"):
        ensure_sandbox_initialized(ToolRuntime(), provider=provider)
