"""Running scripts in a container without Python, and what their ends mean."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sandfleet.backends import Liveness
from sandfleet.errors import (
    Busy,
    InternalError,
    NotStarted,
    NotSupported,
    OutcomeUnknown,
    SandboxLost,
    SandfleetError,
    SearchTimeout,
)
from sandfleet_workers.backends.docker import exec_scripts as scripts
from sandfleet_workers.backends.docker.exec_answers import lacks_processes
from sandfleet_workers.backends.docker.exec_output import Kept, Marked
from sandfleet_workers.backends.docker.exec_stream import (
    STDOUT,
    End,
    ExecFailed,
    ExecGone,
    ExecProcess,
    ExecRefused,
)

__all__ = ["Answer", "Runner", "group_of"]

_STDERR_BYTES = 64 * 1024
_ENDED_WITHIN_S = 2.0
#: What the engine says when no program was run.
_NO_PROGRAM = frozenset({126, 127})


@dataclass(frozen=True, slots=True)
class Answer:
    """How a script ended by itself: 0, or what `exec_answers.failure` reads ``said`` for."""

    status: int
    output: bytes
    said: bytes


def group_of(told: str | None) -> int | None:
    """The process group of a script's first line; None when it is none that may be signalled."""
    return int(told) if told is not None and told.isascii() and told.isdigit() and 1 < int(told) < 2**31 else None


