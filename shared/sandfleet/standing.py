"""What concerns a thread rather than one running sandbox: stopping and starting it, its uploads and its outputs."""

from __future__ import annotations

import io
import logging
import os
import posixpath
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from sandfleet import calls
from sandfleet.client import Answer, Call, Client, Target
from sandfleet.errors import AlreadyExists, InvalidArgument, SandboxLost, SandboxNotFound, SandfleetError
from sandfleet.ids import Identity
from sandfleet.model import FileInfo
from sandfleet.partial import Listed
from sandfleet.steps import Do, Steps, aside, drive
from sandfleet.transfer import Caller, Tally, open_regular, send

if TYPE_CHECKING:
    from sandfleet.provider import SandboxProvider

__all__ = ["OUTPUTS", "UPLOADS", "list_outputs", "start", "stop", "upload_to_thread", "with_thread"]

UPLOADS, OUTPUTS = "/mnt/user-data/uploads", "/mnt/user-data/outputs"
_NAMES_TRIED = 1000
_MOST_OUTPUTS = 100_000
#: A file name has 255 bytes at most, and ours may get ``-999`` appended.
_LONGEST_NAME = 250

log = logging.getLogger("sandfleet.client")

T = TypeVar("T")


# --- one sandbox -----------------------------------------------------------------------------


def stop(provider: SandboxProvider, target: Target) -> Steps[None]:
    """`Sandbox.stop`."""
    client: Client = yield Do(provider._client)
    try:
        # Kept in the handle: once the sandbox is gone the registry may not tell any more whose it was.
        yield Do(lambda: client.identity_of(target))
        yield from provider._destroy(target.sandbox_id, False)
    except (SandboxNotFound, SandboxLost):
        pass
    target.route = None


def start(provider: SandboxProvider, target: Target) -> Steps[None]:
    """`Sandbox.start`."""
    client: Client = yield Do(provider._client)
    identity: Identity = yield Do(lambda: client.identity_of(target))
    before = client.holds[target.sandbox_id]
    sandbox_id = yield from provider._acquire(identity.thread_id, identity.user_id, None)
    # As many holds as before. What was counted of a sandbox that is gone counts no more: then this one is the first.
    if before and client.holds[sandbox_id] > before:
        yield from provider._release(sandbox_id, all_of_them=False)
    target.sandbox_id, target.route = sandbox_id, provider._target(sandbox_id).route


# --- a thread's files ------------------------------------------------------------------------


def upload_to_thread(
    provider: SandboxProvider,
    thread_id: str,
    name: str,
    data: bytes | str | os.PathLike[str],
    *,
    user_id: str | None,
) -> Steps[str]:
    """`SandboxProvider.upload_to_thread`."""
    check_name(name)
    source: Callable[[], BinaryIO] = (
        partial(io.BytesIO, data) if isinstance(data, bytes) else partial(open_regular, Path(data), follow=True)
    )
    # Opened before anything is acquired: a missing file starts no sandbox.
    stream: BinaryIO = yield Do(source)
    try:
        return (yield from with_thread(provider, thread_id, user_id, lambda call: _put_new(call, stream, name)))
    finally:
        stream.close()


def list_outputs(provider: SandboxProvider, thread_id: str, *, user_id: str | None) -> Steps[list[FileInfo]]:
    """`SandboxProvider.list_outputs`."""

    def listed(call: Caller) -> Steps[list[FileInfo]]:
        wanted = {"path": OUTPUTS, "max_depth": 64, "max_entries": _MOST_OUTPUTS}
        found = calls.entries((yield from call(Call("list_dir", wanted))), OUTPUTS, 64)
        return Listed([entry for entry in found if entry.type == "file"], unread=getattr(found, "unread", 0))

    return (yield from with_thread(provider, thread_id, user_id, listed))


def check_name(name: str) -> str:
    """``name`` if it is the name of a file and nothing more.

    Raises:
        InvalidArgument: Empty, ``.``, ``..``, too long, or with a slash, backslash, NUL or control character.
    """
    plain = not any(char in "/\\" or ord(char) < 32 or ord(char) == 127 for char in name)
    if name in ("", ".", "..") or not plain or len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        raise InvalidArgument(
            f"{name[:80]!r} is no file name: 1-{_LONGEST_NAME} bytes without slashes and control characters",
            argument="name",
        )
    return name


def _put_new(call: Caller, stream: BinaryIO, name: str) -> Steps[str]:
    stem, extension = posixpath.splitext(name)
    for number in range(_NAMES_TRIED):
        path = f"{UPLOADS}/{name if not number else f'{stem}-{number}{extension}'}"
        try:
            yield Do(lambda: stream.seek(0))
            yield from send(call, stream, path, mode=None, tally=Tally(None, None), overwrite=False)
        except AlreadyExists:
            continue
        return path
    raise AlreadyExists(f"{_NAMES_TRIED} uploads are called like {name[:80]!r}", path=f"{UPLOADS}/{name}")


def with_thread(
    provider: SandboxProvider, thread_id: str, user_id: str | None, work: Callable[[Caller], Steps[T]]
) -> Steps[T]:
    """Do something in the thread's sandbox, held for as long as it takes."""
    identity = Identity(thread_id, user_id)
    client: Client = yield Do(provider._client)
    sandbox_id = yield from provider._acquire(thread_id, user_id, None)
    target = replace(provider._target(sandbox_id), identity=identity)

    def call(one: Call) -> Steps[Answer]:
        return client.call(target, one)

    try:
        result = yield from work(call)
    except Exception:
        try:
            yield from provider._release(sandbox_id, all_of_them=False)
        except SandfleetError:
            pass  # the hold ends with its time to live; what went wrong first is what matters
        raise
    except BaseException:
        # Cancelled: without this the sandbox would stay held, and renewed, for as long as this process lives.
        aside(lambda: _release_quietly(provider, client, sandbox_id))
        raise
    yield from provider._release(sandbox_id, all_of_them=False)
    return result


def _release_quietly(provider: SandboxProvider, client: Client, sandbox_id: str) -> None:
    if sandbox_id not in client.holds:
        return  # the provider was shut down meanwhile, and must not connect anew
    try:
        drive(provider._release(sandbox_id, all_of_them=False))
    except SandfleetError as exc:
        log.info("provider.release_failed", extra={"sandbox_id": sandbox_id, "error": str(exc)[:200]})
