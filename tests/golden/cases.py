"""What the tools are asked for each golden file beside this one: ``<tool>/<case>.txt`` holds the answer, byte for byte.

The files were written from the reference before the tools were. Every case is driven over a mock sandbox and, where
a real one can be brought into that situation, over a real fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandfleet import Sandbox, Settings, tools
from sandfleet.errors import NoCapacity, NoSpace, PermissionDenied
from sandfleet.tools import Tool, ToolRuntime

FOLDER = Path(__file__).parent
HOME = "/mnt/user-data/workspace"
PROJECT, FILE, ABSENT = f"{HOME}/project", f"{HOME}/file.txt", f"{HOME}/absent"
OUTPUTS = "/mnt/user-data/outputs"


@dataclass(frozen=True)
class Case:
    """One call of one tool.

    Attributes:
        name: ``<tool>/<case>``.
        args: Its arguments beside ``description``.
        files: What is there before, by path; bytes or text. A path that ends with ``/`` is a directory.
        settings: Limits that differ from the defaults.
        env: Environment of the commands.
        says: What the mock's command answers: stdout, or (stdout, stderr, exit code).
        delay_s: How long the mock's command takes.
        shell: Run in the real sandbox before.
        fails: (operation kind, error) that the mock answers with.
        mock: Whether a mock sandbox can be brought there.
        real: Whether a real one can.
        after: (path, text) the file must hold afterwards.
    """

    name: str
    args: Mapping[str, Any]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    says: str | tuple[str, str, int] | None = None
    delay_s: float = 0.0
    shell: str = ""
    fails: tuple[str, Exception] | None = None
    mock: bool = True
    real: bool = True
    after: tuple[str, str] | None = None

    @property
    def expected(self) -> str:
        """The golden answer."""
        return (FOLDER / f"{self.name}.txt").read_bytes().decode()

    def tool(self, base: Settings, provider: Any) -> Tool:
        """The case's tool, with the case's limits."""
        settings = base.model_copy(update=dict(self.settings))
        name = self.name.partition("/")[0]
        # By name, not from get_tools: a model may call bash where it is left out.
        found = getattr(tools, name if name == "present_files" else f"{name}_tool")
        assert isinstance(found, Tool)
        return found.bound(provider=provider, settings=settings)

    def arguments(self) -> dict[str, Any]:
        """All arguments, as a model gives them."""
        return dict(self.args) if self.name.startswith("present_files") else {"description": "test", **self.args}

    def runtime(self, thread_id: str) -> ToolRuntime:
        """A runtime of the thread."""
        return ToolRuntime(context={"thread_id": thread_id, "sandbox_env": dict(self.env)})

    def prepare(self, sandbox: Sandbox) -> None:
        """Lay the files the case is about."""
        for path, content in self.files.items():
            if path.endswith("/"):
                sandbox.make_dir(path.rstrip("/"))
            else:
                sandbox.update_file(path, content.encode() if isinstance(content, str) else content)


def _denied(kind: str) -> tuple[str, Exception]:
    return kind, PermissionDenied("Permission denied")


def _boom(kind: str) -> tuple[str, Exception]:
    return kind, RuntimeError("boom")


_TREE = {
    f"{PROJECT}/a.py": "a",
    f"{PROJECT}/src/b.py": "b",
    f"{PROJECT}/src/deep/c.py": "c",
    f"{PROJECT}/node_modules/d.py": "hidden from searches",
    f"{PROJECT}/README.md": "r",
}
_TEXTS = {
    f"{PROJECT}/a.txt": "TODO first\na.b(c)\ntodo second\n",
    f"{PROJECT}/b.txt": "nothing but a Todo\nanbXc(\n",
    f"{PROJECT}/image.bin": b"todo\0",
}
_LINES = "".join(f"line {number}\n" for number in range(1, 41))
_LOCKED = f"mkdir -p {HOME}/locked && chmod 0 {HOME}/locked"
_LOCKED_BELOW = f"mkdir {PROJECT}/locked && chmod 0 {PROJECT}/locked"
_LOCKED_FILE = f"echo secret > {HOME}/locked.txt && chmod 0 {HOME}/locked.txt"
_SEVERAL = "value = 1\nother\nvalue + value\n"

BASH = [
    Case("bash/stdout", {"command": "echo hello"}, says="hello\n"),
    Case("bash/stdout_and_stderr", {"command": "echo out; echo err >&2"}, says=("out\n", "err\n", 0)),
    Case("bash/stderr_alone", {"command": "echo err >&2"}, says=("", "err\n", 0)),
    Case("bash/exit_code", {"command": "echo out; exit 3"}, says=("out\n", "", 3)),
    Case("bash/exit_code_alone", {"command": "exit 3"}, says=("", "", 3)),
    Case("bash/no_output", {"command": "true"}, says=""),
    Case("bash/starts_in_workspace", {"command": "pwd"}, says=f"{HOME}\n"),
    Case("bash/timeout", {"command": "sleep 60"}, settings={"command_timeout_s": 1.0}, says="", delay_s=60.0),
    Case(
        "bash/middle_truncated",
        {"command": "printf 'a%.0s' $(seq 100); printf 'b%.0s' $(seq 100)"},
        settings={"bash_output_max_chars": 99},
        says="a" * 100 + "b" * 100,
    ),
    Case(
        "bash/secret",
        {"command": 'echo "the token is $API_TOKEN!"'},
        env={"API_TOKEN": "s3cr3t-t0ken", "MODE": "short"},
        says="the token is s3cr3t-t0ken!\n",
    ),
    Case("bash/host_refused", {"command": "id"}, settings={"backend": "host"}),
    Case("bash/bad_env_key", {"command": "id"}, env={"MY-KEY": "x"}),
    Case(
        "bash/permission_error", {"command": "id"}, fails=("execute_command", PermissionError("not yours")), real=False
    ),
    Case("bash/unexpected", {"command": "id"}, fails=_boom("execute_command"), real=False),
    Case(
        "bash/no_capacity",
        {"command": "id"},
        fails=("execute_command", NoCapacity("every place is taken", retry_after_s=5.0)),
        real=False,
    ),
    Case("bash/missing_argument", {}),
    Case("bash/unknown_argument", {"command": "id", "cmd": "id"}),
]

LS = [
    Case(
        "ls/listing",
        {"path": PROJECT},
        {f"{PROJECT}/README.md": "", f"{PROJECT}/src/main.py": "", f"{PROJECT}/src/pkg/deeper.py": ""},
    ),
    Case(
        "ls/ignored",
        {"path": PROJECT},
        {
            f"{PROJECT}/kept.txt": "",
            f"{PROJECT}/.git/HEAD": "",
            f"{PROJECT}/src/main.py": "",
            f"{PROJECT}/src/__pycache__/": "",
            f"{PROJECT}/build.log": "",
            f"{PROJECT}/.upload-1f.part": "",
            f"{PROJECT}/pkg.egg-info/": "",
        },
    ),
    Case("ls/empty", {"path": PROJECT}, {f"{PROJECT}/": ""}),
    Case(
        "ls/truncated",
        {"path": PROJECT},
        {f"{PROJECT}/{letter}.txt": "" for letter in "abcdefghij"},
        settings={"ls_output_max_chars": 180},
    ),
    Case("ls/unread", {"path": PROJECT}, {f"{PROJECT}/a.txt": "TODO\n"}, shell=_LOCKED_BELOW, mock=False),
    Case("ls/not_found", {"path": ABSENT}),
    Case("ls/not_a_directory", {"path": FILE}, {FILE: "x"}),
    Case("ls/permission_denied", {"path": f"{HOME}/locked"}, shell=_LOCKED, fails=_denied("list_dir")),
    Case("ls/unexpected", {"path": HOME}, fails=_boom("list_dir"), real=False),
]

GLOB = [
    Case("glob/found", {"pattern": "*.py", "path": PROJECT}, _TREE),
    Case("glob/below", {"pattern": "src/**/*.py", "path": PROJECT}, _TREE),
    Case("glob/truncated", {"pattern": "*.py", "path": PROJECT, "max_results": 2}, _TREE),
    Case("glob/exactly_max", {"pattern": "*.py", "path": PROJECT, "max_results": 3}, _TREE),
    Case("glob/directories", {"pattern": "d*", "path": PROJECT, "include_dirs": True}, _TREE),
    Case("glob/none", {"pattern": "*.rs", "path": PROJECT}, _TREE),
    Case("glob/newline_in_name", {"pattern": "*.py", "path": PROJECT}, {f"{PROJECT}/two\nlines.py": ""}),
    Case(
        "glob/unread",
        {"pattern": "*.txt", "path": PROJECT},
        {f"{PROJECT}/a.txt": "TODO\n"},
        shell=_LOCKED_BELOW,
        mock=False,
    ),
    Case("glob/not_found", {"pattern": "*", "path": ABSENT}),
    Case("glob/not_a_directory", {"pattern": "*", "path": FILE}, {FILE: "x"}),
    Case(
        "glob/permission_denied",
        {"pattern": "*", "path": f"{HOME}/locked"},
        shell=_LOCKED,
        fails=_denied("glob"),
    ),
    Case("glob/invalid_pattern", {"pattern": "../*", "path": HOME}),
    Case("glob/unexpected", {"pattern": "*", "path": HOME}, fails=_boom("glob"), real=False),
]

GREP = [
    Case("grep/found", {"pattern": "todo", "path": PROJECT}, _TEXTS),
    Case("grep/case_sensitive", {"pattern": "TODO", "path": PROJECT, "case_sensitive": True}, _TEXTS),
    Case("grep/literal", {"pattern": "a.b(c", "path": PROJECT, "literal": True}, _TEXTS),
    Case("grep/filtered", {"pattern": "todo", "path": PROJECT, "glob": "b*"}, _TEXTS),
    Case("grep/one_file", {"pattern": "todo", "path": f"{PROJECT}/a.txt"}, _TEXTS),
    Case("grep/long_line_cut", {"pattern": "x", "path": f"{PROJECT}/a.txt"}, {f"{PROJECT}/a.txt": "x" * 500 + "\n"}),
    Case("grep/truncated", {"pattern": "todo", "path": PROJECT, "max_results": 2}, _TEXTS),
    Case("grep/none", {"pattern": "absent", "path": PROJECT}, _TEXTS),
    Case(
        "grep/unread",
        {"pattern": "absent", "path": PROJECT},
        {f"{PROJECT}/a.txt": "TODO\n"},
        shell=_LOCKED_BELOW,
        mock=False,
    ),
    Case(
        "grep/not_searched",
        {"pattern": "todo", "path": PROJECT},
        {f"{PROJECT}/a.txt": "todo" * 600 + "\nTODO\n", f"{PROJECT}/b.txt": "todo\n" * 250_000},
    ),
    Case("grep/invalid_regex", {"pattern": "(", "path": HOME}),
    Case("grep/not_found", {"pattern": "x", "path": ABSENT}),
    Case("grep/permission_denied", {"pattern": "x", "path": f"{HOME}/locked"}, shell=_LOCKED, fails=_denied("grep")),
    Case("grep/unexpected", {"pattern": "x", "path": HOME}, fails=_boom("grep"), real=False),
]

READ = [
    Case("read_file/whole", {"path": FILE}, {FILE: "one\ntwo\nthree\n"}),
    Case("read_file/range", {"path": FILE, "start_line": 2, "end_line": 3}, {FILE: "one\ntwo\nthree\nfour\n"}),
    Case("read_file/from_line", {"path": FILE, "start_line": 3}, {FILE: "one\ntwo\nthree\nfour\n"}),
    Case("read_file/to_line", {"path": FILE, "end_line": 2}, {FILE: "one\ntwo\nthree\nfour\n"}),
    Case("read_file/range_of_crlf", {"path": FILE, "start_line": 2}, {FILE: "one\r\ntwo\r\nthree\r\n"}),
    Case("read_file/start_below_1", {"path": FILE, "start_line": 0}, {FILE: "one\n"}),
    Case("read_file/end_below_1", {"path": FILE, "end_line": 0}, {FILE: "one\n"}),
    Case("read_file/start_after_end", {"path": FILE, "start_line": 3, "end_line": 2}, {FILE: "one\n"}),
    Case("read_file/start_after_file", {"path": FILE, "start_line": 5}, {FILE: "one\ntwo\n"}),
    Case("read_file/empty", {"path": FILE}, {FILE: ""}),
    Case("read_file/truncated", {"path": FILE}, {FILE: _LINES}, settings={"read_file_output_max_chars": 106}),
    Case(
        "read_file/truncated_range",
        {"path": FILE, "start_line": 5, "end_line": 30},
        {FILE: _LINES},
        settings={"read_file_output_max_chars": 106},
    ),
    Case("read_file/huge_line", {"path": FILE}, {FILE: "x" * 1000}, settings={"read_file_output_max_chars": 346}),
    Case("read_file/utf8_bom", {"path": FILE}, {FILE: "\ufeffhéllo\n"}),
    Case("read_file/utf16", {"path": FILE}, {FILE: "\ufeffhéllo\nwörld\n".encode("utf-16-le")}),
    Case("read_file/not_found", {"path": f"{ABSENT}.txt"}),
    Case("read_file/directory", {"path": PROJECT}, {f"{PROJECT}/": ""}),
    Case("read_file/permission_denied", {"path": f"{HOME}/locked.txt"}, shell=_LOCKED_FILE, fails=_denied("read_file")),
    Case("read_file/binary", {"path": f"{HOME}/image.png"}, {f"{HOME}/image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"}),
    Case("read_file/unexpected", {"path": FILE}, fails=_boom("read_file"), real=False),
]

WRITE = [
    Case(
        "write_file/ok",
        {"path": f"{PROJECT}/new/file.txt", "content": "text\n"},
        after=(f"{PROJECT}/new/file.txt", "text\n"),
    ),
    Case(
        "write_file/append",
        {"path": FILE, "content": "two\n", "append": True},
        {FILE: "one\n"},
        settings={"write_file_max_bytes": 2},
        after=(FILE, "one\ntwo\n"),
    ),
    Case(
        "write_file/too_large",
        {"path": FILE, "content": "x" * 99 + "é"},
        {FILE: "before"},
        settings={"write_file_max_bytes": 100},
        after=(FILE, "before"),
    ),
    Case("write_file/directory", {"path": PROJECT, "content": "x"}, {f"{PROJECT}/": ""}),
    Case(
        "write_file/permission_denied",
        {"path": f"{HOME}/locked/file.txt", "content": "x"},
        shell=_LOCKED,
        fails=_denied("write_file"),
    ),
    Case(
        "write_file/failed",
        {"path": FILE, "content": "x"},
        fails=("write_file", NoSpace("No space left on device")),
        real=False,
    ),
    Case(
        "write_file/blocked",
        {"path": FILE, "content": "x"},
        {FILE: "before"},
        settings={"read_before_write": True},
        after=(FILE, "before"),
    ),
]

REPLACE = [
    Case(
        "str_replace/ok",
        {"path": FILE, "old_str": "other", "new_str": "another"},
        {FILE: _SEVERAL},
        after=(FILE, "value = 1\nanother\nvalue + value\n"),
    ),
    Case(
        "str_replace/all",
        {"path": FILE, "old_str": "value", "new_str": "v", "replace_all": True},
        {FILE: _SEVERAL},
        after=(FILE, "v = 1\nother\nv + v\n"),
    ),
    Case("str_replace/not_in_file", {"path": FILE, "old_str": "absent", "new_str": ""}, {FILE: _SEVERAL}),
    Case(
        "str_replace/several",
        {"path": FILE, "old_str": "value", "new_str": "v"},
        {FILE: _SEVERAL},
        after=(FILE, _SEVERAL),
    ),
    Case("str_replace/empty_old_str", {"path": FILE, "old_str": "", "new_str": "v"}, {FILE: "x"}, after=(FILE, "x")),
    Case("str_replace/not_found", {"path": f"{ABSENT}.txt", "old_str": "a", "new_str": "b"}),
    Case("str_replace/directory", {"path": PROJECT, "old_str": "a", "new_str": "b"}, {f"{PROJECT}/": ""}),
    Case(
        "str_replace/permission_denied",
        {"path": f"{HOME}/locked.txt", "old_str": "a", "new_str": "b"},
        shell=_LOCKED_FILE,
        fails=_denied("str_replace"),
    ),
    Case(
        "str_replace/blocked",
        {"path": FILE, "old_str": "before", "new_str": "b"},
        {FILE: "before"},
        settings={"read_before_write": True},
        after=(FILE, "before"),
    ),
    Case(
        "str_replace/unexpected", {"path": FILE, "old_str": "a", "new_str": "b"}, fails=_boom("str_replace"), real=False
    ),
]

PRESENT = [
    Case("present_files/ok", {"paths": [f"{OUTPUTS}/report.html"]}, {f"{OUTPUTS}/report.html": "<p>"}),
    Case("present_files/outside", {"paths": [FILE]}, {FILE: "x"}),
    Case("present_files/dot_dot", {"paths": [f"{OUTPUTS}/../workspace/file.txt"]}, {FILE: "x"}),
    Case("present_files/missing", {"paths": [f"{OUTPUTS}/absent.html"]}),
    Case("present_files/directory", {"paths": [f"{OUTPUTS}/site"]}, {f"{OUTPUTS}/site/": ""}),
]

CASES = [*BASH, *LS, *GLOB, *GREP, *READ, *WRITE, *REPLACE, *PRESENT]
