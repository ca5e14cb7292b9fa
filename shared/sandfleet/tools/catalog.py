"""The seven tools, and which of them an agent gets."""

from __future__ import annotations

from typing import Any

from sandfleet.config import Settings
from sandfleet.provider import get_sandbox_provider
from sandfleet.tools import arguments, bodies
from sandfleet.tools.runtime import host_bash_refused, settings_of
from sandfleet.tools.surface import Tool

__all__ = [
    "bash_tool",
    "get_tools",
    "glob_tool",
    "grep_tool",
    "ls_tool",
    "present_files",
    "read_file_tool",
    "str_replace_tool",
    "write_file_tool",
]

bash_tool = Tool(
    "bash",
    "Run a bash command line in the sandbox, a Linux environment. It starts in /mnt/user-data/workspace in a fresh "
    "shell: cd and exports do not persist, so chain what belongs together with &&. Long output loses its middle; "
    "write it to a file and read that in parts. Start long-lived processes in the background with their output in a "
    "file. User files are in /mnt/user-data/uploads, what the user shall get belongs into /mnt/user-data/outputs.",
    arguments.BashArguments,
    bodies.bash,
    bodies.BASH_FAILURES,
)

ls_tool = Tool(
    "ls",
    "List a directory up to two levels deep: one absolute path per line, directories end with a slash. Version "
    "control, dependencies, build results, caches and logs are left out.",
    arguments.LsArguments,
    bodies.ls,
    bodies.LS_FAILURES,
)

glob_tool = Tool(
    "glob",
    "Find files below a directory by a pattern such as *.py or src/**/*.ts. Use it instead of find.",
    arguments.GlobArguments,
    bodies.glob,
    bodies.GLOB_FAILURES,
)

grep_tool = Tool(
    "grep",
    "Search the lines of a file, or of the text files below a directory, for a regular expression. Gives file, line "
    "number and line. Use it instead of grep in bash. Not searched: files above 1 MB, lines above 2000 characters.",
    arguments.GrepArguments,
    bodies.grep,
    bodies.GREP_FAILURES,
)

read_file_tool = Tool(
    "read_file",
    "Read a text file, or the lines start_line to end_line of it. A long answer ends with the start_line to go on "
    "with.",
    arguments.ReadFileArguments,
    bodies.read_file,
    bodies.READ_FAILURES,
)

write_file_tool = Tool(
    "write_file",
    "Write a text to a file and create its directories; what the file held is replaced unless append is set. Prefer "
    "str_replace for a change to an existing file.",
    arguments.WriteFileArguments,
    bodies.write_file,
    bodies.WRITE_FAILURES,
)

str_replace_tool = Tool(
    "str_replace",
    "Replace a text in a file by another. old_str must occur exactly once, or replace_all must be set.",
    arguments.StrReplaceArguments,
    bodies.str_replace,
    bodies.REPLACE_FAILURES,
)

present_files = Tool(
    "present_files",
    "Show files to the user. Only files below /mnt/user-data/outputs can be presented: move them there first.",
    arguments.PresentFilesArguments,
    bodies.present_files,
    bodies.PRESENT_FAILURES,
)


def get_tools(settings: Settings | None = None, *, provider: Any = None) -> list[Tool]:
    """The tools an agent may have: all seven, without ``bash`` where commands are refused (host mode not allowed).

    Args:
        settings: Limits of the tools; the provider's settings by default.
        provider: Whose sandboxes they work in; by default the runtime's or the process' provider, at each call.
    """
    provider = getattr(provider, "_sync", provider)
    tools = [bash_tool, ls_tool, glob_tool, grep_tool, read_file_tool, write_file_tool, str_replace_tool]
    # Making the process' provider does no I/O, and it is what unbound tools will use.
    serving = provider if provider is not None else get_sandbox_provider()
    if host_bash_refused(settings or settings_of(serving), serving):
        tools.remove(bash_tool)
    return [tool.bound(provider=provider, settings=settings) for tool in tools]
