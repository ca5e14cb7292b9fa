"""Host mode of local sandboxes, for hosts that forbid namespaces: directories with a sandboxd each, no isolation.

What an agent sees is the same: virtual paths, a read-only skills directory, private ``/tmp``. File operations are
kept in its directories (`host_files`). Commands are ordinary processes of the host, so they are refused unless the
node says ``allow_host_bash``, and then nothing but the user's permissions stops them: a root worker gives each
identity a uid of its own, any other worker runs them as itself.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import posixpath
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from sandfleet import trees
from sandfleet.backends import Capability, SandboxPlan
from sandfleet.errors import StartFailed, from_wire
from sandfleet_workers.backends import bwrap, local_dirs, local_host, local_process
from sandfleet_workers.backends.host_connection import HostConnection
from sandfleet_workers.backends.host_paths import HOME, Mapping, PathMap, unsafe_in_commands
from sandfleet_workers.backends.host_shell import choose_shell, inherited_environment
from sandfleet_workers.backends.local import LocalBackend
from sandfleet_workers.backends.local_launch import Launch
from sandfleet_workers.backends.mounts import ACP_WORKSPACE
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import UnixEndpoint
from sandfleet_workers.waiter import Waiter

__all__ = ["HostBackend", "path_map"]

log = logging.getLogger("sandfleet.node")

_HERE = Path(__file__).parent
_WORKSPACE_ALIAS = "/workspace"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: What sandboxd would use by itself, so that it need not be told.
_OWN_SHELLS = ("bash", "sh")


class HostBackend(LocalBackend):
    """Sandboxes that are directories of the node. File operations stay inside; commands do not."""

    name: ClassVar[str] = "host"
    capabilities: ClassVar[frozenset[Capability]] = LocalBackend.capabilities - {
        Capability.PROCESS_ISOLATION,
        Capability.JOBS,
        Capability.PTY,
    }
    isolation: ClassVar[str] = "none (host mode: commands are ordinary processes of this machine)"

    def __init__(self, settings: Any, on_death: Callable[[str, str], None], waiter: Waiter | None = None) -> None:
        super().__init__(settings, on_death, waiter)
        self._allow_bash = bool(getattr(settings, "allow_host_bash", False))
        self._maps: dict[Path, PathMap] = {}

    @classmethod
    def check(cls) -> list[str]:
        if not sys.platform.startswith("linux"):
            return ["host mode needs Linux; run the worker on a Linux machine"]
        if local_host.find_python() is None:
            return ["no Python of 3.8 or newer with its standard library; install the package python3"]
        return []

    # --- starting ------------------------------------------------------------------------------

    def create(self, plan: SandboxPlan) -> EndpointConnection:
        paths = path_map(plan, getattr(self.settings, "skills_container_path", "/mnt/skills"), self._local.data_root)
        self._maps[plan.run_dir] = paths
        try:
            return super().create(plan)
        except StartFailed as exc:
            # Where things lie on the host is for its operator only.
            log.warning("sandbox.not_started", extra={"sandbox_id": plan.sandbox_id, "error": str(exc)})
            raise from_wire(paths.mask_all(exc.to_wire())) from exc
        finally:
            self._maps.pop(plan.run_dir, None)

    def _start(self, plan: SandboxPlan, uid: int | None, key: bytes, run_fd: int) -> local_process.SandboxProcess:
        paths = self._maps[plan.run_dir]
        _check_names(paths)
        os.close(local_dirs.open_user_data(plan.user_data, uid))
        local = self._local
        try:
            _prepare(plan, uid, run_fd)
            _check_reachable(paths, plan, uid)
            config = _config(plan, paths, key)
            with self._launch(plan, uid, run_fd) as launch:
                process = local_process.start(self._spawner, launch, config=config, timeout_s=local.start_timeout_s)
        except OSError as exc:
            reason = "disk" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "run_dir"
            raise StartFailed(f"the sandbox's directories cannot be prepared: {exc.strerror}", reason=reason) from exc
        return process

    @contextmanager
    def _launch(self, plan: SandboxPlan, uid: int | None, run_fd: int) -> Iterator[Launch]:
        python, local = local_host.find_python(), self._local
        if python is None:
            raise StartFailed("no Python that could run sandboxd; install python3", reason="python_missing")
        program, suffix = local_host.sandboxd_program(python)
        # A copy of its own, so that an upgrade of the worker does not change it under a running sandbox.
        _put(run_fd, f"sandboxd{suffix}", program)
        for path in (*(_HERE / name for name in ("hostd.py", "host_walk.py", "host_files.py")), Path(trees.__file__)):
            _put(run_fd, path.name, path.read_bytes())
        info = os.pipe()
        argv = [python.path, "-I", "-S", "-B", str(plan.run_dir / "hostd.py")]
        argv += ["--socket", str(plan.run_dir / bwrap.SOCKET), "--info", str(info[1])]
        limited = bwrap.limited(
            argv,
            nofile=local.nofile,
            nproc=local.max_nproc if uid is not None else None,
            file_bytes=local.max_file_bytes,
        )
        yield Launch(limited, uid, info, ())

    def _connect(
        self, plan: SandboxPlan, endpoint: UnixEndpoint, process: local_process.SandboxProcess
    ) -> EndpointConnection:
        return HostConnection(
            endpoint,
            sandbox_id=plan.sandbox_id,
            liveness=lambda: self._liveness(process),
            waiter=self._waiter,
            paths=self._maps[plan.run_dir],
            allow_bash=self._allow_bash,
        )


def path_map(plan: SandboxPlan, skills: str, data_root: Path) -> PathMap:
    """The directories of a sandbox in host mode, and what else of the host is masked. Looks symlinks up.

    Args:
        plan: Of the sandbox.
        skills: Where it has the skills, which have a message of their own.
        data_root: The node's.
    """
    user_data, workspace = str(plan.user_data), str(plan.user_data / "workspace")
    mappings = [
        _mapping(bwrap.USER_DATA, user_data, read_only=False, label="user data"),
        _mapping(_WORKSPACE_ALIAS, workspace, read_only=False, label="user data", alias=True),
        _mapping("/tmp", str(plan.run_dir / "tmp"), read_only=False, label="temporary files"),
    ]
    for host, target, read_only in plan.mounts:
        mappings.append(_mapping(target, str(host), read_only=read_only, label=_label(target, skills)))
    above = {
        plan.run_dir: bwrap.RUN_DIR,
        plan.run_dir.parent: posixpath.dirname(bwrap.RUN_DIR),
        plan.user_data.parent: posixpath.dirname(bwrap.USER_DATA),
        data_root: f"{posixpath.dirname(bwrap.RUN_DIR)}/data",
    }
    hidden = {path: shown for place, shown in above.items() for path in (str(place), os.path.realpath(place))}
    hidden.pop("/", None)
    return PathMap(mappings, hidden)


def _check_names(paths: PathMap) -> None:
    for mapping in paths.mappings:
        for path in (mapping.host, mapping.resolved):
            if unsafe_in_commands(path):
                raise StartFailed(
                    f"the host path of {mapping.virtual} has characters that a shell reads otherwise: {path!r}; "
                    "in host mode it may have letters, digits and any of _ . - + @ % only",
                    reason="host_path",
                )


def _label(target: str, skills: str) -> str:
    if target == ACP_WORKSPACE:
        return "ACP workspace"
    return "skills path" if target == skills else "read-only mount"


def _mapping(virtual: str, host: str, *, read_only: bool, label: str, alias: bool = False) -> Mapping:
    return Mapping(virtual, host, read_only, label, os.path.realpath(host), alias)


def _prepare(plan: SandboxPlan, uid: int | None, run_fd: int) -> None:
    """A private ``/tmp``; and no other identity's processes in the thread's directories."""
    os.mkdir("tmp", 0o700, dir_fd=run_fd)
    if uid is None:
        return
    tmp = os.open("tmp", _DIRECTORY, dir_fd=run_fd)
    try:
        os.fchown(tmp, uid, uid)
    finally:
        os.close(tmp)
    for child in local_dirs.CHILDREN:
        fd = os.open(plan.user_data / child, _DIRECTORY)
        try:
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)


def _put(directory: int, name: str, data: bytes) -> None:
    """A new file. The directory belongs to the sandbox's user, so nothing that lies there already is written into."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=directory)
    with open(fd, "wb") as file:
        file.write(data)


