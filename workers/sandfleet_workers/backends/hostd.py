"""What runs in place of a namespace in host mode: a warden, and under it sandboxd with its files confined.

This file is copied beside sandboxd and `host_files`, so it is standard library only, Python >= 3.8::

    python3 -I -S -B hostd.py --socket PATH --info FD

The warden forks, tells sandboxd's pid on FD, and waits. It is the reaper of everything sandboxd starts, however
detached, and when sandboxd ends, or the worker's thread that started the warden, it kills all of that before it goes.
Against a command that kills the warden itself nothing helps: host mode is no boundary.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import marshal
import os
import posixpath
import shutil
import signal
import stat
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _SUBREAPER = 1, 36
_END_S = 8.0
#: Modules are known by the names they have in the worker, so that they find each other here too.
_PACKAGE = "sandfleet_workers.backends."
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
#: Functions of texts, which touch nothing; and what starts commands, whose programs go by the host's names.
_PURE = frozenset(("fsencode", "fsdecode", "fspath", "getenv", "putenv", "unsetenv", "strerror", "posix_spawn"))
_PURE_PATH = frozenset(
    ("join", "dirname", "basename", "split", "splitext", "normpath", "normcase", "isabs", "commonpath", "relpath")
)


# --- sandboxd, confined ----------------------------------------------------------------------


class Guarded:
    """A module whose functions take virtual paths where they were taught to, and refuse them where not.

    Args:
        module: The real one.
        covers: Whether an argument is a virtual path.
        taught: Functions for virtual paths, by name; other paths still go to the real function.
        pure: Names of functions that only compute with texts.
    """

    def __init__(
        self, module: Any, covers: Callable[[object], bool], taught: dict[str, Any], pure: frozenset[str]
    ) -> None:
        self._module, self._covers, self._taught, self._pure = module, covers, taught, pure

    def put(self, **own: Any) -> None:
        """Attributes of its own."""
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if callable(real) and not isinstance(real, type) and name not in self._pure:
            real = self._guard(name, real)
        setattr(self, name, real)
        return real

    def _guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        covers, taught = self._covers, self._taught.get(name)

        def call(*args: Any, **options: Any) -> Any:
            # What goes by descriptor may be given data that looks like a path.
            if args and isinstance(args[0], int):
                return real(*args, **options)
            if any(covers(arg) for arg in args) or any(covers(arg) for arg in options.values()):
                if taught is None:
                    raise PermissionError(errno.EACCES, name + " is not done on the sandbox's paths")
                return taught(*args, **options)
            return real(*args, **options)

        return call


def confined_os(files: Any) -> Guarded:
    """The module ``os`` for code that is to see the sandbox's directories only under their virtual names."""
    paths: dict[str, Any] = {
        "realpath": files.realpath,
        "exists": lambda path: files.is_kind(path, bool),
        "lexists": lambda path: files.is_kind(path, bool, follow=False),
        "isdir": lambda path: files.is_kind(path, stat.S_ISDIR),
        "isfile": lambda path: files.is_kind(path, stat.S_ISREG),
        "islink": lambda path: files.is_kind(path, stat.S_ISLNK, follow=False),
        "getsize": lambda path: files.stat(path).st_size,
    }
    looks = ("access", "listdir", "lstat", "readlink", "scandir", "stat", "statvfs")
    changes = ("chmod", "makedirs", "mkdir", "open", "rename", "rmdir", "symlink", "unlink", "utime")
    taught = {name: getattr(files, name) for name in (*looks, *changes)}
    taught.update(replace=files.rename, remove=files.unlink)
    made = Guarded(os, files.covers, taught, _PURE)
    pinned = sorted(root.fd for root in files.roots.values())

    def closerange(low: int, high: int) -> None:
        # A helper of sandboxd closes whatever it inherited; the directories it needs as well.
        for fd in pinned:
            if low <= fd < high:
                os.closerange(low, fd)
                low = fd + 1
        os.closerange(low, high)

    path = Guarded(posixpath, files.covers, paths, _PURE_PATH)
    made.put(path=path, closerange=closerange, chdir=files.chdir_host)
    return made


