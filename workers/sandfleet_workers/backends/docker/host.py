"""The worker and its engine as neighbours: who sandboxes are on the host, and whether both see the same directories."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sandfleet.errors import ConfigError, StartFailed
from sandfleet_workers.backends.docker.engine import EngineFacts
from sandfleet_workers.backends.docker.hostconfig import RUN_DIR, Bind
from sandfleet_workers.backends.docker.program import Probe

__all__ = ["check_paths", "in_a_container", "may_see_others", "sandbox_user"]

_UID = 10001
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_MARKER = "marker"
_PROBE_S = 60.0


def sandbox_user(wanted: str, facts: EngineFacts) -> tuple[str, int | None]:
    """Who sandboxes are: ``uid:gid`` inside, and the uid on the host to give their directories to (None: the worker's
    own, and there is nobody else to give them to).

    Args:
        wanted: ``container_user`` of the settings.
        facts: Of the engine.

    Raises:
        ConfigError: This worker cannot give directories to that user.
    """
    worker = os.geteuid()
    if facts.rootless:
        if worker == 0:
            raise ConfigError(
                "the Docker engine is rootless and this worker is root; run the worker as the engine's user",
                key="sandbox.docker_host",
            )
        return "0:0", None  # root in a rootless engine's containers is the engine's user, who is the worker's too
    if worker == 0:
        uid, _, gid = (wanted or str(_UID)).partition(":")
        return f"{uid}:{gid or uid}", facts.uid_base + int(uid)
    if facts.uid_base:
        raise ConfigError(
            "the Docker engine maps users (userns-remap), so the worker must be root to give sandboxes their "
            "directories",
            key="sandbox.docker_host",
        )
    if wanted and wanted.partition(":")[0] != str(worker):
        raise ConfigError(
            f"sandbox.container_user {wanted} needs a worker that is root; this one is {worker}, and so are its "
            "sandboxes",
            key="sandbox.container_user",
        )
    return wanted if ":" in wanted else f"{worker}:{os.getegid()}", None


def in_a_container() -> bool:
    """Whether this process seems to run in a container itself."""
    return any(os.path.exists(mark) for mark in _CONTAINER_MARKS)


def may_see_others(address: str) -> bool:
    """Whether the engine may see other directories than this process does.

    Args:
        address: Of the engine.
    """
    scheme, _, path = address.rpartition("unix://")
    if scheme not in ("", "http+") or not path:
        return True
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("/" + path.lstrip("/"))
            pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if pid > 0:
            return os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except OSError:
        pass  # somebody else's process cannot be looked at by everybody
    return in_a_container()


def check_paths(
    data_root: Path, run_root: Path, *, image_id: str, host_uid: int | None, run: Callable[[Probe, float], int | None]
) -> None:
    """Whether the engine finds the worker's directories under the names they have here. Starts one container.

    Args:
        data_root: Where threads' data lies.
        run_root: Where sockets lie.
        image_id: An image with a shell.
        host_uid: Who sandboxes are on the host.
        run: Runs a probe's container and returns its exit code.

    Raises:
        ConfigError: It finds something else, or nothing.
    """
    with _marked(data_root, None) as (data, marker), _marked(run_root, host_uid) as (answer, _):
        binds = (Bind(str(data), "/.sandfleet/data"), Bind(str(answer), RUN_DIR, read_only=False))
        script = f"cat /.sandfleet/data/{_MARKER} > {RUN_DIR}/answer"
        try:
            code = run(Probe(image_id, ("/bin/sh", "-c", script), binds), _PROBE_S)
        except StartFailed as exc:
            if exc.facts.get("reason") != "bad_mount":
                raise
            raise _elsewhere(data_root, run_root) from exc
        try:
            seen = (answer / "answer").read_text()[:100]
        except OSError:
            seen = ""
    if code != 0 or seen != marker:
        raise _elsewhere(data_root, run_root)


def _elsewhere(data_root: Path, run_root: Path) -> ConfigError:
    return ConfigError(
        f"the Docker engine does not see this worker's directories {data_root} and {run_root}; mount both from the "
        f"engine's host at the very same paths (-v {data_root}:{data_root} -v {run_root}:{run_root})",
        key="data_root",
    )


@contextmanager
def _marked(root: Path, owner: int | None) -> Iterator[tuple[Path, str]]:
    """A directory below ``root`` with a text in it that nobody else knows."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="look.", dir=root))
    except OSError as exc:
        raise ConfigError(f"{root} cannot be written: {exc.strerror}", key="data_root") from exc
    try:
        marker = secrets.token_hex(16)
        (directory / _MARKER).write_text(marker)
        if owner is not None:
            os.chown(directory, owner, owner)
        directory.chmod(0o755)
        yield directory, marker
    finally:
        shutil.rmtree(directory, ignore_errors=True)
