"""Answers on their way from a node to its client: what is big travels beside the JSON, where the client knows that."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet.backends import Completion
from sandfleet.client import Answer, Client
from sandfleet.config import INLINE_BYTES, Settings
from sandfleet.ids import Identity
from sandfleet.store.base import Route
from sandfleet.store.memory import MemoryStore
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import encode_reply

BIG = "é\n" * INLINE_BYTES
ROUTE = Route("3f9a1c22", "n1", "i1", 1)
MESSAGE = OpMessage("op", "execute_command", Identity("alice"), ROUTE, (), {}, None, 0, 0, "c1", 0, beside=True)


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(Settings.load({}, backend="mock"), MemoryStore(blob_client_bytes=9 * INLINE_BYTES))
    yield made
    made.close()


def value_of(stdout: str, stderr: str = "") -> dict[str, Any]:
    return {"stdout": stdout, "stderr": stderr, "exit_code": 0, "duration_s": 0.1}


def sent(client: Client, value: Any, message: OpMessage = MESSAGE) -> dict[str, Any]:
    """The reply JSON."""
    reply: dict[str, Any] = json.loads(encode_reply(client.store, Completion(value), message, spent_ms=(0, 0, 0)))
    return reply


def received(client: Client, reply: dict[str, Any]) -> Answer:
    return client._decode("op", json.dumps(reply), time.monotonic())


@pytest.mark.parametrize(("stdout", "stderr"), [(BIG, "x"), ("x", BIG), (BIG[:-1] + "\ud800", "\udcff"), (BIG, "")])
def test_big_output_travels_beside_the_json_and_comes_back(client: Client, stdout: str, stderr: str) -> None:
    for _ in range(4):  # each gives its bytes back
        reply = sent(client, value_of(stdout, stderr))
        assert "blob" in reply["content"]
        assert "$blob" not in reply["ok"]
        answer = received(client, reply)
        assert answer.value == value_of(stdout, stderr)
        assert answer.content is None


def test_a_client_that_does_not_ask_for_it_gets_output_in_the_json(client: Client) -> None:
    reply = sent(client, value_of(BIG), dataclasses.replace(MESSAGE, beside=False))
    assert set(reply) == {"ok", "t"}
    assert set(reply["ok"]) == {"$blob"}
    assert received(client, reply).value == value_of(BIG)


@pytest.mark.parametrize("value", [value_of("x", "y"), {}, None, {"stdout": None, "stderr": BIG[:9]}, ["stdout"]])
def test_small_output_and_other_values_stay_in_the_json(client: Client, value: Any) -> None:
    reply = sent(client, value)
    assert reply == {"ok": value, "t": [0, 0, 0]}
    assert received(client, reply).value == value
