"""What an agent does in its sandbox: seven tools, and what an agent framework needs around them.

::

    from sandfleet.tools import SandboxMiddleware, ToolRuntime, get_tools

    runtime = ToolRuntime(context={"thread_id": "t1"})
    bash, *_ = get_tools()
    print(bash(runtime, "look around", "ls -la"))
    SandboxMiddleware().after_agent(runtime.state, runtime)

A tool takes a `Runtime` (LangGraph's has the right form) and gives a text; it acquires the thread's sandbox on first
use. Failures are texts that begin with ``Error:``; the texts are in docs/tools.md.
"""

from __future__ import annotations

from sandfleet.tools.catalog import (
    bash_tool,
    get_tools,
    glob_tool,
    grep_tool,
    ls_tool,
    present_files,
    read_file_tool,
    str_replace_tool,
    write_file_tool,
)
from sandfleet.tools.holding import ensure_sandbox_initialized, ensure_sandbox_initialized_async
from sandfleet.tools.locks import FileOperationLock, get_file_operation_lock
from sandfleet.tools.middleware import SandboxMiddleware
from sandfleet.tools.paths import IGNORE_PATTERNS
from sandfleet.tools.runtime import Runtime, ToolRuntime
from sandfleet.tools.surface import Tool
from sandfleet.tools.uploads import list_outputs, list_outputs_async, upload_to_thread, upload_to_thread_async

__all__ = [
    "IGNORE_PATTERNS",
    "FileOperationLock",
    "Runtime",
    "SandboxMiddleware",
    "Tool",
    "ToolRuntime",
    "bash_tool",
    "ensure_sandbox_initialized",
    "ensure_sandbox_initialized_async",
    "get_file_operation_lock",
    "get_tools",
    "glob_tool",
    "grep_tool",
    "list_outputs",
    "list_outputs_async",
    "ls_tool",
    "present_files",
    "read_file_tool",
    "str_replace_tool",
    "upload_to_thread",
    "upload_to_thread_async",
    "write_file_tool",
]
