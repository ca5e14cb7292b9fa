"""Commands in a container without Python, one ``docker exec`` each."""

from __future__ import annotations

import os
import posixpath
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandfleet.backends import Completion, Operation
from sandfleet.errors import (
    InternalError,
    InvalidArgument,
    NotDirectory,
    NotSupported,
    OutcomeUnknown,
    PathNotFound,
    PermissionDenied,
    SandfleetError,
)
from sandfleet_workers.backends.docker import exec_scripts as scripts
from sandfleet_workers.backends.docker.exec_output import Kept, Marked
from sandfleet_workers.backends.docker.exec_runner import Runner, group_of
from sandfleet_workers.backends.docker.exec_stream import STDOUT, End, ExecFailed, ExecProcess
from sandfleet_workers.backends.docker.hostconfig import HOME

__all__ = ["RunningCommand"]

_DAY_S = 86400.0
#: How long the engine may take until a command begins.
_BEGIN_S = 60.0
#: How long a killed command may take to end, and how often it is killed anew.
_END_S, _KILLS = 1.0, 5
#: The kernel refuses a single argument of 128 KiB, and takes two million bytes of them all together at least.
_LONGEST_ARGUMENT = 120 * 1024
_MOST_ARGUMENTS = 1_900_000
_SESSIONS = (
    "sessions need Python 3 in the sandbox's image, which has none: commands go through docker exec here; leave out "
    "session=, and join what belongs together with && in one command"
)


