"""What Docker sandboxes need of a machine, looked at for `sandfleet doctor` and the demo. Nothing is changed."""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.auth
import docker.errors

from sandfleet.backends import Finding
from sandfleet.config import Settings
from sandfleet.errors import StartFailed
from sandfleet.node_locks import is_held, lock_of
from sandfleet_workers.backends.docker.engine import TROUBLE, Engine
from sandfleet_workers.backends.docker.engine_findings import judged
from sandfleet_workers.backends.docker.failures import how_to_get
from sandfleet_workers.backends.docker.host import in_a_container, may_see_others
from sandfleet_workers.backends.docker.hostconfig import LABEL_DATA_ROOT, LABEL_NODE
from sandfleet_workers.quota import quota_problem

__all__ = ["access", "examine", "host_path"]

#: Also how long a registry may take.
_ANSWER_S = 15
_TOLD_CHARS = 200
_MIB = 1024**2


def examine(settings: Settings, image: str) -> list[Finding]:
    """Every finding, in the order a person would go through them; only the first when no engine answers.

    Args:
        image: What sandboxes are made of with these settings.
    """
    try:
        engine = Engine(settings.container.docker_host, timeout_s=_ANSWER_S)
    except StartFailed as exc:
        return [Finding("docker engine", "fail", "away", exc.message, ready=False)]
    try:
        with engine.calls("tell of itself"):
            version, info = engine.api.version(), engine.api.info()
        runtime = settings.container.runtime
        found = judged(version, info, runtime=runtime)
        found += _runtime_itself(info, runtime) if runtime and engine.is_local else []
        found.append(_image(engine, settings, image))
        found.append(access(engine.address, is_local=engine.is_local))
        found += _disk(info, settings) if engine.is_local else []
        found += _left_behind(engine) if engine.is_local and not may_see_others(engine.address) else []
        found.append(_thread_limits(settings))
        found += _same_paths(engine, settings) if in_a_container() else []
        return found
    except StartFailed as exc:
        return [Finding("docker engine", "fail", "it does not do as asked", exc.message, ready=False)]
    finally:
        engine.close()


# --- the image ---------------------------------------------------------------------------------


def _image(engine: Engine, settings: Settings, image: str) -> Finding:
    policy = settings.container.image_pull_policy
    size = ""
    with engine.calls("look for the image", image=image), contextlib.suppress(docker.errors.ImageNotFound):
        told = engine.api.inspect_image(image)  # type: ignore[no-untyped-call]
        size = f"{image}, {int(told.get('Size') or 0) / _MIB:.0f} MiB"
    if size and policy != "Always":
        return Finding("docker image", "ok", size)
    pull = how_to_get(image)
    if policy == "Never":
        return Finding("docker image", "fail", f"no {image}, and image_pull_policy is Never", pull, ready=False)
    problem = _not_to_be_had(engine, settings, image)
    if problem and size:
        advice = f"image_pull_policy Always needs the registry at each start: reach it, or say IfNotPresent ({problem})"
        return Finding("docker image", "fail", size, advice, ready=False)
    if problem:
        advice = f"{pull}; the registry's credentials are taken from `sandbox.registry_config` ({problem})"
        return Finding("docker image", "fail", f"no {image}, nor can it be pulled", advice, ready=False)
    if size:
        return Finding("docker image", "ok", f"{size}, pulled at each start")
    return Finding(
        "docker image", "warn", f"no {image} yet, its registry has it", f"the first sandbox waits for it: {pull}", False
    )


def _not_to_be_had(engine: Engine, settings: Settings, image: str) -> str:
    """Why the registry does not give the image; empty when it does."""
    config = settings.container.registry_config
    registry, _ = docker.auth.resolve_repository_name(image)
    try:
        auth: Any = None
        if config is not None:
            auth = docker.auth.resolve_authconfig(docker.auth.load_config(str(config)), registry) or {}
        engine.api.inspect_distribution(image, auth_config=auth)  # type: ignore[no-untyped-call]
    except TROUBLE as exc:
        told = " ".join(str(getattr(exc, "explanation", None) or exc).split())
        return told if len(told) <= _TOLD_CHARS else told[: _TOLD_CHARS - 1] + "…"
    return ""


# --- this machine ------------------------------------------------------------------------------


def _runtime_itself(info: dict[str, Any], runtime: str) -> list[Finding]:
    """What a runtime other than the engine's own says of its version, where it can be asked."""
    path = str(((info.get("Runtimes") or {}).get(runtime) or {}).get("path") or "")
    program = shutil.which(path) if path else None
    if program is None or runtime == info.get("DefaultRuntime"):
        return []
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.SubprocessError) as exc:
        return [Finding(f"docker {runtime}", "fail", f"{program} does not run: {exc}", f"install {runtime} anew")]
    lines = told.stdout.splitlines()
    return [Finding(f"docker {runtime}", "ok", lines[0].strip() if lines else program)]


