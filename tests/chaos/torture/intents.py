"""What a client means to do and what it was told, in a file that survives the client."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Intent", "IntentLog", "read_intents"]


@dataclass
class Intent:
    """One call: what it would leave, and how it was answered."""

    id: str
    kind: str
    conversation: str
    #: Where the effect leaves its trace (`evidence`): journal, appends, replaced, files; empty: none.
    trace: str
    run: str
    #: Answers must be there this long after the beginning.
    within_s: float
    began_s: float
    #: Of a written file: how often its id is repeated in it.
    lines: int = 1
    #: Ids of further effects of the same call (a batch), by trace.
    more: dict[str, str] = field(default_factory=dict)
    answer: str | None = None
    detail: str = ""
    ended_s: float = 0.0


class IntentLog:
    """Appends lines to a file; one ``write`` each, so that a killed client leaves whole lines. Thread-safe."""

    def __init__(self, directory: Path, run: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.run = run
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(directory / f"{run}.jsonl", flags, 0o600)
        self._lock = threading.Lock()
        self._last = 0

    def new_id(self) -> str:
        """An id that no other call of any client has."""
        with self._lock:
            self._last += 1
            return f"{self.run}-{self._last:05}"

    def begin(self, intent: Intent) -> None:
        """Before anything is sent."""
        self._write({"e": "begin", **{name: value for name, value in vars(intent).items() if value not in (None, {})}})

    def end(self, intent: Intent, answer: str, detail: str = "") -> None:
        """The answer: ``ok``, or what the judge makes of it (`judge`)."""
        self._write({"e": "end", "id": intent.id, "answer": answer, "detail": detail[:500], "at": time.monotonic()})

    def _write(self, entry: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


def read_intents(paths: Iterable[Path]) -> list[Intent]:
    """Every call of these logs with its answer, if it had one. A half-written last line is the killed client's."""
    found: dict[str, Intent] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.pop("e") == "begin":
                found[entry["id"]] = Intent(**entry)
            else:
                intent = found[entry["id"]]
                intent.answer, intent.detail, intent.ended_s = entry["answer"], entry["detail"], entry["at"]
    return list(found.values())
