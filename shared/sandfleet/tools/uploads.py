"""Files between a user and a thread: uploads go in before the agent runs, outputs come out after."""

from __future__ import annotations

from os import PathLike
from typing import Any

from sandfleet.aio import AsyncSandboxProvider
from sandfleet.model import FileInfo
from sandfleet.provider import get_sandbox_provider

__all__ = ["list_outputs", "list_outputs_async", "upload_to_thread", "upload_to_thread_async"]


def upload_to_thread(
    thread_id: str,
    name: str,
    data: bytes | str | PathLike[str],
    *,
    user_id: str | None = None,
    provider: Any = None,
) -> str:
    """Put a file into the thread's uploads; its path in the sandbox, which tells the name it got.

    Args:
        thread_id: Whose uploads.
        name: A plain file name. One that is taken already gets a number.
        data: The bytes, or the path of a local file.
        user_id: The thread's user.
        provider: Where; the process' provider by default.

    Raises:
        InvalidArgument: The name is a path, empty, or has control characters.
    """
    return str(_sync(provider).upload_to_thread(thread_id, name, data, user_id=user_id))


async def upload_to_thread_async(
    thread_id: str,
    name: str,
    data: bytes | str | PathLike[str],
    *,
    user_id: str | None = None,
    provider: Any = None,
) -> str:
    """`upload_to_thread` for event loops."""
    return str(await _async(provider).upload_to_thread(thread_id, name, data, user_id=user_id))


def list_outputs(thread_id: str, *, user_id: str | None = None, provider: Any = None) -> list[FileInfo]:
    """The files in the thread's outputs directory."""
    found: list[FileInfo] = _sync(provider).list_outputs(thread_id, user_id=user_id)
    return found


async def list_outputs_async(thread_id: str, *, user_id: str | None = None, provider: Any = None) -> list[FileInfo]:
    """`list_outputs` for event loops."""
    found: list[FileInfo] = await _async(provider).list_outputs(thread_id, user_id=user_id)
    return found


def _sync(provider: Any) -> Any:
    provider = provider or get_sandbox_provider()
    return getattr(provider, "_sync", provider)


def _async(provider: Any) -> Any:
    return AsyncSandboxProvider.over(_sync(provider))