class Runner:
    """Starts processes in one container. Thread-safe; blocks.

    Args:
        api: A ``docker.APIClient``.
        container_id: Where they run.
        sandbox_id: For errors.
        user: Whose processes they are.
        liveness: Asked when the engine does not find the container running.
    """

    def __init__(
        self, api: Any, container_id: str, *, sandbox_id: str, user: str, liveness: Callable[[], Liveness]
    ) -> None:
        self.api = api
        self.container_id = container_id
        #: For errors.
        self.sandbox_id = sandbox_id
        self._user = user
        self._liveness = liveness
        self._lock = threading.Lock()
        self._active: set[ExecProcess] = set()
        self._closed = threading.Event()
        self._killer: ExecProcess | None = None
        self._killer_wanted = False

    # --- processes -----------------------------------------------------------------------------

    def launch(
        self, argv: list[str], *, env: Mapping[str, str] | None = None, content: bytes | None = None, effect: bool
    ) -> ExecProcess:
        """A started process, to be handed back to `release`.

        Raises:
            NotStarted, SandboxLost, Busy: Nothing was started.
            OutcomeUnknown: With ``effect`` only: it may have been.
        """
        if self._closed.is_set():
            raise NotStarted("the connection is closed", reason="closed", sandbox_id=self.sandbox_id)
        try:
            process = ExecProcess(self.api, self.container_id, argv, user=self._user, env=env, content=content)
        except ExecGone as exc:
            raise self.gone(str(exc)) from exc
        except ExecRefused as exc:
            raise NotStarted(f"the engine started nothing: {exc}", reason="engine") from exc
        except ExecFailed as exc:
            raise self.broken(f"the engine did not tell whether it began: {exc}", effect=effect) from exc
        with self._lock:
            if not self._closed.is_set():
                self._active.add(process)
                return process
        process.close()
        raise self.broken("the connection was closed", effect=effect)

    def release(self, process: ExecProcess) -> None:
        """Give the process's connection back."""
        with self._lock:
            self._active.discard(process)
        process.close()

    def close(self) -> None:
        """Let every `ExecProcess.pump` end."""
        with self._lock:
            self._closed.set()
            active, killer = list(self._active), self._killer
        for process in active:
            process.abort()
        if killer is not None:
            self.release(killer)

    # --- what went wrong -----------------------------------------------------------------------

    def gone(self, why: str) -> SandfleetError:
        """The error of what was not started because the container does not run."""
        if self._liveness() is Liveness.DEAD:
            return SandboxLost("the sandbox is dead", reason="dead", sandbox_id=self.sandbox_id)
        return NotStarted(f"the sandbox could not be reached: {why}", reason="unreachable", sandbox_id=self.sandbox_id)

    def broken(self, why: str, *, effect: bool) -> SandfleetError:
        """The error of what may have begun and of whose end nothing was heard."""
        if effect:
            return OutcomeUnknown(why, sandbox_id=self.sandbox_id)
        return self.gone(why)

    def cut_off(self, process: ExecProcess, begun: bool, printed: bytes, *, effect: bool) -> SandfleetError:
        """The error of a process whose streams ended before our script said its last line.

        Args:
            process: It.
            begun: Whether the script said its first line; before that it changes nothing.
            printed: What else came.
            effect: Whether it changes anything.
        """
        code = None if begun or self._closed.is_set() else self.ended(process)
        if code is None:
            return self.broken("the stream broke before the end", effect=effect)
        told = printed[:300].decode("utf-8", "replace").strip()
        if lacks_processes(told):
            return Busy("no further process may be started in the sandbox", retry_after_s=0.5)
        if code in _NO_PROGRAM and ("no such file" in told or "not found" in told):
            return NotSupported(f"the image has neither Python 3 nor a shell at /bin/sh: {told}")
        if self._liveness() is Liveness.DEAD:
            return SandboxLost("the sandbox is dead", reason="dead", sandbox_id=self.sandbox_id)
        return NotStarted(f"nothing was started: {told}", reason="engine", sandbox_id=self.sandbox_id)

    def ended(self, process: ExecProcess) -> int | None:
        """The exit code the engine knows of, which may take a moment."""
        until = time.monotonic() + _ENDED_WITHIN_S
        while (code := process.exit_code()) is None and time.monotonic() < until and not self._closed.is_set():
            time.sleep(0.02)
        return code

    def answers(self) -> bool:
        """Whether the container still runs something."""
        try:
            process = self.launch(["/bin/sh", "-c", ":"], effect=False)
        except SandfleetError:
            return False
        try:
            deadline = time.monotonic() + _ENDED_WITHIN_S
            process.pump(lambda _stream, _data: False, lambda: deadline)
            return self.ended(process) == 0
        finally:
            self.release(process)

    # --- scripts -------------------------------------------------------------------------------

    def script(
        self,
        text: str,
        *args: object,
        content: bytes | None = None,
        most: int = 64 * 1024,
        timeout_s: float = 30.0,
        effect: bool = False,
        search: bool = False,
    ) -> Answer:
        """Run one of `exec_scripts` and wait for its end.

        Args:
            text: The script.
            args: For it.
            content: Its stdin.
            most: How many bytes it may write; a longer answer is a wrong one.
            timeout_s: How long it may take; then it is killed.
            effect: Whether it changes anything.
            search: Whether taking too long is the caller's affair.

        Raises:
            SandfleetError: It did not end by itself.
        """
        mark = secrets.token_hex(16)
        output = Kept(2 * most)
        said = Kept(_STDERR_BYTES)
        stderr = Marked(mark.encode(), said, header=True)

        def feed(stream: int, data: bytes) -> bool:
            (output if stream == STDOUT else stderr).feed(data)
            return output.total > most

        argv = ["/bin/sh", "-c", text, "sandfleet", mark, *map(str, args)]
        process = self.launch(argv, content=content, effect=effect)
        try:
            deadline = time.monotonic() + timeout_s
            end = process.pump(feed, lambda: deadline)
            if end is not End.CLOSED:
                self.kill(group_of(stderr.header))
                raise self._stopped(end, timeout_s, effect=effect, search=search)
            if stderr.trailer is None:
                raise self.cut_off(process, stderr.header is not None, output.data() + said.data(), effect=effect)
        except ExecFailed as exc:
            raise self.broken(str(exc), effect=effect) from exc
        finally:
            self.release(process)
        if not stderr.trailer.isdigit():
            raise self.nonsense(f"a status {stderr.trailer[:40]!r}", effect=effect)
        return Answer(int(stderr.trailer[:9]), output.data(), said.data())

    def _stopped(self, end: End, timeout_s: float, *, effect: bool, search: bool) -> SandfleetError:
        if end is End.ENOUGH:
            return self.nonsense("more than was asked for", effect=effect)
        if search:
            return SearchTimeout(f"took longer than {timeout_s:g} s", timeout_s=timeout_s)
        if effect:
            return OutcomeUnknown(f"not over after {timeout_s:g} s", sandbox_id=self.sandbox_id)
        return NotStarted("the sandbox does not answer", reason="no_answer", sandbox_id=self.sandbox_id)

    def nonsense(self, what: str, *, effect: bool) -> SandfleetError:
        """The error of an answer that our scripts do not give."""
        text = f"the sandbox's answer makes no sense: {what}"
        if effect:
            return OutcomeUnknown(text, reason="bad_reply", sandbox_id=self.sandbox_id)
        return InternalError(text, reason="bad_reply", sandbox_id=self.sandbox_id)

    # --- ending --------------------------------------------------------------------------------

    def prepare_killer(self) -> None:
        """Have a shell in the container that can end processes even when it has no room for another one."""
        with self._lock:
            if self._killer_wanted or self._closed.is_set():
                return
            self._killer_wanted = True
        threading.Thread(target=self._start_killer, name="sandfleet-exec-killer", daemon=True).start()

    def _start_killer(self) -> None:
        try:
            killer = self.launch(["/bin/sh", "-c", scripts.KILLER], content=b"", effect=False)
        except SandfleetError:
            self._killer_wanted = False  # the next command tries again; until then each end takes a process of its own
            return
        with self._lock:
            if not self._closed.is_set():
                self._killer = killer
                return
        self.release(killer)

    def _dismiss(self, killer: ExecProcess) -> None:
        """Whoever runs in the sandbox may have ended it or stopped it; the next command starts another."""
        with self._lock:
            if self._killer is not killer:
                return
            self._killer, self._killer_wanted = None, False
        self.release(killer)

    def kill(self, group: int | None, *, anew: bool = False) -> None:
        """End a process group; unknown ones are fine.

        Args:
            group: Of a script's first line.
            anew: Do not trust the shell that is there for it.
        """
        if group is None:
            return
        with self._lock:
            killer = self._killer
        if killer is not None and not anew and killer.write(b"%d\n" % group):
            return
        if killer is not None:
            self._dismiss(killer)
        try:
            process = self.launch(["/bin/sh", "-c", scripts.KILL_ONE, "sandfleet", str(group)], effect=False)
        except SandfleetError:  # whoever asked looks whether it has ended, and asks again
            return
        try:
            deadline = time.monotonic() + _ENDED_WITHIN_S
            process.pump(lambda _stream, _data: False, lambda: deadline)
        except ExecFailed:
            return
        finally:
            self.release(process)
