"""Starting, watching and ending the process tree of one local sandbox."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from sandfleet.errors import StartFailed
from sandfleet_workers.backends.local_launch import Launch

__all__ = ["SandboxProcess", "Spawner", "start"]

_FORBIDDEN = ("namespace", "uid map", "gid map", "mount proc", "setgroups", "Operation not permitted", "unshare")
_STDERR_TAIL = 2000


class Spawner:
    """One thread, for good, that starts every sandbox.

    ``--die-with-parent`` is the kernel's parent-death signal, which follows the *thread* that
    forked: a sandbox started from a pool's thread would die when the pool shrinks.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]] | None
        ]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sandfleet-spawner", daemon=True).start()

    def spawn(self, job: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run ``job`` on the spawner's thread and return what it returns or raise what it raises."""
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((job, future))
        return future.result()

    def close(self) -> None:
        """End the thread, and with it every sandbox that still runs."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as exc:  # noqa: BLE001  (it belongs to whoever waits for the future)
                future.set_exception(exc)
            del item, job, future


class SandboxProcess:
    """A started sandbox: bwrap's monitor on the host, and sandboxd as process 1 of its own namespace.

    Args:
        monitor: bwrap.
        pid: sandboxd's pid as the host numbers it.
        pidfd: Of sandboxd; this object closes it.
    """

    def __init__(self, monitor: subprocess.Popen[bytes], pid: int, pidfd: int) -> None:
        self.monitor = monitor
        self.pid = pid
        self.pidfd = pidfd
        self._lock = threading.Lock()

    def is_dead(self, wait_s: float = 0.0) -> bool:
        """Whether process 1 has ended, and with it everything in its namespace."""
        with self._lock:
            if self.pidfd < 0:
                return True
            # A descriptor of its own: `close` may come while we wait, and the number may be given away.
            pidfd = os.dup(self.pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(int(wait_s * 1000)))
        finally:
            os.close(pidfd)

    def end(self, timeout_s: float = 10.0) -> bool:
        """Kill the whole namespace and wait until it is gone. False if the kernel did not get rid of it in time."""
        with self._lock:
            try:
                if self.pidfd >= 0:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except OSError:  # gone already
                pass
        gone = self.is_dead(timeout_s)
        try:
            # bwrap follows at once; the warden of host mode may first have a large tree to end, for 8 s at most.
            self.monitor.wait(10.0 if gone else 0.1)
        except subprocess.TimeoutExpired:
            self.monitor.kill()
            try:
                self.monitor.wait(2.0)
            except subprocess.TimeoutExpired:
                gone = False
        if gone:
            self.close()
        return gone

    def close(self) -> None:
        """Release the descriptor of an ended sandbox."""
        with self._lock:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1

    def how_it_ended(self) -> str:
        """Words for the exit status, once it has ended."""
        code = self.monitor.poll()
        if code is None:
            return "ended"
        number = code - 128 if code > 128 else -code
        if number > 0:
            try:
                return f"killed by {signal.Signals(number).name}"
            except ValueError:
                return f"killed by signal {number}"
        return f"exited with {code}"


def start(spawner: Spawner, launch: Launch, *, config: bytes, timeout_s: float) -> SandboxProcess:
    """Start a sandbox and wait until its sandboxd says that it is ready.

    Args:
        spawner: Starts it.
        launch: The complete command; its pipe is closed here.
        config: What sandboxd reads from stdin; secrets go this way, never through argv or environment.
        timeout_s: How long all of it may take, in seconds.

    Raises:
        StartFailed: With ``reason`` bwrap_missing, namespaces_forbidden, sandboxd_failed, timeout or disk.
    """
    deadline = time.monotonic() + timeout_s
    read_info, write_info = launch.info
    try:
        monitor = _spawn(spawner, launch, write_info)
        try:
            return _greet(monitor, config, read_info, deadline)
        except BaseException:
            monitor.kill()
            monitor.wait(10)
            raise
        finally:
            for stream in (monitor.stdin, monitor.stdout, monitor.stderr):
                if stream is not None:
                    stream.close()
    finally:
        os.close(read_info)


def _spawn(spawner: Spawner, launch: Launch, write_info: int) -> subprocess.Popen[bytes]:
    try:
        return spawner.spawn(lambda: _popen(launch.argv, launch.uid, (*launch.fds, write_info)))
    except (OSError, subprocess.SubprocessError) as exc:
        raise _not_spawned(exc) from exc
    finally:
        os.close(write_info)


def _popen(argv: Sequence[str], uid: int | None, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        cwd="/",
        pass_fds=fds,
        start_new_session=True,
        umask=0o022,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else (),
    )


def _not_spawned(exc: Exception) -> StartFailed:
    if isinstance(exc, FileNotFoundError):
        return StartFailed(f"bwrap cannot be started: {exc}", reason="bwrap_missing")
    return StartFailed(
        f"the sandbox's process cannot be started ({exc}); a root worker needs CAP_SETUID and its uid range "
        "mapped where it runs",
        reason="spawn_failed",
    )


def _greet(monitor: subprocess.Popen[bytes], config: bytes, read_info: int, deadline: float) -> SandboxProcess:
    assert monitor.stdin is not None
    assert monitor.stdout is not None
    try:
        monitor.stdin.write(config)
        monitor.stdin.close()
    except BrokenPipeError:
        raise _failed(monitor) from None
    info = _read_until(read_info, b"}", deadline, monitor)
    try:
        pid = int(json.loads(info)["child-pid"])
        pidfd = os.pidfd_open(pid)
    except (ValueError, KeyError, OSError):
        raise _failed(monitor) from None
    try:
        line = _read_until(monitor.stdout.fileno(), b"\n", deadline, monitor)
        if line.strip() != b"ready":
            raise _failed(monitor)
        return SandboxProcess(monitor, pid, pidfd)
    except BaseException:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(pidfd)
        raise


def _read_until(fd: int, end: bytes, deadline: float, monitor: subprocess.Popen[bytes]) -> bytes:
    data = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while end not in data:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(int(left_s * 1000) + 1):
            raise StartFailed("the sandbox did not become ready in time", reason="timeout", stderr=_stderr(monitor))
        piece = os.read(fd, 4096)
        if not piece or len(data) > 65536:
            raise _failed(monitor)
        data += piece
    return data


def _failed(monitor: subprocess.Popen[bytes]) -> StartFailed:
    try:
        monitor.wait(1.0)
    except subprocess.TimeoutExpired:
        pass
    text = _stderr(monitor)
    if "No space left" in text or "Disk quota" in text:
        reason, hint = "disk", "free space on the node's data root"
    elif "bwrap" in text and any(word in text for word in _FORBIDDEN):
        reason, hint = "namespaces_forbidden", "allow user namespaces on this host or choose another backend"
    elif "bwrap" in text and "execvp" not in text:
        reason, hint = "bwrap_failed", "look at what bwrap says"
    else:
        reason, hint = "sandboxd_failed", "look at what it says"
    return StartFailed(f"the sandbox did not start ({hint}): {text or 'no message'}", reason=reason, stderr=text)


def _stderr(monitor: subprocess.Popen[bytes]) -> str:
    """What it wrote so far, the end of it, without waiting for more."""
    if monitor.stderr is None or monitor.stderr.closed:
        return ""
    fd = monitor.stderr.fileno()
    os.set_blocking(fd, False)
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data = (data + piece)[-_STDERR_TAIL:]
    except OSError:
        pass
    return data.decode("utf-8", "replace").strip()
