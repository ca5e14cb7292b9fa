"""A terminal in a sandbox: ``shell``."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import deque

import click

from sandfleet.cli.checkpoints import acquired
from sandfleet.cli.completing import complete_jobs, complete_threads
from sandfleet.cli.context import Cli, fleet_command, on_lost_option, pass_cli
from sandfleet.cli.finding import job_of
from sandfleet.cli.output import note, printable
from sandfleet.cli.terminal import Bell, Screen, is_terminal, lent, size_of
from sandfleet.cli.use import command_of, exit_code_of
from sandfleet.errors import CapacityError, SandfleetError, Unavailable
from sandfleet.job_values import OutputChunk, OutputGap
from sandfleet.jobs import Job
from sandfleet.provider import SandboxProvider

__all__ = ["COMMANDS", "lend"]

#: Ctrl-], as telnet and virsh have it.
_DETACH = b"\x1d"
_AT_ONCE = 32 * 1024
_MOST_PENDING = 1024 * 1024
_SHELL = "if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l"
#: What was typed before the detach key is still sent.
_LAST_KEYS_S = 2.0
_HANGUP = (signal.SIGHUP, signal.SIGTERM)


@fleet_command(
    "shell", short_help="Open a terminal in a thread's sandbox.", context_settings={"allow_interspersed_args": False}
)
@click.option("--thread", "-t", metavar="T", help="Whose sandbox: it is made if there is none.",
              shell_complete=complete_threads)  # fmt: skip
@click.option("--user", "--user-id", "-u", "user", metavar="U", help="The thread's user.")
@on_lost_option
@click.option("--job", "job_id", metavar="JOB", help="Come back to this one, rather than begin.",
              shell_complete=complete_jobs)  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@pass_cli
def shell(
    cli: Cli, /, thread: str | None, user: str | None, on_lost: str | None, job_id: str | None, command: tuple[str, ...]
) -> int:
    """Open a terminal in a thread's sandbox: a login shell, or COMMAND. It follows the size of your window.

    Ctrl-] leaves it running and says how to come back, from any machine; so does closing the window, or a connection
    that breaks. `exit` ends it, and its exit code is this command's.

    \b
    Examples:
      sandfleet shell --thread alice
      sandfleet shell --thread alice -- python3
      sandfleet shell --job 5d0c9f0e8c6a4d1b
    """
    if not is_terminal() or cli.json:
        raise click.UsageError(
            "shell needs a terminal on both ends; for programs: `sandfleet exec --thread T -- COMMAND`, and "
            "`exec --background` for what goes on by itself"
        )
    if (thread is None) == (job_id is None):
        raise click.UsageError("say --thread T for a new terminal, or --job JOB to come back to one")
    if job_id is not None and command:
        raise click.UsageError("--job comes back to what runs already; a COMMAND begins something new")
    with cli.provider() as provider:
        if job_id is not None:
            return lend(job_of(cli, provider, job_id))
        assert thread is not None
        sandbox_id = acquired(cli, provider, thread, user, on_lost)
        try:
            return lend(_begin(provider, sandbox_id, command))
        finally:
            provider.release(sandbox_id)


def _begin(provider: SandboxProvider, sandbox_id: str, command: tuple[str, ...]) -> Job:
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None  # the id was just given
    line = command_of(command) if command else ["sh", "-c", _SHELL]
    env = {"TERM": os.environ.get("TERM") or "xterm"}
    return sandbox.run(line, background=True, pty=size_of(sys.stdout.fileno()), env=env)


def lend(job: Job) -> int:
    """Lend the terminal to the job until it ends or is left alone; the exit code."""
    session = _Session(job, sys.stdin.fileno(), sys.stdout.fileno())
    if session.run():
        return exit_code_of(job.wait(10.0))
    if session.trouble is None or isinstance(session.trouble, Unavailable):
        note(f"\nIt goes on. Come back: sandfleet shell --job {job.id}   End it: sandfleet kill {job.id}")
    if session.trouble is not None:
        raise session.trouble
    return 0


class _Session:
    """One terminal at one job: keys to it, its output from it, each from a thread of its own."""

    def __init__(self, job: Job, keys_fd: int, screen_fd: int) -> None:
        self._job = job
        self._keys_fd, self._screen_fd = keys_fd, screen_fd
        self._screen = Screen(screen_fd)
        self._bell = Bell()
        #: What goes to the job, oldest first: bytes typed, and None for "look at the window's size".
        self._pending: deque[bytes | None] = deque()
        self._sending = threading.Condition()
        self._over = threading.Event()
        self._ended = False
        #: Why the session ended although the job may not have.
        self.trouble: SandfleetError | None = None

    def run(self) -> bool:
        """Return when the job ended (True), or when it was left alone."""
        sender = threading.Thread(target=self._send, name="sandfleet-keys", daemon=True)
        shower = threading.Thread(target=self._show, name="sandfleet-screen", daemon=True)
        before = {number: signal.signal(number, lambda *_: self._stop()) for number in _HANGUP}
        try:
            with lent(self._keys_fd, self._bell):
                self._queue(None)
                sender.start()
                shower.start()
                self._take_keys()
                if not self._ended:
                    self._screen.calm()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._stop()
        sender.join(_LAST_KEYS_S)
        return self._ended

    def _stop(self) -> None:
        self._over.set()
        self._bell.ring()

    # --- keys ------------------------------------------------------------------------------------

    def _take_keys(self) -> None:
        while not self._over.is_set():
            # What the sandbox does not take in time waits in the terminal; but the detach key must be seen.
            waiting = sum(len(data) for data in list(self._pending) if data is not None)
            wanted = [self._bell.fd] if waiting > _MOST_PENDING else [self._bell.fd, self._keys_fd]
            ready = select.select(wanted, [], [], 0.5)[0]
            if self._bell.fd in ready:
                self._bell.heard()
                self._queue(None)
            if self._keys_fd in ready and not self._over.is_set():
                self._take(self._read())

    def _read(self) -> bytes:
        try:
            return os.read(self._keys_fd, _AT_ONCE)
        except OSError:
            return b""  # the terminal was closed

    def _take(self, typed: bytes) -> None:
        before, detach, _ = typed.partition(_DETACH)
        if before:
            self._queue(before)
        if detach or not typed:
            self._stop()

    def _queue(self, item: bytes | None) -> None:
        with self._sending:
            self._pending.append(item)
            self._sending.notify()

    def _send(self) -> None:
        """Send what was typed, in order, as much at once as there is."""
        while True:
            with self._sending:
                while not self._pending:
                    if self._over.is_set():
                        return
                    self._sending.wait(0.5)
                item = self._pending.popleft()
                while item is not None and self._pending and self._pending[0] is not None and len(item) < _AT_ONCE:
                    item += self._pending.popleft() or b""
            try:
                if item is None:
                    self._job.resize(*size_of(self._screen_fd))
                else:
                    self._job.send_stdin(item)
            except CapacityError as full:
                if self._over.wait(full.retry_after_s or 0.2):
                    return
                # The program does not read: what was typed waits for it.
                with self._sending:
                    self._pending.appendleft(item)
            except SandfleetError as exc:
                if not self._over.is_set() and item is not None:
                    self._remark(f"what was typed may not have arrived: {exc.message}")

    # --- the screen ------------------------------------------------------------------------------

    def _show(self) -> None:
        try:
            for record in self._job.output():
                if self._over.is_set():
                    return
                if isinstance(record, OutputChunk):
                    self._screen.write(record.data)
                elif isinstance(record, OutputGap):
                    self._remark("output is missing here; it came faster than it could be kept")
            self._ended = True
        except SandfleetError as exc:
            self.trouble = exc
        except OSError:
            pass  # the terminal was closed
        finally:
            self._stop()

    def _remark(self, text: str) -> None:
        self._screen.write(f"\r\n[sandfleet: {printable(text)}]\r\n".encode())


COMMANDS = (shell,)
