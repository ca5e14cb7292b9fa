"""Identities and ids: what is allowed, and that no two identities share a digest."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.errors import InvalidArgument
from sandfleet.ids import (
    Identity,
    check_id,
    check_node_id,
    check_op_id,
    is_sandbox_id,
    new_op_id,
    new_token,
    sandbox_id_candidates,
)

BAD_IDS = [
    "",
    "a" * 65,
    "a\n",
    "\na",
    "a b",
    "a/b",
    "a.b",
    "..",
    "a:b",
    "\uff41",
    "é",
    "٣",
    "a\0",
    "a\u200b",
    None,
    7,
    b"a",
]


@pytest.mark.parametrize("value", BAD_IDS, ids=repr)
def test_a_bad_thread_or_user_id_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match="thread_id"):
        Identity(value)  # type: ignore[arg-type]
    if value is not None:
        with pytest.raises(InvalidArgument, match="user_id") as refused:
            Identity("t", value)  # type: ignore[arg-type]
        assert refused.value.facts["argument"] == "user_id"


def test_a_refusal_never_repeats_a_hostile_value_in_full() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_id("thread_id", "x" * 100_000)
    assert len(str(refused.value)) < 300
    with pytest.raises(InvalidArgument) as refused:
        check_id("thread_id", "a\n\x1b[2J")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("value", ["a", "A-Z_09", "a" * 64, "-", "_"])
def test_the_ids_that_deerflow_allows_are_allowed(value: str) -> None:
    assert Identity(value, value).thread_id == value


def test_the_sandbox_id_of_a_thread_is_that_of_the_seeds() -> None:
    digest = Identity("thread-1").digest
    assert digest == hashlib.sha256(b"thread-1").hexdigest()
    assert sandbox_id_candidates(digest)[0] == hashlib.sha256(b"thread-1").hexdigest()[:8]


def test_a_sandbox_id_is_extended_step_by_step_to_the_full_digest() -> None:
    digest = Identity("thread-1").digest
    candidates = sandbox_id_candidates(digest)
    lengths = [len(candidate) for candidate in candidates]
    assert lengths == sorted(set(lengths))
    assert lengths[0] == 8
    assert candidates[-1] == digest
    assert all(digest.startswith(candidate) and is_sandbox_id(candidate) for candidate in candidates)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Identity("c", "a-b"), Identity("b-c", "a")),
        (Identity("b", "a"), Identity("a", "b")),
        (Identity("t"), Identity("t", "t")),
        (Identity("1-a", "1"), Identity("a", "1-1")),
        (Identity("a"), Identity("A")),
    ],
)
def test_identities_that_read_alike_have_different_digests(one: Identity, other: Identity) -> None:
    assert one.digest != other.digest


ids = st.from_regex(r"\A[A-Za-z0-9_-]{1,12}\Z")
identities = st.builds(Identity, ids, st.none() | ids)


@settings(deadline=None)
@given(one=identities, other=identities)
def test_different_identities_never_share_a_digest(one: Identity, other: Identity) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_anonymous_identities_are_valid_and_fresh() -> None:
    one, other = Identity.anonymous(), Identity.anonymous("u")
    assert one.thread_id != other.thread_id
    assert other.user_id == "u"
    assert Identity(one.thread_id) == one


@pytest.mark.parametrize("value", ["0" * 8, "0123456789abcdef", "f" * 64])
def test_hex_of_8_to_64_digits_is_a_sandbox_id(value: str) -> None:
    assert is_sandbox_id(value)


@pytest.mark.parametrize(
    "value",
    ["", "f" * 7, "f" * 65, "F" * 8, "0123456g", "01234567\n", "٠١٢٣٤٥٦٧", "../../ab", None, 12345678, b"01234567"],
)
def test_anything_else_is_no_sandbox_id(value: object) -> None:
    assert not is_sandbox_id(value)


@pytest.mark.parametrize("value", ["a", "A.b:c-d_9", "x" * 80, "f00.r1"])
def test_op_ids_a_caller_may_choose(value: str) -> None:
    assert check_op_id(value) == value


@pytest.mark.parametrize("value", ["", "x" * 81, "a\n", "a b", "a/b", "{a}", "é", None, 3])
def test_op_ids_that_are_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="op_id"):
        check_op_id(value)


@pytest.mark.parametrize("value", ["a", "9", "host-1", "a" * 48])
def test_node_ids_that_are_allowed(value: str) -> None:
    assert check_node_id(value) == value


@pytest.mark.parametrize("value", ["", "-a", "A", "a" * 49, "a.b", "a\n", "../x", "a/b", None])
def test_node_ids_that_are_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="node id"):
        check_node_id(value)


def test_fresh_ids_are_hex_and_differ() -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", new_op_id())
    assert re.fullmatch(r"[0-9a-f]{16}", new_token())
    assert len({new_op_id() for _ in range(100)}) == 100
    assert check_op_id(new_op_id())
