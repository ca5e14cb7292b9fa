"""A fleet is upgraded node by node: clients, schedulers and nodes of neighbouring versions talk to each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandfleet import Batch, SandboxProvider, acquiring, wire
from sandfleet.errors import SandfleetError
from sandfleet.stack import Stack
from sandfleet.wire import VERSION, OpMessage
from tests.services import wait_until

#: What a message has by now and had not in the version before.
_NEW = ("beside",)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Everything this process sends is of the version before; what it sent to nodes."""
    sent: list[dict[str, Any]] = []
    to_wire = OpMessage.to_wire

    def of_before(message: OpMessage) -> dict[str, Any]:
        sent.append({key: value for key, value in to_wire(message).items() if key not in _NEW})
        return sent[-1]

    monkeypatch.setattr(wire, "VERSION", VERSION - 1)
    monkeypatch.setattr(acquiring, "VERSION", VERSION - 1)
    monkeypatch.setattr(OpMessage, "to_wire", of_before)
    return sent


def test_a_client_of_the_version_before_is_served(fleet: Stack, older: list[dict[str, Any]]) -> None:
    with SandboxProvider(fleet.settings) as provider:
        sandbox = provider.get(provider.acquire("older"))
        assert sandbox is not None
        assert sandbox.run("echo out; echo err >&2; exit 3").exit_code == 3
        big = sandbox.run("head -c 400000 /dev/zero | tr '\\0' x", max_output_bytes=500_000)
        assert big.stdout == "x" * 400_000
        sandbox.write_file("/mnt/user-data/workspace/a", "text")
        assert sandbox.read_file("/mnt/user-data/workspace/a") == "text"
        sandbox.update_file("/mnt/user-data/workspace/b", b"\0" * 3_000_000)
        assert sandbox.download_file("/mnt/user-data/workspace/b") == b"\0" * 3_000_000
        path = "/mnt/user-data/workspace/c"
        assert sandbox.batch(Batch().write_file(path, "in a batch").run("cat c"))[1].stdout == "in a batch"
        job = sandbox.run("echo job", background=True)
        assert job.wait(30).stdout == "job\n"
        provider.destroy(sandbox.id)
        wait_until(lambda: fleet.store.sandbox(sandbox.id) is None, 30)
    assert {message["v"] for message in older} == {VERSION - 1}
    assert not any(name in message for message in older for name in _NEW)


def test_a_reply_of_the_version_before_is_understood(provider: SandboxProvider) -> None:
    client = provider._client()
    inline = {"exit_code": 0, "stdout": "in the JSON", "stderr": ""}
    answer = client._decode("op", json.dumps({"ok": inline}), 0.0)  # no times, nothing beside
    assert answer.value == inline
    assert answer.timings.run_ms is None
    with pytest.raises(SandfleetError, match="of a kind"):
        client._decode("op", json.dumps({"error": {"code": "unheard_of", "message": "of a kind"}}), 0.0)
