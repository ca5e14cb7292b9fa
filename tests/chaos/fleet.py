"""A fleet of real processes, and what the chaos tests do to it.

One fleet serves the whole session. A test that destroys a node starts its own, under a label that only its
own threads ask for, so that the others never notice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from sandfleet import Sandbox, SandboxProvider
from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity
from sandfleet.store import open_store
from tests.services import SESSION_VARIABLE, wait_until

LEASE_S = 3.0
"""The lease of every node that a test kills, so that its death is noticed while the test waits."""

START_S = 40.0
ANSWER_S = 40.0

T = TypeVar("T")

# The kernel ends the process when the test process ends (PR_SET_PDEATHSIG is 1; it survives exec).
_DIE_WITH_US = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the test process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Process:
    """A child of ours with its output in a file."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-ISE", "-c", _DIE_WITH_US, str(os.getpid()), sys.executable, *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def output(self) -> str:
        """Everything it wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def tail(self, lines: int = 25) -> str:
        status = "running" if self.running else f"ended {self.popen.returncode}"
        return f"--- {self.name} (pid {self.pid}, {status})\n" + "\n".join(self.output.splitlines()[-lines:])

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        if self.running:
            self.popen.kill()
        self.popen.wait(10)

    def wait(self, deadline_s: float) -> int:
        """Its exit status, once it ended."""
        wait_until(lambda: not self.running, deadline_s, story=self.tail)
        return int(self.popen.returncode)

    def end(self) -> None:
        """End it politely, then firmly."""
        if self.running:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(8)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(5)


class Fleet:
    """One scheduler and any number of nodes on one Redis and one data root."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory = directory
        self.redis_url = redis_url
        self.data_root = directory / "data"
        self.scheduler: Process | None = None
        self._processes: list[Process] = []
        self._numbers = itertools.count(1)
        directory.mkdir(parents=True, exist_ok=True)
        self.store = open_store(redis_url, "sandfleet:")

    # --- processes ---------------------------------------------------------------------------

    def env(self, **more: str) -> dict[str, str]:
        """The environment every process of the fleet gets."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SANDFLEET_")}
        kept.pop("REDIS_URL", None)
        if session := os.environ.get(SESSION_VARIABLE):
            kept[SESSION_VARIABLE] = session
        return {
            **kept,
            "SANDFLEET_CONFIG": os.devnull,
            "SANDFLEET_REDIS_URL": self.redis_url,
            "SANDFLEET_DATA_ROOT": str(self.data_root),
            "SANDFLEET_RUN_ROOT": str(self.directory / "run"),
            "SANDFLEET_LEASE_S": str(LEASE_S),
            "SANDFLEET_DETACH_S": "0",
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def start(self, name: str, argv: list[str], **env: str) -> Process:
        """Start ``python argv`` as part of the fleet."""
        log = self.directory / f"{next(self._numbers):02}-{name}.log"
        process = Process(name, argv, self.env(**env), log)
        self._processes.append(process)
        return process

    def start_scheduler(self) -> Process:
        """Start a scheduler; returns at once, requests wait in its queue."""
        self.scheduler = self.start("scheduler", ["-m", "sandfleet_scheduler"])
        return self.scheduler

    def nodes(self, *names: str, label: str = "", env: Mapping[str, str] | None = None) -> list[Process]:
        """Start nodes, all at once, and return when the fleet knows them."""
        known = {node.incarnation for node in self.store.nodes()}
        more = {**({"SANDFLEET_LABELS": f"for={label}"} if label else {}), **(env or {})}
        started = [self.start(name, ["-m", "sandfleet_workers", "--node-id", name], **more) for name in names]

        def alive() -> bool:
            gone = [process.tail() for process in started if not process.running]
            if gone:
                raise RuntimeError("\n".join(gone))
            ready = {n.node_id for n in self.store.nodes() if n.alive and n.incarnation not in known}
            return ready >= set(names)

        wait_until(alive, START_S, story=self.story)
        return started

    def node(self, name: str, *, label: str = "", env: Mapping[str, str] | None = None) -> Process:
        return self.nodes(name, label=label, env=env)[0]

    def process(self, name: str) -> Process | None:
        """The running process of that name."""
        return next((process for process in self._processes if process.name == name and process.running), None)

    def end(self, *processes: Process) -> None:
        """End some processes, or all of them."""
        ending = list(processes or self._processes)
        for process in ending:
            if process.running:
                with contextlib.suppress(ProcessLookupError):
                    process.send(signal.SIGCONT)
                    process.send(signal.SIGTERM)
        for process in ending:
            process.end()

    def close(self) -> None:
        self.end()
        self.store.close()

    # --- clients -----------------------------------------------------------------------------

    def settings(self, *, label: str = "n1", **more: Any) -> Settings:
        """What a client of this fleet is told; ``label`` makes its threads land on that test's nodes."""
        given: dict[str, Any] = {
            "redis_url": self.redis_url,
            "data_root": self.data_root,
            "run_root": self.directory / "run",
            "labels": {"for": label} if label else {},
            "lease_s": LEASE_S,
            **more,
        }
        return Settings.load({}, **given)

    @contextlib.contextmanager
    def provider(self, *, label: str = "n1", **more: Any) -> Iterator[SandboxProvider]:
        with SandboxProvider(self.settings(label=label, **more)) as provider:
            yield provider

    def workspace(self, thread: str, user: str | None = None) -> Path:
        """The host's view of a thread's workspace."""
        base = self.data_root / "users" / user if user else self.data_root
        return base / "threads" / thread / "user-data" / "workspace"

    def numbers(self, thread: str, name: str = "log") -> list[int]:
        """What the commands of a thread wrote, one number a line."""
        path = self.workspace(thread) / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def client_script(self, name: str, script: str, *args: str, **env: str) -> Process:
        """A client of its own process: the script's text is run with ``args``."""
        return self.start(name, ["-c", script, *args], **env)

    # --- telling what happened ---------------------------------------------------------------

    def story(self, *keys: str) -> str:
        """The state and the last words of everybody."""
        lines = []
        try:
            for node in self.store.nodes():
                lines.append(
                    f"node {node.node_id} {node.state} alive={node.alive} places={node.places} inflight={node.inflight}"
                )
            for info in self.store.sandboxes():
                lines.append(
                    f"sandbox {info.sandbox_id} {info.thread_id} {info.state} {info.node_id} "
                    f"agents={info.agents} ops={info.ops}"
                )
            for op in self.store.ops(limit=20):
                lines.append(f"op {op.op_id} {op.kind} {op.state} {op.outcome} {op.describe}")
            for key in keys:
                lines += [json.dumps(entry) for entry in self.store.story(key)[-12:]]
        except SandfleetError as exc:
            lines.append(f"(no state: {exc})")
        lines += [process.tail() for process in self._processes[-4:]]
        return "\n".join(lines)


