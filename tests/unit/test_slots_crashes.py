"""A claim that dies at any of its system calls: done again, nothing is lost, nothing doubled, all in its place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet_workers.slots import DIRECTORIES, Slots, settle

SLOT, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
UID = 10_001 if os.geteuid() == 0 else None

#: Every call by which slots change anything.
CHANGES = ("mkdir", "rename", "rmdir", "symlink", "unlink", "chown", "fchown", "chmod", "fchmod")

NAMES = st.one_of(
    st.sampled_from(["a", "workspace", "user-data", "line\nfeed", "-rf", " ", "\udcff", "ü"]),
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: name not in {".", ".."}
    ),
)
LEAVES = st.one_of(
    st.binary(max_size=8), st.builds(lambda to: f"-> {to}", st.sampled_from(["/etc", "a", "../..", "nowhere"]))
)
TREES: Any = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12)
DIRS: Any = st.dictionaries(NAMES, TREES, max_size=4)
USER_DATA: Any = st.builds(
    lambda extra, children: {**extra, **children},
    st.dictionaries(NAMES.filter(lambda name: name not in {"workspace", "uploads", "outputs"}), TREES, max_size=3),
    st.dictionaries(st.sampled_from(["workspace", "uploads", "outputs"]), DIRS, max_size=3),
)
THREADS: Any = st.fixed_dictionaries({}, optional={"user-data": USER_DATA, "acp-workspace": DIRS})


class Died(BaseException):
    """What kill -9 does to the code that runs: no handler of errors sees it."""


@contextmanager
def dying_at(step: int) -> Iterator[list[str]]:
    """The process dies just before its `step`-th change. The list holds the changes it made.

    As good as `_exit`: once dead it changes nothing any more, whatever handlers still run.
    """
    made: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(made) == step:
                raise Died(name)
            made.append(name)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield made


def build(path: Path, tree: Any) -> None:
    if isinstance(tree, dict):
        path.mkdir(parents=True)
        for name, below in tree.items():
            build(path / name, below)
    elif isinstance(tree, str):
        path.symlink_to(tree.removeprefix("-> "))
    else:
        path.write_bytes(tree)


def read(path: Path) -> Any:
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    return {name: read(path / name) for name in os.listdir(path)} if path.is_dir() else path.read_bytes()


def expected(tree: Any) -> Any:
    children: dict[str, Any] = {child: {} for child in ("workspace", "uploads", "outputs")}
    return {"user-data": children | tree.get("user-data", {}), "acp-workspace": tree.get("acp-workspace", {})}


@contextmanager
def a_thread(tree: Any) -> Iterator[tuple[Slots, Path]]:
    root = Path(tempfile.mkdtemp(prefix="sandfleet-slots-"))
    try:
        thread = root / "threads" / "t"
        if tree:
            build(thread, tree)
        slots = Slots(root / "nodes" / "n", uid=UID)
        slots.make(SLOT)
        yield slots, thread
    finally:
        shutil.rmtree(root)


def inodes(path: Path) -> list[int]:
    return [(path / name).lstat().st_ino for name in DIRECTORIES]


def steps(tree: Any) -> int:
    """How many changes a claim of this thread makes."""
    with a_thread(tree) as (slots, thread), dying_at(-1) as made:
        slots.claim(SLOT, thread)
    return len(made)


def check(tree: Any, slots: Slots, slot: str, thread: Path, wanted: list[int]) -> None:
    assert read(thread) == expected(tree)
    assert inodes(thread) == wanted
    for name in DIRECTORIES:
        assert os.readlink(slots._path / slot / name) == str(thread / name)
    if UID is not None:
        assert {(thread / "user-data" / child).stat().st_uid for child in ("workspace", "uploads", "outputs")} == {UID}


def slot_inodes(slots: Slots, slot: str) -> list[int]:
    return inodes(slots._path / slot)


RETURNING: dict[str, Any] = {
    "user-data": {
        "workspace": {"deep": {"er": {"file": b"1"}}, "line\nfeed": b"2", "out": "-> /etc"},
        "uploads": {},
        "outputs": {"result": b"3"},
        "top": b"4",
        "empty": {},
    },
    "acp-workspace": {"plan": b"5"},
}
CASES: dict[str, dict[str, Any]] = {
    "returning": RETURNING,
    "new": {},
    "without-acp": {"user-data": RETURNING["user-data"]},
    "only-acp": {"acp-workspace": {"plan": b"5"}},
    "only-top-files": {"user-data": {"top": b"4"}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_claim_that_died_anywhere_is_completed_by_the_next_try(case: str) -> None:
    tree, count = CASES[case], steps(CASES[case])
    assert count >= 6  # the check of the hook: two moves in, two links, two moves into place
    for step in range(count):
        with a_thread(tree) as (slots, thread):
            wanted = slot_inodes(slots, SLOT)
            with pytest.raises(Died), dying_at(step):
                slots.claim(SLOT, thread)
            slots.claim(SLOT, thread)
            check(tree, slots, SLOT, thread, wanted)


@pytest.mark.parametrize("case", CASES)
def test_a_claim_that_died_anywhere_is_completed_by_another_slot(case: str) -> None:
    tree = CASES[case]
    for step in range(steps(tree)):
        with a_thread(tree) as (slots, thread):
            with pytest.raises(Died), dying_at(step):
                slots.claim(SLOT, thread)
            slots.remove(SLOT)  # as the start of a node does, before it knows anything
            slots.make(OTHER)
            wanted = slot_inodes(slots, OTHER)
            slots.claim(OTHER, thread)
            check(tree, slots, OTHER, thread, wanted)


def check_settled(tree: Any, thread: Path) -> None:
    """All data is there and in its place; directories that a claim would have added may be or not."""
    found = read(thread) if thread.exists() else {}
    assert set(found) <= set(DIRECTORIES)
    whole = {name: dict(expected({})[name]) | found.get(name, {}) for name in DIRECTORIES}
    assert whole == expected(tree)


@pytest.mark.parametrize("case", CASES)
def test_a_claim_that_died_anywhere_is_settled_for_those_who_have_no_slot(case: str) -> None:
    tree = CASES[case]
    for step in range(steps(tree)):
        with a_thread(tree) as (slots, thread):
            with pytest.raises(Died), dying_at(step):
                slots.claim(SLOT, thread)
            slots.remove(SLOT)
            settle(thread)
            check_settled(tree, thread)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=THREADS, data=st.data())
def test_whatever_a_thread_has_survives_several_deaths(tree: Any, data: st.DataObject) -> None:
    count = steps(tree)
    with a_thread(tree) as (slots, thread):
        slot, deaths = SLOT, data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.booleans()), max_size=4))
        wanted = slot_inodes(slots, slot)
        for number, (step, same_slot) in enumerate(deaths):
            with dying_at(step):
                try:
                    slots.claim(slot, thread)
                except Died:
                    pass
            if not same_slot:
                slots.remove(slot)
                slot = f"{number:016x}"
                slots.make(slot)
                wanted = slot_inodes(slots, slot)
        slots.claim(slot, thread)
        check(tree, slots, slot, thread, wanted)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=THREADS, data=st.data())
def test_settling_that_dies_too_is_settled_again(tree: Any, data: st.DataObject) -> None:
    count = steps(tree)
    with a_thread(tree) as (slots, thread):
        with pytest.raises(Died), dying_at(data.draw(st.integers(0, count - 1))):
            slots.claim(SLOT, thread)
        slots.remove(SLOT)
        with dying_at(data.draw(st.integers(0, count))):
            try:
                settle(thread)
            except Died:
                pass
        settle(thread)
        check_settled(tree, thread)
