"""Saving a thread's files, and beginning with what was saved: what providers offer of it, awaited or not."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sandfleet.acquiring import send_lifecycle
from sandfleet.checkpoints import Checkpoint
from sandfleet.client import Call, Client
from sandfleet.errors import (
    InvalidArgument,
    NoCapacity,
    NoCheckpoint,
    NotStarted,
    NotSupported,
    ReplyTimeout,
    SandboxNotFound,
    from_wire,
)
from sandfleet.ids import Identity, sandbox_id_candidates
from sandfleet.model import NodeState, NodeView, SandboxInfo
from sandfleet.standing import with_thread
from sandfleet.steps import Do, Sleep, Steps, drive, drive_async
from sandfleet.store.base import Route

if TYPE_CHECKING:
    from sandfleet.provider import SandboxProvider

__all__ = ["AsyncCheckpointing", "Checkpointing"]

#: How long saving or restoring may take, when the caller does not say.
_LONG_S = 900.0
_LIST_WITHIN_S = 60.0
_ASKED = 4


class Checkpointing:
    """The part of `sandfleet.SandboxProvider` about checkpoints: copies of a thread's files in a storage that outlives
    its machine. The nodes need ``checkpoints.url``.

    Raises (any method):
        NotSupported: No node has a place for checkpoints.
        CheckpointFailed: The storage does not answer or refuses; sandbox and data are as they were.
    """

    def snapshot(
        self,
        sandbox_id: str | None = None,
        *,
        thread_id: str | None = None,
        user_id: str | None = None,
        name: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> Checkpoint:
        """Save the files of a sandbox's thread as they are now. Operations on it wait meanwhile; background jobs do
        not, and ``consistent`` tells whether anything changed while it was read.

        Args:
            sandbox_id: The sandbox; or give ``thread_id`` (and ``user_id``), whose sandbox is acquired for it.
            name: What you call it. Named checkpoints are counted apart when old ones are removed.

        Raises:
            SandboxNotFound, SandboxLost: There is no such sandbox.
        """
        return drive(_snapshot(_of(self), sandbox_id, thread_id, user_id, name, timeout_s))

    def checkpoints(self, thread_id: str, *, user_id: str | None = None) -> list[Checkpoint]:
        """What is saved of a thread, the newest first (a hundred at most); it need not have a sandbox."""
        return drive(_checkpoints(_of(self), Identity(thread_id, user_id)))

    def restore(
        self,
        thread_id: str,
        checkpoint_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> str:
        """Put a thread's files back as they were saved; the id of its new sandbox, acquired. Its sandbox is ended, and
        what it has now is saved first, if that can be done. `SandboxInfo.restored` tells what came back and what did
        not.

        Args:
            checkpoint_id: Which one; the newest that is there now by default.

        Raises:
            NoCheckpoint: There is none, or not that one.
            CheckpointCorrupt: The storage gave something else than was saved; the thread's files are as they were.
        """
        return drive(_restore(_of(self), Identity(thread_id, user_id), checkpoint_id, timeout_s))

    def fork(
        self,
        thread_id: str,
        new_thread_id: str,
        checkpoint_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> str:
        """Begin a new thread of the same user with a copy of another's saved files; the id of its sandbox, acquired.
        The two share nothing from then on.

        Args:
            checkpoint_id: Of ``thread_id``; the newest by default.

        Raises:
            InvalidArgument: The new thread has data already.
            NoCheckpoint, CheckpointCorrupt: As of `restore`.
        """
        source, new = Identity(thread_id, user_id), Identity(new_thread_id, user_id)
        return drive(_fork(_of(self), source, new, checkpoint_id, timeout_s))


class AsyncCheckpointing:
    """`Checkpointing` for event loops: every method is documented there."""

    async def snapshot(
        self,
        sandbox_id: str | None = None,
        *,
        thread_id: str | None = None,
        user_id: str | None = None,
        name: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> Checkpoint:
        """See `Checkpointing.snapshot`."""
        return await drive_async(_snapshot(_of(self), sandbox_id, thread_id, user_id, name, timeout_s))

    async def checkpoints(self, thread_id: str, *, user_id: str | None = None) -> list[Checkpoint]:
        """See `Checkpointing.checkpoints`."""
        return await drive_async(_checkpoints(_of(self), Identity(thread_id, user_id)))

    async def restore(
        self,
        thread_id: str,
        checkpoint_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> str:
        """See `Checkpointing.restore`."""
        return await drive_async(_restore(_of(self), Identity(thread_id, user_id), checkpoint_id, timeout_s))

    async def fork(
        self,
        thread_id: str,
        new_thread_id: str,
        checkpoint_id: str | None = None,
        *,
        user_id: str | None = None,
        timeout_s: float = _LONG_S,
    ) -> str:
        """See `Checkpointing.fork`."""
        source, new = Identity(thread_id, user_id), Identity(new_thread_id, user_id)
        return await drive_async(_fork(_of(self), source, new, checkpoint_id, timeout_s))


def _of(provider: Any) -> SandboxProvider:
    """The sync side of either."""
    found: SandboxProvider = getattr(provider, "_sync", provider)
    return found


# --- saving ------------------------------------------------------------------------------------


def _snapshot(
    provider: SandboxProvider,
    sandbox_id: str | None,
    thread_id: str | None,
    user_id: str | None,
    name: str | None,
    timeout_s: float,
) -> Steps[Checkpoint]:
    if (sandbox_id is None) == (thread_id is None):
        raise InvalidArgument("give either sandbox_id or thread_id", argument="sandbox_id")
    call = Call("checkpoint", {} if name is None else {"name": name}, None, timeout_s, timeout_s)
    if thread_id is not None:
        answer = yield from with_thread(provider, thread_id, user_id, lambda send: send(call))
    else:
        assert sandbox_id is not None
        client: Client = yield Do(provider._client)
        answer = yield from client.call(provider._target(sandbox_id), call)
    return Checkpoint.from_wire(answer.value)


# --- listing -----------------------------------------------------------------------------------


def _checkpoints(provider: SandboxProvider, identity: Identity) -> Steps[list[Checkpoint]]:
    """Asked of a node: clients need no way to the storage."""
    client: Client = yield Do(provider._client)
    nodes: list[NodeView] = yield Do(client.store.nodes)
    home: str | None = yield Do(lambda: client.store.thread_home(identity))
    there = [node for node in nodes if node.alive and node.state in (NodeState.READY, NodeState.CORDONED)]
    last: NotStarted | ReplyTimeout | NotSupported | NoCapacity
    last = NoCapacity("no node is alive and ready; start one with `sandfleet worker`", retry_after_s=0.5)
    for node in sorted(there, key=lambda one: (one.data_id != home, one.inflight, one.node_id))[:_ASKED]:
        # No sandbox has the whole digest for its id.
        route = Route(identity.digest, node.node_id, node.incarnation, 0)
        try:
            reply = yield from send_lifecycle(
                client, "node.checkpoints", identity, route, {}, expect="node", within_s=_LIST_WITHIN_S
            )
        except (NotStarted, ReplyTimeout) as exc:
            last = exc
            continue
        if "error" not in reply:
            return [Checkpoint.from_wire(one) for one in reply["ok"]["checkpoints"]]
        error = from_wire(reply["error"])
        if not isinstance(error, NotStarted | NotSupported):
            raise error
        last = error
    raise last


def _chosen(provider: SandboxProvider, identity: Identity, checkpoint_id: str | None) -> Steps[Checkpoint]:
    found = yield from _checkpoints(provider, identity)
    wanted = [one for one in found if checkpoint_id in (None, one.id)]
    if wanted:
        return wanted[0]
    if checkpoint_id is None:
        raise NoCheckpoint(f"nothing was saved of thread {identity.thread_id}", thread_id=identity.thread_id)
    raise NoCheckpoint(
        f"thread {identity.thread_id} has no checkpoint {checkpoint_id[:40]!r}; it has {len(found)} others",
        thread_id=identity.thread_id,
        checkpoint_id=checkpoint_id[:40],
    )


# --- restoring ---------------------------------------------------------------------------------


def _restore(provider: SandboxProvider, identity: Identity, checkpoint_id: str | None, timeout_s: float) -> Steps[str]:
    until = time.monotonic() + timeout_s
    # Fixed before its sandbox is ended: that makes a newer one.
    chosen = yield from _chosen(provider, identity, checkpoint_id)
    return (yield from _begin(provider, identity, {"checkpoint": chosen.id, "from": None}, until))


def _fork(
    provider: SandboxProvider, source: Identity, new: Identity, checkpoint_id: str | None, timeout_s: float
) -> Steps[str]:
    until = time.monotonic() + timeout_s
    client: Client = yield Do(provider._client)
    home: str | None = yield Do(lambda: client.store.thread_home(new))
    if home is not None:
        raise InvalidArgument(
            f"thread {new.thread_id} has data already; fork into a thread that has none", argument="new_thread_id"
        )
    chosen = yield from _chosen(provider, source, checkpoint_id)
    return (yield from _begin(provider, new, {"checkpoint": chosen.id, "from": source.thread_id}, until))


def _begin(provider: SandboxProvider, identity: Identity, restore: dict[str, Any], until: float) -> Steps[str]:
    """Acquire the thread with a new sandbox that began so; one that it had, or that somebody else acquired first, is
    ended."""
    client: Client = yield Do(provider._client)
    while True:
        info: SandboxInfo | None = yield Do(lambda: _living(client, identity))
        if info is not None:
            try:
                yield from provider._destroy(info.sandbox_id, False)
            except (SandboxNotFound, NotStarted):
                yield Sleep(0.1)  # it is being made, or ended
        left_s = max(0.001, until - time.monotonic())
        sandbox_id = yield from provider._acquire(
            identity.thread_id, identity.user_id, left_s, "wait_for_home", restore
        )
        info = yield Do(partial(client.store.sandbox, sandbox_id))
        if info is not None and info.restored is not None and info.restored.checkpoint_id == restore["checkpoint"]:
            return sandbox_id
        yield from provider._release(sandbox_id, all_of_them=False)
        if time.monotonic() >= until:
            raise NotStarted(f"others kept acquiring thread {identity.thread_id} meanwhile", retry_after_s=1.0)


def _living(client: Client, identity: Identity) -> SandboxInfo | None:
    for sandbox_id in sandbox_id_candidates(identity.digest)[:2]:
        info = client.store.sandbox(sandbox_id)
        if info is not None and (info.thread_id, info.user_id) == (identity.thread_id, identity.user_id):
            return info
    return None
