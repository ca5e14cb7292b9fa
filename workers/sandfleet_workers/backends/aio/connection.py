"""The worker's way into a sandbox that runs an AIO server of its own (see `shells`, `commands`, `files`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from sandfleet.backends import Completion, Done, Operation
from sandfleet.errors import Busy, Cancelled, InternalError, NotStarted, OutcomeUnknown, UnknownOperation
from sandfleet_workers.backends.aio import commands, files
from sandfleet_workers.backends.aio.answers import RouteMissing
from sandfleet_workers.backends.aio.shells import SHELL, Server
from sandfleet_workers.endpoint import Call, EndpointConnection
from sandfleet_workers.endpoint_files import Steps
from sandfleet_workers.endpoint_http import Request
from sandfleet_workers.jobless import refuse_jobs

__all__ = ["AioConnection", "AioDialect"]

_MAX_WAITING = 1000


class AioDialect:
    """What an AIO server understands.

    Args:
        env: Variables of every command.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.server = Server()
        self._env = dict(env)

    def steps(self, op: Operation) -> Steps:
        refuse_jobs(op, "this sandbox runs an AIO server of its own")
        if op.kind == "execute_command":
            return commands.execute(self.server, self._env, op)
        build = _STEPS.get(op.kind)
        if build is None:
            raise UnknownOperation(f"unknown operation {op.kind[:60]!r}", operation=op.kind)
        return build(self.server, op)

    def kill(self, op_id: str) -> Steps:
        return commands.kill(self.server, op_id)

    def recall(self, op: Operation) -> Steps:
        raise OutcomeUnknown("a server of the AIO API keeps no account of what it began", op_id=op.op_id)

    def remembered(self) -> Steps:
        yield from ()  # a generator that asks nothing
        return Completion([])

    def lane(self, op: Operation) -> str | None:
        """What the operation must have for itself: a shell of the older route takes one command at a time."""
        if self.server.route is not SHELL:
            return None
        if op.kind == "execute_command":
            return commands.purpose_of(op) or "shell"
        return "files" if op.kind in files.FILE_STEPS or op.kind == "metrics" else None


def _noop(_server: Server, _op: Operation) -> Steps:
    yield from ()  # a generator that asks nothing
    return Completion({})


_STEPS: dict[str, Callable[[Server, Operation], Steps]] = {
    **files.FILE_STEPS,
    "close_session": commands.close_session,
    "health": files.health,
    "metrics": files.metrics,
    "noop": _noop,
}


class AioConnection(EndpointConnection):
    """Carries out operations on one AIO server. Arguments as for `EndpointConnection`, and:

    Args:
        dialect: This sandbox's; it remembers what the server can do.
    """

    def __init__(self, *args: object, dialect: AioDialect, **more: object) -> None:
        super().__init__(*args, dialect=dialect, **more)  # type: ignore[arg-type]  # the base checks them
        self._aio = dialect
        self._lanes: dict[str, deque[tuple[Operation, Done]]] = {}
        self._lane_lock = threading.Lock()

    def start(self, op: Operation, done: Done) -> None:
        lane = None if op.kind == "batch" else self._aio.lane(op)
        if op.kind == "batch":
            super().start(op, done)
        elif lane is None:
            super().start(op, self._ended(op, done, None))
        elif self._enters(lane, op, done):
            super().start(op, self._ended(op, done, lane))

    def cancel(self, op_id: str) -> bool:
        with self._lane_lock:
            for waiting in self._lanes.values():
                found = next((each for each in waiting if each[0].op_id == op_id), None)
                if found is not None:
                    waiting.remove(found)
                    break
            else:
                found = None
        if found is None:
            return super().cancel(op_id)
        found[1](Completion(error=Cancelled("cancelled while it waited for the sandbox's shell", op_id=op_id)))
        return True

    def close(self) -> None:
        with self._lane_lock:
            waiting = [each for lane in self._lanes.values() for each in lane]
            for lane in self._lanes.values():
                lane.clear()
        for op, done in waiting:
            done(Completion(error=NotStarted("the connection was closed", reason="closed", op_id=op.op_id)))
        super().close()

    # --- lanes ---------------------------------------------------------------------------------

    def _enters(self, lane: str, op: Operation, done: Done) -> bool:
        """Whether the lane is free and now this operation's; otherwise it waits there, or is refused."""
        with self._lane_lock:
            waiting = self._lanes.get(lane)
            if waiting is None:
                self._lanes[lane] = deque()
                return True
            if len(waiting) < _MAX_WAITING:
                waiting.append((op, done))
                return False
        done(Completion(error=Busy(f"{_MAX_WAITING} operations wait for the sandbox's shell", retry_after_s=1.0)))
        return False

    def _ended(self, op: Operation, done: Done, lane: str | None) -> Done:
        route = self._aio.server.route

        def ended(completion: Completion) -> None:
            if isinstance(missing := completion.error, RouteMissing):
                if self._aio.server.route is not route:
                    # Nothing ran; the dialect knows now that this server has only the older route.
                    self._leave(lane)
                    self.start(op, done)
                    return
                completion = Completion(error=InternalError(f"{op.kind}: {missing}", reason="no_route"))
            done(completion)
            self._leave(lane)
            self._tidy()

        return ended

    def _leave(self, lane: str | None) -> None:
        if lane is None:
            return
        with self._lane_lock:
            waiting = self._lanes[lane]
            if not waiting:
                del self._lanes[lane]
                return
            op, done = waiting.popleft()
            if op.kind == "execute_command":
                self._commands.add(op.op_id)  # whoever cancels it now must not be told that there is none
        # Not from inside the end of the last one: a row of operations that fail at once would nest.
        self._waiter.call_soon(lambda: EndpointConnection.start(self, op, self._ended(op, done, lane)))

    def _tidy(self) -> None:
        """Close the sessions that nobody needs, while nobody waits for it."""
        litter = self._aio.server.litter
        while litter:
            try:
                request = litter.pop()
            except IndexError:
                return
            self._advance(Call(Operation("", "tidy", {}), _asked(request), _nobody), None)


def _asked(request: Request) -> Steps:
    yield request
    return Completion()


def _nobody(completion: Completion) -> None:
    """A session that could not be closed ends with its sandbox."""
