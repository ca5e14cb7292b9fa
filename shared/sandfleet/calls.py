"""What each method of a sandbox sends and how its answer reads: shared by `Sandbox` and `AsyncSandbox`."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from sandfleet.client import Answer, Call, Client, Target
from sandfleet.errors import FileTooLarge, InternalError, InvalidArgument, OutcomeUnknown, SandboxNotFound, from_wire
from sandfleet.ids import Identity
from sandfleet.job_values import OutputGap
from sandfleet.model import CommandResult, FileInfo, GrepMatch, Health, SandboxInfo, SandboxMetrics, TextRead
from sandfleet.partial import Listed, Searched
from sandfleet.steps import Do, Steps
from sandfleet.store.base import OpView

#: How long a job may take to begin.
_BEGIN_S = 60.0


class RunOptions(TypedDict, total=False):
    """What `Sandbox.run` takes beside the command and ``background``, for type checkers."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    stdin: str | bytes | None
    timeout_s: float | None
    session: str | None
    max_output_bytes: int | None
    queue_timeout_s: float | None
    op_id: str | None
    errors: str
    on_stdout: Callable[[bytes], Any] | None
    on_stderr: Callable[[bytes], Any] | None
    on_gap: Callable[[OutputGap], Any] | None
    stdin_open: bool
    pty: bool | tuple[int, int]


def execute(
    command: str | Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: str | bytes | None,
    timeout_s: float | None,
    session: str | None,
    max_output_bytes: int | None,
    queue_timeout_s: float | None,
    op_id: str | None,
    errors: str = "replace",
    background: bool = False,
    stdin_open: bool = False,
    pty: bool | tuple[int, int] = False,
    on_output: bool = False,
) -> Call:
    """The call of `Sandbox.run`."""
    if background and on_output:
        why = "a job's output is read with Job.output(); leave on_stdout and on_stderr out"
        raise InvalidArgument(why, argument="background")
    if errors not in ("replace", "surrogateescape"):
        raise InvalidArgument(f"errors must be replace or surrogateescape, not {errors!r}", argument="errors")
    args: dict[str, Any] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    given = {
        "cwd": cwd,
        "env": dict(env) if env else None,
        "user": user,
        "timeout_s": float(timeout_s) if timeout_s is not None else None,
        "session": session,
        "max_output_bytes": max_output_bytes,
        "as_bytes": True if errors == "surrogateescape" else None,
        "background": background or None,
        "stdin_open": stdin_open or None,
        "pty": _terminal(pty),
    }
    args.update({key: value for key, value in given.items() if value is not None})
    content = stdin.encode() if isinstance(stdin, str) else stdin
    # A job is answered when it runs, whatever time it has.
    return Call("execute_command", args, content, _BEGIN_S if background else timeout_s, queue_timeout_s, op_id)


def _terminal(pty: bool | tuple[int, int]) -> dict[str, int] | None:
    if isinstance(pty, bool):
        return {"rows": 24, "cols": 80} if pty else None
    rows, cols = pty
    return {"rows": int(rows), "cols": int(cols)}


def command_result(answer: Answer) -> CommandResult:
    """The result of an execute answer."""
    return _result(answer.value, answer)


def _result(value: Mapping[str, Any], answer: Answer) -> CommandResult:
    if "exit_code" not in value:
        # Another call with this id had asked for a job.
        why = f"{answer.op_id} runs as a background job: sandbox.job({answer.op_id!r}).wait() tells how it ends"
        raise OutcomeUnknown(why, op_id=answer.op_id)
    streams = [value["stdout"], value["stderr"]]
    if value.get("encoding") == "base64":
        streams = [base64.b64decode(stream).decode("utf-8", "surrogateescape") for stream in streams]
    return CommandResult(
        stdout=streams[0],
        stderr=streams[1],
        exit_code=value["exit_code"],
        duration_s=value["duration_s"],
        timed_out=bool(value.get("timed_out")),
        truncated=bool(value.get("truncated")),
        signal=value.get("signal"),
        cancelled=bool(value.get("cancelled")),
        out_of_memory=bool(value.get("out_of_memory")),
        op_id=answer.op_id,
        timings=answer.timings,
    )


def shown(result: CommandResult, timeout_s: float | None = None) -> str:
    """The one text shape of ``execute_command``, for every backend (deerflow.md 1.7): stdout, then ``Std Error:``,
    then ``Exit Code:`` when it is not 0; ``(no output)`` when there is nothing."""
    text = result.stdout
    if result.stderr:
        text += f"\nStd Error:\n{result.stderr}" if text else result.stderr
    if result.timed_out:
        # The limit that was asked for, unless the fleet's own came first: how long the kill took is nobody's question.
        asked = timeout_s if timeout_s is not None and result.duration_s >= timeout_s else None
        note = (
            f"Command timed out after {asked or round(result.duration_s, 1):g} seconds and was terminated. To run a "
            "long-lived process such as a web server, start it in the background and redirect its output, e.g. "
            "`your-command > /mnt/user-data/workspace/server.log 2>&1 &`."
        )
        return f"{text}\n{note}" if text else note
    if result.exit_code != 0:
        text += f"\nExit Code: {result.exit_code if result.exit_code is not None else result.signal}"
        if result.out_of_memory:
            text += "\nThe command was killed because it took all the memory that the sandbox may have."
    return text or "(no output)"


