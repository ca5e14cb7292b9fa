"""What a sandbox technology must offer a node. Third parties implement these and register the
entry point ``sandfleet.backends``; ``sandfleet.testing.backend_contract`` judges them.

A *backend* starts, finds, probes and stops sandboxes. A *connection* is how the node reaches one of
them to carry out operations. Backends whose sandboxes run sandboxd share one connection
class (`sandfleet_workers.endpoint.EndpointConnection`); driver backends (mock, cloud kinds) write
their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from sandfleet.errors import OutcomeUnknown, SandfleetError
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec

__all__ = [
    "Capability",
    "Completion",
    "Connection",
    "Done",
    "Finding",
    "Liveness",
    "Operation",
    "Remembered",
    "SandboxBackend",
    "SandboxPlan",
    "shown_backend",
]

#: What separates the sandboxes of the built-in backends, in a word; said wherever they are named.
_ISOLATION = {
    "aio": "container", "docker": "container", "host": "not isolated", "local": "namespaces", "mock": "nothing runs"
}  # fmt: skip


def shown_backend(name: str) -> str:
    """A backend's name for people, with what separates its sandboxes: ``docker (container)``."""
    return f"{name} ({_ISOLATION[name]})" if name in _ISOLATION else name


class Capability(StrEnum):
    """What a backend can do; the contract suite skips nothing else."""

    COMMANDS = "commands"
    SESSIONS = "sessions"
    FILES = "files"
    BINARY = "binary"
    CANCEL = "cancel"
    PROCESS_ISOLATION = "process_isolation"
    BLANKS = "blanks"
    SURVIVES_NODE = "survives_node"
    #: Commands that outlive their call, whose output can be followed; `PTY`: also on a terminal.
    JOBS = "jobs"
    PTY = "pty"


