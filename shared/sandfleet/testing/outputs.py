"""What the commands of mock sandboxes answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MockOutput", "capped"]


@dataclass(frozen=True, slots=True)
class MockOutput:
    """What a command answers, and after how long."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    delay_s: float = 0.0

    def value(self, **changes: Any) -> dict[str, Any]:
        """The completion value of execute_command."""
        return {
            "stdout": self.stdout,
            "stderr": self.stderr,
            "exit_code": self.exit_code,
            "signal": None,
            "duration_s": self.delay_s,
            "timed_out": False,
            "truncated": False,
            "cancelled": False,
            **changes,
        }


def capped(value: dict[str, Any], most: int | None) -> dict[str, Any]:
    """Both streams cut to ``most`` bytes each: the middle goes, as in a real sandbox."""
    for stream in ("stdout", "stderr"):
        raw = value[stream].encode()
        if most is not None and len(raw) > most:
            head, tail = raw[: most - most // 2], raw[len(raw) - most // 2 :]
            note = f"\n... [{len(raw) - most} bytes discarded] ...\n" if most else ""
            value[stream] = head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")
            value["truncated"] = True
    return value