def confine(sandboxd: Any, host_files: Any, settings: dict[str, Any]) -> None:
    """Make sandboxd's file work see the roots of ``settings`` and nothing else."""
    files = host_files.Files([tuple(root) for root in settings["roots"]], settings["aliases"])
    plain_open, plain_rmtree = builtins.open, shutil.rmtree
    # Programs are looked up by the host's names, like everything in a command.
    find_program = types.FunctionType(sandboxd.find_program.__code__, dict(sandboxd.__dict__))

    def guarded_open(path: Any, *args: Any, **options: Any) -> Any:
        if files.covers(path):
            raise PermissionError(errno.EACCES, "open is not done on the sandbox's paths")
        return plain_open(path, *args, **options)

    def rmtree(path: Any, *args: Any, **options: Any) -> None:
        if files.covers(path):
            files.remove_tree(path)
        else:
            plain_rmtree(path, *args, **options)

    sandboxd.os, sandboxd.open, sandboxd.find_program = confined_os(files), guarded_open, find_program
    # sandboxd imports it where it needs it, so it is the module itself that is taught.
    shutil.rmtree = rmtree  # type: ignore[assignment]
    _confine_requests(sandboxd, files)
    if settings.get("shell"):
        plain_shell = sandboxd.Commands._shell
        sandboxd.Commands._shell = lambda self, a: plain_shell(self, a) or settings["shell"]


def _confine_requests(sandboxd: Any, files: Any) -> None:
    plain_path = sandboxd.Server.path

    def server_path(self: Any, value: str, name: str = "path") -> Any:
        full = plain_path(self, value, name)
        if ".." in value.replace("\\", "/").split("/"):
            raise sandboxd.ApiError("permission_denied", "Access denied: path traversal detected", path=value)
        if not files.covers(full):
            raise sandboxd.ApiError("permission_denied", "the path is none of the sandbox's", path=value)
        return full

    sandboxd.Server.path = server_path


def _load(name: str, folder: str) -> Any:
    """A module from a file beside this one, as source or as byte code."""
    file_name = name.rpartition(".")[2]
    path = next(p for p in (posixpath.join(folder, file_name + end) for end in (".pyc", ".py")) if os.path.exists(p))
    with open(path, "rb") as file:
        data = file.read()
    code = marshal.loads(data[16:]) if path.endswith(".pyc") else compile(data, file_name + ".py", "exec")
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module


def run_sandboxd(folder: str, socket: str) -> NoReturn:
    """Become sandboxd."""
    sandboxd = _load("sandboxd", folder)
    _load("sandfleet.trees", folder)
    _load(_PACKAGE + "host_walk", folder)
    host_files = _load(_PACKAGE + "host_files", folder)
    begin = sandboxd.Server.__init__

    def confined(self: Any, config: dict[str, Any], listener: Any) -> None:
        confine(sandboxd, host_files, config["host"])
        begin(self, config, listener)
        # From here on: where relative paths of files begin. Commands have the host's name of it already.
        self.cwd = config["host"]["home"]

    sandboxd.Server.__init__ = confined
    sandboxd.main(["--socket", socket])
    raise SystemExit(2)


# --- the warden ------------------------------------------------------------------------------


def _children() -> list[int]:
    me = str(os.getpid()).encode()
    found = []
    for name in os.listdir("/proc"):
        try:
            with open("/proc/" + str(int(name)) + "/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == me:
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue  # no process, or gone
    return found


def _reap(options: int) -> int:
    """A child that ended; 0 when none did, -1 when there is none at all."""
    try:
        return os.waitpid(-1, options)[0]
    except ChildProcessError:
        return -1


def _end_all() -> None:
    """Kill every process that came from here. The children of what dies become ours, so this finds them all."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        while True:
            found = _reap(os.WNOHANG)
            if found < 0:
                return
            if found == 0:
                break
        time.sleep(0.002)


def watch(pid: int) -> int:
    """Wait for sandboxd's end, end what it left, and return an exit status that tells how it ended."""
    status = 0
    while True:
        try:
            found, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if found == pid:
            break
    _end_all()
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main(argv: list[str]) -> NoReturn:
    options = dict(zip(argv[::2], argv[1::2]))  # noqa: B905 - Python 3.8
    info, parent = int(options["--info"]), os.getppid()
    for sig in _IGNORED:
        signal.signal(sig, signal.SIG_IGN)
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        run_sandboxd(posixpath.dirname(posixpath.abspath(__file__)), options["--socket"])

    def end(_signal: int, _frame: Any) -> None:
        os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(pid, signal.SIGKILL)
    os.write(info, b'{"child-pid": %d}\n' % pid)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 4096)
    os._exit(watch(pid))


if __name__ == "__main__":
    main(sys.argv[1:])
