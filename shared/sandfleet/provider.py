"""The factory in the caller's process: what the seeds call ``SandboxProvider``."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from sandfleet.acquiring import ON_LOST, Asking, acquire_steps, lifecycle_message, send_lifecycle, wanted_spec
from sandfleet.calls import cancel_steps
from sandfleet.checkpointing import Checkpointing
from sandfleet.client import Client, Target
from sandfleet.config import Settings
from sandfleet.errors import InvalidArgument, SandboxLost, SandboxNotFound, SandfleetError, from_wire
from sandfleet.ids import Identity, is_sandbox_id, new_op_id
from sandfleet.model import FileInfo, SandboxInfo, SandboxSpec
from sandfleet.provider_class import provider_class
from sandfleet.sandbox import Sandbox
from sandfleet.standing import list_outputs, upload_to_thread
from sandfleet.steps import Do, Steps, drive
from sandfleet.store.base import Recorded, Route

__all__ = [
    "SandboxProvider",
    "get_sandbox_provider",
    "reset_sandbox_provider",
    "set_sandbox_provider",
    "shutdown_sandbox_provider",
]

log = logging.getLogger("sandfleet.client")

_RELEASED_KEPT = 10_000
_connecting = threading.Lock()

list_type = list  # `list` is a method of the seeds' interface


class SandboxProvider(Checkpointing):
    """Gives each thread its sandbox. Thread-safe; survives a fork (the child connects anew).

    Args:
        settings: Where the fleet is; from the environment by default.
        spec: What kind of sandbox; the backend of the settings by default.

    Use as a context manager, or call `shutdown`: it ends this process' holds, never another's.
    """

    #: DeerFlow asks these two.
    uses_thread_data_mounts = True
    needs_upload_permission_adjustment = False

    #: Of the class, so that a provider of one's own that leaves `__init__` to itself can be shut down.
    _connected: Client | None = None

    def __init__(self, settings: Settings | None = None, *, spec: SandboxSpec | None = None, **overrides: Any) -> None:
        self.settings = settings or Settings.load(**overrides)
        self.spec = wanted_spec(self.settings, spec)
        self._lock = threading.Lock()
        self._connected = None
        self._targets: dict[str, Target] = {}
        # Bounded: a process may release sandboxes for years.
        self._released: OrderedDict[str, None] = OrderedDict()

    def _client(self) -> Client:
        client = self._connected
        if client is None or client.pid != os.getpid():
            with _connecting:
                if self._connected is None or self._connected.pid != os.getpid():
                    # In a fork, our lock may have been held by a thread that does not exist here.
                    self._lock = threading.Lock()
                    self._connected = Client(self.settings)
                client = self._connected
        return client

    # --- the seeds' interface ----------------------------------------------------------------

    def acquire(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float | None = None,
        on_lost: str | None = None,
    ) -> str:
        """The id of the thread's sandbox: the one it has (live or warm), or a new one.

        Args:
            thread_id: 1–64 characters of ``A-Z a-z 0-9 _ -``; None is a fresh anonymous thread.
            user_id: The thread's user; (user, thread) is the identity, and nobody else reaches the sandbox.
            timeout_s: How long to wait for one; the setting ``acquire_timeout_s`` by default.
            on_lost: When the node that holds the thread's data is away: ``wait_for_home`` waits, then raises;
                ``restore`` goes on elsewhere with the newest checkpoint once it is gone, and raises when there is none;
                ``fresh`` starts with empty data elsewhere; the setting ``on_lost`` by default (``wait_for_home``).
                `SandboxInfo.restored` tells what came back.

        Raises:
            NoCapacity: Every fitting node stayed full (``facts`` tell the position in line and the time in it), or
                none fits, or all are full and the policy is ``reject``.
            QuotaExceeded: The user has as many sandboxes as one may, and the policy is ``reject``.
            HomeUnavailable: The thread's data lies on a node that stayed away.
            NoCheckpoint, CheckpointFailed, CheckpointCorrupt: With ``on_lost="restore"``: nothing can be restored.
            StartFailed: The node could not start it, repeatedly; ``backing_off`` before ``retry_after_s``.
        """
        return drive(self._acquire(thread_id, user_id, timeout_s, on_lost))

    def get(self, sandbox_id: str, *, thread_id: str | None = None, user_id: str | None = None) -> Sandbox | None:
        """A handle, without any I/O; None for a malformed id or one that was released here.

        An id that this process did not acquire gives a handle too. With ``thread_id`` (and ``user_id``) the handle
        speaks as that identity and every operation on somebody else's sandbox is answered with `SandboxNotFound`;
        without, the owner is looked up on first use: right for a backend that has checked its caller itself.
        """
        if not is_sandbox_id(sandbox_id) or self._was_released(sandbox_id):
            return None
        if thread_id is not None:
            return Sandbox(self, Target(sandbox_id, Identity(thread_id, user_id)))
        return Sandbox(self, self._target(sandbox_id))

    def release(self, sandbox_id: str) -> None:
        """This process is done with the sandbox; with the last agent gone it is warm for its thread.

        Acquires are counted: the sandbox is released with the last of them. Unknown ids are fine.
        """
        drive(self._release(sandbox_id, all_of_them=False))

    def destroy(self, sandbox_id: str, delete_data: bool = False) -> None:
        """End the sandbox, whatever runs in it; thread data stays unless ``delete_data``.

        Raises:
            SandboxNotFound: No such sandbox.
        """
        drive(self._destroy(sandbox_id, delete_data))

    def upload_to_thread(
        self, thread_id: str, name: str, data: bytes | str | os.PathLike[str], *, user_id: str | None = None
    ) -> str:
        """Put a file among the thread's uploads, never over another one; its path in the sandbox.

        The thread's sandbox is acquired for it and released again.

        Args:
            name: The file's name alone; where it is taken, ``name-1.ext``, ``name-2.ext``… is chosen.
            data: The bytes, or the path of a local file of any size.

        Raises:
            InvalidArgument: ``name`` is no file name.
            OSError: The local file cannot be read.
        """
        return drive(upload_to_thread(self, thread_id, name, data, user_id=user_id))

    def list_outputs(self, thread_id: str, *, user_id: str | None = None) -> list_type[FileInfo]:
        """Every file below the thread's ``/mnt/user-data/outputs``, sorted by path.

        The thread's sandbox is acquired for it and released again.
        """
        return drive(list_outputs(self, thread_id, user_id=user_id))

    def list(self) -> list_type[SandboxInfo]:
        """Every sandbox of the fleet, sorted by id."""
        return drive(self._list())

    def reset(self) -> None:
        """Forget handles and routes; sandboxes and holds stay."""
        held = self._connected.holds if self._connected is not None else ()
        with self._lock:
            # Whose they are is needed to release them.
            known = self._targets.items()
            self._targets = {one: Target(one, target.identity) for one, target in known if one in held}
            self._released.clear()

    def shutdown(self) -> None:
        """Release what this process holds and disconnect. Safe to repeat."""
        drive(self._shutdown())

    def __enter__(self) -> SandboxProvider:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # --- shared with the async twin ----------------------------------------------------------

    def _was_released(self, sandbox_id: str) -> bool:
        return sandbox_id in self._released

    def _list(self) -> Steps[list_type[SandboxInfo]]:
        found: list_type[SandboxInfo] = yield Do(lambda: self._client().store.sandboxes())
        return found

    def _cancel(self, target: Target, op_id: str) -> Steps[bool]:
        return cancel_steps(self._client(), target, op_id)

    def _shutdown(self) -> Steps[None]:
        client = self._connected
        if client is None or client.pid != os.getpid():
            self._connected = None
            return
        for sandbox_id in client.holds:
            try:
                yield from self._release(sandbox_id, all_of_them=True)
            except SandfleetError as exc:
                log.warning("provider.release_failed", extra={"sandbox_id": sandbox_id, "error": str(exc)})
        with self._lock:
            self._connected = None
        yield Do(client.close)

    def _target(self, sandbox_id: str) -> Target:
        with self._lock:
            return self._targets.get(sandbox_id) or Target(sandbox_id)

    def _remember(self, identity: Identity, route: Route) -> None:
        with self._lock:
            self._released.pop(route.sandbox_id, None)
            target = self._targets.get(route.sandbox_id)
            if target is None or target.identity != identity:
                target = self._targets[route.sandbox_id] = Target(route.sandbox_id, identity)
            target.route = route

    def _acquire(
        self,
        thread_id: str | None,
        user_id: str | None,
        timeout_s: float | None,
        on_lost: str | None = None,
        restore: Mapping[str, Any] | None = None,
    ) -> Steps[str]:
        on_lost = on_lost if on_lost is not None else self.settings.on_lost
        if on_lost not in ON_LOST:
            raise InvalidArgument(f"on_lost must be one of {', '.join(ON_LOST)}, not {on_lost!r}")
        identity = Identity.anonymous(user_id) if thread_id is None else Identity(thread_id, user_id)
        client: Client = yield Do(self._client)
        within_s = timeout_s if timeout_s is not None else self.settings.acquire_timeout_s
        until = time.monotonic() + within_s
        while True:
            with client.holds.arriving(identity.digest) as arrival:
                left_s = until - time.monotonic()
                asking = Asking(identity, self.spec, client.id, left_s, on_lost, restore=restore)
                route = yield from acquire_steps(client, asking)
                client.holds.add(route, identity.digest)
            self._remember(identity, route)
            held = functools.partial(client.holds.retake, arrival, route.sandbox_id, identity.digest)
            try:
                kept = not arrival.disturbed or (yield Do(held))
            except BaseException:
                # Cancelled, or Redis is away: nobody learns of this acquire, so it must not be renewed for ever.
                client.holds.remove(route.sandbox_id)
                raise
            if kept:
                return route.sandbox_id

    def _release(self, sandbox_id: str, *, all_of_them: bool) -> Steps[None]:
        client: Client = yield Do(self._client)
        if not is_sandbox_id(sandbox_id) or not client.holds.remove(sandbox_id, all_of_them=all_of_them):
            return
        with self._lock:
            target = self._targets.get(sandbox_id)
        if target is None or target.identity is None:
            return
        owner = target.identity.digest
        ended: bool = yield Do(lambda: client.holds.release(sandbox_id, owner))
        with self._lock:
            if ended and sandbox_id not in client.holds:
                self._targets.pop(sandbox_id, None)
                self._released[sandbox_id] = None
                if len(self._released) > _RELEASED_KEPT:
                    self._released.popitem(last=False)
        if ended and self.settings.ends_on_release:
            identity = target.identity
            yield Do(lambda: self._end_released(client, identity, sandbox_id))

    @staticmethod
    def _end_released(client: Client, identity: Identity, sandbox_id: str) -> None:
        """End the sandbox unless somebody is in it (again); nobody waits for that."""
        stop = client.store.begin_stop(sandbox_id, owner=identity.digest, force=False, reason="released for good")
        if stop.status != "recorded" or stop.route is None:
            return
        op_id, args, now_ms = new_op_id(), {"delete_data": False}, client.now_ms()
        record, push = lifecycle_message(
            op_id, "node.destroy", identity, stop.route, args, expect="stopping", now_ms=now_ms, within_s=30.0
        )
        client.store.record(record, push)

    def _destroy(self, sandbox_id: str, delete_data: bool) -> Steps[None]:
        client: Client = yield Do(self._client)
        identity: Identity = yield Do(lambda: client.identity_of(self._target(sandbox_id)))
        stop: Recorded = yield Do(
            lambda: client.store.begin_stop(
                sandbox_id, owner=identity.digest, force=True, reason="destroyed by its owner"
            )
        )
        client.holds.remove(sandbox_id, all_of_them=True)
        with self._lock:
            self._targets.pop(sandbox_id, None)
        if stop.status == "lost":
            if delete_data:
                raise SandboxLost(
                    f"sandbox {sandbox_id} is gone, its data is not deleted: acquire its thread again, then destroy",
                    sandbox_id=sandbox_id,
                )
            return
        if stop.route is None:
            raise SandboxNotFound(f"no sandbox {sandbox_id} to destroy ({stop.status})", sandbox_id=sandbox_id)
        args = {"delete_data": delete_data}
        reply = yield from send_lifecycle(
            client, "node.destroy", identity, stop.route, args, expect="stopping", within_s=30.0
        )
        if "error" in reply:
            raise from_wire(reply["error"])


# --- one provider per process, as the seeds have it -------------------------------------------

_provider: SandboxProvider | None = None
_provider_lock = threading.Lock()


def _after_fork() -> None:
    global _provider_lock, _connecting  # another thread of the parent may have held them
    _provider_lock, _connecting = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def get_sandbox_provider(**overrides: Any) -> SandboxProvider:
    """The process' provider, made on first use from the configuration (``overrides`` count only then).

    It is a `SandboxProvider`, or the class of your own that ``sandbox.use`` names.

    Raises:
        ConfigError: A setting is wrong, or that class cannot be used.
    """
    global _provider
    if _provider is not None:
        return _provider
    # Not under the lock: a class of one's own takes its time, and may ask for the provider while it is imported.
    made = _make_provider(overrides)
    kept = _keep_first(made)
    if kept is not made:
        made.shutdown()
    return kept


def _keep_first(made: SandboxProvider) -> SandboxProvider:
    global _provider
    with _provider_lock:
        if _provider is None:
            _provider = made
        return _provider


def _make_provider(overrides: dict[str, Any]) -> SandboxProvider:
    given = {name: value for name, value in overrides.items() if name not in ("settings", "spec")}
    settings = overrides.get("settings") or Settings.load(**given)
    if settings.use:
        made = provider_class(settings.use, SandboxProvider)(**overrides)
        if not hasattr(made, "settings"):
            # The seeds' classes keep none, and the tools' limits and the gate lie in the same file as ``use``.
            made.settings = settings
        return made
    return SandboxProvider(settings, spec=overrides.get("spec"))


def set_sandbox_provider(provider: SandboxProvider | None) -> None:
    """Use ``provider`` from now on; the one before is left to its owner."""
    global _provider
    with _provider_lock:
        _provider = provider


def reset_sandbox_provider() -> None:
    """Forget the process' provider without ending anything."""
    set_sandbox_provider(None)


def shutdown_sandbox_provider() -> None:
    """Shut the process' provider down and forget it."""
    global _provider
    with _provider_lock:
        provider, _provider = _provider, None
    if provider is not None:
        provider.shutdown()
