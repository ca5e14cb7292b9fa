"""The node's way into a container whose image has no Python: every operation is a ``docker exec``.

It costs 50 to 150 ms where sandboxd answers in two, a thread while an operation runs, and it has no sessions. What an
operation means and which errors it gives is the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from sandfleet.backends import Capability, Completion, Connection, Done, Liveness, Operation
from sandfleet.errors import (
    Busy,
    InternalError,
    NotStarted,
    NotSupported,
    OutcomeUnknown,
    SandfleetError,
    UnknownOperation,
)
from sandfleet.ops import OPS
from sandfleet_workers.backends.docker import exec_scripts as scripts
from sandfleet_workers.backends.docker.engine import TROUBLE, Engine
from sandfleet_workers.backends.docker.exec_answers import BadAnswer
from sandfleet_workers.backends.docker.exec_command import RunningCommand
from sandfleet_workers.backends.docker.exec_files import FILE_KINDS
from sandfleet_workers.backends.docker.exec_runner import Runner
from sandfleet_workers.backends.docker.hostconfig import USER_DATA
from sandfleet_workers.batch import Batches
from sandfleet_workers.jobless import refuse_jobs

__all__ = ["ExecConnection"]

log = logging.getLogger("sandfleet.node")

#: At once in one sandbox; each holds a thread here and a process of the engine's there.
_MOST_OPERATIONS = 64


class ExecConnection(Connection):
    """Carries out operations in one container by ``docker exec``.

    Args:
        engine: Of the container.
        container_id: Its id.
        sandbox_id: For errors.
        uid: The user operations run as, ``uid`` or ``uid:gid``.
        env: Environment of commands, on top of the container's own.
        liveness: Asked when the container cannot be reached; may block for a moment.
    """

    lacks: ClassVar[frozenset[Capability]] = frozenset({Capability.SESSIONS, Capability.JOBS, Capability.PTY})

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        *,
        sandbox_id: str,
        uid: str,
        env: Mapping[str, str],
        liveness: Callable[[], Liveness],
    ) -> None:
        self._runner = Runner(engine.api, container_id, sandbox_id=sandbox_id, user=uid, liveness=liveness)
        self._env = dict(env)
        self._began_at = time.monotonic()
        self._running = 0
        self._commands: dict[str, RunningCommand] = {}
        self._batches = Batches(self)
        self._lock = threading.Lock()

    # --- the contract --------------------------------------------------------------------------

    def start(self, op: Operation, done: Done) -> None:
        if op.kind == "batch":
            self._batches.start(op, done)
            return
        with self._lock:
            busy = self._running >= _MOST_OPERATIONS
            self._running += not busy
            if not busy and op.kind == "execute_command":
                self._commands[op.op_id] = RunningCommand(self._runner, op, self._env)
        if busy:
            error = Busy(f"{_MOST_OPERATIONS} operations run in this sandbox already", retry_after_s=0.5)
            done(Completion(error=error))
            return
        try:
            threading.Thread(target=self._run, args=(op, done), name="sandfleet-exec", daemon=True).start()
        except RuntimeError as exc:  # the machine has no thread left
            self._over(op)
            done(Completion(error=NotStarted(f"{op.kind} was not started: {exc}", reason="no_thread")))

    def _over(self, op: Operation) -> None:
        with self._lock:
            self._running -= 1
            self._commands.pop(op.op_id, None)

    def cancel(self, op_id: str) -> bool:
        if (told := self._batches.cancel(op_id)) is not None:
            return told
        command = self._commands.get(op_id)
        if command is None:
            return False
        command.cancel()
        return True

    def close(self) -> None:
        self._runner.close()

    def rename(self, sandbox_id: str) -> None:
        """Errors name the sandbox so from now on: a thread has claimed it."""
        self._runner.sandbox_id = sandbox_id

    # --- one operation, on a thread of its own -------------------------------------------------

    def _run(self, op: Operation, done: Done) -> None:
        try:
            completion = self._carry_out(op)
        except SandfleetError as exc:
            completion = Completion(error=exc)
        except BadAnswer as exc:
            effect = op.kind in OPS and OPS[op.kind].effect
            completion = Completion(error=self._runner.nonsense(str(exc)[:200], effect=effect))
        except Exception as exc:  # whatever it is, somebody waits for the end of the operation
            log.exception("exec.failed", extra={"sandbox_id": self._runner.sandbox_id, "op_id": op.op_id})
            error = f"{op.kind} failed here: {type(exc).__name__}: {str(exc)[:200]}"
            effect = op.kind in OPS and OPS[op.kind].effect
            completion = Completion(error=(OutcomeUnknown if effect else InternalError)(error, reason="internal"))
        self._over(op)
        done(completion)

    def _carry_out(self, op: Operation) -> Completion:
        refuse_jobs(op, "this image has no Python 3 to run it")
        if op.kind == "execute_command":
            return self._commands[op.op_id].run()
        if (carry_out := FILE_KINDS.get(op.kind)) is not None:
            return carry_out(self._runner, op)
        match op.kind:
            case "noop":
                return Completion({})
            case "health":
                return self._health()
            case "metrics":
                return Completion(self._metrics())
            case "close_session":
                raise NotSupported("there are no sessions in a sandbox whose image has no Python 3", argument="session")
        raise UnknownOperation(f"unknown operation {op.kind[:60]!r}", operation=op.kind)

    def _health(self) -> Completion:
        if not self._runner.answers():
            raise self._runner.gone("nothing can be run in it")
        detail = f"docker exec, slower: the image has no Python 3; {len(self._commands)} running"
        return Completion({"status": "alive", "detail": detail})

    def _metrics(self) -> dict[str, Any]:
        """What the engine counts, and what `du` does; None for what neither tells."""
        try:
            told = self._runner.api.stats(self._runner.container_id, stream=False)
        except TROUBLE as exc:
            raise NotStarted(f"the engine does not answer: {str(exc)[:200]}", reason="engine") from exc
        cpu, before = told.get("cpu_stats") or {}, told.get("precpu_stats") or {}
        used_ns, used_before_ns = _number(cpu, "cpu_usage", "total_usage"), _number(before, "cpu_usage", "total_usage")
        system, system_before = _number(cpu, "system_cpu_usage"), _number(before, "system_cpu_usage")
        percent = None
        if None not in (used_ns, used_before_ns, system, system_before) and system > system_before:  # type: ignore[operator]
            share = (used_ns - used_before_ns) / (system - system_before)  # type: ignore[operator]
            percent = round(max(0.0, share) * 100 * max(1, _number(cpu, "online_cpus") or 1), 1)
        networks = list((told.get("networks") or {}).values())
        disk = self._runner.script(scripts.DISK, scripts.word(USER_DATA), timeout_s=20.0)
        kib = disk.output.split(b"\t")[0].strip()
        return {
            "cpu_s": None if used_ns is None else used_ns / 1e9,
            "cpu_percent": percent,
            "memory_bytes": _number(told, "memory_stats", "usage"),
            "pids": _number(told, "pids_stats", "current"),
            "disk_bytes": int(kib) * 1024 if kib.isdigit() and len(kib) < 16 else None,
            "network_in_bytes": sum(_number(each, "rx_bytes") or 0 for each in networks),
            "network_out_bytes": sum(_number(each, "tx_bytes") or 0 for each in networks),
            "uptime_s": round(time.monotonic() - self._began_at, 3),
        }


def _number(data: Any, *names: str) -> int | None:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, int) and not isinstance(data, bool) and data >= 0 else None
