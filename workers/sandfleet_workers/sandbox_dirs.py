"""Where a node's sandboxes keep their files, and what it wrote down about them before it touched them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandfleet.errors import InternalError, SandfleetError, StartFailed
from sandfleet.ids import Identity
from sandfleet.trees import remove_tree
from sandfleet_workers.entries import Entry
from sandfleet_workers.holders import Holder, give_up_thread, hold_thread
from sandfleet_workers.journal import Journal
from sandfleet_workers.quota import Quotas
from sandfleet_workers.slots import Slots, rename_problem, settle

__all__ = ["SandboxDirs", "thread_directory"]

log = logging.getLogger("sandfleet.node")

_CHILDREN = ("workspace", "uploads", "outputs")


def thread_directory(data_root: Path, identity: Identity) -> Path:
    """Where a thread's data lies: ``threads/{thread}`` or ``users/{user}/threads/{thread}``, then ``user-data``."""
    base = data_root if identity.user_id is None else data_root / "users" / identity.user_id
    return base / "threads" / identity.thread_id / "user-data"


class SandboxDirs:
    """The directories of one node's sandboxes: threads' data, slots, and the journal. Thread-safe.

    Args:
        data_root: Where threads' data lies.
        node_id: Whose slots and journal.
        max_bytes, max_inodes: What a thread's data may occupy, where the file system keeps quotas; 0: no limit.
    """

    def __init__(self, data_root: Path, node_id: str, *, max_bytes: int = 0, max_inodes: int = 0) -> None:
        self.data_root = data_root
        self.node_dir = data_root / "nodes" / node_id
        self._node_id = node_id
        self._slots = Slots(self.node_dir, uid=None)
        self._journal = Journal(self.node_dir)
        self._limits = (max_bytes, max_inodes)
        self._quotas = Quotas(data_root) if max_bytes or max_inodes else None
        if self._quotas is not None and not self._quotas.available:
            log.error("quotas.off", extra={"node_id": node_id, "reason": self._quotas.problem})
            self._quotas = None

    def user_data(self, identity: Identity) -> Path:
        """The thread's directory with its three children, made where missing.

        Raises:
            StartFailed: It cannot be made (``reason`` disk or data_unusable).
        """
        path = thread_directory(self.data_root, identity)
        try:
            settle(path.parent)
            for child in _CHILDREN:
                (path / child).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            log.warning("sandbox.no_directory", extra={"path": str(path), "error": str(exc)})
            reason = "disk" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "data_unusable"
            raise StartFailed(f"the thread's directory cannot be made: {exc.strerror}", reason=reason) from exc
        self._limit(path.parent)
        return path

    def remove_data(self, identity: Identity) -> None:
        """Remove all that a thread has; what its sandbox planted there (links, odd names) goes too, never followed.

        Raises:
            InternalError: ``reason`` data_left: something is still there.
        """
        path = thread_directory(self.data_root, identity).parent
        if path.is_symlink():
            return
        try:
            remove_tree(path)
        except OSError as exc:
            problem = f"the thread's data cannot be removed whole: {exc.strerror}"
            raise InternalError(problem, reason="data_left") from exc

    def _limit(self, thread_dir: Path) -> None:
        if self._quotas is not None:
            self._quotas.apply(thread_dir, max_bytes=self._limits[0], max_inodes=self._limits[1])

    # --- what outlives this run --------------------------------------------------------------

    def hold(
        self,
        identity: Identity,
        epoch: int,
        backend: str,
        end: Callable[[Holder], None],
        *,
        container: str = "",
    ) -> None:
        """This node is about to run a sandbox on the thread's data, or knows more of it: see `hold_thread`.

        Raises:
            NotStarted, StartFailed: As of `hold_thread`, and whatever ``end`` raised.
        """
        holder = Holder(self._node_id, backend, epoch, container)
        hold_thread(thread_directory(self.data_root, identity).parent, holder, end)

    def note(self, entry: Entry) -> None:
        """Write down a sandbox that may outlive this run, before anybody may rely on it.

        Raises:
            StartFailed: ``reason`` journal.
        """
        self._journal.write(entry.name, entry.to_wire())

    def note_stopping(self, entry: Entry) -> None:
        """It is to end, whoever comes next. Never raises: the registry says so, too."""
        try:
            self._journal.write(entry.name, replace(entry, stopping=True).to_wire())
        except StartFailed as exc:
            log.warning("journal.stop_not_written", extra={"sandbox_id": entry.sandbox_id, "error": str(exc)})

    def forget(self, entry: Entry) -> None:
        """It has ended for sure."""
        if entry.slot is not None:
            self.remove_slot(entry.slot)
        else:
            self._journal.remove(entry.name)
        give_up_thread(thread_directory(self.data_root, entry.identity).parent, entry.epoch)

    def entries(self) -> dict[str, Entry]:
        """What an earlier run wrote down of sandboxes that it had completely, by the journal's names. What makes no
        sense is set aside and logged."""
        found = {}
        for name, data in self._journal.read().items():
            if "v" not in data:
                continue  # a slot: blank, or on its way to a thread
            try:
                entry = Entry.from_wire(data)
                if entry.name != name:
                    raise ValueError("it belongs under another name")
            except ValueError as exc:
                self._journal.set_aside(name, exc)
            else:
                found[name] = entry
        return found

    # --- slots -------------------------------------------------------------------------------

    def claim_problem(self) -> str:
        """Why a blank sandbox's directories cannot become a thread's here; empty when they can."""
        return rename_problem(self.node_dir, self.data_root)

    def make_slot(self, slot: str) -> Path:
        """The directories of a blank sandbox, written down first.

        Raises:
            StartFailed: They cannot be made.
        """
        self._journal.write(slot, {"slot": slot})
        return self._slots.make(slot)

    def claim(self, slot: str, identity: Identity, facts: Mapping[str, Any]) -> None:
        """The slot's directories become the thread's, with all that the thread has. Written down before anything moves.

        Raises:
            StartFailed: It cannot be done; what has moved is in its place again after the next `user_data`.
        """
        thread_dir = thread_directory(self.data_root, identity).parent
        entry = {**facts, "slot": slot, "user": identity.user_id, "thread": identity.thread_id}
        self._journal.write(slot, entry)
        Slots(self.node_dir, uid=self._works_as(slot)).claim(slot, thread_dir)
        self._limit(thread_dir)

    def _works_as(self, slot: str) -> int | None:
        """Who works in the slot's sandbox: its backend gave that user the directories."""
        try:
            uid = os.lstat(self.node_dir / "slots" / slot / "user-data" / "workspace").st_uid
        except OSError as exc:
            raise StartFailed(f"the slot {slot} cannot be read: {exc.strerror}", reason="slot_gone") from exc
        return None if uid == os.geteuid() else uid

    def remove_slot(self, slot: str) -> None:
        """The slot's own directory goes; a thread's data that became its stays."""
        self._slots.remove(slot)
        self._journal.remove(slot)

    def recover(self, keep: Collection[str] = ()) -> None:
        """Put in order what an earlier run of this node left: claims are completed, slots and entries removed.

        Nothing of that run may be alive any more, but for the sandboxes of the entries ``keep``.
        """
        entries, slots = self._journal.read(), self._slots.names()
        for slot in sorted({*slots, *entries}.difference(keep)):
            entry = entries.get(slot, {})
            try:
                if entry.get("thread"):
                    settle(thread_directory(self.data_root, Identity(entry["thread"], entry.get("user"))).parent)
            except (SandfleetError, TypeError) as exc:
                # The thread's next sandbox is refused for the same reason, and told.
                log.error("slot.not_recovered", extra={"slot": slot, "error": f"{type(exc).__name__}: {exc}"})
            if slot in slots:
                self._slots.remove(slot)
            self._journal.remove(slot)
