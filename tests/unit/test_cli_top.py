"""``sandfleet top`` without a fleet: what it draws fits, and a Redis that goes away is told and asked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sandfleet.cli import top
from sandfleet.cli.top_facts import Fleet, snapshot
from sandfleet.errors import StoreUnavailable
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import OpView

HOSTILE = "bash: \x1b[2J\nNODE fake \u202e" + "x" * 200


def fleet(nodes: int, ops: int) -> Fleet:
    views = [
        NodeView(f"node-with-a-long-name-{n}", "i1", NodeState.READY, True, 16, 3, 1, "d", load={"running": 3})
        for n in range(nodes)
    ]
    running = [
        OpView(f"o{n}", "execute_command", "3f9a1c22", "node-1", "i1", "claimed", "", HOSTILE, 0, n, None, 0)
        for n in range(ops)
    ]
    return Fleet(100_000, views, running, {"sandfleet.ops": 4, "sandfleet.node.a": 0}, 7)


@pytest.mark.parametrize(("nodes", "ops"), [(0, 0), (1, 1), (3, 40), (40, 3), (50, 200)])
@pytest.mark.parametrize("height", [12, 24, 60])
def test_what_is_drawn_fits_the_terminal_and_tells_what_was_left_out(nodes: int, ops: int, height: int) -> None:
    lines = top._plain(snapshot(fleet(nodes, ops), {}), 80, height)
    assert all(len(line) <= 80 for line in lines)
    assert all(line.isprintable() for line in lines)
    assert len(lines) <= height
    assert "7 in line" in lines[0]
    assert lines[1] == "queues: ops 4"
    shown_nodes = sum(line.startswith("node-with") for line in lines)
    shown_ops = sum("3f9a1c22" in line or "bash:" in line for line in lines)
    left_out = "\n".join(line for line in lines if line.startswith("… and"))
    assert (f"{nodes - shown_nodes} more nodes" in left_out) == (shown_nodes < nodes)
    assert (f"{ops - shown_ops} more operations" in left_out) == (shown_ops < ops)
    assert shown_nodes >= min(nodes, 1)
    assert shown_ops >= min(ops, 1)


def test_a_redis_that_goes_away_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Fleet | StoreUnavailable] = [fleet(1, 0), StoreUnavailable("connection refused"), fleet(1, 0)]
    keys = iter(["", "x", "q"])

    def read(_store: object, _limit: int) -> Fleet:
        answer = answers.pop(0)
        if isinstance(answer, StoreUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(top, "read_fleet", read)
    monkeypatch.setattr(top, "_pressed", lambda _within_s: next(keys))
    drawn: list[tuple[Mapping[str, Any] | None, str]] = []
    top._watch(object(), lambda *what: drawn.append(what), interval_s=1, sort="node", limit=5)  # type: ignore[arg-type]
    assert [document is not None for document, _ in drawn] == [True, False, True]
    assert [trouble for _, trouble in drawn] == ["", "Redis does not answer: connection refused", ""]