def text_of(answer: Answer, path: str = "") -> str:
    """The content of a read as text, by its byte order mark; what is no text in that encoding is replaced.

    Raises:
        FileTooLarge: More lines were asked for than one read holds; a part must never look like the whole.
    """
    content = answer.content or b""
    if (answer.value or {}).get("truncated"):
        raise FileTooLarge("the lines are more than one read holds (16 Mi characters); ask for fewer", path=path)
    if "encoding" in (answer.value or {}):
        return content.decode("utf-8", "replace")
    encoding, mark = encoding_of(content)
    return content[len(mark) :].decode(encoding, "replace")


#: UTF-32's little-endian mark begins with UTF-16's, so it is looked for first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def encoding_of(content: bytes) -> tuple[str, bytes]:
    """The encoding and byte order mark of a text that begins so; UTF-8 where there is no mark."""
    return next(((name, mark) for mark, name in _MARKS if content.startswith(mark)), ("utf-8", b""))


def read(path: str, start_line: int | None = None, end_line: int | None = None) -> Call:
    """The call of `Sandbox.download_file`, and of a batch's reads: bytes."""
    lines = {"start_line": start_line, "end_line": end_line}
    return Call("read_file", {"path": path, **{key: value for key, value in lines.items() if value is not None}})


def read_file(path: str, start_line: int | None = None, end_line: int | None = None) -> Call:
    """The call of `Sandbox.read_file`: lines are counted in the text, so a range is decoded where the file lies."""
    call = read(path, start_line, end_line)
    if start_line is None and end_line is None:
        return call
    return Call("read_file", {**call.args, "as_text": True, "lenient": True})


def read_text(path: str, start_line: int | None, end_line: int | None, max_chars: int | None) -> Call:
    """The call of `Sandbox.read_text`."""
    wanted = {"start_line": start_line, "end_line": end_line, "max_chars": max_chars}
    given = {key: value for key, value in wanted.items() if value is not None}
    return Call("read_file", {"path": path, "as_text": True, **given})


def text_read(answer: Answer) -> TextRead:
    """The answer of `Sandbox.read_text`."""
    return _text_read(answer.value, answer.content or b"")


def _text_read(value: Mapping[str, Any], content: bytes) -> TextRead:
    return TextRead(
        text=content.decode("utf-8", "replace"),
        start_line=value["start_line"],
        end_line=value["end_line"],
        total_lines=value["total_lines"],
        total_chars=value["total_chars"],
        truncated=value["truncated"],
        cut_line=value["cut_line"],
        encoding=value["encoding"],
        size_bytes=value["size_bytes"],
        digest=value["digest"],
    )


