"""Running one command line on an AIO server: its two command routes, its sessions, and what an answer is worth.

`/v1/bash/exec` runs each session's commands apart and tells two streams; images before 1.9.3 have only
`/v1/shell/exec`, where a session is a terminal and both streams are one.
"""

from __future__ import annotations

import math
import secrets
import signal
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from sandfleet.errors import InternalError, NotStarted, OutcomeUnknown, PathNotFound, SessionNotFound
from sandfleet_workers import endpoint_fields as check
from sandfleet_workers.backends.aio.answers import BROKEN_SHELL, RouteMissing, data_of
from sandfleet_workers.endpoint_http import MIB, BadReply, Reply, Request, post, table_of

__all__ = ["BASH", "HOME", "SHELL", "Line", "Ran", "Route", "Server", "run", "tool"]

HOME = "/mnt/user-data/workspace"
MARGIN = 256 * 1024
#: A JSON string of ASCII needs up to six bytes for one of the original (``\\u0000``).
JSON_BLOWUP = 6
MAX_TIMEOUT_S = 86400.0
_GUARD_EXTRA_S = 10.0
_SHELL_OUTPUT = 32 * MIB
_TOOL_S = 120.0
_ENDED = frozenset({"completed"})
_TIMED_OUT = frozenset({"timed_out", "hard_timeout", "no_change_timeout"})
_KILLED = frozenset({"killed", "terminated"})


