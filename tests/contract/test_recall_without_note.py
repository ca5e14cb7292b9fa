"""Commands whose note was lost: a node's next run still answers for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandfleet.backends import Completion
from sandfleet.ids import Identity
from sandfleet.store.base import OpView, Route
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.notes import message_of
from tests.contract.endpoint_served import Sandboxd, op
from tests.services import wait_until

ALICE, ROUTE, MUCH = Identity("alice"), Route("3f9a1c22", "n1", "i2", 1), 3_000_000


@pytest.fixture
def box(tmp_path: Path) -> Iterator[EndpointConnection]:
    sandboxd = Sandboxd(tmp_path, "--socket", str(tmp_path / "s"))
    made = sandboxd.connect()
    yield made
    made.close()
    sandboxd.kill()


@pytest.mark.parametrize("note", ["", "{}", "x" * 5000])
def test_a_long_result_is_told_though_nobody_knows_how_much_was_asked_for(box: EndpointConnection, note: str) -> None:
    command = op("execute_command", command=f"head -c {MUCH} /dev/zero | tr '\\0' x", max_output_bytes=4 * 1024 * 1024)
    ran = box.perform(command)
    assert ran.error is None
    view = OpView(command.op_id, "execute_command", ROUTE.sandbox_id, "n1", "i1", "claimed", "", "", 0, 0, None, 9**9)
    message = message_of(view, ROUTE, ALICE, note)
    told: list[Completion] = []
    box.recall(replace(command, args=dict(message.args)), told.append)
    wait_until(lambda: told, 20)
    assert told[0].error is None, repr(told[0].error)
    assert len(told[0].value["stdout"]) == MUCH
    assert told[0].value == ran.value
