"""The demo is right only if every step was: its journal, its report and its exit code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest

from sandfleet.backends import Finding
from sandfleet.cli import demo, main
from sandfleet.cli.demo_journal import Journal, Timed, Wrong, expect
from sandfleet.cli.demo_play import STEPS
from sandfleet.errors import ConfigError, SandboxLost
from sandfleet.testing import MockBackend


def test_a_step_that_finds_something_else_is_wrong_and_says_what() -> None:
    journal = Journal()
    with pytest.raises(Wrong), journal.step("run it", "alice"):
        expect(False, "it printed 'nonsense'")
    [step] = journal.steps
    assert (step.ok, step.told) == (False, "it printed 'nonsense'")


def test_an_error_of_the_fleet_makes_the_step_wrong() -> None:
    journal = Journal()
    with pytest.raises(Wrong), journal.step("run it", "alice"):
        raise SandboxLost("it died")
    assert journal.steps[0].told == "SandboxLost: it died"
    assert not journal.ok(steps=1)


def test_a_bug_of_the_demo_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), Journal().step("run it", "alice"):
        _ = 1 / 0


def test_a_step_that_is_missing_makes_the_demo_wrong() -> None:
    journal = Journal()
    with journal.step("acquire", "alice"):
        pass
    assert journal.ok(steps=1)
    assert not journal.ok(steps=2)


def test_operations_are_counted_when_they_succeed() -> None:
    class Handle:
        id = "3f9a1c22"

        def run(self, command: str) -> str:
            if command == "fail":
                raise SandboxLost("it died")
            return command.upper()

    journal = Journal()
    timed = Timed(Handle(), journal)
    assert timed.id == "3f9a1c22"
    assert timed.run("ls") == "LS"
    with pytest.raises(SandboxLost):
        timed.run("fail")
    assert len(journal.samples["op"]) == 1
    assert journal.p50("op") is not None
    assert journal.p50("noop") is None


def _all_right(_: object, journal: Journal) -> None:
    for n in range(STEPS):
        with journal.step(f"step {n}", "alice"):
            pass


def _one_missing(_: object, journal: Journal) -> None:
    _all_right(_, journal)
    journal.steps.pop()


def _one_wrong(_: object, journal: Journal) -> None:
    _all_right(_, journal)
    journal.steps[3].ok = False


@pytest.mark.parametrize(("played", "code"), [(_all_right, 0), (_one_missing, 1), (_one_wrong, 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_exit_code_is_0_only_if_every_step_was_right(
    played: Callable[[object, Journal], None],
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Runnable(MockBackend):
        capabilities = frozenset({*MockBackend.capabilities, demo.Capability.PROCESS_ISOLATION})

    monkeypatch.setattr(demo, "Stack", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(demo, "play", played)
    monkeypatch.setattr(demo, "backend_class", lambda _: Runnable)
    assert main(["demo", *(["--json"] if as_json else [])]) == code
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["ok"] is (code == 0)
    else:
        assert ("NOT OK" in out) is (code != 0)


def test_a_backend_that_runs_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "mock"]) == 2
    assert "cannot run here" in capsys.readouterr().err
    assert main(["demo", "--backend", "nonsense"]) == 2
    assert "local" in capsys.readouterr().err


# --- which backend is shown ------------------------------------------------------------------------


def _installed(monkeypatch: pytest.MonkeyPatch, **problems: str) -> None:
    """Backends of these names, each with what an examination finds missing ("" for nothing)."""

    def made(name: str) -> type[MockBackend]:
        if name not in problems:
            raise ConfigError(f"no backend {name!r}")

        class Made(MockBackend):
            capabilities = frozenset({*MockBackend.capabilities, demo.Capability.PROCESS_ISOLATION})

            @classmethod
            def examine(cls, settings: object) -> list[Finding]:
                holes = Finding("runc", "fail", "runc 1.0 has holes", "update it")
                missing = Finding("image", "warn", problems[name], "pull it", ready=False)
                return [holes, missing] if problems[name] else [holes]

        Made.name = name
        return Made

    monkeypatch.setattr(demo, "backend_class", made)


def test_docker_is_shown_where_a_container_can_be_started_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, docker="", local="")
    kind, passed_over = demo.choose("auto")
    assert (kind.name, passed_over) == ("docker", {"local": "docker isolates better"})


def test_without_the_image_local_is_shown_and_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, docker="no image", local="")
    kind, passed_over = demo.choose("auto")
    assert (kind.name, passed_over) == ("local", {"docker": "no image: pull it"})


def test_without_the_docker_sdk_local_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, local="")
    kind, passed_over = demo.choose("auto")
    assert kind.name == "local"
    assert "not installed" in passed_over["docker"]


def test_a_backend_that_was_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, docker="no image", local="")
    with pytest.raises(ConfigError, match="docker: no image: pull it"):
        demo.choose("docker")
    assert demo.choose("local")[0].name == "local"


def test_where_nothing_can_run_each_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, docker="no engine", local="no namespaces")
    with pytest.raises(ConfigError, match="docker: no engine: pull it; local: no namespaces: pull it"):
        demo.choose("auto")
