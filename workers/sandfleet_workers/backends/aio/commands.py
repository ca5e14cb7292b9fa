"""Commands of callers on an AIO server.

Not as exact as with sandboxd, because the API cannot tell it:

- output is text: what is no UTF-8 comes as U+FFFD, also with ``as_bytes``; ``truncated`` is the server's word where it
  gives one, else what its offsets show;
- a command ended by a signal has the exit code 128+N of the shell around it and no ``signal``, unless we ended it;
- with the older route (`/v1/shell/exec`) both streams come in ``stdout``, 32 MiB of it at most, and a named session
  takes no ``env``;
- a connection that breaks while a command runs is an unknown outcome: nobody can be asked for it afterwards.
"""

from __future__ import annotations

import base64
import posixpath
import secrets
import time
from collections.abc import Generator, Mapping
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet.errors import InvalidArgument, NotSupported, SandfleetError, SessionNotFound
from sandfleet_workers.backends.aio.answers import acknowledged, data_of
from sandfleet_workers.backends.aio.scripts import quoted
from sandfleet_workers.backends.aio.shells import BASH, HOME, JSON_BLOWUP, MARGIN, SHELL, Line, Ran, Server, run
from sandfleet_workers.backends.docker.exec_output import Kept
from sandfleet_workers.endpoint_files import Steps
from sandfleet_workers.endpoint_http import MIB, Reply, Request, post

__all__ = ["close_session", "execute", "kill", "purpose_of", "put", "shortened"]

_CHUNK = 4 * MIB
#: Beyond this much more than asked for, output is cut here: the server's own note on what it left out is shorter.
_SLACK = 1000
_KERNEL = ("/proc", "/dev", "/sys")


def purpose_of(op: Operation) -> str | None:
    """What a command's session is for; None: for this command alone."""
    session = op.args.get("session")
    return None if session is None else f"session/{session}"


def execute(server: Server, env: Mapping[str, str], op: Operation) -> Steps:
    """Carry out execute_command."""
    args, route = op.args, server.route
    keep, purpose = args.get("max_output_bytes", MIB), purpose_of(op)
    _check(op)
    text = yield from _line(server, {**env, **args["env"]} if args.get("env") else dict(env), op)
    line = Line(
        text,
        cwd=args.get("cwd") or (None if purpose else HOME),
        env={**env, **(args.get("env") or {})} if route.has_env else {},
        timeout_s=args.get("timeout_s"),
        keep=keep,
        cap=MARGIN + 2 * (JSON_BLOWUP * max(keep, MIB) if route is BASH else 32 * MIB),
    )
    began = time.monotonic()
    try:
        ran = yield from run(server, line, purpose or (None if route is BASH else "shell"), op.op_id)
        cancelled = op.op_id in server.killed and (ran.killed or ran.exit_code != 0)
    finally:
        server.killed.discard(op.op_id)
    return Completion(_value(ran, keep, time.monotonic() - began, cancelled=cancelled, raw=bool(args.get("as_bytes"))))


def _check(op: Operation) -> None:
    args = op.args
    if args.get("user") is not None:
        raise NotSupported("commands run as the sandbox's one user; leave user= out", argument="user")
    where = posixpath.normpath(args.get("cwd") or "/")
    if any(where == path or where.startswith(path + "/") for path in _KERNEL):
        raise InvalidArgument("commands do not start in the kernel's file systems", argument="cwd")
    if args.get("session") is not None:
        if args.get("argv") is not None:
            raise InvalidArgument("a session takes a command line, not argv", argument="argv")
        if op.content:
            raise NotSupported("a session's command has no stdin of its own", argument="stdin")


