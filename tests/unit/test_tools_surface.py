"""The tools as frameworks and models see them: schemas, arguments, limits, the gate, uploads and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet import AsyncSandboxProvider, Sandbox, SandboxSpec, Settings
from sandfleet import tools as package
from sandfleet.errors import InvalidArgument
from sandfleet.partial import Listed
from sandfleet.testing import MockSandboxProvider
from sandfleet.tools import (
    Runtime,
    ToolRuntime,
    bash_tool,
    ensure_sandbox_initialized,
    get_tools,
    glob_tool,
    grep_tool,
    list_outputs,
    list_outputs_async,
    ls_tool,
    present_files,
    read_file_tool,
    str_replace_tool,
    upload_to_thread,
    upload_to_thread_async,
    write_file_tool,
)
from sandfleet.tools.bodies import write_limit

HOME, OUTPUTS = "/mnt/user-data/workspace", "/mnt/user-data/outputs"
SEVEN = ["bash", "ls", "glob", "grep", "read_file", "write_file", "str_replace"]


@pytest.fixture
def provider() -> Iterator[MockSandboxProvider]:
    with MockSandboxProvider() as made:
        yield made


@pytest.fixture
def runtime() -> ToolRuntime:
    return ToolRuntime(context={"thread_id": "t1"})


@pytest.fixture
def sandbox(provider: MockSandboxProvider, runtime: ToolRuntime) -> Sandbox:
    found = ensure_sandbox_initialized(runtime, provider=provider)
    assert isinstance(found, Sandbox)
    return found


# --- the package ---------------------------------------------------------------------------------


def test_the_package_tells_what_is_in_it_and_every_part_says_what_it_is() -> None:
    names = package.__all__
    assert sorted(names, key=lambda n: (not n.isupper(), not n[:1].isupper(), n)) == names
    for name in names:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert (value.__doc__ or "").strip(), name


def test_our_own_runtime_is_a_runtime(runtime: ToolRuntime) -> None:
    assert isinstance(runtime, Runtime)


# --- which tools, and their schemas --------------------------------------------------------------


def test_an_agent_gets_the_seven_tools(provider: MockSandboxProvider) -> None:
    assert [tool.name for tool in get_tools(provider=provider)] == SEVEN
    assert [tool.name for tool in get_tools(provider=AsyncSandboxProvider.over(provider))] == SEVEN


@pytest.mark.parametrize(("allowed", "names"), [(False, SEVEN[1:]), (True, SEVEN)])
def test_bash_is_left_out_in_host_mode_unless_it_is_allowed(allowed: bool, names: list[str]) -> None:
    settings = Settings(backend="host", allow_host_bash=allowed)
    assert [tool.name for tool in get_tools(settings)] == names


def test_bash_is_left_out_for_a_provider_that_asks_for_host_sandboxes(provider: MockSandboxProvider) -> None:
    provider.spec = SandboxSpec(backend="host")
    assert [tool.name for tool in get_tools(provider=provider)] == SEVEN[1:]
    runtime = ToolRuntime(context={"thread_id": "t1"})
    assert bash_tool.bound(provider=provider)(runtime, "t", "id").startswith("Error: Host bash execution is disabled")
    assert runtime.state == {}, "a refused command needs no sandbox"


@pytest.mark.parametrize(
    ("tool", "parameters"),
    [
        (bash_tool, "description command"),
        (ls_tool, "description path"),
        (glob_tool, "description pattern path include_dirs=False max_results=200"),
        (grep_tool, "description pattern path glob=None literal=False case_sensitive=False max_results=100"),
        (read_file_tool, "description path start_line=None end_line=None"),
        (write_file_tool, "description path content append=False"),
        (str_replace_tool, "description path old_str new_str replace_all=False"),
    ],
    ids=SEVEN,
)
def test_the_parameters_are_the_references_in_name_order_and_default(tool: Any, parameters: str) -> None:
    schema = tool.parameters
    told = [
        name if name in schema["required"] else f"{name}={field['default']}"
        for name, field in schema["properties"].items()
    ]
    assert " ".join(told) == parameters
    assert all(field["description"] for field in schema["properties"].values())
    assert schema["additionalProperties"] is False
    assert tool.to_openai()["function"]["parameters"] == tool.to_anthropic()["input_schema"] == schema


def test_arguments_come_by_position_or_by_name(provider: MockSandboxProvider, runtime: ToolRuntime) -> None:
    bash = bash_tool.bound(provider=provider)
    answer = "Mock output for: id"
    assert bash(runtime, "why", "id") == bash(runtime, "why", command="id") == answer
    assert bash.func(runtime, description="why", command="id") == answer
    with pytest.raises(TypeError, match="takes 2 arguments"):
        bash(runtime, "why", "id", "more")
    with pytest.raises(TypeError, match="command twice"):
        bash(runtime, "why", "id", command="id")


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"description": "t"}, "path: Field required"),
        ({"description": "t", "path": ""}, "path: "),
        ({"description": "t", "path": 3}, "path: "),
        ({"description": "t", "path": "a", "start_line": "two"}, "start_line: "),
        ({"path": "a", "line": 1}, "description: Field required; line: Extra inputs are not permitted"),
        ([], "arguments: "),
    ],
)
async def test_a_models_wrong_arguments_are_named_and_start_nothing(
    args: Any, names: str, provider: MockSandboxProvider, runtime: ToolRuntime
) -> None:
    read = read_file_tool.bound(provider=provider)
    answer = read.run(runtime, args)
    assert answer.startswith("Error: Invalid arguments for read_file: ")
    assert names in answer
    assert await read.arun(runtime, args) == answer
    assert runtime.state == {}


def test_a_number_written_as_text_is_a_number(
    sandbox: Sandbox, provider: MockSandboxProvider, runtime: ToolRuntime
) -> None:
    sandbox.write_file("a", "one\ntwo\n")
    read = read_file_tool.bound(provider=provider)
    assert read.run(runtime, {"description": "t", "path": "a", "start_line": "2"}) == "two"


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environ", "limit"),
    [
        ({}, {}, 81_920),
        ({}, {"DEERFLOW_WRITE_FILE_MAX_BYTES": "100"}, 100),
        ({}, {"DEERFLOW_WRITE_FILE_MAX_BYTES": "0"}, 0),
        ({}, {"DEERFLOW_WRITE_FILE_MAX_BYTES": "much"}, 81_920),
        ({"write_file_max_bytes": 5}, {"DEERFLOW_WRITE_FILE_MAX_BYTES": "100"}, 5),
    ],
)
def test_the_write_limit_is_the_setting_or_the_references_variable(
    given: dict[str, int], environ: dict[str, str], limit: int
) -> None:
    assert write_limit(Settings(**given), environ) == limit


def test_zero_switches_each_limit_off(provider: MockSandboxProvider, runtime: ToolRuntime, sandbox: Sandbox) -> None:
    settings = Settings(
        bash_output_max_chars=0, read_file_output_max_chars=0, ls_output_max_chars=0, write_file_max_bytes=0
    )
    tools = {tool.name: tool for tool in get_tools(settings, provider=provider)}
    text = "x" * 99 + "\n"
    provider.backend.set_output("many", text * 3000)
    assert tools["bash"](runtime, "t", "many") == text * 3000
    assert tools["write_file"](runtime, "t", f"{HOME}/a", text * 3000) == "OK"
    assert tools["read_file"](runtime, "t", f"{HOME}/a") == text * 3000
    for number in range(900):
        sandbox.write_file(f"{HOME}/long-{number:03}-name", "")
    assert len(tools["ls"](runtime, "t", HOME).split("\n")) == 901


def test_the_configured_results_cap_what_is_asked_for(
    provider: MockSandboxProvider, runtime: ToolRuntime, sandbox: Sandbox
) -> None:
    for number in range(5):
        sandbox.write_file(f"{HOME}/{number}.txt", "same\n")
    tools = {tool.name: tool for tool in get_tools(Settings(glob_max_results=2, grep_max_results=3), provider=provider)}
    assert tools["glob"](runtime, "t", "*.txt", HOME, max_results=4).startswith(f"Found 2 paths under {HOME} (showing")
    assert tools["grep"](runtime, "t", "same", HOME).startswith(f"Found 3 matches under {HOME} (showing")


def test_no_request_lifts_the_hard_caps_of_searches(
    provider: MockSandboxProvider, runtime: ToolRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, int] = {}
    answer = provider._local.call

    def call(target: Any, wanted: Any) -> Any:
        asked[wanted.kind] = wanted.args.get("max_results")
        return answer(target, wanted)

    monkeypatch.setattr(provider._local, "call", call)
    lavish = Settings(glob_max_results=1000, grep_max_results=500)
    tools = {tool.name: tool for tool in get_tools(lavish, provider=provider)}
    tools["glob"](runtime, "t", "*", HOME, max_results=5000)
    tools["grep"](runtime, "t", "x", HOME, max_results=5000)
    assert asked == {"glob": 1000, "grep": 500}


def test_a_listing_keeps_to_its_limit_with_the_word_that_it_is_not_all(
    provider: MockSandboxProvider, runtime: ToolRuntime, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        sandbox.write_file(f"{HOME}/{number:02}.txt", "")
    monkeypatch.setattr(Sandbox, "list_dir", lambda self, path, depth: Listed(names_of(self, path), unread=3))
    limited = get_tools(Settings(ls_output_max_chars=400), provider=provider)
    answer = {tool.name: tool for tool in limited}["ls"](runtime, "t", HOME)
    assert len(answer) <= 400
    assert answer.startswith(f"{HOME}/00.txt\n{HOME}/01.txt\n")
    assert "[truncated: showing first " in answer
    assert answer.endswith("\n... [incomplete: 3 directories below could not be read] ...")


def names_of(sandbox: Sandbox, path: str) -> list[str]:
    return [entry.path for entry in sandbox.list_files(path)]


def test_a_directory_too_full_for_one_listing_shows_one_level_and_says_so(
    provider: MockSandboxProvider, runtime: ToolRuntime, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.write_file(f"{HOME}/a/b", "")
    listing = provider._local.call

    def call(target: Any, wanted: Any) -> Any:
        if wanted.kind == "list_dir" and wanted.args["max_depth"] > 1:
            raise InvalidArgument("holds more than 10000 entries", path=wanted.args["path"])
        return listing(target, wanted)

    monkeypatch.setattr(provider._local, "call", call)
    assert ls_tool.bound(provider=provider)(runtime, "t", HOME) == (
        f"{HOME}/a/\n... [truncated: too many entries, showing one level. Use a more specific path to see more] ..."
    )


def test_a_secret_hides_in_errors_too(
    provider: MockSandboxProvider, runtime: ToolRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(_target: Any, _wanted: Any) -> Any:
        raise RuntimeError("failed with s3cr3t-t0ken")

    monkeypatch.setattr(provider._local, "call", call)
    runtime.context["sandbox_env"] = {"TOKEN": "s3cr3t-t0ken"}
    answer = bash_tool.bound(provider=provider)(runtime, "t", "id")
    assert answer == "Error: Unexpected error executing command: RuntimeError: failed with [redacted]"


# --- the read-before-write gate --------------------------------------------------------------------


@pytest.fixture
def gated(provider: MockSandboxProvider) -> dict[str, Any]:
    return {tool.name: tool for tool in get_tools(Settings(read_before_write=True), provider=provider)}


def test_a_read_allows_one_write_and_any_write_asks_for_another_read(
    gated: dict[str, Any], sandbox: Sandbox, runtime: ToolRuntime
) -> None:
    path = f"{HOME}/a"
    assert gated["write_file"](runtime, "t", path, "one") == "OK", "a new file needs no read"
    assert gated["write_file"](runtime, "t", path, "two").startswith("Error: write_file blocked — ")
    assert gated["write_file"](runtime, "t", path, "two", append=True).startswith("Error: write_file blocked — ")
    gated["read_file"](runtime, "t", "a", 1, 1)  # another spelling, and a range of it
    assert gated["write_file"](runtime, "t", path, " and two", True) == "OK"
    assert gated["str_replace"](runtime, "t", path, "one", "1").startswith("Error: str_replace blocked — ")
    gated["read_file"](runtime, "t", path)
    assert gated["str_replace"](runtime, "t", path, "one", "1") == "OK"
    assert sandbox.read_file(path) == "1 and two"


def test_a_change_by_somebody_else_invalidates_the_read(
    gated: dict[str, Any], sandbox: Sandbox, runtime: ToolRuntime
) -> None:
    sandbox.write_file("a", "one")
    gated["read_file"](runtime, "t", "a")
    sandbox.write_file("a", "other")
    assert "blocked" in gated["write_file"](runtime, "t", "a", "mine")
    assert "blocked" in gated["str_replace"](runtime, "t", "a", "other", "mine")
    assert sandbox.read_file("a") == "other"


@pytest.mark.parametrize("kind", ["write_file", "str_replace"])
def test_a_change_at_the_very_last_moment_is_not_overwritten(
    kind: str,
    gated: dict[str, Any],
    sandbox: Sandbox,
    runtime: ToolRuntime,
    provider: MockSandboxProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command of the sandbox holds no lock: only comparing in the step that writes keeps it safe."""
    sandbox.write_file("a", "one")
    gated["read_file"](runtime, "t", "a")
    answer = provider._local.call

    def call(target: Any, wanted: Any) -> Any:
        if wanted.kind == kind:
            monkeypatch.undo()
            sandbox.write_file("a", "one, and what a command added")
        return answer(target, wanted)

    monkeypatch.setattr(provider._local, "call", call)
    rest = {"content": "mine"} if kind == "write_file" else {"old_str": "one", "new_str": "mine"}
    assert gated[kind].invoke(runtime, description="t", path="a", **rest).startswith(f"Error: {kind} blocked — a ")
    assert sandbox.read_file("a") == "one, and what a command added"


