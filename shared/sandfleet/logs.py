"""Structured logs: one line an event, ``event key=value …``, or JSON with ``SANDFLEET_LOG_FORMAT=json``."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping

from sandfleet.redaction import without_credentials

__all__ = ["add_context", "setup_logging"]

#: Facts of this process that every line carries, such as the id of its node.
_context: dict[str, str] = {}

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "data",
}


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        facts = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if facts.get("node_id", _context.get("node_id")) == _context.get("node_id"):
            facts = _context | facts
        at = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        text = _message(record)
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        if self._json:
            line = {
                "at": record.created,
                "level": record.levelname,
                "logger": record.name,
                "event": text,
                **facts,
            }
            return without_credentials(_json(line))
        # A hostile command line in a fact must not start a line of its own or move the cursor.
        shown = " ".join(f"{key}={_plain(value)}" for key, value in facts.items() if key != "exception")
        tail = "".join("\n" + _escape(line) for line in str(facts.get("exception", "")).splitlines())
        return without_credentials(f"{at} {record.levelname[:4]} {record.name} {_escape(text)} {shown}".rstrip() + tail)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  (a library's mistake: logging would print a traceback between the lines)
        return str(record.msg)


def _json(line: Mapping[str, object]) -> str:
    """One line of strict JSON, whatever the facts are."""
    try:
        return json.dumps(line, default=_told, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # odd keys, NaN, a fact that contains itself
        return json.dumps({key: value if isinstance(value, str | int) else _told(value) for key, value in line.items()})


def _told(value: object) -> str:
    try:
        return str(value)
    except Exception as exc:  # noqa: BLE001  (it is somebody else's)
        return f"({type(value).__name__}, which cannot be shown: {type(exc).__name__})"


def add_context(**facts: str) -> None:
    """Put facts of this process on every line from now on (``node_id``, ``incarnation``).

    A line that is about another node (a ``node_id`` of its own) is left as it is.
    """
    _context.update(facts)


def _plain(value: object) -> str:
    text = _escape(str(value)).replace('"', "'")
    return f'"{text}"' if " " in text else text


def _escape(text: str) -> str:
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def setup_logging(level: str = "INFO") -> None:
    """Log to stderr, Python's warnings too. Celery's own per-task lines are kept at WARNING: the operations have our
    own records."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(os.environ.get("SANDFLEET_LOG_FORMAT") == "json"))
    logging.basicConfig(level=getattr(logging, level.upper(), logging.INFO), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in ("celery", "kombu", "celery.app.trace", "celery.worker.strategy"):
        logging.getLogger(name).setLevel(logging.WARNING)