@dataclass(frozen=True, slots=True)
class Line:
    """A command line with what belongs to it.

    Attributes:
        text: For a shell.
        cwd: Where to run it; None leaves it to the session.
        env: Further variables.
        timeout_s: Its deadline; None for none.
        keep: Bytes of output to keep per stream; None keeps all there is.
        effect: Whether it may change something.
        cap: The largest answer accepted, in bytes.
    """

    text: str
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    keep: int | None = None
    effect: bool = True
    cap: int = MARGIN + _SHELL_OUTPUT * 2


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command line ended. ``truncated`` is None where the server does not tell."""

    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None
    timed_out: bool
    killed: bool
    truncated: bool


class Route(Protocol):
    """A way of the API to run commands."""

    #: The longest line it is trusted with.
    most_chars: ClassVar[int]
    #: Whether it takes variables beside the line.
    has_env: ClassVar[bool]

    def create(self, session: str, cwd: str) -> Request: ...

    def execute(self, session: str, line: Line) -> Request: ...

    def close(self, session: str) -> Request: ...

    def kill(self, session: str) -> Request: ...

    def ran(self, data: dict[str, Any], line: Line) -> Ran: ...


def _guard_s(line: Line) -> float:
    return min(line.timeout_s or MAX_TIMEOUT_S, MAX_TIMEOUT_S) + _GUARD_EXTRA_S


def _text(data: dict[str, Any], name: str) -> str:
    value: str | None = check.field(data, name, str, type(None))
    return (value or "").encode("utf-8", "replace").decode()  # JSON can hold what UTF-8 cannot


def _code(data: dict[str, Any], status: str, told: str) -> tuple[int | None, str | None]:
    """(exit code, signal) of a command that ended.

    Raises:
        BadReply: It has none that could be believed, as when another command's end was taken for its own.
    """
    if status in _TIMED_OUT:
        return None, None
    if status in _KILLED:
        return None, "SIGKILL"
    code: int = check.field(data, "exit_code", int)
    if status not in _ENDED or not -64 <= code <= 255 or (code and BROKEN_SHELL in told[:300]):
        raise BadReply(f"status {status[:40]!r} with exit code {code}")
    if code >= 0:
        return code, None
    try:
        return None, signal.Signals(-code).name
    except ValueError:
        return None, f"SIG{-code}"


class _Bash:
    most_chars: ClassVar[int] = 100_000
    has_env: ClassVar[bool] = True

    def create(self, session: str, cwd: str) -> Request:
        return post("/v1/bash/sessions/create", {"session_id": session, "exec_dir": cwd}, effect=False)

    def execute(self, session: str, line: Line) -> Request:
        fields: dict[str, Any] = {"session_id": session, "command": line.text}
        fields["max_output_length"] = 0 if line.keep is None else max(line.keep, 1)  # 0 is everything
        if line.timeout_s is not None:
            fields["hard_timeout"] = line.timeout_s
        if line.cwd is not None:
            fields["exec_dir"] = line.cwd
        if line.env:
            fields["env"] = dict(line.env)
        return post("/v1/bash/exec", fields, cap=line.cap, effect=line.effect, guard_s=_guard_s(line))

    def close(self, session: str) -> Request:
        return post(f"/v1/bash/sessions/{session}/close", {}, effect=False, guard_s=10.0)

    def kill(self, session: str) -> Request:
        return post("/v1/bash/kill", {"session_id": session, "signal": "SIGKILL"}, effect=True, guard_s=5.0)

    def ran(self, data: dict[str, Any], line: Line) -> Ran:
        status, stdout, stderr = check.text(data, "status"), _text(data, "stdout"), _text(data, "stderr")
        code, ended_by = _code(data, status, stdout + stderr)
        truncated = data.get("truncated")
        if not isinstance(truncated, bool):
            truncated = self._looks_cut(data, "offset", stdout) or self._looks_cut(data, "stderr_offset", stderr)
        return Ran(stdout, stderr, code, ended_by, status in _TIMED_OUT, status in _KILLED, truncated)

    @staticmethod
    def _looks_cut(data: dict[str, Any], offset: str, text: str) -> bool:
        """Whether more was written than came. Replaced characters only make the text longer."""
        written = check.optional_count(data, offset)
        return written is not None and written > len(text.encode())


class _Shell:
    most_chars: ClassVar[int] = 1000  # a terminal's line has 4096 at most
    has_env: ClassVar[bool] = False

    def create(self, session: str, cwd: str) -> Request:
        return post("/v1/shell/sessions/create", {"id": session, "exec_dir": cwd}, effect=False)

    def execute(self, session: str, line: Line) -> Request:
        timeout_s = min(line.timeout_s or MAX_TIMEOUT_S, MAX_TIMEOUT_S)
        fields: dict[str, Any] = {
            "id": session,
            "command": line.text,
            "hard_timeout": timeout_s,
            # Without it a command that is silent for two minutes is given up on.
            "no_change_timeout": math.ceil(timeout_s) + 60,
            "truncate": False,
            "strict": True,
        }
        if line.cwd is not None:
            fields["exec_dir"] = line.cwd
        return post("/v1/shell/exec", fields, cap=line.cap, effect=line.effect, guard_s=_guard_s(line))

    def close(self, session: str) -> Request:
        request = Request(f"DELETE /v1/shell/sessions/{session} HTTP/1.1\r\nHost: s\r\n".encode())
        request.find = request
        return request

    def kill(self, session: str) -> Request:
        return post("/v1/shell/kill", {"id": session}, effect=True, guard_s=5.0)

    def ran(self, data: dict[str, Any], line: Line) -> Ran:
        status, output = check.text(data, "status"), _text(data, "output")
        code, ended_by = _code(data, status, output)
        return Ran(output, "", code, ended_by, status in _TIMED_OUT, status in _KILLED, False)


BASH: Route = _Bash()
SHELL: Route = _Shell()


class Server:
    """What is known of one AIO server: which routes it has, and which of its sessions are ours."""

    def __init__(self) -> None:
        self.route = BASH
        #: Our sessions by what they are for.
        self.sessions: dict[str, str] = {}
        #: Where a running command can be killed, by its operation.
        self.running: dict[str, tuple[Route, str]] = {}
        self.killed: set[str] = set()
        #: What is to be tidied up once nobody waits.
        self.litter: list[Request] = []

    def drop(self, route: Route, purpose: str | None, session: str) -> None:
        """Have nothing to do with a session any more; what runs in it ends."""
        if purpose is not None and self.sessions.get(purpose) == session:
            del self.sessions[purpose]
        self.litter.append(route.close(session))

    def has_no(self, route: Route) -> None:
        """The route is not there: use the older one from now on.

        Raises:
            InternalError: There is no older one.
        """
        if route is SHELL:
            raise InternalError("the AIO server has neither /v1/bash/exec nor /v1/shell/exec", reason="no_route")
        self.route = SHELL


Running = Generator[Request, Reply, Ran]


def run(server: Server, line: Line, purpose: str | None, op_id: str | None = None) -> Running:
    """Run a line in the session for a purpose, made where there is none; None: in one of its own.

    A session whose command has no believable end is given up: what it did is unknown, and the line is not sent again.

    Raises:
        RouteMissing: Not on this server; nothing ran, and `Server.route` is another one now.
        OutcomeUnknown: ``reason`` session_corrupted.
    """
    route, found = server.route, purpose in server.sessions
    session = server.sessions[purpose] if purpose is not None and found else (yield from _made(server, route, line))
    if purpose is not None:
        server.sessions[purpose] = session
    try:
        return (yield from _run_in(server, route, session, line, purpose, op_id))
    except SessionNotFound:  # ended by `exit`, or put out by the server: nothing ran
        if not found:
            raise NotStarted("the AIO server lost a session before its first command", reason="no_session") from None
        return (yield from run(server, line, purpose, op_id))


def _made(server: Server, route: Route, line: Line) -> Generator[Request, Reply, str]:
    session = f"sandfleet-{secrets.token_hex(8)}"
    try:
        data_of((yield route.create(session, line.cwd or HOME)))
    except RouteMissing:
        server.has_no(route)
        raise
    except PathNotFound as exc:
        raise _at(exc, line) from None
    except BadReply as exc:
        raise NotStarted(f"the AIO server gave no session: {exc}", reason="bad_reply") from exc
    return session


def _run_in(server: Server, route: Route, session: str, line: Line, purpose: str | None, op_id: str | None) -> Running:
    if op_id is not None:
        server.running[op_id] = (route, session)
    keep = False
    try:
        ran = route.ran(_end_of((yield route.execute(session, line))), line)
        keep = purpose is not None and not (route is SHELL and (ran.timed_out or ran.killed))
        return ran
    except RouteMissing:
        server.has_no(route)
        raise
    except PathNotFound as exc:
        keep = purpose is not None
        raise _at(exc, line) from None
    except (BadReply, InternalError) as exc:
        raise OutcomeUnknown(
            f"the AIO server's answer to the command cannot be believed ({exc}); its session is made anew",
            reason="session_corrupted",
        ) from exc
    finally:
        if op_id is not None:
            server.running.pop(op_id, None)
        if not keep:
            server.drop(route, purpose, session)


def _end_of(reply: Reply) -> dict[str, Any]:
    """``data`` of a command's answer: also where the server holds a command that failed for a failure of its own."""
    if reply.status == 200:
        data = table_of(reply).get("data")
        if isinstance(data, dict) and isinstance(data.get("exit_code"), int):
            return data
    return data_of(reply)


def _at(exc: PathNotFound, line: Line) -> PathNotFound:
    return PathNotFound("No such file or directory", path=line.cwd or HOME) if line.cwd else exc


def tool(
    server: Server, text: str, *, effect: bool, cap: int = _SHELL_OUTPUT, timeout_s: float = _TOOL_S
) -> Generator[Request, Reply, tuple[int, str]]:
    """Run a script of ours; (exit code, what it said).

    Raises:
        OutcomeUnknown, RouteMissing: As for `run`.
        InternalError: It did not end as scripts do.
    """
    line = Line(text, timeout_s=timeout_s, effect=effect, cap=MARGIN + cap)
    ran = yield from run(server, line, None if server.route is BASH else "files")
    if ran.exit_code is None:
        problem = f"a tool of the sandbox did not end by itself ({ran.signal or 'it took too long'})"
        raise OutcomeUnknown(problem) if effect else InternalError(problem, reason="tool")
    return ran.exit_code, ran.stdout
