"""The judge of the torture can fail: each doctored world is found out, and an honest one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.torture.evidence import read_evidence
from tests.chaos.torture.intents import Intent, IntentLog, read_intents
from tests.chaos.torture.judge import GRACE_S, NEVER_BEGAN, Verdict, judge

TALK = "talk"


def call(effect: str, trace: str = "journal", answer: str | None = "ok", **more: Any) -> Intent:
    given = {"kind": "command", "conversation": TALK, "run": "c1.1", "within_s": 10.0, "began_s": 100.0, **more}
    return Intent(id=effect, trace=trace, answer=answer, **{"ended_s": 101.0, **given})


class World:
    """Data roots as a fleet would leave them."""

    def __init__(self, directory: Path) -> None:
        self.roots = [directory / "a", directory / "b"]

    def put(self, name: str, text: str, *, root: int = 0, conversation: str = TALK) -> World:
        path = self.roots[root] / "threads" / conversation / "user-data" / "workspace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + text if path.exists() else text)
        return self

    def judge(self, *intents: Intent, **options: Any) -> Verdict:
        return judge(intents, read_evidence(self.roots), **options)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_honest_fleet_breaks_nothing(world: World) -> None:
    world.put("journal", "one n1\ntwo n2\n").put("appends", "three\n").put("replaced", "four\nEND\n")
    world.put("files/five", "five\n" * 3)
    verdict = world.judge(
        call("one"),
        call("two", answer="outcome_unknown"),
        call("three", "appends"),
        call("four", "replaced"),
        call("five", "files", lines=3),
        call("never", answer="not_started"),
        call("perhaps", answer="outcome_unknown"),
        call("read", ""),
    )
    assert verdict.broken == {}
    assert (verdict.operations, verdict.answers["ok"]) == (8, 5)


@pytest.mark.parametrize("answer", ["ok", "outcome_unknown", "not_started", None])
def test_a_command_that_ran_twice_is_found_whatever_was_answered(world: World, answer: str | None) -> None:
    world.put("journal", "one n1\none n2\n")
    assert len(world.judge(call("one", answer=answer), killed=["c1.1"]).twice) == 1


def test_a_second_run_on_another_machine_is_found(world: World) -> None:
    world.put("journal", "one n1\n").put("journal", "one n2\n", root=1)
    assert len(world.judge(call("one")).twice) == 1


def test_the_same_line_twice_in_one_journal_is_no_copy(world: World) -> None:
    assert len(world.put("journal", "one n1\none n1\n").judge(call("one")).twice) == 1


def test_a_copy_of_the_data_on_another_machine_is_no_second_run(world: World) -> None:
    for root in (0, 1):
        world.put("journal", "one n1\n", root=root).put("appends", "two\n", root=root)
        world.put("files/three", "three\n", root=root)
    assert world.judge(call("one"), call("two", "appends"), call("three", "files")).broken == {}


@pytest.mark.parametrize("trace", ["appends", "replaced"])
def test_a_change_that_was_made_twice_is_found(world: World, trace: str) -> None:
    assert len(world.put(trace, "one\none\n").judge(call("one", trace)).twice) == 1


def test_an_ok_without_the_effect_is_found(world: World) -> None:
    world.put("journal", "other n\n")
    assert len(world.judge(call("other"), call("one")).falsely_ok) == 1


@pytest.mark.parametrize("trace", ["appends", "replaced", "files"])
def test_an_acknowledged_change_that_is_missing_is_found(world: World, trace: str) -> None:
    world.put("journal", "other n\n")
    assert len(world.judge(call("other"), call("one", trace)).acknowledged_missing) == 1


def test_each_part_of_a_batch_is_judged(world: World) -> None:
    world.put("journal", "one n\n").put("appends", "oneb\noneb\n")
    verdict = world.judge(call("one", more={"appends": "oneb", "files": "onec"}))
    assert (len(verdict.twice), len(verdict.acknowledged_missing)) == (1, 1)


def test_half_a_file_is_torn_and_missing_to_whoever_was_told_it_is_there(world: World) -> None:
    world.put("files/one", "one\n")
    verdict = world.judge(call("one", "files", lines=3))
    assert (len(verdict.torn), len(verdict.acknowledged_missing)) == (1, 1)
    assert len(world.judge(call("one", "files", lines=3, answer="outcome_unknown")).torn) == 1


@pytest.mark.parametrize("answer", sorted(NEVER_BEGAN))
def test_what_never_began_and_happened_is_found(world: World, answer: str) -> None:
    world.put("journal", "one n\n")
    assert len(world.judge(call("one", answer=answer)).falsely_not_started) == 1


def test_traces_that_nobody_meant_to_leave_are_found(world: World) -> None:
    world.put("journal", "one n\nhalf\nghost n\n").put("files/two", "three\n")
    told = world.judge(call("one"), call("two", "files", answer="outcome_unknown")).torn
    assert len(told) == 4, "no nonce; nobody's effect; a foreign line in a file, which then has none of its own"


@pytest.mark.parametrize(
    ("intent", "unanswered"),
    [
        (call("one", answer=None), 1),
        (call("one", answer=None, run="c2.1"), 0),
        (call("one", answer="reply_timeout"), 1),
        (call("one", answer="not_started", ended_s=100.0 + 10.0 + GRACE_S + 1.0), 1),
        (call("one", answer="not_started", ended_s=100.0 + 10.0 + GRACE_S - 1.0), 0),
    ],
)
def test_calls_without_an_answer_in_time_are_found(world: World, intent: Intent, unanswered: int) -> None:
    assert len(world.judge(intent, killed=["c2.1"]).unanswered) == unanswered


def test_what_a_restored_checkpoint_does_not_have_is_counted_apart(world: World) -> None:
    world.put("journal", "old n\n").put("journal", "new m\n", root=1)
    world.put("journal", "other n\n", conversation="stays")
    intents = [call("old"), call("new"), call("gone"), call("also gone", conversation="stays"), call("other")]
    verdict = world.judge(*intents, roaming=[TALK])
    assert verdict.rolled_back == 1
    assert len(verdict.falsely_ok) == 1, "a conversation that does not roam loses nothing"


def test_a_log_survives_its_client_and_a_repeated_call_is_the_same_effect(tmp_path: Path) -> None:
    first, second = IntentLog(tmp_path, "c1.1"), IntentLog(tmp_path, "c1.2")
    one, two = call(first.new_id(), answer=None), call(first.new_id(), answer=None)
    first.begin(one)
    first.end(one, "ok")
    first.begin(two)
    path = tmp_path / "c1.1.jsonl"
    path.write_text(path.read_text() + '{"e": "begin", "id": "c1.1-0')
    again = call(two.id, answer=None, run="c1.2", kind="repeated_command")
    second.begin(again)
    second.end(again, "outcome_unknown", "why")
    read = read_intents([path, tmp_path / "c1.2.jsonl"])
    assert [(intent.id, intent.run, intent.answer) for intent in read] == [
        (one.id, "c1.1", "ok"),
        (two.id, "c1.2", "outcome_unknown"),
    ]
