"""The containers a node holds, and how they end: because somebody asked, or by themselves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sandfleet.backends import Liveness
from sandfleet.errors import InternalError, SandfleetError, StartFailed
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.docker.deaths import DeathWatch, how_it_ended
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.sandbox import Sandbox
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.waiter import READ, Waiter

__all__ = ["Holding", "told"]

log = logging.getLogger("sandfleet.node")

_BURIED_WITHIN_S = 30.0
_EXIT_CODE_S = 10.0
_ENDING_AT_ONCE = 4


@contextmanager
def told(what: str) -> Iterator[None]:
    """What the engine refuses inside is told as trouble of the node, not of a start."""
    try:
        yield
    except StartFailed as exc:
        raise InternalError(f"cannot {what} now: {exc.message}", reason=exc.facts.get("reason")) from exc


class Holding:
    """The running containers of one backend by sandbox id. Thread-safe.

    Args:
        engine: Where they run.
        waiter: Tells of the end of processes.
        labels: That all of them carry.
        on_death: Called with (sandbox id, reason) for one that ended by itself, once nothing of it is left.
    """

    def __init__(
        self, engine: Engine, waiter: Waiter, labels: Mapping[str, str], on_death: Callable[[str, str], None]
    ) -> None:
        self._engine = engine
        self._waiter = waiter
        self._labels = labels
        self._on_death = on_death
        self._lock = threading.Lock()
        self._sandboxes: dict[str, Sandbox] = {}
        #: Ended, but something of them is left.
        self._dying: dict[str, Sandbox] = {}
        self._undertaker = ThreadPoolExecutor(2, thread_name_prefix="sandfleet-undertaker")
        self._detached = False
        self._watch = DeathWatch(engine, labels, self._heard, self._look_at_all)

    def add(self, sandbox: Sandbox) -> bool:
        """Hold a container that runs. False: nothing is held any more, after `detach`."""
        with self._lock:
            if self._detached:
                return False
            self._sandboxes[sandbox.sandbox_id] = sandbox
        if sandbox.vital.pidfd >= 0:
            self._waiter.register(sandbox.vital.pidfd, lambda _: self._ended(sandbox), READ)
        elif sandbox.vital.look() is Liveness.DEAD:
            self._ended(sandbox)  # the engine's event may have come before it was held
        return True

    def get(self, sandbox_id: str) -> Sandbox | None:
        """The container of that sandbox, if one is held."""
        with self._lock:
            return self._sandboxes.get(sandbox_id)

    def ids(self) -> list[str]:
        """The sandboxes that are held."""
        with self._lock:
            return list(self._sandboxes)

    def names(self) -> set[str]:
        """Names of the containers that are held, or are being removed."""
        with self._lock:
            return {each.ticket.name for each in (*self._sandboxes.values(), *self._dying.values())}

    def rename(self, sandbox: Sandbox, sandbox_id: str) -> bool:
        """Know it under another id from now on. False: it has just ended, or the id is taken."""
        with self._lock:
            if self._sandboxes.get(sandbox.sandbox_id) is not sandbox or sandbox_id in self._sandboxes:
                return False
            del self._sandboxes[sandbox.sandbox_id]
            sandbox.sandbox_id = sandbox_id
            self._sandboxes[sandbox_id] = sandbox
        sandbox.connection.rename(sandbox_id)
        return True

    def end(self, sandbox_id: str) -> None:
        """End one for good, or wait until it has; unknown ids are fine.

        Raises:
            InternalError: It is still there, and held.
        """
        while True:
            with self._lock:
                dying = self._dying.get(sandbox_id)
                sandbox = None if dying is not None else self._sandboxes.pop(sandbox_id, None)
                if sandbox is not None:
                    self._dying[sandbox_id] = sandbox
            if sandbox is not None:
                self._remove(sandbox)
            if dying is None:
                return
            if not dying.buried.wait(_BURIED_WITHIN_S):
                raise InternalError(f"sandbox {sandbox_id} is still being removed", reason="not_gone")

    def tickets(self) -> dict[str, Ticket]:
        """What is known of each container that is held, by sandbox id."""
        with self._lock:
            return {sandbox_id: sandbox.ticket for sandbox_id, sandbox in self._sandboxes.items()}

    def detach(self) -> None:
        """Let go of all of them and leave them running. Nothing is held from now on, and no death is told."""
        with self._lock:
            self._detached = True
            left, self._sandboxes = list(self._sandboxes.values()), {}
        self._watch.close()
        for sandbox in left:
            self._let_go(sandbox)
            sandbox.vital.release()
        self._undertaker.shutdown()

    def close(self) -> None:
        """End all of them. What cannot be ended is logged, and found by the node's next run."""
        self._watch.close()
        with ThreadPoolExecutor(_ENDING_AT_ONCE, thread_name_prefix="sandfleet-ending") as enders:
            for sandbox_id in self.ids():
                enders.submit(self._last_end, sandbox_id)
        self._undertaker.shutdown()

    # --- ending --------------------------------------------------------------------------------

    def _remove(self, sandbox: Sandbox) -> None:
        """Remove one that is among the dying. It is held again when that fails, so that its place is kept."""
        try:
            with told(f"remove sandbox {sandbox.sandbox_id}"):
                self._let_go(sandbox)
                self._engine.remove(sandbox.ticket.container)
            self._bury(sandbox)
        except BaseException:
            with self._lock:
                self._sandboxes.setdefault(sandbox.sandbox_id, sandbox)
            raise
        finally:
            self._settle(sandbox)

    def _last_end(self, sandbox_id: str) -> None:
        try:
            self.end(sandbox_id)
        except SandfleetError as exc:
            log.error("sandbox.end_failed", extra={"sandbox_id": sandbox_id, "error": str(exc)})

    def _let_go(self, sandbox: Sandbox) -> None:
        if sandbox.vital.pidfd >= 0:
            self._waiter.unregister(sandbox.vital.pidfd)
        sandbox.connection.close()

    def _bury(self, sandbox: Sandbox) -> None:
        """What is left of an ended one on this side."""
        sandbox.vital.close()
        local_dirs.remove_tree(Path(sandbox.ticket.run_dir))

    def _settle(self, sandbox: Sandbox) -> None:
        with self._lock:
            if self._dying.get(sandbox.sandbox_id) is sandbox:
                del self._dying[sandbox.sandbox_id]
            over, sandbox.buried = sandbox.buried, threading.Event()
        over.set()

    # --- what happens by itself ----------------------------------------------------------------

    def _heard(self, container: str) -> None:
        """The engine says that a container has ended."""
        with self._lock:
            found = [each for each in self._sandboxes.values() if each.ticket.container == container]
        for sandbox in found:
            self._ended(sandbox)

    def _look_at_all(self) -> None:
        """Events may have been missed."""
        running = {each["Id"] for each in self._engine.labelled(self._labels) if each.get("State") == "running"}
        with self._lock:
            gone = [each for each in self._sandboxes.values() if each.ticket.container not in running]
        for sandbox in gone:
            if sandbox.vital.look() is Liveness.DEAD:
                self._ended(sandbox)

    def _ended(self, sandbox: Sandbox) -> None:
        """Process 1 is gone (on a thread that must not wait for anything)."""
        if sandbox.vital.pidfd >= 0:
            self._waiter.unregister(sandbox.vital.pidfd)
        with self._lock:
            if self._sandboxes.get(sandbox.sandbox_id) is not sandbox:
                return
            del self._sandboxes[sandbox.sandbox_id]
            self._dying[sandbox.sandbox_id] = sandbox
        self._undertaker.submit(self._report, sandbox)

    def _report(self, sandbox: Sandbox) -> None:
        sandbox_id, reason = sandbox.sandbox_id, "ended"
        try:
            self._let_go(sandbox)
            self._engine.wait(sandbox.ticket.container, _EXIT_CODE_S)  # the engine may hear of it later than we do
            found = self._engine.inspect(sandbox.ticket.container)
            reason = how_it_ended(None if found is None else found.get("State"))
            self._engine.remove(sandbox.ticket.container)
        except StartFailed as exc:
            # Dead is dead: what is left of it is found among the leftovers.
            log.warning("sandbox.not_removed", extra={"sandbox_id": sandbox_id, "error": str(exc)})
        except Exception:  # whatever it is, the node must hear of the death
            log.exception("sandbox.not_removed", extra={"sandbox_id": sandbox_id})
        finally:
            self._bury(sandbox)
            self._settle(sandbox)
            log.warning("sandbox.died", extra={"sandbox_id": sandbox_id, "reason": reason})
            # The death of an earlier one is no news about the one that runs now.
            if self.get(sandbox_id) is None:
                self._on_death(sandbox_id, reason)
