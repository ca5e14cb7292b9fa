"""Log lines: one event is one line, whatever a sandbox's user put into a fact."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from sandfleet.logs import setup_logging

HOSTILE = "a\n12:00:00 CRIT sandfleet.node node.fenced\r\x1b[2J\x1b]0;x\x07\x9b31m\u2028\u202e\0\ud800"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger below ours; what `setup_logging` did to the process is undone."""
    names = ("celery", "kombu", "celery.app.trace", "celery.worker.strategy")
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in names}
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("sandfleet.test")
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_a_line_has_the_event_and_its_facts(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")
    log.info("sandbox.started", extra={"sandbox_id": "3f9a1c22", "took_s": 0.5, "why": "two words"})
    line = capsys.readouterr().err
    assert line.endswith('INFO sandfleet.test sandbox.started sandbox_id=3f9a1c22 took_s=0.5 why="two words"\n')


def test_a_hostile_fact_stays_on_its_line_and_moves_no_cursor(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("INFO")
    log.info("op.refused", extra={"error": HOSTILE})
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 2
    assert lines[1] == ""
    assert lines[0].isprintable()
    assert "\\n12:00:00" in lines[0]


def test_a_hostile_message_stays_on_its_line(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")
    log.info("from a library: %s", HOSTILE)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()


def test_a_hostile_fact_cannot_forge_another_fact(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")
    log.info("op.refused", extra={"path": 'x" user="root', "other": 1})
    line = capsys.readouterr().err
    assert ' user="root' not in line.replace('\\"', "'")


def test_a_hostile_exception_moves_no_cursor(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError:
        log.exception("op.begin_failed")
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert all(line.isprintable() for line in told.split("\n"))


def test_json_lines_are_one_object_each_with_the_same_facts(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDFLEET_LOG_FORMAT", "json")
    setup_logging("INFO")
    log.info("op.refused", extra={"error": HOSTILE, "what": {1, 2}})
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    line = json.loads(told)
    assert (line["event"], line["level"], line["logger"]) == ("op.refused", "INFO", "sandfleet.test")
    assert line["error"] == HOSTILE


def test_celerys_line_per_task_is_kept_out(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("DEBUG")
    logging.getLogger("celery.app.trace").info("Task succeeded")
    logging.getLogger("celery.worker.strategy").info("Task received")
    log.debug("ours")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["ours"]


def test_an_unknown_level_is_info(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("CHATTY")
    log.debug("no")
    log.info("yes")
    assert "yes" in capsys.readouterr().err
