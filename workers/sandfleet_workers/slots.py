"""The directories of a blank sandbox, and how they become a thread's.

A *slot* is what a blank container mounts: ``slots/<slot>/user-data`` and ``…/acp-workspace``, empty. A bind mount
follows the directory, not its name, so a claim moves the directories themselves, and the container has the thread's
data from that moment on:

1. the slot's directory is renamed to ``<thread>/user-data.<slot>``, and a link is left in its place, because Docker
   looks its mounts up by name when a container is restarted;
2. what the thread has in ``<thread>/user-data`` is renamed into it, entry by entry;
3. it is renamed to ``<thread>/user-data``, over the directory that is empty by now.

After each of these calls the names alone tell what is left to do, and a thread's data is never anywhere but in the
thread's own directory: whoever is next (this slot again, another one, `settle`) completes it, and a slot can be
removed at any time. A plain `rename` does it all, since it replaces empty directories and refuses full ones.

Below its directory a thread's data was written by a sandbox, so it is touched through descriptors only, and no link in
it is followed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sandfleet.errors import StartFailed
from sandfleet.trees import remove_tree
from sandfleet_workers.backends import local_dirs

__all__ = ["DIRECTORIES", "Slots", "rename_problem", "settle"]

log = logging.getLogger("sandfleet.node")

#: What a container mounts of its thread.
DIRECTORIES = ("user-data", "acp-workspace")

_USER_DATA = DIRECTORIES[0]
#: A file of the slot that tells which directories were made for it, whatever their names by now.
_INODES = "inodes"
_SLOT = re.compile(r"[0-9a-f]{8,64}")
_ON_ITS_WAY = re.compile(rf"({'|'.join(DIRECTORIES)})\.[0-9a-f]{{8,64}}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REASONS = {errno.ENOSPC: "disk", errno.EDQUOT: "disk", errno.EXDEV: "rename", errno.EINVAL: "rename"}


class Slots:
    """The slots of one node. Thread-safe for different slots and threads.

    Args:
        node_dir: The node's own directory; the slots lie below it.
        uid: Who works in the containers and owns workspace, uploads and outputs. The directories above them stay with
            the worker's user, so that no sandbox renames or replaces them. None (a worker that is not root) leaves
            everything with the worker.
    """

    def __init__(self, node_dir: Path, *, uid: int | None) -> None:
        self._path = node_dir / "slots"
        self._uid = uid

    def make(self, slot: str) -> Path:
        """A new slot, empty, ready to be mounted: returns ``slots/<slot>``.

        Raises:
            StartFailed: ``reason`` disk or data_unusable; nothing is left behind.
        """
        path = self._at(slot)
        with _told(f"the slot {slot} cannot be made"):
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
            try:
                for name in DIRECTORIES:
                    (path / name).mkdir()
                    (path / name).chmod(0o755)
                inodes = " ".join(str((path / name).stat().st_ino) for name in DIRECTORIES)
                (path / _INODES).write_text(inodes)
                os.close(local_dirs.open_user_data(path / _USER_DATA, self._uid))
            except (OSError, StartFailed):
                self.remove(slot)
                raise
        return path

    def claim(self, slot: str, thread_dir: Path) -> None:
        """Give a thread the slot's directories: afterwards ``thread_dir``'s user-data and acp-workspace are those that
        the slot's container has mounted, and hold all that the thread has.

        May be repeated, and must be after a failure or a crash, unless `settle` or another slot's claim comes first:
        until then a part of the data may lie in ``user-data.<slot>`` beside its place. Nobody may work in the thread's
        directories meanwhile.

        Args:
            slot: One that was made and given to nobody else.
            thread_dir: The directory that holds the thread's ``user-data``; made if missing.

        Raises:
            StartFailed: ``reason`` slot_dirty (it is not empty), slot_gone (also when another slot has taken over
                since), slot_taken (by another thread), disk, rename (not one file system), data_conflict, or
                data_unusable (something lies in a directory's place).
        """
        thread_dir = thread_dir.absolute()
        with _told(f"the slot {slot} cannot be given to the thread"), ExitStack() as held:
            source, inodes = _opened_slot(self._at(slot), slot, held)
            thread_dir.mkdir(parents=True, exist_ok=True)
            thread = _opened(thread_dir, held)
            blank = [name for name in DIRECTORIES if _is_blank(name, slot, source, thread, thread_dir)]
            for name in blank:
                os.rename(name, f"{name}.{slot}", src_dir_fd=source, dst_dir_fd=thread)
            _settle(thread, thread_dir, but=slot)
            for name, inode in zip(DIRECTORIES, inodes, strict=True):
                if not _exists(name, source):
                    os.symlink(thread_dir / name, name, dir_fd=source)
                _bring(name, f"{name}.{slot}", thread, thread_dir, self._uid)
                if os.stat(name, dir_fd=thread, follow_symlinks=False).st_ino != inode:
                    raise StartFailed(f"another sandbox has taken over from the slot {slot}", reason="slot_gone")

    def remove(self, slot: str) -> None:
        """Remove the slot's directory; what its links lead to is the thread's and stays. A missing one is fine."""
        local_dirs.remove_tree(self._at(slot))

    def names(self) -> list[str]:
        """The slots there are, claimed or not."""
        try:
            with os.scandir(self._path) as entries:
                return sorted(e.name for e in entries if _SLOT.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def _at(self, slot: str) -> Path:
        if not _SLOT.fullmatch(slot):
            raise ValueError(f"{slot!r} names no slot: 8 to 64 hex digits do")
        return self._path / slot


def settle(thread_dir: Path) -> None:
    """Complete what a crash interrupted: all data of the thread is in its directories again.

    To be called before a thread's directories are used by other means than a claim. Costs a look when there is nothing
    to do.

    Raises:
        StartFailed: As of `Slots.claim`.
    """
    with _told("the thread's directories cannot be put in order"), ExitStack() as held:
        try:
            thread = _opened(thread_dir, held)
        except FileNotFoundError:
            return
        _settle(thread, thread_dir)


def rename_problem(node_dir: Path, data_root: Path) -> str:
    """Why slots of ``node_dir`` cannot be given to threads of ``data_root``, or nothing when they can: it is tried.

    Both must be on one mount of one file system, which bind mounts of parts of it are not.
    """
    slot = secrets.token_hex(16)
    slots = Slots(node_dir, uid=None)
    for home in (data_root / "threads", data_root / "users"):
        # No thread's or user's id begins with a dot.
        thread_dir = home / f".probe-{slot}"
        try:
            _try_claim(slots, slot, thread_dir)
        except StartFailed as exc:
            hint = "; keep all of data_root on one mount" if exc.facts["reason"] == "rename" else ""
            return f"no blank sandboxes for {home}: {exc.message}{hint}, or set blank_pool: 0"
        except OSError as exc:
            return f"no blank sandboxes for {home}: {exc.strerror} ({exc.filename}); check data_root, or blank_pool: 0"
        finally:
            slots.remove(slot)
            remove_tree(thread_dir, ignore_errors=True)
    return ""


def _try_claim(slots: Slots, slot: str, thread_dir: Path) -> None:
    """Claim for a thread that has data, and see that what was opened before follows."""
    with ExitStack() as held:
        mounted = _opened(slots.make(slot) / _USER_DATA, held)
        (thread_dir / _USER_DATA / "workspace").mkdir(parents=True)
        (thread_dir / _USER_DATA / "workspace" / "probe").write_bytes(b"")
        slots.claim(slot, thread_dir)
        for directory in (mounted, _opened(thread_dir / _USER_DATA, held)):
            os.stat("workspace/probe", dir_fd=directory)


# --- the steps of a claim --------------------------------------------------------------------


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors of the system, as `StartFailed`."""
    try:
        yield
    except OSError as exc:
        reason = _REASONS.get(exc.errno or 0, "data_unusable")
        at = f" ({exc.filename})" if exc.filename is not None else ""
        raise StartFailed(f"{what}: {exc.strerror}{at}", reason=reason) from exc


def _opened(path: Path | str, held: ExitStack, parent: int | None = None) -> int:
    fd = os.open(path, _DIRECTORY, dir_fd=parent)
    held.callback(os.close, fd)
    return fd


def _opened_slot(path: Path, slot: str, held: ExitStack) -> tuple[int, list[int]]:
    try:
        return _opened(path, held), [int(word) for word in (path / _INODES).read_text().split()]
    except FileNotFoundError:
        raise StartFailed(f"there is no slot {slot}", reason="slot_gone") from None


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_blank(name: str, slot: str, source: int, thread: int, thread_dir: Path) -> bool:
    """Whether the slot's directory still is where it was made; then it is empty. Otherwise this thread has it.

    Raises:
        StartFailed: Neither.
    """
    try:
        link = os.readlink(name, dir_fd=source)
    except FileNotFoundError:
        if not _exists(f"{name}.{slot}", thread):
            raise StartFailed(f"the slot {slot} has no {name} any more", reason="slot_gone") from None
        return False
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # which says that it is no link
            raise
    else:
        if link != str(thread_dir / name):
            raise StartFailed(f"the slot {slot} belongs to another thread", reason="slot_taken")
        return False
    with ExitStack() as held:
        top = _opened(name, held, source)
        children = set(local_dirs.CHILDREN) if name == _USER_DATA else set()
        if set(os.listdir(top)) != children or any(os.listdir(_opened(child, held, top)) for child in children):
            raise StartFailed(f"the slot {slot} is not empty; it is for nobody", reason="slot_dirty")
    return True


def _settle(thread: int, thread_dir: Path, but: str | None = None) -> None:
    """What was on its way into the thread's directory when its node died goes to its place."""
    for sent in sorted(os.listdir(thread)):
        found = _ON_ITS_WAY.fullmatch(sent)
        if found is not None and sent != f"{found[1]}.{but}":
            log.warning("slot.claim_was_interrupted", extra={"path": str(thread_dir / sent)})
            _bring(found[1], sent, thread, thread_dir, None)


def _bring(name: str, sent: str, thread: int, thread_dir: Path, uid: int | None) -> None:
    """Make the directory that was sent the thread's, with all that the thread has."""
    if not _exists(sent, thread):
        return  # an earlier try got that far
    with ExitStack() as held:
        if _exists(name, thread):
            present = _opened(name, held, thread)
            if name == _USER_DATA:
                # Everything is given to its new owner here, where it is found again after a crash.
                os.close(local_dirs.open_user_data(thread_dir / name, uid))
            new = _opened(sent, held, thread)
            _pour(present, new)
            _make_alike(present, new)
        os.rename(sent, name, src_dir_fd=thread, dst_dir_fd=thread)


def _pour(source: int, target: int) -> None:
    """Move each entry of one directory into another; nothing there is replaced but an empty directory by another."""
    for entry in os.listdir(source):
        status = os.stat(entry, dir_fd=source, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) and _exists(entry, target):
            raise _conflict(entry)
        try:
            _move(entry, source, target, status)
        except OSError as exc:
            if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            # The full one of the two stays: an earlier try brought it.
            _remove_empty(entry, source)


def _move(entry: str, source: int, target: int, status: os.stat_result) -> None:
    try:
        os.rename(entry, entry, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:
        # A directory changes its parent, and that takes the right to write in it, which its owner gave away.
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_IWUSR:
            raise
        with ExitStack() as held:
            directory = _opened(entry, held, source)
            os.fchmod(directory, status.st_mode | stat.S_IWUSR)
            os.rename(entry, entry, src_dir_fd=source, dst_dir_fd=target)
            os.fchmod(directory, status.st_mode)


def _remove_empty(entry: str, parent: int) -> None:
    try:
        os.rmdir(entry, dir_fd=parent)
    except OSError as exc:
        raise _conflict(entry) from exc


def _conflict(entry: str) -> StartFailed:
    return StartFailed(
        f"a claim was interrupted and somebody used the thread's directory before it was completed: there are two "
        f"{entry!r}, in it and in the one beside it whose name ends with the slot; merge them by hand",
        reason="data_conflict",
    )


def _make_alike(old: int, new: int) -> None:
    """Owner and mode of a directory are the thread's too: an agent of another user may write its ACP workspace."""
    wanted, found = os.fstat(old), os.fstat(new)
    if (wanted.st_uid, wanted.st_gid) != (found.st_uid, found.st_gid):
        os.fchown(new, wanted.st_uid, wanted.st_gid)
    if stat.S_IMODE(wanted.st_mode) != stat.S_IMODE(found.st_mode):
        os.fchmod(new, stat.S_IMODE(wanted.st_mode))
