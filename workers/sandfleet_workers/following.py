"""Live output: what a command writes goes from its sandbox to its output stream while it runs.

A `Follower` asks the sandbox for what comes after a byte offset, and appends it to the stream. It asks on only when
Redis has taken what it had, so that an outage costs nothing that the sandbox still keeps; what it does not keep any
more is a gap in the offsets, which readers see.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from sandfleet.backends import Completion, Connection, Operation
from sandfleet.errors import InternalError, SandboxLost, SandfleetError
from sandfleet.store.base import Output, Store

__all__ = ["Follower", "Timeline"]

log = logging.getLogger("sandfleet.node")

#: Between two questions to one command: its output goes in batches of what comes within that time.
_BATCH_S = 0.03
#: With the pause above, how fast one command may fill Redis: 8 MiB/s.
_BATCH_BYTES = 256 * 1024
_WAIT_S = 10.0
#: A sandbox that gives no answer so often in a row is asked no more; while the command runs, one that is only busy or
#: out of reach is asked for longer.
_TRIES = 10
_PATIENCE_S = 60.0
#: No command writes so much. Redis counts bytes as floating point numbers, and ids end soon after.
_MOST_BYTES = 2**50
#: What an ended command has left is fetched without pauses, up to what a sandbox keeps and some.
_HASTY_PULLS = 64


class Timeline:
    """One thread on which short work is done when its time has come; it may wait for Redis. Made on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def soon(self, work: Callable[[], None]) -> None:
        """Do it as soon as what is due before is done. From any thread."""
        self.later(0.0, work)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do it after ``delay_s`` seconds. From any thread; after `close` it is not done."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Do nothing more; returns when what is being done is done, or after five seconds."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                work = heapq.heappop(self._due)[2]
            try:
                work()
            except Exception:  # one command's trouble must not end the output of all
                log.exception("output.work_failed")


