"""What dead nodes left running is ended with their fleet, and nobody else's is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sandfleet import left_behind
from sandfleet.config import Settings
from sandfleet.errors import Unavailable
from sandfleet.left_behind import end_left_behind
from sandfleet.testing import MockBackend


class Surviving(MockBackend):
    """Its sandboxes outlive their node."""

    left: ClassVar[dict[str, list[str]]] = {}
    ended: ClassVar[list[str]] = []
    made_for: ClassVar[list[str | None]] = []
    closed: ClassVar[int] = 0

    def __init__(self, settings: Any, on_death: Callable[[str, str], None]) -> None:
        super().__init__(settings, on_death)
        self.made_for.append(settings.node_id)

    def leftovers(self) -> dict[str, list[str]]:
        return self.left

    def remove_leftover(self, name: str) -> None:
        if name == "stuck":
            raise Unavailable("the engine is away")
        self.ended.append(name)

    def close(self) -> None:
        type(self).closed += 1
        super().close()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> type[Surviving]:
    for name, value in (("left", {}), ("ended", []), ("made_for", []), ("closed", 0)):
        monkeypatch.setattr(Surviving, name, value)
    monkeypatch.setattr(left_behind, "backend_class", lambda _: Surviving)
    return Surviving


def test_only_what_the_dead_nodes_left_is_ended(backend: type[Surviving]) -> None:
    backend.left.update({"node-1": ["a", "b"], "node-2": ["c"], "node-9": ["d"]})
    assert end_left_behind(Settings.load({}, backend="docker"), ["node-2", "node-1"]) == 3
    assert sorted(backend.ended) == ["a", "b", "c"]
    assert (backend.made_for, backend.closed) == (["node-1"], 1)


def test_where_no_node_died_no_backend_is_made(backend: type[Surviving]) -> None:
    backend.left["node-1"] = ["a"]
    assert end_left_behind(Settings.load({}, backend="docker"), []) == 0
    assert backend.made_for == []


def test_a_backend_whose_sandboxes_end_with_their_node_is_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouched(MockBackend):
        def __init__(self, *_: object) -> None:
            raise AssertionError("made")

    monkeypatch.setattr(left_behind, "backend_class", lambda _: Untouched)
    assert end_left_behind(Settings.load({}), ["node-1"]) == 0


def test_what_cannot_be_ended_is_logged_and_the_backend_closed(
    backend: type[Surviving], caplog: pytest.LogCaptureFixture
) -> None:
    backend.left["node-1"] = ["stuck"]
    with caplog.at_level(logging.WARNING):
        assert end_left_behind(Settings.load({}, backend="docker"), ["node-1"]) == 0
    assert backend.closed == 1
    assert [record.message for record in caplog.records] == ["left_behind.kept docker of node-1: the engine is away"]
