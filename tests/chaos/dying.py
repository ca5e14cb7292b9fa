"""A scheduler or node that dies, or stops, at a chosen point of its code: no luck with timing is needed.

    python -m tests.chaos.dying KILL sandfleet_scheduler.service:Scheduler._create@before sandfleet_scheduler
    python -m tests.chaos.dying STOP sandfleet_workers.slots:Slots.remove@change:3 sandfleet_workers --node-id n1

A point is a function and when: ``before`` it, ``after`` it, or before the n-th ``change`` of a directory in it. The
signal is sent once. Whoever waits for it finds the file that the variable ``DYING_AT`` names.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Every call by which slots change anything.
CHANGES = ("mkdir", "rename", "rmdir", "symlink", "unlink", "chown", "fchown", "chmod", "fchmod")

CHECKOUT = Path(__file__).parents[2]

_within = threading.local()
_once = threading.Lock()


def importable() -> dict[str, str]:
    """The variable by which a child finds this module, whatever directory it is started in."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))}


def arm(point: str, number: signal.Signals) -> None:
    """Have this process sent a signal when it comes to the point."""
    place, _, when = point.partition("@")
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    real: Callable[..., Any] = getattr(owner, name)
    what, _, step = when.partition(":")

    @functools.wraps(real)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if what == "before":
            now(number)
        if what == "change":
            _within.left = int(step)
        try:
            return real(*args, **kwargs)
        finally:
            _within.left = None
            if what == "after":
                now(number)

    setattr(owner, name, dying)
    if what == "change":
        for change in CHANGES:
            setattr(os, change, _counted(getattr(os, change), number))


def _counted(real: Callable[..., Any], number: signal.Signals) -> Callable[..., Any]:
    @functools.wraps(real)
    def change(*args: Any, **kwargs: Any) -> Any:
        left = getattr(_within, "left", None)
        if left is not None:
            if left == 0:
                now(number)
            _within.left = left - 1
        return real(*args, **kwargs)

    return change


def now(number: signal.Signals) -> None:
    """The end, or for STOP a long pause, of the whole process; once."""
    if _once.acquire(blocking=False):
        Path(os.environ["DYING_AT"]).touch()
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    _, told, point, program, *arguments = sys.argv
    arm(point, signal.Signals[f"SIG{told}"])
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
