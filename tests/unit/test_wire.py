"""Messages: what is sent comes back, and what anybody else sends is refused by name or understood."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.errors import InvalidArgument, SandfleetError, VersionMismatch
from sandfleet.ids import Identity
from sandfleet.store.base import Route
from sandfleet.wire import VERSION, OpMessage, celery_message, decode_content, encode_content, node_queue

MESSAGE = OpMessage(
    op_id="op-1",
    kind="execute_command",
    identity=Identity("thread", "user"),
    route=Route("3f9a1c22", "node-1", "inc", 7),
    lanes=("3f9a1c22/shell/me",),
    args={"command": "ls"},
    content={"t": "stdin"},
    start_by_ms=10,
    deadline_ms=20,
    reply_to="client",
    sent_at_ms=5,
)


def test_a_message_comes_back_as_it_was_sent() -> None:
    assert OpMessage.from_wire(json.loads(json.dumps(MESSAGE.to_wire()))) == MESSAGE


def test_a_message_without_a_user_comes_back() -> None:
    data = {**MESSAGE.to_wire(), "owner": [None, "thread"]}
    assert OpMessage.from_wire(data).identity == Identity("thread")


def test_a_message_of_the_version_before_and_with_unknown_keys_is_understood() -> None:
    assert OpMessage.from_wire({**MESSAGE.to_wire(), "v": VERSION - 1, "from_the_future": 1}) == MESSAGE


@pytest.mark.parametrize(("told", "understood"), [(True, True), (False, False), (None, False), (1, False)])
def test_a_client_says_that_it_understands_output_beside_the_json(told: object, understood: bool) -> None:
    assert OpMessage.from_wire({**MESSAGE.to_wire(), "beside": told}).beside is understood
    assert "beside" not in MESSAGE.to_wire()  # to a node of the version before nothing has changed


def test_a_lane_that_is_named_twice_is_one_lane() -> None:
    # Twice in one lane would be a ticket that waits for itself.
    lanes = ["3f9a1c22/shell/me", "3f9a1c22/files", "3f9a1c22/files"]
    assert OpMessage.from_wire({**MESSAGE.to_wire(), "lanes": lanes}).lanes == ("3f9a1c22/files", "3f9a1c22/shell/me")


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 2, None, "1", [], {}])
def test_a_message_of_another_version_is_refused(version: object) -> None:
    with pytest.raises(VersionMismatch):
        OpMessage.from_wire({**MESSAGE.to_wire(), "v": version})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "a b"),
        ("op", None),
        ("kind", 7),
        ("kind", "x" * 201),
        ("owner", "user/thread"),
        ("owner", ["user"]),
        ("owner", [7, "thread"]),
        ("owner", [None, None]),
        ("owner", ["../x", "thread"]),
        ("sid", "../../etc"),
        ("sid", "3F9A1C22"),
        ("node", None),
        ("inc", 7),
        ("epoch", "7"),
        ("epoch", True),
        ("epoch", 7.0),
        ("lanes", None),
        ("lanes", "3f9a1c22/files"),
        ("lanes", [7]),
        ("lanes", ["00000000/files"]),
        ("lanes", ["3f9a1c22"]),
        ("lanes", ["3f9a1c22/" + "x" * 1000]),
        ("lanes", [f"3f9a1c22/session/{n}" for n in range(257)]),
        ("args", None),
        ("args", ["ls"]),
        ("content", "text"),
        ("start_by", None),
        ("deadline", "soon"),
        ("reply", None),
        ("sent", False),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        OpMessage.from_wire({**MESSAGE.to_wire(), field: value})
    names = {"op": "op_id", "owner": ("owner", "thread_id", "user_id")}.get(field, field)
    assert any(name in str(refused.value) for name in ([names] if isinstance(names, str) else names))


@pytest.mark.parametrize("data", [None, [], "x", 7, b"{}"])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(InvalidArgument):
        OpMessage.from_wire(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(changed=st.dictionaries(st.sampled_from(sorted(MESSAGE.to_wire())), values, max_size=4))
def test_no_message_raises_anything_but_a_typed_error(changed: dict[str, Any]) -> None:
    try:
        OpMessage.from_wire({**MESSAGE.to_wire(), **changed})
    except SandfleetError:
        pass


# --- bytes beside the arguments --------------------------------------------------------------------------


@given(content=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace")))
def test_bytes_come_back_as_they_were_sent(content: bytes) -> None:
    assert decode_content(json.loads(json.dumps(encode_content(content)))) == content


def test_text_travels_as_text_and_bytes_as_base64() -> None:
    assert encode_content("é".encode()) == {"t": "é"}
    assert encode_content(b"\xff") == {"b": "/w=="}
    assert encode_content(b"") == {"t": ""}
    assert encode_content(None) is None
    assert decode_content(None) is None


@pytest.mark.parametrize("content", [{}, {"t": 7}, {"b": 7}, {"b": "é"}, {"b": "a"}, {"b": "/w==\n"}, {"blob": "x"}])
def test_malformed_content_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        decode_content(content)


def test_a_lone_surrogate_in_text_does_not_raise() -> None:
    assert decode_content(json.loads('{"t": "\\ud800"}')) == b"\xed\xa0\x80"


# --- the envelope (its twin in tests/contract compares it with kombu's own) ------------------------------


def test_the_envelope_names_task_queue_and_what_flower_shows() -> None:
    message = json.loads(celery_message("sandbox.noop", "op-1", {"a": 1}, queue=node_queue("n"), describe="noop · x"))
    assert message["headers"]["task"] == "sandbox.noop"
    assert (
        message["headers"]["id"] == message["headers"]["root_id"] == message["properties"]["correlation_id"] == "op-1"
    )
    assert message["headers"]["argsrepr"] == "noop · x"
    assert message["headers"]["ignore_result"] is True
    assert message["properties"]["delivery_info"] == {"exchange": "", "routing_key": "sandfleet.node.n"}
    assert json.loads(message["body"])[0] == [{"a": 1}]


def test_two_envelopes_have_different_delivery_tags() -> None:
    tags = {
        json.loads(celery_message("t", "op-1", {}, queue="q", describe=""))["properties"]["delivery_tag"]
        for _ in range(50)
    }
    assert len(tags) == 50


def test_headers_of_a_tracer_ride_along() -> None:
    message = celery_message("t", "op-1", {}, queue="q", describe="", headers={"traceparent": "00-1-2-01"})
    assert json.loads(message)["headers"]["traceparent"] == "00-1-2-01"
