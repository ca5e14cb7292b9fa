"""The bubblewrap command line of a local sandbox, built from plain facts. Pure.

What the sandbox sees: the system's programs read-only, an ``/etc`` made up for it, its own
``/proc``, a minimal ``/dev``, bounded tmpfs on ``/tmp``, ``/run`` and ``/dev/shm``, its thread's
directory and the mounts asked for. Everything else of the host is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote

__all__ = [
    "HOME",
    "PATH",
    "RUN_DIR",
    "SANDBOXD",
    "SOCKET",
    "USER_DATA",
    "Bind",
    "Layout",
    "bwrap_argv",
    "etc_files",
    "limited",
    "staged",
]

USER_DATA = "/mnt/user-data"
HOME = "/mnt/user-data/workspace"
RUN_DIR = "/.sandfleet/run"
SANDBOXD = "/.sandfleet/sandboxd"
SOCKET = "s"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MIB = 1024 * 1024
#: Of the host's /etc only what programs need to start and nobody has to hide.
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl/certs")


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory or file seen at ``target``.

    ``source`` is a path, or an open descriptor: what was checked is then what is mounted, and the
    sandbox's user need not be able to walk the host's directories down to it.
    """

    source: str | int
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything the command line depends on.

    Attributes:
        bwrap: The program.
        command: What runs as process 1.
        root_links: The host's top-level symlinks such as ``/bin`` → ``usr/bin``.
        root_dirs: Top-level directories that are real ones, such as ``/usr``.
        binds: Further mounts, in order; later ones lie over earlier ones.
        files: Contents by descriptor, seen read-only at their path.
        env: The whole environment of process 1.
        info_fd: Where bwrap writes the child's pid.
        seccomp_fd: A compiled filter, or None.
        nested_userns: Leave further user namespaces possible (where bwrap cannot forbid them).
        tmp_bytes: Size of ``/tmp``; ``/run`` and ``/dev/shm`` get a quarter each.
    """

    bwrap: str
    command: tuple[str, ...]
    root_links: Mapping[str, str] = field(default_factory=dict)
    root_dirs: tuple[str, ...] = ("/usr",)
    binds: tuple[Bind, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    info_fd: int | None = None
    seccomp_fd: int | None = None
    nested_userns: bool = False
    tmp_bytes: int = 256 * _MIB


def bwrap_argv(layout: Layout) -> list[str]:
    """The argument vector that makes the sandbox."""
    argv = [layout.bwrap, "--unshare-all", "--unshare-user", "--as-pid-1", "--cap-drop", "ALL", "--new-session"]
    argv += ["--die-with-parent", "--hostname", "sandbox", "--clearenv"]
    if not layout.nested_userns:
        argv.append("--disable-userns")
    for name, value in layout.env.items():
        argv += ["--setenv", name, value]
    argv += _system(layout)
    for bind in layout.binds:
        argv += _bind(bind)
    for path, fd in layout.files.items():
        argv += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    # Last: mount points are made while these are still writable. Otherwise both would be memory without a bound.
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    if layout.info_fd is not None:
        argv += ["--info-fd", str(layout.info_fd)]
    if layout.seccomp_fd is not None:
        argv += ["--seccomp", str(layout.seccomp_fd)]
    return [*argv, "--", *layout.command]


def _system(layout: Layout) -> list[str]:
    argv: list[str] = []
    for path in layout.root_dirs:
        argv += ["--ro-bind", path, path]
    for path, target in layout.root_links.items():
        argv += ["--symlink", target, path]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    quarter = str(layout.tmp_bytes // 4)
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", quarter, "--perms", "1777", "--tmpfs", "/dev/shm"]
    argv += ["--size", str(layout.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    argv += ["--size", quarter, "--perms", "0755", "--tmpfs", "/run"]
    argv += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--symlink", "/run", "/var/run"]
    return [*argv, "--symlink", HOME, "/workspace"]


def _bind(bind: Bind) -> list[str]:
    option = "--ro-bind" if bind.read_only else "--bind"
    if isinstance(bind.source, int):
        option += "-fd"
    return [option, str(bind.source), bind.target]


def etc_files(uid: int, gid: int) -> dict[str, str]:
    """The made-up files of ``/etc``: one user, no names of the host's."""
    return {
        "/etc/passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:{uid}:{gid}:sandbox:{HOME}:/bin/sh\n",
        "/etc/group": f"root:x:0:\nsandbox:x:{gid}:\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def limited(argv: list[str], *, nofile: int, nproc: int | None, file_bytes: int | None) -> list[str]:
    """``argv`` under resource limits, hard and soft, that nothing in it can raise again.

    A shell sets them on itself and becomes the program: setting them from outside after the start
    would race with the program's first fork, and needs a capability that nodes often lack.

    Args:
        argv: What to run.
        nofile: Open files per process.
        nproc: Processes of the user, over all his sandboxes; None leaves it.
        file_bytes: Largest file; None leaves it.
    """
    rules = ["ulimit -c 0", f"ulimit -n {nofile}"]
    if nproc is not None:
        # bash and busybox say -u, dash says -p.
        rules.append(f"if (ulimit -u {nproc}) 2>/dev/null; then ulimit -u {nproc}; else ulimit -p {nproc}; fi")
    if file_bytes is not None:
        rules.append(f"ulimit -f {max(1, file_bytes // 512)}")
    return ["/bin/sh", "-c", " && ".join(rules) + ' && exec "$@"', "sh", *argv]


def staged(argv: list[str], *, stage: str, sources: Mapping[str, tuple[str, bool]], uid: int) -> list[str]:
    """``argv`` as another user who sees directories that lie where he could not walk to (below ``/root``, say).

    bwrap looks its sources up by path, as the sandbox's user. So root first mounts them under a
    tmpfs in a mount namespace of its own, and only then becomes that user. Needs CAP_SYS_ADMIN and
    util-linux.

    Args:
        argv: What to run in the end.
        stage: An existing empty directory everyone may enter.
        sources: Name below ``stage``: (path, whether it is a directory). Only root may write on the way to it.
        uid: Whom to become.
    """
    lines = ["set -e", f"mount -n -t tmpfs -o mode=0755,size=1m,nosuid,nodev sandfleet {quote(stage)}"]
    for name, (source, is_directory) in sources.items():
        target = quote(f"{stage}/{name}")
        lines.append(f"mkdir {target}" if is_directory else f": > {target}")
        lines.append(f"mount -n --bind {quote(source)} {target}")
    lines.append(f'exec setpriv --reuid {uid} --regid {uid} --clear-groups -- "$@"')
    return ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", "\n".join(lines), "sh", *argv]
