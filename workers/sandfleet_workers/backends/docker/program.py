"""What runs as process 1 of a container: sandboxd, byte-compiled by the image's own Python, or a shell that waits.

The node keeps a copy of sandboxd of its own, which containers see read-only: an upgrade of the worker does not change
it under them. What an image's Python compiled is run in containers of that image only.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sandfleet.errors import StartFailed
from sandfleet_workers import sandboxd
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.hostconfig import RUN_DIR, SANDBOXD, Bind

__all__ = ["Probe", "Program", "Programs", "prepared_run_dir"]

log = logging.getLogger("sandfleet.node")

_SOCKET = "s"
_CONFIG = "config"
_PROBE_S = 60.0
_CODE_BYTES = 8 * 1024 * 1024
_PATH = re.compile(r"/[A-Za-z0-9_./+-]{1,200}")
_NO_PYTHON = 3
_CHECK = "import sys, json, ctypes, hashlib, hmac, select, socket; sys.exit(sys.version_info < (3, 8))"
#: Leaves the path of a Python that can run sandboxd, and sandboxd compiled by it.
_SCRIPT = f"""
for python in /usr/bin/python3 /usr/local/bin/python3 "$(command -v python3)"; do
    [ -n "$python" ] && "$python" -I -S -B -c "$1" 2>/dev/null || continue
    printf %s "$python" > {RUN_DIR}/python
    "$python" -I -S -B -c "$2" < {SANDBOXD}.py > {RUN_DIR}/code && exit 0
    rm -f {RUN_DIR}/code
    exit 0
