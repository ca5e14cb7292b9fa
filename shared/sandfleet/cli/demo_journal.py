"""What the demo did: steps that are right or wrong, and how long operations took. Thread-safe."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sandfleet.errors import SandfleetError

__all__ = ["Journal", "Step", "Timed", "Wrong", "expect"]


class Wrong(Exception):
    """A step did not do what it should; the message says what it did."""


def expect(fact: bool, otherwise: str) -> None:
    """Go on only if the fact holds.

    Raises:
        Wrong: With ``otherwise``: what was found instead.
    """
    if not fact:
        raise Wrong(otherwise)


@dataclass(slots=True)
class Step:
    """One row of the demo's table. The step itself fills in ``told``: what happened."""

    step: str
    thread: str
    node: str = ""
    sandbox: str = ""
    took_ms: float = 0.0
    ok: bool = False
    told: str = ""


class Journal:
    """Collects steps and timings.

    Args:
        on_step: Called after each step, from the thread it ran on.
    """

    def __init__(self, on_step: Callable[[Step], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._on_step = on_step
        self.steps: list[Step] = []
        self.samples: dict[str, list[float]] = {}

    @contextmanager
    def step(self, name: str, thread: str, node: str = "", sandbox: str = "") -> Iterator[Step]:
        """Run one step; it is right unless it raises.

        Raises:
            Wrong: Whatever expected failure the step ended with, so that its thread does not go on from there.
        """
        step = Step(name, thread, node, sandbox)
        started = time.monotonic()
        try:
            yield step
            step.ok = True
        except Wrong as exc:
            step.told = str(exc)
            raise
        except (SandfleetError, TimeoutError) as exc:
            step.told = f"{type(exc).__name__}: {exc}"
            raise Wrong(step.told) from exc
        except Exception as exc:
            step.told = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            step.took_ms = (time.monotonic() - started) * 1000
            with self._lock:
                self.steps.append(step)
                self._on_step(step)

    def sample(self, name: str, took_ms: float) -> None:
        """Keep one timing under a name."""
        with self._lock:
            self.samples.setdefault(name, []).append(took_ms)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Call, and keep how long it took when it succeeded."""
        started = time.monotonic()
        value = call()
        self.sample(name, (time.monotonic() - started) * 1000)
        return value

    def p50(self, name: str) -> float | None:
        """The median of the timings under a name, in milliseconds."""
        samples = self.samples.get(name)
        return round(statistics.median(samples), 2) if samples else None

    def ok(self, *, steps: int) -> bool:
        """Whether every step was right and none of the ``steps`` is missing."""
        return len(self.steps) == steps and all(step.ok for step in self.steps)


class Timed:
    """A sandbox handle whose every call counts as one operation of the journal."""

    def __init__(self, sandbox: Any, journal: Journal) -> None:
        self._sandbox = sandbox
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sandbox, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._journal.timed("op", lambda: method(*args, **kwargs))

        return call
