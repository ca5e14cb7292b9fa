"""Child processes that cannot outlive us: started with a log of their own, ended in order, never searched by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sandfleet.config import Settings
from sandfleet.config.environ import is_setting, to_environ
from sandfleet.errors import ConfigError, Unavailable

__all__ = ["Child", "Spawner", "child_environ", "end_all"]

# Linux ends the child when the *thread* that started it ends (PR_SET_PDEATHSIG is 1). The setting survives exec,
# so this little Python is gone once the program runs, and the pid stays the same.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this child is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Child:
    """One running or ended child process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The last lines it wrote."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def how_it_ended(self) -> str:
        """``exit code 2`` or ``signal SIGKILL``."""
        status = self.process.poll()
        if status is not None and status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"exit code {status}"

    def failure(self, what: str) -> Unavailable:
        """The error that tells what went wrong with it, with the end of its log."""
        tail = self.tail() or "(it wrote nothing)"
        return Unavailable(f"{self.name} {what}. The end of {self.log}:\n{tail}", process=self.name, log=str(self.log))

    def kill(self) -> None:
        """End it as a crash would, and reap it."""
        self.process.kill()
        self.process.wait()


class Spawner:
    """Starts children from one permanent thread.

    The kernel ends a child with the thread that started it, so that thread must not be a caller's: it ends with
    `close`, with this object or with the process, whichever comes first. No child is ever left behind.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                "a fleet's nodes run on Linux only; start it there (a VM or a container will do) and reach it from "
                "here with SANDFLEET_REDIS_URL"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandfleet-spawner")

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> Child:
        """Run ``argv`` in a session of its own, so that Ctrl-C reaches only us; what it writes goes to ``log``."""
        return self._thread.submit(self._start, name, list(argv), dict(env), log).result()

    def _start(self, name: str, argv: list[str], env: dict[str, str], log: Path) -> Child:
        launcher = [sys.executable, "-ISE", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                launcher, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=env, start_new_session=True
            )
        finally:
            os.close(fd)
        return Child(name, process, log)

    def close(self) -> None:
        """Let the thread end; whatever still runs is killed by the kernel."""
        self._thread.shutdown()


def end_all(children: Iterable[Child], *, grace_s: float) -> None:
    """SIGTERM all of them, wait ``grace_s`` together, SIGKILL who is left; all are reaped, whatever is raised."""
    running = [child for child in children if child.running]
    try:
        for child in running:
            # One that was paused would not see its SIGTERM.
            child.process.send_signal(signal.SIGCONT)
            child.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        for child in running:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    finally:
        for child in running:
            if child.running:
                child.kill()


def child_environ(settings: Settings, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' environment with ``settings`` in it, as `Settings.load` reads them back, and ``extra`` on top."""
    # The whole answer is in the variables: a child that read the file again could find it changed.
    environ = {key: value for key, value in os.environ.items() if not is_setting(key)}
    environ.update(to_environ(settings))
    environ.update(extra or {})
    return environ
