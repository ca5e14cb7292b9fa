"""What is left when everything was told to end."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from sandfleet import SandboxProvider
from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from tests.chaos.torture.world import World
from tests.services import SESSION_VARIABLE, wait_until

__all__ = ["Leaks", "find_leaks"]

#: Neighbours look for leftovers once a minute.
_LEFTOVERS_S = 100.0
#: Pooled connections to Redis and the engine that a node may open when it has more to do than at its start.
_POOLED_FDS = 30
#: Keys that need no expiry: of Celery, which keeps its bindings, and the schedulers' queue, which they empty.
_NEED_NONE = ("_kombu.", "sandfleet.scheduler")


@dataclass
class Leaks:
    """Each entry names one thing that should not be there."""

    containers: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    fds: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(found) for name, found in vars(self).items()}


def find_leaks(world: World) -> Leaks:
    """Destroy all sandboxes through the product, tell the nodes to end, and list what is still there after each.

    Ends all processes of the world but Redis.
    """
    leaks = Leaks()
    _destroy_all(world, leaks)
    _wait(lambda: len(world.containers()) <= _places(world))
    extra = len(world.containers()) - _places(world)
    if extra > 0:
        leaks.containers.append(f"{extra} of {world.containers()} are in nobody's places while the nodes run")
    for role in world.nodes.values():
        if role.process is not None and role.running:
            leaks.fds += _fds_left(role.name, role.process.pid, role.fds, world.directory)
    world.end_nodes()
    leaks.containers += world.containers()
    for root in world.data_roots:
        for kind in ("slots", "sandboxes"):
            leaks.slots += [str(path) for path in root.glob(f"nodes/*/{kind}/*")]
    leaks.slots += [f"{view.node_id} counts {view.places} places" for view in world.store.nodes() if view.places]
    for role in world.schedulers.values():
        if role.process is not None:
            role.process.end()
    _wait(lambda: not _processes(world), 10.0)
    leaks.processes += _processes(world)
    leaks.keys += _keys(world)
    return leaks


def _wait(fact: object, deadline_s: float = _LEFTOVERS_S) -> None:
    with contextlib.suppress(AssertionError):
        wait_until(fact, deadline_s)  # type: ignore[arg-type]


def _places(world: World) -> int:
    return sum(view.places for view in world.store.nodes())


def _destroy_all(world: World, leaks: Leaks) -> None:
    left: list[str] = []
    with SandboxProvider(Settings.load({}, redis_url=world.redis.url, backend=world.options.backend)) as provider:

        def gone() -> bool:
            left[:] = [info.sandbox_id for info in provider.list() if info.state != "lost"]
            for sandbox_id in left:
                with contextlib.suppress(SandfleetError):
                    provider.destroy(sandbox_id)
            return not left

        _wait(gone, 60.0)
    leaks.slots += [f"sandbox {sandbox_id} cannot be destroyed" for sandbox_id in left]


def _fds_left(name: str, pid: int, at_start: dict[int, int], directory: Path) -> list[str]:
    """Descriptors into threads' data or of what was removed, and many more than there were when the node was ready."""
    folder = Path(f"/proc/{pid}/fd")
    targets = []
    for entry in os.listdir(folder):
        with contextlib.suppress(OSError):
            targets.append(str((folder / entry).readlink()))
    ours = [target for target in targets if target.startswith(str(directory))]
    found = [f"{name}: {target}" for target in ours if "/threads/" in target or target.endswith("(deleted)")]
    ready = at_start.get(pid, len(targets))
    if len(targets) > ready + _POOLED_FDS:
        found.append(f"{name}: {len(targets)} instead of {ready}")
    return found


def _processes(world: World) -> list[str]:
    """Processes of the world, but for ours and Redis."""
    keep = {os.getpid(), world.redis.pid}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in keep or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            if process.environ().get(SESSION_VARIABLE) == world.session or str(world.directory) in command:
                found.append(f"{process.pid} {command[:200]}")
    return found


def _keys(world: World) -> list[str]:
    """Keys without an expiry that nobody owns any more."""
    with redis.Redis.from_url(world.redis.url, decode_responses=True) as broker:
        names = [str(name) for name in broker.scan_iter(count=1000)]
        stay = [name for name in names if broker.ttl(name) == -1]
    return sorted(name for name in stay if not name.startswith(_NEED_NONE))