class Follower:
    """Moves one command's output to its stream.

    Args:
        line: Where its work is done.
        store: Where the stream is.
        connection: Into the sandbox.
        op_id: The command.
        stream: The stream's name.
        keep_bytes: How much the stream keeps.
        ttl_s: How long it lives after the last output.
        is_gone: Whether the sandbox is not to be asked any more.
        over: Called once on the line: all output is in the stream (None), or the sandbox does not tell any more.
    """

    def __init__(
        self,
        line: Timeline,
        store: Store,
        connection: Connection,
        op_id: str,
        stream: str,
        *,
        keep_bytes: int,
        ttl_s: float,
        is_gone: Callable[[], bool],
        over: Callable[[SandfleetError | None], None],
    ) -> None:
        self._line = line
        self._store = store
        self._connection = connection
        self._op_id = op_id
        self._stream = stream
        self._keep_bytes = keep_bytes
        self._ttl_s = ttl_s
        self._is_gone = is_gone
        self._over = over
        self._most = min(_BATCH_BYTES, keep_bytes)
        self._at = (0, 0)
        #: Counts the pauses between questions; `hurry` ends one by counting on.
        self._pause = 0
        self._pausing = False
        #: The command has ended; what it wrote may not be here yet.
        self._over_there = False
        self._pulled_at = 0.0
        self._failures = 0
        self._failing_since = 0.0
        self._error: SandfleetError | None = None
        self._hasty_pulls = _HASTY_PULLS
        self._pushes_failed = 0
        self._ended = False

    def begin(self, *, resume: bool) -> None:
        """Start to follow; ``resume`` where an earlier node left off."""
        self._line.soon(self._find_place if resume else self._pull)

    def stop(self) -> None:
        """Follow no more, and tell nobody."""
        self._ended = True

    def _find_place(self) -> None:
        self._push(Output(0, 0))

    def _pull(self) -> None:
        if self._ended:
            return
        self._pulled_at = time.monotonic()
        out_at, err_at = self._at
        asked = {
            "op_id": self._op_id,
            "offset": out_at,
            "stderr_offset": err_at,
            "wait_s": _WAIT_S,
            "max_bytes": self._most,
            "settle_s": 0.0,
        }
        op = Operation(f"{self._op_id}.out", "job_output", asked)
        self._connection.start(op, lambda completion: self._line.soon(lambda: self._pulled(completion)))

    def _pulled(self, completion: Completion) -> None:
        if self._ended:
            return
        if completion.error is not None:
            self._refused(completion.error)
            return
        self._failures = 0
        value, content = completion.value, completion.content or b""
        out_bytes, err_bytes = int(value["stdout_bytes"]), int(value["stderr_bytes"])
        out_at, err_at = self._at
        output = Output(
            max(out_at, int(value["offset"]) - out_bytes),
            max(err_at, int(value["stderr_offset"]) - err_bytes),
            content[:out_bytes],
            content[out_bytes : out_bytes + err_bytes],
        )
        self._over_there = not value["running"]
        # A short answer is not the last one: it ends where the sandbox begins to leave something out.
        running = not self._over_there or out_bytes + err_bytes > 0
        if output.out or output.err:
            # What the sandbox does not keep any more is a gap.
            self._push(output, more=running, anew=(output.out_at, output.err_at) != self._at)
        elif self._at == (0, 0):
            self._again() if running else self._end(None)
        else:
            # Nothing new; but Redis may have lost what it had, and nobody else would bring it back.
            self._push(Output(*self._at), more=running)

    def _refused(self, error: SandfleetError) -> None:
        if self._failures == 0:
            self._failing_since = time.monotonic()
        self._failures += 1
        if isinstance(error, SandboxLost) or self._is_gone():
            self._end(error)
            return
        patient = error.retryable and not self._over_there and time.monotonic() - self._failing_since < _PATIENCE_S
        if self._failures < _TRIES or patient:
            # Asked on another connection than the command went out on, it may not have begun yet.
            self._line.later(min(0.004 * 2 ** min(self._failures, 10), 1.0), self._pull)
            return
        # What was not read is missing: readers are told how much, if the sandbox says it.
        self._error = error
        op = Operation(f"{self._op_id}.out", "poll_job", {"job_id": self._op_id})
        self._connection.start(op, lambda completion: self._line.soon(lambda: self._tell_gap(completion)))

    def _tell_gap(self, completion: Completion) -> None:
        if completion.error is not None:
            self._end(self._error)
            return
        ends = (int(completion.value["stdout_bytes"]), int(completion.value["stderr_bytes"]))
        out_at, err_at = map(max, self._at, ends)
        self._push(Output(out_at, err_at), more=False, anew=True)

    def _push(self, output: Output, *, more: bool = True, anew: bool = False) -> None:
        if self._ended:
            return
        if output.out_at + output.err_at > _MOST_BYTES:
            self._end(InternalError("the sandbox tells of more output than there can be", reason="bad_reply"))
            return
        try:
            pushed = self._store.push_output(
                self._stream, output, keep_bytes=self._keep_bytes, ttl_s=self._ttl_s, anew=anew
            )
        except SandfleetError as exc:
            if self._pushes_failed == 0:
                log.warning("output.kept_back", extra={"op_id": self._op_id, "error": str(exc)})
            self._pushes_failed += 1
            delay_s = min(0.1 * 2 ** min(self._pushes_failed, 5), 1.0)
            self._line.later(delay_s, lambda: self._push(output, more=more, anew=anew))
            return
        self._pushes_failed = 0
        match pushed.status:
            case "ended":
                self._end(None)
            case "gone":
                # Redis lost the stream: it begins anew with all that the sandbox still keeps.
                self._at = (0, 0)
                self._again()
            case _:
                # Wherever Redis is: it may have lost its last entries, or have some of another follower.
                self._at = (pushed.out_at, pushed.err_at)
                behind = pushed.out_at < output.out_at + len(output.out) or pushed.err_at < output.err_at + len(
                    output.err
                )
                if more or (behind and self._error is None):
                    self._again()
                else:
                    self._end(self._error)

    def _again(self) -> None:
        self._pausing, pause = True, self._pause
        hasty = self._over_there and self._hasty_pulls > 0
        self._hasty_pulls -= hasty
        due_s = 0.0 if hasty else self._pulled_at + _BATCH_S - time.monotonic()
        self._line.later(max(0.0, due_s), lambda: self._go_on(pause))

    def _go_on(self, pause: int) -> None:
        if self._pausing and pause == self._pause:
            self._pausing = False
            self._pause += 1
            self._pull()

    def hurry(self) -> None:
        """The command is over: do not wait for more than there is. From any thread."""
        self._line.soon(self._hurry)

    def _hurry(self) -> None:
        self._over_there = True
        self._go_on(self._pause)

    def _end(self, error: SandfleetError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._over(error)
