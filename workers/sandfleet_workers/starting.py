"""How an operation begins in its sandbox, and how it is ended early: the half of the node that meets the connection."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandfleet.backends import Capability, Completion, Operation
from sandfleet.errors import Cancelled, NotSupported, SandfleetError
from sandfleet.ops import describe
from sandfleet.store.base import Output
from sandfleet.wire import OpMessage
from sandfleet_workers.answers import celery_result, encode_reply, spent_ms
from sandfleet_workers.batch import BatchRun
from sandfleet_workers.following import Follower
from sandfleet_workers.holdings import Carry, Held
from sandfleet_workers.jobs import Job
from sandfleet_workers.runs import stream_of

if TYPE_CHECKING:
    from sandfleet_workers.node import Node

__all__ = ["Starter", "was_cancelled"]

log = logging.getLogger("sandfleet.node")

#: What a sandbox keeps of a note (`sandfleet.backends.Operation`).
_NOTE_BYTES = 4096
_SHAPES_ANSWER = ("max_output_bytes", "as_bytes", "background", "stream", "session")
_BIG_BYTES = 64 * 1024


def was_cancelled(job: Job) -> Cancelled:
    """The answer of an operation that was cancelled in time."""
    return Cancelled(f"operation {job.op_id} was cancelled before it started", started=False, op_id=job.op_id)


class Starter:
    """Starts claimed operations of a node. Called from pool threads."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def start(self, job: Job, held: Held, message: OpMessage, args: dict[str, Any], content: bytes | None) -> None:
        """Begin it and return; its completion answers it.

        Raises:
            SandfleetError: It has not begun.
        """
        node = self._node
        if job.cancelled:
            raise was_cancelled(job)
        if message.kind == "noop":
            node.finish(job, Completion(value={}))
            return
        if message.kind == "cancel":
            node.finish(job, Completion(value={"found": self._cancel_other(message, args["op_id"])}))
            return
        done = self._done(job)
        if message.kind == "execute_command":
            self._command(job, held, message, args, content, done)
        elif message.kind == "checkpoint":
            node.lifecycle.checkpoints.start(held, args, done)
        elif message.kind == "batch":
            job.carry.batch = BatchRun(
                held.connection,
                Operation(job.op_id, message.kind, args, content),
                done,
                deadline=time.monotonic() + self._left_s(message),
                command_timeout_s=node.settings.command_timeout_s,
            )
            job.carry.batch.start()
        else:
            held.connection.start(Operation(job.op_id, message.kind, args, content), done)
        if _is_cancelled(job):
            # It came between the look above and the start, and found nothing to end.
            self.cancel(job)

    def _left_s(self, message: OpMessage) -> float:
        return max(0.1, float(message.deadline_ms - self._node.lease.now_ms()) / 1000)

    def _done(self, job: Job) -> Callable[[Completion], None]:
        node = self._node

        def done(completion: Completion) -> None:
            if completion.content is not None and len(completion.content) > _BIG_BYTES:
                # Big answers are moved to Redis in chunks: not on the waiter's thread.
                node.pool.run(lambda: node.finish(job, completion))
            else:
                node.finish(job, completion)

        return done

    # --- commands ----------------------------------------------------------------------------

    def _command(
        self,
        job: Job,
        held: Held,
        message: OpMessage,
        args: dict[str, Any],
        content: bytes | None,
        done: Callable[[Completion], None],
    ) -> None:
        settings, background = self._node.settings, bool(args.get("background"))
        _check_able(args, held)
        if background:
            args["timeout_s"] = min(args.get("timeout_s") or settings.max_job_s, settings.max_job_s)
        else:
            # Every command has a deadline, and none outlives what its caller said it would wait for.
            args["timeout_s"] = min(args.get("timeout_s") or settings.command_timeout_s, self._left_s(message))
        brief = replace(message, args={key: args[key] for key in _SHAPES_ANSWER if key in args}, content=None)
        job.carry.stream = stream = stream_of(brief)
        follower: Follower | None = None
        if background:
            shown = describe(message.kind, args, held.route.sandbox_id)
            done = self._job_begun(job, held, brief, args["timeout_s"], shown)
        elif stream and held.can(Capability.JOBS):
            done, follower = self._followed(held, brief, done)
        elif stream:
            done = self._shown_late(job, stream)
        held.connection.start(Operation(job.op_id, message.kind, args, content, _note(brief)), done)
        if follower is not None:
            follower.begin(resume=False)

    def _job_begun(
        self, job: Job, held: Held, message: OpMessage, lasts_s: float, shown: str
    ) -> Callable[[Completion], None]:
        """What follows when a background job runs (or could not be started): its pool job ends, `Runs` takes over."""
        node = self._node

        def done(completion: Completion) -> None:
            if completion.error is not None:
                node.finish(job, completion)
                return
            carry: Carry = job.carry
            carry.finished = True
            spent = spent_ms(job, message, node.lease.now_ms())
            reply = encode_reply(node.store, completion, message, spent_ms=spent)
            job.result = celery_result(completion, shown_only=job.request.ignore_result)
            job.shown = f"job {job.op_id[:12]}"
            node.runs.begun(message, held, reply, lasts_s, shown)
            node.watch.answered(message, None, spent, len(reply))
            node.pool.complete(job)
            if job.cancelled:
                node.pool.run(lambda: self._kill_job(held, job.op_id))

        return done

    def _followed(
        self, held: Held, message: OpMessage, done: Callable[[Completion], None]
    ) -> tuple[Callable[[Completion], None], Follower]:
        """The answer waits until all output is in the stream."""
        runs, box = self._node.runs, list[Completion]()
        # Two things have to be over, in either order: the command, and what moves its output.
        halves = iter((False, True))

        def half(_error: SandfleetError | None = None) -> None:
            if next(halves):
                done(box[0])

        follower = runs.follower(held, message, half)

        def ended(completion: Completion) -> None:
            box.append(completion)
            if completion.error is not None:
                follower.stop()
                done(completion)
            else:
                half()
                follower.hurry()

        return ended, follower

    def _shown_late(self, job: Job, stream: str) -> Callable[[Completion], None]:
        """For sandboxes whose commands cannot be followed: all output comes at once, at the end."""
        node = self._node

        def push(completion: Completion) -> None:
            out, err = (str(completion.value.get(name) or "").encode() for name in ("stdout", "stderr"))
            try:
                node.store.push_output(
                    stream, Output(0, 0, out, err), keep_bytes=len(out) + len(err), ttl_s=600.0, anew=True
                )
            except SandfleetError as exc:
                log.warning("output.lost", extra={"op_id": job.op_id, "error": str(exc)})
            node.finish(job, completion)

        def done(completion: Completion) -> None:
            if completion.error is not None or not isinstance(completion.value, dict):
                node.finish(job, completion)
            else:
                node.runs.line.soon(lambda: push(completion))

        return done

    # --- cancelling --------------------------------------------------------------------------

    def _cancel_other(self, message: OpMessage, op_id: str) -> bool:
        carry = self._node.pool.carry_of(op_id)
        if carry is not None and carry.message.route.sandbox_id == message.route.sandbox_id:
            return self._node.pool.cancel(op_id)
        return self._node.runs.cancel(message.route.sandbox_id, op_id)

    def _kill_job(self, held: Held, op_id: str) -> None:
        self._node.runs.cancel(held.route.sandbox_id, op_id)

    def cancel(self, job: Job) -> None:
        """End a running operation: its process group is killed, the completion tells what it was."""
        held = self._node.held.get(job.carry.message.route.sandbox_id) if job.carry else None
        if held is None:
            return
        if job.carry.batch is not None:
            job.carry.batch.cancel()
        else:
            held.connection.cancel(job.op_id)


def _is_cancelled(job: Job) -> bool:
    return job.cancelled


def _check_able(args: Mapping[str, Any], held: Held) -> None:
    """Refuse what this kind of sandbox does not do."""
    for name, needed in (("background", Capability.JOBS), ("stdin_open", Capability.JOBS), ("pty", Capability.PTY)):
        if args.get(name) and not held.can(needed):
            raise NotSupported(f"sandboxes of backend {held.backend.name} take no {name}=", argument=name)


def _note(message: OpMessage) -> str:
    """What a later run of this node needs to answer for the command; the sandbox keeps it."""
    note = json.dumps(message.to_wire(), separators=(",", ":"))
    return note if len(note) <= _NOTE_BYTES else ""
