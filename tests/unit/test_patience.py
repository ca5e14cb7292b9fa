"""When a node's silence is its death, and when it is Redis' doing."""

from __future__ import annotations

from sandfleet.testing import ManualClock
from sandfleet_scheduler.patience import Patience

LEASE_S = 8.0


def patient(clock: ManualClock) -> Patience:
    made = Patience(LEASE_S, clock.now)
    look(made, clock)
    clock.advance(LEASE_S + 0.1)
    look(made, clock)
    assert made.over
    return made


def look(patience: Patience, clock: ManualClock, *, took_s: float = 0.0, set_by_s: float = 0.0, moves: int = 0) -> None:
    asked_at = clock.now()
    clock.advance(took_s)
    patience.look(asked_at=asked_at, now_ms=int((clock.now() + 1e6 + set_by_s) * 1000), moves=moves)


def test_after_the_own_start_every_node_gets_a_lease() -> None:
    clock = ManualClock()
    made = Patience(LEASE_S, clock.now)
    clock.advance(LEASE_S)
    assert not made.over
    clock.advance(0.1)
    assert made.over


def test_what_keeps_nodes_from_renewing_gives_them_another_lease() -> None:
    for trouble in ({"took_s": 2.5}, {"set_by_s": 3600.0}, {"set_by_s": -3.0}, {"moves": 1}):
        clock = ManualClock()
        made = patient(clock)
        look(made, clock, **trouble)  # type: ignore[arg-type]
        assert not made.over, trouble
        clock.advance(LEASE_S + 0.1)
        look(made, clock, set_by_s=trouble.get("set_by_s", 0.0), moves=int(trouble.get("moves", 0)))
        assert made.over, "once"


def test_an_ordinary_delay_is_no_trouble() -> None:
    clock = ManualClock()
    made = patient(clock)
    look(made, clock, took_s=1.0, set_by_s=0.5)
    assert made.over