done
exit {_NO_PYTHON}
"""
#: For images without Python; the engine's init reaps. The shell itself would not die of TERM as process 1.
_WAIT = 'trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done'

#: (image id, digest of sandboxd) → (path of its Python, byte code): both ids say what is in them, wherever it lies.
_compiled: dict[tuple[str, str], tuple[str, bytes]] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """How sandboxes of an image are run.

    Attributes:
        python: The image's interpreter; empty when it has none, and then operations go through ``docker exec``.
        binds: What the container must see for it.
    """

    python: str = ""
    binds: tuple[Bind, ...] = ()

    def entrypoint(self, port: int | None) -> tuple[str, ...]:
        """Process 1, listening at the socket in the run directory, or at ``port``."""
        if not self.python:
            return ("/bin/sh", "-c", _WAIT)
        listen = ("--socket", f"{RUN_DIR}/{_SOCKET}") if port is None else ("--tcp", f"0.0.0.0:{port}")
        return (self.python, "-I", "-S", "-B", self.binds[0].target, *listen, "--config", f"{RUN_DIR}/{_CONFIG}")


@dataclass(frozen=True, slots=True)
class Probe:
    """A container that runs a shell script once.

    Attributes:
        image: Its image's id.
        argv: What runs.
        binds: What it sees.
    """

    image: str
    argv: tuple[str, ...]
    binds: tuple[Bind, ...]


class Programs:
    """The programs of a node's images. Thread-safe.

    Args:
        engine: Where the images are.
        directory: Of the node's own, for the copies.
        host_uid: Who sandboxes are on the host; None where that is the worker itself.
        run: Runs a probe's container and returns its exit code.
        labels: Of the node's containers: copies that one of them has mounted stay.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        host_uid: int | None,
        run: Callable[[Probe, float], int | None],
        labels: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._host_uid = host_uid
        self._run = run
        self._directory = directory / sandboxd.digest()[:16]
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._known: dict[str, Program] = {}
        self._remove_unused(directory, labels)

    def of(self, image_id: str, image: str, run_root: Path) -> Program:
        """How to run sandboxes of that image; looked at once.

        Args:
            image_id: What is looked at.
            image: Its name, for the log.
            run_root: Where run directories are made.

        Raises:
            StartFailed: A container of the image does not start, or cannot be looked at.
        """
        with self._lock:
            lock = self._locks.setdefault(image_id, threading.Lock())
        with lock:
            if image_id not in self._known:
                self._known[image_id] = self._look(image_id, image, run_root)
            return self._known[image_id]

    def _remove_unused(self, directory: Path, labels: Mapping[str, str]) -> None:
        """Copies of earlier versions go, once no container of an earlier run has them mounted."""
        others = [path for path in directory.iterdir() if path != self._directory] if directory.is_dir() else []
        if not others:
            return
        try:
            mounts = [each.get("Mounts") or () for each in self._engine.labelled(labels)]
        except StartFailed as exc:  # they are looked at by the node's next run
            log.warning("sandboxd.copies_kept", extra={"error": str(exc)})
            return
        used = {Path(str(mount.get("Source", ""))).parent.name for several in mounts for mount in several}
        for path in others:
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)

    def _look(self, image_id: str, image: str, run_root: Path) -> Program:
        source = self._pinned("sandboxd.py", sandboxd.PATH.read_bytes())
        known = (image_id, sandboxd.digest())
        if known not in _compiled:
            _compiled[known] = self._compile(image_id, image, source, run_root)
        python, code = _compiled[known]
        if not python:
            log.warning(
                "image.without_python",
                extra={"image": image, "effect": "every operation is a docker exec, some fifty times slower"},
            )
            return Program()
        if code:
            name = f"{image_id.rpartition(':')[2][:32]}.pyc"
            return Program(python, (Bind(str(self._pinned(name, code)), f"{SANDBOXD}.pyc"),))
        log.warning("sandboxd.not_compiled", extra={"image": image, "python": python})
        return Program(python, (Bind(str(source), f"{SANDBOXD}.py"),))

    def _compile(self, image_id: str, image: str, source: Path, run_root: Path) -> tuple[str, bytes]:
        """The image's Python, if any, and what that made of sandboxd, if it could."""
        with ExitStack() as undo:
            run_dir = run_root / f"probe.{secrets.token_hex(8)}"
            undo.callback(local_dirs.remove_tree, run_dir)
            run_fd = prepared_run_dir(run_dir, self._host_uid)
            undo.callback(os.close, run_fd)
            binds = (Bind(str(source), f"{SANDBOXD}.py"), Bind(str(run_dir), RUN_DIR, read_only=False))
            argv = ("/bin/sh", "-c", _SCRIPT, "sh", _CHECK, sandboxd.COMPILE)
            ended = self._run(Probe(image_id, argv, binds), _PROBE_S)
            if ended == _NO_PYTHON:
                return "", b""
            python = _read(run_fd, "python", 1000).decode("utf-8", "replace")
            code = _read(run_fd, "code", _CODE_BYTES)
        if ended != 0 or not _PATH.fullmatch(python):
            raise StartFailed(
                f"a look at the image {image} ended with {ended}; it needs a /bin/sh, and a python3 for speed",
                reason="image_unusable",
                image=image,
            )
        return python, code

    def _pinned(self, name: str, content: bytes) -> Path:
        """A file of the node's own with that content, that nobody writes any more."""
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            if path.exists() and path.read_bytes() == content:
                return path
            fd, fresh = tempfile.mkstemp(dir=self._directory)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), 0o444)
            os.rename(fresh, path)
        except OSError as exc:
            reason = "disk" if exc.errno in (28, 122) else "data_unusable"
            raise StartFailed(f"sandboxd cannot be copied to {path}: {exc.strerror}", reason=reason) from exc
        return path


def prepared_run_dir(path: Path, host_uid: int | None) -> int:
    """An empty directory that the container may write, opened.

    Raises:
        StartFailed: It cannot be made.
    """
    try:
        return local_dirs.prepare_run_dir(path, host_uid)
    except OSError as exc:
        reason = "disk" if exc.errno in (28, 122) else "run_dir"
        raise StartFailed(f"the directory {path} cannot be made: {exc.strerror}", reason=reason) from exc


def _read(directory: int, name: str, most: int) -> bytes:
    """What a container left in a file, or nothing: it may have left anything there."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > most:
            return b""
        return file.read(most)