class Answers(Generic[T]):
    """Calls that wait for their answers in threads of their own, each a value or the error it raised."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._threads: dict[Any, threading.Thread] = {}
        self.got: dict[Any, T | BaseException] = {}

    def ask(self, key: Any, call: Callable[[], T]) -> None:
        """Make one call, in a thread."""

        def work() -> None:
            try:
                self.got[key] = call()
            except BaseException as exc:  # noqa: BLE001  (whatever it is, the test judges it)
                self.got[key] = exc

        thread = self._threads[key] = threading.Thread(target=work, name=f"caller-{key}", daemon=True)
        thread.start()

    def all(self, deadline_s: float = ANSWER_S, *keys: Any) -> dict[Any, T | BaseException]:
        """Every answer (or those of ``keys``), once they are there: nobody may wait for ever."""
        wanted = set(keys or self._threads)

        def everybody_is_answered() -> bool:
            missing = wanted - set(self.got)
            assert not missing, f"{len(missing)} of {len(wanted)} wait: {sorted(missing, key=str)[:10]}"
            return True

        wait_until(everybody_is_answered, deadline_s, story=self._fleet.story)
        return {key: self.got[key] for key in wanted}


class Gate:
    """A command that runs until the test opens it: the deterministic way to keep a lane busy."""

    def __init__(self, fleet: Fleet, thread: str, name: str = "gate") -> None:
        self._folder = fleet.workspace(thread)
        self._name = name
        self.command = f"touch {name}.closed; until test -e {name}.open; do sleep 0.02; done"

    def is_reached(self) -> bool:
        return (self._folder / f"{self._name}.closed").exists()

    def is_open(self) -> bool:
        return (self._folder / f"{self._name}.open").exists()

    def open(self) -> None:
        (self._folder / f"{self._name}.open").touch()


def unique(name: str) -> str:
    """A name no other test of this run uses."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def note(number: int, name: str = "log") -> str:
    """A command that tells that it ran."""
    return f"echo {number} >> {name}"


def wait_in_lane(
    fleet: Fleet, answers: Answers[Any], sandbox: Sandbox, numbers: Iterable[int], **options: Any
) -> dict[int, str]:
    """Send commands one after the other without waiting for answers; their op ids, once all are recorded."""
    op_ids = {}
    for number in numbers:
        op_id = op_ids[number] = f"{sandbox.id}-{number}-{uuid.uuid4().hex[:8]}"
        answers.ask(number, lambda n=number, o=op_id: sandbox.run(note(n), op_id=o, **options))
        wait_until(lambda o=op_id: fleet.store.op(o) is not None, ANSWER_S, story=fleet.story)
    return op_ids


def lane_is_held(fleet: Fleet, answers: Answers[Any], sandbox: Sandbox, gate: Gate) -> None:
    """Start the gate's command and return when it runs."""
    answers.ask("gate", lambda: sandbox.run(gate.command))
    wait_until(gate.is_reached, ANSWER_S, story=fleet.story)


def node_took_all(fleet: Fleet, node_id: str) -> None:
    """Return when nothing is left in the node's queue: what was sent waits in the node."""
    wait_until(lambda: fleet.store.queue_length(f"sandfleet.node.{node_id}") == 0, ANSWER_S, story=fleet.story)


def errors(answers: Mapping[Any, Any]) -> dict[Any, BaseException]:
    """The answers that are errors."""
    return {key: answer for key, answer in answers.items() if isinstance(answer, BaseException)}


def node_of(fleet: Fleet, thread: str) -> str:
    """The node that holds a thread's sandbox."""
    (info,) = fleet.store.sandboxes(thread_id=Identity(thread).thread_id)
    return info.node_id