def test_the_gate_has_nothing_to_say_about_a_file_that_is_not_there(
    gated: dict[str, Any], sandbox: Sandbox, runtime: ToolRuntime
) -> None:
    assert gated["str_replace"](runtime, "t", "a", "one", "1") == "Error: File not found: a"
    sandbox.write_file("a", "one")
    gated["read_file"](runtime, "t", "a")
    sandbox.remove("a")
    assert gated["str_replace"](runtime, "t", "a", "one", "1") == "Error: File not found: a"


def test_a_refused_edit_keeps_the_read(gated: dict[str, Any], sandbox: Sandbox, runtime: ToolRuntime) -> None:
    sandbox.write_file("a", "one one")
    gated["read_file"](runtime, "t", "a")
    assert "occurs 2 times" in gated["str_replace"](runtime, "t", "a", "one", "1")
    assert "not found in file" in gated["str_replace"](runtime, "t", "a", "two", "1")
    assert gated["str_replace"](runtime, "t", "a", "one one", "1") == "OK"


def test_the_marks_travel_with_the_agents_state(gated: dict[str, Any], sandbox: Sandbox, runtime: ToolRuntime) -> None:
    sandbox.write_file("a", "one")
    gated["read_file"](runtime, "t", "a")
    later = ToolRuntime(state=dict(runtime.state), context={"thread_id": "t1"})
    assert gated["write_file"](later, "t", "a", "two") == "OK"
    assert "file_reads" in runtime.state


