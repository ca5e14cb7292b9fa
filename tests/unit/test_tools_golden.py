"""Every documented answer of every tool, byte for byte, over mock sandboxes (real: tests/integration/test_tools.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet.testing import MockSandboxProvider
from tests.golden.cases import CASES, FOLDER, Case

MOCKED = [case for case in CASES if case.mock]


@pytest.fixture
def provider() -> Iterator[MockSandboxProvider]:
    with MockSandboxProvider() as made:
        yield made


def _prepare(case: Case, provider: MockSandboxProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = provider.get(provider.acquire("thread"))
    assert sandbox is not None
    case.prepare(sandbox)
    if case.says is not None:
        stdout, stderr, exit_code = (case.says, "", 0) if isinstance(case.says, str) else case.says
        provider.backend.set_output(case.args["command"], stdout, exit_code, stderr, case.delay_s)
    if case.fails is not None:
        kind, error = case.fails
        answer = provider._local.call

        def call(target: Any, wanted: Any) -> Any:
            if wanted.kind == kind:
                raise error
            return answer(target, wanted)

        monkeypatch.setattr(provider._local, "call", call)


@pytest.mark.parametrize("case", MOCKED, ids=lambda case: case.name)
def test_the_answer_is_the_golden_one(
    case: Case, provider: MockSandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare(case, provider, monkeypatch)
    tool = case.tool(provider.settings, provider)
    assert tool.invoke(case.runtime("thread"), **case.arguments()) == case.expected
    if case.after is not None:
        path, text = case.after
        assert provider.get(provider.acquire("thread")).read_file(path) == text  # type: ignore[union-attr]


@pytest.mark.parametrize("case", MOCKED, ids=lambda case: case.name)
async def test_the_async_answer_is_the_same(
    case: Case, provider: MockSandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare(case, provider, monkeypatch)
    tool = case.tool(provider.settings, provider)
    assert await tool.ainvoke(case.runtime("thread"), **case.arguments()) == case.expected


def test_every_golden_file_has_its_case_and_every_case_its_file() -> None:
    files = {str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.txt")}
    assert files == {case.name for case in CASES}
    assert len(CASES) == len(files)
