"""sandfleet: sandboxes for AI agents on a fleet of ordinary machines.

An agent backend imports this package and nothing else::

    from sandfleet import SandboxProvider

    with SandboxProvider(redis_url="redis://127.0.0.1:6379/0") as provider:
        sandbox = provider.get(provider.acquire("thread-1"))
        print(sandbox.execute_command("echo hello"))
"""

from __future__ import annotations

from sandfleet.aio import AsyncSandbox, AsyncSandboxProvider
from sandfleet.checkpoints import Checkpoint, Restoration
from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity
from sandfleet.jobs import AsyncJob, Job
from sandfleet.model import (
    CommandResult,
    FileInfo,
    GrepMatch,
    Health,
    JobState,
    JobStatus,
    NodeView,
    OutputChunk,
    OutputEnd,
    OutputGap,
    Process,
    SandboxInfo,
    SandboxMetrics,
    SandboxSpec,
    SandboxState,
    TextRead,
)
from sandfleet.provider import (
    SandboxProvider,
    get_sandbox_provider,
    reset_sandbox_provider,
    set_sandbox_provider,
    shutdown_sandbox_provider,
)
from sandfleet.sandbox import Batch, Sandbox
from sandfleet.transfer import Transfer

__version__ = "0.1.0"

__all__ = [
    "AsyncJob",
    "AsyncSandbox",
    "AsyncSandboxProvider",
    "Batch",
    "Checkpoint",
    "CommandResult",
    "FileInfo",
    "GrepMatch",
    "Health",
    "Identity",
    "Job",
    "JobState",
    "JobStatus",
    "NodeView",
    "OutputChunk",
    "OutputEnd",
    "OutputGap",
    "Process",
    "Restoration",
    "Sandbox",
    "SandboxInfo",
    "SandboxMetrics",
    "SandboxProvider",
    "SandboxSpec",
    "SandboxState",
    "SandfleetError",
    "Settings",
    "TextRead",
    "Transfer",
    "__version__",
    "get_sandbox_provider",
    "reset_sandbox_provider",
    "set_sandbox_provider",
    "shutdown_sandbox_provider",
]
