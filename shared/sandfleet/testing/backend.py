"""A backend without sandboxes: files in memory, commands that answer what a test told them to.

It is a whole backend, judged by the same contract suite as the real ones, and cheap: a fleet of a
thousand mock sandboxes costs a few megabytes.

::

    backend = MockBackend()
    backend.set_output("pytest -q", "3 failed", exit_code=1)
    connection = backend.create(plan)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sandfleet.backends import (
    Capability,
    Completion,
    Connection,
    Done,
    Liveness,
    Operation,
    SandboxBackend,
    SandboxPlan,
)
from sandfleet.batch import Batches
from sandfleet.blobs import MAX_BLOB_BYTES
from sandfleet.errors import (
    FileTooLarge,
    NotSupported,
    OutcomeUnknown,
    PathNotFound,
    SandboxLost,
    SandfleetError,
    SessionNotFound,
    StartFailed,
    UnknownOperation,
)
from sandfleet.testing.files import MemoryFiles
from sandfleet.testing.outputs import MockOutput, capped
from sandfleet.testing.texts import check_range, read_text
from sandfleet.testing.timers import Delayed, later

__all__ = ["MockBackend", "MockConnection", "MockOutput"]

_REMEMBERED = 10_000


class MockConnection(Connection):
    """One mock sandbox. Operations without a delay complete inside `start`.

    Args:
        sandbox_id: For errors.
        files: Its file system.
        outputs: The backend's answers, asked where this sandbox has none of its own.
        calls: Where operations are noted.
    """

    def __init__(
        self,
        sandbox_id: str,
        files: MemoryFiles | None = None,
        outputs: Mapping[str, MockOutput] | None = None,
        calls: deque[tuple[str, str, str]] | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.files = files or MemoryFiles()
        self.alive = True
        self._shared = outputs if outputs is not None else {}
        self._own: dict[str, MockOutput] = {}
        self._calls = calls
        self._running: dict[str, tuple[Delayed, MockOutput, Done]] = {}
        self._batches = Batches(self)
        self._sessions: set[str] = set()
        self._lock = threading.RLock()

    def set_output(
        self, command: str, output: str = "", exit_code: int = 0, stderr: str = "", delay_s: float = 0.0
    ) -> None:
        """Let ``command`` answer so in this sandbox."""
        self._own[command] = MockOutput(output, stderr, exit_code, delay_s)

    def start(self, op: Operation, done: Done) -> None:
        if self._calls is not None:
            self._calls.append((self.sandbox_id, op.kind, op.op_id))
        if not self.alive:
            done(Completion(error=SandboxLost("the mock sandbox is dead", sandbox_id=self.sandbox_id)))
        elif op.kind == "execute_command":
            self._execute(op, done)
        elif op.kind == "batch":
            self._batches.start(op, done)
        else:
            done(self._answer(op))

    def cancel(self, op_id: str) -> bool:
        if (told := self._batches.cancel(op_id)) is not None:
            return told
        with self._lock:
            delayed, output, done = self._running.pop(op_id, (None, None, None))
        if delayed is None or output is None or done is None or not delayed.take():
            return False
        done(Completion(output.value(stdout="", stderr="", exit_code=None, signal="SIGKILL", cancelled=True)))
        return True

    def close(self) -> None:
        self._drop(OutcomeUnknown("the connection was closed", sandbox_id=self.sandbox_id))

    def die(self) -> None:
        """End as a killed sandbox does: what runs has an unknown outcome, what comes finds it lost."""
        self.alive = False
        self._drop(OutcomeUnknown("the sandbox died while the command ran", sandbox_id=self.sandbox_id))

    def _drop(self, error: SandfleetError) -> None:
        with self._lock:
            running = list(self._running.values())
            self._running.clear()
        for delayed, _, done in running:
            if delayed.take():
                done(Completion(error=error))

    # --- operations ----------------------------------------------------------------------------

    def _execute(self, op: Operation, done: Done) -> None:
        args = op.args
        if asked := [name for name in ("background", "stdin_open", "pty") if args.get(name)]:
            done(Completion(error=NotSupported(f"the mock backend has no {asked[0]}=", argument=asked[0])))
            return
        command = args.get("command")
        if command is None:
            command = " ".join(args.get("argv") or ())
        if (session := args.get("session")) is not None:
            self._sessions.add(session)
        output = self._own.get(command) or self._shared.get(command)
        if output is None:
            output = MockOutput(f"Mock output for: {command}")
        cwd = args.get("cwd")
        if cwd is not None and not self._is_dir(cwd):
            done(Completion(error=PathNotFound("No such file or directory", path=cwd)))
        elif output.delay_s > 0:
            self._delay(op, output, done)
        else:
            done(Completion(capped(output.value(), args.get("max_output_bytes"))))

    def _delay(self, op: Operation, output: MockOutput, done: Done) -> None:
        timeout_s = op.args.get("timeout_s")
        delay_s, value = output.delay_s, output.value()
        if timeout_s is not None and timeout_s < delay_s:
            delay_s = timeout_s
            value = output.value(stdout="", stderr="", exit_code=None, timed_out=True, duration_s=timeout_s)
        value = capped(value, op.args.get("max_output_bytes"))

        def finish() -> None:
            with self._lock:
                self._running.pop(op.op_id, None)
            done(Completion(value))

        with self._lock:
            self._running[op.op_id] = (later(delay_s, finish), output, done)

    def _is_dir(self, path: str) -> bool:
        try:
            with self._lock:
                return bool(self.files.stat(path)["type"] == "dir")
        except SandfleetError:
            return False

    def _answer(self, op: Operation) -> Completion:
        carry_out = _KINDS.get(op.kind)
        if carry_out is None:
            return Completion(error=UnknownOperation(f"unknown operation {op.kind[:60]!r}", operation=op.kind))
        try:
            with self._lock:
                return carry_out(self, op.args, op.content)
        except SandfleetError as exc:
            return Completion(error=exc)

    def _close_session(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        if args["session"] not in self._sessions:
            raise SessionNotFound(f"no session {args['session']}", session_id=args["session"])
        self._sessions.discard(args["session"])
        return Completion({})

    def _read_file(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        if args.get("as_text"):
            start, end, most = args.get("start_line"), args.get("end_line"), args.get("max_chars")
            lenient = args.get("lenient", False)
            check_range(start, end)
            return Completion(
                *read_text(self.files.data(args["path"]), args["path"], start, end, most, lenient=lenient)
            )
        value, content = self.files.read(
            args["path"], args.get("start_line"), args.get("end_line"), args.get("max_bytes"), args.get("offset", 0)
        )
        if len(content) > MAX_BLOB_BYTES:
            raise FileTooLarge("the file is too large", path=args["path"], size=value["size"], limit=MAX_BLOB_BYTES)
        return Completion(value, content)

    def _write_file(self, args: Mapping[str, Any], content: bytes | None) -> Completion:
        return Completion(
            self.files.write(
                args["path"],
                content or b"",
                append=args.get("append", False),
                if_digest=args.get("if_digest"),
                if_size=args.get("if_size"),
                mode=args.get("mode"),
                parents=args.get("make_parents", True),
            )
        )

    def _str_replace(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion(
            self.files.replace(
                args["path"],
                args["old"],
                args["new"],
                every=args.get("replace_all", False),
                if_digest=args.get("if_digest"),
            )
        )

    def _list_dir(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion(self.files.list(args["path"], args.get("max_depth", 2), args.get("max_entries", 10_000)))

    def _glob(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        most, dirs = args.get("max_results", 200), args.get("include_dirs", False)
        return Completion(self.files.glob(args["path"], args["pattern"], include_dirs=dirs, most=most))

    def _grep(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion(
            self.files.grep(
                args["path"],
                args["pattern"],
                glob=args.get("glob"),
                literal=args.get("literal", False),
                case_sensitive=args.get("case_sensitive", False),
                most=args.get("max_results", 100),
            )
        )

    def _stat(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion(self.files.stat(args["path"], follow=args.get("follow", True)))

    def _make_dir(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        parents, exist_ok = args.get("parents", True), args.get("exist_ok", True)
        self.files.make_dir(args["path"], parents=parents, exist_ok=exist_ok, mode=args.get("mode"))
        return Completion({})

    def _make_link(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        self.files.make_link(args["path"], args["target"], overwrite=args.get("overwrite", False))
        return Completion({})

    def _remove(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        recursive, missing_ok = args.get("recursive", False), args.get("missing_ok", False)
        self.files.remove(args["path"], recursive=recursive, missing_ok=missing_ok)
        return Completion({})

    def _move(self, args: Mapping[str, Any], _content: bytes | None) -> Completion:
        overwrite, follow = args.get("overwrite", False), args.get("follow", False)
        self.files.move(args["path"], args["new_path"], overwrite=overwrite, follow=follow)
        return Completion({})

    def _health(self, _args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion({"status": "alive", "detail": "mock"})

    def _metrics(self, _args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion({"disk_bytes": self.files.size_bytes(), "pids": len(self._running)})

    def _noop(self, _args: Mapping[str, Any], _content: bytes | None) -> Completion:
        return Completion({})


_KINDS: dict[str, Callable[[MockConnection, Mapping[str, Any], bytes | None], Completion]] = {
    "close_session": MockConnection._close_session,
    "read_file": MockConnection._read_file,
    "write_file": MockConnection._write_file,
    "str_replace": MockConnection._str_replace,
    "list_dir": MockConnection._list_dir,
    "glob": MockConnection._glob,
    "grep": MockConnection._grep,
    "stat": MockConnection._stat,
    "make_dir": MockConnection._make_dir,
    "remove": MockConnection._remove,
    "move": MockConnection._move,
    "health": MockConnection._health,
    "make_link": MockConnection._make_link,
    "metrics": MockConnection._metrics,
    "noop": MockConnection._noop,
}


class MockBackend(SandboxBackend):
    """Sandboxes in memory, with failures on demand. A thread's files outlive its sandbox, as real ones do.

    Attributes:
        fail_create: Raised by every `create` until it is None again.
        calls: (sandbox_id, kind, op_id) of the last operations, oldest first.

    Args:
        settings: Not read.
        on_death: As for every backend.
        factory: Makes the connection of a plan, for tests that want one of their own.
    """

    name: ClassVar[str] = "mock"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.COMMANDS, Capability.SESSIONS, Capability.FILES, Capability.BINARY, Capability.CANCEL}
    )
    isolation: ClassVar[str] = "none (nothing runs)"

    def __init__(
        self,
        settings: Any = None,
        on_death: Callable[[str, str], None] = lambda _id, _reason: None,
        *,
        factory: Callable[[SandboxPlan], MockConnection] | None = None,
    ) -> None:
        super().__init__(settings, on_death)
        self.fail_create: SandfleetError | None = None
        self.calls: deque[tuple[str, str, str]] = deque(maxlen=_REMEMBERED)
        self._factory = factory
        self._outputs: dict[str, MockOutput] = {}
        self._connections: dict[str, MockConnection] = {}
        self._files: dict[tuple[str, int], MemoryFiles] = {}
        self._lock = threading.Lock()

    def set_output(
        self, command: str, output: str = "", exit_code: int = 0, stderr: str = "", delay_s: float = 0.0
    ) -> None:
        """Let ``command`` answer so in every sandbox, those that run already included."""
        self._outputs[command] = MockOutput(output, stderr, exit_code, delay_s)

    def connection(self, sandbox_id: str) -> MockConnection:
        """The connection of a running sandbox.

        Raises:
            KeyError: No such sandbox runs.
        """
        return self._connections[sandbox_id]

    def kill(self, sandbox_id: str, reason: str = "killed") -> None:
        """End a sandbox as if by itself; the owner hears of it."""
        with self._lock:
            connection = self._connections.pop(sandbox_id)
        connection.die()
        self.on_death(sandbox_id, reason)

    def create(self, plan: SandboxPlan) -> MockConnection:
        self.destroy(plan.sandbox_id)
        if self.fail_create is not None:
            raise self.fail_create
        if self._factory is not None:
            connection = self._factory(plan)
        else:
            files = self._files_of(plan.user_data)
            connection = MockConnection(plan.sandbox_id, files, self._outputs, self.calls)
        with self._lock:
            self._connections[plan.sandbox_id] = connection
        return connection

    def destroy(self, sandbox_id: str) -> None:
        with self._lock:
            connection = self._connections.pop(sandbox_id, None)
        if connection is not None:
            connection.die()

    def probe(self, sandbox_id: str) -> Liveness:
        connection = self._connections.get(sandbox_id)
        return Liveness.ALIVE if connection is not None and connection.alive else Liveness.DEAD

    def running(self) -> list[str]:
        with self._lock:
            return list(self._connections)

    def close(self) -> None:
        for sandbox_id in self.running():
            self.destroy(sandbox_id)

    def _files_of(self, user_data: Path) -> MemoryFiles:
        """The thread's files; a directory that was deleted and made again is another one."""
        try:
            key = (str(user_data), os.stat(user_data).st_ino)
        except OSError as exc:
            raise StartFailed(f"the thread's directory is missing: {exc}", reason="data_missing") from exc
        with self._lock:
            return self._files.setdefault(key, MemoryFiles())
