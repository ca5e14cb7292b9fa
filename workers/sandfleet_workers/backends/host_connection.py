"""The node's way into a sandbox in host mode: what goes in is looked at and translated, what comes out is masked."""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandfleet.backends import Completion, Done, Operation
from sandfleet.errors import HostBashDisabled, SandfleetError, from_wire
from sandfleet.ops import OPS
from sandfleet_workers.backends import host_guard
from sandfleet_workers.backends.host_paths import HOME, PathMap
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.jobless import refuse_jobs

__all__ = ["REFUSAL", "HostConnection"]

#: Of the answer to a command where commands are not allowed.
REFUSAL = (
    "Host bash execution is disabled for sandboxes in host mode because it is not a secure sandbox boundary. "
    "Use the local backend with bubblewrap, or a container backend, for isolated bash access, or set "
    "allow_host_bash: true on the node only in a fully trusted local environment."
)
_PATHS = ("path", "old_path", "new_path")
_SPEAKS_VIRTUAL = frozenset(
    {"glob", "read_file", "write_file", "str_replace", "make_dir", "make_link", "remove", "move", "close_session"}
)


class HostConnection(EndpointConnection):
    """An `EndpointConnection` to a sandboxd that runs on the host itself.

    File operations name virtual paths, and sandboxd keeps them inside (see `host_files`); here they get the messages
    an agent understands. Command lines, arguments, working directories and values of environment variables are
    translated; stdin and contents of files are not. Every text that comes back is masked, contents of files are not.

    Args:
        paths: The sandbox's directories.
        allow_bash: Whether commands may run at all.
    """

    def __init__(self, *args: Any, paths: PathMap, allow_bash: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._paths = paths
        self._allow_bash = allow_bash

    def start(self, op: Operation, done: Done) -> None:
        if op.kind == "batch":  # its items come here one by one
            super().start(op, done)
            return
        try:
            refuse_jobs(op, "in host mode its output could not be masked while it comes")
            if op.kind == "execute_command":
                op = replace(op, args=self._command(op.args))
            else:
                self._check_paths(op)
        except SandfleetError as exc:
            done(Completion(error=exc))
            return
        super().start(op, lambda completion: done(self._masked(op.kind, completion)))

    # --- in ----------------------------------------------------------------------------------

    def _check_paths(self, op: Operation) -> None:
        write = op.kind not in OPS or OPS[op.kind].effect
        for name in _PATHS:
            if isinstance(path := op.args.get(name), str):
                host_guard.check_path(self._paths, path, write=write)

    def _command(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if not self._allow_bash:
            raise HostBashDisabled(REFUSAL, setting="allow_host_bash")
        paths, cwd = self._paths, args.get("cwd")
        given = {**args, "env": {name: paths.translate(value) for name, value in (args.get("env") or {}).items()}}
        if cwd is not None:
            host_guard.check_cwd(paths, cwd)
            given["cwd"] = paths.to_host(posixpath.join(HOME, cwd))
        if args.get("command") is not None:
            host_guard.check_command(paths, args["command"])
            given["command"] = paths.translate(args["command"])
        if args.get("argv") is not None:
            host_guard.check_argv(paths, args["argv"])
            given["argv"] = [paths.translate(word) for word in args["argv"]]
        return given

    # --- out ---------------------------------------------------------------------------------

    def _masked(self, kind: str, completion: Completion) -> Completion:
        if completion.error is not None:
            wire = self._paths.mask_all(completion.error.to_wire())
            # The class stays; only its texts may differ.
            return replace(completion, error=from_wire(wire))
        return replace(completion, value=self._masked_value(kind, completion.value))

    def _masked_value(self, kind: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        mask = self._paths.mask
        match kind:
            case "execute_command":
                streams = {name: self._masked_stream(value, name) for name in ("stdout", "stderr")}
                return {**self._paths.mask_all({**value, **dict.fromkeys(streams)}), **streams}
            case "list_dir":
                return {**value, "entries": [self._masked_info(entry) for entry in value["entries"]]}
            case "stat":
                return self._masked_info(value)
            case "grep":
                return {**value, "matches": [[path, number, mask(line)] for path, number, line in value["matches"]]}
        # The paths of file operations are virtual already, and a file may be called like anything.
        return value if kind in _SPEAKS_VIRTUAL else self._paths.mask_all(value)

    def _masked_stream(self, value: dict[str, Any], name: str) -> str:
        """A command's output, which may have been asked for as bytes, and may have been cut anywhere."""
        ends = bool(value["timed_out"] or value["cancelled"] or value["signal"])
        if value.get("encoding") != "base64":
            return self._paths.mask_cut(value[name], ends=ends)
        text = base64.b64decode(value[name]).decode("utf-8", "surrogateescape")
        return base64.b64encode(self._paths.mask_cut(text, ends=ends).encode("utf-8", "surrogateescape")).decode()

    def _masked_info(self, info: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(info.get("target"), str):
            return info
        target = self._paths.mask(info["target"])
        if info["type"] != "symlink":
            return {**info, "target": target}
        # The size of a link is the length of what it says, and it is to say the same everywhere.
        return {**info, "target": target, "size": len(target.encode("utf-8", "surrogateescape"))}