def write(path: str, content: str | bytes, append: bool = False, if_digest: str | None = None) -> Call:
    """The call of `Sandbox.write_file` and `update_file`."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else bytes(content)
    args: dict[str, Any] = {"path": path, "append": append}
    if if_digest is not None:
        args["if_digest"] = if_digest
    return Call("write_file", args, data)


def replace_text(path: str, old: str, new: str, replace_all: bool, if_digest: str | None = None) -> Call:
    """The call of `Sandbox.str_replace`."""
    args: dict[str, Any] = {"path": path, "old": old, "new": new, "replace_all": replace_all}
    if if_digest is not None:
        args["if_digest"] = if_digest
    return Call("str_replace", args)


def list_call(path: str, max_depth: int) -> Call:
    """The call of `Sandbox.list_files` and `list_dir`."""
    return Call("list_dir", {"path": path, "max_depth": max_depth})


def glob(path: str, pattern: str, include_dirs: bool, max_results: int) -> Call:
    """The call of `Sandbox.glob`."""
    return Call("glob", {"path": path, "pattern": pattern, "include_dirs": include_dirs, "max_results": max_results})


def grep(path: str, pattern: str, glob: str | None, literal: bool, case_sensitive: bool, max_results: int) -> Call:
    """The call of `Sandbox.grep`."""
    args: dict[str, Any] = {
        "path": path,
        "pattern": pattern,
        "literal": literal,
        "case_sensitive": case_sensitive,
        "max_results": max_results,
    }
    if glob is not None:
        args["glob"] = glob
    return Call("grep", args)


def cancel_steps(client: Client, target: Target, op_id: str) -> Steps[bool]:
    """`Sandbox.cancel`: close it while unclaimed, otherwise tell its node."""
    # Whose it is comes first: asking the store to cancel closes an unclaimed operation of anybody.
    identity: Identity = yield Do(lambda: client.identity_of(target))
    info: SandboxInfo | None = yield Do(lambda: client.store.sandbox(target.sandbox_id))
    if info is None or Identity(info.thread_id, info.user_id) != identity:
        raise SandboxNotFound(f"no sandbox {target.sandbox_id} of yours", sandbox_id=target.sandbox_id)
    view: OpView | None = yield Do(lambda: client.store.op(op_id))
    if view is None or view.sandbox_id != target.sandbox_id:
        return False
    view = yield Do(lambda: client.store.cancel(op_id))
    if view is None:
        return False
    if view.state != "claimed":
        return view.state == "closed" and view.outcome == "cancelled"
    answer = yield from client.call(target, Call("cancel", {"op_id": op_id}, timeout_s=10.0))
    return bool(answer.value["found"])


def names(listed: Sequence[FileInfo]) -> list[str]:
    """Paths as `Sandbox.list_dir` gives them: directories end with ``/``."""
    paths = [entry.path + ("/" if entry.type == "dir" else "") for entry in listed]
    return Listed(paths, unread=getattr(listed, "unread", 0))


def entries(answer: Answer, path: str, max_depth: int) -> list[FileInfo]:
    """The entries of a listing.

    Raises:
        InvalidArgument: There are more than one listing may hold; a part must never look like the whole.
    """
    found = answer.value["entries"]
    if answer.value["truncated"]:
        raise InvalidArgument(
            f"{path} holds more than {len(found)} entries to depth {max_depth}; list a part of it", path=path
        )
    return Listed([info(entry) for entry in found], unread=int(answer.value.get("errors") or 0))


def health(answer: Answer, target: Target) -> Health:
    """The answer of `Sandbox.health`."""
    return Health(
        status=answer.value["status"],
        sandbox_id=target.sandbox_id,
        node_id=target.route.node_id if target.route else None,
        backend=answer.value.get("backend"),
        detail=answer.value.get("detail", ""),
    )


def metrics(answer: Answer) -> SandboxMetrics:
    """The answer of `Sandbox.metrics`; what a backend does not tell is None."""
    known = {field.name for field in fields(SandboxMetrics)}
    return SandboxMetrics(**{name: value for name, value in answer.value.items() if name in known})


def info(value: Mapping[str, Any]) -> FileInfo:
    """One `FileInfo` from its wire form."""
    return FileInfo(
        path=value["path"],
        name=value["name"],
        type=value["type"],
        size=value["size"],
        mode=value["mode"],
        modified_at=value["modified_at"],
        target=value.get("target"),
    )


def glob_answer(answer: Answer) -> tuple[list[str], bool]:
    """Paths and whether there are more."""
    skipped = {"errors": int(answer.value.get("errors") or 0)}
    return Searched(list(answer.value["paths"]), bool(answer.value["truncated"]), skipped)


def grep_answer(answer: Answer) -> tuple[list[GrepMatch], bool]:
    """Matches and whether there are more."""
    matches = [GrepMatch(*match) for match in answer.value["matches"]]
    return Searched(matches, bool(answer.value["truncated"]), answer.value.get("skipped"))


def batch(calls: Sequence[Call], *, stop_on_error: bool, timeout_s: float | None) -> Call:
    """Several calls as one operation."""
    items = [{"kind": call.kind, "args": dict(call.args), **_batch_content(call.content)} for call in calls]
    return Call("batch", {"ops": items, "stop_on_error": stop_on_error}, None, timeout_s)


def _batch_content(content: bytes | None) -> dict[str, str]:
    if content is None:
        return {}
    try:
        return {"content": content.decode()}
    except UnicodeDecodeError:
        return {"content_b64": base64.b64encode(content).decode()}


def batch_results(answer: Answer) -> list[Any]:
    """One value per item that ran, in order.

    `CommandResult` for commands, bytes for reads, an *unraised* error for what failed, plain values otherwise.
    """
    return [_batch_item(item, answer) for item in answer.value["results"]]


def _batch_item(item: Mapping[str, Any], answer: Answer) -> Any:
    if "error" in item:
        return from_wire(item["error"])
    value = item.get("ok")
    if "content_b64" in item:
        content = base64.b64decode(item["content_b64"])
        return _text_read(value, content) if isinstance(value, dict) and "encoding" in value else content
    if isinstance(value, dict) and "exit_code" in value and "stdout" in value:
        return _result(value, answer)
    if item.get("ok", answer) is answer:
        return InternalError(f"batch item without outcome: {str(item)[:200]}")
    return value
