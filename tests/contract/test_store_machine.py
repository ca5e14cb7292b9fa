"""Long and short lives of both stores in lockstep; what is promised is in `tests.contract.store_machine`."""

from __future__ import annotations

import os
import secrets
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sandfleet.ids import Identity
from tests.contract.store_blank_rules import DIGESTS
from tests.contract.store_machine import AGENTS, EXPECT, NODES, THREADS, TROUBLE, TwoStores

LIVES = {
    "live_with_operations": (8, lambda dice: (*who(dice), dice.choice(AGENTS), dice.randint(0, 2))),
    "reserve": (
        4,
        lambda dice: (*who(dice), dice.randint(0, 2), dice.random() < 0.3, dice.random() < 0.3, dice.choice(DIGESTS)),
    ),
    "park": (6, lambda dice: (dice.choice(THREADS),)),
    "withdraw": (2, lambda dice: (dice.randint(0, 5),)),
    "serve": (4, lambda dice: (dice.choice(NODES), dice.choice([0, 0, 1, 2]))),
    "acquire": (5, lambda dice: (dice.choice(THREADS), dice.choice(AGENTS), dice.choice(["c1", "gone"]))),
    "created": (3, lambda dice: (dice.choice(THREADS), dice.randint(0, 1))),
    "create_failed": (1, lambda dice: (dice.choice(THREADS), dice.randint(0, 1))),
    "reservation_expires": (2, lambda dice: (dice.choice(THREADS),)),
    "answer_waiters": (1, lambda dice: (dice.choice(THREADS),)),
    "release": (6, lambda dice: (dice.choice(THREADS), dice.choice(AGENTS))),
    "renew_agent": (3, lambda dice: (dice.choice(THREADS), dice.choice(THREADS), dice.choice(AGENTS))),
    "begin_stop": (6, lambda dice: (dice.choice(THREADS), dice.random() < 0.2, dice.random() < 0.3)),
    "stopped": (4, lambda dice: (dice.choice(THREADS), dice.randint(0, 1))),
    "lost": (2, lambda dice: (dice.choice(THREADS), dice.randint(0, 1))),
    "adopt": (3, lambda dice: (dice.choice(THREADS), dice.randint(0, 2), dice.random() < 0.5)),
    "record": (6, lambda dice: (dice.choice(THREADS), dice.randint(0, 1), dice.choice(EXPECT))),
    "record_again": (1, lambda dice: (dice.randint(0, 2),)),
    "claim": (8, lambda dice: (dice.randint(0, 5),)),
    "finish": (8, lambda dice: (dice.randint(0, 5), dice.random() < 0.3, dice.random() < 0.2)),
    "cancel": (3, lambda dice: (dice.randint(0, 5),)),
    "begin_blank": (6, lambda dice: (dice.choice(NODES), dice.randint(0, 1), dice.random() < 0.05)),
    "blank_ready": (6, lambda dice: (dice.randint(0, 2), dice.choice(DIGESTS[:2]), dice.random() < 0.1)),
    "blank_gone": (2, lambda dice: (dice.randint(0, 2),)),
    "start_takes_too_long": (1, lambda dice: (dice.randint(0, 2),)),
    "sweep": (3, lambda dice: (dice.choice(NODES),)),
    "disturb": (3, lambda dice: (dice.choice(NODES), dice.randint(1, 3), dice.choice(TROUBLE))),
    "recover": (4, lambda dice: (dice.choice(NODES), dice.randint(1, 3), dice.random() < 0.3)),
}
"""How often each rule comes in a long life, and with what. Hypothesis finds the short ones and shrinks them; it
spends most of its steps on few rules, so that deep states need dice with weights."""


def who(dice: Random) -> tuple[Identity, str]:
    return dice.choice(THREADS), dice.choice(NODES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_long_lives_keep_every_promise(fresh_redis_url: str, seed: int) -> None:
    seed = seed if "CI" in os.environ else secrets.randbits(32)
    dice, story = Random(seed), []
    machine = machine_at(fresh_redis_url)()
    names, weights = list(LIVES), [weight for weight, _ in LIVES.values()]
    try:
        machine.start()
        for _ in range(int(os.environ.get("SANDFLEET_STEPS", "300"))):
            name = dice.choices(names, weights)[0]
            if name in ("claim", "finish", "cancel", "record_again") and not machine.ops:
                continue
            if name == "withdraw" and not machine.waiters:
                continue
            if name in ("blank_ready", "blank_gone", "start_takes_too_long") and not machine.slots:
                continue
            arguments = LIVES[name][1](dice)
            story.append((name, arguments))
            getattr(machine, name)(*arguments)
            machine.both_show_the_same_fleet()
            machine.a_thread_has_one_sandbox_and_places_are_kept()
            machine.every_operation_is_answered_once()
            machine.a_user_is_counted_for_the_places_taken()
            machine.blanks_are_their_nodes_own()
            machine.whoever_stands_in_line_waits_for_a_place()
    except BaseException:
        print(f"seed {seed}", *story, sep="\n")
        raise
    finally:
        machine.teardown()


def machine_at(redis_url: str) -> type[TwoStores]:
    class Machine(TwoStores):
        url = redis_url

    return Machine


@pytest.mark.timeout(120)
def test_both_stores_live_the_same_lives_and_keep_every_promise(fresh_redis_url: str) -> None:
    run_state_machine_as_test(
        machine_at(fresh_redis_url),
        settings=settings(
            max_examples=int(os.environ.get("SANDFLEET_EXAMPLES", "20")),
            stateful_step_count=40,
            deadline=None,
            derandomize="CI" in os.environ,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