@dataclass(eq=False, slots=True)
class RunningCommand:
    """One command on its way. `run` belongs to one thread; `cancel` may be called from any."""

    runner: Runner
    op: Operation
    env: Mapping[str, str]
    cancelled: bool = False
    _timed_out: bool = False
    _kills: int = 0
    _act_at: float = 0.0
    _mark: bytes = b""
    _out: Kept = field(default_factory=lambda: Kept(0))
    _err: Kept = field(default_factory=lambda: Kept(0))
    _streams: tuple[Marked, Marked] | None = None
    _group: int | None = None
    _launched_at: float = 0.0
    _began_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """End it; it completes as cancelled, if it has not ended by itself at this very moment."""
        with self._lock:
            self.cancelled = True
            group = self._group
            if self._began_at:
                # Whoever is in there may have stopped what kills.
                self._act_at = min(self._act_at, time.monotonic() + _END_S)
        self.runner.kill(group)

    def run(self) -> Completion:
        """Carry it out.

        Raises:
            SandfleetError: It did not begin, or nobody can tell how it ended.
        """
        argv = self._argv()
        if self.op.content and not ExecProcess.tells_end(self.runner.api):
            raise NotSupported(
                "over TLS docker exec cannot be told where stdin ends; write it to a file and read that",
                argument="stdin",
            )
        if self.cancelled:
            return Completion(self._value(None, None))
        self.runner.prepare_killer()
        env = {**self.env, **dict(self.op.args.get("env") or {})}
        process = self.runner.launch(argv, env=env, content=self.op.content or None, effect=True)
        try:
            self._launched_at = time.monotonic()
            self._act_at = self._launched_at + _BEGIN_S
            while process.pump(self._feed, self._until) is End.LATE:
                self._overdue(process)
                if self._kills > _KILLS:
                    break
            return self._ended(process)
        except ExecFailed as exc:
            raise self.runner.broken(str(exc), effect=True) from exc
        finally:
            self.runner.release(process)

    # --- what is run ---------------------------------------------------------------------------

    def _argv(self) -> list[str]:
        args = self.op.args
        if args.get("session") is not None:
            raise NotSupported(_SESSIONS, argument="session")
        if args.get("user") is not None:
            raise NotSupported("commands run as the sandbox's one user; leave user= out", argument="user")
        keep = args.get("max_output_bytes", 1024 * 1024)
        self._out, self._err = Kept(keep), Kept(keep)
        self._mark = secrets.token_hex(16).encode()
        self._streams = (
            Marked(self._mark, self._out, header=False),
            Marked(self._mark, self._err, header=True),
        )
        kind, words = self._words()
        cwd = posixpath.join(HOME, args.get("cwd") or HOME)
        whole = ["/bin/sh", "-c", scripts.COMMAND, "sandfleet", self._mark.decode(), cwd, kind, *words]
        sizes = []
        for word in (*whole, *(args.get("env") or {}).values()):
            try:
                sizes.append(len(word.encode()))
            except UnicodeEncodeError:
                raise NotSupported(
                    "what is not UTF-8 cannot be told to docker exec; write it to a file and name that",
                    argument="command" if args.get("argv") is None else "argv",
                ) from None
        if max(sizes) >= 128 * 1024 or sum(sizes) + 16 * len(sizes) > _MOST_ARGUMENTS:
            raise InvalidArgument(os.strerror(7), argument="argv" if kind == "argv" else "command", errno="E2BIG")
        return whole

    def _words(self) -> tuple[str, list[str]]:
        argv = self.op.args.get("argv")
        if argv is not None:
            return "argv", list(argv)
        command = str(self.op.args["command"])
        step = _LONGEST_ARGUMENT // 4  # characters, each of four bytes at most
        pieces = [command[at : at + step] for at in range(0, len(command), step)]
        return ("line", [command]) if len(pieces) < 2 else ("pieces", pieces)

    # --- while it runs -------------------------------------------------------------------------

    def _feed(self, stream: int, data: bytes) -> bool:
        assert self._streams is not None
        stdout, stderr = self._streams
        (stdout if stream == STDOUT else stderr).feed(data)
        if not self._began_at and (group := group_of(stderr.header)) is not None:
            self._begun(group)
        # The direct child has ended, though others may still hold its streams.
        return stdout.trailer is not None and stderr.trailer is not None

    def _begun(self, group: int) -> None:
        with self._lock:
            self._began_at = time.monotonic()
            self._group = group
            limit_s = self.op.args.get("timeout_s") or _DAY_S
            self._act_at = 0.0 if self.cancelled else self._began_at + limit_s

    def _until(self) -> float:
        return self._act_at

    def _overdue(self, process: ExecProcess) -> None:
        if not self._began_at:
            self._kills = _KILLS + 1  # there is nothing to kill yet, and it may still begin
            return
        self._timed_out = self._timed_out or not self.cancelled
        # What it started elsewhere may hold its streams; then the engine knows that it has ended.
        if self._kills and process.exit_code() is not None:
            self._kills = _KILLS + 1
            return
        self.runner.kill(self._group, anew=self._kills > 0)
        self._kills += 1
        self._act_at = time.monotonic() + _END_S

    # --- how it ended --------------------------------------------------------------------------

    def _ended(self, process: ExecProcess) -> Completion:
        assert self._streams is not None
        stdout, stderr = self._streams
        stdout.flush()
        stderr.flush()
        if stderr.trailer is not None:
            return Completion(self._value(*self._told(stderr.trailer)))
        if not self._began_at:
            if stderr.header is not None:
                raise self._refused(stderr.header)
            raise self.runner.cut_off(process, False, self._out.data() + self._err.data(), effect=True)
        killed = self._timed_out or self.cancelled
        code = self.runner.ended(process)
        if killed and code is None:
            raise OutcomeUnknown("the command could not be ended", op_id=self.op.op_id)
        # Our own shell went too: somebody killed the whole group, or the container is gone with it.
        if code is None or code <= 128 or (not killed and not self.runner.answers()):
            raise self.runner.broken("the stream broke while the command ran", effect=True)
        return Completion(self._value(None, _signal_name(code - 128)))

    def _told(self, trailer: str) -> tuple[int | None, str | None]:
        code, _, how = trailer.partition(" ")
        if not code.isdigit() or int(code[:9]) > 255:
            raise self.runner.nonsense(f"a status {trailer[:40]!r}", effect=True)
        return (None, _signal_name(int(code) - 128)) if how == "signal" else (int(code), None)

    def _refused(self, code: str) -> SandfleetError:
        cwd = self.op.args.get("cwd") or HOME
        if code == "path_not_found":
            return PathNotFound("No such file or directory", path=cwd)
        if code == "not_directory":
            return NotDirectory("Not a directory", path=cwd)
        if code == "permission_denied":
            return PermissionDenied("Permission denied", path=cwd)
        if code == "invalid_argument":
            return InvalidArgument("commands do not start under /proc, /sys or /dev", argument="cwd")
        return InternalError(f"the sandbox's answer makes no sense: {code[:40]!r}", reason="bad_reply")

    def _value(self, exit_code: int | None, signalled: str | None) -> dict[str, Any]:
        as_bytes = bool(self.op.args.get("as_bytes"))
        by_us = exit_code is None
        return {
            "stdout": self._out.base64() if as_bytes else self._out.text(),
            "stderr": self._err.base64() if as_bytes else self._err.text(),
            "exit_code": exit_code,
            "signal": signalled,
            "duration_s": round(time.monotonic() - self._launched_at, 6) if self._launched_at else 0.0,
            "timed_out": by_us and self._timed_out,
            "truncated": bool(self._out.discarded or self._err.discarded),
            "cancelled": by_us and self.cancelled and not self._timed_out,
            **({"encoding": "base64"} if as_bytes else {}),
        }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
