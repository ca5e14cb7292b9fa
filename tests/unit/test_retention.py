"""What `gc` gives up on a node, by which rules, and what it never touches."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.checkpoints import Checkpoint
from sandfleet.errors import ConfigError, InvalidArgument
from sandfleet.ids import Identity
from sandfleet.leftover_dirs import ThreadData
from sandfleet.testing import ManualClock
from sandfleet_workers import retention
from sandfleet_workers.holders import Holder, hold_thread, thread_at_rest
from sandfleet_workers.retention import Retention
from sandfleet_workers.retention_plan import Rules, surplus, surplus_checkpoints
from sandfleet_workers.sandbox_dirs import thread_directory
from tests.unit.checkpoint_world import World as CheckpointWorld
from tests.unit.node_world import World

DAY_S = 86_400.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, ManualClock())


def data(thread: str, user: str | None, days: float) -> ThreadData:
    return ThreadData(Path(thread), 1, days * DAY_S, thread, user)


FOUND = [data("a1", "a", 1), data("a2", "a", 5), data("a3", "a", 50), data("b1", "b", 40), data("x", None, 60)]


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (Rules(older_than_s=30 * DAY_S), ["x", "a3", "b1"]),
        (Rules(keep_threads=1), ["a2", "a3"]),
        (Rules(keep_threads=0), ["x", "a1", "a2", "a3", "b1"]),
        (Rules(older_than_s=30 * DAY_S, keep_threads=1), ["a3"]),
        (Rules(older_than_s=30 * DAY_S, user_id="b"), ["b1"]),
        (Rules(older_than_s=99 * DAY_S), []),
    ],
)
def test_what_every_rule_gives_up_goes(rules: Rules, gone: list[str]) -> None:
    assert [found.thread_id for found in surplus(FOUND, rules)] == gone


ROWS = st.lists(
    st.builds(data, st.text("ab", min_size=1, max_size=3), st.sampled_from([None, "u", "v"]), st.floats(0, 99)),
    unique_by=lambda found: (found.user_id, found.thread_id),
)


@given(ROWS, st.none() | st.floats(0, 99), st.integers(0, 5))
def test_of_each_user_the_newest_stay_and_nothing_young_goes(
    found: list[ThreadData], days: float | None, keep: int
) -> None:
    age_s = None if days is None else days * DAY_S
    gone = surplus(found, Rules(older_than_s=age_s, keep_threads=keep))
    assert all(age_s is None or one.idle_s >= age_s for one in gone)
    for user in {one.user_id for one in found}:
        theirs = sorted((one for one in found if one.user_id == user), key=lambda one: (one.idle_s, one.thread_id))
        assert not set(theirs[:keep]) & set(gone)
        assert [one for one in theirs if one in gone] == [
            one for one in theirs[keep:] if age_s is None or one.idle_s >= age_s
        ]


@pytest.mark.parametrize(
    "asked",
    [
        {"thread_data": True},
        {"thread_data": True, "older_than_s": -1},
        {"thread_data": True, "keep_threads": "all"},
        {"thread_data": True, "older_than_s": float("nan")},
        {"remove": "yes"},
    ],
)
def test_rules_that_say_nothing_or_nonsense_are_refused(asked: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Rules.from_wire(asked)


def test_rules_cross_the_wire() -> None:
    rules = Rules(older_than_s=3.5, user_id="u", thread_data=True, remove=True)
    assert Rules.from_wire({**rules.to_wire(), "of a later version": 1}) == rules


# -- on a node --------------------------------------------------------------------------------------------


def old(world: World, thread: str, user: str | None = None, *, days: float = 40) -> Path:
    top = thread_directory(world.node.settings.data_root, Identity(thread, user)).parent
    (top / "user-data" / "workspace").mkdir(parents=True)
    (top / "user-data" / "workspace" / "file").write_text("x" * 5000)
    age(top, days)
    return top


def age(top: Path, days: float) -> None:
    when = time.time() - days * DAY_S
    for place, folders, names in os.walk(top, topdown=False):
        for name in [*names, *folders, "."]:
            os.utime(Path(place, name), (when, when), follow_symlinks=False)


OLD = Rules(older_than_s=30 * DAY_S, thread_data=True)
REMOVED = Rules(older_than_s=30 * DAY_S, thread_data=True, remove=True)


def found(world: World, rules: Rules) -> dict[tuple[str, str], bool]:
    told = Retention(world.node).collect(rules)
    assert told["count"] == len(told["found"])
    return {(row["kind"], row["id"]): row["done"] for row in told["found"]}


def test_a_report_touches_nothing_and_yes_removes_what_it_told(world: World, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    top, young = old(world, "old", "acme"), old(world, "young", days=1)
    (top / "user-data" / "leads-out").symlink_to(outside)
    age(top, 40)
    assert found(world, OLD) == {("thread data", "acme/old"): False}
    assert (top / "user-data" / "workspace" / "file").exists()
    assert found(world, REMOVED) == {("thread data", "acme/old"): True}
    assert not top.parent.parent.exists(), "nor a user without threads"
    assert young.exists()
    assert (outside / "precious").exists()
    assert found(world, OLD) == {}


def test_data_of_a_thread_with_a_sandbox_is_not_touched_in_whatever_state(world: World) -> None:
    live, lost = Identity("live"), Identity("lost")
    world.live(live)
    world.store.lost(world.live(lost), reason="test")
    world.reserved(Identity("creating"))
    tops = [thread_directory(world.node.settings.data_root, Identity(name)).parent for name in ("live", "lost")]
    tops.append(old(world, "creating"))
    for top in tops:
        age(top, 40)
    assert found(world, REMOVED) == {}
    assert all(top.exists() for top in tops)


def test_a_thread_that_is_acquired_meanwhile_keeps_its_data(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    top = old(world, "alice")
    remove = Retention._remove

    def acquired_just_before(self: Retention, item: retention.Item) -> None:
        world.reserved(Identity("alice"))
        remove(self, item)

    monkeypatch.setattr(Retention, "_remove", acquired_just_before)
    assert found(world, REMOVED) == {("thread data", "alice"): False}
    assert (top / "user-data" / "workspace" / "file").exists()


def test_data_that_somebody_is_about_to_hold_or_a_container_still_uses_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, used = old(world, "begun"), old(world, "used")
    hold_thread(used, Holder("n9", "docker", 7, "box-7"), lambda _: None)
    age(used, 40)
    monkeypatch.setattr(world.life.leftovers, "listed", lambda: {"n9": {"box-7"}})
    with thread_at_rest(top):
        age(top, 40)
        assert found(world, REMOVED) == {("thread data", "begun"): False, ("thread data", "used"): False}
    assert top.exists()
    assert used.exists()


def test_who_waits_for_data_that_goes_holds_the_new_directory(world: World) -> None:
    top = old(world, "alice")
    opened = os.open(top / ".holder", os.O_RDWR | os.O_CREAT)
    fcntl.flock(opened, fcntl.LOCK_EX)
    waiting = threading.Thread(target=hold_thread, args=(top, Holder("n1", "mock", 3, "box"), lambda _: None))
    waiting.start()
    top.rename(top.with_name("aside"))
    os.close(opened)
    waiting.join(10)
    with thread_at_rest(top) as holder:
        assert holder == Holder("n1", "mock", 3, "box")


def test_what_dead_nodes_and_cut_short_runs_left_goes_and_no_living_node_loses_anything(world: World) -> None:
    root = world.node.settings.data_root
    for name in ("dead", "young", "locked"):
        (root / "nodes" / name / "sandboxes").mkdir(parents=True)
        (root / "nodes" / name / "lock").touch()
    for name in ("dead", "locked"):
        age(root / "nodes" / name, 2)
    (root / ".gc-0123").mkdir()
    own = root / "nodes" / "n1" / "sandboxes"
    (own / "x.0badcafe.bad").write_text("{")
    (own / "y.0badcafe.bad").write_text("{")
    os.utime(own / "x.0badcafe.bad", (1, 1))
    held = os.open(root / "nodes" / "locked" / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    expected = {("half removed", ".gc-0123"), ("journal entry", "x.0badcafe.bad"), ("node directory", "dead")}
    assert found(world, Rules()) == dict.fromkeys(expected, False)
    assert found(world, Rules(remove=True)) == dict.fromkeys(expected, True)
    os.close(held)
    assert os.listdir(root / "nodes" / "dead") == ["lock"]
    assert (own / "y.0badcafe.bad").exists()
    assert (root / "nodes" / "young" / "sandboxes").is_dir()
    assert (root / "nodes" / "locked" / "sandboxes").is_dir()


@pytest.fixture(autouse=True)
def nobody_is_at_it() -> Iterator[None]:
    yield
    assert not retention._one_at_a_time.locked()


# -- checkpoints ------------------------------------------------------------------------------------------


def checkpoint(number: int, days: float, name: str | None = None) -> Checkpoint:
    return Checkpoint(f"{number:016x}", "t", None, 1e9 - days * DAY_S, 1, 1, name=name)


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (Rules(older_than_s=30 * DAY_S), [4, 6]),
        (Rules(keep_checkpoints=2), [3, 4]),
        (Rules(keep_checkpoints=0, older_than_s=50 * DAY_S), [4, 5, 6]),
        (Rules(keep_checkpoints=9), []),
    ],
)
def test_of_each_thread_the_newest_checkpoints_stay_and_named_ones_count_apart(rules: Rules, gone: list[int]) -> None:
    found = [checkpoint(1, 1), checkpoint(2, 20), checkpoint(3, 25), checkpoint(4, 60)]
    found += [checkpoint(5, 70, "mine"), checkpoint(6, 80, "mine, too")]
    assert [int(one.id, 16) for one in surplus_checkpoints(found, rules, now_s=1e9)] == gone


def test_old_checkpoints_go_and_those_of_a_thread_that_has_a_sandbox_stay(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = CheckpointWorld(tmp_path / "saved")
    for number in range(3):
        (saved.work() / f"file-{number}").write_text("x" * 1000)
        saved.save(epoch=number + 1)
        saved.now_ms += 86_400_000
    world.life.checkpoints._storage = saved.storage
    monkeypatch.setattr(world.store, "now_ms", lambda: saved.now_ms)
    rules = Rules(checkpoints=True, keep_checkpoints=1, older_than_s=1.5 * DAY_S)
    assert found(world, rules) == {("checkpoints", "u/t"): False}
    monkeypatch.setattr(Retention, "_has_sandbox", lambda *_: True)
    assert found(world, replace(rules, remove=True)) == {}
    monkeypatch.undo()
    monkeypatch.setattr(world.store, "now_ms", lambda: saved.now_ms)
    assert len(saved.vault.names()) == 3
    assert found(world, replace(rules, remove=True)) == {("checkpoints", "u/t"): True}
    assert len(saved.vault.names()) == 1
    assert sorted(path.name for path in saved.restore().rglob("file-*")) == ["file-0", "file-1", "file-2"]
    assert found(world, replace(rules, remove=True)) == {}


def test_a_node_without_a_storage_says_so(world: World) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints\.url"):
        Retention(world.node).collect(Rules(checkpoints=True))
