"""Log lines: one event is one line, whatever a sandbox's user put into a fact."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from sandfleet import logs
from sandfleet.logs import add_context, setup_logging

HOSTILE = "a\n12:00:00 CRIT sandfleet.node node.fenced\r\x1b[2J\x1b]0;x\x07\x9b31m\u2028\u202e\0\ud800"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger below ours; what `setup_logging` and `add_context` did to the process is undone."""
    monkeypatch.setattr(logs, "_context", {})
    names = ("celery", "kombu", "celery.app.trace", "celery.worker.strategy")
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in names}
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("sandfleet.test")
    logging.captureWarnings(False)
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


class Unshowable:
    def __str__(self) -> str:
        raise OSError("gone")


def test_json_stays_json_whatever_a_fact_is(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDFLEET_LOG_FORMAT", "json")
    setup_logging("INFO")
    itself: list[object] = []
    itself.append(itself)
    for fact in (float("nan"), float("inf"), {(1, 2): 3}, itself, Unshowable(), b"\xff", "\ud800", {"a": Unshowable()}):
        log.info("op.odd", extra={"fact": fact, "op_id": "o1"})
    log.info("wants %d", "a number")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("of a library", UserWarning, stacklevel=1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines[:-1]] == ["op.odd"] * 8 + ["wants %d"]
    assert all(line["op_id"] == "o1" for line in lines[:8])
    assert "of a library" in lines[-1]["event"]


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


def test_every_line_tells_of_which_process_it_is_and_one_about_another_node_is_left_alone(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDFLEET_LOG_FORMAT", "json")
    setup_logging("INFO")
    add_context(node_id="node-1", incarnation="i1")
    log.info("op.failed", extra={"op_id": "o1", "sandbox_id": "3f9a1c22"})
    logging.getLogger("somebody.elses").warning("odd")
    log.info("node.closed", extra={"node_id": "node-2", "took_s": 1})
    first, second, third = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    facts = {key: first[key] for key in ("event", "op_id", "sandbox_id", "node_id", "incarnation")}
    assert facts == {
        "event": "op.failed", "op_id": "o1", "sandbox_id": "3f9a1c22", "node_id": "node-1", "incarnation": "i1",
    }  # fmt: skip
    assert (second["event"], second["node_id"]) == ("odd", "node-1")
    assert third["node_id"] == "node-2"
    assert "incarnation" not in third, "that is another node's affair"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_password_in_a_url_is_never_written_whoever_put_it_there(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("SANDFLEET_LOG_FORMAT", form)
    setup_logging("INFO")
    url = "rediss://user:hunter:2@redis.internal:6379/0"
    log.info("connecting to %s, then %s", "redis://:hunter2@127.0.0.1:6379/0", url, extra={"url": url})
    try:
        raise ConnectionError(f"{url} does not answer")
    except ConnectionError:
        log.exception("store.away", extra={"see": "https://docs.internal/page?q=a@b"})
    told = capsys.readouterr().err
    assert "hunter" not in told
    assert "127.0.0.1:6379/0" in told
    assert "redis.internal:6379/0" in told
    assert "https://docs.internal/page?q=a@b" in told