def _check_reachable(paths: PathMap, plan: SandboxPlan, uid: int | None) -> None:
    if uid is None:
        return
    for mapping in paths.mappings:
        host = str(plan.run_dir) if mapping.virtual == "/tmp" else mapping.resolved
        if not local_host.reachable_by_all(host):
            raise StartFailed(
                f"in host mode {mapping.virtual} cannot be reached by the sandbox's user: a directory on the way to "
                f"{host} is closed to others; choose another data_root (or mount) or open it with chmod o+x",
                reason="host_path_closed",
            )
    python = local_host.find_python()
    if python is not None and not local_host.reachable_by_all(python.path):
        raise StartFailed(
            f"the Python {python.path} cannot be reached by the sandbox's user; install the package python3",
            reason="python_missing",
        )


def _config(plan: SandboxPlan, paths: PathMap, key: bytes) -> bytes:
    """What sandboxd is told on stdin, the environment of commands among it."""
    home, tmp = paths.to_host(HOME), paths.to_host("/tmp")
    assert home is not None
    assert tmp is not None
    injected = {name: paths.translate(value) for name, value in plan.spec.env.items()}
    places = {"HOME": home, "TMPDIR": tmp, "SHELL": "", "LANG": os.environ.get("LANG") or "C.UTF-8"}
    shell = choose_shell(_is_program, sys.platform)
    places["SHELL"] = shell or "/bin/sh"
    host = {
        "roots": [
            (each.virtual, sorted({each.host, each.resolved}, key=lambda path: path == each.resolved), each.read_only)
            for each in paths.mappings
            if not each.alias
        ],
        "aliases": {_WORKSPACE_ALIAS: HOME},
        "home": HOME,
        "shell": shell if shell is not None and os.path.basename(shell) not in _OWN_SHELLS else None,
    }
    config = {
        "key": key.hex(),
        "env": inherited_environment(os.environ, {**places, **injected}),
        "cwd": home,
        "host": host,
    }
    return json.dumps(config).encode() + b"\n"


def _is_program(path: str) -> bool:
    return shutil.which(path) is not None