def _line(server: Server, env: Mapping[str, str], op: Operation) -> Generator[Request, Reply, str]:
    """What the session's shell is given.

    A one-shot command gets a bash of its own inside: its `exit` must not end the session before the answer, nor its
    `cd` outlive it in a shell that others use.
    """
    args = op.args
    if args.get("session") is not None:
        if args.get("env") and not server.route.has_env:
            raise NotSupported("this AIO image takes no env for a session (1.9.3 and later do)", argument="env")
        return str(args["command"])
    inner = args["command"] if args.get("command") is not None else "exec " + " ".join(map(quoted, args["argv"]))
    if env and not server.route.has_env:  # in a file and not on a command line that everybody can read
        inner = "".join(f"export {name}={quoted(value)}\n" for name, value in env.items()) + inner
    text = f"bash -c {quoted(inner)}"
    if len(text) > server.route.most_chars or (env and not server.route.has_env):
        text = yield from _in_file(inner)
    if not op.content:
        return f"{text} </dev/null"
    stdin = yield from put(op.content)
    return f"{{ rm -f -- {stdin}; {text}; }} <{stdin}"


def shortened(server: Server, text: str) -> Generator[Request, Reply, str]:
    """The line itself, or one that runs it from a file where it is too long for the server's terminal."""
    return text if len(text) <= server.route.most_chars else (yield from _in_file(text))


def _in_file(text: str) -> Generator[Request, Reply, str]:
    # bash holds the file open, and so it may be gone while it runs.
    path = yield from put(b'rm -f -- "$0"\n' + text.encode("utf-8", "surrogateescape") + b"\n")
    return f"bash {path}"


def put(content: bytes) -> Generator[Request, Reply, str]:
    """The path of a new file in ``/tmp`` with these bytes; whoever reads it removes it."""
    path = f"/tmp/.sandfleet-{secrets.token_hex(12)}"
    for offset in range(0, len(content) or 1, _CHUNK):
        piece = base64.b64encode(content[offset : offset + _CHUNK]).decode()
        fields = {"file": path, "content": piece, "encoding": "base64", "append": offset > 0}
        request = post("/v1/file/write", fields, effect=False)
        request.find = None  # an append that is sent twice is done twice
        data_of((yield request))
    return path


def _value(ran: Ran, keep: int, took_s: float, *, cancelled: bool, raw: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "stdout": ran.stdout,
        "stderr": ran.stderr,
        "exit_code": None if cancelled else ran.exit_code,
        "signal": "SIGKILL" if cancelled else ran.signal,
        "duration_s": round(took_s, 6),
        "timed_out": ran.timed_out,
        "truncated": ran.truncated,
        "cancelled": cancelled,
    }
    streams = {name: value[name].encode() for name in ("stdout", "stderr")}
    if keep == 0 or max(map(len, streams.values())) > keep + _SLACK:
        for name, written in streams.items():
            kept = Kept(keep)
            kept.feed(written)
            value[name] = kept.text()
            value["truncated"] |= kept.discarded > 0
    if raw:
        for stream in ("stdout", "stderr"):
            value[stream] = base64.b64encode(value[stream].encode()).decode()
        value["encoding"] = "base64"
    return value


def close_session(server: Server, op: Operation) -> Steps:
    """Carry out close_session: sessions are the connection's, so it knows which there are."""
    session = server.sessions.pop(f"session/{op.args['session']}", None)
    if session is None:
        raise SessionNotFound(f"no session {op.args['session']}", session_id=op.args["session"])
    yield server.route.close(session)  # it may have ended by itself
    return Completion({})


def kill(server: Server, op_id: str) -> Steps:
    """As `sandfleet_workers.endpoint_ops.Dialect.kill`."""
    route, session = server.running.get(op_id, (SHELL, ""))
    if not session:
        return Completion("running")  # it has not come so far, or is over, which the caller sees
    server.killed.add(op_id)  # the command's own answer may be here first
    try:
        told = acknowledged((yield route.kill(session)))
        if not (isinstance(told, dict) and told.get("signalled") is False):
            if op_id not in server.running:
                server.killed.discard(op_id)
            return Completion("killed")
    except SandfleetError:
        pass  # asked again, as long as it runs
    server.killed.discard(op_id)
    return Completion("running")
