"""The errors: named by what the catcher should do, the same on both sides of the wire."""

from __future__ import annotations

import builtins
import copy
import errno
import json
import pickle
import re

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet import errors
from sandfleet.errors import InternalError, OperationFailed, SandfleetError, error_codes, from_wire

EVERY = sorted({*error_codes().values()}, key=lambda cls: cls.__name__)
each_class = pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)


def _subclasses(cls: type) -> list[type]:
    return [sub for child in cls.__subclasses__() for sub in (child, *_subclasses(child))]


# --- the tree --------------------------------------------------------------------------------------------


def test_every_error_has_a_code_of_its_own() -> None:
    ours = [cls for cls in [SandfleetError, *_subclasses(SandfleetError)] if cls.__module__ == "sandfleet.errors"]
    codes = [cls.code for cls in set(ours)]
    assert sorted(codes) == sorted(set(codes))
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
    assert set(ours) == set(error_codes().values())


def test_every_error_is_public() -> None:
    assert {cls.__name__ for cls in EVERY} <= set(errors.__all__)


def _drawn_tree() -> dict[str, tuple[str | None, list[str]]]:
    """The tree of the module's docstring: name -> (parent, the bracketed bases)."""
    found: dict[str, tuple[str | None, list[str]]] = {}
    parent: list[str | None] = [None, None]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ]*)(?:[├└]── )?([A-Z].*)", line)
        if match is None or (not found and not match[2].startswith("SandfleetError")):
            continue
        depth = (line.index(match[2]) - 4) // 4
        names = re.split(r"\s{2,}", match[2])[0]
        for name, bases in re.findall(r"(\w+)(?: \(([\w, ]+)\))?(?:, |$|\s)", names):
            found[name] = (parent[depth - 1] if depth else None, bases.split(", ") if bases else [])
            parent[depth:] = [name, None]
    return found


