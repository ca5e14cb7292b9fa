"""`sandbox.use` with a class of one's own: the seeds' way to bring another provider."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet import SandboxProvider, get_sandbox_provider, reset_sandbox_provider, shutdown_sandbox_provider
from sandfleet.errors import ConfigError, NotSupported
from sandfleet.tools import (
    SandboxMiddleware,
    Tool,
    ToolRuntime,
    bash_tool,
    get_tools,
    glob_tool,
    grep_tool,
    ls_tool,
    read_file_tool,
    str_replace_tool,
    write_file_tool,
)

SOURCE = '''
from sandfleet import Sandbox, SandboxProvider

class MySandboxProvider(SandboxProvider):
    """As the seeds write one: it brings its own `__init__` and never calls ours."""

    made = 0
    def __init__(self, **given):
        type(self).made += 1
        self.given = given
    def acquire(self, thread_id=None, **_):
        return f"mine-{thread_id}"
    def get(self, sandbox_id, **_):
        return None
    def release(self, sandbox_id):
        pass

class MySandbox(Sandbox):
    """Its seven methods; like the seeds' own, it gives the base class its id."""

    def __init__(self, id):
        super().__init__(id)
        self.files = {"/a": "one\\ntwo\\n"}
    def execute_command(self, command):
        return f"ran {command}"
    def read_file(self, path):
        return self.files[path]
    def write_file(self, path, content, append=False):
        self.files[path] = content
    def list_dir(self, path, max_depth=2):
        return sorted(self.files)
    def glob(self, path, pattern, *, include_dirs=False, max_results=200):
        return sorted(self.files), False
    def grep(self, path, pattern, *, glob=None, literal=False, case_sensitive=False, max_results=100):
        return [], False
    def update_file(self, path, content):
        self.files[path] = content

class Bare(MySandbox):
    """It never calls the base class at all."""

    def __init__(self, id):
        self._id = id
        self.files = {"/a": "one\\ntwo\\n"}

class Working(MySandboxProvider):
    kind = MySandbox
    def __init__(self):
        self.sandboxes, self.released = {}, []
    def acquire(self, thread_id=None):
        self.sandboxes.setdefault(thread_id, self.kind(thread_id))
        return thread_id
    def get(self, sandbox_id):
        return self.sandboxes.get(sandbox_id)
    def release(self, sandbox_id):
        self.released.append(sandbox_id)

class WorkingBare(Working):
    kind = Bare

class NotOne:
    pass

value = 3
'''


@pytest.fixture(autouse=True)
def a_package_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_package.py").write_text(SOURCE)
    (tmp_path / "broken_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reset_sandbox_provider()
    yield
    reset_sandbox_provider()
    for name in ("my_package", "broken_package"):
        sys.modules.pop(name, None)


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    file = tmp_path / "sandfleet.yaml"
    file.write_text(f"sandbox:\n  use: {use}\n")
    monkeypatch.setenv("SANDFLEET_CONFIG", str(file))


def test_the_class_that_is_named_is_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, "my_package:MySandboxProvider")
    provider = get_sandbox_provider()
    assert type(provider).__name__ == "MySandboxProvider"
    assert provider.acquire("t1") == "mine-t1"
    assert get_sandbox_provider() is provider
    shutdown_sandbox_provider()
    assert get_sandbox_provider() is not provider


def test_it_is_given_what_the_caller_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, "my_package:MySandboxProvider")
    assert vars(get_sandbox_provider(replicas=3))["given"] == {"replicas": 3}


@pytest.mark.parametrize("use", ["deerflow.sandbox.local:LocalSandboxProvider", "sandfleet:SandboxProvider"])
def test_a_class_of_the_seeds_or_our_own_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    configure(tmp_path, monkeypatch, use)
    provider = get_sandbox_provider()
    assert type(provider) is SandboxProvider
    assert provider.settings.backend == "local"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("my_package:NotOne", "does not derive from sandfleet.SandboxProvider"),
        ("my_package:value", "my_package has no class value"),
        ("my_package:Missing", "my_package has no class Missing"),
        ("no_such_package_here:Provider", "no_such_package_here cannot be imported .*ModuleNotFoundError"),
        ("broken_package:Provider", "broken_package cannot be imported .*ZeroDivisionError"),
    ],
)
def test_a_class_that_cannot_be_used_is_an_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, words: str
) -> None:
    configure(tmp_path, monkeypatch, use)
    with pytest.raises(ConfigError, match=words) as refused:
        get_sandbox_provider()
    assert refused.value.facts["key"] == "sandbox.use"


@pytest.mark.parametrize("name", ["Working", "WorkingBare"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_tools_work_over_it_within_the_limits_of_the_same_file(
    name: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch, f"my_package:{name}\ntools:\n  write_file:\n    max_bytes: 9")
    runtime = ToolRuntime(context={"thread_id": "t1"})

    def run(tool: Tool, *args: str) -> str:
        if asynchronous:
            return asyncio.run(tool.coroutine(runtime, "t", *args))
        return tool.func(runtime, "t", *args)

    assert get_tools()[0].name == "bash"
    assert run(bash_tool, "id") == "ran id"
    assert run(ls_tool, "/") == "/a"
    assert run(glob_tool, "*", "/") == "Found 1 paths under /\n1. /a"
    assert run(grep_tool, "x", "/") == "No matches found under /"
    assert run(read_file_tool, "/a", "2") == "two"
    assert run(str_replace_tool, "/a", "two", "2") == "OK"
    assert run(write_file_tool, "/b", "more than nine bytes").startswith("Error: write_file content (20 bytes)")
    assert run(write_file_tool, "/b", "x") == "OK"
    SandboxMiddleware().after_agent(runtime.state, runtime)
    provider: Any = get_sandbox_provider()
    assert provider.released == ["t1"]
    assert provider.get("t1").files == {"/a": "one\n2\n", "/b": "x"}
    with pytest.raises(NotSupported, match="has operations of its own"):
        provider.get("t1").stat("/a")


def test_many_threads_get_one_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, "my_package:MySandboxProvider")
    start = threading.Barrier(8)
    found: list[SandboxProvider] = []

    def get() -> None:
        start.wait()
        found.append(get_sandbox_provider())

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len({id(provider) for provider in found}) == 1
