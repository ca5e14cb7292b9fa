"""The operations of a sandbox: their names, their arguments, what they touch and how Flower shows them.

One table, read by the client (to validate before publishing), by the node (to validate what came
over the wire and to choose lanes) and by the docs. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sandfleet import op_args as of
from sandfleet.errors import InvalidArgument, UnknownOperation
from sandfleet.op_args import MAX_OUTPUT_BYTES, MAX_TIMEOUT_S, Args
from sandfleet.redaction import without_secrets

__all__ = [
    "CONTENT_KINDS",
    "MAX_OUTPUT_BYTES",
    "MAX_TIMEOUT_S",
    "OPS",
    "Args",
    "OpKind",
    "describe",
    "lanes_of",
    "parse_args",
    "task_name",
]


@dataclass(frozen=True, slots=True)
class OpKind:
    """One kind of operation.

    Attributes:
        args: The argument model.
        effect: Whether it changes anything. Operations without effect are not claimed and may be repeated.
        lane: shell, files, stdin or None (no lane: runs beside everything but barriers).
        describe: What Flower and logs show of the arguments; never contents or environment values.
    """

    args: type[Args]
    effect: bool
    lane: str | None
    describe: Callable[[Mapping[str, Any]], str]


def _cut(text: object, limit: int = 80) -> str:
    # What a sandbox's user wrote must not move the cursor of whoever reads it.
    line = " ".join("".join(ch if ch.isprintable() else " " for ch in str(text)[: 4 * limit]).split())
    line = line if len(line) <= limit else line[: limit - 1] + "…"
    # Terminals and logs show it: an escape sequence in a command must not reach them.
    return "".join(ch if ch.isprintable() else "\ufffd" for ch in line)


def _command(args: Mapping[str, Any]) -> str:
    line = args.get("command")
    words = [str(word)[:1000] for word in list(args.get("argv") or ())[:100]]
    text = str(line) if line is not None else shlex.join(words)
    return "bash: " + _cut(without_secrets(text[:1000]))


def _path(word: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda args: f"{word}: {_cut(args.get('path'))}"


def _search(word: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda args: f"{word}: {_cut(args.get('pattern'), 40)} in {_cut(args.get('path'), 60)}"


def _job(args: Mapping[str, Any]) -> str:
    return f"job {_cut(args.get('job_id'), 40)}"


OPS: dict[str, OpKind] = {
    "execute_command": OpKind(of.ExecuteCommand, True, "shell", _command),
    "close_session": OpKind(of.CloseSession, True, "shell", lambda a: f"close session {_cut(a.get('session'))}"),
    "read_file": OpKind(of.ReadFile, False, None, _path("read")),
    "write_file": OpKind(of.WriteFile, True, "files", _path("write")),
    "str_replace": OpKind(of.StrReplace, True, "files", _path("replace in")),
    "list_dir": OpKind(of.ListDir, False, None, _path("ls")),
    "glob": OpKind(of.Glob, False, None, _search("glob")),
    "grep": OpKind(of.Grep, False, None, _search("grep")),
    "stat": OpKind(of.Stat, False, None, _path("stat")),
    "make_link": OpKind(of.MakeLink, True, "files", lambda a: f"ln: {_cut(a.get('path'))}"),
    "make_dir": OpKind(of.MakeDir, True, "files", _path("mkdir")),
    "remove": OpKind(of.Remove, True, "files", _path("rm")),
    "move": OpKind(of.Move, True, "files", _path("mv")),
    "kill_job": OpKind(of.KillJob, True, None, lambda a: f"{_cut(a.get('signal') or 'SIGTERM', 10)}: {_job(a)}"),
    "write_stdin": OpKind(of.WriteStdin, True, "stdin", lambda a: f"stdin: {_job(a)}"),
    "resize_job": OpKind(of.ResizeJob, False, None, lambda a: f"resize: {_job(a)}"),
    "poll_job": OpKind(of.PollJob, False, None, lambda a: f"poll: {_job(a)}"),
    "list_jobs": OpKind(of.Nothing, False, None, lambda _: "list jobs"),
    "list_processes": OpKind(of.Nothing, False, None, lambda _: "list processes"),
    # A barrier: it waits for what runs, and what comes waits for it.
    "checkpoint": OpKind(of.TakeCheckpoint, True, None, lambda a: f"checkpoint {_cut(a.get('name') or '')}".strip()),
    "cancel": OpKind(of.Cancel, False, None, lambda a: f"cancel {_cut(a.get('op_id'), 40)}"),
    "health": OpKind(of.Nothing, False, None, lambda _: "health"),
    "metrics": OpKind(of.Nothing, False, None, lambda _: "metrics"),
    "noop": OpKind(of.Nothing, False, None, lambda _: "noop"),
    "batch": OpKind(of.Batch, True, None, lambda a: f"batch of {len(a.get('ops') or ())}"),
}

#: Kinds that carry bytes beside their arguments.
CONTENT_KINDS = frozenset({"execute_command", "write_file", "write_stdin"})


def task_name(kind: str) -> str:
    """The fixed Celery task name of an operation kind."""
    return f"sandbox.{kind}"


def parse_args(kind: str, args: Mapping[str, Any]) -> Args:
    """The validated arguments.

    Raises:
        UnknownOperation: No such kind.
        InvalidArgument: Names the first wrong argument and what is allowed.
    """
    op = OPS.get(kind)
    if op is None:
        raise UnknownOperation(f"unknown operation {kind[:60]!r}; known: {', '.join(sorted(OPS))}")
    try:
        parsed = op.args.model_validate(args)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "arguments"
        raise InvalidArgument(f"{kind}: {where}: {first['msg']}", operation=kind, argument=where) from None
    if isinstance(parsed, of.Batch):
        for item in parsed.ops:
            inner = str(item.get("kind", ""))
            if inner in ("batch", "checkpoint"):
                raise InvalidArgument(f"batch: a batch cannot hold a {inner}", operation=kind, argument="ops")
            held = parse_args(inner, item.get("args") or {})
            if isinstance(held, of.ExecuteCommand) and (held.background or held.stream):
                why = "batch: a batch answers when all is done; start a job by itself"
                raise InvalidArgument(why, operation=kind, argument="ops")
    return parsed


def describe(kind: str, args: Mapping[str, Any], sandbox_id: str) -> str:
    """One line for Flower, logs and ``sandfleet ops``: ``bash: ls -la · 3f9a1c22``."""
    op = OPS.get(kind)
    return f"{op.describe(args) if op else kind} · {sandbox_id[:12]}"


def lanes_of(kind: str, args: Mapping[str, Any], sandbox_id: str, caller: str) -> tuple[str, ...]:
    """The lanes the operation must hold, sorted.

    A one-shot command shares ``<sandbox>/shell/<caller>``, a session has its own lane, every
    mutation of files shares ``<sandbox>/files``, what goes to one job's stdin ``<sandbox>/stdin/<job>``; reads have
    none. A batch takes the lanes of all
    its items at once.
    """
    if kind == "batch":
        lanes = {
            lane
            for item in args.get("ops") or ()
            for lane in lanes_of(str(item.get("kind", "")), item.get("args") or {}, sandbox_id, caller)
        }
        return tuple(sorted(lanes))
    op = OPS.get(kind)
    if op is None or op.lane is None:
        return ()
    if op.lane == "files":
        return (f"{sandbox_id}/files",)
    if op.lane == "stdin":
        return (f"{sandbox_id}/stdin/{args.get('job_id')}",)
    session = args.get("session")
    return (f"{sandbox_id}/session/{session}",) if session else (f"{sandbox_id}/shell/{caller}",)