# --- what goes in and what comes out ---------------------------------------------------------------


async def test_an_upload_lies_in_the_threads_uploads_and_never_over_another(provider: MockSandboxProvider) -> None:
    first = upload_to_thread("t1", "data.csv", b"1", provider=provider)
    second = await upload_to_thread_async("t1", "data.csv", b"2", provider=AsyncSandboxProvider.over(provider))
    assert first == "/mnt/user-data/uploads/data.csv"
    assert second != first
    sandbox = provider.get(provider.acquire("t1"))
    assert sandbox is not None
    assert [sandbox.download_file(path) for path in (first, second)] == [b"1", b"2"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "a\nb", "a\0b", "x" * 300])
def test_an_upload_with_a_name_that_is_a_path_is_refused(name: str, provider: MockSandboxProvider) -> None:
    with pytest.raises(InvalidArgument):
        upload_to_thread("t1", name, b"", provider=provider)


async def test_presented_files_are_noted_once_and_outputs_are_listed(
    provider: MockSandboxProvider, sandbox: Sandbox, runtime: ToolRuntime
) -> None:
    for name in ("a.html", "b/c.html"):
        sandbox.write_file(f"{OUTPUTS}/{name}", "<p>")
    present = present_files.bound(provider=provider)
    assert present(runtime, [f"{OUTPUTS}/a.html"]) == "Successfully presented files"
    assert await present.ainvoke(runtime, paths=[f"{OUTPUTS}//a.html", f"{OUTPUTS}/b/c.html"]) == (
        "Successfully presented files"
    )
    assert runtime.state["artifacts"] == [f"{OUTPUTS}/a.html", f"{OUTPUTS}/b/c.html"]
    assert present(runtime, [f"{OUTPUTS}/a.html", f"{OUTPUTS}/absent"]).startswith("Error: File not found")
    assert [entry.path for entry in list_outputs("t1", provider=provider)] == runtime.state["artifacts"]
    assert [entry.path for entry in await list_outputs_async("t1", provider=provider)] == runtime.state["artifacts"]
