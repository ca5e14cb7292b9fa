"""Compares what clients were told with what happened. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tests.chaos.torture.evidence import FILES, JOURNAL, Evidence
from tests.chaos.torture.intents import Intent

__all__ = ["NEVER_BEGAN", "Verdict", "judge"]

NEVER_BEGAN = frozenset(
    {
        "not_started",
        "queue_timeout",
        "busy",
        "no_capacity",
        "quota_exceeded",
        "byte_budget_exceeded",
        "home_unavailable",
        "start_failed",
        "sandbox_not_found",
        "sandbox_lost",
        "sandbox_stopping",
        "never_started_cancelled",
        "path_not_found",
        "no_match",
        "invalid_argument",
    }
)
"""Answers that say that nothing happened. Any other one but ``ok`` leaves it open, and once is all that may be."""

GRACE_S = 20.0
"""What the client grants beyond the deadlines (15 s), and what a busy machine takes."""


@dataclass
class Verdict:
    """The counts, and what stands behind each of them."""

    operations: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    twice: list[str] = field(default_factory=list)
    falsely_ok: list[str] = field(default_factory=list)
    acknowledged_missing: list[str] = field(default_factory=list)
    falsely_not_started: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    #: Acknowledged, and gone where a thread went on from a checkpoint: no promise is broken, but it is counted.
    rolled_back: int = 0

    @property
    def broken(self) -> dict[str, list[str]]:
        """Broken promises by name, those that were kept left away."""
        names = ("twice", "falsely_ok", "acknowledged_missing", "falsely_not_started", "unanswered", "torn")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def judge(
    intents: Iterable[Intent], evidence: Evidence, *, killed: Collection[str] = (), roaming: Collection[str] = ()
) -> Verdict:
    """What became of every call.

    Args:
        killed: Runs of clients that were killed: their open calls are nobody's to answer.
        roaming: Conversations that may go on from a checkpoint: what is missing there is ``rolled_back``, if they have
            data on several data roots.
    """
    verdict = Verdict(torn=list(evidence.torn))
    known: set[str] = set()
    moved = set(roaming) & set(evidence.on_several)
    for intent in intents:
        verdict.operations += 1
        verdict.kinds[intent.kind] += 1
        verdict.answers[intent.answer or "none"] += 1
        _judge_time(intent, killed, verdict)
        for trace, effect in ({intent.trace: intent.id} | intent.more).items():
            if trace:
                known.add(effect)
                _judge_effect(intent, trace, effect, evidence, verdict, moved)
    seen = {effect for counted in evidence.times.values() for effect in counted} | set(evidence.files)
    verdict.torn += [f"{effect}: nobody meant to" for effect in sorted(seen - known - {"END"})]
    return verdict


def _judge_time(intent: Intent, killed: Collection[str], verdict: Verdict) -> None:
    told = f"{intent.id} {intent.kind} in {intent.conversation}"
    if intent.answer is None:
        if intent.run not in killed:
            verdict.unanswered.append(f"{told}: no answer")
    elif intent.answer == "reply_timeout":
        verdict.unanswered.append(f"{told}: {intent.detail}")
    elif intent.ended_s - intent.began_s > intent.within_s + GRACE_S:
        took_s = intent.ended_s - intent.began_s
        verdict.unanswered.append(f"{told}: {intent.answer} after {took_s:.1f} s instead of {intent.within_s:.1f} s")


def _judge_effect(
    intent: Intent, trace: str, effect: str, evidence: Evidence, verdict: Verdict, moved: Collection[str]
) -> None:
    times = evidence.count(trace, effect)
    told = f"{effect} {intent.kind} in {intent.conversation}: {intent.answer} {intent.detail}"
    if times > 1:
        verdict.twice.append(f"{told}: {times} times")
    whole = trace != FILES or evidence.files.get(effect) == intent.lines
    if times and not whole:
        verdict.torn.append(f"{told}: {evidence.files[effect]} of {intent.lines} lines")
    if intent.answer == "ok" and not (times and whole):
        if intent.conversation in moved:
            verdict.rolled_back += 1
        else:
            (verdict.falsely_ok if trace == JOURNAL else verdict.acknowledged_missing).append(told)
    elif intent.answer in NEVER_BEGAN and times:
        verdict.falsely_not_started.append(told)