class Liveness(StrEnum):
    """The three answers to "is it there": an unknown one is never reaped and never trusted."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at on a machine, as `sandfleet doctor` tells it.

    Attributes:
        name: What was looked at.
        status: ok, warn or fail.
        found: What is there.
        advice: What to do, unless it is ok.
        ready: False when no sandbox can be started at once because of it.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    ready: bool = True


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Everything a backend needs to start a sandbox.

    Attributes:
        sandbox_id: Its id, 8–64 hex digits; of a blank one the name of its slot.
        identity: The thread (and user) it belongs to; None for a blank sandbox, which belongs to nobody yet and which
            only backends with `Capability.BLANKS` are asked for.
        epoch: Of this ownership; 0 for a blank one.
        user_data: The thread's host directory, seen inside as ``/mnt/user-data``; exists with its
            children workspace, uploads and outputs.
        run_dir: A short host directory for sockets and the like, made by the backend, removed by `destroy`.
        spec: What kind.
        mounts: Further (host path, sandbox path, read_only).
    """

    sandbox_id: str
    identity: Identity | None
    epoch: int
    user_data: Path
    run_dir: Path
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    mounts: tuple[tuple[Path, str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as a connection gets it: validated, claimed, in its lane.

    ``args`` is the validated argument dict of `sandfleet.ops`; ``content`` the bytes beside it
    (stdin of a command, data of a write). ``note`` (at most 4 KiB) is kept with a command, for whoever asks
    `Connection.remembered` after the node that started it is gone.
    """

    op_id: str
    kind: str
    args: Mapping[str, Any]
    content: bytes | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Remembered:
    """An effect that a sandbox remembers: what `Connection.remembered` gives.

    ``note`` is that of its `Operation`, hostile input like all that comes out of a sandbox.
    """

    op_id: str
    running: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """How an operation ended: a JSON value with optional bytes, or an error (never both).

    Values by kind: execute_command and sessions ``{stdout, stderr, exit_code, signal, duration_s,
    timed_out, truncated, cancelled}``, where it can be told also ``out_of_memory`` ·
    read_file ``{size, total_lines, truncated}`` + content, with ``as_text`` the fields of
    `sandfleet.model.TextRead` but its text + content ·
    write_file ``{size, digest}`` (no digest of an appended file above 4 MiB) · metrics the fields of
    `sandfleet.model.SandboxMetrics` · str_replace ``{count, digest}`` · list_dir ``{entries: [FileInfo
    dicts], truncated}`` · glob ``{paths, truncated}`` · grep ``{matches: [[path, line_number,
    line]], truncated, skipped}`` · stat FileInfo dict · health ``{status, detail}`` · the rest ``{}``.
    """

    value: Any = None
    content: bytes | None = None
    error: SandfleetError | None = None


Done = Callable[[Completion], None]


class Connection(ABC):
    """The node's way into one running sandbox. Thread-safe."""

    #: What this sandbox cannot do although its backend can; asked for it, it completes with `NotSupported`.
    lacks: ClassVar[frozenset[Capability]] = frozenset()

    @abstractmethod
    def start(self, op: Operation, done: Done) -> None:
        """Begin the operation and return at once; ``done`` is called exactly once, from any thread.

        Never raises for anything the sandbox or the operation did; such errors go to ``done``.
        A connection that broke after the request went out completes with `OutcomeUnknown`; one
        that could not be made completes with `SandboxLost` (definitely dead) or `NotStarted`.
        """

    @abstractmethod
    def cancel(self, op_id: str) -> bool:
        """Ask for the end of a running operation; its ``done`` still comes, with what it was.

        True if the operation was found running. Blocks at most a few seconds.
        """

    def remembered(self) -> list[Remembered]:
        """The effects that the sandbox remembers, started through this connection or an earlier one. Blocks.

        Raises:
            SandfleetError: It does not answer.
        """
        return []

    def recall(self, op: Operation, done: Done) -> None:
        """How an operation ended that an earlier connection may have begun; ``done`` once, when it has ended.

        Its error is `NotStarted` if it has not begun, and then it never will, however late its request arrives;
        `OutcomeUnknown` if that cannot be told. ``op`` names id and kind, and of ``args`` what shapes the answer.
        """
        done(Completion(error=OutcomeUnknown(f"nobody knows how {op.kind} ended", op_id=op.op_id)))

    def perform(self, op: Operation, timeout_s: float = 60.0) -> Completion:
        """`start` and wait; for callers that have a thread to spend.

        Raises:
            TimeoutError: No completion within ``timeout_s``.
        """
        import threading  # noqa: PLC0415  (a convenience for tests and tools; the node never calls it)

        ready, box = threading.Event(), list[Completion]()

        def keep(completion: Completion) -> None:
            box.append(completion)
            ready.set()

        self.start(op, keep)
        if not ready.wait(timeout_s):
            raise TimeoutError(f"{op.kind} {op.op_id} gave no completion within {timeout_s} s")
        return box[0]

    @abstractmethod
    def close(self) -> None:
        """Drop sockets; the sandbox itself lives on. Running operations complete with `OutcomeUnknown`."""


class SandboxBackend(ABC):
    """A sandbox technology on one node. Methods block and are called from the node's lifecycle threads, never
    from Celery's main loop. Thread-safe for different sandboxes; the node serialises calls on one sandbox.

    Args:
        settings: The node's `sandfleet.config.Settings`, with ``node_id`` set to the id it holds.
        on_death: Called (from any thread) with (sandbox_id, reason) when a sandbox ends by itself.
    """

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    #: Shown wherever the backend is shown: container, namespace, none…
    isolation: ClassVar[str] = "none"

    def __init__(self, settings: Any, on_death: Callable[[str, str], None]) -> None:
        self.settings = settings
        self.on_death = on_death

    @classmethod
    def check(cls) -> list[str]:
        """Why this backend cannot run here, one line each with what to do; empty when it can."""
        return []

    @classmethod
    def examine(cls, settings: Any) -> list[Finding]:
        """What it needs on this machine with these `sandfleet.config.Settings`, looked at; changes nothing there.

        May take seconds, and never raises for what it finds: that is a finding.
        """
        return []

    @abstractmethod
    def create(self, plan: SandboxPlan) -> Connection:
        """Start the sandbox and wait until it answers.

        Idempotent: a sandbox of the same id that this node already runs is stopped first. On failure nothing
        is left behind.

        Raises:
            StartFailed: With ``reason`` (a stable word) and what to do.
        """

    def digest(self, spec: SandboxSpec) -> str:
        """What sandboxes share that are alike on this node: its own settings are filled in where ``spec`` says nothing.

        Called before anything is started.

        Raises:
            InvalidArgument: The spec asks for what the backend does not have or the node's operator does not allow.
        """
        return spec.digest

    def claim(self, blank_id: str, sandbox_id: str) -> Connection:
        """A blank sandbox becomes a thread's: known as ``sandbox_id`` from now on, to `destroy`, `probe`, `running` and
        ``on_death`` alike. Its directories have been given the thread's data before. Needs `Capability.BLANKS`.

        Raises:
            StartFailed: ``reason`` blank_gone: there is no such blank sandbox, or it is dead. Nothing has changed.
        """
        raise NotImplementedError(f"backend {self.name} has no blank sandboxes")

    def ticket(self, sandbox_id: str) -> dict[str, Any]:
        """What `attach` needs to find a running sandbox (or blank one) again, as JSON, at most 16 KiB. It may hold
        secrets: the node keeps it where only its own user can read it. Needs `Capability.SURVIVES_NODE`.

        Raises:
            KeyError: No such sandbox runs.
        """
        raise NotImplementedError(f"sandboxes of backend {self.name} end with their node")

    def attach(self, sandbox_id: str, ticket: Mapping[str, Any]) -> Connection:
        """Hold a sandbox again that an earlier run of this node started, once it has proved to be that one: known as
        ``sandbox_id`` from now on, as after `create`. Needs `Capability.SURVIVES_NODE`.

        Raises:
            StartFailed: ``reason`` gone: it does not run any more; unreachable: it does not answer or prove itself.
                Nothing is held; what is left of it is a leftover.
        """
        raise NotImplementedError(f"sandboxes of backend {self.name} end with their node")

    def leftovers(self) -> dict[str, list[str]]:
        """Sandboxes on this machine that nodes of this data root made and this instance does not hold, as names for
        `remove_leftover`, by the id of the node that made them. Never one that somebody else made.

        Raises:
            SandfleetError: They cannot be listed now.
        """
        return {}

    def remove_leftover(self, name: str) -> None:
        """End one of `leftovers` for good; one that is gone or held by this instance by now is left alone.

        Raises:
            SandfleetError: It cannot be removed now.
        """

    @abstractmethod
    def destroy(self, sandbox_id: str) -> None:
        """End the sandbox and everything in it; thread data stays. Unknown ids are fine. Returns when it is gone."""

    @abstractmethod
    def probe(self, sandbox_id: str) -> Liveness:
        """Whether the sandbox answers now."""

    def outdated(self) -> list[str]:
        """Ids of running sandboxes (and blank ones) whose image has another one in its place by now: what is started
        from here on is newer. Asks for it, and may take seconds.

        Raises:
            SandfleetError: It cannot be told now.
        """
        return []

    @abstractmethod
    def running(self) -> list[str]:
        """Ids of the sandboxes this backend instance holds; one whose death is told (`on_death`) is not among them."""

    def detach(self) -> None:
        """Let go of every sandbox and leave it running, for `attach` by the next run of this node; `close` follows, and
        ends nothing then. What is being started is undone. Needs `Capability.SURVIVES_NODE`."""
        raise NotImplementedError(f"sandboxes of backend {self.name} end with their node")

    def close(self) -> None:
        """Release what the backend itself holds. Sandboxes that it still holds end."""
