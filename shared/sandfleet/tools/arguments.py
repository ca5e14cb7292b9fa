"""The arguments of the tools, as a model sees them: names, meanings, defaults. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandfleet.errors import InvalidArgument

__all__ = [
    "BashArguments",
    "GlobArguments",
    "GrepArguments",
    "LsArguments",
    "PresentFilesArguments",
    "ReadFileArguments",
    "StrReplaceArguments",
    "WriteFileArguments",
    "parse",
    "schema_of",
]

_Description = Annotated[
    str, Field(description="Why you do this, in a few words, for the person who watches. ALWAYS give it first.")
]
_Path = Annotated[str, Field(min_length=1, description="Absolute path, such as /mnt/user-data/workspace/notes.md.")]
_Directory = Annotated[str, Field(min_length=1, description="Absolute path of the directory.")]


class _Arguments(BaseModel):
    """Base: an argument nobody knows is an error, which tells a model that it was misspelt."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BashArguments(_Arguments):
    """Arguments of bash."""

    description: _Description
    command: str = Field(description="The command line. It starts in /mnt/user-data/workspace, in a fresh shell.")


class LsArguments(_Arguments):
    """Arguments of ls."""

    description: _Description
    path: _Directory


class GlobArguments(_Arguments):
    """Arguments of glob."""

    description: _Description
    pattern: str = Field(
        description="Pattern relative to path. Without a slash it matches names at any depth; ** is any directories."
    )
    path: _Directory
    include_dirs: bool = Field(default=False, description="Whether directories are found too.")
    max_results: int = Field(default=200, description="How many paths are shown at most.")


class GrepArguments(_Arguments):
    """Arguments of grep."""

    description: _Description
    pattern: str = Field(description="Regular expression (Python's), matched line by line.")
    path: str = Field(min_length=1, description="Absolute path of a directory, or of one file.")
    glob: str | None = Field(default=None, description="Only files that match this pattern, such as *.py.")
    literal: bool = Field(default=False, description="Take the pattern as plain text.")
    case_sensitive: bool = Field(default=False, description="Whether upper and lower case differ.")
    max_results: int = Field(default=100, description="How many matches are shown at most.")


class ReadFileArguments(_Arguments):
    """Arguments of read_file."""

    description: _Description
    path: _Path
    start_line: int | None = Field(default=None, description="First line, counted from 1.")
    end_line: int | None = Field(default=None, description="Last line, included.")


class WriteFileArguments(_Arguments):
    """Arguments of write_file."""

    description: _Description
    path: _Path
    content: str = Field(description="The text. ALWAYS the whole file, unless you append.")
    append: bool = Field(default=False, description="Add to the end of the file and keep what it holds.")


class StrReplaceArguments(_Arguments):
    """Arguments of str_replace."""

    description: _Description
    path: _Path
    old_str: str = Field(description="The text to be replaced, exactly as it is in the file, in one place only.")
    new_str: str = Field(description="What takes its place.")
    replace_all: bool = Field(default=False, description="Replace every occurrence.")


class PresentFilesArguments(_Arguments):
    """Arguments of present_files."""

    paths: list[str] = Field(min_length=1, description="Absolute paths below /mnt/user-data/outputs.")


def parse(tool: str, model: type[BaseModel], arguments: Any) -> Any:
    """The validated arguments.

    Raises:
        InvalidArgument: Names every wrong argument, for the model that wrote them.
    """
    try:
        return model.model_validate(arguments)
    except ValidationError as exc:
        problems = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
            for problem in exc.errors(include_url=False, include_input=False, include_context=False)
        ]
        raise InvalidArgument(f"Invalid arguments for {tool}: {'; '.join(problems)}", tool=tool) from None


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, without what only people read."""
    schema = model.model_json_schema()
    schema.pop("title", None)
    schema.pop("description", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return schema