def access(address: str, *, is_local: bool) -> Finding:
    """Who may talk to the engine there: they are root on its machine."""
    name = "docker access"
    if not is_local:
        if address.startswith("ssh://") or os.environ.get("DOCKER_TLS_VERIFY"):
            return Finding(name, "ok", "by ssh" if address.startswith("ssh://") else "by TLS")
        advice = "whoever reaches that address is root on the engine's machine: use its socket, ssh or TLS"
        return Finding(name, "warn", f"{address.partition('://')[0]} without TLS", advice)
    path = Path("/" + address.rpartition("://")[2].lstrip("/"))
    try:
        told = path.stat()
    except OSError as exc:
        return Finding(name, "warn", f"{path}: {exc.strerror}", "look who may use it: they are as good as root")
    if told.st_mode & stat.S_IWOTH:
        advice = f"every user and every program of this machine is root by it: chmod 660 {path}"
        return Finding(name, "warn", f"{path} may be used by everybody", advice)
    members = sorted(_members(told.st_gid)) if told.st_mode & stat.S_IWGRP else []
    also = f" and {', '.join(members)}: as good as root" if members else ""
    return Finding(name, "ok", f"{path}, for {_owner(told.st_uid)}{also}")


def _left_behind(engine: Engine) -> Iterator[Finding]:
    """Containers whose node does not run: it was killed, maybe with its whole fleet, and nobody came back to it."""
    with engine.calls("list containers"):
        there = engine.api.containers(all=True, filters={"label": [LABEL_NODE, LABEL_DATA_ROOT]})
    names = [
        str(each["Names"][0]).lstrip("/")
        for each in there
        if not is_held(lock_of(Path(each["Labels"][LABEL_DATA_ROOT]), each["Labels"][LABEL_NODE]))
    ]
    if names:
        advice = f"the next start of their nodes removes them; if none will come: docker rm --force {' '.join(names)}"
        yield Finding("docker leftovers", "warn", f"{len(names)} of nodes that do not run", advice)


def _thread_limits(settings: Settings) -> Finding:
    """Whether one thread can be kept from filling the disk; of the nearest directory where the root is not made yet."""
    root = settings.data_root
    while not root.exists() and root != root.parent:
        root = root.parent
    problem = quota_problem(root)
    wanted = settings.container.disk_bytes or settings.container.disk_inodes
    if problem:
        what = "disk_bytes and disk_inodes do not hold" if wanted else "none: one thread may fill the disk"
        return Finding("thread limits", "fail" if wanted else "warn", what, problem)
    if not wanted:
        advice = "the data root can limit each thread: set sandbox.disk_bytes and sandbox.disk_inodes"
        return Finding("thread limits", "warn", "none set: one thread may fill the disk", advice)
    return Finding("thread limits", "ok", "disk_bytes and disk_inodes are kept by the file system")


def _same_paths(engine: Engine, settings: Settings) -> Iterator[Finding]:
    """A worker in a container names its directories to an engine outside. A node tries it at its start."""
    try:
        mine = engine.api.inspect_container(_this_container())
    except TROUBLE:
        advice = "the node tries at its start whether the engine has its directories under the same paths"
        yield Finding("docker paths", "warn", "this runs in a container that the engine does not know", advice)
        return
    for name, path in (("data root", settings.data_root), ("run root", settings.run_root)):
        outside = host_path(mine.get("Mounts") or (), path)
        if outside == path:
            yield Finding(f"docker {name}", "ok", f"{path} here and on the engine's host")
        else:
            there = f"{outside} on the engine's host" if outside else "only in this container"
            advice = f"mount it from the engine's host at the very same path: -v {path}:{path}"
            yield Finding(f"docker {name}", "fail", f"{path} here, {there}", advice, ready=False)


def _this_container() -> str:
    """This container's id as its engine's files show it; else its host name, which is the id by default."""
    found = re.search(r"containers/([0-9a-f]{64})/", Path("/proc/self/mountinfo").read_text())
    return found[1] if found else socket.gethostname()


def host_path(mounts: Iterable[Mapping[str, Any]], path: Path) -> Path | None:
    """Where a path of a container lies on the engine's host, by the container's mounts; None where it does not."""
    fitting = [mount for mount in mounts if path.is_relative_to(str(mount.get("Destination") or "/"))]
    if not fitting:
        return None
    nearest = max(fitting, key=lambda mount: len(str(mount.get("Destination") or "")))
    source = nearest.get("Source")
    return Path(str(source)) / path.relative_to(str(nearest["Destination"])) if source else None


def _owner(uid: int) -> str:
    return "root" if uid == 0 else f"uid {uid}"


def _members(gid: int) -> list[str]:
    try:
        return list(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return []


def _disk(info: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    root = Path(str(info.get("DockerRootDir") or "/var/lib/docker"))
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return  # a worker in a container does not see it
    found = f"{root}, {free / 1024**3:.1f} GiB free"
    if free < settings.min_free_bytes:
        yield Finding("docker disk", "warn", found, "free some space there: `docker system df` tells what takes it")
    else:
        yield Finding("docker disk", "ok", found)