def test_the_tree_drawn_in_the_docstring_is_the_tree() -> None:
    drawn = _drawn_tree()
    assert set(drawn) == {cls.__name__ for cls in EVERY} | {"OperationFailed"}
    for name, (parent, bases) in drawn.items():
        cls = getattr(errors, name)
        if parent not in (None, "SandfleetError") or (parent and name != "OperationFailed"):
            assert issubclass(cls, getattr(errors, str(parent))), f"{name} is drawn under {parent}"
        for base in bases:
            assert issubclass(cls, getattr(builtins, base, None) or getattr(errors, base)), f"{name} ({base})"


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.RequestRejected, ValueError),
        (errors.NotSupported, NotImplementedError),
        (errors.SandboxNotFound, LookupError),
        (errors.PathNotFound, FileNotFoundError),
        (errors.IsDirectory, IsADirectoryError),
        (errors.NotDirectory, NotADirectoryError),
        (errors.PermissionDenied, PermissionError),
        (errors.AlreadyExists, FileExistsError),
        (errors.ReadOnly, OSError),
        (errors.CommandTimeout, TimeoutError),
        (errors.QueueTimeout, TimeoutError),
        (errors.ReplyTimeout, TimeoutError),
        (errors.StoreUnavailable, ConnectionError),
        (errors.SessionNotFound, LookupError),
    ],
)
def test_code_that_catches_the_builtin_catches_ours(cls: type[SandfleetError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="told so"):
        raise cls("told so")


@pytest.mark.parametrize(
    ("cls", "number"),
    [
        (errors.PathNotFound, errno.ENOENT),
        (errors.IsDirectory, errno.EISDIR),
        (errors.NotDirectory, errno.ENOTDIR),
        (errors.PermissionDenied, errno.EACCES),
        (errors.AlreadyExists, errno.EEXIST),
        (errors.ReadOnly, errno.EROFS),
        (errors.NoSpace, errno.ENOSPC),
        (errors.FileTooLarge, errno.EFBIG),
    ],
)
def test_a_file_error_has_the_errno_and_the_filename_of_an_oserror(cls: type[SandfleetError], number: int) -> None:
    error = cls("no", path="/mnt/user-data/x")
    assert isinstance(error, OSError)
    assert (error.errno, error.filename, error.strerror, str(error)) == (number, "/mnt/user-data/x", "no", "no")


def test_what_may_be_repeated_without_harm_says_so() -> None:
    retryable = {cls.code for cls in EVERY if cls.retryable}
    assert {"not_started", "busy", "no_capacity", "store_unavailable", "queue_timeout"} <= retryable
    assert not retryable & {"outcome_unknown", "reply_timeout", "invalid_argument", "command_failed", "lease_lost"}


# --- the wire --------------------------------------------------------------------------------------------


@each_class
def test_an_error_crosses_the_wire_unchanged(cls: type[SandfleetError]) -> None:
    error = cls("what happened", retry_after_s=1.5, sandbox_id="3f9a1c22", path="/x", lines=[1, 2])
    back = from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(back) is cls
    assert (str(back), back.retry_after_s, back.facts) == (str(error), 1.5, error.facts)
    assert back.to_wire() == error.to_wire()


@each_class
def test_an_error_survives_pickle_and_copy(cls: type[SandfleetError]) -> None:
    error = cls("what happened", path="/x")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is cls
        assert back.to_wire() == error.to_wire()
        assert getattr(back, "errno", None) == getattr(error, "errno", None)


def test_a_long_message_is_cut_on_the_wire() -> None:
    assert len(SandfleetError("x" * 100_000).to_wire()["message"]) == 4000
    assert len(str(from_wire({"code": "busy", "message": "x" * 100_000}))) == 4000


def test_an_unknown_code_becomes_an_internal_error_that_names_it() -> None:
    error = from_wire({"code": "from_the_future", "message": "hm", "facts": {"a": 1}})
    assert type(error) is InternalError
    assert "from_the_future" in str(error)
    assert error.facts["unknown_code"] == "from_the_future"


def test_a_class_path_is_never_a_code() -> None:
    assert type(from_wire({"code": "sandfleet.errors:Busy", "message": ""})) is InternalError
    assert type(from_wire({"code": "os:system", "message": "id"})) is InternalError


HOSTILE = [
    {},
    {"code": None, "message": None, "facts": None},
    {"code": ["busy"], "message": {"a": 1}, "facts": [1, 2]},
    {"code": "busy", "facts": {"retry_after_s": "soon"}},
    {"code": "busy", "message": 7, "facts": {"code": "x", "message": "y", "cls": 1}},
    {"code": "path_not_found", "facts": {"path": 7, "errno": "x", "filename": None}},
    {"code": "busy", "facts": {"self": 1}},
    {"code": "path_not_found", "facts": {"self": 1}},
    {"code": "busy", "facts": {"retry_after_s": 10**400}},
    [],
    None,
    "busy",
    7,
]


@pytest.mark.parametrize("wire", HOSTILE, ids=lambda wire: str(wire)[:60])
def test_a_hostile_wire_error_gives_an_error_object(wire: object) -> None:
    error = from_wire(wire)
    assert isinstance(error, SandfleetError)
    assert isinstance(str(error), str)
    error.to_wire()


@pytest.mark.parametrize("retry_after_s", [-1, -1e300, float("nan"), float("inf")])
def test_a_hostile_pause_is_never_something_one_cannot_sleep(retry_after_s: float) -> None:
    pause_s = from_wire({"code": "busy", "facts": {"retry_after_s": retry_after_s}}).retry_after_s
    assert pause_s is None or 0 <= pause_s < 1e6


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["self", "message", "retry_after_s", "path", "errno", "args", "code", "cls"]) | st.text(
    max_size=5
)


@settings(max_examples=200, deadline=None)
@given(
    wire=json_values
    | st.fixed_dictionaries(
        {"code": st.sampled_from(sorted(error_codes())), "facts": st.dictionaries(keys, json_values, max_size=4)},
        optional={"message": json_values},
    )
)
def test_no_json_value_makes_reading_an_error_raise(wire: object) -> None:
    assert isinstance(from_wire(wire), SandfleetError)


# --- what a plain Celery caller gets ---------------------------------------------------------------------


def test_operation_failed_carries_the_typed_error_through_celery() -> None:
    backend = Celery("t", set_as_current=False).backend
    error = errors.PathNotFound("no such file", path="/x")
    stored = json.loads(json.dumps(backend.prepare_exception(OperationFailed(json.dumps(error.to_wire())), "json")))
    back = backend.exception_to_python(stored)
    assert type(back) is OperationFailed
    assert type(back.error) is errors.PathNotFound
    assert back.error.facts == {"path": "/x"}
    assert str(back) == "path_not_found: no such file"


def test_operation_failed_survives_pickle() -> None:
    failed = OperationFailed(json.dumps(errors.Busy("full", retry_after_s=2).to_wire()))
    back = pickle.loads(pickle.dumps(failed))
    assert (type(back.error), back.error.retry_after_s) == (errors.Busy, 2.0)
